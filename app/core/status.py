"""What is said of jobs: the job itself, its items, its result; from Redis where that is fresh."""

import json
import re
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from datetime import datetime
from threading import Event
from typing import Any

import orjson

from app.core.context import Context
from app.core.errors import (
    BellsUnavailable,
    Fault,
    InvalidRequest,
    JobNotFinished,
    JobNotFound,
    ResultExpired,
    StoreUnavailable,
)
from app.core.live import FRESH_SECONDS, Meta
from app.core.model import NO_TARGET, Caller, Job, Target
from app.core.ports import PrimarySink
from app.core.store import fleet, items, jobs, targets, traces, vectors
from app.core.store.database import Tx

STREAM_BLOCK = 500
LOOK_SECONDS = 1.0
CURSOR = re.compile(r"(\d{4}-\d\d-\d\dT[0-9:.]{8,15}\+00:00)~([a-z0-9-]{1,64})", re.ASCII)


@dataclass(frozen=True, slots=True)
class View:
    """A job as one reading of Postgres shows it."""

    job: Job
    body: bytes
    seen_at: float = field(default_factory=time.monotonic)


def find(ctx: Context, caller: Caller, job_id: str) -> bytes:
    """Return the body of GET /api/job/<id>: from Redis where it is fresh, else from Postgres.

    Raises JobNotFound, for another client's job too.
    """
    try:
        body = ctx.live.find(job_id, client=None if caller.is_admin else caller.client)
    except BellsUnavailable:
        body = None
    return body if body is not None else read(ctx, caller, job_id).body


def read(ctx: Context, caller: Caller, job_id: str) -> View:
    """Read a job from Postgres and write its metadata anew."""
    with ctx.database.transaction() as tx:
        job = jobs.find(tx, job_id, client=None if caller.is_admin else caller.client)
        if job is None:
            raise JobNotFound
        view = _view(ctx, tx, job)
    _keep(ctx, view)
    return view


def now(ctx: Context) -> datetime:
    """Return what time it is: by Postgres, as everywhere."""
    with ctx.database.transaction() as tx:
        return fleet.now(tx)


def publish(ctx: Context, job_id: str) -> None:
    """Write a job's metadata to Redis; without it the next poll reads Postgres."""
    with ctx.database.transaction() as tx:
        job = jobs.find(tx, job_id)
        view = _view(ctx, tx, job) if job else None
    if view:
        _keep(ctx, view)


def finish(ctx: Context, job_id: str, *, ttl_seconds: int) -> Job | None:
    """Make a job final if nothing of it is open; return it where this call did so."""
    with ctx.database.transaction() as tx:
        job = jobs.finish(tx, job_id, ttl_seconds=ttl_seconds)
        view = _view(ctx, tx, job) if job else None
        last = items.last_untargeted(tx, job_id) if job and job.kind == "embedding" else None
    if last is not None:
        with suppress(BellsUnavailable):  # then they end by themselves, some days later
            ctx.live.expire_vectors(job_id, last, ttl_seconds=ttl_seconds)
    if view:
        _keep(ctx, view)
    return job


def wait(ctx: Context, caller: Caller, job_id: str, *, seconds: float, is_stopping: Event) -> View:
    """Return the job when it is final, when its counts or state change, or when the time is up."""
    first = read(ctx, caller, job_id)
    for view in _looks(ctx, caller, first, seconds, is_stopping):
        if _differs(first.job, view.job):
            return view
    return first


def wait_until_final(
    ctx: Context, caller: Caller, job_id: str, *, seconds: float, is_stopping: Event
) -> bool:
    """Wait until a job is final; False where the time is up first."""
    first = read(ctx, caller, job_id)
    views = _looks(ctx, caller, first, seconds, is_stopping)
    return first.job.state.is_final or any(view.job.state.is_final for view in views)


def _looks(
    ctx: Context, caller: Caller, first: View, seconds: float, is_stopping: Event
) -> Iterator[View]:
    """Look at a job again and again: soon at first, then once a second.

    An indexed read each: it works with Redis empty and needs no listener.
    """
    view, pause = first, LOOK_SECONDS / 20
    ends = time.monotonic() + seconds
    while not view.job.state.is_final and (left := ends - time.monotonic()) > 0:
        if is_stopping.wait(min(pause, left)):
            return
        pause = min(LOOK_SECONDS, pause * 1.5)
        view = read(ctx, caller, first.job.id)
        yield view


def _differs(one: Job, other: Job) -> bool:
    return (one.state, one.counts, one.run) != (other.state, other.counts, other.run)


def page(ctx: Context, wanted: jobs.JobFilter, *, limit: int) -> dict[str, Any]:
    """Return a page of jobs, newest first, each as GET /api/job/<id> shows it."""
    with ctx.database.transaction() as tx:
        found = jobs.page(tx, wanted, limit=limit)
        shown = [_described(ctx, tx, job) for job in found]
    last = found[-1] if len(found) == limit else None
    cursor = f"{last.created_at.isoformat()}~{last.id}" if last else None
    return {"jobs": shown, "next": cursor}


# ---- one job ------------------------------------------------------------------------------------


def _view(ctx: Context, tx: Tx, job: Job) -> View:
    return View(job, orjson.dumps(_described(ctx, tx, job)))


def _keep(ctx: Context, view: View) -> None:
    job = view.job
    ttl = FRESH_SECONDS if not job.state.is_final else _seconds_left(job)
    # What was long on its way here is not shown: since then another run may have begun and the
    # body that would win over this one have expired.
    if ttl <= 0 or time.monotonic() - view.seen_at > FRESH_SECONDS:
        return
    try:
        ctx.live.keep(
            Meta(
                job_id=job.id,
                client=job.client,
                run=job.run,
                is_final=job.state.is_final,
                read_at=job.read_at,
                body=view.body,
                ttl_seconds=ttl,
            )
        )
    except BellsUnavailable:
        return


def _seconds_left(job: Job) -> float:
    return job.expires_at.timestamp() - job.read_at if job.expires_at else 0.0


def _described(ctx: Context, tx: Tx, job: Job) -> dict[str, Any]:
    counts = job.counts
    is_final = job.state.is_final
    kind = _embedding if job.kind == "embedding" else _trace
    own = kind(ctx, tx, job)
    link = f"/api/job/{job.id}"
    return {
        "job_id": job.id,
        "kind": job.kind,
        "state": job.state,
        "created_at": job.created_at,
        "started_at": job.started_at,
        "finished_at": job.finished_at,
        "expires_at": job.expires_at,
        "counts": {"total": counts.total, **asdict(counts)},
        "progress": own.progress,
        "waiting": None if is_final else own.waiting,
        "errors": job.errors if is_final else own.errors,
        **own.more,
        "links": {
            "result": f"{link}/result",
            "items": f"{link}/items",
            "requeue": f"{link}/requeue",
            "cancel": f"{link}/cancel",
        },
    }


@dataclass(frozen=True, slots=True)
class _Own:
    """What is said of a job in the way of its kind."""

    progress: dict[str, Any]
    waiting: dict[str, Any] | None
    errors: list[dict[str, Any]]
    more: dict[str, Any] = field(default_factory=dict)


def estimate(ctx: Context, tx: Tx, job: Job) -> dict[str, int] | None:
    """Estimate in how many seconds a job is done, what is ahead of it included.

    From what recent work has cost, and the workers alive; None without history.
    """
    if job.kind == "trace":
        facts = traces.facts(tx, job.id)
        return _trace_estimate(ctx, tx, job, facts, facts.cid_count - facts.cids_read)
    cost = fleet.cost(tx)
    if cost is None:
        return None
    ahead = jobs.ahead(tx, job.id)
    # Jobs take turns, so what is ahead costs at most as many items as this job has itself.
    load = job.counts.open + min(ahead.items, job.counts.open * ahead.jobs)
    return _spread(load, cost.p50, cost.p90, _workers(ctx, tx, job))


def _workers(ctx: Context, tx: Tx, job: Job) -> int:
    workers = fleet.alive(tx).workers
    return max(1, workers.get(ctx.queue(job.id, job.project, frozenset(workers)), 0))


def _spread(load: float, p50: float, p90: float, workers: int) -> dict[str, int]:
    return {"p50": round(load * p50 / workers), "p90": round(load * p90 / workers)}


def _embedding(ctx: Context, tx: Tx, job: Job) -> _Own:
    counts = job.counts
    finished = counts.total - counts.open
    is_final = job.state.is_final
    progress = {
        "percent": round(100 * finished / counts.total, 1) if counts.total else 100.0,
        "stage": "embedding",
        "rate_per_second": 0.0 if is_final else round(fleet.rate(tx, job.id), 1),
        "eta_seconds": None if is_final else estimate(ctx, tx, job),
    }
    waiting = None if is_final else _waiting(ctx, tx, job)
    return _Own(progress, waiting, jobs.errors(tx, job.id) if counts.failed else [])


def _waiting(ctx: Context, tx: Tx, job: Job) -> dict[str, Any] | None:
    if job.counts.processing or not job.counts.pending:
        return None
    unserved = _unserved(ctx, tx, job)
    if unserved:
        return unserved
    is_due, next_at = items.next_due(tx, job.id)
    outage = _paused(ctx, tx, job)
    if outage:
        return outage
    if not is_due and next_at:
        return _because("retry_scheduled", "the next attempt comes at the time given", next_at)
    ahead = jobs.ahead(tx, job.id)
    return _because("queued_behind", f"{ahead.jobs} other jobs with {ahead.items} open items")


def _paused(ctx: Context, tx: Tx, job: Job) -> dict[str, Any] | None:
    """Say which pause the job's first items wait for: of a model, or of a target."""
    backends = _away(tx, ctx.settings.embedder)
    closed = _away(tx, ctx.settings.primary_sink)
    if not backends and not closed:
        return None
    models, labels = items.needs(tx, job.id)
    for each in backends:
        if each.model in models:
            return _because("backend_paused", _outage(ctx, tx, job, each), each.paused_until)
    for each in closed:
        if each.model in labels:
            detail = (
                f"target {each.model} {each.error_class} since {_utc(each.paused_since)}:"
                f" its items wait, 0 lost; next look at {_utc(each.paused_until)} ({each.message})"
            )
            return _because("backend_paused", detail, each.paused_until)
    return None


def _away(tx: Tx, name: str) -> list[fleet.Backend]:
    return [each for each in fleet.backends(tx, name).values() if each.paused_since]


def _outage(ctx: Context, tx: Tx, job: Job, backend: fleet.Backend) -> str:
    """Say of a paused backend since when, how much of the job waits for it, and what comes next."""
    waiting = min(job.counts.pending, jobs.items_of_model(tx, job.id, backend.model))
    return (
        f"{ctx.settings.embedder} {backend.model} {backend.error_class} since"
        f" {_utc(backend.paused_since)}: {waiting:,} items of this job wait, 0 lost;"
        f" next try at {_utc(backend.paused_until)} ({backend.message})"
    )


def _utc(moment: datetime | None) -> str:
    return moment.strftime("%Y-%m-%dT%H:%M:%SZ") if moment else "unknown"


def _unserved(ctx: Context, tx: Tx, job: Job) -> dict[str, Any] | None:
    workers = fleet.alive(tx).workers
    queue = ctx.queue(job.id, job.project, frozenset(workers))
    if workers.get(queue):
        return None
    detail = f"no worker serves the queue {queue}; start one: python -m worker run {queue}"
    return _because("no_worker", detail)


# ---- a trace job --------------------------------------------------------------------------------


def _trace(ctx: Context, tx: Tx, job: Job) -> _Own:
    facts = traces.facts(tx, job.id)
    now = facts.progress or {}
    furthest = max(facts.furthest_cids, facts.cids_read)
    seconds = max(facts.seconds_running or 0.0, 1.0)
    rows = dict.fromkeys(facts.domains, 0) | facts.rows
    for name, more in now.get("rows", {}).items():
        rows[name] += more
    is_final = job.state.is_final
    in_hand = sum(now.get("rows", {}).values())
    progress = {
        "percent": round(100 * furthest / facts.cid_count, 1),
        "stage": now.get("domain", "events"),
        "rate_per_second": 0.0 if is_final else round((facts.rows_of_run + in_hand) / seconds, 1),
        "eta_seconds": None if is_final else _trace_eta(ctx, tx, job, facts, furthest),
    }
    shown = {
        "profile": facts.profile,
        "domains": facts.domains,
        "cid_count": facts.cid_count,
        "segment": f"{facts.segment or job.counts.done + job.counts.failed}/{facts.segments}",
        "rows": rows,
    }
    waiting = None if is_final else _trace_waiting(ctx, tx, job, facts)
    errors = traces.summary(tx, job.id) if job.counts.failed else []
    return _Own(progress, waiting, errors, {"trace": shown})


def _trace_eta(
    ctx: Context, tx: Tx, job: Job, facts: traces.Facts, furthest: int
) -> dict[str, int] | None:
    left = facts.cid_count - furthest
    if facts.cids_now and facts.seconds_running:  # what this job itself has cost says most
        each = facts.seconds_running / facts.cids_now
        return _spread(left, each, 1.5 * each, 1)
    return _trace_estimate(ctx, tx, job, facts, left)


def _trace_estimate(
    ctx: Context, tx: Tx, job: Job, facts: traces.Facts, left: int
) -> dict[str, int] | None:
    cost = traces.cost(tx, profile=facts.profile, source=facts.source, domains=facts.domains)
    if cost is None:
        return None
    ahead = traces.ahead(tx, job.id)
    # One bell reads a job, so it is as fast with many workers; what is ahead is shared by them.
    turns = min(ahead.cids, left * ahead.jobs) / _workers(ctx, tx, job)
    return _spread(left + turns, cost.p50, cost.p90, 1)


def _trace_waiting(ctx: Context, tx: Tx, job: Job, facts: traces.Facts) -> dict[str, Any] | None:
    if facts.segment or not job.counts.pending:
        return None
    unserved = _unserved(ctx, tx, job)
    if unserved:
        return unserved
    if facts.waits_for == "memory":
        detail = "Redis is nearly full; the job goes on when there is room"
        return _because("memory_pressure", detail, facts.next_attempt_at)
    if facts.waits_for == "redis" and facts.is_later:
        detail = "Redis, where the result is kept, did not answer"
        return _because("retry_scheduled", detail, facts.next_attempt_at)
    ahead = traces.ahead(tx, job.id)
    return _because("queued_behind", f"{ahead.jobs} other jobs with {ahead.cids} ids to be read")


def _because(reason: str, detail: str, until: datetime | None = None) -> dict[str, Any]:
    return {"reason": reason, "detail": detail, "until": until}


# ---- items and result ---------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class ItemsWanted:
    """Which items of a job to show."""

    after: int
    limit: int
    status: str | None = None


def list_items(ctx: Context, caller: Caller, job_id: str, wanted: ItemsWanted) -> dict[str, Any]:
    """Return a page of a job's items with every failed attempt."""
    with ctx.database.transaction() as tx:
        if _own(tx, caller, job_id).kind == "trace":
            return _list_segments(tx, job_id, wanted)
        rows = items.page(tx, job_id, after=wanted.after, limit=wanted.limit, status=wanted.status)
        history = items.attempts(tx, [row["item_id"] for row in rows])
        followed = vectors.states(tx, [_ledger_key(row) for row in rows])
    shown = [
        {
            **_item(row, history.get(row["item_id"], [])),
            "sinks": {}
            if row["target_table"] == NO_TARGET
            else {
                ctx.settings.primary_sink: _primary(row, history.get(row["item_id"], [])),
                **{each["sink"]: _follower(each) for each in followed.get(_ledger_key(row), [])},
            },
        }
        for row in rows
    ]
    is_full = len(rows) == wanted.limit
    return {"items": shown, "next": str(rows[-1]["position"]) if is_full else None}


def _list_segments(tx: Tx, job_id: str, wanted: ItemsWanted) -> dict[str, Any]:
    after = wanted.after + 1  # positions begin at 0, segments at 1
    found = traces.segments(tx, job_id, after=after, limit=wanted.limit, status=wanted.status)
    history = traces.errors(tx, job_id, [each.segment for each in found])
    names = ("first_id", "last_id", "cids", "status", "attempts", "run", "rows", "error_class")
    shown = [
        {
            "index": each.segment - 1,
            **{name: getattr(each, name) for name in names},
            "failures": each.failures,
            "errors": history.get(each.segment, []),
        }
        for each in found
    ]
    is_full = len(found) == wanted.limit
    return {"items": shown, "next": str(found[-1].segment - 1) if is_full else None}


def _own(tx: Tx, caller: Caller, job_id: str) -> Job:
    job = jobs.find(tx, job_id, client=None if caller.is_admin else caller.client)
    if job is None:
        raise JobNotFound
    return job


def _item(row: dict[str, Any], history: list[dict[str, Any]]) -> dict[str, Any]:
    names = ("target_table", "target_id", "custom_id", "embedding_version", "model", "status")
    return {
        "index": row["position"],
        **{name: row[name] for name in names},
        **_target_of(row),
        "skip_reason": row["skip_reason"],
        "attempts": row["attempts"],
        "error_class": row["error_class"],
        "errors": history,
    }


def _primary(row: dict[str, Any], history: list[dict[str, Any]]) -> dict[str, Any]:
    failed = row["status"] == "failed" and history
    error = f"{history[-1]['error_class']}: {history[-1]['message']}" if failed else None
    return {"status": row["status"], "attempts": row["attempts"], "error": error}


def _follower(state: dict[str, Any]) -> dict[str, Any]:
    error = f"{state['error_class']}: {state['last_error']}" if state["error_class"] else None
    return {"status": state["status"], "attempts": state["attempts"], "error": error}


def _ledger_key(row: dict[str, Any]) -> vectors.Key:
    return row["target_table"], row["target_id"], row["embedding_version"]


def result(
    ctx: Context, caller: Caller, sink: PrimarySink, job_id: str, *, offset: int, limit: int
) -> dict[str, Any]:
    """Return a page of a finished job's outcomes in input order, with vectors where asked for.

    Raises JobNotFound, JobNotFinished, ResultExpired.
    """
    with ctx.database.transaction() as tx:
        job = readable(tx, caller, job_id)
        after = items.position_before(tx, job_id, offset) if offset else -1
        found = _found(tx, sink, job, after=after, limit=limit)
    lines = _lines(ctx, job, found)
    return {
        "job_id": job.id,
        "state": job.state,
        "total": job.counts.total,
        "offset": offset,
        "limit": limit,
        "items": [line for _, line in lines],
    }


def readable(tx: Tx, caller: Caller, job_id: str) -> Job:
    """Return a job whose result can be read now."""
    job = _own(tx, caller, job_id)
    if not job.state.is_final:
        raise JobNotFinished
    if job.is_expired:
        raise ResultExpired
    return job


def stream(
    ctx: Context, caller: Caller, sink: PrimarySink, job_id: str
) -> Iterator[dict[str, Any]]:
    """Yield every outcome of a finished job; it is checked before the first line is asked for."""
    with ctx.database.transaction() as tx:
        job = readable(tx, caller, job_id)
    return _stream(ctx, sink, job)


def _stream(ctx: Context, sink: PrimarySink, job: Job) -> Iterator[dict[str, Any]]:
    after = -1
    while True:
        # A transaction a block: a slow reader holds nothing open.
        with ctx.database.transaction() as tx:
            found = _found(tx, sink, job, after=after, limit=STREAM_BLOCK)
        lines = _lines(ctx, job, found)
        for after, line in lines:  # noqa: B007 - the last position is where the next block begins
            yield line
        if len(lines) < STREAM_BLOCK:
            return


_Vectors = dict[tuple[str, str, str], list[float]]


@dataclass(frozen=True, slots=True)
class _Found:
    """Items of a result, and the vectors that the primary has of them."""

    rows: list[dict[str, Any]]
    vectors: _Vectors


def _found(tx: Tx, sink: PrimarySink, job: Job, *, after: int, limit: int) -> _Found:
    rows = items.page(tx, job.id, after=after, limit=limit)
    return _Found(rows, _vectors(tx, sink, rows) if job.return_vectors else {})


def _lines(ctx: Context, job: Job, found: _Found) -> list[tuple[int, dict[str, Any]]]:
    """Return the lines of a result; raises ResultExpired where a vector is gone from Redis."""
    vectors = found.vectors | _kept(ctx, job, found.rows)
    return [(row["position"], _line(row, vectors)) for row in found.rows]


def _kept(ctx: Context, job: Job, rows: list[dict[str, Any]]) -> _Vectors:
    """Return the vectors of items without a target, which lie in Redis."""
    wanted = {
        row["position"]: _key(row)
        for row in rows
        if row["target_table"] == NO_TARGET and _outcome(row)[0] == "done"
    }
    if not wanted:
        return {}
    try:
        kept = ctx.live.vectors(job.id, [*wanted])
    except BellsUnavailable as exc:
        message = "Redis, where the vectors of this result are, cannot answer now"
        raise StoreUnavailable(message) from exc
    if len(kept) < len(wanted):
        raise ResultExpired("vectors of this result are gone from Redis: requeue the job")
    return {key: kept[position] for position, key in wanted.items()}


def _line(row: dict[str, Any], vectors: _Vectors) -> dict[str, Any]:
    outcome, error_class = _outcome(row)
    line = {
        "index": row["position"],
        **_target_of(row),
        "custom_id": row["custom_id"],
        "outcome": outcome,
    }
    if row["metadata"] is not None:
        # Postgres writes 1e300 out as an integer. As none beyond 64 bits gets in, it was a float.
        line["metadata"] = orjson.loads(json.dumps(row["metadata"]))
    if outcome == "failed":
        line["error_class"] = error_class
    if outcome == "done" and _key(row) in vectors:
        line["vector"] = vectors[_key(row)]
    return line


def _outcome(row: dict[str, Any]) -> tuple[str, str | None]:
    if not row["is_current"]:
        return "superseded", None
    if row["outcome"]:
        return row["outcome"], row["frozen_class"]
    return row["status"], row["error_class"]


def _key(row: dict[str, Any]) -> tuple[str, str, str]:
    return row["target_table"], row["embedding_version"], row["target_id"]


def _target_of(row: dict[str, Any]) -> dict[str, str | None]:
    has_none = row["target_table"] == NO_TARGET
    return {name: None if has_none else row[name] for name in ("target_table", "target_id")}


def _vectors(tx: Tx, sink: PrimarySink, rows: list[dict[str, Any]]) -> _Vectors:
    found: _Vectors = {}
    for target in targets.registered(tx):
        ids = [row["target_id"] for row in rows if _belongs(row, target)]
        if ids:
            for target_id, vector in sink.read(tx, target, ids).items():
                found[target.target_table, target.embedding_version, target_id] = vector
    return found


def _belongs(row: dict[str, Any], target: Target) -> bool:
    return (row["target_table"], row["embedding_version"]) == (
        target.target_table,
        target.embedding_version,
    )


def cursor_of_jobs(text: str | None) -> tuple[datetime | None, str | None]:
    """Read the cursor of a list of jobs; raises InvalidRequest."""
    if text is None:
        return None, None
    found = CURSOR.fullmatch(text.replace(" ", "+"))  # what a URL makes of a bare +
    try:
        if found:
            return datetime.fromisoformat(found[1]), found[2]
    except ValueError:  # the 31st of February
        pass
    message = "must be one that a list gave"
    fault = Fault("wrong_form", message, "cursor")
    raise InvalidRequest(f"cursor: {message}", faults=[fault])
