# pyright: basic
"""The pages: the login, and rq-dashboard mounted behind it, guarded and patched.

By itself rq-dashboard 0.9.0 asks nobody for a key, unpickles what it finds in Redis, shows what it
finds there as HTML, writes the name of a queue in a URL into its script, and requeues by GET.
"""

import logging
import re
import secrets
import zlib
from base64 import b64decode
from collections.abc import Callable
from functools import wraps
from types import SimpleNamespace
from typing import Any, cast
from urllib.parse import urlsplit, urlunsplit

import rq_dashboard
from flask import Blueprint, Flask, Response, current_app, g, redirect, render_template, request
from flask import url_for as path_of
from jinja2 import BaseLoader, ChoiceLoader, Environment, PackageLoader
from rq import Worker
from rq.exceptions import NoSuchJobError
from rq.job import Job as RqJob
from rq.results import Result
from rq.serializers import JSONSerializer
from rq_dashboard import web as dashboard
from werkzeug.exceptions import MethodNotAllowed, NotFound

from app.core import requeue
from app.core.bells import BellJob, BellQueue, job_of
from app.core.context import Context
from app.core.errors import (
    BellsUnavailable,
    Forbidden,
    JobNotFound,
    NothingToRequeue,
    RequestError,
    ScopeMissing,
    Unauthenticated,
)
from app.core.link import Link, translated
from app.core.model import EMBEDDINGS
from app.web import body
from app.web.auth import COOKIE, Keys, check_origin, check_same_origin, require
from app.web.problems import problem

log = logging.getLogger(__name__)

PREFIX = "/rq"
LOGIN_BYTES = 4096
REDIS_RETRY_SECONDS = 5
ERROR_BYTES = 65536
"""As much of a stored error as is unpacked, however far it would go on."""

WHY = requeue.Why("dashboard")

blueprint = Blueprint("pages", __name__)


def register(app: Flask) -> None:
    """Serve the login page, and rq-dashboard under /rq for keys with the scope admin.

    Nothing is connected. Raises AttributeError where rq-dashboard is not as the patches expect it.
    """
    ctx = cast("Context", app.extensions["context"])
    for name, patch in PATCHES.items():
        getattr(dashboard, name)  # a name that is not there would be a hole left open
        setattr(dashboard, name, patch)
    app.config["RQ_DASHBOARD_REDIS_URL"] = (_without_secrets(ctx.settings.redis_url),)
    app.config["RQ_DASHBOARD_DISABLE_DELETE"] = True
    app.redis_conn = ctx.link  # type: ignore[attr-defined]  # where rq-dashboard looks for it
    ours = cast("BaseLoader", app.jinja_loader)
    app.jinja_options = {"loader": ChoiceLoader([ours, DashboardTemplates()])}
    app.register_blueprint(blueprint)
    app.register_blueprint(rq_dashboard.blueprint, url_prefix=PREFIX)
    app.view_functions |= BUTTONS
    for endpoint, view in app.view_functions.items():
        if endpoint.startswith("rq_dashboard."):
            app.view_functions[endpoint] = _translating(view)
    app.before_request(_guard)
    app.after_request(_protect)
    app.register_error_handler(BellsUnavailable, _redis_away)


# ---- the login -------------------------------------------------------------------------------


@blueprint.get("/login")
def login_page() -> Response:
    """Show the one field for the key."""
    return _page(200)


@blueprint.post("/login")
def login() -> Response:
    """Turn a right key into a cookie of this site, and go on to rq-dashboard."""
    check_origin()
    request.max_content_length = LOGIN_BYTES
    key = request.form.get("key", "").strip()
    try:
        cast("Keys", current_app.extensions["keys"]).caller(key)
    except Unauthenticated as exc:
        return _door(exc)
    response = cast("Response", redirect(path_of("rq_dashboard.queues_overview"), 303))
    response.set_cookie(COOKIE, key, httponly=True, samesite="Strict", secure=request.is_secure)
    return response


@blueprint.post("/logout")
def logout() -> Response:
    """Forget the key."""
    check_origin()
    response = cast("Response", redirect(path_of("pages.login_page"), 303))
    response.delete_cookie(COOKIE, httponly=True, samesite="Strict", secure=request.is_secure)
    return response


def _door(error: RequestError) -> Response:
    """Answer a refusal: for a person at a browser the login page, for a program the problem."""
    kinds = ["application/problem+json", "text/html"]
    if request.accept_mimetypes.best_match(kinds) != "text/html":
        raise error
    route = str(request.url_rule or "")
    facts = {"event": "request_refused", "status": error.status, "error_class": error.code}
    log.info("request refused", extra={**facts, "method": request.method, "route": route})
    if isinstance(error, ScopeMissing):
        return _page(error.status, error.message)
    was_sent = COOKIE in request.cookies or request.method == "POST"
    return _page(error.status, "This key is not valid, or no longer." if was_sent else "")


def _page(status: int, message: str = "") -> Response:
    response = Response(render_template("login.html", message=message), status)
    response.headers["Cache-Control"] = "no-store"
    response.headers["Content-Security-Policy"] = LOGIN_POLICY
    if status == Unauthenticated.status:
        response.headers["WWW-Authenticate"] = "Bearer"
    return response


# ---- what a browser is told ------------------------------------------------------------------

POLICY = "default-src 'none'; base-uri 'none'; frame-ancestors 'none'"
LOGIN_POLICY = f"{POLICY}; form-action 'self'; img-src data:; style-src 'self'"
# rq-dashboard makes functions of the templates in its pages, hence eval. A script that was not in a
# page when it left here has no nonce, so it is not run.
DASHBOARD_POLICY = (
    f"{POLICY}; connect-src 'self'; form-action 'self'; img-src 'self' data:;"
    " script-src 'nonce-{nonce}' 'unsafe-eval'; style-src 'self'"
)


def _protect(response: Response) -> Response:
    is_dashboard = "nonce" in g and response.mimetype == "text/html"
    policy = DASHBOARD_POLICY.format(nonce=g.nonce) if is_dashboard else POLICY
    response.headers.setdefault("Content-Security-Policy", policy)
    response.headers.setdefault("X-Frame-Options", "DENY")
    response.headers.setdefault("X-Content-Type-Options", "nosniff")
    # Not no-referrer: a browser would then hide the origin of a form, which check_origin reads.
    response.headers.setdefault("Referrer-Policy", "same-origin")
    return response


def _redis_away(error: BellsUnavailable) -> Response:
    log.error("request not served: %s", error, extra={"event": "redis_lost", "status": 503})
    detail = f"{error.message}; this page needs Redis, the jobs themselves wait in Postgres."
    response = problem(503, error.code, "Redis unavailable", detail)
    response.headers["Retry-After"] = str(REDIS_RETRY_SECONDS)
    return response


# ---- the guard of rq-dashboard -----------------------------------------------------------------

REQUEUE_ONE, REQUEUE_ALL = "rq_dashboard.requeue_job_view", "rq_dashboard.requeue_all"
READING = frozenset({"GET", "HEAD", "OPTIONS"})
ARGUMENTS = {
    "instance_number": "0",
    "queue_name": "[A-Za-z0-9_-]{1,100}",
    "job_id": "[A-Za-z0-9_-]{1,100}",
    "registry_name": "queued|scheduled|deferred|started|finished|failed|canceled",
    "per_page": "[1-9][0-9]?|1[0-9]{2}|200",
    "order": "asc|dsc",
    "page": "[1-9][0-9]{0,5}",
}
"""What may stand in a URL of rq-dashboard, which itself answers 500, or worse, to anything else."""


def _guard() -> Response | None:
    if request.blueprint != "rq_dashboard" and not request.path.startswith(f"{PREFIX}/"):
        return None
    try:
        require("admin")
    except (Unauthenticated, ScopeMissing) as exc:
        return _door(exc)
    if request.url_rule is not None:  # else there is no such page, or not by this method
        _check_method()
        _check_arguments(cast("dict[str, Any]", request.view_args))
        g.nonce = secrets.token_urlsafe(16)
    return None


def _check_method() -> None:
    if request.method not in READING:
        check_same_origin()
        if request.endpoint not in BUTTONS:
            raise Forbidden("bells are not removed by hand: requeue or cancel their job")
    elif request.endpoint == REQUEUE_ALL:
        raise MethodNotAllowed(["POST"])


def _check_arguments(arguments: dict[str, Any]) -> None:
    if request.endpoint == "rq_dashboard.jobs_overview" and arguments["queue_name"] is None:
        arguments["queue_name"] = EMBEDDINGS
    for name in ARGUMENTS.keys() & arguments.keys():
        if not re.fullmatch(ARGUMENTS[name], str(arguments[name])):
            raise NotFound


# ---- its buttons -----------------------------------------------------------------------------


def requeue_one(job_id: str) -> Response:
    """Requeue the job that a bell names, in Postgres; raises JobNotFound, NothingToRequeue."""
    ctx = cast("Context", current_app.extensions["context"])
    requeue.requeue(ctx, g.caller, job_of(job_id), WHY)
    return body.answer({"status": "OK"})


def requeue_all(queue_name: str) -> Response:
    """Requeue every job that a failed bell of a queue names, as far as there is one."""
    ctx = cast("Context", current_app.extensions["context"])
    count = 0
    for job_id in dict.fromkeys(ctx.bells.failed(queue_name)):
        try:
            requeue.requeue(ctx, g.caller, job_id, WHY)
        except (JobNotFound, NothingToRequeue):
            continue
        count += 1
    return body.answer({"status": "OK", "count": count})


BUTTONS: dict[str, Callable[..., Any]] = {REQUEUE_ONE: requeue_one, REQUEUE_ALL: requeue_all}
"""All that rq-dashboard can change."""


def _translating(view: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(view)
    def answering(*args: Any, **kwargs: Any) -> Any:  # noqa: ANN401
        try:
            with translated():
                return view(*args, **kwargs)
        except NoSuchJobError:
            raise JobNotFound from None

    return answering


# ---- what it reads ---------------------------------------------------------------------------


class ShownBell(BellJob):
    """A bell for the eye: whatever is stored beside it is read with as little trust."""

    @property
    def dependency_ids(self) -> list[str]:
        """None: bells depend on nothing."""
        return []

    def get_meta(self, refresh: bool = True) -> dict[str, Any]:  # noqa: ARG002, FBT001, FBT002
        """None: bells have no metadata."""
        return {}

    def latest_result(self, timeout: int = 0) -> Result | None:  # noqa: ARG002
        """How it ended; None also where that cannot be read."""
        key: str = Result.get_key(self.id)  # type: ignore[no-untyped-call]
        stored = cast("list[Any]", self.connection.xrevrange(key, count=1))
        if not stored:
            return None
        number, fields = stored[0]
        packed = fields.pop(b"exc_string", None)
        try:
            result = Result.restore(
                self.id, number.decode(), fields, self.connection, JSONSerializer
            )
            if packed is not None:
                unpacked = zlib.decompressobj().decompress(b64decode(packed), ERROR_BYTES)
                result.exc_string = unpacked.decode("utf-8", "replace")
        except (ValueError, KeyError, RecursionError, zlib.error):
            return None
        return result


class ShownQueue(BellQueue):
    """A queue that looking at does not change."""

    job_class = ShownBell

    def fetch_job(self, job_id: str) -> RqJob | None:
        """Return a bell; None where it is gone, or its id is none."""
        try:
            return ShownBell.fetch(job_id, self.connection)
        except (NoSuchJobError, ValueError):
            return None


class ShownWorker(Worker):
    """A worker as seen from here."""

    job_class = ShownBell
    queue_class = ShownQueue

    def _set_connection(self, connection: Link) -> Link:
        return connection  # RQ would give the API's own client minutes of patience

    def get_current_job(self) -> RqJob | None:
        """Return the bell in hand; None where it is gone already."""
        try:
            return super().get_current_job()
        except (NoSuchJobError, ValueError):
            return None


def _same_link(*_: Any, **__: Any) -> tuple[None, Any]:  # noqa: ANN401
    return None, current_app.redis_conn  # type: ignore[attr-defined]


PATCHES = {
    "Job": ShownBell,
    "Queue": ShownQueue,
    "Worker": ShownWorker,
    "config": SimpleNamespace(serializer=JSONSerializer),
    "from_url": _same_link,  # else each poll opens a connection, with retries for a minute
    "RedisConnectionError": (),  # else it answers 200 while Redis is away
}
"""What is replaced in rq-dashboard's own module."""


def _without_secrets(url: str) -> str:
    parts = urlsplit(url)
    return urlunsplit((parts.scheme, parts.netloc.rpartition("@")[2], parts.path, "", ""))


# ---- its templates -----------------------------------------------------------------------------

STYLES = """<link rel="stylesheet" href="{{ url_for('static', filename='rq.css') }}">"""
SIGN_OUT = (
    """<form method="post" action="{{ url_for('pages.logout') }}">"""
    """<button class="btn btn-link btn-sm">Sign out</button></form>"""
)
REWRITES = (
    # Its scripts make HTML from what stands in Redis: everything is escaped, and only once.
    (r"<%= \$\('<div/>'\)\.text\((.+?)\)\.html\(\) %>", r"<%- \1 %>"),
    (r"<%=", r"<%-"),
    (r"'{{ queue\.name }}'", r"{{ queue.name|tojson }}"),
    # The policy allows neither a script without the nonce nor a style that is not in a file.
    (r"<script(?= src=| type=\"text/javascript\")", r'<script nonce="{{ g.nonce }}"'),
    (r' style="[^"]*"', ""),
    (
        r"(?=</head>)",
        r"""<link rel="stylesheet" href="{{ url_for('static', filename='rq.css') }}">""",
    ),
    (r"url_for\('static', filename='favicon\.ico'\)", "url_for('rq_dashboard.favicon')"),
    (r"(?=</footer>)", SIGN_OUT),
)


class DashboardTemplates(PackageLoader):
    """rq-dashboard's own templates, changed while they are loaded."""

    def __init__(self) -> None:
        super().__init__("rq_dashboard")

    def get_source(
        self, environment: Environment, template: str
    ) -> tuple[str, str, Callable[[], bool] | None]:
        """Return a template as it is to be used."""
        source, path, is_fresh = super().get_source(environment, template)
        for pattern, replacement in REWRITES:
            source = re.sub(pattern, replacement, source)
        return source, path, is_fresh
