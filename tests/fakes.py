"""A scripted embedding backend: a real HTTP server whose every answer a test can bend.

It speaks Ollama's `/api/embed`, OpenAI's `/v1/embeddings` and TEI's `/embed`, each in its own
shape. Left alone it answers rightly: a vector made from model and text, so that a swapped, stale or
foreign one shows. `GET /log` tells what arrived.
"""

import json
import math
import socket
import struct
import threading
import time
from array import array
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass, field, replace
from email.utils import formatdate
from hashlib import sha256
from http.client import responses
from random import Random
from typing import Any, BinaryIO, Self

import orjson

OLLAMA, OPENAI, TEI = "/api/embed", "/v1/embeddings", "/embed"
INPUTS = {OLLAMA: "input", OPENAI: "input", TEI: "inputs"}
NEVER = 3600.0
"""Seconds: longer than any test; close() ends the wait."""


def vector_of(model: str, text: str, dimension: int) -> list[float]:
    """Return the one right vector: norm 1, and every number is a float32 exactly."""
    seed = sha256(f"{model}\0{text}".encode("utf-8", "surrogatepass")).digest()
    noise = array("h", Random(seed).randbytes(2 * dimension))  # noqa: S311 - no secret
    norm = math.hypot(*noise)
    return float32([number / norm for number in noise])


def float32(numbers: Sequence[float]) -> list[float]:
    """Return what a store of float32 keeps of these numbers."""
    return array("f", numbers).tolist()


@dataclass(frozen=True, slots=True)
class Request:
    """One request as it arrived, counted from 1."""

    number: int
    route: str
    texts: tuple[str, ...]
    model: str
    body: Mapping[str, Any]
    headers: Mapping[str, str]
    at_seconds: float

    def has(self, marker: str) -> bool:
        """Whether one of its texts holds the marker."""
        return any(marker in text for text in self.texts)


@dataclass(frozen=True, slots=True)
class Entry:
    """One vector of an answer, or what stands in its place."""

    text: str
    index: int | None
    embedding: Any


Bend = Callable[[list[Entry]], list[Entry]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Reply:
    """How one request is answered; the default is rightly and at once.

    `error` is a message, told in the shape of the route. `body` replaces the whole body. `cut`,
    `reset` and `stall` happen after that share of the body; `hang_up` before anything is sent.
    `drip_seconds` is the pause before each byte of the body, or with `drip_headers` of the whole
    answer. `until` holds the answer back until a test sets it.
    """

    status: int = 200
    error: str | None = None
    code: str | None = None
    body: bytes | None = None
    headers: Mapping[str, str] = field(default_factory=dict)
    bend: Bend | None = None
    delay_seconds: float = 0.0
    until: threading.Event | None = None
    hang_up: bool = False
    cut: float | None = None
    reset: float | None = None
    stall: float | None = None
    drip_seconds: float | None = None
    drip_headers: bool = False

    @property
    def share(self) -> float | None:
        """How much of the body is sent where the rest never comes."""
        shares = (0.0 if self.hang_up else None, self.cut, self.reset, self.stall)
        return next((share for share in shares if share is not None), None)


Rule = Callable[[Request], Reply | None]
"""Says how to answer a request, or None: the next rule decides."""


def missing(entries: list[Entry]) -> list[Entry]:
    """Leave the last vector out."""
    return entries[:-1]


def without_index(entries: list[Entry]) -> list[Entry]:
    """Do not say which text a vector is for."""
    return [replace(entry, index=None) for entry in entries]


def same_index(entries: list[Entry]) -> list[Entry]:
    """Say of each vector that it is for the first text."""
    return [replace(entry, index=0) for entry in entries]


def backwards(entries: list[Entry]) -> list[Entry]:
    """Turn the order around; each keeps its right index."""
    return entries[::-1]


def embedding(make: Callable[[list[float]], object], marker: str = "") -> Bend:
    """Put something else in place of each vector whose text holds the marker."""

    def bend(entries: list[Entry]) -> list[Entry]:
        return [
            replace(entry, embedding=make(entry.embedding)) if marker in entry.text else entry
            for entry in entries
        ]

    return bend


def empty(_: list[float]) -> object:
    """Give no number at all."""
    return []


def zeros(vector: list[float]) -> object:
    """Give a vector without a direction."""
    return [0.0] * len(vector)


def nulls(vector: list[float]) -> object:
    """Give what some JSON libraries make of NaN."""
    return [None] * len(vector)


def ones(vector: list[float]) -> object:
    """Give every text the same vector."""
    return [1.0] * len(vector)


def strings(vector: list[float]) -> object:
    """Give a last element that is no number."""
    return [*vector[:-1], str(vector[-1])]


def nans(vector: list[float]) -> object:
    """Give bare NaN tokens, which are no JSON."""
    return [math.nan] * len(vector)


def of_dimension(dimension: int) -> Callable[[list[float]], object]:
    """Return a maker of vectors with another number of dimensions."""
    return lambda vector: (vector * dimension)[:dimension]


@dataclass(slots=True, kw_only=True)
class Limits:
    """What the backend refuses by itself; each in the words of the server whose route is used."""

    max_items: int | None = None
    max_tokens: int | None = None
    max_characters: int | None = None
    calls_per_window: int | None = None
    window_seconds: float = 10.0
    retry_after_seconds: int = 4


@dataclass(slots=True, kw_only=True)
class Call:
    """One request's line in the log."""

    number: int
    route: str
    items: int
    at_seconds: float
    status: int | None = None
    ended_seconds: float | None = None
    was_given_up: bool = False


class Fake:
    """The backend. Use it as a context manager, or close() it.

    `lanes` is how many requests it works on at once, each for `seconds_per_item` an item, whether
    or not the client still listens. `constant` answers by a text's place in its call, from bytes
    made once, and remembers no texts: for benchmarks.
    """

    def __init__(
        self,
        *,
        dimension: int = 8,
        lanes: int | None = None,
        seconds_per_item: float = 0.0,
        constant: bool = False,
        keeps_bodies: bool = True,
        port: int = 0,
    ) -> None:
        self.dimension = dimension
        self.seconds_per_item = seconds_per_item
        self.constant = constant
        self.keeps_bodies = keeps_bodies and not constant
        self.digests: dict[str, str] = {}
        """What `/api/tags` tells of each model; empty: there is no such route."""
        self.limits = Limits()
        self.rules: list[Rule] = []
        self.requests: list[Request] = []
        self.calls: list[Call] = []
        self.arrivals: dict[str, list[float]] = defaultdict(list)
        self.worked_items = 0
        self.working = 0
        self.most_working = 0
        self.at_once = 0
        self.most_at_once = 0
        self.connections = 0
        self._changed = threading.Condition()
        self._closing = threading.Event()
        self._lanes = threading.Semaphore(lanes) if lanes else None
        self._admitted: list[float] = []
        self._gates: set[threading.Event] = set()
        self._bodies: dict[tuple[str, str, int], bytes] = {}
        self._open: set[socket.socket] = set()
        self._threads: set[threading.Thread] = set()
        self._listener = _bound(port)
        self.port: int = self._listener.getsockname()[1]
        self.url = f"http://127.0.0.1:{self.port}"
        self.accept()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def when(
        self,
        reply: Reply,
        *,
        marker: str = "",
        numbers: Sequence[int] | range | None = None,
        times: int | None = None,
    ) -> None:
        """Answer so where a text holds the marker and the request has such a number.

        At most `times` in all. What was told first goes first.
        """
        left = Counter({"times": times if times is not None else 10**9})

        def rule(request: Request) -> Reply | None:
            is_due = numbers is None or request.number in numbers
            if not (is_due and request.has(marker) and left["times"]):
                return None
            left["times"] -= 1
            return reply

        self.rules.append(rule)

    def refuse(self) -> None:
        """Let nobody connect, and drop who is connected; the port stays ours."""
        with self._changed:
            self._drop()
            self._listener = _bound(self.port)

    def accept(self) -> None:
        """Let everybody connect (again)."""
        self._listener.listen(128)
        self._start(self._listen, self._listener)

    @contextmanager
    def refused(self) -> Iterator[None]:
        """Refuse connections for the length of a block."""
        self.refuse()
        yield
        self.accept()

    def wait_for(self, fact: Callable[[Self], object], seconds: float = 30.0) -> None:
        """Wait until a fact about what arrived or ended is true."""
        with self._changed:
            assert self._changed.wait_for(lambda: fact(self), seconds), "it never came true"

    def log(self) -> dict[str, Any]:
        """Return what GET /log answers."""
        with self._changed:
            return {
                "requests": len(self.calls),
                "items": sum(call.items for call in self.calls),
                "worked_items": self.worked_items,
                "most_working": self.most_working,
                "at_once": self.at_once,
                "most_at_once": self.most_at_once,
                "connections": self.connections,
                "given_up": sum(call.was_given_up for call in self.calls),
                "calls": list(self.calls),
                "arrivals": {text: list(times) for text, times in self.arrivals.items()},
            }

    def close(self) -> None:
        """End every wait and every connection, and come back when all threads have ended."""
        self._closing.set()
        with self._changed:
            self._drop()
            for gate in self._gates:
                gate.set()
            threads = list(self._threads)
        for thread in threads:
            thread.join()

    def _drop(self) -> None:
        with suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)  # a thread in accept() would not see close()
        self._listener.close()
        for connection in self._open:
            with suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)

    def _start(self, work: Callable[[socket.socket], None], argument: socket.socket) -> None:
        def run() -> None:
            try:
                work(argument)
            finally:
                with self._changed:
                    self._threads.discard(threading.current_thread())

        thread = threading.Thread(target=run, daemon=True)
        with self._changed:
            self._threads.add(thread)
        thread.start()

    def _listen(self, listener: socket.socket) -> None:
        while True:
            try:
                connection, _ = listener.accept()
            except OSError:
                return
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            with self._changed:
                if listener is not self._listener or self._closing.is_set():
                    connection.close()
                    return
                self._open.add(connection)
                self.connections += 1
            self._start(self._serve, connection)

    def _serve(self, connection: socket.socket) -> None:
        try:
            with connection.makefile("rb") as incoming, suppress(OSError, EOFError):
                while True:
                    self._exchange(connection, *_read(incoming))
        finally:
            with self._changed:
                self._open.discard(connection)
            connection.close()

    def _exchange(
        self, connection: socket.socket, start: str, headers: dict[str, str], body: bytes
    ) -> None:
        method, path, _ = start.split(" ", 2)
        if method == "POST" and path in INPUTS:
            self._embed(connection, *self._note(path, headers, body))
        elif (method, path) == ("GET", "/api/tags") and self.digests:
            connection.sendall(_answer(200, self._tags()))
        elif (method, path) == ("GET", "/log"):
            connection.sendall(_answer(200, orjson.dumps(self.log())))
        else:
            connection.sendall(_answer(404, b'{"error": "there is no such route"}'))

    def _tags(self) -> bytes:
        models = [
            {"name": name, "model": name, "digest": digest} for name, digest in self.digests.items()
        ]
        return orjson.dumps({"models": models})

    def _embed(self, connection: socket.socket, request: Request, call: Call) -> None:
        try:
            self._reply(connection, request, call)
        except OSError:
            call.was_given_up = True
            raise
        finally:
            self._end(call)

    def _end(self, call: Call) -> None:
        with self._changed:
            if call.ended_seconds is None:
                call.ended_seconds = time.monotonic()
                self.at_once -= 1
            self._changed.notify_all()

    def _note(self, route: str, headers: dict[str, str], body: bytes) -> tuple[Request, Call]:
        sent: dict[str, Any] = orjson.loads(body)
        texts = _texts(sent.get(INPUTS[route]))
        now = time.monotonic()
        with self._changed:
            call = Call(number=len(self.calls) + 1, route=route, items=len(texts), at_seconds=now)
            request = Request(
                call.number, route, texts, str(sent.get("model", "")), sent, headers, now
            )
            self.calls.append(call)
            self.at_once += 1
            self.most_at_once = max(self.most_at_once, self.at_once)
            if self.keeps_bodies:
                self.requests.append(request)
                for text in texts:
                    self.arrivals[text].append(now)
            self._changed.notify_all()
        return request, call

    def _reply(self, connection: socket.socket, request: Request, call: Call) -> None:
        with self._changed:
            ruled = next(filter(None, (rule(request) for rule in self.rules)), None)
            reply = ruled or self._refusal(request) or Reply()
            if reply.until:
                self._gates.add(reply.until)
        if reply.until and not self._closing.is_set():
            reply.until.wait()
        if reply.delay_seconds:
            self._closing.wait(reply.delay_seconds)
        if reply.error is None and reply.body is None:
            self._work(len(request.texts))
        body = self._body(request, reply)
        if _is_gone(connection):
            raise ConnectionResetError
        call.status = reply.status
        if reply.share is None and reply.drip_seconds is None:
            self._end(call)  # before its client can send the next one
        self._send(connection, reply, body)

    def _work(self, items: int) -> None:
        with self._lanes or nullcontext():
            with self._changed:
                self.working += 1
                self.most_working = max(self.most_working, self.working)
            if self.seconds_per_item:
                self._closing.wait(self.seconds_per_item * items)
            with self._changed:
                self.working -= 1
                self.worked_items += items

    def _refusal(self, request: Request) -> Reply | None:
        limits = self.limits
        count, longest = len(request.texts), max(map(len, request.texts), default=0)
        tokens = sum(len(text.encode("utf-8", "surrogatepass")) // 4 for text in request.texts)
        if limits.calls_per_window is not None and self._is_over_rate(request):
            wait = {"Retry-After": str(limits.retry_after_seconds)}
            return Reply(status=429, error="Rate limit reached", headers=wait)
        if "" in request.texts and request.route != OLLAMA:
            return _REFUSALS[request.route]["empty"]
        if limits.max_items is not None and count > limits.max_items:
            message = f"batch size {count} > maximum allowed batch size {limits.max_items}"
            return Reply(status=422, error=message, code="Validation")
        if limits.max_tokens is not None and tokens > limits.max_tokens:
            message = f"Requested {tokens} tokens, max {limits.max_tokens} tokens per request"
            return Reply(status=400, error=message, code="max_tokens_per_request")
        if limits.max_characters is not None and longest > limits.max_characters:
            return _REFUSALS[request.route]["too_long"]
        return None

    def _is_over_rate(self, request: Request) -> bool:
        since = request.at_seconds - self.limits.window_seconds
        self._admitted = [at_seconds for at_seconds in self._admitted if at_seconds > since]
        if len(self._admitted) >= (self.limits.calls_per_window or 0):
            return True
        self._admitted.append(request.at_seconds)
        return False

    def _body(self, request: Request, reply: Reply) -> bytes:
        if reply.body is not None:
            return reply.body
        if reply.error is not None:
            return orjson.dumps(_error(request.route, reply))
        if not self.constant:
            return self._embedded(request, reply.bend)
        key = (request.route, request.model, len(request.texts))
        if key not in self._bodies:
            places = tuple(map(str, range(key[2])))
            same = replace(request, texts=places)
            self._bodies[key] = self._embedded(same, embedding(_as_go_writes_it))
        return self._bodies[key]

    def _embedded(self, request: Request, bend: Bend | None) -> bytes:
        entries = [
            Entry(text, index, vector_of(request.model, text, self.dimension))
            for index, text in enumerate(request.texts)
        ]
        if bend is None:
            return orjson.dumps(_shaped(request, entries))
        return json.dumps(_shaped(request, bend(entries))).encode()  # unlike orjson it writes NaN

    def _send(self, connection: socket.socket, reply: Reply, body: bytes) -> None:
        answer = _answer(reply.status, body, reply.headers)
        start = len(answer) - len(body)
        if reply.share is not None:
            sent = 0 if reply.hang_up else start + int(reply.share * len(body))
            connection.sendall(answer[:sent])
            self._break_off(connection, reply)
        elif reply.drip_seconds is not None:
            self._drip(connection, answer, 0 if reply.drip_headers else start, reply.drip_seconds)
        else:
            connection.sendall(answer)

    def _break_off(self, connection: socket.socket, reply: Reply) -> None:
        if reply.reset is not None:
            # Closed with nothing to linger for, the connection ends by RST instead of FIN.
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        if reply.stall is not None:
            self._closing.wait(NEVER)
        raise EOFError

    def _drip(self, connection: socket.socket, answer: bytes, start: int, seconds: float) -> None:
        connection.sendall(answer[:start])
        for byte in answer[start:]:
            if self._closing.wait(seconds):
                raise EOFError
            connection.sendall(bytes([byte]))


def _as_go_writes_it(vector: list[float]) -> object:
    return [float(f"{number:.9g}") for number in vector]  # as many digits as a float32 has


def _bound(port: int) -> socket.socket:
    bound = socket.socket()
    bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    bound.bind(("127.0.0.1", port))
    return bound


def _read(incoming: BinaryIO) -> tuple[str, dict[str, str], bytes]:
    first = incoming.read(1)
    if not first.isalpha():
        raise EOFError  # gone, or TLS
    start = (first + incoming.readline()).decode("latin-1").strip()
    headers: dict[str, str] = {}
    while line := incoming.readline().decode("latin-1").strip():
        name, _, value = line.partition(":")
        headers[name.strip().lower()] = value.strip()
    size = int(headers.get("content-length", "0"))
    body = incoming.read(size)
    if start.count(" ") < 2 or len(body) < size:
        raise EOFError
    return start, headers, body


def _is_gone(connection: socket.socket) -> bool:
    try:
        return not connection.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT)
    except BlockingIOError:
        return False


def _answer(status: int, body: bytes, headers: Mapping[str, str] | None = None) -> bytes:
    fields = {
        "Content-Type": "application/json",
        "Content-Length": str(len(body)),
        "Date": formatdate(usegmt=True),
    } | dict(headers or {})
    lines = [
        f"HTTP/1.1 {status} {responses.get(status, 'Unknown')}",
        *(f"{name}: {value}" for name, value in fields.items()),
    ]
    return "\r\n".join([*lines, "", ""]).encode("latin-1") + body


def _texts(sent: str | list[str] | None) -> tuple[str, ...]:
    return (sent,) if isinstance(sent, str) else tuple(sent or ())


def _shaped(request: Request, entries: list[Entry]) -> object:
    match request.route:
        case "/api/embed":
            vectors = [entry.embedding for entry in entries]
            return {"model": request.model, "embeddings": vectors, "total_duration": 1}
        case "/v1/embeddings":
            usage = {"prompt_tokens": len(entries), "total_tokens": len(entries)}
            data = [_openai_entry(entry) for entry in entries]
            return {"object": "list", "data": data, "model": request.model, "usage": usage}
        case _:
            return [entry.embedding for entry in entries]


def _openai_entry(entry: Entry) -> dict[str, Any]:
    place = {} if entry.index is None else {"index": entry.index}
    return {"object": "embedding", **place, "embedding": entry.embedding}


def _error(route: str, reply: Reply) -> dict[str, Any]:
    match route:
        case "/api/embed":
            return {"error": reply.error}
        case "/v1/embeddings":
            kind = "invalid_request_error" if reply.status < 500 else "api_error"
            told = {"message": reply.error, "type": kind, "param": None, "code": reply.code}
            return {"error": told}
        case _:
            return {"error": reply.error, "error_type": reply.code or "Backend"}


_REFUSALS: dict[str, dict[str, Reply]] = {
    OLLAMA: {
        "too_long": Reply(status=400, error="the input length exceeds the context length"),
    },
    OPENAI: {
        "empty": Reply(status=400, error="'$.input' is invalid: an input is an empty string"),
        "too_long": Reply(
            status=400,
            error="This model's maximum context length is 8192 tokens, however you requested more",
        ),
    },
    TEI: {
        "empty": Reply(status=400, error="`inputs` cannot be empty", code="Empty"),
        "too_long": Reply(
            status=422,
            error="Input validation error: `inputs` must have less than 512 tokens. Given: 513",
            code="Validation",
        ),
    },
}
