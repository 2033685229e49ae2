"""POST /api/embeddings, as JSON and as a stream of lines."""

import logging
import re
from threading import BoundedSemaphore
from typing import Any, cast

from flask import Blueprint, Response, current_app, g, request

from app.core import status, submission
from app.core.context import Context
from app.core.errors import Fault, InvalidRequest, StoreUnavailable, TooManyQueued
from app.core.ports import PrimarySink
from app.core.requests import BatchOptions, EmbeddingBatch, parse
from app.core.submission import Incoming, RepeatKey, Submitted
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
    submitted = _stream(ctx) if is_stream else _batch(ctx)
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
    if seconds is None:
        return None
    stopping = current_app.extensions["stopping"]
    final = status.wait_until_final(
        ctx, g.caller, submitted.job_id, seconds=seconds, is_stopping=stopping
    )
    if not final:
        return None
    sink = cast("PrimarySink", current_app.extensions["sink"])
    result = status.result(ctx, g.caller, sink, submitted.job_id, offset=0, limit=PAGE)
    location = f"/api/job/{submitted.job_id}"
    return body.answer(result, 200, {"Location": location, "Preference-Applied": f"wait={seconds}"})


def _preferred_wait() -> int | None:
    for preference in request.headers.get("Prefer", "").split(","):
        name, _, value = (part.strip() for part in preference.partition("="))
        # A preference that is not understood is ignored, as RFC 7240 has it.
        if name.lower() == "wait" and WAIT_DIGITS.fullmatch(value):
            return min(int(value), WAIT_MOST)
    return None
