"""What RQ may call: the one function behind each bell."""

import logging
import time
from collections.abc import Callable
from contextvars import ContextVar
from dataclasses import dataclass

from rq import get_current_job
from rq.timeouts import JobTimeoutException

from app.core.errors import ErrorClass, HoldfastError, StoreUnavailable, WorkError
from worker import embedding
from worker.runtime import Recipe, open_horse

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Stable:
    """What the parent leaves for the horses that it forks."""

    recipe: Recipe
    stop_asked: Callable[[], bool]


# The one piece of state at module level: RQ calls a function by its name, with what stands in
# Redis, so everything else that a horse needs must have been in memory when it was forked.
STABLE: ContextVar[Stable] = ContextVar("STABLE")


def embed(job_id: str, run: int) -> dict[str, int]:
    """Drain an embedding job, and return counts.

    Raises FailedItemsRemain, RQ's time limit, or a WorkError in place of what was not foreseen.
    RQ keeps and shows what leaves here, so it has no text and no cause.
    """
    bell = _bell()
    facts = {"bell": bell, "job_id": job_id}
    log.debug("bell started", extra={"event": "bell_start", **facts})
    began = time.monotonic()
    try:
        counts = _drained(bell, job_id, run)
    except (HoldfastError, JobTimeoutException) as exc:
        raise exc.with_traceback(None) from None
    except Exception as exc:
        log.exception("Queue worker error", extra={"event": "bell_end", **facts})
        raise WorkError(ErrorClass.INTERNAL, type(exc).__name__) from None
    told = {"counts": counts, "duration_seconds": round(time.monotonic() - began, 3)}
    log.info("bell ended", extra={"event": "bell_end", **facts, **told})
    return counts


def _drained(bell: str, job_id: str, run: int) -> dict[str, int]:
    stable = STABLE.get()
    horse = open_horse(stable.recipe, leased_by=bell, stop_asked=stable.stop_asked)
    try:
        return embedding.drain(horse, job_id, run)
    except StoreUnavailable:
        return {"store_unavailable": 1}  # the sweeper rings again
    finally:
        horse.close()


def _bell() -> str:
    bell = get_current_job()
    assert bell is not None  # noqa: S101 - RQ calls these, and nobody else
    return bell.id
