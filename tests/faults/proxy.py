"""A wire to Postgres that can lose the answer to a COMMIT: it is done, and nobody knows."""

import socket
import threading
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Self
from urllib.parse import urlsplit, urlunsplit

COMMIT = b"Q\x00\x00\x00\x0bCOMMIT\x00"
CHUNK_BYTES = 65536


@dataclass
class Wire:
    """Passes everything on, until it is told to cut at the next COMMIT behind some words."""

    database_url: str
    cut: int = 0
    _words: bytes | None = None
    _lock: threading.Lock = field(default_factory=threading.Lock)
    _open: list[socket.socket] = field(default_factory=list)

    def __enter__(self) -> Self:
        self._listener = socket.create_server(("127.0.0.1", 0))
        self._open.append(self._listener)
        threading.Thread(target=self._listen, daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        for each in self._open:
            with suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)
            each.close()

    @property
    def url(self) -> str:
        """The database's URL through this wire."""
        parts = urlsplit(self.database_url)
        place = f"{parts.username}:{parts.password}@127.0.0.1:{self._listener.getsockname()[1]}"
        return urlunsplit(parts._replace(netloc=place))

    def lose_the_answer_behind(self, words: str) -> None:
        """Cut the connection that sends these words, when its next COMMIT has been carried out."""
        with self._lock:
            self._words = words.encode()

    def _listen(self) -> None:
        parts = urlsplit(self.database_url)
        while True:
            try:
                client, _ = self._listener.accept()
            except OSError:
                return
            server = socket.create_connection((parts.hostname or "", parts.port or 0))
            self._open += [client, server]
            lost = threading.Event()
            for work in (self._ask, self._answer):
                threading.Thread(target=work, args=(client, server, lost), daemon=True).start()

    def _ask(self, client: socket.socket, server: socket.socket, lost: threading.Event) -> None:
        is_marked = False
        with suppress(OSError):
            while data := client.recv(CHUNK_BYTES):
                with self._lock:
                    if self._words and self._words in data:
                        is_marked, self._words = True, None
                if is_marked and COMMIT in data:
                    lost.set()
                server.sendall(data)
        _close(server)

    def _answer(self, client: socket.socket, server: socket.socket, lost: threading.Event) -> None:
        with suppress(OSError):
            while data := server.recv(CHUNK_BYTES):
                if lost.is_set():
                    self.cut += 1
                    break
                client.sendall(data)
        _close(client)
        _close(server)


def _close(each: socket.socket) -> None:
    with suppress(OSError):
        each.shutdown(socket.SHUT_RDWR)
