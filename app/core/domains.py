r"""Trace domains and profiles: which events there are, their columns in order, and their rows.

A row is kept as Postgres' COPY writes it in its text format: fields between tabs, a line end behind
it, backslash escapes, `\N` for null. JSON is made of it only when a page is read: most pages never
are, and a server writes this form in half the time of JSON.
"""

import math
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from decimal import Decimal
from enum import StrEnum
from typing import Any

import orjson


class Kind(StrEnum):
    """What a column holds, and so what it is in JSON."""

    TEXT = "text"
    INTEGER = "integer"
    NUMBER = "number"
    TIMESTAMP = "timestamp"


@dataclass(frozen=True, slots=True)
class Column:
    """One column of a domain; all but the first may be null."""

    name: str
    kind: Kind


@dataclass(frozen=True, slots=True)
class Domain:
    """One kind of event: its columns in the order of delivery, and what its rows are sorted by.

    Rows come by container_id (bytewise), then by `time`, then by a key of the source's own.
    """

    name: str
    columns: tuple[Column, ...]
    time: str


@dataclass(frozen=True, slots=True)
class Profile:
    """One kind of question: the domains that it may ask for, by direction where it has one."""

    name: str
    domains: dict[str | None, tuple[str, ...]]
    """By direction, the default one first; None where the profile has no direction."""


_KINDS = {"t": Kind.TEXT, "i": Kind.INTEGER, "n": Kind.NUMBER, "ts": Kind.TIMESTAMP}


def _domain(name: str, time: str, columns: str) -> Domain:
    pairs = (each.rsplit(":", 1) for each in columns.split())
    return Domain(name, tuple(Column(column, _KINDS[kind]) for column, kind in pairs), time)


DOMAINS: dict[str, Domain] = {
    domain.name: domain
    for domain in (
        _domain(
            "history",
            "track_in_at",
            "container_id:t container_name:t workcenter_name:t spec_name:t equipment_id:t "
            "equipment_name:t track_in_at:ts track_out_at:ts track_in_qty:i track_out_qty:i "
            "finished_runcard:t workorder:t pj_type:t pj_bop:t product_line_name:t wafer_lot_id:t",
        ),
        _domain(
            "materials",
            "txn_at",
            "container_id:t container_name:t material_part_name:t material_lot_name:t "
            "material_description:t qty_consumed:n workcenter_name:t spec_name:t "
            "equipment_name:t txn_at:ts",
        ),
        _domain(
            "rejects",
            "txn_at",
            "container_id:t container_name:t workcenter_name:t workcenter_group:t "
            "workcenter_sequence:i product_line_name:t product_name:t pj_type:t spec_name:t "
            "loss_reason_name:t equipment_name:t reject_comment:t reject_qty:i standby_qty:i "
            "qty_to_process:i in_process_qty:i processed_qty:i reject_total_qty:i defect_qty:i "
            "txn_at:ts txn_day:t",
        ),
        _domain(
            "holds",
            "hold_at",
            "container_id:t container_name:t workcenter_name:t hold_at:ts hold_emp:t hold_dept:t "
            "hold_reason:t hold_comments:t release_at:ts release_emp:t release_comments:t "
            "ncr_id:t hold_status:t hold_hours:n",
        ),
        _domain(
            "jobs",
            "created_at",
            "container_id:t job_id:t resource_id:t resource_name:t job_status:t "
            "job_model_name:t job_order_name:t created_at:ts completed_at:ts cause_code:t "
            "repair_code:t symptom_code:t",
        ),
        _domain(
            "upstream_history",
            "track_in_at",
            "container_id:t workcenter_name:t workcenter_group:t equipment_id:t "
            "equipment_name:t spec_name:t track_in_at:ts track_in_qty:i",
        ),
        _domain(
            "downstream_rejects",
            "txn_at",
            "container_id:t workcenter_name:t workcenter_group:t loss_reason_name:t "
            "equipment_name:t loss_total_qty:i txn_at:ts",
        ),
    )
}

_LOOKUP = ("history", "materials", "rejects", "holds", "jobs")
PROFILES: dict[str, Profile] = {
    profile.name: profile
    for profile in (
        Profile("query_tool", {None: _LOOKUP}),
        Profile("query_tool_reverse", {None: _LOOKUP}),
        Profile(
            "mid_section_defect",
            {
                "backward": ("upstream_history", "materials"),
                "forward": ("upstream_history", "downstream_rejects"),
            },
        ),
    )
}


# ---- writing rows: for sources whose driver hands out values ------------------------------------


_ESCAPES = str.maketrans(
    {"\\": r"\\", "\t": r"\t", "\n": r"\n", "\r": r"\r", "\b": r"\b", "\f": r"\f", "\v": r"\v"}
)
NULL = r"\N"


def rows_of(domain: Domain, rows: Iterable[Sequence[Any]]) -> bytes:
    """Write rows of values, each in the order of the domain's columns, as they are kept.

    Takes str, int, Decimal, float and aware datetimes, each where its column has that kind.
    Raises TypeError for anything else.
    """
    kinds = [column.kind for column in domain.columns]
    lines = (
        "\t".join(_written(kind, value) for kind, value in zip(kinds, row, strict=True))
        for row in rows
    )
    return "".join(f"{line}\n" for line in lines).encode()


def _written(kind: Kind, value: Any) -> str:  # noqa: ANN401
    match kind, value:
        case _, None:
            return NULL
        case Kind.TEXT, str():
            return value.translate(_ESCAPES)
        case (Kind.INTEGER, int()) if not isinstance(value, bool):
            return str(value)
        case Kind.NUMBER, Decimal():
            return f"{value:f}" if value.is_finite() else NULL
        case (Kind.NUMBER, int() | float()) if not isinstance(value, bool):
            return repr(value) if math.isfinite(value) else NULL
        case Kind.TIMESTAMP, datetime() if value.tzinfo is not None:
            return value.astimezone(UTC).isoformat(sep=" ").removesuffix(":00")
        case _:
            raise TypeError(f"{type(value).__name__} in a column of kind {kind}")


# ---- reading rows: JSON for who asks ------------------------------------------------------------


def json_rows(
    domain: Domain, data: bytes, *, end: str, first: int = 0, last: int | None = None
) -> str:
    """Return rows `first` to `last` of kept data as JSON objects with `end` behind each of them.

    Columns come in their order. What JSON has not is null: NaN and the infinities. So is an empty
    text; blanks at the end of a text are a CHAR column's padding, and are cut.
    """
    # All fields in one list and each column a stride of it: a list a row would cost as much again.
    fields = data.decode().replace("\n", "\t").split("\t")
    width, rows = len(domain.columns), data.count(b"\n")
    if len(fields) != rows * width + 1:
        raise ValueError(f"{len(fields) - 1} fields in {rows} rows of {domain.name}")
    fields = fields[width * first : width * (rows if last is None else min(last, rows))]
    for position, column in enumerate(domain.columns):
        before = ("{" if position == 0 else "") + f'"{column.name}":'
        behind = "," if position < width - 1 else "}" + end
        values = fields[position::width]
        if column.kind is Kind.TIMESTAMP:  # the one kind whose values seldom repeat
            fields[position::width] = [f"{before}{_timestamp(each)}{behind}" for each in values]
            continue
        # Most others stand there many times, and each value is looked at once.
        show = _SHOWN[column.kind]
        shown = {each: f"{before}{show(each)}{behind}" for each in set(values)}
        fields[position::width] = [shown[each] for each in values]
    return "".join(fields)


_ESCAPE = re.compile(r"\\(.)", re.DOTALL)
_UNESCAPED = {"b": "\b", "f": "\f", "n": "\n", "r": "\r", "t": "\t", "v": "\v"}


def _text(value: str) -> str:
    if value == NULL:
        return "null"
    if "\\" in value:
        value = _ESCAPE.sub(lambda found: _UNESCAPED.get(found[1], found[1]), value)
    value = value.rstrip(" ")
    return orjson.dumps(value).decode() if value else "null"


def _number(value: str) -> str:
    return "null" if value in (NULL, "NaN", "Infinity", "-Infinity") else value


_NO_TIME = frozenset({NULL, "infinity", "-infinity"})


def _timestamp(value: str) -> str:
    return "null" if value in _NO_TIME else f'"{value.replace(" ", "T", 1)}:00"'


_SHOWN = {Kind.TEXT: _text, Kind.INTEGER: _number, Kind.NUMBER: _number}
