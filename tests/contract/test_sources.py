"""One suite for the shelf of trace sources: whatever stands on it keeps the same contract."""

import inspect
import json
import pkgutil
import socket
import subprocess
import sys
import threading
import time
import tomllib
import traceback
import tracemalloc
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, contextmanager, suppress
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime, timedelta
from decimal import Decimal
from importlib import import_module
from itertools import pairwise
from pathlib import Path
from typing import Any, Protocol
from urllib.parse import quote, urlsplit, urlunsplit
from zoneinfo import ZoneInfo

import oracledb
import orjson
import psycopg
import pytest
from psycopg import sql

from app.adapters import sources
from app.adapters.sources import oracle as oracle_adapter
from app.adapters.sources import postgres as postgres_adapter
from app.core.domains import DOMAINS, Domain, Kind, json_rows
from app.core.errors import ConfigError, ErrorClass, SourceFault
from app.core.ports import Lines, SourceOptions, TraceReader, TraceSource, find
from tests import oracle_stand_in
from tests.oracle_stand_in import DbType, OracleStandIn, Table, error, naive
from tests.processes import wait_for

SHELF = sorted(module.name for module in pkgutil.iter_modules(sources.__path__))
PLANT = ZoneInfo("Asia/Taipei")
AS_OF = datetime(2024, 6, 1, 12, tzinfo=UTC)
FAR = 3600.0
"""Seconds: a deadline that no test meets."""
SHORT = 1.0
"""Seconds: for what can only end by its deadline."""
PASSWORD = "opensesame"
ROWS, BYTES = 5000, 4 * 2**20

Row = dict[str, Any]

AWKWARD_IDS = [
    "o'clock",
    'say "when"',
    "50%",
    "%(ids)s",
    ":i0",
    "back\\slash",
    "{curly,brace}",
    "NULL",
    "\\N",
    "a b",
    "零件-1",
    "🙂",
    "x" * 64,
    "-- '; DROP TABLE t; --",
]
AWKWARD_TEXTS = [
    "quoted \"so\" and 'so'",
    "back\\slash \\n \\N \\\\",
    "\\N",
    "\\.",
    "line\nline\r\nline",
    "tab\ttab",
    "bell \x07 and \x01 \x1f \x7f",
    "vertical \x0b form \x0c back \x08",
    "零件已鬆脫 🙂 é e\u0301",
    "  blanks before",
    "blanks behind   ",
    "   ",
    "\u2028 \u00a0",
    "null",
    "x" * 3000,
]
NUMBERS = [
    *(Decimal("1.50"), Decimal("0.1"), Decimal(0), Decimal("-0.001"), Decimal(7), None),
    *(Decimal("12345678901234567.123456789"), Decimal("1E+3"), Decimal("0.00000001")),
]


# ---- events, as any source delivers them


@dataclass
class Events:
    """Rows of some domains in the order of delivery, and the containers that have a master row."""

    rows: dict[str, list[Row]] = field(default_factory=dict)
    masters: dict[str, Row] = field(default_factory=dict)

    def add(self, domain: str, container_id: str, **values: object) -> None:
        """Add a row; what is not given is null, or what the container's master row has."""
        row: Row = dict.fromkeys(column.name for column in DOMAINS[domain].columns)
        master = self.masters.get(container_id, {})
        row.update({name: value for name, value in master.items() if name in row})
        assert values.keys() <= row.keys()
        self.rows.setdefault(domain, []).append(row | values | {"container_id": container_id})

    def expected(self, domain: str, ids: Sequence[str]) -> list[Row]:
        """Return what a reader gets: texts without blanks behind, nothing that is empty."""
        wanted = set(ids)
        rows = [row for row in self.rows.get(domain, []) if row["container_id"] in wanted]
        return [{name: _shown(value) for name, value in row.items()} for row in rows]

    @property
    def ids(self) -> list[str]:
        """The ids that have events, sorted bytewise."""
        found = {row["container_id"] for rows in self.rows.values() for row in rows}
        return sorted(found, key=str.encode)


def _shown(value: Any) -> Any:  # noqa: ANN401
    return value.rstrip(" ") or None if isinstance(value, str) else value


def at(minutes: float) -> datetime:
    return datetime(2024, 3, 1, tzinfo=UTC) + timedelta(minutes=minutes)


def few() -> Events:
    """Make some rows of three domains, with ids and values of all kinds."""
    events = Events()
    lots = [f"{place:016x}" for place in range(20)]
    ids = sorted([*lots, *AWKWARD_IDS], key=str.encode)
    for place, container_id in enumerate(ids):
        if place % 5:
            names = {"container_name": f"LOT {container_id}", "pj_type": f"TYPE {place % 3}"}
            events.masters[container_id] = names
        for step in range(place % 4):
            _add_step(events, container_id, place, step)
    for place, container_id in enumerate(ids[::3]):
        _add_hold(events, container_id, at(place), None if place % 2 else at(place + 90))
    return events


def _add_step(events: Events, container_id: str, place: int, step: int) -> None:
    text = AWKWARD_TEXTS[(place + step) % len(AWKWARD_TEXTS)]
    events.add(
        "history",
        container_id,
        workcenter_name=text,
        equipment_id=f"EQ{step}",
        equipment_name=text * 2,
        track_in_at=at(place + step + 0.5),
        track_out_at=at(place + step) + timedelta(microseconds=500) if step else None,
        track_in_qty=2**31 - 1 - step,
        track_out_qty=-step,
    )
    events.add(
        "materials",
        container_id,
        material_description=text,
        qty_consumed=NUMBERS[(place + step) % len(NUMBERS)],
        txn_at=at(place + step),
    )


def _add_hold(
    events: Events, container_id: str, hold_at: datetime, release_at: datetime | None
) -> None:
    hours = Decimal(((release_at or AS_OF) - hold_at).total_seconds()) / 3600
    events.add(
        "holds",
        container_id,
        hold_at=hold_at,
        release_at=release_at,
        hold_status="hold" if release_at is None else "released",
        hold_hours=round(hours, 2),
    )


def many(number: int, text: str = "") -> Events:
    """Make one container with so many rows."""
    events = Events()
    for step in range(number):
        text_of_step = text or f"description {step}"
        events.add("materials", "lot", material_description=text_of_step, txn_at=at(step))
    return events


# ---- the shelf: how each of them is given events, and what is left of it afterwards


class Bench(Protocol):
    """A source of one kind, and the events in it."""

    def fill(self, events: Events) -> None:
        """Let these be the events, and no others."""
        ...

    def options(self, selects: Mapping[str, str] | None = None) -> SourceOptions:
        """Return what the source is built from, with its own SELECTs or with these."""
        ...

    def select(self, domain: str) -> str:
        """Return the SELECT of a domain."""
        ...

    def away(self) -> SourceOptions:
        """Return options of a source that nothing answers for."""
        ...

    def is_quiet(self) -> bool:
        """Whether no statement runs."""
        ...


def options_of(url: str, path: Path, selects: Mapping[str, str], head: str = "") -> SourceOptions:
    """Write a file of SELECTs, and return options that name it."""
    texts = [f"{name} = '''\n{select}\n'''\n" for name, select in selects.items()]
    path.write_text(head + "\n".join(texts), "utf-8")
    return SourceOptions(url, str(path), 60)


TRUNCATE = """
TRUNCATE trace_demo.container, trace_demo.lot_wip_history, trace_demo.lot_materials_history,
         trace_demo.lot_reject_history, trace_demo.hold_release_history, trace_demo.equipment_job,
         trace_demo.equipment_job_container, trace_demo.spec_workcenter
"""
RUNNING = """
SELECT count(*) FROM pg_stat_activity
 WHERE application_name = 'holdfast trace' AND state <> 'idle' AND datname = current_database()
"""
TABLES: dict[str, tuple[str, Mapping[str, str]]] = {
    "history": ("lot_wip_history", {}),
    "materials": ("lot_materials_history", {"material_description": "description"}),
    "holds": ("hold_release_history", {}),
}
ELSEWHERE = {"container_name", "pj_type", "hold_status", "hold_hours"}
"""Columns that the tables of events have not: from the container, or computed."""


class PostgresBench:
    """The demo's tables in a real Postgres, read as the demo reads them."""

    def __init__(self, url: str, folder: Path) -> None:
        self.url = url
        self.file = folder / "queries.toml"
        self.connection = psycopg.connect(url, autocommit=True)

    def fill(self, events: Events) -> None:
        self.connection.execute(TRUNCATE)
        for container_id, master in events.masters.items():
            needed = {"object_type": "LOT", "mfg_order_name": "WO"}
            self.insert("container", [{"container_id": container_id, **needed, **master}])
        for domain, rows in events.rows.items():
            table, theirs = TABLES[domain]
            kept = [
                {theirs.get(name, name): row[name] for name in row if name not in ELSEWHERE}
                for row in rows
            ]
            self.insert(table, [{"event_id": place, **row} for place, row in enumerate(kept)])

    def insert(self, table: str, rows: Sequence[Row]) -> None:
        """Insert rows that all have the columns of the first."""
        known = self.connection.execute(
            "SELECT attname FROM pg_attribute WHERE attrelid = %s::regclass AND attnum > 0",
            (f"trace_demo.{table}",),
        )
        columns = [name for (name,) in known if name in rows[0]]
        names = sql.SQL(", ").join(map(sql.Identifier, columns))
        into = sql.Identifier("trace_demo", table)
        copy = sql.SQL("COPY {} ({}) FROM STDIN").format(into, names)
        with self.connection.cursor() as cursor, cursor.copy(copy) as copying:
            for row in rows:
                copying.write_row([row[column] for column in columns])

    def options(self, selects: Mapping[str, str] | None = None) -> SourceOptions:
        if selects is None:
            return SourceOptions(self.url, "", 60)
        return options_of(self.url, self.file, selects)

    def select(self, domain: str) -> str:
        text = Path(str(sources.__file__)).with_name("demo_queries.toml").read_text("utf-8")
        return str(tomllib.loads(text)[domain])

    def away(self) -> SourceOptions:
        return SourceOptions("postgresql://scott:opensesame@127.0.0.1:1/none", "", 60)

    def is_quiet(self) -> bool:
        return bool(self.value(RUNNING) == 0)

    def value(self, query: str) -> Any:  # noqa: ANN401
        """Return the one value of a query."""
        row = self.connection.execute(query.encode()).fetchone()
        assert row
        return row[0]


ORACLE_TYPES = {
    Kind.TEXT: DbType("DB_TYPE_VARCHAR"),
    Kind.INTEGER: DbType("DB_TYPE_NUMBER"),
    Kind.NUMBER: DbType("DB_TYPE_NUMBER"),
    Kind.TIMESTAMP: DbType("DB_TYPE_DATE"),
}
ORACLE_DOMAINS = ("history", "materials", "holds")
HOURS = [column.name for column in DOMAINS["holds"].columns].index("hold_hours")


class OracleBench:
    """Views of a stand-in, with times on the wall of a plant, padded ids, and no empty text."""

    def __init__(self, driver: OracleStandIn, folder: Path) -> None:
        self.driver = driver
        self.file = folder / "queries.toml"
        self.fill(Events())

    def fill(self, events: Events) -> None:
        for name in ORACLE_DOMAINS:
            columns = DOMAINS[name].columns
            types = [(column.name.upper(), ORACLE_TYPES[column.kind]) for column in columns]
            types[0] = (types[0][0], self.driver.DB_TYPE_CHAR)
            rows = [
                [self._held(row[column.name]) for column in columns]
                for row in events.rows.get(name, [])
            ]
            for row in rows:
                row[0] = row[0].ljust(64)
                if name == "holds" and row[8] is None:
                    row[HOURS] = _hours_since(row[3])
            self.driver.tables[f"v_{name}"] = Table(types, rows)

    def _held(self, value: Any) -> Any:  # noqa: ANN401
        if isinstance(value, datetime):
            return naive(value, PLANT)
        return None if value == "" else value

    def options(self, selects: Mapping[str, str] | None = None) -> SourceOptions:
        if selects is None:
            selects = {name: self.select(name) for name in ORACLE_DOMAINS}
        url = f"oracle://scott:{PASSWORD}@db.plant.example/ORCLPDB1"
        return options_of(url, self.file, selects, 'timezone = "Asia/Taipei"\n')

    def select(self, domain: str) -> str:
        columns = ", ".join(column.name for column in DOMAINS[domain].columns)
        columns = columns.replace("hold_hours", "hours_until(hold_at, release_at, :as_of)")
        return (
            f"SELECT {columns} FROM v_{domain} WHERE container_id IN (:ids)"  # noqa: S608
            f" ORDER BY container_id, {DOMAINS[domain].time}, event_id -- don't hurry"
        )

    def away(self) -> SourceOptions:
        self.driver.before = _not_there
        return self.options()

    def is_quiet(self) -> bool:
        return self.driver.is_quiet


def _hours_since(hold_at: datetime) -> Callable[[Mapping[str, Any]], Decimal]:
    return lambda binds: round(Decimal((binds["as_of"] - hold_at).total_seconds()) / 3600, 2)


def _not_there(_: str) -> None:
    raise error("DPY-6005")


@pytest.fixture
def postgres(shared_database_url: str, tmp_path: Path) -> Iterator[PostgresBench]:
    bench = PostgresBench(shared_database_url, tmp_path)
    bench.fill(Events())
    yield bench
    bench.connection.close()


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch) -> OracleStandIn:
    stand_in = OracleStandIn()
    monkeypatch.setitem(sys.modules, "oracledb", stand_in)
    return stand_in


@pytest.fixture
def oracle(driver: OracleStandIn, tmp_path: Path) -> OracleBench:
    return OracleBench(driver, tmp_path)


@pytest.fixture(params=SHELF)
def name(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def bench(name: str, request: pytest.FixtureRequest) -> Bench:
    """Give the bench of a source: each on the shelf needs one here, by its name."""
    found: Bench = request.getfixturevalue(name)
    return found


@pytest.fixture
def source(name: str, bench: Bench) -> Iterator[TraceSource]:
    with built(name, bench.options()) as made:
        yield made


@contextmanager
def built(name: str, options: SourceOptions) -> Iterator[TraceSource]:
    source: TraceSource = find("sources", name)(options)
    yield source
    source.close()


# ---- reading, as the core does


@dataclass(frozen=True, slots=True)
class Answer:
    """Rows as somebody sees them who asks for JSON, and the blocks in which they came."""

    rows: list[Row]
    blocks: list[Lines]


def read(
    reader: TraceReader,
    domain: str,
    ids: Sequence[str],
    *,
    seconds: float = FAR,
    most_ids: int = 1000,
) -> Answer:
    """Read as many ids as there are, and prove all that holds of any answer."""
    blocks: list[Lines] = []
    for start in range(0, max(1, len(ids)), most_ids):
        some = ids[start : start + most_ids]
        blocks += read_statement(reader, DOMAINS[domain], some, seconds)
    rows = [row for block in blocks for row in decoded(DOMAINS[domain], block)]
    wanted = set(ids)
    assert all(row["container_id"] in wanted for row in rows)
    order = [row["container_id"].encode() for row in rows]
    assert order == sorted(order)
    return Answer(rows, blocks)


def read_statement(
    reader: TraceReader, domain: Domain, ids: Sequence[str], seconds: float
) -> list[Lines]:
    blocks: list[Lines] = []
    deadline = time.monotonic() + seconds
    events = reader.events(domain, ids, as_of=AS_OF, deadline=deadline)
    sent = None
    while sent is None:
        try:
            blocks.append(next(events))
        except StopIteration as end:
            sent = end.value
    assert sent == sum(block.rows for block in blocks)
    for block in blocks:
        assert block.rows == block.data.count(b"\n") > 0
        assert block.data.endswith(b"\n")
        assert block.rows <= ROWS
        assert len(block.data) <= BYTES or block.rows == 1
    return blocks


def decoded(domain: Domain, block: Lines) -> list[Row]:
    """Return the rows of a block as JSON has them, with times and exact numbers."""
    names = [column.name for column in domain.columns]
    kinds = {column.name: column.kind for column in domain.columns}
    rows: list[Row] = []
    for line in json_rows(domain, block.data, end="\n").split("\n")[:-1]:
        assert orjson.loads(line) is not None
        row = json.loads(line, parse_float=Decimal)
        assert list(row) == names
        for column, value in row.items():
            if kinds[column] is Kind.TIMESTAMP and value is not None:
                assert value.endswith("+00:00")
                row[column] = datetime.fromisoformat(value)
        rows.append(row)
    return rows


def fault_of(source: TraceSource, domain: str, ids: Sequence[str] = ("lot",)) -> SourceFault:
    """Return the fault that a reading ends with, which says nothing that it must not."""
    with pytest.raises(SourceFault) as caught, source.open() as reader:
        read(reader, domain, ids)
    return discreet(caught.value)


def discreet(fault: SourceFault) -> SourceFault:
    """Return the fault; prove that neither it nor its traceback gives anything away."""
    told = fault.message + "".join(traceback.format_exception(fault))
    for secret in (PASSWORD, "scott", "plant.example", "127.0.0.1", "trace_demo", "lot-1"):
        assert secret not in told
    return fault


# ---- what comes


def test_each_source_carries_the_name_by_which_it_is_found(name: str, source: TraceSource) -> None:
    assert source.name == name
    assert source.ids_per_statement >= 1000


def test_a_source_answers_the_domains_that_its_file_has(name: str, bench: Bench) -> None:
    with built(name, bench.options({"materials": bench.select("materials")})) as source:
        assert source.domains() == {"materials"}

        fault = fault_of(source, "history")

    assert fault.error_class is ErrorClass.SOURCE_FAILED
    assert "history" in fault.message


@pytest.mark.parametrize("domain", ["history", "materials", "holds"])
def test_rows_are_those_of_the_ids_in_order_with_every_value_as_it_is(
    domain: str, bench: Bench, source: TraceSource
) -> None:
    events = few()
    bench.fill(events)

    with source.open() as reader:
        everything = read(reader, domain, events.ids).rows
        some = read(reader, domain, events.ids[::2]).rows

    assert everything == events.expected(domain, events.ids)
    assert len(everything) > 10
    assert some == events.expected(domain, events.ids[::2])
    assert 0 < len(some) < len(everything)


def test_no_ids_are_no_statement_and_no_rows(bench: Bench, source: TraceSource) -> None:
    bench.fill(few())

    with source.open() as reader:
        assert read(reader, "history", []).blocks == []


def test_ids_that_nobody_knows_have_no_rows(bench: Bench, source: TraceSource) -> None:
    bench.fill(few())

    with source.open() as reader:
        assert read(reader, "history", ["nobody", "nothing"]).blocks == []


def test_the_rows_do_not_depend_on_how_the_ids_are_cut(bench: Bench, source: TraceSource) -> None:
    events = few()
    bench.fill(events)

    with source.open() as reader:
        whole = read(reader, "history", events.ids).rows
        for most_ids in (1, 7):
            assert read(reader, "history", events.ids, most_ids=most_ids).rows == whole


def test_a_statement_takes_as_many_ids_as_the_source_says(
    bench: Bench, source: TraceSource
) -> None:
    events = few()
    bench.fill(events)
    others = [f"other {place}" for place in range(source.ids_per_statement - len(events.ids))]
    ids = sorted([*events.ids, *others], key=str.encode)

    with source.open() as reader:
        found = read(reader, "materials", ids, most_ids=len(ids)).rows

    assert len(ids) == source.ids_per_statement
    assert found == events.expected("materials", events.ids)


@pytest.mark.parametrize("number", [1, 4999, 5000, 5001, 12345])
def test_a_block_has_5000_rows_at_most(number: int, bench: Bench, source: TraceSource) -> None:
    events = many(number)
    bench.fill(events)

    with source.open() as reader:
        answer = read(reader, "materials", ["lot"])

    assert answer.rows == events.expected("materials", ["lot"])
    assert [block.rows for block in answer.blocks[:-1]] == [5000] * ((number - 1) // 5000)


def test_a_block_has_four_mebibytes_at_most_but_for_a_row_that_has_more(
    bench: Bench, source: TraceSource
) -> None:
    events = many(10, text="\\" * 500_000)  # twice as long as it is kept
    events.add("materials", "lot", material_description="x" * 5_000_000, txn_at=at(100))
    events.add("materials", "lot", material_description="behind it", txn_at=at(101))
    bench.fill(events)

    with source.open() as reader:
        answer = read(reader, "materials", ["lot"])

    assert answer.rows == events.expected("materials", ["lot"])
    assert max(len(block.data) for block in answer.blocks) > 5_000_000


def test_memory_does_not_grow_with_the_answer(bench: Bench, source: TraceSource) -> None:
    peaks: list[int] = []
    for number in (11_000, 22_000):
        bench.fill(many(number, text="x" * 400))
        with source.open() as reader:
            tracemalloc.start()
            events = reader.events(DOMAINS["materials"], ["lot"], as_of=AS_OF, deadline=far())
            assert sum(block.rows for block in events) == number
            peaks.append(tracemalloc.get_traced_memory()[1])
            tracemalloc.stop()

    assert peaks[1] < peaks[0] * 1.2


def far() -> float:
    return time.monotonic() + FAR


# ---- connections


def test_nothing_is_opened_before_a_reader_is(name: str, bench: Bench) -> None:
    with built(name, bench.away()) as source:
        assert source.domains()

        with pytest.raises(SourceFault) as caught, source.open():
            pass

    fault = discreet(caught.value)
    assert fault.error_class is ErrorClass.SOURCE_UNAVAILABLE
    assert fault.retry_after_seconds


def test_no_driver_is_loaded_before_its_source_is_chosen() -> None:
    names = ", ".join(f"app.adapters.sources.{name}" for name in SHELF)
    script = f"import sys, {names}; print('oracledb' in sys.modules)"

    done = subprocess.run([sys.executable, "-c", script], capture_output=True, check=True)

    assert done.stdout == b"False\n"


def test_a_reading_can_be_left_at_any_time(bench: Bench, source: TraceSource) -> None:
    events = many(3, text="x" * 2_500_000)
    bench.fill(events)

    for _ in range(50):
        with source.open() as reader:
            for _ in range(2):
                reading = reader.events(DOMAINS["materials"], ["lot"], as_of=AS_OF, deadline=far())
                with closing(reading):
                    assert next(reading).rows == 1
                wait_for(bench.is_quiet)  # though the reader is still there
    with source.open() as reader:
        assert read(reader, "materials", ["lot"]).rows == events.expected("materials", ["lot"])


def test_two_readers_at_a_time_do_not_meet(bench: Bench, source: TraceSource) -> None:
    events = many(12_000)
    bench.fill(events)

    with source.open() as one, source.open() as other:
        reading = one.events(DOMAINS["materials"], ["lot"], as_of=AS_OF, deadline=far())
        assert next(reading).rows == 5000
        found = read(other, "materials", ["lot"]).rows
        assert sum(block.rows for block in reading) == 7000

    assert found == events.expected("materials", ["lot"])


# ---- deadlines


def test_behind_its_deadline_nothing_is_asked(bench: Bench, source: TraceSource) -> None:
    bench.fill(few())

    with source.open() as reader, pytest.raises(SourceFault) as caught:
        read(reader, "history", ["o'clock"], seconds=0)

    assert discreet(caught.value).error_class is ErrorClass.SOURCE_TIMEOUT
    assert bench.is_quiet()


def test_the_deadline_holds_between_two_blocks(bench: Bench, source: TraceSource) -> None:
    events = many(3, text="x" * 2_500_000)
    bench.fill(events)

    with source.open() as reader:
        deadline = time.monotonic() + SHORT
        reading = reader.events(DOMAINS["materials"], ["lot"], as_of=AS_OF, deadline=deadline)
        next(reading)
        wait_for(lambda: time.monotonic() > deadline)
        with pytest.raises(SourceFault) as caught:
            next(reading)
        assert read(reader, "materials", ["lot"]).rows == events.expected("materials", ["lot"])

    assert discreet(caught.value).error_class is ErrorClass.SOURCE_TIMEOUT
    wait_for(bench.is_quiet)


# ---- files of SELECTs


def faults_of(name: str, options: SourceOptions) -> tuple[str, ...]:
    with pytest.raises(ConfigError) as caught:
        find("sources", name)(options)
    return caught.value.faults


def test_a_file_that_is_not_there_is_named(name: str, bench: Bench) -> None:
    options = replace(bench.options(), queries="/nowhere/queries.toml")

    assert faults_of(name, options) == ("TRACE_SOURCE_QUERIES: cannot be read (FileNotFoundError)",)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("history = ", "is not TOML: Invalid value (at end of document)"),
        ("", "there is no SELECT of any domain in it"),
        ("histroy = 'SELECT {ids}'", "there is no domain 'histroy'; did you mean history?"),
        ("zzz = 'SELECT {ids}'", "there is no domain 'zzz'"),
        ("history = 7", "history: must be one SELECT"),
        ("history = ''", "history: must be one SELECT"),
        ("history = 'DELETE FROM t WHERE {ids}'", "history: must be one SELECT"),
        ("history = 'SELECT 1'", "history: does not use ids"),
        ("holds = 'SELECT {ids}'", "holds: does not use as_of"),
        ("history = 'SELECT {ids}, {day}'", "history: there is no placeholder 'day'"),
    ],
)
def test_what_is_wrong_with_a_file_is_said_before_anything_starts(
    text: str, expected: str, name: str, bench: Bench, tmp_path: Path
) -> None:
    form = {"postgres": "%({})s", "oracle": ":{}"}[name]
    for placeholder in ("ids", "day"):
        text = text.replace(f"{{{placeholder}}}", form.format(placeholder))
    (tmp_path / "wrong.toml").write_text(text, "utf-8")
    options = replace(bench.options(), queries=str(tmp_path / "wrong.toml"))

    assert faults_of(name, options) == (f"TRACE_SOURCE_QUERIES: {expected}",)


def test_everything_that_is_wrong_is_said_at_once(name: str, bench: Bench) -> None:
    options = replace(bench.options({"zzz": "SELECT 1", "history": "DROP"}), url="http://x")

    faults = faults_of(name, options)

    assert [fault.split(":")[0] for fault in faults] == [
        "TRACE_SOURCE_URL",
        "TRACE_SOURCE_QUERIES",
        "TRACE_SOURCE_QUERIES",
    ]


def test_a_select_may_end_as_people_end_it(name: str, bench: Bench) -> None:
    events = many(3)
    bench.fill(events)
    select = f"{bench.select('materials').strip()} -- as agreed\n;\n"

    with built(name, bench.options({"materials": select})) as source, source.open() as reader:
        assert read(reader, "materials", ["lot"]).rows == events.expected("materials", ["lot"])


# ---- Postgres


def test_a_percent_sign_that_is_not_doubled_is_found(postgres: PostgresBench) -> None:
    select = f"{instead('materials')} WHERE id LIKE '5%' -- of %%s"

    assert faults_of("postgres", postgres.options({"materials": select})) == (
        "TRACE_SOURCE_QUERIES: materials: a percent sign is written %%",
    )


def instead(domain: str, **columns: str) -> str:
    """Return a SELECT of a row for each id, whose columns are null or as they are given."""
    types = {Kind.TEXT: "text", Kind.INTEGER: "int", Kind.NUMBER: "float8"}
    names = ["id AS container_id"]
    for column in DOMAINS[domain].columns[1:]:
        value = columns.get(column.name, f"null::{types.get(column.kind, 'timestamptz')}")
        names.append(f"{value} AS {column.name}")
    return f"SELECT {', '.join(names)} FROM unnest(%(ids)s::text[]) AS id"  # noqa: S608


@contextmanager
def selecting(postgres: PostgresBench, select: str, **changes: Any) -> Iterator[TraceSource]:  # noqa: ANN401
    """Give a source with one SELECT, of the domain materials."""
    options = replace(postgres.options({"materials": select}), **changes)
    with built("postgres", options) as source:
        yield source


def test_the_demo_answers_every_domain(postgres: PostgresBench) -> None:
    events = few()
    postgres.fill(events)

    with built("postgres", postgres.options()) as source, source.open() as reader:
        assert source.domains() == DOMAINS.keys()
        for domain in ("rejects", "jobs", "upstream_history", "downstream_rejects"):
            assert len(read(reader, domain, events.ids).rows) == len(
                events.rows["history"] if domain == "upstream_history" else []
            )


def test_history_has_no_checkpoints_and_events_need_no_master(postgres: PostgresBench) -> None:
    times = {"container_id": "lot", "track_in_at": at(1)}
    rows = [
        {"event_id": 1, "equipment_id": "EQ", **times},
        {"event_id": 2, "equipment_id": None, **times},
        {"event_id": 3, "equipment_id": "EQ", **times, "track_in_at": None},
    ]
    postgres.insert("lot_wip_history", rows)

    with built("postgres", postgres.options()) as source, source.open() as reader:
        [row] = read(reader, "history", ["lot"]).rows

    assert (row["equipment_id"], row["container_name"]) == ("EQ", None)


def test_rejects_are_added_up_and_have_their_day_and_group(postgres: PostgresBench) -> None:
    quantities = {"reject_qty": 1, "standby_qty": 10, "qty_to_process": None}
    quantities |= {"in_process_qty": 1000, "processed_qty": 10_000, "defect_qty": 100_000}
    late = datetime(2024, 3, 1, 23, 30, tzinfo=UTC)
    reject = {"container_id": "lot", "spec_name": "MD-50", "txn_at": late, **quantities}
    postgres.insert("lot_reject_history", [{"event_id": 1, **reject}])
    group = {"spec_name": "MD-50", "work_center_group": "mold", "sequence_group": 5}
    postgres.insert("spec_workcenter", [group])

    with built("postgres", postgres.options()) as source, source.open() as reader:
        [row] = read(reader, "rejects", ["lot"]).rows
        [loss] = read(reader, "downstream_rejects", ["lot"]).rows

    assert row.items() >= quantities.items()
    assert (row["reject_total_qty"], row["txn_day"]) == (11_011, "2024-03-01")
    assert (row["workcenter_group"], row["workcenter_sequence"]) == ("mold", 5)
    assert (loss["loss_total_qty"], loss["workcenter_group"]) == (111_011, "mold")


def test_upstream_history_has_the_newest_of_each_work_center_and_equipment(
    postgres: PostgresBench,
) -> None:
    steps = [("A", "1", 30), ("A", "1", 20), ("A", "2", 10), ("B", "1", 5), ("A", "1", 30)]
    rows = [
        {
            "event_id": place,
            "container_id": "lot",
            "workcenter_name": work_center,
            "equipment_id": equipment,
            "track_in_at": at(minutes),
            "track_in_qty": place,
        }
        for place, (work_center, equipment, minutes) in enumerate(steps)
    ]
    postgres.insert("lot_wip_history", rows)

    with built("postgres", postgres.options()) as source, source.open() as reader:
        found = read(reader, "upstream_history", ["lot"]).rows

    assert [row["track_in_qty"] for row in found] == [3, 2, 4]


def test_jobs_are_a_row_for_each_container_and_job(postgres: PostgresBench) -> None:
    jobs = [("J2", 5), ("J10", 5), ("J1", 9)]
    rows = [{"job_id": job_id, "created_at": at(minutes)} for job_id, minutes in jobs]
    postgres.insert("equipment_job", rows)
    links = [("a", "J1"), ("a", "J2"), ("b", "J2"), ("b", "J10"), ("c", "J1")]
    names = ("container_id", "job_id")
    postgres.insert(
        "equipment_job_container", [dict(zip(names, link, strict=True)) for link in links]
    )

    with built("postgres", postgres.options()) as source, source.open() as reader:
        found = read(reader, "jobs", ["a", "b"]).rows

    assert [(row["container_id"], row["job_id"]) for row in found] == [
        *(("a", "J2"), ("a", "J1")),
        *(("b", "J10"), ("b", "J2")),
    ]


@pytest.mark.parametrize(
    ("column", "value", "expected"),
    [
        ("qty_consumed", "'NaN'::numeric", None),
        ("qty_consumed", "'-Infinity'::float8", None),
        ("qty_consumed", "1.50::numeric", Decimal("1.50")),
        ("qty_consumed", "1e300::float8", Decimal("1E+300")),
        ("qty_consumed", "7::bigint", 7),
        ("txn_at", "'infinity'::timestamptz", None),
        ("txn_at", "'2024-03-01 08:00+08'::timestamptz", datetime(2024, 3, 1, tzinfo=UTC)),
        ("txn_at", "'1999-12-31 23:59:59.000001+00'::timestamptz",
         datetime(1999, 12, 31, 23, 59, 59, 1, tzinfo=UTC)),
        ("spec_name", "'padded'::char(10)", "padded"),
        ("spec_name", "''", None),
        ("spec_name", "'50%% of \\ it'", "50% of \\ it"),
    ],
)  # fmt: skip
def test_values_are_what_json_can_say(
    column: str, value: str, expected: object, postgres: PostgresBench
) -> None:
    select = instead("materials", **{column: value})

    with selecting(postgres, select) as source, source.open() as reader:
        [row] = read(reader, "materials", ["lot"]).rows

    assert row[column] == expected


@pytest.mark.parametrize("encoding", ["SQL, DMY", "Postgres", "German"])
def test_times_do_not_depend_on_the_settings_of_the_account(
    encoding: str, postgres: PostgresBench
) -> None:
    place = urlsplit(postgres.url)
    style = quote(f"-c datestyle={encoding.replace(' ', chr(92) + ' ')} -c timezone=Asia/Taipei")
    url = urlunsplit(place._replace(query=f"options={style}&client_encoding=SJIS"))
    select = instead("materials", txn_at="'2024-03-01 08:00+08'::timestamptz", spec_name="'é'")

    with selecting(postgres, select, url=url) as source, source.open() as reader:
        [row] = read(reader, "materials", ["lot"]).rows

    assert (row["txn_at"], row["spec_name"]) == (datetime(2024, 3, 1, tzinfo=UTC), "é")


@pytest.mark.parametrize(
    ("select", "expected"),
    [
        (instead("materials", txn_at="now()::timestamp"),
         "the SELECT for materials: txn_at is timestamp, expected timestamptz"),
        (instead("materials", qty_consumed="'1'::text"),
         "the SELECT for materials: qty_consumed is text, expected float4 or float8 or int2 or"),
        (instead("materials").replace("AS spec_name", "AS spec"),
         "the SELECT for materials: column 8 is spec, expected spec_name"),
        (instead("materials").replace(", null::timestamptz AS txn_at", ""),
         "the SELECT for materials: column 10 is missing, expected txn_at"),
        (instead("materials").replace(" FROM", ", 1 AS more FROM"),
         "the SELECT for materials: column 11 is more, expected none"),
        (instead("materials", spec_name="ARRAY[1]"),
         "the SELECT for materials: spec_name is int4, expected bpchar or name or text or varchar"),
        (instead("materials", txn_at="ten()"), "the source refuses the query (42883 Undefined"),
        ("SELECT FROM FROM %(ids)s", "the source refuses the query (42601 SyntaxError)"),
        ("SELECT %(ids)s FROM nothing", "the source refuses the query (42P01 UndefinedTable)"),
        (instead("materials", qty_consumed="1 / (length(id) - 3)"),
         "the source refuses the query (22012 DivisionByZero)"),
        (instead("materials") + ") TO STDOUT; DROP TABLE trace_demo.container; --",
         "the source refuses the query (42601 SyntaxError)"),
        ("SELECT 1) AS x; DROP TABLE trace_demo.container; SELECT (%(ids)s",
         "the source refuses the query (42601 SyntaxError)"),
    ],
)  # fmt: skip
def test_a_select_that_is_wrong_is_the_querys_fault(
    select: str, expected: str, postgres: PostgresBench
) -> None:
    with selecting(postgres, select) as source:
        fault = fault_of(source, "materials")

    assert fault.error_class is ErrorClass.SOURCE_FAILED
    assert fault.message.startswith(expected)
    assert fault.retry_after_seconds is None
    assert postgres.value("SELECT to_regclass('trace_demo.container') IS NOT NULL")


def test_nothing_can_be_written(postgres: PostgresBench) -> None:
    postgres.connection.execute(
        "CREATE OR REPLACE FUNCTION public.note() RETURNS text LANGUAGE plpgsql AS"
        " $$ BEGIN INSERT INTO trace_demo.load VALUES (1, 1); RETURN ''; END $$"
    )
    again = "set_config('default_transaction_read_only', 'off', false)"
    for value in ("note()", f"{again} || note()", "nextval('s')::text", "lo_create(0)::text"):
        postgres.connection.execute("CREATE SEQUENCE IF NOT EXISTS s")
        with selecting(postgres, instead("materials", spec_name=value)) as source:
            fault = fault_of(source, "materials")
            assert fault.message == "the source refuses the query (25006 ReadOnlySqlTransaction)"

    assert postgres.value("SELECT count(*) FROM trace_demo.load") == 0


def test_a_statement_that_takes_too_long_is_ended_by_the_server(postgres: PostgresBench) -> None:
    select = instead("materials", spec_name="pg_sleep(3600)::text")

    with selecting(postgres, select, statement_seconds=0.1) as source:
        fault = fault_of(source, "materials")

    assert fault.error_class is ErrorClass.SOURCE_TIMEOUT
    assert fault.message == "the source took too long (57014 QueryCanceled)"


def test_at_the_deadline_the_statement_ends_in_the_server_too(postgres: PostgresBench) -> None:
    select = instead("materials", spec_name="pg_sleep(3600)::text")

    with selecting(postgres, select) as source, source.open() as reader:
        with pytest.raises(SourceFault) as caught:
            read(reader, "materials", ["lot"], seconds=0.3)
        wait_for(postgres.is_quiet)

    assert discreet(caught.value).error_class is ErrorClass.SOURCE_TIMEOUT


KILL = """
SELECT count(pg_terminate_backend(pid)) FROM pg_stat_activity
 WHERE application_name = 'holdfast trace' AND datname = current_database()
"""


def test_a_server_that_goes_away_is_unavailable(postgres: PostgresBench) -> None:
    large = instead("materials", spec_name="repeat('x', 5000)").replace(
        "AS id", "AS id, generate_series(1, 20000)"
    )

    with selecting(postgres, large) as source, source.open() as reader:
        reading = reader.events(DOMAINS["materials"], ["lot"], as_of=AS_OF, deadline=far())
        next(reading)
        assert postgres.value(KILL) == 1
        with pytest.raises(SourceFault) as caught:
            list(reading)
        rows = sum(block.rows for block in read(reader, "materials", ["lot"]).blocks)

    fault = discreet(caught.value)
    assert fault.error_class is ErrorClass.SOURCE_UNAVAILABLE
    assert fault.message.startswith("the source cannot answer now (")
    assert fault.retry_after_seconds
    assert rows == 20_000


def test_a_connection_that_died_while_nobody_used_it_is_made_anew(postgres: PostgresBench) -> None:
    events = few()
    postgres.fill(events)

    with built("postgres", postgres.options()) as source:
        with source.open() as reader:
            for _ in range(3):
                assert read(reader, "holds", events.ids).rows
                assert postgres.value(KILL) == 1
                wait_for(lambda: postgres.value(ALIVE) == 0)
        with source.open() as reader:
            assert read(reader, "holds", events.ids).rows


def test_a_connection_that_came_to_no_harm_is_used_again(postgres: PostgresBench) -> None:
    backends: set[str] = set()
    select = instead("materials", spec_name="pg_backend_pid()::text")

    with selecting(postgres, select) as source:
        for _ in range(5):
            with source.open() as reader:
                backends.update(row["spec_name"] for row in read(reader, "materials", ["lot"]).rows)
        with source.open(), source.open(), source.open():
            assert postgres.value(ALIVE) == 3
        wait_for(lambda: postgres.value(ALIVE) == 2)
    wait_for(lambda: postgres.value(ALIVE) == 0)

    assert len(backends) == 1


ALIVE = """
SELECT count(*) FROM pg_stat_activity
 WHERE application_name = 'holdfast trace' AND datname = current_database()
"""


@pytest.mark.parametrize(
    "change", [{"password": "wrong"}, {"path": "/none"}, {"host": "nowhere.invalid"}]
)
def test_what_cannot_be_connected_to_is_unavailable(
    change: dict[str, str], postgres: PostgresBench
) -> None:
    place = urlsplit(postgres.url)
    password = change.get("password", place.password)
    netloc = f"{place.username}:{password}@{change.get('host', place.hostname)}:{place.port}"
    url = urlunsplit(place._replace(netloc=netloc, path=change.get("path", place.path)))

    with built("postgres", SourceOptions(url, "", 60)) as source:
        fault = fault_of(source, "history")

    assert fault.error_class is ErrorClass.SOURCE_UNAVAILABLE
    assert fault.message == "the source cannot answer now (OperationalError)"


class Relay:
    """A wire to Postgres that passes everything on, until it falls silent; it never breaks."""

    def __init__(self, url: str) -> None:
        self._place = urlsplit(url)
        self._listener = socket.create_server(("127.0.0.1", 0))
        self._open = [self._listener]
        self._silent = threading.Event()
        self._over = threading.Event()
        threading.Thread(target=self._listen, daemon=True).start()

    @property
    def url(self) -> str:
        """The database's URL through this wire."""
        account = f"{self._place.username}:{self._place.password}"
        port = self._listener.getsockname()[1]
        return urlunsplit(self._place._replace(netloc=f"{account}@127.0.0.1:{port}"))

    def fall_silent(self) -> None:
        """Take nothing any more, and let nothing through."""
        self._silent.set()

    def close(self) -> None:
        """Cut all connections."""
        self._over.set()
        for each in self._open:
            with suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)
            each.close()

    def _listen(self) -> None:
        address = (self._place.hostname or "", self._place.port or 0)
        with suppress(OSError):
            while True:
                client, _ = self._listener.accept()
                server = socket.create_connection(address)
                self._open += [client, server]
                for pair in ((client, server), (server, client)):
                    threading.Thread(target=self._pass_on, args=pair, daemon=True).start()

    def _pass_on(self, one: socket.socket, other: socket.socket) -> None:
        with suppress(OSError):
            while data := one.recv(65536):
                if self._silent.is_set():
                    self._over.wait()
                other.sendall(data)
        with suppress(OSError):
            other.shutdown(socket.SHUT_RDWR)


@pytest.fixture
def relay(postgres: PostgresBench) -> Iterator[Relay]:
    with closing(Relay(postgres.url)) as wire:
        yield wire


LARGE = instead("materials", spec_name="repeat('x', 1000)").replace(
    "AS id", "AS id, generate_series(1, 50000)"
)


@pytest.mark.parametrize("ids", [["lot"], [f"{place:064}" for place in range(100_000)]])
def test_a_server_that_falls_silent_is_left_at_the_deadline(
    ids: list[str], postgres: PostgresBench, relay: Relay
) -> None:
    with selecting(postgres, LARGE, url=relay.url) as source, source.open() as reader:
        relay.fall_silent()
        with pytest.raises(SourceFault) as caught:
            read(reader, "materials", ids, seconds=0.3, most_ids=len(ids))

    assert discreet(caught.value).error_class is ErrorClass.SOURCE_TIMEOUT


def test_a_server_that_falls_silent_in_the_middle_is_left_at_the_deadline(
    postgres: PostgresBench, relay: Relay
) -> None:
    with selecting(postgres, LARGE, url=relay.url) as source, source.open() as reader:
        deadline = time.monotonic() + SHORT
        reading = reader.events(DOMAINS["materials"], ["lot"], as_of=AS_OF, deadline=deadline)
        next(reading)
        relay.fall_silent()
        with pytest.raises(SourceFault) as caught:
            list(reading)

    assert discreet(caught.value).error_class is ErrorClass.SOURCE_TIMEOUT


def test_a_reading_can_be_left_though_the_server_is_silent(
    postgres: PostgresBench, relay: Relay
) -> None:
    with selecting(postgres, LARGE, url=relay.url) as source, source.open() as reader:
        reading = reader.events(DOMAINS["materials"], ["lot"], as_of=AS_OF, deadline=far())
        next(reading)
        relay.fall_silent()
        reading.close()
        with pytest.raises(SourceFault) as caught:  # there is no time for another connection
            read(reader, "materials", ["lot"], seconds=0.3)

    assert discreet(caught.value).error_class is ErrorClass.SOURCE_TIMEOUT


def test_a_server_that_never_answers_is_unavailable(
    postgres: PostgresBench, relay: Relay, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(postgres_adapter, "CONNECT_SECONDS", 2)
    relay.fall_silent()

    with selecting(postgres, LARGE, url=relay.url) as source:
        fault = fault_of(source, "materials")

    assert fault.error_class is ErrorClass.SOURCE_UNAVAILABLE
    assert fault.message == "the source cannot answer now (ConnectionTimeout)"


# ---- Oracle


@contextmanager
def of_oracle(oracle: OracleBench) -> Iterator[TraceSource]:
    with built("oracle", oracle.options()) as source:
        yield source


def test_a_statement_always_has_the_same_text_and_a_thousand_ids(oracle: OracleBench) -> None:
    with of_oracle(oracle) as source, source.open() as reader:
        for number in (1, 7, 1000):
            ids = [f"{place:04}" for place in range(number)]
            read(reader, "history", ids)
            read(reader, "holds", ids)

    texts = [text for text in oracle.driver.executed if text.startswith("SELECT")]
    assert len(texts) == 6
    assert len(set(texts)) == 2
    assert all(text.count(":i") == 1000 for text in texts)
    assert [len(set(bound.values()) - {None, AS_OF.astimezone(PLANT).replace(tzinfo=None)})
            for bound in oracle.driver.bound] == [1, 1, 7, 7, 1000, 1000]  # fmt: skip


def test_each_connection_sorts_by_bytes_and_is_told_so_once(oracle: OracleBench) -> None:
    with of_oracle(oracle) as source:
        for _ in range(3):
            with source.open() as reader:
                read(reader, "history", ["lot"])

    told = [text for text in oracle.driver.executed if text.startswith("ALTER")]
    assert told == ["ALTER SESSION SET NLS_COMP = BINARY NLS_SORT = BINARY"]


def test_the_pool_is_made_at_the_first_use_and_closed_with_the_source(oracle: OracleBench) -> None:
    with of_oracle(oracle) as source:
        assert oracle.driver.pools == []
        for _ in range(2):
            with source.open():
                pass
        [pool] = oracle.driver.pools
        assert not pool.is_closed

    assert pool.is_closed
    options = {name: pool.options[name] for name in ("user", "password", "host", "port", "max")}
    assert options == {
        "user": "scott",
        "password": PASSWORD,
        "host": "db.plant.example",
        "port": 1521,
        "max": 4,
    }
    assert pool.options["service_name"] == "ORCLPDB1"


def test_when_all_connections_are_taken_the_source_is_busy(oracle: OracleBench) -> None:
    with of_oracle(oracle) as source, ExitStack() as readers:
        for _ in range(4):
            readers.enter_context(source.open())
        with pytest.raises(SourceFault) as caught, source.open():
            pass
        readers.close()
        with source.open():
            pass

    assert discreet(caught.value).error_class is ErrorClass.SOURCE_UNAVAILABLE
    assert len(oracle.driver.pools) == 1


def test_a_pool_that_waits_for_a_silent_server_is_not_used_again(oracle: OracleBench) -> None:
    with of_oracle(oracle) as source:
        silent = oracle.driver.failing("DPY-4005", at="acquire")
        with silent, pytest.raises(SourceFault) as caught, source.open():
            pass
        with source.open():
            pass
        first, second = oracle.driver.pools
        wait_for(lambda: first.is_closed)
        assert not second.is_closed

    assert discreet(caught.value).message == "the source cannot answer now (DPY-4005)"


UNAVAILABLE, TIMEOUT, FAILED = (
    ErrorClass.SOURCE_UNAVAILABLE,
    ErrorClass.SOURCE_TIMEOUT,
    ErrorClass.SOURCE_FAILED,
)


@pytest.mark.parametrize("trip", ["execute", "fetch", "second fetch"])
@pytest.mark.parametrize(
    ("code", "expected"),
    [
        ("DPY-4011", UNAVAILABLE),
        ("DPY-6005", UNAVAILABLE),
        ("ORA-01033", UNAVAILABLE),
        ("ORA-02391", UNAVAILABLE),
        ("DPY-4024", TIMEOUT),
        ("ORA-01013", TIMEOUT),
        ("ORA-01555", TIMEOUT),
        ("ORA-00942", FAILED),
        ("ORA-01722", FAILED),
        ("ORA-01017", FAILED),
    ],
)
def test_each_error_has_its_class_and_the_connection_is_not_used_again(
    code: str, expected: ErrorClass, trip: str, oracle: OracleBench
) -> None:
    events = many(5001)
    oracle.fill(events)
    place, after = trip.rsplit(" ", 1)[-1], int(trip.startswith("second"))

    with of_oracle(oracle) as source, source.open() as reader:
        with (
            oracle.driver.failing(code, at=place, after=after),
            pytest.raises(SourceFault) as caught,
        ):
            read(reader, "materials", ["lot"])
        assert oracle.driver.pools[0].dropped == 1
        assert read(reader, "materials", ["lot"]).rows == events.expected("materials", ["lot"])

    fault = discreet(caught.value)
    assert fault.error_class is expected
    assert code in fault.message
    assert (fault.retry_after_seconds is not None) == (expected is UNAVAILABLE)


def test_no_connection_is_waited_for_behind_the_deadline(oracle: OracleBench) -> None:
    with of_oracle(oracle) as source, source.open() as reader:
        with oracle.driver.failing("DPY-4011", at="execute"), pytest.raises(SourceFault):
            read(reader, "materials", ["lot"])
        with pytest.raises(SourceFault) as caught:
            read(reader, "materials", ["lot"], seconds=SHORT)
        assert oracle.driver.is_quiet

    assert discreet(caught.value).message == "no time was left to connect to the source"
    assert caught.value.error_class is TIMEOUT


def test_whatever_happens_behind_the_deadline_was_too_slow(oracle: OracleBench) -> None:
    deadlines: list[float] = []

    def be_late(trip: str) -> None:
        if trip == "fetch":
            wait_for(lambda: time.monotonic() > deadlines[0])
            raise error("DPY-4011")

    with of_oracle(oracle) as source, source.open() as reader:
        oracle.driver.before = be_late
        deadlines.append(time.monotonic() + SHORT)
        reading = reader.events(DOMAINS["holds"], ["lot"], as_of=AS_OF, deadline=deadlines[0])
        with pytest.raises(SourceFault) as caught:
            next(reading)
        oracle.driver.before = None

    assert discreet(caught.value).error_class is ErrorClass.SOURCE_TIMEOUT


def test_no_round_trip_may_take_longer_than_is_left(oracle: OracleBench) -> None:
    allowed: list[int] = []
    oracle.fill(many(12_000))

    with of_oracle(oracle) as source, source.open() as reader:
        [connection] = oracle.driver.connections
        oracle.driver.before = lambda _: allowed.append(connection.call_timeout)
        read(reader, "materials", ["lot"], seconds=FAR)
        read(reader, "materials", ["lot"], seconds=20)

    whole, part = allowed[:5], allowed[5:]
    assert len(whole) == len(part) == 5
    assert all(later <= earlier for earlier, later in pairwise(whole))
    assert 50_000 < max(whole) <= 60_000  # one statement's share
    assert 10_000 < max(part) <= 20_000


NUMBER, DOUBLE = DbType("DB_TYPE_NUMBER"), DbType("DB_TYPE_BINARY_DOUBLE")
CLOB, TIMESTAMP_TZ = DbType("DB_TYPE_CLOB"), DbType("DB_TYPE_TIMESTAMP_TZ")
CHAR = DbType("DB_TYPE_CHAR")


def column_of(oracle: OracleBench, column: str, kind: DbType, value: object) -> None:
    """Let a view have one row, one column of which has another type and this value."""
    oracle.fill(many(1))
    table = oracle.driver.tables["v_materials"]
    place = [name for name, _ in table.columns].index(column.upper())
    columns = [*table.columns[:place], (column.upper(), kind), *table.columns[place + 1 :]]
    row = [*table.rows[0][:place], value, *table.rows[0][place + 1 :]]
    oracle.driver.tables["v_materials"] = Table(columns, [row])


@pytest.mark.parametrize(
    ("column", "kind", "value", "expected"),
    [
        ("spec_name", CHAR, "padded    ", "padded"),
        ("spec_name", CHAR, "    ", None),
        ("spec_name", CLOB, "x" * 100_000, "x" * 100_000),
        ("qty_consumed", NUMBER, Decimal("1.50"), Decimal("1.5")),
        ("qty_consumed", NUMBER, Decimal("1E+20"), 10**20),
        ("qty_consumed", DOUBLE, 0.1, Decimal("0.1")),
        ("qty_consumed", DOUBLE, float("nan"), None),
        ("qty_consumed", DOUBLE, float("-inf"), None),
        (
            "txn_at",
            DbType("DB_TYPE_TIMESTAMP"),
            datetime(2024, 3, 1, 8, 0, 0, 120000),  # noqa: DTZ001 - on the wall of the plant
            datetime(2024, 3, 1, 0, 0, 0, 120000, tzinfo=UTC),
        ),
    ],
)
def test_values_of_oracle_are_what_json_can_say(
    column: str, kind: DbType, value: object, expected: object, oracle: OracleBench
) -> None:
    column_of(oracle, column, kind, value)

    with of_oracle(oracle) as source, source.open() as reader:
        [row] = read(reader, "materials", ["lot"]).rows

    assert row[column] == expected


@pytest.mark.parametrize(
    ("column", "kind", "value", "expected"),
    [
        ("txn_at", TIMESTAMP_TZ, None,
         "the SELECT for materials: txn_at is DB_TYPE_TIMESTAMP_TZ,"),
        ("qty_consumed", CHAR, None,
         "the SELECT for materials: qty_consumed is DB_TYPE_CHAR, expected DB_TYPE_BINARY_"),
        ("spec_name", DbType("DB_TYPE_RAW"), b"x",
         "the SELECT for materials: spec_name is DB_TYPE_RAW, expected DB_TYPE_CHAR or "),
        ("spec_name", CLOB, b"lot-1", "a value is not of the kind of its column (TypeError)"),
        ("spec_name", CLOB, "\ud800", "a value is not of the kind of its column (UnicodeEncodeE"),
        ("txn_at", DbType("DB_TYPE_DATE"), datetime.min,  # noqa: DTZ901 - a DATE has no zone
         "a value is not of the kind of its column (OverflowError)"),
    ],
)  # fmt: skip
def test_what_a_column_cannot_hold_is_the_querys_fault(
    column: str, kind: DbType, value: object, expected: str, oracle: OracleBench
) -> None:
    column_of(oracle, column, kind, value)

    with of_oracle(oracle) as source:
        fault = fault_of(source, "materials")

    assert fault.error_class is FAILED
    assert fault.message.startswith(expected)


def test_a_quantity_with_a_fraction_is_no_whole_number(oracle: OracleBench) -> None:
    events = Events()
    events.add("history", "lot", track_in_qty=Decimal("1.5"), track_in_at=at(0))
    oracle.fill(events)

    with of_oracle(oracle) as source:
        fault = fault_of(source, "history")

    assert fault.message == "a value is not of the kind of its column (ValueError)"


@pytest.mark.parametrize(
    "url",
    [
        "",
        "postgresql://scott:opensesame@db/x",
        "oracle://db/x",
        "oracle://scott@db/x",
        "oracle://scott:opensesame@db",
        "oracle://scott:opensesame@db:port/x",
        "oracle://scott:opensesame@[db/x",
    ],
)
def test_a_url_of_something_else_is_refused_and_not_shown(url: str, oracle: OracleBench) -> None:
    faults = faults_of("oracle", replace(oracle.options(), url=url))

    assert faults == ("TRACE_SOURCE_URL: must be oracle://user:password@host:port/service",)


def test_an_account_may_have_any_letters(oracle: OracleBench) -> None:
    url = "oracle://sc%40tt:open%2Fsesame%3A@db:1522/ORCL.plant"

    with built("oracle", replace(oracle.options(), url=url)) as source, source.open():
        [pool] = oracle.driver.pools

    names = ("user", "password", "host", "port", "service_name")
    assert [pool.options[name] for name in names] == [
        *("sc@tt", "open/sesame:", "db", 1522, "ORCL.plant")
    ]


def test_times_are_those_of_utc_where_the_file_names_no_zone(
    oracle: OracleBench, tmp_path: Path
) -> None:
    oracle.fill(many(1))
    url = oracle.options().url
    selects = {"materials": oracle.select("materials")}
    options = options_of(url, tmp_path / "no_zone.toml", selects)

    with built("oracle", options) as source, source.open() as reader:
        [row] = read(reader, "materials", ["lot"]).rows

    assert row["txn_at"] == at(8 * 60)


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("timezone = 'Nowhere/City'", "there is no time zone 'Nowhere/City'"),
        ("timezone = '/etc/passwd'", "there is no time zone '/etc/passwd'"),
        ("timezone = 8", "timezone: must be text"),
    ],
)
def test_a_time_zone_must_be_one(line: str, expected: str, oracle: OracleBench) -> None:
    options = oracle.options({"materials": oracle.select("materials")})
    path = Path(options.queries)
    path.write_text(line + "\n" + path.read_text().split("\n", 1)[1])

    assert faults_of("oracle", options) == (f"TRACE_SOURCE_QUERIES: {expected}",)


def test_oracle_needs_its_package_and_a_file(
    oracle: OracleBench, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "oracledb", None)

    assert faults_of("oracle", replace(oracle.options(), queries="")) == (
        "TRACE_SOURCE=oracle needs the package oracledb",
        "TRACE_SOURCE_QUERIES: TRACE_SOURCE=oracle needs a file of SELECTs",
    )


# ---- the real driver, as far as it goes without a server


def test_the_stand_in_has_only_what_the_real_driver_has() -> None:
    ours = {name for name in vars(oracle_stand_in.OracleStandIn) if name[0].isupper()}
    types = {kind for kinds in oracle_adapter.TYPES.values() for kind in kinds}
    assert {name for name in ours | types if not hasattr(oracledb, name)} == set()
    for fake, real in (
        (oracle_stand_in.OracleStandIn.create_pool, oracledb.create_pool),
        (oracle_stand_in.Pool, oracledb.ConnectionPool),
        (oracle_stand_in.Connection, oracledb.Connection),
        (oracle_stand_in.Cursor, oracledb.Cursor),
    ):
        assert lacking(fake, real) == set()
    for name in types:
        assert getattr(oracledb, name).name == name


OURS_ALONE = {"check_cursors", "trip", "driver", "options", "lent", "idle", "dropped", "is_closed"}
OURS_ALONE |= {"pool", "is_dead", "cursors", "connection"}


def lacking(fake: Any, real: Any) -> set[str]:  # noqa: ANN401
    """Return public names of a fake, and parameters of its methods, that the real thing has not."""
    if not isinstance(fake, type):
        return set()
    names = {name for name in dir(fake) if not name.startswith("_")} - OURS_ALONE
    missing = {name for name in names if not hasattr(real, name)}
    for name in names - missing:
        method, theirs = getattr(fake, name), getattr(real, name)
        if callable(method):
            known = set(inspect.signature(theirs).parameters)
            missing |= set(inspect.signature(method).parameters) - known - {"sizes"}
    return missing


def test_the_real_driver_takes_the_options_of_the_pool(oracle: OracleBench) -> None:
    with of_oracle(oracle) as source, source.open():
        [pool] = oracle.driver.pools

    known = set(inspect.signature(oracledb.PoolParams.__init__).parameters)
    assert set(pool.options) - known == set()


def test_codes_are_written_as_the_real_driver_writes_them() -> None:
    said = import_module("oracledb.errors")._Error  # noqa: SLF001 - what its errors hold
    codes = oracle_adapter.TIMED_OUT | oracle_adapter.PASSING | oracle_stand_in.RECOVERABLE
    for code in codes:
        number = int(code.split("-")[1]) if code.startswith("ORA") else 0
        real = said(f"{code}: it happened", code=number)

        assert real.full_code == code
        if code in oracle_stand_in.RECOVERABLE:
            assert real.isrecoverable


def real_oracle(tmp_path: Path, port: int) -> SourceOptions:
    select = {"history": "SELECT 1 FROM t WHERE id IN (:ids)"}
    url = f"oracle://scott:{PASSWORD}@127.0.0.1:{port}/none"
    return options_of(url, tmp_path / "real.toml", select)


def test_with_the_real_driver_what_cannot_be_connected_to_is_unavailable(tmp_path: Path) -> None:
    with built("oracle", real_oracle(tmp_path, 1)) as source:
        for _ in range(2):
            fault = fault_of(source, "history")

            assert fault.error_class is UNAVAILABLE
            assert fault.message == "the source cannot answer now (DPY-6005)"


# The driver forgets a socket on which its thread has failed.
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_with_the_real_driver_nobody_waits_for_a_silent_server(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(oracle_adapter, "POOL_SECONDS", 0.2)
    monkeypatch.setattr(oracle_adapter, "CLOSE_SECONDS", 0.2)
    with socket.create_server(("127.0.0.1", 0)) as listener:
        options = real_oracle(tmp_path, listener.getsockname()[1])
        with built("oracle", options) as source:
            for _ in range(2):
                fault = fault_of(source, "history")

                assert fault.error_class is UNAVAILABLE
                assert fault.message == "the source cannot answer now (DPY-4005)"
