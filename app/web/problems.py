"""Every error as application/problem+json (RFC 9457): ours, and the framework's."""

import logging
import math
from http import HTTPStatus
from typing import Any

import orjson
from flask import Flask, Response, request
from werkzeug.exceptions import HTTPException

from app.core.errors import ErrorClass, HoldfastError, RequestError, StoreUnavailable, WorkError
from app.core.submission import shown

log = logging.getLogger(__name__)

STORE_RETRY_SECONDS = 5
FRAMEWORK_CODES = {
    400: "bad_request",
    404: "not_found",
    405: "method_not_allowed",
    406: "not_acceptable",
    413: "too_large",
    415: "unsupported_media_type",
}


def register(app: Flask) -> None:
    """Answer every error of this application as a problem."""
    app.register_error_handler(RequestError, _refused)
    app.register_error_handler(StoreUnavailable, _unavailable)
    app.register_error_handler(WorkError, _unread)
    app.register_error_handler(HTTPException, _framework)
    app.register_error_handler(Exception, _unforeseen)


def problem(status: int, code: str, title: str, detail: str, **more: Any) -> Response:  # noqa: ANN401
    """Make a problem; `more` are its further members."""
    body = {
        "type": f"urn:holdfast:{code}",
        "title": title,
        "status": status,
        "detail": detail,
        "code": code,
        **more,
    }
    return Response(orjson.dumps(body), status, mimetype="application/problem+json")


def _refused(error: RequestError) -> Response:
    more = {"errors": [shown(fault) for fault in error.faults]} if error.faults else {}
    response = problem(error.status, error.code, error.title, error.message, **more)
    if error.retry_after_seconds is not None:
        response.headers["Retry-After"] = str(error.retry_after_seconds)
    if error.status == HTTPStatus.UNAUTHORIZED:
        response.headers["WWW-Authenticate"] = "Bearer"
    _log_refusal(error.status, error.code)
    return response


def _unavailable(error: StoreUnavailable) -> Response:
    log.error("request not served: %s", error, extra={"event": "postgres_lost", "status": 503})
    response = problem(503, error.code, "Store unavailable", error.message)
    response.headers["Retry-After"] = str(STORE_RETRY_SECONDS)
    return response


# What can go wrong with a trace that is answered at once: the source's fault, or too much of it.
UNREAD = {
    ErrorClass.SOURCE_UNAVAILABLE: HTTPStatus.SERVICE_UNAVAILABLE,
    ErrorClass.SOURCE_TIMEOUT: HTTPStatus.GATEWAY_TIMEOUT,
    ErrorClass.SOURCE_FAILED: HTTPStatus.BAD_GATEWAY,
    ErrorClass.COUNT_MISMATCH: HTTPStatus.BAD_GATEWAY,
    ErrorClass.RESULT_TOO_LARGE: HTTPStatus.REQUEST_ENTITY_TOO_LARGE,
}


def _unread(error: WorkError) -> Response:
    status = UNREAD.get(error.error_class)
    if status is None:
        return _unforeseen(error)
    _log_refusal(status, error.error_class)
    response = problem(status, error.error_class, status.phrase, error.message)
    if status is HTTPStatus.SERVICE_UNAVAILABLE:
        seconds = math.ceil(error.retry_after_seconds or STORE_RETRY_SECONDS)
        response.headers["Retry-After"] = str(seconds)
    return response


def _framework(error: HTTPException) -> Response:
    status = error.code or 500
    code = FRAMEWORK_CODES.get(status, "http_error" if status < 500 else "internal")  # noqa: PLR2004
    title = HTTPStatus(status).phrase
    response = problem(status, code, title, error.description or title)
    for name, value in error.get_headers():
        if name in ("Allow", "Retry-After"):
            response.headers[name] = value
    _log_refusal(status, code)
    return response


def _unforeseen(error: Exception) -> Response:
    log.error(
        "request failed",
        exc_info=error,
        extra={"event": "request_refused", **_where(), "status": 500},
    )
    code = error.code if isinstance(error, HoldfastError) else "internal"
    detail = "Something went wrong on our side; it is in the log of the API, event request_refused."
    return problem(500, code, "Internal error", detail)


def _log_refusal(status: int, code: str) -> None:
    facts = {"event": "request_refused", "status": status, "error_class": code, **_where()}
    log.info("request refused", extra=facts)


def _where() -> dict[str, Any]:
    # The rule and not the path: a path may hold whatever a stranger typed.
    return {"method": request.method, "route": str(request.url_rule or "")}
