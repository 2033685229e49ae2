"""For operators and machines: what a request may hit, and whether this process can serve."""

from typing import cast

from flask import Blueprint, Response, current_app, g, request

from app.core import checks, coverage
from app.core.chunks import CHUNK_TOKENS
from app.core.context import Context
from app.core.requests import (
    CID_CHARACTERS,
    ID_CHARACTERS,
    INGEST_ID_BYTES,
    METADATA_BYTES,
    METADATA_LEVELS,
    SOURCE_BYTES,
)
from app.core.trace import SYNC_BYTES
from app.web import body
from app.web.auth import needs

blueprint = Blueprint("ops", __name__)

INCIDENTS_PAGE = 200


def _ctx() -> Context:
    return cast("Context", current_app.extensions["context"])


@blueprint.get("/livez")
def livez() -> Response:
    """Say that this process answers; nothing else is asked."""
    return body.answer({"status": "ok"})


@blueprint.get("/readyz")
def readyz() -> Response:
    """200 while a POST would be accepted, with what is degraded; else 503."""
    ready = checks.readiness(_ctx())
    return body.answer(ready.shown, 200 if ready.is_ready else 503)


@blueprint.get("/health")
def health() -> Response:
    """Answer the same for people: the state of every part."""
    seen = checks.health(_ctx())
    return body.answer(seen.shown, 200 if seen.is_ready else 503)


@blueprint.get("/api/incidents")
@needs("read")
def incidents() -> Response:
    """Answer the outages of the backend: open ones, and those that ended in the last seven days."""
    body.only_arguments("cursor", "limit")
    limit = cast("int", body.integer("limit", default=50, least=1, most=INCIDENTS_PAGE))
    cursor = request.args.get("cursor")
    return body.answer(checks.incidents(_ctx(), g.caller, cursor=cursor, limit=limit))


@blueprint.get("/api/coverage")
@needs("read")
def covered() -> Response:
    """Answer per target, version and sink what share holds the vector of the current text."""
    body.only_arguments()
    return body.answer({"coverage": coverage.shown(_ctx(), g.caller)})


@blueprint.get("/api/limits")
@needs("read")
def limits() -> Response:
    """Every limit that a request can hit, as numbers."""
    settings = _ctx().settings
    return body.answer(
        {
            "max_body_bytes": settings.max_body_bytes,
            "max_batch_items": settings.max_batch_items,
            "max_stream_bytes": settings.max_stream_bytes,
            "max_streams": settings.max_streams,
            "stream_seconds": settings.stream_seconds,
            "line_bytes": settings.max_text_bytes * 6 + body.LINE_EXTRA_BYTES,
            "max_text_bytes": settings.max_text_bytes,
            "trace_async_cid_threshold": settings.trace_async_cid_threshold,
            "trace_segment_cids": settings.trace_segment_cids,
            "trace_max_cids": settings.trace_max_cids,
            "trace_max_sync": settings.trace_max_sync,
            "trace_sync_seconds": settings.trace_sync_seconds,
            "trace_sync_bytes": SYNC_BYTES,
            "trace_max_queued": settings.trace_max_queued,
            "trace_result_bytes": settings.trace_result_bytes,
            "embedding_result_bytes": settings.embedding_result_bytes,
            "trace_job_timeout_seconds": settings.trace_job_timeout_seconds,
            "trace_job_ttl_seconds": settings.trace_job_ttl_seconds,
            "container_id_characters": CID_CHARACTERS,
            "small_body_bytes": body.SMALL_BODY_BYTES,
            "target_id_characters": ID_CHARACTERS,
            "source_bytes": SOURCE_BYTES,
            "ingest_id_bytes": INGEST_ID_BYTES,
            "chunk_tokens": CHUNK_TOKENS,
            "metadata_bytes": METADATA_BYTES,
            "metadata_levels": METADATA_LEVELS,
            "custom_id_characters": 128,
            "idempotency_key_characters": 255,
            "items_page": 5000,
            "result_page": 5000,
            "jobs_page": 200,
            "incidents_page": INCIDENTS_PAGE,
            "wait_seconds": 55,
            "open_items_per_client": settings.queue_max_per_client,
            "open_bytes_per_client": settings.queue_max_bytes_per_client,
            "attempts_per_item": settings.queue_max_retries,
            "result_ttl_seconds": settings.job_result_ttl_seconds,
        }
    )
