"""Due work without a bell is rung for; jobs with nothing left to do are made final."""

import logging
from collections import Counter
from collections.abc import Sequence

from app.core import rings, status, trace_result
from app.core.bells import job_of
from app.core.context import Context
from app.core.errors import BellsUnavailable
from app.core.model import queue_for
from app.core.store import campaigns, fleet, jobs, traces
from app.core.store.database import Tx

log = logging.getLogger(__name__)


def run_once(ctx: Context) -> Counter[str]:
    """Finish what is complete and ring for what is due; return what was done.

    By location and not by RQ's words: a bell that works holds leases, one that waits is in the
    queue's list, anything else is rung again.
    """
    counts: Counter[str] = Counter()
    with ctx.database.transaction() as tx:
        complete = jobs.complete(tx)
        alive = fleet.alive(tx)
        due = _due(ctx, tx)
        complete_traces, due_traces = traces.complete(tx), traces.due(tx)
    for job_id in complete:
        finished = status.finish(ctx, job_id, ttl_seconds=ctx.settings.job_result_ttl_seconds)
        counts["finished"] += finished is not None
    try:
        counts["rung"] += sum(_missing(ctx, alive, due).values())
        counts["rung"] += _missing_traces(ctx, due_traces)
        for job_id in complete_traces:
            counts["finished"] += trace_result.finish(ctx, job_id) is not None
    except BellsUnavailable as exc:
        counts["redis_away"] += 1
        log.warning("nothing rung: %s", exc, extra={"event": "redis_lost"})
    return +counts


def give_turns(ctx: Context) -> Counter[str]:
    """Bring a bell of overdue work to the front of each queue where no low work is in hand.

    What goes after everybody's would never come where others always wait; so it gets a slice.
    """
    with ctx.database.transaction() as tx:
        served = frozenset(fleet.alive(tx).workers)
        due = _due(ctx, tx)
        owners = jobs.owners(tx, (job.id for job in due))
    low = [job for job in due if job.id in owners and owners[job.id].is_low]
    busy = {queue_for(job.project, served) for job in low if job.holders}
    overdue = {job.id: queue_for(job.project, served) for job in low if owners[job.id].is_overdue}
    counts: Counter[str] = Counter()
    try:
        for queue in {*overdue.values()} - busy:
            theirs = [job_id for job_id, each in overdue.items() if each == queue]
            counts["turns"] += _bring_forward(ctx, queue, theirs)
    except BellsUnavailable as exc:
        log.warning("no turn given: %s", exc, extra={"event": "redis_lost"})
    return +counts


def _bring_forward(ctx: Context, queue: str, overdue: Sequence[str]) -> bool:
    """Move the first bell of the first of these jobs that has one; return whether it was behind."""
    line = ctx.bells.first_waiting(queue)
    first: dict[str, str] = {}
    for bell in line:
        first.setdefault(job_of(bell), bell)
    chosen = next((first[job_id] for job_id in overdue if job_id in first), None)
    if chosen is None or chosen == line[0]:
        return False
    ctx.bells.move(queue, chosen, other=line[0], is_behind=False)
    return True


def _due(ctx: Context, tx: Tx) -> list[jobs.DueJob]:
    """Return the jobs that could be worked on now: no pause holds them."""
    backends = fleet.backends(tx, ctx.settings.embedder)
    paused = [model for model, each in backends.items() if each.is_paused]
    sinks = fleet.backends(tx, ctx.settings.primary_sink)
    closed = [label for label, each in sinks.items() if each.is_paused]
    closed += campaigns.held_back(tx)
    return jobs.due(tx, paused_models=paused, paused_targets=closed)


def _missing(ctx: Context, alive: fleet.Alive, due: list[jobs.DueJob]) -> Counter[str]:
    served = frozenset(alive.workers)
    queues = {queue_for(job.project, served) for job in due}
    waiting = {queue: Counter(ctx.bells.waiting(queue)) for queue in queues}
    rung: Counter[str] = Counter()
    for job in due:
        there = waiting[queue_for(job.project, served)][job.id] + job.holders
        missing = rings.wanted(ctx, job.pending, alive, job.project) - there
        if missing > 0:
            rung[job.id] += rings.ring(ctx, job.id, bells=missing, by="sweeper")
    return rung


def _missing_traces(ctx: Context, due: list[str]) -> int:
    """Ring once for each trace job that nobody reads and whose bell is not in the list."""
    if not due:
        return 0
    waiting = set(ctx.bells.waiting(ctx.settings.trace_worker_queue))
    missing = [job_id for job_id in due if job_id not in waiting]
    return sum(rings.ring(ctx, job_id, bells=1, by="sweeper") for job_id in missing)
