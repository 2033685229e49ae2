"""S11: no request, however made, costs more than its limit, or keeps others from being served."""

import gzip
import re
import socket
from collections.abc import Iterator
from contextlib import ExitStack, suppress
from pathlib import Path

import pytest

from tests.api import (  # noqa: F401 - fixtures among them
    GUNICORN,
    JSON,
    LINES,
    Door,
    Ground,
    Served,
    make_backend,
    make_ground,
    make_served,
    serving,
)
from tests.processes import ROOT, wait_for

MIB = 2**20
HUGE = 100 * MIB
THREADS = 4
HEAD_SECONDS = 2
"""Less than production has, which is all that is changed of its settings here."""


@pytest.fixture(scope="module", name="tight")
def make_tight(ground: Ground, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """Serve the ground with few threads, small bodies, and less time for a head."""
    folder = tmp_path_factory.mktemp("tight")
    settings, times = re.subn(
        r"\nHEAD_SECONDS = \d+\n",
        f"\nHEAD_SECONDS = {HEAD_SECONDS}\n",
        (ROOT / GUNICORN).read_text(),
    )
    assert times == 1
    (folder / "gunicorn.conf.py").write_text(settings)
    environ = {**ground.environ, "WEB_THREADS": str(THREADS), "MAX_BODY_BYTES": str(MIB)}
    more = {"MAX_STREAM_BYTES": str(MIB)}
    own = str(folder / "gunicorn.conf.py")
    with serving({**environ, **more}, folder / "api.log", own) as served:
        yield served


@pytest.fixture(name="closed")
def make_closed(ground: Ground, tight: Served) -> Door:
    return tight.door(ground.door().key)


def peak_mib(served: Served) -> int:
    """Return the most memory that a process of the API has ever had."""
    pids = [served.running.pid, *served.running.children]
    texts = [Path(f"/proc/{pid}/status").read_text() for pid in pids]
    return max(int(size) // 1024 for text in texts for size in re.findall(r"VmHWM:\s+(\d+)", text))


def parts(piece: bytes, size: int) -> Iterator[bytes]:
    for _ in range(size // len(piece)):
        yield piece


@pytest.mark.parametrize("kind", [JSON, LINES])
def test_a_hundred_chunked_megabytes_are_refused_at_the_limit(
    tight: Served, closed: Door, kind: str
) -> None:
    before = peak_mib(tight)
    sent = 0

    def counted() -> Iterator[bytes]:
        nonlocal sent
        for part in parts(b'{"text": "' + b"x" * 65526, HUGE):
            sent += len(part)
            yield part

    answer = closed.post_raw(counted(), "", {"Content-Type": kind})

    assert (answer.status, answer.code) == (413, "too_large")
    assert peak_mib(tight) < before + 30
    assert sent <= HUGE


def test_a_packed_bomb_is_refused_as_it_is(tight: Served, closed: Door) -> None:
    before = peak_mib(tight)
    bomb = gzip.compress(b" " * HUGE)
    assert len(bomb) < MIB

    answers = [
        closed.post_raw(bomb, "", {"Content-Encoding": encoding, "Content-Type": kind})
        for encoding in ("gzip", "deflate", "br", "zstd", "gzip, gzip")
        for kind in (JSON, LINES)
    ]

    assert {(each.status, each.code) for each in answers} == {(415, "unsupported_media_type")}
    assert closed.post_raw(bomb).status == 400
    assert peak_mib(tight) < before + 30


ITEM = b'{"items": [{"target_table": "ai_insights", "target_id": 1, "text": "x", "metadata": %s}]}'
TEXT = b'{"items": [{"target_table": "ai_insights", "target_id": 1, "text": %s}]}'

BODIES = {
    "brackets, a hundred thousand deep": (ITEM % (b"[" * 10**5 + b"]" * 10**5), 400),
    "objects, a hundred thousand deep": (ITEM % (b'{"a":' * 10**5 + b"1" + b"}" * 10**5), 400),
    "brackets that never close": (b"[" * 10**5, 400),
    "a number beyond any float": (ITEM % b'{"a": 1e999}', 422),
    "a number with a hundred thousand digits": (ITEM % (b'{"a": ' + b"9" * 10**5 + b"}"), 400),
    "NaN": (ITEM % b'{"a": NaN}', 400),
    "a lone surrogate": (TEXT % rb'"\ud835"', 422),
    "a lone surrogate as a name": (ITEM % rb'{"\udc00": 1}', 422),
    "U+0000": (TEXT % rb'"a\u0000b"', 422),
    "U+0000 as a name": (ITEM % rb'{"a\u0000": 1}', 422),
    "a bare zero byte": (TEXT % b'"a\0b"', 400),
    "no UTF-8": (TEXT % b'"\xff\xfe"', 400),
    "a name that stands twice": (b'{"items": [], "items": []}', 400),
    "a hundred thousand names": (
        ITEM % (b"{" + b",".join(b'"%d":1' % n for n in range(10**5)) + b"}"),
        413,
    ),
}


@pytest.mark.parametrize("name", BODIES)
def test_a_body_that_is_made_to_break_something_is_refused(closed: Door, name: str) -> None:
    sent, status = BODIES[name]

    answer = closed.post_raw(sent)

    assert answer.status in {status, 413, 422}
    assert answer.code
    line = sent.removeprefix(b'{"items": [').removesuffix(b"]}") + b"\n"
    assert closed.post_raw(line, "", {"Content-Type": LINES}).status in {413, 422}


HEADS = {
    "a line that never ends": b"GET /" + b"x" * 100_000,
    "a header that never ends": b"GET /livez HTTP/1.1\r\nX: " + b"x" * 100_000,
    "a thousand headers": b"GET /livez HTTP/1.1\r\n" + b"A: b\r\n" * 1000,
    "two lengths": b"POST /login HTTP/1.1\r\nContent-Length: 1\r\nContent-Length: 2\r\n\r\nxx",
    "a length and chunks": (
        b"POST /login HTTP/1.1\r\nContent-Length: 4\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n"
    ),
    "a length below nothing": b"POST /login HTTP/1.1\r\nContent-Length: -1\r\n\r\n",
    "a chunk without end": (
        b"POST /login HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\n" + b"f" * 1000 + b"\r\n"
    ),
}


@pytest.mark.parametrize("name", HEADS)
def test_a_head_that_is_no_head_is_refused_and_costs_nothing(tight: Served, name: str) -> None:
    answer = b""
    with suppress(OSError):  # what a server leaves unread when it closes takes its answer with it
        answer = tight.exchange(HEADS[name])

    assert re.match(rb"HTTP/1\.1 (4..|501) |$", answer), answer[:100]
    assert b"<html" not in answer
    assert tight.running.is_alive


FORM = b"Host: x\r\nContent-Type: application/x-www-form-urlencoded\r\n"
BEGUN = {
    "a head": b"GET /livez HTTP/1.1\r\nHost: x\r\nX-Slow: ",
    "a body": b"POST /login HTTP/1.1\r\n" + FORM + b"Content-Length: 4000\r\n\r\nkey=",
    "a chunk": b"POST /login HTTP/1.1\r\n" + FORM + b"Transfer-Encoding: chunked\r\n\r\nfff\r\n",
}


@pytest.mark.parametrize(
    "name",
    [pytest.param(each, marks=[pytest.mark.slow] * (each != "a body")) for each in BEGUN],
)
def test_what_comes_slowly_from_nobody_keeps_nobody_from_being_served(
    tight: Served, closed: Door, name: str
) -> None:
    with ExitStack() as stack:
        links = [
            stack.enter_context(socket.create_connection(tight.address, timeout=60))
            for _ in range(THREADS)
        ]
        for link in links:
            link.sendall(BEGUN[name])

        def are_over() -> bool:
            for link in links:
                dribble(link)
            return all(map(is_over, links))

        wait_for(are_over, 30 * HEAD_SECONDS)
        assert closed.get("/livez").status == 200


def dribble(link: socket.socket) -> None:
    try:
        link.send(b"x", socket.MSG_DONTWAIT)
    except OSError:
        return


def is_over(link: socket.socket) -> bool:
    """Whether the server has answered, or has closed the connection."""
    try:
        link.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT)
    except BlockingIOError:
        return False
    except ConnectionError:
        return True
    return True
