"""S15: whoever can write to Redis can spoil a result, which is made again, but never change it."""

import zlib
from collections.abc import Callable, Generator

import pytest
import zstandard

from app.core import requeue
from app.core.errors import ResultExpired
from app.core.model import JobState
from app.core.trace import FORMAT
from tests.traces import CALLER, TraceMill, open_trace_mill

WHY = requeue.Why("api")
CIDS = 300


@pytest.fixture
def mill(database_url: str, redis_url: str, trace_source_url: str) -> Generator[TraceMill]:
    with open_trace_mill(database_url, redis_url, trace_source_url) as opened:
        yield opened


def rows_of(packed: bytes) -> bytes:
    return zstandard.decompress(packed[len(FORMAT) :], max_output_size=2**30)


def other_rows(packed: bytes) -> bytes:
    """Return as many rows as a page has, each of them the first one."""
    rows = rows_of(packed).splitlines(keepends=True)
    return FORMAT + zstandard.compress(b"".join([rows[0]] * len(rows)), 19)


def with_the_checksum_of(packed: bytes) -> bytes:
    """Return the same with the length and the CRC-32 of the page that it stands in for.

    What comes behind a frame is not looked at by who unpacks it, and four bytes make any checksum.
    """
    forged = other_rows(packed)
    head = forged.ljust(len(packed) - 4, b"\0")
    return head + four_bytes_to(zlib.crc32(head), zlib.crc32(packed))


def four_bytes_to(before: int, wanted: int) -> bytes:
    """Return the bytes that take a CRC-32 from one value to another."""
    # Such a checksum is linear in what it is of: 32 single bits span all that four bytes can do.
    base = zlib.crc32(b"\0" * 4, before)
    columns = [zlib.crc32((1 << bit).to_bytes(4, "little"), before) ^ base for bit in range(32)]
    left, chosen = wanted ^ base, 0
    basis: dict[int, tuple[int, int]] = {}
    for bit, column in enumerate(columns):
        value, mask = column, 1 << bit
        while value and value.bit_length() in basis:
            other, of = basis[value.bit_length()]
            value, mask = value ^ other, mask ^ of
        basis[value.bit_length()] = (value, mask)
    while left:
        other, of = basis[left.bit_length()]
        left, chosen = left ^ other, chosen ^ of
    return chosen.to_bytes(4, "little")


def a_bomb(_: bytes) -> bytes:
    return FORMAT + zstandard.compress(b"\n" * 10**8)


Forgery = Callable[[bytes], bytes]

FORGERIES: dict[str, Forgery] = {
    "other rows": other_rows,
    "other rows with the same length and checksum": with_the_checksum_of,
    "a page of another domain or segment": lambda packed: packed[::-1],
    "no rows": lambda _: FORMAT + zstandard.compress(b""),
    "nothing": lambda _: b"",
    "no frame": lambda packed: FORMAT + b"<script>" * (len(packed) // 8),
    "a pickle": lambda _: b"\x80\x04cos\nsystem\n(S'true'\ntR.",
    "JSON": lambda _: b'[{"forged": true}]',
    "a bomb": a_bomb,
}


@pytest.mark.parametrize("name", FORGERIES)
def test_a_forged_page_is_never_shown_and_made_again(mill: TraceMill, name: str) -> None:
    job_id = mill.submit(CIDS)
    mill.drain(job_id)
    right = mill.result(job_id, "history")
    key = next(key for key in mill.page_keys() if b":history:2-" in key)
    stored = mill.ctx.link.get(key)
    assert isinstance(stored, bytes)
    forged = FORGERIES[name](stored)
    assert forged != stored
    mill.ctx.link.set(key, forged, keepttl=True)

    with pytest.raises(ResultExpired):
        mill.result(job_id, "history")
    with pytest.raises(ResultExpired):  # everybody sees it from now on
        mill.manifest(job_id)

    assert requeue.requeue(mill.ctx, CALLER, job_id, WHY)["requeued"] == 1
    assert mill.work(job_id).state is JobState.COMPLETED
    assert mill.result(job_id, "history") == right


def test_the_forged_checksum_is_the_one_of_the_page(mill: TraceMill) -> None:
    job_id = mill.submit(CIDS)
    mill.drain(job_id)
    key = next(key for key in mill.page_keys() if b":history:2-" in key)
    stored = mill.ctx.link.get(key)
    assert isinstance(stored, bytes)
    forged = with_the_checksum_of(stored)

    assert (len(forged), zlib.crc32(forged)) == (len(stored), zlib.crc32(stored))
    assert rows_of(forged) != rows_of(stored)
    assert rows_of(forged).count(b"\n") == rows_of(stored).count(b"\n")
