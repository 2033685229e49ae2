"""POST of work: batches as JSON and as lines, documents, traces; and DELETE of what was stored."""

import logging
import re
import time
from threading import BoundedSemaphore
from typing import Any, cast

from flask import Blueprint, Response, current_app, g, request

from app.core import deletion, status, submission, trace_result
from app.core.context import Context
from app.core.errors import Fault, InvalidRequest, RequestError, StoreUnavailable, TooManyQueued
from app.core.ports import PrimarySink, TraceSource
from app.core.requests import (
    BatchOptions,
    Deletion,
    EmbeddingBatch,
    Ingest,
    Traced,
    TraceRequest,
    check_trace,
    parse,
)
from app.core.submission import Incoming, RepeatKey, Submitted
from app.core.trace import SYNC_BYTES, Ask, read_now
from app.core.trace import body as trace_body
from app.web import body
from app.web.auth import needs

log = logging.getLogger(__name__)

blueprint = Blueprint("submit", __name__)

JSON = "application/json"
LINES = "application/x-ndjson"
OPTIONS = ("model", "embedding_version", "project", "priority", "return_vectors")
KEY_CHARACTERS = 255
WAIT_MOST = 55
WAIT_DIGITS = re.compile("[0-9]{1,9}")
PAGE = 1000


@blueprint.post("/api/embeddings")
@needs("submit")
def embeddings() -> Response:
    """Accept a batch: 202 with the job, or 200 with its result where `Prefer: wait` allowed it."""
    ctx = cast("Context", current_app.extensions["context"])
    is_stream = body.require_type(JSON, LINES) == LINES
    return _answered(ctx, _stream(ctx) if is_stream else _batch(ctx))


def _answered(ctx: Context, submitted: Submitted) -> Response:
    """Answer with the result where the job became final in the time that the caller would wait."""
    try:
        return _waited(ctx, submitted) or _accepted(submitted)
    except StoreUnavailable as exc:
        # The batch is stored: whatever happens from here on, its 202 is true.
        facts = {"event": "postgres_lost", "job_id": submitted.job_id}
        log.warning("not waited for: %s", exc, extra=facts)
        return _accepted(submitted)


def _accepted(submitted: Submitted) -> Response:
    location = f"/api/job/{submitted.job_id}"
    return body.answer(submitted.answer, 202, {"Location": location, "Retry-After": "1"})


def _batch(ctx: Context) -> Submitted:
    body.only_arguments("on_invalid")
    skip = body.word("on_invalid", ["skip", "refuse"]) == "skip"
    raw = body.read(ctx.settings.max_body_bytes, "max_body_bytes")
    batch = parse(EmbeddingBatch, body.parse(raw))
    most = ctx.settings.max_batch_items
    if len(batch.items) > most:
        message = f"{len(batch.items)} items, the limit of a JSON batch is {most}: send NDJSON"
        raise InvalidRequest(message, faults=[Fault("too_many_items", message, "items")])
    incoming = Incoming(options=batch, values=batch.items, skip_invalid=skip)
    return submission.submit(ctx, g.caller, incoming, _repeat_key(lambda: _fingerprint(raw)))


def _stream(ctx: Context) -> Submitted:
    body.only_arguments("on_invalid", *OPTIONS)
    skip = body.word("on_invalid", ["skip", "refuse"]) == "skip"
    settings = ctx.settings
    slots = cast("BoundedSemaphore", current_app.extensions["streams"])
    if not slots.acquire(blocking=False):
        message = f"{settings.max_streams} NDJSON bodies are being read; the limit is max_streams"
        raise TooManyQueued(message, retry_after_seconds=5)
    try:
        fingerprint = submission.begin_fingerprint(request.path, request.query_string)
        values = body.lines(
            line_bytes=settings.max_text_bytes * 6 + body.LINE_EXTRA_BYTES,
            limit_bytes=settings.max_stream_bytes,
            seconds=settings.stream_seconds,
            seen=fingerprint.update,
        )
        incoming = Incoming(
            options=parse(BatchOptions, _typed_arguments()),
            values=values,
            skip_invalid=skip,
            is_stream=True,
        )
        return submission.submit(ctx, g.caller, incoming, _repeat_key(fingerprint.digest))
    finally:
        slots.release()


def _fingerprint(raw: bytes) -> bytes:
    return submission.fingerprint_of(request.path, request.query_string, raw)


def _typed_arguments() -> dict[str, Any]:
    found: dict[str, Any] = {name: request.args[name] for name in OPTIONS if name in request.args}
    if "priority" in found:
        found["priority"] = body.integer("priority", default=0, least=-10, most=10)
    if "return_vectors" in found:
        found["return_vectors"] = body.word("return_vectors", ["true", "false"]) == "true"
    return found


def _repeat_key(fingerprint: Any) -> RepeatKey | None:  # noqa: ANN401
    key = request.headers.get("Idempotency-Key")
    if key is None:
        return None
    if not 0 < len(key) <= KEY_CHARACTERS or not key.isascii() or not key.isprintable():
        message = f"must be 1 to {KEY_CHARACTERS} printable ASCII characters"
        fault = Fault("wrong_form", message, "Idempotency-Key")
        raise InvalidRequest(f"Idempotency-Key: {message}", faults=[fault])
    return RepeatKey(key, fingerprint)


def _waited(ctx: Context, submitted: Submitted) -> Response | None:
    """Wait as `Prefer: wait=N` asks (RFC 7240); return the result if the job became final."""
    seconds = _preferred_wait()
    if seconds is None or not _becomes_final(ctx, submitted, seconds):
        return None
    sink = cast("PrimarySink", current_app.extensions["sink"])
    result = status.result(ctx, g.caller, sink, submitted.job_id, offset=0, limit=PAGE)
    location = f"/api/job/{submitted.job_id}"
    return body.answer(result, 200, {"Location": location, "Preference-Applied": f"wait={seconds}"})


def _becomes_final(ctx: Context, submitted: Submitted, seconds: int) -> bool:
    stopping = current_app.extensions["stopping"]
    return status.wait_until_final(
        ctx, g.caller, submitted.job_id, seconds=seconds, is_stopping=stopping
    )


@blueprint.post("/memory/ingest")
@needs("submit")
def ingest() -> Response:
    """Accept a document in records: 202 with the job of its chunks, as for a batch."""
    ctx = cast("Context", current_app.extensions["context"])
    body.only_arguments()
    body.require_type(JSON)
    raw = body.read(ctx.settings.max_body_bytes, "max_body_bytes")
    asked = parse(Ingest, body.parse(raw))
    submitted = submission.ingest(ctx, g.caller, asked, _repeat_key(lambda: _fingerprint(raw)))
    return _answered(ctx, submitted)


@blueprint.delete("/api/items")
@needs("submit")
def delete_items() -> Response:
    """Delete the vectors of rows of a target from every sink."""
    ctx = cast("Context", current_app.extensions["context"])
    body.only_arguments()
    body.require_type(JSON)
    raw = body.read(ctx.settings.max_body_bytes, "max_body_bytes")
    asked = parse(Deletion, body.parse(raw))
    most = ctx.settings.max_batch_items
    if len(asked.target_ids) > most:
        message = f"{len(asked.target_ids)} ids, the limit is {most}"
        raise InvalidRequest(message, faults=[Fault("too_many_items", message, "target_ids")])
    sink = cast("PrimarySink", current_app.extensions["sink"])
    return body.answer(deletion.delete(ctx, g.caller, sink, asked))


# ---- traces -------------------------------------------------------------------------------------


@blueprint.post("/api/trace/events")
@needs("submit")
def trace_events() -> Response:
    """Answer the events of up to the threshold of ids at once; of more, 202 with the job."""
    ctx = cast("Context", current_app.extensions["context"])
    body.only_arguments()
    body.require_type(JSON)
    raw = body.read(ctx.settings.max_body_bytes, "max_body_bytes")
    source = cast("TraceSource", current_app.extensions["source"])
    asked = parse(TraceRequest, body.parse(raw))
    traced = check_trace(asked, source.domains(), most_ids=ctx.settings.trace_max_cids)
    preferences = _preferences()
    is_small = len(traced.ids) <= ctx.settings.trace_async_cid_threshold
    if is_small and "respond-async" not in preferences:
        return _answered_now(ctx, source, traced)
    submitted = submission.submit_trace(
        ctx, g.caller, traced, _repeat_key(lambda: _fingerprint(raw))
    )
    try:
        return _waited_trace(ctx, submitted) or _accepted(submitted)
    except StoreUnavailable as exc:
        facts = {"event": "postgres_lost", "job_id": submitted.job_id}
        log.warning("not waited for: %s", exc, extra=facts)
        return _accepted(submitted)


def _answered_now(ctx: Context, source: TraceSource, traced: Traced) -> Response:
    settings = ctx.settings
    slots = cast("BoundedSemaphore", current_app.extensions["traces"])
    if not slots.acquire(blocking=False):
        message = (
            f"{settings.trace_max_sync} requests are being answered at once; "
            "the limit is trace_max_sync: wait, or send Prefer: respond-async"
        )
        raise TooManyQueued(message, retry_after_seconds=5)
    try:
        ask = Ask(
            domains=traced.domains,
            ids=traced.ids,
            as_of=status.now(ctx),
            deadline=time.monotonic() + settings.trace_sync_seconds,
            is_partial=traced.is_partial,
            most_bytes=min(SYNC_BYTES, settings.trace_result_bytes),
        )
        found = read_now(source, traced.profile, ask, segment_cids=settings.trace_segment_cids)
    finally:
        slots.release()
    return Response(trace_body(found), mimetype=JSON)


def _waited_trace(ctx: Context, submitted: Submitted) -> Response | None:
    seconds = _preferred_wait()
    if seconds is None or not _becomes_final(ctx, submitted, seconds):
        return None
    try:
        found = trace_result.all_of(ctx, g.caller, submitted.job_id)
    except RequestError:  # it failed, or was cancelled: its job says why
        return None
    location = f"/api/job/{submitted.job_id}"
    headers = {"Location": location, "Preference-Applied": f"wait={seconds}"}
    return Response(trace_body(found), 200, headers, mimetype=JSON)


# ---- preferences --------------------------------------------------------------------------------


def _preferences() -> dict[str, str]:
    """Return what `Prefer` asks for; what is not understood is ignored, as RFC 7240 has it."""
    found: dict[str, str] = {}
    for preference in request.headers.get("Prefer", "").split(","):
        name, _, value = (part.strip() for part in preference.partition("="))
        found.setdefault(name.lower(), value)
    return found


def _preferred_wait() -> int | None:
    value = _preferences().get("wait", "")
    return min(int(value), WAIT_MOST) if WAIT_DIGITS.fullmatch(value) else None
