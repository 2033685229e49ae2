"""Old rows go in small blocks, so that nothing waits long for a lock."""

from collections import Counter
from collections.abc import Callable

from app.core.context import Context
from app.core.store import fleet, items, jobs, vectors
from app.core.store.database import Tx

BLOCK = 1000


def run_once(ctx: Context) -> Counter[str]:
    """Delete finished items, jobs and keys that are past their time; return how many of each."""
    settings = ctx.settings
    counts: Counter[str] = Counter()
    counts["items"] = _blocks(
        ctx, lambda tx: items.prune(tx, days=settings.cleanup_done_days, limit=BLOCK)
    )
    counts["vectors"] = _blocks(
        ctx, lambda tx: vectors.prune(tx, followers=settings.followers, limit=BLOCK)
    )
    counts["jobs"] = _blocks(
        ctx, lambda tx: jobs.prune(tx, days=settings.cleanup_job_days, limit=BLOCK // 10)
    )
    counts["keys"] = _blocks(ctx, lambda tx: jobs.prune_keys(tx, limit=BLOCK))
    counts["slices"] = _blocks(ctx, lambda tx: fleet.prune(tx, limit=BLOCK))
    return +counts


def _blocks(ctx: Context, prune: Callable[[Tx], int]) -> int:
    total = 0
    while True:
        with ctx.database.transaction() as tx:
            deleted = prune(tx)
        total += deleted
        if not deleted:
            return total
