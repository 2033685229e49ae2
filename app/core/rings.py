"""Ringing: numbers are taken in Postgres and committed, then the bells are pushed."""

import logging

from app.core.context import Context
from app.core.errors import BellsUnavailable
from app.core.model import Rings, bells_wanted, is_trace, queue_for
from app.core.store import fleet, jobs

log = logging.getLogger(__name__)


def ring(ctx: Context, job_id: str, *, bells: int, by: str) -> int:
    """Ring bells for a job; return how many, 0 where it is final or Redis is away."""
    with ctx.database.transaction() as tx:
        rings = jobs.take_rings(tx, job_id, bells)
        alive = fleet.alive(tx)
    return push(ctx, rings, alive, by=by) if rings else 0


def wanted(ctx: Context, items: int, alive: fleet.Alive, project: str) -> int:
    """Return how many bells so many items are worth: no more than there are workers."""
    workers = alive.workers.get(queue_for(project, frozenset(alive.workers)), 0)
    settings = ctx.settings
    most = min(settings.queue_bells_per_job, max(1, workers))
    return bells_wanted(items, items_per_bell=settings.queue_batch_size, most=most)


def push(ctx: Context, rings: Rings, alive: fleet.Alive, *, by: str) -> int:
    """Push bells whose numbers are committed; never raises: the sweeper rings what is lost."""
    queue = ctx.queue(rings.job_id, rings.project, frozenset(alive.workers))
    facts = {"job_id": rings.job_id, "queue": queue, "reason": by}
    seconds = ctx.trace_bell_seconds if is_trace(rings.job_id) else ctx.bell_seconds
    try:
        ctx.bells.ring(
            rings,
            queue=queue,
            timeout_seconds=seconds,
            at_front=rings.priority > 0,
        )
    except BellsUnavailable as exc:
        log.warning("bell not rung: %s", exc, extra={"event": "ring_failed", **facts})
        return 0
    log.debug("bell rung", extra={"event": "bell_rung", "items": rings.bells, **facts})
    return rings.bells
