"""Old rows go in small blocks, so that nothing waits long for a lock."""

from collections import Counter
from collections.abc import Callable

from app.core.context import Context
from app.core.store import fleet, items, jobs, vectors
from app.core.store.database import Tx, take_time

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


def would_go(ctx: Context, *, failed_days: int | None) -> Counter[str]:
    """Count what `run_once` would delete now, and `forget_failed`; delete nothing."""
    settings = ctx.settings
    counts: Counter[str] = Counter()
    with ctx.database.transaction() as tx:
        take_time(tx)
        counts["items"] = items.old(tx, days=settings.cleanup_done_days)
        counts["vectors"] = vectors.old(tx, followers=settings.followers)
        counts["jobs"] = jobs.old(tx, days=settings.cleanup_job_days)
        counts["keys"] = jobs.old_keys(tx)
        counts["slices"] = fleet.old(tx)
        if failed_days is not None:
            counts["failed_items"] = items.old_failed(tx, days=failed_days)
    return +counts


def forget_failed(ctx: Context, *, days: int) -> int:
    """Delete failed items that nobody has seen to for so long, and their attempts; return how many.

    Only where somebody asks. Their jobs stay, with fewer items to show than they have counted.
    """
    return _blocks(ctx, lambda tx: items.prune_failed(tx, days=days, limit=BLOCK))


def _blocks(ctx: Context, prune: Callable[[Tx], int]) -> int:
    total = 0
    while True:
        with ctx.database.transaction() as tx:
            deleted = prune(tx)
        total += deleted
        if not deleted:
            return total
