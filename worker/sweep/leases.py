"""Leases that ran out: items and segments go back, the attempt spent, the holder named."""

import logging
from collections import Counter

from app.core.context import Context
from app.core.store import items, traces

log = logging.getLogger(__name__)


def run_once(ctx: Context) -> Counter[str]:
    """End every lease that ran out; return how many items and segments were recovered."""
    counts: Counter[str] = Counter()
    while True:
        with ctx.database.transaction() as tx:
            recovered = items.recover_expired(tx)
        for holder, number in recovered.items():
            facts = {"event": "lease_recovered", "bell": holder, "items": number}
            log.warning("leases ran out; the items go back", extra=facts)
        block = sum(recovered.values())
        counts["recovered"] += block
        if block < items.RECOVER_BLOCK:
            break
    counts["segments"] = _segments(ctx)
    return +counts


def _segments(ctx: Context) -> int:
    number = 0
    while True:
        with ctx.database.transaction() as tx:
            holder = traces.recover_expired(tx)
        if holder is None:
            return number
        number += 1
        facts = {"event": "lease_recovered", "bell": holder, "items": 1}
        log.warning("the lease of a segment ran out; it goes back", extra=facts)
