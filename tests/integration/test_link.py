"""How Redis is reached when it is not there, or does not answer."""

import socket
from collections.abc import Iterator
from contextlib import suppress
from threading import Thread

import pytest

from app.core import link
from app.core.errors import BellsUnavailable
from app.core.link import connect, translated


class Silent:
    """A server that takes connections and never says a word."""

    def __init__(self) -> None:
        self.listener = socket.create_server(("127.0.0.1", 0))
        self.taken: list[socket.socket] = []
        Thread(target=self._take, daemon=True).start()

    def _take(self) -> None:
        with suppress(OSError):
            while True:
                self.taken.append(self.listener.accept()[0])

    @property
    def url(self) -> str:
        return f"redis://127.0.0.1:{self.listener.getsockname()[1]}/0"

    def close(self) -> None:
        for each in (self.listener, *self.taken):
            with suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)
            each.close()


@pytest.fixture
def silent(monkeypatch: pytest.MonkeyPatch) -> Iterator[Silent]:
    monkeypatch.setattr(link, "ANSWER_SECONDS", 0.1)
    server = Silent()
    yield server
    server.close()


def ping(client: link.Link) -> None:
    with translated():
        client.ping()


def test_a_redis_that_does_not_answer_is_left_alone_for_a_while(silent: Silent) -> None:
    with connect(silent.url) as client:
        for _ in range(5):
            with pytest.raises(BellsUnavailable):
                ping(client)

    assert len(silent.taken) == 1


def test_it_is_asked_again_when_that_while_is_over(
    silent: Silent, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(link, "REST_SECONDS", 0.0)

    with connect(silent.url) as client:
        for _ in range(3):
            with pytest.raises(BellsUnavailable):
                ping(client)

    assert len(silent.taken) == 3
