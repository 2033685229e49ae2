"""Reading what a caller sent and writing what we answer: strict JSON, lines, caps."""

import json
import re
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NoReturn

import orjson
from flask import Response, request
from werkzeug.exceptions import BadRequest

from app.core.errors import Fault, InvalidRequest, MalformedJson, TooLarge, UnsupportedMediaType

READ_BYTES = 65536
SMALL_BODY_BYTES = 65536
LINE_EXTRA_BYTES = 65536
"""What a line may have beyond its text: the ids, and metadata of 16 KB with every byte escaped."""

CUT_OFF = "the body ended before it was complete"

# Finds the bare words that JSON does not have. Possessive: what it has passed it does not keep.
TOKEN = re.compile(r'"(?:[^"\\]++|\\.)*+"|(NaN|-?Infinity)', re.DOTALL)


def require_type(*wanted: str) -> str:
    """Return the request's media type; raises UnsupportedMediaType where it is none of these."""
    if request.headers.get("Content-Encoding", "identity").lower() != "identity":
        raise UnsupportedMediaType("Content-Encoding is not supported: send the body as it is")
    if request.mimetype not in wanted:
        raise UnsupportedMediaType(f"send {' or '.join(wanted)}")
    charset = request.mimetype_params.get("charset", "utf-8").lower()
    if charset not in ("utf-8", "utf8", "us-ascii"):
        raise UnsupportedMediaType("send UTF-8")
    return request.mimetype


def read(limit_bytes: int, limit_name: str) -> bytes:
    """Read the whole body, chunked or not; raises TooLarge past the limit."""
    return b"".join(_parts(limit_bytes, limit_name))


def _parts(limit_bytes: int, limit_name: str) -> Iterator[bytes]:
    """Yield the body as it comes; raises TooLarge, and BadRequest where its end never came."""
    size, told = 0, request.content_length
    too_large = TooLarge(f"the body is over {limit_name} = {limit_bytes} bytes")
    if (told or 0) > limit_bytes:
        raise too_large
    while part := _next_part():
        size += len(part)
        if size > limit_bytes:
            raise too_large
        yield part
    # gunicorn ends a body quietly where its client went away: half a batch is not to be stored.
    if size < (told or 0):
        raise BadRequest(CUT_OFF)


def _next_part() -> bytes:
    try:
        return request.stream.read(READ_BYTES)
    except Exception as exc:
        # Each server has its own errors for bad chunks and for clients that went away.
        raise BadRequest(CUT_OFF) from exc


def parse(body: bytes) -> Any:  # noqa: ANN401
    """Decode JSON strictly: UTF-8, one meaning, no NaN; raises MalformedJson naming the place.

    Lone surrogates and numbers beyond a float get through: the checks of each field name those by
    their index.
    """
    try:
        text = body.decode()
    except UnicodeDecodeError as exc:
        raise MalformedJson(f"byte {exc.start + 1} is not UTF-8") from None
    try:
        return json.loads(text, object_pairs_hook=_unique, parse_constant=_refuse_constant)
    except _ConstantError as exc:
        raise MalformedJson(f"{exc} is not JSON ({_place_of_constant(text)})") from None
    except json.JSONDecodeError as exc:
        raise MalformedJson(f"{exc.msg} at line {exc.lineno} column {exc.colno}") from None
    except RecursionError:
        raise MalformedJson("the brackets are nested too deeply") from None
    except ValueError:
        raise MalformedJson("a number has too many digits") from None


class _ConstantError(Exception):
    pass


def _refuse_constant(name: str) -> NoReturn:
    raise _ConstantError(name)


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        twice = next(
            name for name, times in Counter(name for name, _ in pairs).items() if times > 1
        )
        raise MalformedJson(f"the name {twice[:40]!a} stands twice in one object")
    return found


def _place_of_constant(text: str) -> str:
    place = next((match.start() for match in TOKEN.finditer(text) if match[1]), 0)
    line = text.count("\n", 0, place) + 1
    return f"at line {line} column {place - text.rfind(chr(10), 0, place)}"


def lines(
    *, line_bytes: int, limit_bytes: int, seconds: float, seen: Callable[[bytes], None]
) -> Iterator[Any]:
    """Yield each line of the body decoded, or the Fault that kept it from being decoded.

    `seen` gets every byte as it comes. Memory is one line at most. Raises TooLarge past the limits
    on a line or the body, InvalidRequest where the body takes longer than `seconds` to arrive.
    """
    for index, line in enumerate(_split(line_bytes, limit_bytes, seconds, seen)):
        try:
            yield parse(line)
        except MalformedJson as exc:
            yield Fault("malformed_json", exc.message, None, index, index + 1)


def _split(
    line_bytes: int, limit_bytes: int, seconds: float, seen: Callable[[bytes], None]
) -> Iterator[bytes]:
    ends = time.monotonic() + seconds
    rest = b""
    for part in _parts(limit_bytes, "max_stream_bytes"):
        seen(part)
        if time.monotonic() > ends:
            raise InvalidRequest(f"the body took longer than {seconds:g} seconds to arrive")
        *whole, rest = (rest + part).split(b"\n")
        yield from (line.removesuffix(b"\r") for line in whole)
        if len(rest) > line_bytes:
            raise TooLarge(f"a line is over line_bytes = {line_bytes} bytes")
    if rest:
        yield rest


def answer(
    value: Any,  # noqa: ANN401
    status: int = 200,
    headers: dict[str, str] | None = None,
) -> Response:
    """Answer JSON; bytes are JSON already. Never a bare NaN: the encoder writes null."""
    body = value if isinstance(value, bytes) else orjson.dumps(value)
    return Response(body, status, headers, mimetype="application/json")


def answer_lines(values: Iterable[Any]) -> Response:
    """Answer NDJSON as a stream."""
    encoded = (orjson.dumps(value) + b"\n" for value in values)
    return Response(encoded, mimetype="application/x-ndjson")


def wants_lines() -> bool:
    """Whether the caller asked for NDJSON."""
    best = request.accept_mimetypes.best_match(["application/json", "application/x-ndjson"])
    return best == "application/x-ndjson"


def integer(name: str, *, default: int | None, least: int, most: int) -> int | None:
    """Return a query argument as a whole number within bounds; raises InvalidRequest."""
    raw = request.args.get(name)
    if raw is None:
        return default
    if not re.fullmatch(r"-?[0-9]{1,12}", raw, re.ASCII) or not least <= int(raw) <= most:
        message = f"must be a whole number from {least} to {most}"
        raise InvalidRequest(f"{name}: {message}", faults=[Fault("out_of_range", message, name)])
    return int(raw)


def word(name: str, allowed: Iterable[str]) -> str | None:
    """Return a query argument that is one of some words; raises InvalidRequest."""
    raw = request.args.get(name)
    words = list(allowed)
    if raw is not None and raw not in words:
        message = f"must be one of {', '.join(words)}"
        raise InvalidRequest(f"{name}: {message}", faults=[Fault("unknown_value", message, name)])
    return raw


def only_arguments(*known: str) -> None:
    """Refuse query arguments that this call does not have, by name, and those that stand twice."""
    faults = [
        Fault("unknown_argument", "is not an argument of this call", ascii(name)[1:-1][:60])
        for name in request.args
        if name not in known
    ]
    faults += [
        Fault("repeated_argument", "stands more than once", name)
        for name in known
        if len(request.args.getlist(name)) > 1
    ]
    if faults:
        raise InvalidRequest(f"{faults[0].field}: {faults[0].message}", faults=faults)
