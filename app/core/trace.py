"""A trace result in pieces: ids into segments, rows into pages, pages into answers.

Used by both doors: a worker keeps the pages in Redis, an answer at once in memory. Nobody ever
holds more rows than a page.
"""

import hashlib
import time
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field, replace
from datetime import datetime
from typing import Any

import orjson
import zstandard

from app.core.domains import DOMAINS, Domain, json_rows
from app.core.errors import ErrorClass, SourceFault, WorkError
from app.core.model import Page, Reading
from app.core.ports import Lines, TraceReader, TraceSource

PAGE_ROWS = 5000
FORMAT = b"tz"
"""What a page begins with: rows as app.core.domains has them, compressed with zstd."""

LEVEL = 1
LARGEST_PAGE_BYTES = 2**30
SYNC_BYTES = 64 * 2**20
"""What an answer at once may take in memory, compressed."""


class PageLostError(Exception):
    """A page is gone, or is not what was stored."""


# ---- ids ----------------------------------------------------------------------------------------


def pack_ids(ids: Sequence[str]) -> bytes:
    """Compress ids to be kept with their job."""
    return zstandard.compress("\n".join(ids).encode(), 3)


def unpack_ids(packed: bytes) -> list[str]:
    """Return ids as they were kept."""
    return zstandard.decompress(packed).decode().split("\n")


def segments(ids: Sequence[str], size: int) -> list[Sequence[str]]:
    """Cut sorted ids into what is read at a time."""
    return [ids[first : first + size] for first in range(0, len(ids), size)]


# ---- pages --------------------------------------------------------------------------------------


def pack(data: bytes) -> bytes:
    """Compress the rows of a page."""
    return FORMAT + zstandard.compress(data, LEVEL)


def described(rows: int, packed: bytes) -> Page:
    """Return what is to be known of a page, to find out later whether it is still the same."""
    return Page(rows, len(packed), hashlib.sha256(packed).hexdigest())


def unpack(packed: bytes | None, page: Page) -> bytes:
    """Return the rows of a page; raises PageLostError where it is not the one described."""
    if packed is None or described(page.rows, packed) != page or packed[:2] != FORMAT:
        raise PageLostError
    return zstandard.decompress(packed[2:], max_output_size=LARGEST_PAGE_BYTES)


def paged(blocks: Iterable[Lines]) -> Iterator[Lines]:
    """Cut what a source yields into pages: each is full but the last one."""
    rows, parts = 0, list[bytes]()
    for block in blocks:
        data, left = block.data, block.rows
        while rows + left >= PAGE_ROWS:
            wanted = PAGE_ROWS - rows
            head, data = _cut(data, wanted, left)
            yield Lines(PAGE_ROWS, b"".join([*parts, head]))
            rows, parts, left = 0, [], left - wanted
        if left:
            rows += left
            parts.append(data)
    if rows:
        yield Lines(rows, b"".join(parts))


def _cut(data: bytes, wanted: int, there: int) -> tuple[bytes, bytes]:
    if wanted == there:
        return data, b""
    rest = data.split(b"\n", wanted)[-1]
    return data[: len(data) - len(rest)], rest


# ---- reading a segment --------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Ask:
    """One segment to be read."""

    domains: Sequence[str]
    ids: Sequence[str]
    as_of: datetime
    deadline: float
    """By time.monotonic."""
    is_partial: bool
    most_bytes: int
    """What its pages may take, compressed."""


@dataclass(frozen=True, slots=True)
class Step:
    """How far the reading is: the domain in hand, its rows so far, and the id that it is at."""

    domain: str
    rows: int
    last_id: str


Keep = Callable[[str, int, bytes], None]
"""Keep a page: domain, number in this segment, what it is compressed."""

Note = Callable[[Step], None]


@dataclass(slots=True)
class _Read:
    rows: dict[str, int] = field(default_factory=dict)
    seconds: dict[str, float] = field(default_factory=dict)
    pages: dict[str, list[Page]] = field(default_factory=dict)
    failures: dict[str, ErrorClass] = field(default_factory=dict)
    error: WorkError | None = None
    bytes: int = 0


def read(source: TraceSource, ask: Ask, keep: Keep, note: Note) -> Reading:
    """Read a segment, a domain after the other, and keep its pages as they come.

    A domain that cannot be read ends the reading; if it may be partial, the others are read still.
    Raises WorkError of class result_too_large, and what `keep` and `note` raise.
    """
    done = _Read()
    for name in ask.domains:
        began = time.monotonic()
        try:
            _read_domain(source, ask, name, done, (keep, note))
        except SourceFault as fault:
            done.failures[name] = fault.error_class
            done.error = done.error or fault
            for found in (done.rows, done.pages):
                found.pop(name, None)
            if not ask.is_partial:
                break
        else:
            done.seconds[name] = round(time.monotonic() - began, 3)
    return Reading(done.rows, done.seconds, done.pages, done.failures, done.error)


def _read_domain(
    source: TraceSource, ask: Ask, name: str, done: _Read, told: tuple[Keep, Note]
) -> None:
    keep, note = told
    done.rows[name], done.pages[name] = 0, []
    with source.open() as reader, closing(_blocks(reader, source, ask, DOMAINS[name])) as blocks:
        for number, lines in enumerate(paged(blocks)):
            packed = pack(lines.data)
            done.bytes += len(packed)
            if done.bytes > ask.most_bytes:
                message = f"the result is over the limit by domain {name}: ask for less at a time"
                raise WorkError(ErrorClass.RESULT_TOO_LARGE, message)
            keep(name, number, packed)
            done.pages[name].append(described(lines.rows, packed))
            done.rows[name] += lines.rows
            note(Step(name, done.rows[name], _last_id(lines.data)))


def _last_id(data: bytes) -> str:
    start = data.rfind(b"\n", 0, -1) + 1
    return data[start : data.index(b"\t", start)].decode()


def _blocks(reader: TraceReader, source: TraceSource, ask: Ask, domain: Domain) -> Generator[Lines]:
    """Yield all rows of a domain; raises SourceFault where fewer or more came than were sent."""
    for ids in segments(ask.ids, source.ids_per_statement):
        with closing(reader.events(domain, ids, as_of=ask.as_of, deadline=ask.deadline)) as events:
            came, sent = yield from _counted(events)
        if came != sent:
            message = f"{came} rows of {domain.name} came where the source had sent {sent}"
            raise SourceFault(ErrorClass.COUNT_MISMATCH, message)


def _counted(events: Generator[Lines, None, int]) -> Generator[Lines, None, tuple[int, int]]:
    """Yield what comes; return how many rows came, and how many the source says it sent."""
    came = 0
    while True:
        try:
            lines = next(events)
        except StopIteration as end:
            return came, int(end.value)
        came += lines.rows
        yield lines


# ---- quality ------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Part:
    """A segment as its result is judged: rows by domain, and why a domain is missing."""

    segment: int
    first_id: str
    last_id: str
    cids: int
    rows: Mapping[str, int]
    failures: Mapping[str, str]


def quality(domains: Sequence[str], parts: Sequence[Part]) -> dict[str, Any]:
    """Say of a result whether it is whole, and of each domain what is missing."""
    found = {name: _quality(name, parts) for name in domains}
    is_whole = all(each["status"] == "complete" for each in found.values())
    return {"status": "complete" if is_whole else "partial", "domains": found}


def _quality(name: str, parts: Sequence[Part]) -> dict[str, Any]:
    rows = sum(part.rows.get(name, 0) for part in parts)
    failed = [
        {
            "segment": part.segment,
            "first_id": part.first_id,
            "last_id": part.last_id,
            "cids": part.cids,
            "error_class": part.failures[name],
        }
        for part in parts
        if name in part.failures
    ]
    return {
        "status": "partial" if failed else "complete",
        "rows": rows,
        # Of what failed nobody knows how much it would have been.
        "expected": None if failed else rows,
        "failed": failed,
    }


# ---- answers ------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Rows:
    """Some rows of a page as JSON objects, each with the same end behind it."""

    count: int
    text: str


def page_rows(
    name: str,
    packed: bytes | None,
    page: Page,
    *,
    end: str,
    first: int = 0,
    last: int | None = None,
) -> Rows:
    """Return rows of a page as JSON; raises PageLostError as `unpack` does."""
    data = unpack(packed, page)
    if data.count(b"\n") != page.rows:
        raise PageLostError
    text = json_rows(DOMAINS[name], data, end=end, first=first, last=last)
    count = max(0, min(page.rows, page.rows if last is None else last) - first)
    return Rows(count, text)


@dataclass(frozen=True, slots=True)
class Whole:
    """A result as one answer: what is said of it, and its rows a page at a time."""

    profile: str
    cid_count: int
    quality: Mapping[str, Any]
    domains: Mapping[str, Iterator[Rows]]
    """The rows of each domain, a page at a time, with a comma behind each row."""


def body(whole: Whole) -> Iterator[bytes]:
    """Yield the JSON of an answer at once."""
    head = {"stage": "events", "async": False, "profile": whole.profile}
    yield orjson.dumps({**head, "cid_count": whole.cid_count})[:-1] + b',"results":{'
    for position, (name, pages) in enumerate(whole.domains.items()):
        yield f'{"," if position else ""}"{name}":{{"data":['.encode()
        count, held = 0, ""
        for rows in pages:
            yield held.encode()
            count, held = count + rows.count, rows.text
        # Behind the last row there is no comma.
        yield f'{held.removesuffix(",")}],"count":{count}}}'.encode()
    yield b'},"quality":' + orjson.dumps(whole.quality) + b"}"


def read_now(source: TraceSource, profile: str, ask: Ask, *, segment_cids: int) -> Whole:
    """Read everything that is asked for, compressed in memory, before any of it is answered.

    Raises SourceFault where something of it cannot be read and it may not be partial, or where
    nothing of it can; and WorkError of class result_too_large.
    """
    kept: dict[str, list[tuple[bytes, Page]]] = {name: [] for name in ask.domains}
    parts: list[Part] = []
    error: WorkError | None = None
    left = ask.most_bytes
    for number, ids in enumerate(segments(ask.ids, segment_cids), 1):
        fresh: dict[str, list[bytes]] = {name: [] for name in ask.domains}
        piece = replace(ask, ids=ids, most_bytes=left)
        reading = read(source, piece, _keeper(fresh), _quiet)
        if reading.error and not ask.is_partial:
            raise reading.error
        error = error or reading.error
        for name, pages in reading.pages.items():
            kept[name] += zip(fresh[name], pages, strict=True)
            left -= sum(page.bytes for page in pages)
        parts.append(Part(number, ids[0], ids[-1], len(ids), reading.rows, reading.failures))
    if error and not any(part.rows for part in parts):
        raise error
    domains = {name: _unpacked(name, kept[name]) for name in ask.domains}
    return Whole(profile, len(ask.ids), quality(ask.domains, parts), domains)


def _keeper(fresh: Mapping[str, list[bytes]]) -> Keep:
    return lambda name, _, packed: fresh[name].append(packed)


def _unpacked(name: str, kept: Sequence[tuple[bytes, Page]]) -> Iterator[Rows]:
    return (page_rows(name, packed, page, end=",") for packed, page in kept)


def _quiet(_: Step) -> None:
    """Note nothing: nobody looks at an answer at once before it is there."""
