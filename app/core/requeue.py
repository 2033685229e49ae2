"""A person's second chance: requeue what failed of a job; and its mirror, cancel."""

import logging
from dataclasses import dataclass
from typing import Any

from app.core import rings, status
from app.core.context import Context
from app.core.errors import BellsUnavailable, JobNotFound, NothingToRequeue
from app.core.model import Caller, Job, JobState, queue_for
from app.core.store import clients, fleet, items, jobs
from app.core.store.database import Tx

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Why:
    """Through which door somebody asks, and the reason given."""

    via: str
    reason: str | None = None


def requeue(ctx: Context, caller: Caller, job_id: str, why: Why) -> dict[str, Any]:
    """Give the failed items of a job another allowance of attempts, and ring.

    The API, the command line and rq-dashboard's button all come here. Raises JobNotFound and
    NothingToRequeue; of two at the same time one succeeds.
    """
    with ctx.database.transaction() as tx:
        jobs.lock(tx, job_id)
        job = _own(tx, caller, job_id)
        if job.cancelled_at and not job.state.is_final:
            raise NothingToRequeue("the job is being cancelled: requeue it when it is final")
        jobs.reopen(tx, job_id)
        count = items.revive(tx, job_id)
        if not count:
            raise NothingToRequeue
        clients.note_requeue(
            tx, job_id=job_id, client=caller.client, via=why.via, reason=why.reason, items=count
        )
        alive = fleet.alive(tx)
        taken = jobs.take_rings(tx, job_id, rings.wanted(ctx, count, alive, job.project))
    if taken:
        rings.push(ctx, taken, alive, by="requeue")
    _forget_failed_bells(ctx, job, alive)
    status.publish(ctx, job_id)
    facts = {"event": "requeued", "job_id": job_id, "client": caller.client, "items": count}
    log.info("failed items requeued", extra={**facts, "reason": why.via})
    state = JobState.QUEUED if job.state.is_final else job.state
    return {"job_id": job_id, "requeued": count, "state": state}


def cancel(ctx: Context, caller: Caller, job_id: str) -> bytes:
    """Stop what of a job has not run, keep what is done; a final job is left as it is.

    Returns the job's body. Items that another open job waits for go on as that job's.
    """
    heirs: set[str] = set()
    with ctx.database.transaction() as tx:
        jobs.lock(tx, job_id)
        _own(tx, caller, job_id)
        if jobs.cancel(tx, job_id):
            count, heirs = items.cancel(tx, job_id)
            facts = {"event": "cancelled", "job_id": job_id, "client": caller.client}
            log.info("job cancelled", extra={**facts, "items": count})
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
        ctx.bells.forget_failed(queue_for(job.project, frozenset(alive.workers)), job.id)
    except BellsUnavailable as exc:
        log.info("failed bell not removed: %s", exc, extra={"event": "redis_lost"})
