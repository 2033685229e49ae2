"""A trace result in pieces: ids, pages, quality, and the answer that is made of them."""

import json
from collections.abc import Iterator, Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from app.core import trace
from app.core.errors import InvalidRequest, TooLarge
from app.core.ports import Lines
from app.core.requests import TraceRequest, check_trace, parse
from app.core.trace import PAGE_ROWS, PageLostError, Part

SERVED = frozenset({"history", "materials", "holds", "upstream_history", "downstream_rejects"})


def asked(**changes: object) -> dict[str, object]:
    return {"profile": "query_tool", "container_ids": ["a"], "domains": ["history"], **changes}


def refusal(**changes: object) -> tuple[str | None, str, str]:
    """Return field, code and message of the first fault of a request."""
    with pytest.raises(InvalidRequest) as caught:
        check_trace(parse(TraceRequest, asked(**changes)), SERVED, most_ids=3)
    fault = caught.value.faults[0]
    return fault.field, fault.code, fault.message


# ---- requests


def test_ids_are_trimmed_sorted_bytewise_and_each_is_there_once() -> None:
    request = parse(TraceRequest, asked(container_ids=[" b ", "a", "b", "Z", "é"]))

    traced = check_trace(request, SERVED, most_ids=10)

    assert traced.ids == ("Z", "a", "b", "é")
    assert traced.duplicates == 1


@pytest.mark.parametrize(
    "bad", ["", "  ", "x" * 65, "a\nb", "a\0b", "\ud835", "a\x85b", 7, None, []]
)
def test_an_id_of_the_wrong_form_is_named_by_its_place(bad: object) -> None:
    with pytest.raises(InvalidRequest) as caught:
        check_trace(parse(TraceRequest, asked(container_ids=["a", bad, "b"])), SERVED, most_ids=9)

    [fault] = caught.value.faults
    assert (fault.index, fault.field, fault.code) == (1, "container_ids", "id_invalid")


def test_no_more_than_a_thousand_bad_ids_are_named() -> None:
    with pytest.raises(InvalidRequest, match="2000 of 2000") as caught:
        check_trace(parse(TraceRequest, asked(container_ids=[""] * 2000)), SERVED, most_ids=5000)

    assert len(caught.value.faults) == 1000


def test_too_many_ids_name_the_limit() -> None:
    with pytest.raises(TooLarge, match="trace_max_cids = 3") as caught:
        check_trace(parse(TraceRequest, asked(container_ids=list("abcd"))), SERVED, most_ids=3)

    assert caught.value.faults[0].field == "container_ids"


def test_an_unknown_word_is_answered_with_those_that_there_are() -> None:
    assert refusal(container_ids=[]) == (
        "container_ids",
        "no_items",
        "must name at least one container",
    )
    field, code, message = refusal(profile="nope")
    assert (field, code) == ("profile", "unknown_value")
    assert "query_tool, query_tool_reverse, mid_section_defect" in message
    field, code, message = refusal(domains=["upstream_history"])
    assert (field, code, message) == (
        "domains",
        "unknown_value",
        "must be one or more of history, materials, holds",
    )
    assert refusal(domains=[])[:2] == ("domains", "too_short")
    assert refusal(domains=["history", "history"])[:2] == ("domains", "repeated")
    assert refusal(params={"direction": "up"})[:2] == ("params.direction", "unknown_field")
    defect: dict[str, object] = {"profile": "mid_section_defect", "domains": ["upstream_history"]}
    assert refusal(**defect, params={"direction": "up"})[:2] == (
        "params.direction",
        "unknown_value",
    )


def test_a_direction_decides_on_the_domains() -> None:
    both = ["downstream_rejects", "upstream_history"]
    forward = asked(profile="mid_section_defect", domains=both, params={"direction": "forward"})
    traced = check_trace(parse(TraceRequest, forward), SERVED, most_ids=9)
    assert traced.domains == ("upstream_history", "downstream_rejects")

    backward = asked(profile="mid_section_defect", domains=both)
    with pytest.raises(InvalidRequest, match="one or more of upstream_history, materials"):
        check_trace(parse(TraceRequest, backward), SERVED, most_ids=9)


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"container_ids": "a"}, "container_ids"),
        ({"domains": "history"}, "domains"),
        ({"domains": [1]}, "domains"),
        ({"profile": 1}, "profile"),
        ({"params": []}, "params"),
        ({"params": {"partial": "yes"}}, "params"),
        ({"params": {"more": 1}}, "params"),
        ({"more": 1}, "more"),
    ],
)
def test_a_field_of_the_wrong_type_is_named(changes: dict[str, Any], field: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        parse(TraceRequest, asked(**changes))

    assert caught.value.faults[0].field == field


# ---- ids and pages


@given(st.lists(st.text(st.characters(exclude_categories=["Cs", "Cc"]), min_size=1), min_size=1))
def test_ids_come_back_as_they_were_packed(ids: list[str]) -> None:
    assert trace.unpack_ids(trace.pack_ids(ids)) == ids


def numbered(first: int, rows: int) -> Lines:
    return Lines(rows, b"".join(b"row-%d\n" % number for number in range(first, first + rows)))


@given(st.lists(st.integers(1, PAGE_ROWS + 1000), max_size=8))
def test_pages_are_full_but_for_the_last_and_hold_every_row_in_order(sizes: Sequence[int]) -> None:
    def blocks() -> Iterator[Lines]:
        first = 0
        for size in sizes:
            yield numbered(first, size)
            first += size

    pages = list(trace.paged(blocks()))

    total = sum(sizes)
    assert b"".join(page.data for page in pages) == numbered(0, total).data
    assert [page.rows for page in pages[:-1]] == [PAGE_ROWS] * (len(pages) - 1)
    assert sum(page.rows for page in pages) == total
    assert all(page.data.count(b"\n") == page.rows > 0 for page in pages)


def test_a_page_is_what_was_stored_or_it_is_lost() -> None:
    data = b"a\tb\n" * 100
    packed = trace.pack(data)
    page = trace.described(100, packed)

    assert trace.unpack(packed, page) == data
    for wrong in (None, b"", packed[:-1], packed + b"x", b"xx" + packed[2:]):
        with pytest.raises(PageLostError):
            trace.unpack(wrong, page)
    foreign = b"zz" + packed[2:]
    with pytest.raises(PageLostError):
        trace.unpack(foreign, trace.described(100, foreign))


# ---- quality, and an answer at once


def test_a_result_is_whole_where_nothing_of_it_failed() -> None:
    parts = [Part(1, "a", "b", 2, {"history": 3}, {}), Part(2, "c", "d", 2, {"history": 4}, {})]

    assert trace.quality(["history"], parts) == {
        "status": "complete",
        "domains": {"history": {"status": "complete", "rows": 7, "expected": 7, "failed": []}},
    }


def test_an_answer_is_one_json_document() -> None:
    pages = {
        "history": iter([trace.Rows(2, '{"a":1},{"a":2},'), trace.Rows(1, '{"a":3},')]),
        "holds": iter(list[trace.Rows]()),
    }
    whole = trace.Whole("query_tool", 3, {"status": "complete"}, pages)

    assert json.loads(b"".join(trace.body(whole))) == {
        "stage": "events",
        "async": False,
        "profile": "query_tool",
        "cid_count": 3,
        "results": {
            "history": {"data": [{"a": 1}, {"a": 2}, {"a": 3}], "count": 3},
            "holds": {"data": [], "count": 0},
        },
        "quality": {"status": "complete"},
    }
