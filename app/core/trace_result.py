"""The result of a trace job: finished with one end for all its pages, then read by page or whole.

The manifest in Postgres says which pages there are. Without it there is no result, whatever lies in
Redis; and where one page of it is gone, all of it is.
"""

import errno
import logging
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import orjson

from app.core import status
from app.core.context import Context
from app.core.domains import DOMAINS
from app.core.errors import (
    BellsUnavailable,
    Fault,
    InvalidRequest,
    JobFailed,
    ResultExpired,
    StoreUnavailable,
)
from app.core.live import page_key
from app.core.model import Caller, Job, JobState, Page, trace_state
from app.core.store import jobs, traces
from app.core.store.database import Tx
from app.core.trace import PAGE_ROWS, PageLostError, Part, Rows, Whole, page_rows, quality

log = logging.getLogger(__name__)

REDIS_AWAY = "the result lies in Redis, which cannot answer now"


# ---- the end of a job ---------------------------------------------------------------------------


def finish(ctx: Context, job_id: str) -> Job | None:
    """Make a trace job final if nothing of it is open; return it where this call did so.

    First the pages get one common end, which shows whether each is there: a segment whose pages
    vanished is read once more, so the job goes on. Then manifest and final state are one commit.
    Raises BellsUnavailable: whether the pages are there is not known, so it is no end yet.
    """
    ttl_seconds = ctx.settings.trace_job_ttl_seconds
    with ctx.database.transaction() as tx:
        ready = traces.ready(tx, job_id)
        found = traces.segments(tx, job_id)
    if ready is None:
        return None
    has_result = not ready.is_cancelled and (
        ready.is_partial or all(each.status == "done" for each in found)
    )
    lost = _lost(ctx, job_id, found, ttl_seconds, must_know=has_result)
    with ctx.database.transaction() as tx:
        jobs.lock(tx, job_id)
        ready = traces.ready(tx, job_id)
        if ready is None or traces.segments(tx, job_id) != found:
            return None
        if lost and has_result:
            traces.lose(tx, job_id, lost)
            ready = traces.ready(tx, job_id)
            found = traces.segments(tx, job_id)
        job = _end(tx, job_id, ready, found, ttl_seconds) if ready else None
    status.publish(ctx, job_id)
    return job


def _lost(
    ctx: Context,
    job_id: str,
    found: Sequence[traces.Segment],
    ttl_seconds: float,
    *,
    must_know: bool,
) -> list[int]:
    try:
        return _expire(ctx, job_id, [each for each in found if each.pages], ttl_seconds)
    except BellsUnavailable:
        if must_know:
            raise
        return []


def _expire(
    ctx: Context, job_id: str, kept: Sequence[traces.Segment], ttl_seconds: float
) -> list[int]:
    """Give all pages one end; return the segments that have lost one."""
    keys = [(each.segment, key) for each in kept for key in keys_of(job_id, each)]
    if not keys:
        return []
    there = ctx.live.expire_pages([key for _, key in keys], ttl_seconds=ttl_seconds)
    return sorted(
        {segment for (segment, _), is_there in zip(keys, there, strict=True) if not is_there}
    )


def _end(
    tx: Tx,
    job_id: str,
    ready: traces.Ready,
    found: Sequence[traces.Segment],
    ttl_seconds: int,
) -> Job | None:
    job = jobs.find(tx, job_id)
    if job is None:
        return None
    has_rows = ready.is_partial and any(each.pages for each in found)
    state = trace_state(job.counts, is_cancelled=ready.is_cancelled, has_rows=has_rows)
    errors = traces.summary(tx, job_id)
    ended = jobs.finish_as(tx, job_id, jobs.End(state, job.counts, errors), ttl_seconds=ttl_seconds)
    if state is not JobState.FAILED:
        trace = traces.find(tx, job_id)
        traces.keep_manifest(tx, job_id, _manifest(job_id, trace, found))
    facts = {"event": "job_finished", "job_id": job_id, "state": state}
    log.info("trace job finished", extra=facts)
    return ended


def keys_of(job_id: str, segment: traces.Segment, domain: str | None = None) -> list[str]:
    """Return the keys of the pages of a segment, of one domain or all."""
    names = [domain] if domain else list(segment.pages)
    return [
        page_key(
            job_id, segment.run or 0, name, f"{segment.segment}-{segment.lease_token}-{number}"
        )
        for name in names
        for number in range(len(segment.pages.get(name, ())))
    ]


def _manifest(job_id: str, trace: traces.Trace, found: Sequence[traces.Segment]) -> dict[str, Any]:
    read = [each for each in found if each.pages]
    began = min((each.read_from for each in read if each.read_from), default=None)
    ended = max((each.read_to for each in read if each.read_to), default=None)
    return {
        "source": trace.source,
        "as_of": trace.as_of.isoformat(),
        "read_from": began and began.isoformat(),
        "read_to": ended and ended.isoformat(),
        "snapshot": False,  # each statement has seen a moment of its own
        "page_rows": PAGE_ROWS,
        "quality": quality(trace.domains, [_part(trace, each) for each in found]),
        "domains": {name: _pages(job_id, name, read) for name in trace.domains},
    }


def _part(trace: traces.Trace, segment: traces.Segment) -> Part:
    failures = segment.failures
    if segment.status != "done" and not failures:
        # Its process died, its pages vanished, or it was never read.
        failures = dict.fromkeys(trace.domains, segment.error_class or segment.status)
    return Part(
        segment.segment, segment.first_id, segment.last_id, segment.cids, segment.rows, failures
    )


class _Stored(NamedTuple):
    """A page as a manifest names it."""

    first_row: int
    rows: int
    bytes: int
    sha256: str
    key: str


def _pages(job_id: str, name: str, read: Sequence[traces.Segment]) -> list[_Stored]:
    found: list[_Stored] = []
    first = 0
    for segment in read:
        for page, key in zip(
            segment.pages.get(name, ()), keys_of(job_id, segment, name), strict=True
        ):
            found.append(_Stored(first, *page, key))
            first += page.rows
    return found


# ---- reading it ---------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Result:
    """A result that is there: what it consists of."""

    job: Job
    trace: traces.Trace
    manifest: dict[str, Any]

    def pages(self, name: str) -> list[_Stored]:
        return [_Stored(*page) for page in self.manifest["domains"][name]]

    def total(self, name: str) -> int:
        return sum(page.rows for page in self.pages(name))

    @property
    def all_keys(self) -> list[str]:
        return [page.key for name in self.trace.domains for page in self.pages(name)]

    def named(self, name: str) -> str:
        if name not in self.manifest["domains"]:
            message = f"must be one of {', '.join(self.trace.domains)}"
            fault = Fault("unknown_value", message, "domain")
            raise InvalidRequest(f"domain: {message}", faults=[fault])
        return name


def _find(ctx: Context, caller: Caller, job_id: str) -> _Result:
    with ctx.database.transaction() as tx:
        job = status.readable(tx, caller, job_id)
        if job.state is JobState.FAILED:
            raise JobFailed
        trace = traces.find(tx, job_id)
        manifest = traces.manifest(tx, job_id)
    if manifest is None:
        raise ResultExpired
    return _Result(job, trace, manifest)


def manifest(ctx: Context, caller: Caller, job_id: str) -> dict[str, Any]:
    """Return what the result consists of, and of what quality it is.

    Raises JobNotFound, JobNotFinished, JobFailed, ResultExpired, StoreUnavailable.
    """
    result = _find(ctx, caller, job_id)
    _fetch(ctx, result, [])
    return {
        "job_id": job_id,
        "state": result.job.state,
        "expires_at": result.job.expires_at,
        "cid_count": result.trace.cid_count,
        **_head(result),
        **{name: value for name, value in result.manifest.items() if name != "domains"},
        "domains": {name: _shown(result, name) for name in result.trace.domains},
    }


def _head(result: _Result) -> dict[str, Any]:
    trace = result.trace
    return {"profile": trace.profile, "params": trace.params}


def _shown(result: _Result, name: str) -> dict[str, Any]:
    return {
        "rows": result.total(name),
        "columns": [{"name": each.name, "type": each.kind} for each in DOMAINS[name].columns],
        "pages": [
            {"first_row": page.first_row, "rows": page.rows, "bytes": page.bytes}
            for page in result.pages(name)
        ],
        "link": f"/api/job/{result.job.id}/result?domain={name}",
    }


def rows(ctx: Context, caller: Caller, job_id: str, name: str, *, offset: int, limit: int) -> bytes:
    """Return rows of one domain as the body of an answer; only their pages are read.

    Raises as `manifest` does, and InvalidRequest where the job has no such domain.
    """
    result = _find(ctx, caller, job_id)
    pages = result.pages(result.named(name))
    total = result.total(name)
    ends = min(offset + limit, total)
    firsts = [page.first_row for page in pages]
    touched = pages[max(0, bisect_right(firsts, offset) - 1) : bisect_right(firsts, ends - 1)]
    if offset >= total:
        touched = []
    found: list[Rows] = []
    for page, packed in zip(touched, _fetch(ctx, result, touched), strict=True):
        bounds = max(0, offset - page.first_row), ends - page.first_row
        found.append(_rows(ctx, name, page, packed, ",", bounds))
    count = sum(rows.count for rows in found)
    head = {
        "domain": name,
        "offset": offset,
        "limit": limit,
        "count": count,
        "total": total,
        "next": ends if ends < total and count else None,
        "quality": result.manifest["quality"],
    }
    data = "".join(rows.text for rows in found).removesuffix(",")
    return b"".join((orjson.dumps(head)[:-1], b',"data":[', data.encode(), b"]}"))


def _fetch(ctx: Context, result: _Result, pages: Sequence[_Stored]) -> list[bytes | None]:
    """Return pages as they are stored; raises ResultExpired where any of the result is gone."""
    try:
        found = ctx.live.pages([page.key for page in pages], all_keys=result.all_keys)
    except BellsUnavailable as exc:
        raise StoreUnavailable(REDIS_AWAY) from exc
    if found is None:
        raise ResultExpired("pages of the result are gone from Redis: requeue the job")
    return found


def _rows(
    ctx: Context,
    name: str,
    page: _Stored,
    packed: bytes | None,
    end: str,
    bounds: tuple[int, int],
) -> Rows:
    first, last = bounds
    try:
        known = Page(page.rows, page.bytes, page.sha256)
        return page_rows(name, packed, known, end=end, first=first, last=last)
    except PageLostError as exc:
        _spoil(ctx, page)
        raise ResultExpired("a page of the result is damaged: requeue the job") from exc


def _spoil(ctx: Context, page: _Stored) -> None:
    """Take a damaged page away, so that everybody sees from now on that the result is lost."""
    log.error("page damaged", extra={"event": "result_lost", "reason": page.key})
    try:
        ctx.live.drop_pages([page.key])
    except BellsUnavailable:
        return


# ---- everything ---------------------------------------------------------------------------------


def stream(ctx: Context, caller: Caller, job_id: str, name: str | None) -> Iterator[bytes]:
    """Yield all rows as lines between control lines; checked before the first one is asked for.

    A page that is gone half-way ends it with an error line and BrokenPipeError, so that the
    connection is cut: never fewer rows without a word. Raises as `rows` does.
    """
    result = _find(ctx, caller, job_id)
    names = [result.named(name)] if name is not None else result.trace.domains
    _fetch(ctx, result, [])
    return _stream(ctx, result, names)


def _stream(ctx: Context, result: _Result, names: Sequence[str]) -> Iterator[bytes]:
    quality = result.manifest["quality"]
    yield _line("meta", job_id=result.job.id, **_head(result), domains=list(names), quality=quality)
    try:
        for name in names:
            yield from _stream_domain(ctx, result, name)
    except (ResultExpired, StoreUnavailable) as exc:
        yield _line("error", code=exc.code, message=exc.message)
        raise BrokenPipeError(errno.EPIPE, "the result is no longer whole") from exc
    yield _line("complete", rows=sum(map(result.total, names)), quality=quality)


def _stream_domain(ctx: Context, result: _Result, name: str) -> Iterator[bytes]:
    expected, count = result.total(name), 0
    yield _line("domain_start", domain=name, total=expected)
    for found in _all_rows(ctx, result, name, "\n"):
        count += found.count
        yield found.text.encode()
    if count != expected:
        raise ResultExpired(f"{count} rows of {name} where the manifest has {expected}")
    yield _line("domain_end", domain=name, count=count)


def _all_rows(ctx: Context, result: _Result, name: str, end: str) -> Iterator[Rows]:
    for page in result.pages(name):
        (packed,) = _fetch(ctx, result, [page])
        yield _rows(ctx, name, page, packed, end, (0, page.rows))


def _line(kind: str, **more: Any) -> bytes:  # noqa: ANN401
    return orjson.dumps({"_": kind, **more}) + b"\n"


def all_of(ctx: Context, caller: Caller, job_id: str) -> Whole:
    """Return a result to be answered whole; raises as `manifest` does, and while it is read."""
    result = _find(ctx, caller, job_id)
    _fetch(ctx, result, [])
    domains = {name: _all_rows(ctx, result, name, ",") for name in result.trace.domains}
    return Whole(result.trace.profile, result.trace.cid_count, result.manifest["quality"], domains)


# ---- what is still there ------------------------------------------------------------------------


def whole_segments(ctx: Context, job_id: str, found: Sequence[traces.Segment]) -> set[int]:
    """Return the segments whose pages are all there, each kept for as long as a run may take.

    Raises BellsUnavailable.
    """
    settings = ctx.settings
    done = [each for each in found if each.status == "done"]
    seconds = settings.trace_job_timeout_seconds + settings.trace_job_ttl_seconds
    lost = _expire(ctx, job_id, done, seconds)
    return {each.segment for each in done} - set(lost)
