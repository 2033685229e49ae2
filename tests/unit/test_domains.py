"""Trace domains: what they consist of, and that a row keeps every value on its way to JSON."""

import json
import math
from collections.abc import Sequence
from datetime import UTC, datetime, timedelta, timezone
from decimal import Decimal
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from app.core import domains
from app.core.domains import DOMAINS, PROFILES, Column, Domain, Kind, rows_of

ALL = Domain(
    "all",
    (
        Column("container_id", Kind.TEXT),
        Column("text", Kind.TEXT),
        Column("integer", Kind.INTEGER),
        Column("number", Kind.NUMBER),
        Column("at", Kind.TIMESTAMP),
    ),
    "at",
)
NOON = datetime(2024, 3, 1, 12, tzinfo=UTC)

TEXTS = st.text(st.characters(codec="utf-8", exclude_characters="\0")) | st.sampled_from(
    ["\\N", "\\", "\\\\N", "\\.", "\t", "\n", "\r\n", "\x0b\x0c\x08", "\x85\u2028", '"', "a ", " "]
)
INTEGERS = st.integers(-(2**63), 2**63 - 1)
NUMBERS = st.decimals(allow_nan=True, allow_infinity=True) | st.floats() | INTEGERS
ZONES = st.sampled_from([UTC, timezone(timedelta(hours=8)), timezone(-timedelta(minutes=210))])
TIMES = st.datetimes(datetime(1, 1, 3), datetime(9999, 12, 29), timezones=ZONES)  # noqa: DTZ001
ROWS = st.tuples(
    TEXTS.filter(lambda text: text.strip(" ") != ""),
    st.none() | TEXTS,
    st.none() | INTEGERS,
    st.none() | NUMBERS,
    st.none() | TIMES,
)


def json_rows(domain: Domain, data: bytes, **part: Any) -> list[str]:  # noqa: ANN401
    """Return each row by itself."""
    return domains.json_rows(domain, data, end="\n", **part).split("\n")[:-1]


def shown(data: bytes, **part: int) -> list[dict[str, Any]]:
    """Return rows as somebody reads them who knows JSON, with exact numbers and with times."""
    rows = [json.loads(line, parse_float=Decimal) for line in json_rows(ALL, data, **part)]
    for row in rows:
        assert list(row) == [column.name for column in ALL.columns]
        if row["at"] is not None:
            assert row["at"].endswith("+00:00")
            row["at"] = datetime.fromisoformat(row["at"])
    return rows


def shown_value(column: str, value: object) -> object:
    place = [each.name for each in ALL.columns].index(column)
    row: list[object] = ["lot", None, None, None, None]
    row[place] = value
    [found] = shown(rows_of(ALL, [row]))
    return found[column]


def expected(row: Sequence[Any]) -> list[Any]:
    return [_expected(value) for value in row]


def _expected(value: Any) -> Any:  # noqa: ANN401
    match value:
        case str():
            return value.rstrip(" ") or None
        case Decimal():
            return value if value.is_finite() else None
        case float():
            return Decimal(repr(value)) if math.isfinite(value) else None
        case _:
            return value


# ---- what there is


def test_each_domain_begins_with_the_container_and_is_sorted_by_a_time_of_its_own() -> None:
    for name, domain in DOMAINS.items():
        kinds = {column.name: column.kind for column in domain.columns}
        assert domain.name == name
        assert len(kinds) == len(domain.columns)
        assert domain.columns[0] == Column("container_id", Kind.TEXT)
        assert kinds[domain.time] is Kind.TIMESTAMP


def test_profiles_ask_for_domains_that_there_are() -> None:
    assert set(PROFILES) == {"query_tool", "query_tool_reverse", "mid_section_defect"}
    asked = {
        domain
        for profile in PROFILES.values()
        for domains in profile.domains.values()
        for domain in domains
    }

    assert asked == DOMAINS.keys()
    assert next(iter(PROFILES["mid_section_defect"].domains)) == "backward"


def test_a_name_means_the_same_kind_of_thing_in_every_domain() -> None:
    kinds: dict[str, set[Kind]] = {}
    for domain in DOMAINS.values():
        for column in domain.columns:
            kinds.setdefault(column.name, set()).add(column.kind)

    assert all(len(each) == 1 for each in kinds.values())


# ---- rows on their way


@given(st.lists(ROWS, max_size=5))
def test_whatever_a_row_holds_is_there_again(rows: list[tuple[Any, ...]]) -> None:
    data = rows_of(ALL, rows)

    assert data.count(b"\n") == len(rows)
    assert data.endswith(b"\n") or not rows
    assert [list(row.values()) for row in shown(data)] == [expected(row) for row in rows]


@given(st.lists(ROWS, max_size=6), st.integers(0, 7), st.none() | st.integers(0, 7))
def test_a_part_of_the_rows_is_that_part_of_the_whole(
    rows: list[tuple[Any, ...]], first: int, last: int | None
) -> None:
    data = rows_of(ALL, rows)

    part = json_rows(ALL, data, first=first, last=last)

    assert part == json_rows(ALL, data)[first:last]


@given(st.lists(ROWS, max_size=3), st.lists(ROWS, max_size=3))
def test_blocks_of_rows_can_be_joined(
    one: list[tuple[Any, ...]], other: list[tuple[Any, ...]]
) -> None:
    assert rows_of(ALL, one) + rows_of(ALL, other) == rows_of(ALL, [*one, *other])


@pytest.mark.parametrize(
    ("kept", "value"),
    [
        (rb"\N", None),
        (rb"\\N", "\\N"),
        (rb"\\\\N", "\\\\N"),
        (rb"a\tb\nc\rd\\e", "a\tb\nc\rd\\e"),
        (rb"\b\f\v", "\b\f\v"),
        (rb"\\t", "\\t"),
        (b"\x01\x1f\x7f", "\x01\x1f\x7f"),
        ("零件 🙂 \u2028\x85".encode(), "零件 🙂 \u2028\x85"),
        (b"padded   ", "padded"),
        (b"  before", "  before"),
        (b"   ", None),
        (b"", None),
        (b'"', '"'),
        (b"null", "null"),
    ],
)
def test_a_text_that_postgres_wrote_is_read(kept: bytes, value: str | None) -> None:
    [row] = shown(b"lot\t" + kept + rb"	\N	\N	\N" + b"\n")

    assert row["text"] == value


@pytest.mark.parametrize(
    ("kept", "value"),
    [
        ("1.50", Decimal("1.50")),
        ("-0.000", Decimal("-0.000")),
        ("1e+300", Decimal("1E+300")),
        ("12345678901234567890.123456789", Decimal("12345678901234567890.123456789")),
        ("NaN", None),
        ("Infinity", None),
        ("-Infinity", None),
        ("\\N", None),
    ],
)
def test_a_number_that_postgres_wrote_is_read_to_its_last_digit(
    kept: str, value: Decimal | None
) -> None:
    [row] = shown(f"lot\t\\N\t7\t{kept}\t\\N\n".encode())

    assert row["number"] == value
    assert str(row["number"]) == str(value)
    assert row["integer"] == 7


@pytest.mark.parametrize(
    ("kept", "value"),
    [
        ("2024-03-01 12:00:00+00", NOON),
        ("2024-03-01 12:00:00.5+00", NOON + timedelta(milliseconds=500)),
        ("2024-03-01 12:00:00.000001+00", NOON + timedelta(microseconds=1)),
        ("infinity", None),
        ("-infinity", None),
        ("\\N", None),
    ],
)
def test_a_time_that_postgres_wrote_is_read(kept: str, value: datetime | None) -> None:
    [row] = shown(f"lot\t\\N\t\\N\t\\N\t{kept}\n".encode())

    assert row["at"] == value


def test_a_time_is_written_in_utc_whatever_its_zone() -> None:
    there = NOON.astimezone(timezone(timedelta(hours=8)))

    assert rows_of(ALL, [["lot", None, None, None, there]]) == (
        b"lot\t\\N\t\\N\t\\N\t2024-03-01 12:00:00+00\n"
    )


@pytest.mark.parametrize(
    ("column", "value"),
    [
        ("text", 7),
        ("text", b"bytes"),
        ("integer", "7"),
        ("integer", 7.0),
        ("integer", True),
        ("integer", Decimal(7)),
        ("number", "7"),
        ("number", False),
        ("at", "2024-03-01"),
        ("at", NOON.replace(tzinfo=None)),
        ("at", NOON.date()),
    ],
)
def test_a_value_of_another_kind_is_refused(column: str, value: object) -> None:
    with pytest.raises(TypeError):
        shown_value(column, value)


@pytest.mark.parametrize("row", [["lot"], ["lot", None, None, None, None, None]])
def test_a_row_has_as_many_values_as_the_domain_has_columns(row: list[object]) -> None:
    with pytest.raises(ValueError, match="zip"):
        rows_of(ALL, [row])


@pytest.mark.parametrize("data", [b"lot\n", b"lot\t\\N\t\\N\t\\N\t\\N\t\\N\n"])
def test_kept_data_of_another_domain_is_not_shown(data: bytes) -> None:
    with pytest.raises(ValueError, match="fields"):
        json_rows(ALL, data)


def test_no_rows_are_no_bytes() -> None:
    assert rows_of(ALL, []) == b""
    assert json_rows(ALL, b"") == []
