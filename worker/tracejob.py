"""Drains a trace job: its next segment under a lease, its pages into Redis, then the next one."""

import logging
import time
from bisect import bisect_right
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

from app.core import rings, status, trace_result
from app.core.errors import (
    BellsUnavailable,
    ErrorClass,
    FailedItemsRemain,
    LeaseLost,
    RedisFull,
    StoreUnavailable,
    WorkError,
)
from app.core.live import page_key
from app.core.model import Job, JobState, Reading
from app.core.store import jobs, traces
from app.core.trace import Ask, Step, read, unpack_ids
from worker.lease import SegmentLease
from worker.runtime import TraceHorse

log = logging.getLogger(__name__)

MOST_MEMORY = 0.8
"""The share of Redis' maxmemory up to which a segment is begun."""

MEMORY_PAUSE_SECONDS = 15.0
REDIS_PAUSE_SECONDS = 5.0
PUBLISH_SECONDS = 1.0


def drain(horse: TraceHorse, job_id: str, run: int) -> dict[str, int]:
    """Read segments of a trace job until the turn is over or nothing is due; return counts.

    A lost, doubled or late bell changes nothing: the lease on the job lets one read at a time.
    Raises FailedItemsRemain where this bell made the job final and segments of it failed, and
    StoreUnavailable where Postgres went away: the lease then runs out by itself.
    """
    with horse.context.database.transaction() as tx:
        job = jobs.find(tx, job_id)
        if job is None or job.kind != "trace" or job.state.is_final or run < job.run:
            return {"done": 0}
        trace, packed = traces.find(tx, job_id), traces.ids(tx, job_id)
    return _Drain(horse, job, trace, unpack_ids(packed)).run()


class _Drain:
    """One bell at work on one trace job."""

    def __init__(
        self, horse: TraceHorse, job: Job, trace: traces.Trace, ids: Sequence[str]
    ) -> None:
        self.horse = horse
        self.ctx = horse.context
        self.job = job
        self.trace = trace
        self.ids = ids
        self.counts: Counter[str] = Counter()
        self.began = time.monotonic()

    # ---- the turn ------------------------------------------------------------------------

    def run(self) -> dict[str, int]:
        finished, is_idle, is_over = None, False, False
        while finished is None and not (is_over := self._is_over()):
            if self._segment():
                is_idle = False
            elif is_idle:
                break
            else:  # a segment whose pages vanished is due again by this
                is_idle = True
                finished = self._finish()
        finished = finished or self._finish()
        if finished is None:
            if is_over:
                rings.ring(self.ctx, self.job.id, bells=1, by="tail")
            status.publish(self.ctx, self.job.id)
        elif finished.state in (JobState.FAILED, JobState.COMPLETED_WITH_ERRORS):
            raise FailedItemsRemain(finished.counts.failed, finished.counts.total)
        return dict(self.counts)

    def _is_over(self) -> bool:
        seconds = time.monotonic() - self.began
        return self.horse.must_stop() or seconds >= self.ctx.settings.queue_bell_seconds

    def _finish(self) -> Job | None:
        try:
            return trace_result.finish(self.ctx, self.job.id)
        except BellsUnavailable as exc:  # the sweeper finishes it when Redis is back
            log.warning("job not finished: %s", exc, extra={"event": "redis_lost"})
            return None

    # ---- one segment ---------------------------------------------------------------------

    def _segment(self) -> bool:
        """Read the next segment; return whether there was one, and its reading has an end."""
        seconds = self.ctx.settings.queue_visibility_timeout
        with self.ctx.database.transaction() as tx:
            claim = traces.claim(
                tx, self.job.id, leased_by=self.horse.leased_by, lease_seconds=seconds
            )
        if claim is None:
            return False
        status.publish(self.ctx, self.job.id)
        reader = _SegmentReader(self, claim)
        try:
            with SegmentLease(self.ctx.database, claim, lease_seconds=seconds):
                reading = reader.reading()
            self._settle(claim, reading)
        except RedisFull:
            self._release(reader, MEMORY_PAUSE_SECONDS, "memory")
            return False
        except BellsUnavailable:
            self._release(reader, REDIS_PAUSE_SECONDS, "redis")
            return False
        except LeaseLost:
            self._note_lost(reader)
            return False
        except StoreUnavailable:
            raise
        except Exception as exc:
            # Whatever it was, it goes on upwards (RQ's time limit is one of these); the segment is
            # ended by name rather than by a lease that runs out.
            self._abandon(claim, exc)
            raise
        reader.drop_failed(reading)
        return True

    def _settle(self, claim: traces.Claim, reading: Reading) -> None:
        error = reading.error
        own = (ErrorClass.RESULT_TOO_LARGE, ErrorClass.JOB_TIMEOUT)
        ends_job = error is not None and (not self.trace.is_partial or error.error_class in own)
        with self.ctx.database.transaction() as tx:
            traces.settle(tx, claim, reading, leased_by=self.horse.leased_by, ends_job=ends_job)
        self.counts["failed" if error else "done"] += 1
        facts: dict[str, Any] = {"job_id": self.job.id, "segment": claim.segment}
        if error:
            told = {"event": "segment_failed", "error_class": error.error_class}
            log.warning("segment failed: %s", error.message, extra={**facts, **told})
        else:
            facts |= {"event": "segment_done", "counts": dict(reading.rows)}
            log.info("segment read", extra=facts)

    def _release(self, reader: "_SegmentReader", seconds: float, waits_for: str) -> None:
        reader.drop()
        with suppress(LeaseLost), self.ctx.database.transaction() as tx:
            traces.release(tx, reader.claim, after_seconds=seconds, waits_for=waits_for)
        self.counts["released"] += 1
        facts = {"event": "segment_released", "job_id": self.job.id, "reason": waits_for}
        log.warning("segment given back: it waits for Redis", extra=facts)

    def _note_lost(self, reader: "_SegmentReader") -> None:
        reader.drop()
        self.counts["lease_lost"] += 1
        facts = {"event": "lease_lost", "job_id": self.job.id, "bell": self.horse.leased_by}
        log.warning("pages dropped: the lease was lost", extra=facts)

    def _abandon(self, claim: traces.Claim, exc: Exception) -> None:
        facts = {"event": "bell_end", "error_class": ErrorClass.INTERNAL}
        log.error("segment failed", exc_info=exc, extra=facts)
        error = WorkError(ErrorClass.INTERNAL, type(exc).__name__)
        with suppress(StoreUnavailable, LeaseLost):
            self._settle(claim, _nothing(error))


def _nothing(error: WorkError) -> Reading:
    """Return a reading of which nothing is kept."""
    return Reading(rows={}, seconds={}, pages={}, failures={}, error=error)


class _SegmentReader:
    """Reads one segment: its pages go to Redis, how far it is to Postgres."""

    def __init__(self, drain: _Drain, claim: traces.Claim) -> None:
        self.claim = claim
        self._drain = drain
        self._ctx = drain.ctx
        self._trace = drain.trace
        self._ids = drain.ids[claim.first_cid : claim.first_cid + claim.cids]
        self._keys: list[tuple[str, str]] = []
        self._rows: dict[str, int] = {}
        self._published_at = time.monotonic()
        settings = self._ctx.settings
        self._seconds_left = settings.trace_job_timeout_seconds - claim.seconds_running

    def reading(self) -> Reading:
        """Read it; raises RedisFull, BellsUnavailable, LeaseLost, and what nobody foresaw."""
        settings = self._ctx.settings
        if self._seconds_left <= 0:
            return _nothing(self._timed_out())
        if self._ctx.live.memory_share() >= MOST_MEMORY:
            raise RedisFull
        began = time.monotonic()
        seconds = min(self._seconds_left, settings.trace_segment_seconds)
        ask = Ask(
            domains=self._trace.domains,
            ids=self._ids,
            as_of=self._trace.as_of,
            deadline=began + seconds,
            is_partial=self._trace.is_partial,
            most_bytes=settings.trace_result_bytes - self.claim.bytes_before,
        )
        try:
            reading = read(self._drain.horse.source, ask, self._keep, self._note)
        except WorkError as error:
            return _nothing(error)
        if reading.error and time.monotonic() - began >= self._seconds_left:
            return _nothing(self._timed_out())
        if reading.error and not self._trace.is_partial:
            return _nothing(reading.error)
        return reading

    def _timed_out(self) -> WorkError:
        limit = self._ctx.settings.trace_job_timeout_seconds
        message = f"the job ran longer than TRACE_JOB_TIMEOUT_SECONDS = {limit}"
        return WorkError(ErrorClass.JOB_TIMEOUT, message)

    def _keep(self, domain: str, number: int, packed: bytes) -> None:
        claim = self.claim
        page = f"{claim.segment}-{claim.lease_token}-{number}"
        key = page_key(claim.job_id, claim.run, domain, page)
        seconds = self._seconds_left + self._ctx.settings.trace_job_ttl_seconds
        self._ctx.live.keep_page(key, packed, ttl_seconds=seconds)
        self._keys.append((domain, key))

    def _note(self, step: Step) -> None:
        self._rows[step.domain] = step.rows
        now = time.monotonic()
        if now - self._published_at < PUBLISH_SECONDS:
            return
        self._published_at = now
        progress = {"domain": step.domain, "rows": self._rows}
        with suppress(StoreUnavailable):  # the settle will find out
            with self._ctx.database.transaction() as tx:
                is_ours = traces.note_progress(
                    tx, self.claim, cids=self._cids(step), progress=progress
                )
            if not is_ours:
                raise LeaseLost
            status.publish(self._ctx, self.claim.job_id)

    def _cids(self, step: Step) -> int:
        """Return how many ids of the job are behind us: rows come sorted by them."""
        domains = self._trace.domains
        share = bisect_right(self._ids, step.last_id) / len(self._ids)
        part = (domains.index(step.domain) + share) / len(domains)
        return self.claim.cids_before + int(self.claim.cids * part)

    def drop_failed(self, reading: Reading) -> None:
        """Take away the pages that are in no result: of domains that failed, or of all the job."""
        error = reading.error
        if error is None:
            return
        keys = [key for name, key in self._keys if name not in reading.pages]
        if error.error_class is ErrorClass.RESULT_TOO_LARGE:
            with self._ctx.database.transaction() as tx:
                found = traces.segments(tx, self.claim.job_id)
            keys += [key for each in found for key in trace_result.keys_of(self.claim.job_id, each)]
        self._drop(keys)

    def drop(self) -> None:
        """Take away all pages of this reading."""
        self._drop([key for _, key in self._keys])

    def _drop(self, keys: Sequence[str]) -> None:
        with suppress(BellsUnavailable):  # their TTL ends them
            self._ctx.live.drop_pages(keys)
