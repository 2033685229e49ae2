"""Bad input: a 4xx with a stable code that names the place; nothing stored, no page, no 500."""

import gzip
import json
import tracemalloc
from collections.abc import Iterator

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from app.core.errors import MalformedJson
from app.web import body
from tests.api import (  # noqa: F401 - fixtures among them
    JSON,
    LINES,
    REFUSED,
    TARGET,
    Answer,
    Door,
    Ground,
    Served,
    as_line,
    item,
    make_backend,
    make_door,
    make_ground,
    serving,
)

SKIP = "?on_invalid=skip"
GOOD = item(1, "good")


@pytest.fixture(autouse=True)
def _nothing_is_stored(ground: Ground, request: pytest.FixtureRequest) -> Iterator[None]:
    """Check that what a test sent has left nothing behind."""
    before = ground.sizes()
    yield
    if "may_store" not in request.fixturenames:
        assert ground.sizes() == before


@pytest.fixture
def may_store() -> None:
    """Say of a test that it stores something."""


def places(answer: Answer) -> list[tuple[str | None, str]]:
    return [(field, code) for _, field, code in answer.places]


def nested(levels: int, opening: str = "[", closing: str = "]") -> str:
    return opening * levels + closing * levels


# ---- what is not JSON

MALFORMED = {
    "nothing": (b"", "line 1 column 1"),
    "a word": (b"items", "line 1 column 1"),
    "half an object": (b'{"items": [', "line 1 column 12"),
    "the place by line": (b'{"items":\n [1,\n }', "line 3 column 2"),
    "more after the end": (b'{"items": []} x', "line 1 column 15"),
    "single quotes": (b"{'items': []}", "line 1 column 2"),
    "a comment": (b'{"items": [] /* none */}', "line 1 column 14"),
    "a comma too many": (b'{"items": [],}', "line 1 column 1"),
    "a raw newline in a string": (b'{"items": ["a\nb"]}', "line 1 column 14"),
    "an unknown escape": (b'{"items": ["\\x"]}', "line 1 column 13"),
    "NaN": (b'{"items": [NaN]}', "NaN is not JSON (at line 1 column 12)"),
    "NaN behind a string with one": (b'{"a": "NaN",\n"b": NaN}', "line 2 column 6"),
    "Infinity": (b'{"items": Infinity}', "Infinity is not JSON (at line 1 column 11)"),
    "-Infinity": (b'{"items": [-Infinity]}', "-Infinity is not JSON (at line 1 column 12)"),
    "a name twice": (b'{"items": [], "items": []}', "'items' stands twice"),
    "a name twice in an item": (b'{"items": [{"text": "a", "text": "b"}]}', "'text' stands twice"),
    "a number of 5,000 digits": (b'{"items": ' + b"1" * 5000 + b"}", "too many digits"),
    "a byte order mark": (b'\xef\xbb\xbf{"items": []}', "line 1 column 1"),
    "UTF-16": ('{"items": []}'.encode("utf-16"), "byte 1 is not UTF-8"),
    "UTF-16 without a mark": ('{"items": []}'.encode("utf-16-le"), "line 1 column 2"),
    "UTF-32": ('{"items": []}'.encode("utf-32-be"), "line 1 column 1"),
    "Latin-1": ('{"items": ["\u00fc"]}'.encode("latin-1"), "byte 13 is not UTF-8"),
    "an overlong form": (b'{"items": ["\xc0\x80"]}', "byte 13 is not UTF-8"),
    "a surrogate as UTF-8": (b'{"items": ["\xed\xa0\x80"]}', "byte 13 is not UTF-8"),
}


@pytest.mark.parametrize("name", MALFORMED)
def test_what_is_not_json_is_refused_with_its_place(door: Door, name: str) -> None:
    sent, place = MALFORMED[name]

    for query in ("", SKIP):
        answer = door.post_raw(sent, query)
        assert (answer.status, answer.code) == (400, "malformed_json")
        assert place in answer.json["detail"]


@pytest.mark.parametrize("name", MALFORMED)
def test_a_line_that_is_not_json_is_refused_by_its_number(door: Door, name: str) -> None:
    sent = MALFORMED[name][0].replace(b"\n", b"")

    answer = door.post_lines([GOOD, sent + b"\n", GOOD])

    assert answer.status == 422
    assert {(each["line"], each["index"]) for each in answer.faults} == {(2, 1)}


@pytest.mark.parametrize("levels", [2_000, 100_000])
@pytest.mark.parametrize(
    "around", ["%s", '{"items": %s}', '{"items": [%s]}', '{"items": [{"metadata": {"a": %s}}]}']
)
def test_brackets_nested_very_deeply_are_refused(door: Door, levels: int, around: str) -> None:
    objects = nested(levels, '{"a":', "}").replace(":}", ":1}")

    for deep in (nested(levels), objects, "[" * levels):
        answer = door.post_raw((around % deep).encode())
        # How deep is too deep for a parser depends on the version of Python.
        assert (answer.status, answer.code) in [
            (400, "malformed_json"),
            (422, "invalid_request"),
        ]


def test_a_bare_nan_is_found_without_much_memory() -> None:
    sent = b'["' + b"a\\n" * 500_000 + b'", NaN]'
    tracemalloc.start()
    with pytest.raises(MalformedJson, match=r"at line 1 column 1500006\)"):
        body.parse(sent)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()

    assert peak < 10 * len(sent)


def test_a_name_that_stands_twice_is_found_among_very_many() -> None:
    names = ", ".join(f'"{number}": 0' for number in range(200_000))

    with pytest.raises(MalformedJson, match="'199999' stands twice"):
        body.parse(f'{{{names}, "199999": 1}}'.encode())


# ---- what is JSON, but no batch

SHAPES: dict[str, tuple[object, list[tuple[str | None, str]]]] = {
    "an array": ([GOOD], [(None, "wrong_type")]),
    "a string": ("items", [(None, "wrong_type")]),
    "a number": (1, [(None, "wrong_type")]),
    "null": (None, [(None, "wrong_type")]),
    "nothing": ({}, [("items", "missing")]),
    "no items": ({"items": []}, [("items", "no_items")]),
    "items null": ({"items": None}, [("items", "wrong_type")]),
    "items an object": ({"items": {"0": GOOD}}, [("items", "wrong_type")]),
    "items a string": ({"items": "abc"}, [("items", "wrong_type")]),
    "an unknown field": ({"items": [GOOD], "itmes": 1}, [("itmes", "unknown_field")]),
    "two unknown fields": (
        {"items": [GOOD], "a": 1, "b": 2},
        [("a", "unknown_field"), ("b", "unknown_field")],
    ),
    "a long unknown field": ({"items": [GOOD], "x" * 9000: 1}, [("x" * 60, "unknown_field")]),
    "half a character as a field": ({"items": [GOOD], "\ud835": 1}, [(None, "unknown_field")]),
    "a model that is none": ({"items": [GOOD], "model": 7}, [("model", "wrong_type")]),
    "an empty model": ({"items": [GOOD], "model": ""}, [("model", "too_short")]),
    "a long model": ({"items": [GOOD], "model": "m" * 257}, [("model", "too_long")]),
    "another model": ({"items": [GOOD], "model": "other"}, [("model", "model_mismatch")]),
    "half a character": ({"items": [GOOD], "model": "\ud835"}, [("model", "wrong_form")]),
    "NUL as a model": ({"items": [GOOD], "model": "\0"}, [("model", "model_mismatch")]),
    "another version": (
        {"items": [GOOD], "embedding_version": "other"},
        [("embedding_version", "version_unknown")],
    ),
    "NUL as a version": (
        {"items": [GOOD], "embedding_version": "\0"},
        [("embedding_version", "version_unknown")],
    ),
    "a project with a space": ({"items": [GOOD], "project": "a b"}, [("project", "wrong_form")]),
    "a project with a newline": ({"items": [GOOD], "project": "a\n"}, [("project", "wrong_form")]),
    "a long project": ({"items": [GOOD], "project": "p" * 65}, [("project", "wrong_form")]),
    "a priority too low": ({"items": [GOOD], "priority": -11}, [("priority", "out_of_range")]),
    "a priority too high": ({"items": [GOOD], "priority": 11}, [("priority", "out_of_range")]),
    "a priority beyond 64 bits": (
        {"items": [GOOD], "priority": 2**70},
        [("priority", "out_of_range")],
    ),
    "half a priority": ({"items": [GOOD], "priority": 0.5}, [("priority", "wrong_type")]),
    "true as a priority": ({"items": [GOOD], "priority": True}, [("priority", "wrong_type")]),
    "a priority in quotes": ({"items": [GOOD], "priority": "1"}, [("priority", "wrong_type")]),
    "return_vectors 1": (
        {"items": [GOOD], "return_vectors": 1},
        [("return_vectors", "wrong_type")],
    ),
}


@pytest.mark.parametrize("name", SHAPES)
def test_what_is_no_batch_is_refused_by_field(door: Door, name: str) -> None:
    sent, expected = SHAPES[name]

    for query in ("", SKIP):
        answer = door.post_raw(json.dumps(sent).encode(), query)
        assert (answer.status, answer.code) == (422, "invalid_request")
        assert places(answer) == expected


# ---- what is a batch with a bad item

ITEMS: dict[str, tuple[object, list[tuple[str | None, str]]]] = {
    "null": (None, [(None, "wrong_type")]),
    "a text alone": ("text", [(None, "wrong_type")]),
    "an array": ([], [(None, "wrong_type")]),
    "an array in an array": ([[GOOD]], [(None, "wrong_type")]),
    "nothing": (
        {},
        [("target_table", "missing"), ("target_id", "missing"), ("text", "missing")],
    ),
    "an unknown field": (item(1, "a", txet="b"), [("txet", "unknown_field")]),
    "an unknown field called int": (item(1, "a", int="b"), [("int", "unknown_field")]),
    "half a character as a field": (item(1, "a", **{"\ud835": 1}), [(None, "unknown_field")]),
    "the options of a batch": (item(1, "a", model="m"), [("model", "unknown_field")]),
    # texts
    "a text null": (item(1, None), [("text", "wrong_type")]),
    "a text that is a number": (item(1, 1), [("text", "wrong_type")]),
    "a text that is a list": (item(1, ["a"]), [("text", "wrong_type")]),
    "an empty text": (item(1, ""), [("text", "text_empty")]),
    "a text of spaces": (item(1, " \t\r\n\u3000"), [("text", "text_empty")]),
    "a text with NUL": (item(1, "our c\0er"), [("text", "text_nul")]),
    "a text with half a character": (item(1, "x\ud835y"), [("text", "text_surrogate")]),
    "the other half": (item(1, "\udd5c"), [("text", "text_surrogate")]),
    "a text over the limit": (item(1, "\u6f22" * 87382), [("text", "text_too_long")]),
    # targets
    "an unknown target": ({**GOOD, "target_table": "x"}, [("target_table", "target_unknown")]),
    "a target by its schema": (
        {**GOOD, "target_table": f"public.{TARGET}"},
        [("target_table", "target_unknown")],
    ),
    "a target in other letters": (
        {**GOOD, "target_table": TARGET.upper()},
        [("target_table", "target_unknown")],
    ),
    "a target to inject with": (
        {**GOOD, "target_table": f'{TARGET}"; DROP TABLE {TARGET}; --'},
        [("target_table", "target_unknown")],
    ),
    "a target with NUL": (
        {**GOOD, "target_table": f"{TARGET}\0"},
        [("target_table", "target_unknown")],
    ),
    "an empty target": ({**GOOD, "target_table": ""}, [("target_table", "too_short")]),
    "a long target": ({**GOOD, "target_table": "x" * 129}, [("target_table", "too_long")]),
    "half a target": ({**GOOD, "target_table": "\ud835"}, [("target_table", "wrong_form")]),
    "a target that is a number": ({**GOOD, "target_table": 1}, [("target_table", "wrong_type")]),
    # ids
    "an id null": (item(None, "a"), [("target_id", "missing")]),
    "an id true": (item(True, "a"), [("target_id", "wrong_type")]),
    "an id that is a float": (item(1.0, "a"), [("target_id", "wrong_type")]),
    "an id in exponents": (item(1e3, "a"), [("target_id", "wrong_type")]),
    "an id that is a list": (item([1], "a"), [("target_id", "wrong_type")]),
    "an empty id": (item("", "a"), [("target_id", "too_short")]),
    "leading zeros": (item("042", "a"), [("target_id", "id_invalid")]),
    "a sign": (item("+42", "a"), [("target_id", "id_invalid")]),
    "minus nothing": (item("-0", "a"), [("target_id", "id_invalid")]),
    "spaces": (item(" 42", "a"), [("target_id", "id_invalid")]),
    "a newline": (item("42\n", "a"), [("target_id", "id_invalid")]),
    "a decimal point": (item("42.0", "a"), [("target_id", "id_invalid")]),
    "an underscore": (item("4_2", "a"), [("target_id", "id_invalid")]),
    "hexadecimal": (item("0x2a", "a"), [("target_id", "id_invalid")]),
    "other digits": (item("\u0664\u0662", "a"), [("target_id", "id_invalid")]),
    "letters": (item("A101750", "a"), [("target_id", "id_invalid")]),
    "a UUID": (
        item("8f14e45f-ceea-467f-a0b5-1c2d3e4f5a6b", "a"),
        [("target_id", "id_invalid")],
    ),
    "one over bigint": (item(2**63, "a"), [("target_id", "id_invalid")]),
    "one under bigint": (item(-(2**63) - 1, "a"), [("target_id", "id_invalid")]),
    "one over bigint as text": (item(str(2**63), "a"), [("target_id", "id_invalid")]),
    "4,000 digits": (item(10**4000, "a"), [("target_id", "id_invalid")]),
    "an id with NUL": (item("4\0", "a"), [("target_id", "id_invalid")]),
    "half an id": (item("\ud835", "a"), [("target_id", "wrong_form")]),
    "a long id": (item("1" * 513, "a"), [("target_id", "too_long")]),
    "a very long id": (item("1" * 1_000_000, "a"), [("target_id", "too_long")]),
    # custom ids
    "an empty custom_id": (item(1, "a", custom_id=""), [("custom_id", "too_short")]),
    "a long custom_id": (item(1, "a", custom_id="x" * 129), [("custom_id", "too_long")]),
    "a custom_id that is a number": (item(1, "a", custom_id=1), [("custom_id", "wrong_type")]),
    "a custom_id with NUL": (item(1, "a", custom_id="\0"), [("custom_id", "id_invalid")]),
    "half a custom_id": (item(1, "a", custom_id="\ud835"), [("custom_id", "wrong_form")]),
    # metadata
    "metadata in a list": (item(1, "a", metadata=[{}]), [("metadata", "wrong_type")]),
    "metadata in quotes": (item(1, "a", metadata="{}"), [("metadata", "wrong_type")]),
    "metadata beyond 64 bits": (
        item(1, "a", metadata={"n": 2**64}),
        [("metadata", "metadata_invalid")],
    ),
    "metadata of 4,000 digits": (
        item(1, "a", metadata={"n": 10**4000}),
        [("metadata", "metadata_invalid")],
    ),
    "metadata with NUL": (item(1, "a", metadata={"n": ["\0"]}), [("metadata", "metadata_invalid")]),
    "metadata with NUL in a name": (
        item(1, "a", metadata={"\0": 1}),
        [("metadata", "metadata_invalid")],
    ),
    "half a character in metadata": (
        item(1, "a", metadata={"n": {"\ud835": "\ud835"}}),
        [("metadata", "metadata_invalid")],
    ),
    "metadata over 16 KB": (
        item(1, "a", metadata={"n": "x" * 16384}),
        [("metadata", "metadata_too_large")],
    ),
    **{
        f"metadata of {levels} levels": (
            item(1, "a", metadata={"n": json.loads(nested(levels))}),
            [("metadata", "metadata_invalid")],
        )
        for levels in (100, 250, 300, 500, 900)
    },
}


@pytest.mark.parametrize("name", ITEMS)
def test_a_bad_item_is_refused_by_index_and_field(door: Door, name: str) -> None:
    bad, expected = ITEMS[name]

    answer = door.post([GOOD, bad])

    assert (answer.status, answer.code) == (422, "invalid_request")
    assert answer.places == [(1, field, code) for field, code in expected]
    assert all(each["message"] for each in answer.faults)
    alone = door.post_lines([bad], SKIP)
    assert [(each["line"], each["index"]) for each in alone.faults] == [(1, 0)] * len(expected)
    assert [(each.get("field"), each["code"]) for each in alone.faults] == expected


def test_a_number_that_no_float_holds_is_refused_in_metadata(door: Door) -> None:
    for number in (b"1e999", b"-1e999"):
        sent = json.dumps(item(1, "a", metadata={"score": "N"})).encode().replace(b'"N"', number)
        answer = door.post_raw(b'{"items": [' + sent + b"]}")
        assert (answer.status, answer.places) == (422, [(0, "metadata", "metadata_invalid")])


def test_a_custom_id_that_stands_twice_is_refused_where_it_comes_again(door: Door) -> None:
    batch = [item(number, "a", custom_id=name) for number, name in enumerate("abcab")]

    assert door.post(batch).places == [
        (3, "custom_id", "custom_id_repeated"),
        (4, "custom_id", "custom_id_repeated"),
    ]


@pytest.mark.usefixtures("may_store")
@pytest.mark.parametrize("name", ["text", "target_id", "metadata"])
def test_with_skip_a_bad_item_keeps_no_good_one_out(ground: Ground, door: Door, name: str) -> None:
    good = ground.new_items("one", "two")
    bad = {**GOOD, name: {"a": "\0"} if name == "metadata" else "\0"}

    answer = door.post([good[0], bad, good[1]], SKIP)

    assert (answer.status, answer.json["accepted"], answer.json["rejected"]) == (202, 2, 1)
    assert [index for index, _, _ in answer.places] == [1]
    ground.work(answer.job_id)
    assert [line["index"] for line in door.result(answer.job_id)] == [0, 2]


# ---- sizes, types, encodings


@pytest.fixture(scope="module")
def small(ground: Ground) -> Iterator[Ground]:
    """Give the same ground with small limits."""
    opened = ground.reopened(MAX_BODY_BYTES="1024", MAX_STREAM_BYTES="4096", MAX_TEXT_BYTES="16")
    yield opened
    opened.close()


def test_a_body_over_the_limit_is_refused_by_the_name_of_the_limit(small: Ground) -> None:
    door = small.door()

    as_json = door.post([item(1, "x" * 1024)])
    as_lines = door.post_lines([GOOD] * 200)

    assert (as_json.status, as_json.code) == (413, "too_large")
    assert "max_body_bytes = 1024" in as_json.json["detail"]
    assert (as_lines.status, as_lines.code) == (413, "too_large")
    assert "max_stream_bytes = 4096" in as_lines.json["detail"]


def test_a_line_over_the_limit_is_refused_by_the_name_of_the_limit(ground: Ground) -> None:
    narrow = ground.reopened(MAX_TEXT_BYTES="1")
    limit = narrow.door().get("/api/limits").json["line_bytes"]

    answer = narrow.door().post_lines([GOOD, b"x" * (limit + body.READ_BYTES)])

    assert (answer.status, answer.code) == (413, "too_large")
    assert f"line_bytes = {limit}" in answer.json["detail"]
    narrow.close()


def test_a_chunked_body_over_the_limit_is_refused(ground: Ground, served_small: Served) -> None:
    door = served_small.door(ground.door().key)

    def chunks() -> Iterator[bytes]:
        yield b'{"items": ["'
        for _ in range(64):
            yield b"x" * 64

    as_json = door.post_raw(chunks())
    as_lines = door.post_raw(iter([as_line(GOOD)] * 200), "", {"Content-Type": LINES})

    assert (as_json.status, as_json.code) == (413, "too_large")
    assert (as_lines.status, as_lines.code) == (413, "too_large")


def test_a_chunked_body_within_the_limit_is_read(ground: Ground, served_small: Served) -> None:
    door = served_small.door(ground.door().key)

    answer = door.post_raw(iter([b'{"items"', b": [", b"]}"]))

    assert (answer.status, places(answer)) == (422, [("items", "no_items")])


@pytest.fixture(scope="module")
def served_small(ground: Ground, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """Serve the ground with small limits under gunicorn."""
    environ = {**ground.environ, "MAX_BODY_BYTES": "1024", "MAX_STREAM_BYTES": "4096"}
    with serving(environ, tmp_path_factory.mktemp("small") / "api.log") as served:
        yield served


def test_a_body_that_is_packed_is_refused(ground: Ground, served_small: Served) -> None:
    packed = gzip.compress(json.dumps({"items": [GOOD]}).encode())

    for door in (ground.door(), served_small.door(ground.door().key)):
        for encoding in ("gzip", "deflate", "br", "identity, gzip", "x"):
            answer = door.post_raw(packed, "", {"Content-Encoding": encoding})
            assert (answer.status, answer.code) == (415, "unsupported_media_type")
        assert door.post_raw(packed).code == "malformed_json"


@pytest.mark.parametrize(
    "kind",
    [
        "",
        "text/plain",
        "application/xml",
        "application/x-www-form-urlencoded",
        "multipart/form-data; boundary=x",
        "application/json-patch+json",
        "application/json; charset=utf-16",
        "application/x-ndjson; charset=latin-1",
        "*/*",
    ],
)
def test_another_content_type_is_refused(door: Door, kind: str) -> None:
    answer = door.post_raw(json.dumps({"items": [GOOD]}).encode(), "", {"Content-Type": kind})

    assert (answer.status, answer.code) == (415, "unsupported_media_type")


def test_an_item_sent_as_the_other_kind_is_refused(door: Door) -> None:
    as_lines = door.post_raw(json.dumps({"items": [GOOD]}).encode(), "", {"Content-Type": LINES})
    as_json = door.post_raw(as_line(GOOD) + as_line(GOOD))

    assert (0, "items", "unknown_field") in as_lines.places
    assert as_json.code == "malformed_json"


# ---- arguments

ARGUMENTS = {
    "?on_invalid=maybe": ("on_invalid", "unknown_value"),
    "?on_invalid=": ("on_invalid", "unknown_value"),
    "?on_invalid=skip&on_invalid=skip": ("on_invalid", "repeated_argument"),
    "?skip=1": ("skip", "unknown_argument"),
    "?ON_INVALID=skip": ("ON_INVALID", "unknown_argument"),
    "?%00=1": ("\\x00", "unknown_argument"),
    "?%ff=1": None,
    "?" + "x" * 2000 + "=1": ("x" * 60, "unknown_argument"),
    "?priority=1": ("priority", "unknown_argument"),
}


@pytest.mark.parametrize("query", ARGUMENTS)
def test_an_argument_that_a_batch_does_not_have_is_refused_by_name(door: Door, query: str) -> None:
    expected = ARGUMENTS[query]

    answer = door.post_raw(json.dumps({"items": [GOOD]}).encode(), query)

    assert (answer.status, answer.code) == (422, "invalid_request")
    assert expected is None or places(answer) == [expected]


LINE_ARGUMENTS = {
    "?priority=high": ("priority", "out_of_range"),
    "?priority=11": ("priority", "out_of_range"),
    "?priority=1.0": ("priority", "out_of_range"),
    "?priority=": ("priority", "out_of_range"),
    "?return_vectors=1": ("return_vectors", "unknown_value"),
    "?project=a%20b": ("project", "wrong_form"),
    "?model=": ("model", "too_short"),
    "?model=other": ("model", "model_mismatch"),
    "?embedding_version=other": ("embedding_version", "version_unknown"),
    "?model=a&model=b": ("model", "repeated_argument"),
    "?items=1": ("items", "unknown_argument"),
}


@pytest.mark.parametrize("query", LINE_ARGUMENTS)
def test_an_argument_of_a_stream_is_refused_by_name(door: Door, query: str) -> None:
    answer = door.post_lines([GOOD], query)

    assert (answer.status, answer.code) == (422, "invalid_request")
    assert places(answer) == [LINE_ARGUMENTS[query]]


READS = {
    "?wait=abc": ("wait", "out_of_range"),
    "?wait=0": ("wait", "out_of_range"),
    "?wait=56": ("wait", "out_of_range"),
    "?wait=-1": ("wait", "out_of_range"),
    "?wait=1.5": ("wait", "out_of_range"),
    "?wait=": ("wait", "out_of_range"),
    "?wait=%201": ("wait", "out_of_range"),
    "?wait=\u0661": ("wait", "out_of_range"),
    "?wait=1&wait=2": ("wait", "repeated_argument"),
    "?wiat=1": ("wiat", "unknown_argument"),
    "/items?status=ready": ("status", "unknown_value"),
    "/items?status=": ("status", "unknown_value"),
    "/items?limit=0": ("limit", "out_of_range"),
    "/items?limit=5001": ("limit", "out_of_range"),
    "/items?limit=1e2": ("limit", "out_of_range"),
    "/items?cursor=-1": ("cursor", "out_of_range"),
    "/items?cursor=x": ("cursor", "out_of_range"),
    "/items?cursor=2147483648": ("cursor", "out_of_range"),
    "/items?cursor=" + "9" * 3000: ("cursor", "out_of_range"),
    "/items?offset=1": ("offset", "unknown_argument"),
    "/result?offset=-1": ("offset", "out_of_range"),
    "/result?offset=2147483648": ("offset", "out_of_range"),
    "/result?limit=0": ("limit", "out_of_range"),
    "/result?limit=5001": ("limit", "out_of_range"),
    "/result?cursor=1": ("cursor", "unknown_argument"),
}


@pytest.mark.usefixtures("may_store")
@pytest.mark.parametrize("query", READS)
def test_a_bad_argument_of_a_read_is_refused_by_name(
    ground: Ground, door: Door, query: str
) -> None:
    job_id = ground.done(door, [GOOD])

    answer = door.get(f"/api/job/{job_id}{query}")

    assert (answer.status, answer.code) == (422, "invalid_request")
    assert places(answer) == [READS[query]]


@pytest.mark.parametrize(
    ("query", "place"),
    [
        ("?limit=0", ("limit", "out_of_range")),
        ("?limit=201", ("limit", "out_of_range")),
        ("?state=done", ("state", "unknown_value")),
        ("?kind=tracing", ("kind", "unknown_value")),
        ("?status=queued", ("status", "unknown_argument")),
        *(
            (f"?cursor={cursor}", ("cursor", "wrong_form"))
            for cursor in (
                "",
                "x",
                "1",
                "2026-01-01",
                "2026-01-01T00:00:00%2B00:00",
                "2026-01-01T00:00:00%2B00:00~",
                "2026-01-01T00:00:00%2B00:00~%00",
                "2026-01-01T00:00:00%2B00:00~EMB-1",
                "2026-02-31T00:00:00%2B00:00~emb-1",
                "2026-01-01T99:00:00%2B00:00~emb-1",
                "2026-01-01T00:00:00%2B23:59:59~emb-1",
                "infinity~emb-1",
                "~",
            )
        ),
    ],
)
def test_a_bad_argument_of_the_list_is_refused_by_name(
    door: Door, query: str, place: tuple[str, str]
) -> None:
    answer = door.get(f"/api/jobs{query}")

    assert (answer.status, answer.code) == (422, "invalid_request")
    assert places(answer) == [place]


@pytest.mark.parametrize("path", ["/livez?x=1", "/api/limits?x=1", "/readyz?x", "/metrics?x=1"])
def test_what_takes_no_argument_is_not_harmed_by_one(door: Door, path: str) -> None:
    assert door.get(path).status == 200


# ---- small bodies

REQUEUES: dict[str, tuple[bytes, int, str]] = {
    "not JSON": (b"{", 400, "malformed_json"),
    "an array": (b"[]", 422, "invalid_request"),
    "null": (b"null", 422, "invalid_request"),
    "an unknown field": (b'{"resaon": "x"}', 422, "invalid_request"),
    "a number": (b'{"reason": 1}', 422, "invalid_request"),
    "NUL": (b'{"reason": "\\u0000"}', 422, "invalid_request"),
    "half a character": (b'{"reason": "\\ud835"}', 422, "invalid_request"),
    "a long reason": (b'{"reason": "%b"}' % (b"x" * 501), 422, "invalid_request"),
    "a body over the limit": (b'{"reason": "%b"}' % (b"x" * 65536), 413, "too_large"),
}


@pytest.mark.usefixtures("backend", "may_store")
@pytest.mark.parametrize("name", REQUEUES)
def test_a_bad_requeue_changes_nothing(ground: Ground, door: Door, name: str) -> None:
    sent, status, code = REQUEUES[name]
    job_id = ground.done(door, [{**GOOD, "text": REFUSED}])

    answer = door.ask("POST", f"/api/job/{job_id}/requeue", {"Content-Type": JSON}, sent)

    assert (answer.status, answer.code) == (status, code)
    assert door.job(job_id)["state"] == "failed"
    assert ground.rows("SELECT FROM holdfast.requeues WHERE job_id = %s", job_id) == []


@pytest.mark.usefixtures("may_store")
def test_a_cancel_takes_no_fields_no_arguments_and_no_other_type(
    ground: Ground, door: Door
) -> None:
    job_id = door.post(ground.new_items("one")).job_id
    path = f"/api/job/{job_id}/cancel"

    answers = [
        door.send(path, {"reason": "x"}),
        door.send(f"{path}?now=1"),
        door.ask("POST", path, {"Content-Type": "text/plain"}, b"{}"),
        door.ask("POST", path, {"Content-Type": JSON}, b"{"),
    ]

    assert [answer.status for answer in answers] == [422, 422, 415, 400]
    assert door.job(job_id)["state"] == "queued"


# ---- anything at all

NUMBERS = st.one_of(
    st.integers(), st.floats(), st.sampled_from([2**31, 2**63, 2**64, -(2**63) - 1, 10**400])
)
SCALARS = st.one_of(
    st.none(), st.booleans(), NUMBERS, st.text(max_size=20), st.sampled_from(["\0", "\ud835", ""])
)
VALUES = st.recursive(
    SCALARS,
    lambda inner: st.one_of(
        st.lists(inner, max_size=4), st.dictionaries(st.text(max_size=6), inner, max_size=4)
    ),
    max_leaves=12,
)
FIELDS = ["target_table", "target_id", "text", "custom_id", "metadata", "items", "x", "int", ""]
ROWS = st.builds(
    lambda good, changes: {**good, **changes},
    st.sampled_from([GOOD, {}, item("7", "x", custom_id="c", metadata={"a": 1})]),
    st.dictionaries(st.sampled_from(FIELDS), VALUES, max_size=3),
)
BATCHES = st.builds(
    lambda items, options: {"items": items, **options},
    st.one_of(VALUES, st.lists(st.one_of(ROWS, VALUES), max_size=4)),
    st.dictionaries(
        st.sampled_from(
            ["model", "embedding_version", "project", "priority", "return_vectors", "items", "x"]
        ),
        VALUES,
        max_size=2,
    ),
)
QUERIES = st.sampled_from(["", SKIP, "?on_invalid=x", "?a=b&a=c"])
FUZZ = settings(
    max_examples=100,
    derandomize=True,
    deadline=None,
    database=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)


def check_answer(door: Door, answer: Answer, *, sent: int | None = None) -> None:
    """Check that something was accepted and can be read, or refused with a code."""
    if answer.status == 202:
        told = answer.json
        linked = told["accepted"] + told["duplicates"]
        assert sent in (None, linked + told["rejected"])
        assert door.job(answer.job_id)["counts"]["total"] == linked
        assert len(door.items(answer.job_id)) == linked
    else:
        assert answer.status in (400, 413, 415, 422), answer.body
        assert answer.code


@pytest.mark.usefixtures("may_store")
@FUZZ
@given(batch=st.one_of(BATCHES, VALUES), query=QUERIES)
def test_any_json_is_accepted_or_refused_and_breaks_nothing(
    door: Door, batch: object, query: str
) -> None:
    answer = door.post_raw(json.dumps(batch).encode(), query)

    items = batch.get("items") if isinstance(batch, dict) else None
    check_answer(door, answer, sent=len(items) if isinstance(items, list) else None)


@pytest.mark.usefixtures("may_store")
@FUZZ
@given(
    lines=st.lists(
        st.one_of(ROWS, VALUES, st.binary(max_size=20).map(lambda line: line + b"\n")), max_size=5
    ),
    query=QUERIES,
)
def test_any_lines_are_accepted_or_refused_and_break_nothing(
    door: Door, lines: list[object], query: str
) -> None:
    answer = door.post_lines(lines, query)

    is_whole = all(line.count(b"\n") == 1 for line in lines if isinstance(line, bytes))
    check_answer(door, answer, sent=len(lines) if is_whole else None)


@pytest.mark.usefixtures("may_store")
@FUZZ
@given(
    start=st.sampled_from([b'{"items": [', b'{"items": [{"text": "', b"", b"[", b'"']),
    middle=st.binary(max_size=40),
    end=st.sampled_from([b"]}", b'"}]}', b"", b"}", b"NaN]}"]),
)
def test_any_bytes_are_accepted_or_refused_and_break_nothing(
    door: Door, start: bytes, middle: bytes, end: bytes
) -> None:
    check_answer(door, door.post_raw(start + middle + end))


@pytest.mark.usefixtures("may_store")
def test_what_was_accepted_of_all_that_can_be_worked_off_and_read(ground: Ground) -> None:
    admin = ground.door("operator", "admin")
    ground.door().post([GOOD])
    ids = [row["id"] for row in ground.rows("SELECT id FROM holdfast.jobs")]

    ground.work_all()

    for job_id in ids:
        assert admin.get(f"/api/job/{job_id}").status == 200
        assert admin.get(f"/api/job/{job_id}/result").status == 200

    ground.check_nothing_lost()
