"""Deletion: the vectors of rows go from every sink, and what was still to be embedded stops."""

import logging
from collections.abc import Sequence
from typing import Any

from app.core.context import Context
from app.core.errors import FAULTS_SHOWN, Fault, InvalidRequest
from app.core.model import Caller, Target
from app.core.ports import PrimarySink
from app.core.requests import Deletion, deletion_faults, is_open_to
from app.core.store import items, targets
from app.core.store.database import Tx, take_time

log = logging.getLogger(__name__)


def delete(ctx: Context, caller: Caller, sink: PrimarySink, asked: Deletion) -> dict[str, Any]:
    """Clear the vectors of rows in every version, and let the followers do the same.

    Open items are cancelled and failed ones left; the rows themselves are their owner's. Returns
    how many ids had a vector, how many items were cancelled, and how many ids had neither. Raises
    InvalidRequest naming what is wrong.
    """
    with ctx.database.transaction() as tx:
        versions = _versions(tx, caller, asked)
        ids = [str(each) for each in asked.target_ids]
        take_time(tx)
        withdrawn = items.withdraw(tx, asked.target_table, ids, keeps_rows=True)
        cleared = {each for target in versions for each in sink.clear(tx, target, ids)}
    deleted = max(len(cleared), withdrawn.deleted)
    facts = {"event": "items_deleted", "client": caller.client, "items": deleted}
    log.info("vectors deleted", extra=facts)
    missing = max(0, len(set(ids)) - deleted - withdrawn.cancelled)
    return {"deleted": deleted, "cancelled": withdrawn.cancelled, "missing": missing}


def _versions(tx: Tx, caller: Caller, asked: Deletion) -> Sequence[Target]:
    found = [each for each in targets.registered(tx) if each.target_table == asked.target_table]
    if not found or not all(is_open_to(each, caller.client) for each in found):
        fault = Fault("target_unknown", "is not a registered target", "target_table")
        raise InvalidRequest(f"target_table: {fault.message}", faults=[fault])
    faults = deletion_faults(asked, found[0])
    if faults:
        message = f"{len(faults)} of {len(asked.target_ids)} ids are invalid; nothing was deleted"
        raise InvalidRequest(message, faults=faults[:FAULTS_SHOWN])
    return found
