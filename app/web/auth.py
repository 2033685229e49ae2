"""Keys: who asks, and whether that is enough; for pages a key becomes a cookie of this site."""

import hmac
import time
from collections.abc import Callable
from functools import wraps
from threading import Lock
from typing import ParamSpec, TypeVar, cast
from urllib.parse import urlsplit

from flask import current_app, g, request

from app.core.config import is_loopback
from app.core.context import Context
from app.core.errors import Forbidden, ScopeMissing, Unauthenticated
from app.core.keys import hash_of, prefix_of
from app.core.model import Caller
from app.core.store import clients

COOKIE = "holdfast_key"
KNOWN_SECONDS = 30
"""How long a key that was right is not looked up again, so how long a revoked one may live."""

ANYONE = Caller("local", frozenset({"admin"}))
"""Who everybody is with AUTH=off."""

P = ParamSpec("P")
R = TypeVar("R")


class Keys:
    """Turns a key into a caller, and remembers it for a short time."""

    def __init__(self, ctx: Context) -> None:
        self._ctx = ctx
        self._known: dict[bytes, tuple[Caller, float]] = {}
        self._lock = Lock()

    def caller(self, key: str) -> Caller:
        """Return whose key this is; raises Unauthenticated."""
        digest = hash_of(key)
        with self._lock:
            known = self._known.get(digest)
        if known and known[1] > time.monotonic():
            return known[0]
        caller = self._look_up(key, digest)
        with self._lock:
            if len(self._known) > 10000:  # noqa: PLR2004 - a bound, so that it cannot grow
                self._known.clear()
            self._known[digest] = (caller, time.monotonic() + KNOWN_SECONDS)
        return caller

    def _look_up(self, key: str, digest: bytes) -> Caller:
        prefix = prefix_of(key)
        with self._ctx.database.transaction() as tx:
            row = clients.find(tx, prefix) if prefix else None
        if row is None or not hmac.compare_digest(bytes(row["key_hash"]), digest):
            raise Unauthenticated
        return Caller(row["client"], frozenset(row["scopes"]))


def needs(scope: str) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Let a view be called only with a key that has the scope; the caller is in `g.caller`."""

    def decorate(view: Callable[P, R]) -> Callable[P, R]:
        @wraps(view)
        def guarded(*args: P.args, **kwargs: P.kwargs) -> R:
            require(scope)
            return view(*args, **kwargs)

        return guarded

    return decorate


def require(scope: str) -> Caller:
    """Return the caller; raises Unauthenticated, ScopeMissing, Forbidden."""
    caller = _identified()
    if not caller.is_admin and scope not in caller.scopes:
        raise ScopeMissing(f"the key lacks the scope {scope}")
    g.caller = caller
    return caller


def _identified() -> Caller:
    ctx = cast("Context", current_app.extensions["context"])
    if ctx.settings.auth == "off":
        _require_this_machine()
        return ANYONE
    key, is_cookie = _sent_key()
    if key is None:
        raise Unauthenticated
    if is_cookie and request.method not in ("GET", "HEAD"):
        check_same_origin()
    return cast("Keys", current_app.extensions["keys"]).caller(key)


def _require_this_machine() -> None:
    if "X-Forwarded-For" in request.headers or "Forwarded" in request.headers:
        raise Forbidden("AUTH=off serves this machine only, but a proxy sent this request")
    # A page elsewhere may let its own name point here; then the browser says that name.
    if not is_loopback(urlsplit(f"//{request.host}").hostname or ""):
        raise Forbidden("AUTH=off serves this machine only: ask for 127.0.0.1 or localhost")


def _sent_key() -> tuple[str | None, bool]:
    scheme, _, token = request.headers.get("Authorization", "").partition(" ")
    if scheme.lower() == "bearer" and token:
        return token.strip(), False
    if request.headers.get("apikey"):
        return request.headers["apikey"], False
    return request.cookies.get(COOKIE), True


def check_same_origin() -> None:
    """Refuse a changing request that no script of ours sent.

    Raises Forbidden. The header X-Requested-With cannot be set by a foreign page.
    """
    check_origin()
    if request.headers.get("X-Requested-With") != "XMLHttpRequest":
        raise Forbidden("send the header X-Requested-With: XMLHttpRequest")


def check_origin() -> None:
    """Refuse what a page of another site made a browser send; raises Forbidden."""
    origin = request.headers.get("Origin")
    is_foreign = origin is not None and origin.partition("://")[2] != request.host
    if is_foreign or request.headers.get("Sec-Fetch-Site", "none") not in ("same-origin", "none"):
        raise Forbidden("the request comes from another site")
