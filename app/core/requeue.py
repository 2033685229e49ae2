"""A person's second chance: requeue what failed of a job; and its mirror, cancel."""

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from app.core import rings, status, trace_result
from app.core.context import Context
from app.core.errors import BellsUnavailable, JobNotFound, NothingToRequeue, StoreUnavailable
from app.core.model import Caller, Job, JobState, Rings, is_trace
from app.core.store import clients, fleet, items, jobs, traces, vectors
from app.core.store.database import Tx

log = logging.getLogger(__name__)

REDIS_AWAY = "Redis, where the vectors of the result are, cannot answer now"


@dataclass(frozen=True, slots=True)
class Why:
    """Through which door somebody asks, and the reason given."""

    via: str
    reason: str | None = None


def requeue(ctx: Context, caller: Caller, job_id: str, why: Why) -> dict[str, Any]:
    """Give what failed of a job another chance, and ring: items a new allowance, segments a read.

    The API, the command line and rq-dashboard's button all come here. Raises JobNotFound and
    NothingToRequeue; of two at the same time one succeeds.
    """
    revive = _revive_segments if is_trace(job_id) else _revive_items
    revived = revive(ctx, caller, job_id, why)
    job = revived.job
    if revived.rings:
        rings.push(ctx, revived.rings, revived.alive, by="requeue")
    _forget_failed_bells(ctx, job, revived.alive)
    status.publish(ctx, job_id)
    facts = {"event": "requeued", "job_id": job_id, "client": caller.client}
    log.info("requeued", extra={**facts, "items": revived.count, "reason": why.via})
    state = JobState.QUEUED if job.state.is_final and revived.rings else job.state
    return {"job_id": job_id, "requeued": revived.count, "state": state}


@dataclass(frozen=True, slots=True)
class _Revived:
    job: Job
    """As it was before."""
    count: int
    rings: Rings | None
    alive: fleet.Alive


def _revive_items(ctx: Context, caller: Caller, job_id: str, why: Why) -> _Revived:
    gone = _gone_vectors(ctx, caller, job_id)
    with ctx.database.transaction() as tx:
        jobs.lock(tx, job_id)
        job = _own(tx, caller, job_id)
        if job.cancelled_at and not job.state.is_final:
            raise NothingToRequeue("the job is being cancelled: requeue it when it is final")
        followed = vectors.revive(tx, job_id)
        alive = fleet.alive(tx)
        if (
            followed and not job.counts.failed and not gone
        ):  # the job stays final: a sink has nothing to embed
            _note(tx, caller, job_id, why, followed)
            return _Revived(job, followed, None, alive)
        jobs.reopen(tx, job_id)
        count = items.revive(tx, job_id) + items.revive_gone(tx, gone)
        if not count:
            raise NothingToRequeue
        _note(tx, caller, job_id, why, count + followed)
        bells = rings.wanted(ctx, count, alive, job.project)
        return _Revived(job, count + followed, jobs.take_rings(tx, job_id, bells), alive)


def _gone_vectors(ctx: Context, caller: Caller, job_id: str) -> list[int]:
    """Return the items of a final job without a target whose vectors are no longer in Redis."""
    with ctx.database.transaction() as tx:
        job = _own(tx, caller, job_id)
        done = items.untargeted_done(tx, job_id) if job.state.is_final else {}
    if not done:
        return []
    if job.is_expired:
        return [*done.values()]
    try:
        kept = ctx.live.held_vectors(job_id, max(done))
    except BellsUnavailable as exc:
        raise StoreUnavailable(REDIS_AWAY) from exc
    return [item_id for position, item_id in done.items() if position not in kept]


def _revive_segments(ctx: Context, caller: Caller, job_id: str, why: Why) -> _Revived:
    """Have the segments read again that are not there; what is there is kept."""
    with ctx.database.transaction() as tx:
        before = _own(tx, caller, job_id)
        found = traces.segments(tx, job_id)
    if not before.state.is_final or before.state is JobState.CANCELLED:
        raise NothingToRequeue(f"a job that is {before.state} has nothing to requeue")
    kept = _kept_segments(ctx, before, found)
    with ctx.database.transaction() as tx:
        jobs.lock(tx, job_id)
        job = _own(tx, caller, job_id)
        again = [each.segment for each in found if each.segment not in kept]
        if (job.run, job.state) != (before.run, before.state):
            raise NothingToRequeue("somebody else has requeued it just now")
        if not again:
            raise NothingToRequeue("nothing of it failed, and its result is all there")
        traces.reopen(tx, job_id, again)
        _note(tx, caller, job_id, why, len(again))
        alive = fleet.alive(tx)
        return _Revived(job, len(again), jobs.take_rings(tx, job_id, 1), alive)


def _kept_segments(ctx: Context, job: Job, found: Sequence[traces.Segment]) -> set[int]:
    if job.is_expired:
        return set()
    try:
        return trace_result.whole_segments(ctx, job.id, found)
    except BellsUnavailable as exc:
        if job.state is JobState.FAILED:
            return set()
        raise StoreUnavailable(trace_result.REDIS_AWAY) from exc


def _note(tx: Tx, caller: Caller, job_id: str, why: Why, count: int) -> None:
    clients.note_requeue(
        tx, job_id=job_id, client=caller.client, via=why.via, reason=why.reason, items=count
    )


def cancel(ctx: Context, caller: Caller, job_id: str) -> bytes:
    """Stop what of a job has not run, keep what is done; a final job is left as it is.

    Returns the job's body. Items that another open job waits for go on as that job's.
    """
    heirs: set[str] = set()
    with ctx.database.transaction() as tx:
        jobs.lock(tx, job_id)
        _own(tx, caller, job_id)
        if jobs.cancel(tx, job_id):
            if is_trace(job_id):
                count = traces.cancel(tx, job_id)
            else:
                count, heirs = items.cancel(tx, job_id)
            facts = {"event": "cancelled", "job_id": job_id, "client": caller.client}
            log.info("job cancelled", extra={**facts, "items": count})
    if is_trace(job_id):
        trace_result.finish(ctx, job_id)
    else:
        status.finish(ctx, job_id, ttl_seconds=ctx.settings.job_result_ttl_seconds)
    for heir in sorted(heirs):
        rings.ring(ctx, heir, bells=1, by="cancel")
    return status.read(ctx, caller, job_id).body


def _own(tx: Tx, caller: Caller, job_id: str) -> Job:
    job = jobs.find(tx, job_id, client=None if caller.is_admin else caller.client)
    if job is None:
        raise JobNotFound
    return job


def _forget_failed_bells(ctx: Context, job: Job, alive: fleet.Alive) -> None:
    # Only for the eye: an old failed bell in rq-dashboard would look like work left to do.
    try:
        queue = ctx.queue(job.id, job.project, frozenset(alive.workers))
        ctx.bells.forget_failed(queue, job.id)
    except BellsUnavailable as exc:
        log.info("failed bell not removed: %s", exc, extra={"event": "redis_lost"})
