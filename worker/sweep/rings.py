"""Due work without a bell is rung for; jobs with nothing left to do are made final."""

import logging
from collections import Counter

from app.core import rings, status, trace_result
from app.core.context import Context
from app.core.errors import BellsUnavailable
from app.core.model import queue_for
from app.core.store import campaigns, fleet, jobs, traces

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
        backends = fleet.backends(tx, ctx.settings.embedder)
        paused = [model for model, each in backends.items() if each.is_paused]
        sinks = fleet.backends(tx, ctx.settings.primary_sink)
        closed = [label for label, each in sinks.items() if each.is_paused]
        closed += campaigns.held_back(tx)
        due = jobs.due(tx, paused_models=paused, paused_targets=closed)
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
