"""Ringing: numbers are taken in Postgres and committed, then the bells are pushed."""

import logging
from collections.abc import Mapping, Sequence
from contextlib import suppress

from app.core.bells import BELL, job_of
from app.core.context import Context
from app.core.errors import BellsUnavailable, StoreUnavailable
from app.core.model import Rings, bells_wanted, is_trace, place_in_line, queue_for
from app.core.store import fleet, jobs

log = logging.getLogger(__name__)

LOOK_BELLS = 200
"""How far into a queue a new bell looks for its turn; behind that it goes to the end."""


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
    if rings.priority == 0:  # what is lower stays at the end
        with suppress(BellsUnavailable, StoreUnavailable):  # then they wait at the end
            _line_up(ctx, rings, queue)
    log.debug("bell rung", extra={"event": "bell_rung", "items": rings.bells, **facts})
    return rings.bells


def _line_up(ctx: Context, rings: Rings, queue: str) -> None:
    """Move new bells forward to their client's turn, so that nobody waits for all jobs of another.

    Nothing breaks where the line changes meanwhile: any order is right, this one is fair.
    """
    new = [
        f"{rings.job_id}-{number}" for number in range(rings.last - rings.bells + 1, rings.last + 1)
    ]
    line = [bell for bell in ctx.bells.first_waiting(queue, limit=LOOK_BELLS) if bell not in new]
    if not line:
        return
    with ctx.database.transaction() as tx:
        named = {job_of(bell) for bell in line if BELL.fullmatch(bell)}  # anything may stand there
        owners = jobs.owners(tx, named | {rings.job_id})
    low = _what_may_be_passed(line, owners)
    line = line[: len(line) - len(low)]
    for bell in new:
        behind = place_in_line(
            [_client(owners, each) for each in line], owners[rings.job_id].client
        )
        if behind is not None:
            ctx.bells.move(queue, bell, other=line[behind])
            line.insert(behind + 1, bell)
        elif low:
            ctx.bells.move(queue, bell, other=low[0], is_behind=False)
            line.append(bell)
        else:
            return


def _what_may_be_passed(line: Sequence[str], owners: Mapping[str, jobs.Owner]) -> list[str]:
    """Return the bells at the end of a line that have time; not a first one that is overdue."""
    low: list[str] = []
    for place, bell in reversed([*enumerate(line)]):
        owner = owners.get(job_of(bell))
        if owner is None or not owner.is_low or (place == 0 and owner.is_overdue):
            break
        low.insert(0, bell)
    return low


def _client(owners: Mapping[str, jobs.Owner], bell: str) -> str:
    owner = owners.get(job_of(bell))
    return owner.client if owner else bell
