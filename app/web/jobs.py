"""Jobs: one, its items, its result, the list; requeue and cancel."""

from typing import Any, cast

from flask import Blueprint, Response, current_app, g, request

from app.core import requeue as second_chance
from app.core import status, trace_result
from app.core.context import Context
from app.core.errors import Fault, InvalidRequest
from app.core.model import JobState, is_trace
from app.core.ports import PrimarySink
from app.core.requests import Nothing, Requeue, parse
from app.core.store.jobs import JobFilter
from app.web import body
from app.web.auth import needs

blueprint = Blueprint("jobs", __name__)
traces = Blueprint("trace_jobs", __name__, url_prefix="/api/trace/job/<job_id>")
"""The same calls under the path that trace jobs were first asked for."""

STATUSES = ("pending", "processing", "done", "skipped", "failed", "cancelled")
PAGE_MOST = 5000


def _ctx() -> Context:
    return cast("Context", current_app.extensions["context"])


@traces.url_value_preprocessor
@blueprint.url_value_preprocessor
def _without_nul(_: str | None, values: dict[str, Any] | None) -> None:
    # Postgres takes no U+0000 even in a question; with this in its place there is no such job.
    if values and "job_id" in values:
        values["job_id"] = values["job_id"].replace("\0", "\ufffd")


@traces.get("")
@blueprint.get("/api/job/<job_id>")
@needs("read")
def job(job_id: str) -> Response:
    """Answer the job; with `?wait=N` as soon as it changes, at the latest after N seconds."""
    body.only_arguments("wait")
    seconds = body.integer("wait", default=None, least=1, most=55)
    if seconds is None:
        return body.answer(status.find(_ctx(), g.caller, job_id))
    stopping = current_app.extensions["stopping"]
    return body.answer(
        status.wait(_ctx(), g.caller, job_id, seconds=seconds, is_stopping=stopping).body
    )


@traces.get("/items")
@blueprint.get("/api/job/<job_id>/items")
@needs("read")
def items(job_id: str) -> Response:
    """Answer a page of the job's items with every failed attempt."""
    body.only_arguments("status", "cursor", "limit")
    wanted = status.ItemsWanted(
        after=cast("int", body.integer("cursor", default=-1, least=0, most=2**31 - 1)),
        limit=cast("int", body.integer("limit", default=100, least=1, most=PAGE_MOST)),
        status=body.word("status", STATUSES),
    )
    return body.answer(status.list_items(_ctx(), g.caller, job_id, wanted))


@traces.get("/result")
@blueprint.get("/api/job/<job_id>/result")
@needs("read")
def result(job_id: str) -> Response:
    """Answer the result of a finished job: a page, or everything as NDJSON."""
    return _trace_result(job_id) if is_trace(job_id) else _embedding_result(job_id)


def _embedding_result(job_id: str) -> Response:
    body.only_arguments("offset", "limit")
    offset = cast("int", body.integer("offset", default=0, least=0, most=2**31 - 1))
    limit = cast("int", body.integer("limit", default=1000, least=1, most=PAGE_MOST))
    sink = cast("PrimarySink", current_app.extensions["sink"])
    if body.wants_lines():
        return body.answer_lines(status.stream(_ctx(), g.caller, sink, job_id))
    return body.answer(status.result(_ctx(), g.caller, sink, job_id, offset=offset, limit=limit))


def _trace_result(job_id: str) -> Response:
    """Without a domain the manifest; with one a page of its rows; as lines everything of it."""
    body.only_arguments("domain", "offset", "limit")
    domain = request.args.get("domain")
    offset = body.integer("offset", default=None, least=0, most=2**31 - 1)
    limit = body.integer("limit", default=None, least=1, most=PAGE_MOST)
    if body.wants_lines():
        _refuse_paging(offset, limit, "everything is sent as lines")
        lines = trace_result.stream(_ctx(), g.caller, job_id, domain)
        return Response(lines, mimetype="application/x-ndjson")
    if domain is None:
        _refuse_paging(offset, limit, "needs a domain")
        return body.answer(trace_result.manifest(_ctx(), g.caller, job_id))
    return body.answer(
        trace_result.rows(
            _ctx(), g.caller, job_id, domain, offset=offset or 0, limit=limit or PAGE_MOST
        )
    )


def _refuse_paging(offset: int | None, limit: int | None, message: str) -> None:
    for name, value in (("offset", offset), ("limit", limit)):
        if value is not None:
            fault = Fault("unknown_argument", message, name)
            raise InvalidRequest(f"{name}: {message}", faults=[fault])


@blueprint.get("/api/jobs")
@needs("read")
def jobs() -> Response:
    """Answer the caller's jobs, newest first."""
    body.only_arguments("state", "kind", "cursor", "limit")
    before_at, before_id = status.cursor_of_jobs(request.args.get("cursor"))
    wanted = JobFilter(
        client=None if g.caller.is_admin else g.caller.client,
        state=body.word("state", [state.value for state in JobState]),
        kind=body.word("kind", ["embedding", "trace"]),
        before_at=before_at,
        before_id=before_id,
    )
    limit = cast("int", body.integer("limit", default=50, least=1, most=200))
    return body.answer(status.page(_ctx(), wanted, limit=limit))


@traces.post("/requeue")
@blueprint.post("/api/job/<job_id>/requeue")
@needs("requeue")
def requeue(job_id: str) -> Response:
    """Give the job's failed items another allowance of attempts."""
    body.only_arguments()
    why = second_chance.Why("api", parse(Requeue, _small_body()).reason)
    return body.answer(second_chance.requeue(_ctx(), g.caller, job_id, why), 202)


@traces.post("/cancel")
@blueprint.post("/api/job/<job_id>/cancel")
@needs("submit")
def cancel(job_id: str) -> Response:
    """Stop what of the job has not run."""
    body.only_arguments()
    parse(Nothing, _small_body())
    return body.answer(second_chance.cancel(_ctx(), g.caller, job_id))


def _small_body() -> Any:  # noqa: ANN401
    raw = body.read(body.SMALL_BODY_BYTES, "small_body_bytes")
    if not raw:
        return {}
    body.require_type("application/json")
    return body.parse(raw)
