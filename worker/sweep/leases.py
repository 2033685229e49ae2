"""Leases that ran out: their items go back, the attempt spent, the holder named."""

import logging
from collections import Counter

from app.core.context import Context
from app.core.store import items

log = logging.getLogger(__name__)


def run_once(ctx: Context) -> Counter[str]:
    """End every lease that ran out; return how many items were recovered."""
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
            return +counts
