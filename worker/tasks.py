"""What RQ may call: the functions behind the bells, one for each kind of job."""

import logging
import time
from collections.abc import Callable
from contextlib import closing
from contextvars import ContextVar
from dataclasses import dataclass

from rq import get_current_job
from rq.timeouts import JobTimeoutException

from app.core.bells import BellRefused
from app.core.errors import ErrorClass, HoldfastError, StoreUnavailable, WorkError
from worker import embedding, tracejob
from worker.runtime import Recipe, TraceRecipe, open_horse, open_trace_horse

log = logging.getLogger(__name__)

MISROUTED = "refused: this worker serves the other kind of jobs"


@dataclass(frozen=True, slots=True)
class Stable:
    """What the parent leaves for the horses that it forks."""

    recipe: Recipe | TraceRecipe
    stop_asked: Callable[[], bool]


# The one piece of state at module level: RQ calls a function by its name, with what stands in
# Redis, so everything else that a horse needs must have been in memory when it was forked.
STABLE: ContextVar[Stable] = ContextVar("STABLE")


def embed(job_id: str, run: int) -> dict[str, int]:
    """Drain an embedding job, and return counts.

    Raises FailedItemsRemain, RQ's time limit, or a WorkError in place of what was not foreseen.
    RQ keeps and shows what leaves here, so it has no text and no cause.
    """
    return _followed(_embed, job_id, run)


def trace(job_id: str, run: int) -> dict[str, int]:
    """Drain a trace job, and return counts; raises as `embed` does."""
    return _followed(_trace, job_id, run)


def _followed(
    drain: Callable[[str, str, int], dict[str, int]], job_id: str, run: int
) -> dict[str, int]:
    bell = _bell()
    facts = {"bell": bell, "job_id": job_id}
    log.debug("bell started", extra={"event": "bell_start", **facts})
    began = time.monotonic()
    try:
        counts = drain(bell, job_id, run)
    except StoreUnavailable as exc:
        log.warning("bell put off: %s", exc.message, extra={"event": "bell_put_off", **facts})
        counts = {"store_unavailable": 1}  # the sweeper rings again
    except (HoldfastError, JobTimeoutException) as exc:
        raise exc.with_traceback(None) from None
    except Exception as exc:
        log.exception("Queue worker error", extra={"event": "bell_end", **facts})
        raise WorkError(ErrorClass.INTERNAL, type(exc).__name__) from None
    told = {"counts": counts, "duration_seconds": round(time.monotonic() - began, 3)}
    log.info("bell ended", extra={"event": "bell_end", **facts, **told})
    return counts


def _embed(bell: str, job_id: str, run: int) -> dict[str, int]:
    stable = STABLE.get()
    if not isinstance(stable.recipe, Recipe):
        raise BellRefused(MISROUTED)
    horse = open_horse(stable.recipe, leased_by=bell, stop_asked=stable.stop_asked)
    with closing(horse):
        return embedding.drain(horse, job_id, run)


def _trace(bell: str, job_id: str, run: int) -> dict[str, int]:
    stable = STABLE.get()
    if not isinstance(stable.recipe, TraceRecipe):
        raise BellRefused(MISROUTED)
    horse = open_trace_horse(stable.recipe, leased_by=bell, stop_asked=stable.stop_asked)
    with closing(horse):
        return tracejob.drain(horse, job_id, run)


def _bell() -> str:
    bell = get_current_job()
    assert bell is not None  # noqa: S101 - RQ calls these, and nobody else
    return bell.id
