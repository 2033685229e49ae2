"""The one HTTP client out: a deadline for all of a call, and one table from its errors to ours.

httpx bounds each read and each write, so a backend that sends a byte a second holds its caller for
ever. Here every wait on a socket ends when the call ends; only the resolver keeps its own limits.
"""

import json
import re
import socket
import ssl
import time
from base64 import b64encode
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from email.utils import formatdate, parsedate_to_datetime
from typing import Any, cast

import httpcore
import httpx
import orjson

from app.core.errors import (
    ERROR_TEXT_CHARACTERS,
    AnswerFault,
    BackendFault,
    ConfigError,
    ErrorClass,
    RequestFault,
    WorkError,
)

ANSWER_BYTES = 256 * 2**20
"""Largest answer: 1,000 vectors of 10,000 numbers."""
ERROR_BYTES = 64 * 2**10
CONNECT_SECONDS = 10.0
"""For each address: a host that is switched off shows long before a model would be loaded."""
IDLE_SECONDS = 4.0
"""For a kept connection: less than uvicorn's 5 s, so that none is used while it is closed."""
RETRY_AFTER_CAP_SECONDS = 3600.0
WRITE_BYTES = 64 * 2**10
ECHO_CHARACTERS = 16


@dataclass(frozen=True, slots=True)
class Call:
    """One request: what is sent, and which statuses besides the successes are an answer to it."""

    method: str
    path: str
    content: bytes = b""
    content_type: str = "application/json"
    expected: frozenset[int] = frozenset()
    wants_answer: bool = True
    """False: a success is enough, whatever it says."""


@dataclass(frozen=True, slots=True)
class Answered:
    """A status and the JSON object that came with it."""

    status: int
    body: dict[str, Any]


class Http:
    """A backend's base URL, with connections that are kept.

    A user and password in the URL are sent as Basic, a `key` as Bearer instead; neither shows in
    a message. Nothing is retried, no redirect followed, no proxy used. Raises ConfigError for a
    URL or key that can never work.
    """

    def __init__(self, url: str, *, key: str = "") -> None:
        base = _base_url(url)
        authorization = _authorization(base, key)
        self._secrets = (key, base.username, base.password, *authorization.values())
        self._client = httpx.Client(
            base_url=base.copy_with(username=None, password=None),
            headers=authorization,
            transport=_Transport(is_tls=base.scheme == "https"),
            trust_env=False,
            follow_redirects=False,
        )

    def post_json(
        self, path: str, body: Mapping[str, Any], *, seconds: float, texts: Sequence[str] = ()
    ) -> dict[str, Any]:
        """Send one request and return the JSON object that is its answer, all within `seconds`.

        Raises BackendFault, RequestFault or AnswerFault. Whatever a message repeats of `texts` is
        blanked.
        """
        call = Call("POST", path, _encoded(body))
        return self.send(call, seconds=seconds, texts=texts).body

    def send(self, call: Call, *, seconds: float, texts: Sequence[str] = ()) -> Answered:
        """Send one request of any kind, in the same way.

        A status that is no success and not one of the call's `expected` is raised.
        """
        ends_at = time.monotonic() + seconds
        timeouts = {"connect": ends_at, "read": ends_at, "write": ends_at, "pool": seconds}
        try:
            with self._client.stream(
                call.method,
                call.path,
                content=call.content,
                headers={"Content-Type": call.content_type},
                extensions={"timeout": timeouts},
            ) as response:
                if not response.is_success and response.status_code not in call.expected:
                    raise status_fault(
                        response.status_code,
                        response.headers,
                        _beginning(response),
                        hidden=(*self._secrets, *texts),
                    )
                answer = _whole(response)
        except _EXCEPTIONS as exc:
            raise exception_fault(exc) from exc
        return Answered(response.status_code, _decoded(answer) if call.wants_answer else {})

    def close(self) -> None:
        """Close the connections."""
        self._client.close()


def _base_url(url: str) -> httpx.URL:
    try:
        base = httpx.URL(url)
        base.host.encode("idna")
    except (httpx.InvalidURL, UnicodeError):
        raise ConfigError(["the backend's URL cannot be read"]) from None
    if base.scheme not in ("http", "https") or not base.host or (base.port or 0) > 65535:  # noqa: PLR2004
        raise ConfigError(["the backend's URL must be http:// or https://, a host, and a port"])
    if base.query or base.fragment:
        raise ConfigError(["the backend's URL must end with its path: no ? and no #"])
    return base


def _authorization(base: httpx.URL, key: str) -> dict[str, str]:
    if key and not re.fullmatch(r"[!-~]+", key):
        raise ConfigError(["the backend's key holds a character that no HTTP header may have"])
    if key:
        return {"Authorization": f"Bearer {key}"}
    if base.userinfo:
        pair = f"{base.username}:{base.password}".encode()
        return {"Authorization": f"Basic {b64encode(pair).decode()}"}
    return {}


def _encoded(body: Mapping[str, Any]) -> bytes:
    try:
        return orjson.dumps(body)
    except orjson.JSONEncodeError:
        message = "a text cannot be sent: it is not valid Unicode"
        raise RequestFault(ErrorClass.BAD_INPUT, message) from None


def _whole(response: httpx.Response) -> bytes:
    parts: list[bytes] = []
    size = 0
    for part in response.iter_bytes():
        size += len(part)
        if size > ANSWER_BYTES:
            raise AnswerFault(f"the answer is larger than {ANSWER_BYTES} bytes")
        parts.append(part)
    return b"".join(parts)


def _beginning(response: httpx.Response) -> bytes:
    """Return what an error says, or as much of it as arrives: its status is known by now."""
    body = bytearray()
    try:
        for part in response.iter_bytes():
            body += part
            if len(body) >= ERROR_BYTES:
                break
    except (httpx.TransportError, httpx.DecodingError):
        pass
    return bytes(body[:ERROR_BYTES])


def _decoded(answer: bytes) -> dict[str, Any]:
    try:
        decoded = orjson.loads(answer)
    except orjson.JSONDecodeError:
        raise _undecodable(answer) from None
    if not isinstance(decoded, dict):
        raise AnswerFault("the answer is JSON, but no object")
    return cast("dict[str, Any]", decoded)


def _undecodable(answer: bytes) -> WorkError:
    if _is_json_but_for_its_numbers(answer):
        return AnswerFault("the answer holds a number that is not finite")
    is_page = _plain(answer[:ERROR_BYTES].decode("utf-8", "replace")) == HTML_PAGE
    what = HTML_PAGE if is_page else f"{len(answer)} bytes"
    return _fault(*_BROKEN, f"the answer is not whole JSON: {what}")


def _is_json_but_for_its_numbers(answer: bytes) -> bool:
    try:
        json.loads(answer)  # unlike orjson it takes NaN, Infinity and 1e999
    except (ValueError, RecursionError):
        return False
    return True


class _Transport(httpx.HTTPTransport):
    """httpx's transport, whose time limits are moments at which the whole call ends."""

    def __init__(self, *, is_tls: bool) -> None:
        super().__init__(verify=False, trust_env=False)
        self._pool = httpcore.ConnectionPool(
            ssl_context=_tls() if is_tls else None,
            keepalive_expiry=IDLE_SECONDS,
            network_backend=_Backend(),
        )


def _tls() -> ssl.SSLContext:
    context = httpx.create_ssl_context(trust_env=False)
    context.load_default_certs()  # an authority of the site's own is in the system's store only
    return context


class _Backend(httpcore.SyncBackend):
    def connect_tcp(
        self,
        host: str,
        port: int,
        timeout: float | None = None,
        local_address: str | None = None,
        socket_options: Iterable[httpcore.SOCKET_OPTION] | None = None,
    ) -> httpcore.NetworkStream:
        """Try each address of the host; the last one's error is the host's."""
        error: Exception = httpcore.ConnectError("the host has no address")
        for address in _addresses(host, port):
            try:
                seconds = _left_to_connect(timeout)
                stream = super().connect_tcp(address, port, seconds, local_address, socket_options)
                return _Stream(stream)
            except (httpcore.ConnectError, httpcore.ConnectTimeout) as exc:
                error = exc
        raise error


def _addresses(host: str, port: int) -> list[str]:
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    except OSError as exc:
        raise httpcore.ConnectError(str(exc)) from exc
    return [str(address[0]) for *_, address in found]


class _Stream(httpcore.NetworkStream):
    def __init__(self, stream: httpcore.NetworkStream) -> None:
        self._stream = stream

    def read(self, max_bytes: int, timeout: float | None = None) -> bytes:
        return self._stream.read(max_bytes, _left(timeout, httpcore.ReadTimeout))

    def write(self, buffer: bytes, timeout: float | None = None) -> None:
        for start in range(0, len(buffer), WRITE_BYTES):
            piece = buffer[start : start + WRITE_BYTES]
            self._stream.write(piece, _left(timeout, httpcore.WriteTimeout))

    def close(self) -> None:
        self._stream.close()

    def start_tls(
        self,
        ssl_context: ssl.SSLContext,
        server_hostname: str | None = None,
        timeout: float | None = None,
    ) -> httpcore.NetworkStream:
        seconds = _left_to_connect(timeout)
        return _Stream(self._stream.start_tls(ssl_context, server_hostname, seconds))

    def get_extra_info(self, info: str) -> Any:  # noqa: ANN401
        return self._stream.get_extra_info(info)


def _left_to_connect(ends_at: float | None) -> float:
    return min(CONNECT_SECONDS, _left(ends_at, httpcore.ConnectTimeout))


def _left(ends_at: float | None, error: type[Exception]) -> float:
    seconds = (ends_at or 0.0) - time.monotonic()
    if seconds <= 0:
        raise error
    return seconds


_AWAY = (BackendFault, ErrorClass.UNREACHABLE)
_BUSY = (BackendFault, ErrorClass.BUSY)
_MISCONFIGURED = (BackendFault, ErrorClass.BAD_CONFIG)
_BROKEN = (RequestFault, ErrorClass.UNREACHABLE)
_SLOW = (RequestFault, ErrorClass.SLOW)
_UNCLEAR = (RequestFault, ErrorClass.UNCLEAR)
_REFUSED = (RequestFault, ErrorClass.BAD_INPUT)

_Verdict = tuple[type[BackendFault] | type[RequestFault], ErrorClass]

EXCEPTIONS: Mapping[type[Exception], tuple[_Verdict, str]] = {
    httpx.ConnectError: (_AWAY, "no connection"),
    httpx.ConnectTimeout: (_AWAY, "no connection in time"),
    httpx.PoolTimeout: (_AWAY, "no free connection in time"),
    httpx.ProxyError: (_AWAY, "no connection through the proxy"),
    httpx.ReadTimeout: (_SLOW, "no answer in time"),
    httpx.WriteTimeout: (_SLOW, "the request was not taken in time"),
    httpx.TimeoutException: (_SLOW, "no answer in time"),
    httpx.ReadError: (_BROKEN, "the connection broke while the answer was awaited"),
    httpx.WriteError: (_BROKEN, "the connection broke while the request was sent"),
    httpx.CloseError: (_BROKEN, "the connection broke while it was closed"),
    httpx.NetworkError: (_BROKEN, "the connection broke"),
    httpx.RemoteProtocolError: (_BROKEN, "the answer ended early or is not HTTP"),
    httpx.ProtocolError: (_BROKEN, "the answer is not HTTP"),
    httpx.DecodingError: (_BROKEN, "the answer cannot be unpacked"),
    httpx.LocalProtocolError: (
        _MISCONFIGURED,
        "the request is not HTTP: look at the URL and the key",
    ),
    httpx.UnsupportedProtocol: (_MISCONFIGURED, "the URL is neither http:// nor https://"),
    httpx.InvalidURL: (_MISCONFIGURED, "the URL cannot be read"),
    httpx.TooManyRedirects: (_MISCONFIGURED, "the backend redirects"),
    httpx.CookieConflict: (_UNCLEAR, "the backend set two cookies of one name"),
    httpx.TransportError: (_UNCLEAR, "the exchange failed"),
    httpx.RequestError: (_UNCLEAR, "the exchange failed"),
    httpx.HTTPStatusError: (_UNCLEAR, "the backend answered with an error"),
    httpx.HTTPError: (_UNCLEAR, "the exchange failed"),
    httpx.StreamError: (_UNCLEAR, "the answer was read out of turn"),
    httpx.StreamConsumed: (_UNCLEAR, "the answer was read out of turn"),
    httpx.StreamClosed: (_UNCLEAR, "the answer was read out of turn"),
    httpx.ResponseNotRead: (_UNCLEAR, "the answer was read out of turn"),
    httpx.RequestNotRead: (_UNCLEAR, "the answer was read out of turn"),
}
"""What each of httpx's exceptions means; their own texts may hold the key and are not shown."""

_EXCEPTIONS = tuple(EXCEPTIONS)

STATUSES: Mapping[int, _Verdict] = {
    **dict.fromkeys((401, 402, 403, 404, 405, 407, 410), _MISCONFIGURED),
    **dict.fromkeys((424, 429, 503, 529), _BUSY),
    **dict.fromkeys((502, 504, 520, 521, 522, 523, 524, 530), _AWAY),
    **dict.fromkeys((400, 413, 422), _REFUSED),
}
"""What a status means; 300 to 399 are a redirect, any other one is unclear."""

SIZE_CODES = frozenset({"max_tokens_per_request", "array_above_max_length"})

ONE_TEXT = re.compile(
    r"""\bNaN\b | context\ (length|size|window) | input\ length
    | input\ (\(.{0,30}\)\ )?is\ too\ (long|large) | less\ than\ \d+\ tokens
    | maximum\ sequence | physical\ batch\ size""",
    re.IGNORECASE | re.VERBOSE,
)
"""Messages that blame one text, whatever the status: the model's NaN, or more than it can read."""

WHOLE_CALL = re.compile(
    r"""max_tokens_per_request | per[ _-](request|batch|call)\b | per\ submitted\ batch
    | \bbatch[ _]size | max\w*\ (allowed\ )?batch | batch\b.{0,20}(too\ (large|big)|limit|exceed)
    | more\ batches | array\ .{0,10}too\ long | number\ of\ (inputs|texts|items)
    | at\ most\ \d+\ (inputs|texts|items|elements|documents)
    | too\ many\ (inputs|texts|items|documents|tokens\ overall)
    | (request|body|payload|entity)\ (is\ )?too\ large""",
    re.IGNORECASE | re.VERBOSE,
)
"""Messages that name the items or tokens of one request: no text is to blame."""

HTML_PAGE = "an HTML page"


def exception_fault(exc: Exception) -> WorkError:
    """Return our error for one of httpx's."""
    (kind, error_class), message = next(EXCEPTIONS[c] for c in type(exc).__mro__ if c in EXCEPTIONS)
    reason = _plain(str(exc)) if isinstance(exc, httpx.ConnectError) else ""
    return _fault(kind, error_class, f"{message}: {reason}" if reason else message)


def status_fault(
    status: int, headers: Mapping[str, str], body: bytes, *, hidden: Sequence[str] = ()
) -> WorkError:
    """Return our error for an answer that is no success, with a message that hides `hidden`."""
    told = read_error(body)
    shown = _plain(_blanked(told.message, hidden)) or "without a message"
    message = f"{status}: {shown}"[:ERROR_TEXT_CHARACTERS]
    verdict = _MISCONFIGURED if 300 <= status < 400 else STATUSES.get(status, _UNCLEAR)  # noqa: PLR2004
    blames_one_text = bool(ONE_TEXT.search(told.message))
    wish = headers.get("x-should-retry", "").strip().lower()
    if verdict == _UNCLEAR and blames_one_text:
        return _fault(*_REFUSED, message)
    if verdict == _UNCLEAR and wish == "false":
        return RequestFault(ErrorClass.UNCLEAR, message)
    if verdict != _REFUSED:
        return _fault(*verdict, message, retry_after(headers))
    if told.code in SIZE_CODES or (
        not blames_one_text and (status == 413 or WHOLE_CALL.search(told.message))  # noqa: PLR2004
    ):
        return RequestFault(ErrorClass.BAD_INPUT, message, is_size_limit=True)
    return _fault(*(_UNCLEAR if wish == "true" else _REFUSED), message)


def _fault(
    kind: type[BackendFault] | type[RequestFault],
    error_class: ErrorClass,
    message: str,
    retry_after_seconds: float | None = None,
) -> WorkError:
    if issubclass(kind, BackendFault):
        return kind(error_class, message, retry_after_seconds=retry_after_seconds)
    is_passing = error_class in (ErrorClass.UNREACHABLE, ErrorClass.UNCLEAR)
    return kind(error_class, message, retry_whole=is_passing)


@dataclass(frozen=True, slots=True)
class Told:
    """What a backend's error body says."""

    message: str
    code: str = ""


def read_error(body: bytes) -> Told:
    """Read the error body of any server that we know: five shapes of JSON, else plain text."""
    text = body.decode("utf-8", "replace")[:ERROR_TEXT_CHARACTERS]
    try:
        answer = orjson.loads(body)
    except orjson.JSONDecodeError:
        return Told(text)
    match answer:
        case {"error": {"message": str(message), **more}}:
            return Told(message, str(more.get("code") or more.get("type") or ""))
        case {"error": str(message), **more} | {"message": str(message), **more}:
            return Told(message, str(more.get("code") or more.get("error_type") or ""))
        case {"detail": str(message)}:
            return Told(message)
        case {"detail": [*faults]}:
            return Told("; ".join(map(_validation_fault, faults)))
        case _:
            return Told(text)


def _validation_fault(fault: Any) -> str:  # noqa: ANN401
    """Show a fault of pydantic's by place and message: its `input` is the text that was sent."""
    try:
        return f"{'.'.join(map(str, fault['loc']))}: {fault['msg']}"
    except (TypeError, KeyError):
        return "invalid"


def retry_after(headers: Mapping[str, str]) -> float | None:
    """Return for how many seconds a backend asks to be left alone, an hour at most, or None.

    A date is measured against the backend's own clock where it tells that.
    """
    value = headers.get("retry-after", "")
    milliseconds = _number(headers.get("retry-after-ms", ""))
    seconds = _number(value) if milliseconds is None else milliseconds / 1000
    if seconds is None:
        until = _moment(value)
        since = _moment(headers.get("date", "")) or _moment(formatdate(usegmt=True))
        seconds = (until - since).total_seconds() if until and since else 0.0
    return min(seconds, RETRY_AFTER_CAP_SECONDS) if seconds > 0 else None


def _number(value: str) -> float | None:
    return float(value) if re.fullmatch(r"\s*[0-9]+(\.[0-9]+)?\s*", value) else None


def _moment(value: str) -> datetime | None:
    try:
        moment = parsedate_to_datetime(value)
    except (ValueError, TypeError, OverflowError, IndexError):
        return None
    return moment if moment.tzinfo else moment.replace(tzinfo=UTC)


def _plain(text: str) -> str:
    """Return one short line: no markup, and no character that a store or a terminal would mind."""
    if re.match(r"\s*<[!?a-z]", text, re.IGNORECASE):
        return HTML_PAGE
    text = re.sub(r"</?[a-z!][^<>]*>", " ", text, flags=re.IGNORECASE)
    text = "".join(letter if letter.isprintable() else " " for letter in text)
    return " ".join(text.split())[:ERROR_TEXT_CHARACTERS]


def _blanked(message: str, hidden: Sequence[str]) -> str:
    """Blank each run of characters that the message has in common with something hidden."""
    message = message[: 2 * ERROR_TEXT_CHARACTERS].replace("\0", " ")
    sent = "\0".join(hidden)
    for text in hidden:
        if 3 <= len(text) < ECHO_CHARACTERS:  # noqa: PLR2004 - shorter ones are parts of any word
            message = re.sub(rf"(?<!\w){re.escape(text)}(?!\w)", "…", message)
    blank = {
        place
        for start in range(len(message) - ECHO_CHARACTERS + 1)
        if message[start : start + ECHO_CHARACTERS] in sent
        for place in range(start, start + ECHO_CHARACTERS)
    }
    kept = "".join("\0" if place in blank else letter for place, letter in enumerate(message))
    return re.sub("\0+", "…", kept)
