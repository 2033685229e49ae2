"""A wire to a server that can stop at a word, lose an answer, go dead, or be slow.

It reads what a client of Postgres sends message by message, so that a conversation can be stopped
right before a statement is heard, or when it has been carried out and nobody knows.
"""

import select
import socket
import struct
import threading
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from enum import Enum, auto
from typing import Self
from urllib.parse import urlsplit, urlunsplit

from tests.processes import wait_for

CHUNK_BYTES = 65536
LOOK_SECONDS = 0.01
REACH_SECONDS = 30.0
NEGOTIATIONS = (80877103, 80877104)
"""The codes of the requests for TLS and for GSSAPI, which come before the one to begin."""


class Moment(Enum):
    """When to stop: as the words are sent, or at the COMMIT behind them; unheard, or carried out.

    AFTER is when their answer comes.
    """

    BEFORE = auto()
    AFTER = auto()
    BEFORE_COMMIT = auto()
    AFTER_COMMIT = auto()

    @property
    def is_commit(self) -> bool:
        """Whether it is about the COMMIT that follows the words."""
        return self in (Moment.BEFORE_COMMIT, Moment.AFTER_COMMIT)

    @property
    def is_after(self) -> bool:
        """Whether the server has done what it was told."""
        return self in (Moment.AFTER, Moment.AFTER_COMMIT)


@dataclass
class Stop:
    """Where a conversation ends: held until it is released, or cut."""

    words: bytes
    moment: Moment
    is_cut: bool = False
    marked: "Line | None" = None
    """Who has said the words."""
    is_met: bool = False
    reached: threading.Event = field(default_factory=threading.Event)
    released: threading.Event = field(default_factory=threading.Event)

    def wait(self) -> None:
        """Wait until a conversation stands there; void where none does."""
        assert self.reached.wait(REACH_SECONDS), f"VOID: nobody came to {self.words!r}"

    def meets(self, line: "Line", text: bytes) -> bool:
        """Whether this is what a conversation has to stop at."""
        if self.is_met:
            return False
        if not self.moment.is_commit:
            self.is_met = self.words in text
        elif self.words in text:
            self.marked = line
        elif self.marked is line and text == b"ROLLBACK":
            self.marked = None
        else:
            self.is_met = self.marked is line and text == b"COMMIT"
        return self.is_met


class Asks:
    """Cuts what a client of Postgres sends into messages, and says what each of them executes."""

    def __init__(self) -> None:
        self._data = b""
        self._has_begun = False
        self._statements: dict[bytes, bytes] = {}

    def feed(self, data: bytes) -> Iterator[tuple[bytes, bytes]]:
        """Give each whole message with the statement that it executes, if any."""
        self._data += data
        while message := self._next():
            yield message, self._statement(message) if self._has_begun else b""
            if message[:1] == b"\0":  # no type: the length comes first
                self._has_begun = struct.unpack("!I", message[4:8])[0] not in NEGOTIATIONS

    def _next(self) -> bytes:
        start = 1 if self._has_begun else 0
        if len(self._data) < start + 4:
            return b""
        size = start + int(struct.unpack_from("!I", self._data, start)[0])
        if len(self._data) < size:
            return b""
        message, self._data = self._data[:size], self._data[size:]
        return message

    def _statement(self, message: bytes) -> bytes:
        kind, payload = message[:1], message[5:]
        match kind:
            case b"Q":
                return payload.rstrip(b"\0")
            case b"P":
                name, query = payload.split(b"\0", 2)[:2]
                self._statements[name] = query
                return b""
            case b"B":
                return self._statements.get(payload.split(b"\0", 2)[1], b"")
            case _:
                return b""


class Words:
    """What a client of any other server sends, as it comes."""

    def feed(self, data: bytes) -> Iterator[tuple[bytes, bytes]]:
        """Give it on."""
        yield data, data


@dataclass(eq=False)
class Line:
    """One connection through the wire."""

    client: socket.socket
    server: socket.socket
    asks: Asks | Words
    awaited: Stop | None = None
    """The stop whose answer is on its way."""
    is_reset: bool = False
    is_frozen: bool = False

    def end(self) -> None:
        """End both halves: whoever reads them wakes up, and they are closed."""
        for each in (self.client, self.server):
            how = socket.SHUT_RD if self.is_reset and each is self.client else socket.SHUT_RDWR
            with suppress(OSError):
                each.shutdown(how)

    def reset(self) -> None:
        """End it so that the client hears of a fault, and not of an end."""
        self.is_reset = True
        with suppress(OSError):
            self.client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self.end()

    @property
    def is_left(self) -> bool:
        """Whether the client has gone, whatever it has sent before."""
        poll = select.poll()
        try:
            poll.register(self.client, select.POLLRDHUP)
            return bool(poll.poll(0))
        except (OSError, ValueError):
            return True


@dataclass
class Wire:
    """Passes everything on, until it is told to do otherwise."""

    server_url: str
    delay_seconds: float = 0.0
    """How long each piece is on its way."""
    cut: int = 0
    passed_bytes: int = 0
    _stops: list[Stop] = field(default_factory=list)
    _lines: list[Line] = field(default_factory=list)
    _threads: list[threading.Thread] = field(default_factory=list)
    _lock: threading.Lock = field(default_factory=threading.Lock)
    _flows: threading.Event = field(default_factory=threading.Event)
    _is_closed: bool = False

    def __enter__(self) -> Self:
        self._flows.set()
        self._listener = socket.create_server(("127.0.0.1", 0))
        self._acceptor = threading.Thread(target=self._listen, daemon=True)
        self._acceptor.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._is_closed = True
        self._flows.set()
        for stop in self._stops:
            stop.released.set()
        with suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)  # else accept() would not see close()
        self._listener.close()
        self._acceptor.join()
        for line in list(self._lines):
            line.end()
        for thread in self._threads:
            thread.join()

    @property
    def url(self) -> str:
        """The server's URL through this wire."""
        parts = urlsplit(self.server_url)
        port = self._listener.getsockname()[1]
        place = f"{parts.username or ''}:{parts.password or ''}@127.0.0.1:{port}"
        return urlunsplit(parts._replace(netloc=place))

    # ---- what happens to it

    def stop(self, words: str, moment: Moment, *, is_cut: bool = False) -> Stop:
        """Hold the next conversation that says these words, or cut it."""
        stop = Stop(words.encode(), moment, is_cut)
        with self._lock:
            self._stops.append(stop)
        return stop

    def lose_the_answer_behind(self, words: str) -> Stop:
        """Cut the connection that sends these words, when its next COMMIT has been carried out."""
        return self.stop(words, Moment.AFTER_COMMIT, is_cut=True)

    def go_dead(self) -> None:
        """Pass nothing on any more, and tell nobody: whoever connects now is heard by no one."""
        self._flows.clear()

    def freeze_all(self) -> None:
        """Let the connections that there are go dead, and take new ones."""
        with self._lock:
            for line in self._lines:
                line.is_frozen = True

    def revive(self) -> None:
        """Pass on what was held back, and what comes."""
        self._flows.set()

    def reset(self) -> int:
        """Break every connection; return how many there were."""
        with self._lock:
            lines = list(self._lines)
        for line in lines:
            line.reset()
        self.cut += len(lines)
        return len(lines)

    @property
    def connections(self) -> int:
        """How many lead through it now."""
        with self._lock:
            return len(self._lines)

    @property
    def taken(self) -> int:
        """How many it has taken so far."""
        with self._lock:
            return len(self._threads)

    def wait_until_left(self) -> None:
        """Wait until nobody is connected."""
        wait_for(lambda: not self.connections, REACH_SECONDS)

    # ---- passing on

    def _listen(self) -> None:
        parts = urlsplit(self.server_url)
        speaks_postgres = parts.scheme.startswith("postgres")
        while True:
            try:
                client, _ = self._listener.accept()
            except OSError:
                return
            try:
                server = socket.create_connection((parts.hostname or "", parts.port or 0))
            except OSError:
                client.close()
                continue
            for each in (client, server):
                each.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            line = Line(client, server, Asks() if speaks_postgres else Words())
            thread = threading.Thread(target=self._serve, args=(line,), daemon=True)
            with self._lock:
                self._lines.append(line)
                self._threads.append(thread)
            thread.start()

    def _serve(self, line: Line) -> None:
        with line.client, line.server:
            other = threading.Thread(target=self._pass, args=(self._answer, line), daemon=True)
            other.start()
            self._pass(self._ask, line)
            other.join()
        with self._lock:
            self._lines.remove(line)

    def _pass(self, work: Callable[[Line], None], line: Line) -> None:
        with suppress(OSError):
            work(line)
        line.end()

    def _ask(self, line: Line) -> None:
        while data := line.client.recv(CHUNK_BYTES):
            for message, text in line.asks.feed(data):
                stop = self._met(line, text)
                if stop and stop.moment.is_after:
                    line.awaited = stop
                elif stop and not self._held(line, stop):
                    return
                self._travel(line)
                line.server.sendall(message)

    def _answer(self, line: Line) -> None:
        while data := line.server.recv(CHUNK_BYTES):
            if line.awaited and not self._held(line, line.awaited):
                return
            line.awaited = None
            self._travel(line)
            self.passed_bytes += len(data)
            line.client.sendall(data)

    def _travel(self, line: Line) -> None:
        self._flows.wait()
        while line.is_frozen and not (line.is_left or self._is_closed):
            threading.Event().wait(LOOK_SECONDS)
        if self.delay_seconds:
            threading.Event().wait(self.delay_seconds)

    def _met(self, line: Line, text: bytes) -> Stop | None:
        with self._lock:
            return next((stop for stop in self._stops if stop.meets(line, text)), None)

    def _held(self, line: Line, stop: Stop) -> bool:
        """Stand still at a stop; return whether to go on."""
        if stop.is_cut:
            self.cut += 1
            line.reset()
        stop.reached.set()
        while not (stop.is_cut or stop.released.wait(LOOK_SECONDS) or line.is_left):
            pass
        return stop.released.is_set() and not self._is_closed
