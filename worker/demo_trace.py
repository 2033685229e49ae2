"""The demo's trace events: an invented plant, the same on every machine, with causes to be found.

python -m worker.demo_trace load --cids 5000 [--seed 7] [--replace | --keep]
python -m worker.demo_trace check             counts of each table, one checksum, the planted causes
python -m worker.demo_trace ids --count 3000  container ids for a request, one a line

A work order is made whole, so there are somewhat more containers than asked for: 5,017 for 5,000.
What is loaded stays, unless --replace is said: other numbers end with 1, with --keep with 0.
"""

import argparse
import os
import random
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from itertools import count
from typing import TypeVar

from app.core import config
from app.core.errors import ConfigError, HoldfastError, StoreUnavailable
from app.core.store.database import Database, Tx

SEED = 7
FLUSH_ROWS = 60_000
MOST_CIDS = 10_000_000
MOST_SEED = 2**63 - 1
BAR_CHARACTERS = 30

BAD_BONDER = "DB-07"
BAD_COMPOUND = "MC-0113"
BAD_FACTOR = 5
"""The lots that met one of the two lose five times as much."""

START = datetime(2026, 1, 5, tzinfo=UTC)
START_DAYS = 150
DAY_MINUTES = 1440
DAYS = [f"{START + timedelta(days=day):%Y-%m-%d}" for day in range(START_DAYS + 120)]
CLOCK = [f"{minute // 60:02}:{minute % 60:02}:00+00" for minute in range(DAY_MINUTES)]

Chosen = TypeVar("Chosen")
Progress = Callable[[int, int], None]
"""Called with the containers made so far, and how many there will be."""


@dataclass(frozen=True, slots=True)
class Step:
    """One step of the route."""

    spec: str
    work_center: str
    group: str
    sequence: int
    share: float
    """How many of the lots take it."""
    machines: int
    reasons: tuple[str, ...]
    materials: tuple[str, ...] = ()


SAW = Step("SAW-10", "WAFER SAW", "saw", 1, 1.0, 8, ("chipping", "saw street"))
ROUTE = (
    Step("DB-20", "DIE BOND", "bond_db", 2, 1.0, 24, ("tilted die", "void"), ("EPOXY", "FRAME")),
    Step("WB-30", "WIRE BOND", "bond_wb", 3, 0.9, 40, ("lifted ball", "short wire"), ("WIRE",)),
    Step("MD-50", "MOLD", "mold", 5, 1.0, 12, ("incomplete fill", "wire sweep"), ("COMPOUND",)),
    Step("DF-60", "DEFLASH", "deflash", 6, 0.7, 6, ("residue",)),
    Step("BL-70", "BLAST", "blast", 7, 0.7, 6, ("scratch",)),
    Step("PL-80", "PLATING", "plating", 8, 1.0, 10, ("thin plating", "stain"), ("TIN",)),
    Step("MK-90", "MARKING", "marking", 9, 0.4, 8, ("faint mark",)),
    Step("TF-100", "TRIM FORM", "trim_form", 10, 1.0, 14, ("bent lead",)),
    Step("IN-110", "INSPECTION", "singulation", 11, 0.8, 5, ("visual",)),
)
TEST = Step("TT-120", "TMTT", "test", 12, 1.0, 30, ("open", "leakage", "parameter"))

TABLES = (
    *("container", "lot_wip_history", "lot_materials_history", "lot_reject_history"),
    *("hold_release_history", "equipment_job", "equipment_job_container", "combined_assy_lot"),
    "spec_workcenter",
)
INDEXES = (
    "UNIQUE INDEX container_id ON trace_demo.container (container_id)",
    "UNIQUE INDEX container_name ON trace_demo.container (container_name)",
    """INDEX container_split ON trace_demo.container (split_from_id)
        WHERE split_from_id IS NOT NULL""",
    """INDEX container_original ON trace_demo.container (original_container_id)
        WHERE original_container_id IS NOT NULL""",
    "INDEX container_order ON trace_demo.container (mfg_order_name)",
    "INDEX container_first ON trace_demo.container (first_name)",
    """INDEX wip_tracked ON trace_demo.lot_wip_history (container_id, track_in_at, event_id)
        WHERE equipment_id IS NOT NULL AND track_in_at IS NOT NULL""",
    """INDEX materials_by_container ON trace_demo.lot_materials_history
        (container_id, txn_at, event_id)""",
    "INDEX materials_by_lot ON trace_demo.lot_materials_history (material_lot_name)",
    "INDEX rejects_by_container ON trace_demo.lot_reject_history (container_id, txn_at, event_id)",
    "INDEX holds_by_container ON trace_demo.hold_release_history (container_id, hold_at, event_id)",
    "INDEX holds_open ON trace_demo.hold_release_history (hold_at) WHERE release_at IS NULL",
    "UNIQUE INDEX job_id ON trace_demo.equipment_job (job_id)",
    "INDEX job_created ON trace_demo.equipment_job (created_at)",
    """UNIQUE INDEX job_container ON trace_demo.equipment_job_container (container_id, job_id)""",
    "INDEX job_of_container ON trace_demo.equipment_job_container (job_id)",
    """UNIQUE INDEX combined ON trace_demo.combined_assy_lot
        (finished_container_id, source_container_id)""",
    "INDEX combined_source ON trace_demo.combined_assy_lot (source_container_id)",
    "INDEX combined_name ON trace_demo.combined_assy_lot (finished_name)",
)
COMMENTS = (
    *('quoted "twice"', "back\\\\slash", "two\\nlines", "a\\ttab", "\u91d1\u7dda\u77ed\u8def"),
    *("wire \U0001f9f5 broke", "100 % lost"),
)
"""As COPY takes them: what is awkward in a text is escaped."""

NULL = "\\N"


class DemoTraceError(HoldfastError):
    """The demo's events cannot be loaded, or are not there."""

    code = "demo_trace_error"


# ---- the plant ----------------------------------------------------------------------------------


@dataclass(slots=True)
class _Lot:
    id: str
    name: str
    order: str
    qty: int
    minute: int
    """When its last step ended."""
    is_bad: bool = False


_Origin = tuple[str | None, str | None]
"""The lots that a container was reworked from, and split from."""


@dataclass
class _Plant:
    """Makes containers and their events, row by row, from one sequence of random numbers."""

    seed: int
    rows: dict[str, list[str]] = field(default_factory=lambda: {name: [] for name in TABLES})
    containers: int = 0

    def __post_init__(self) -> None:
        # random() is the one method whose sequence Python promises to keep.
        self._random = random.Random(self.seed).random  # noqa: S311 - a demo, no secret
        self._events = count(1)
        self._jobs = count(1)
        self._recent: dict[str, list[str]] = {}

    # ---- chance

    def chance(self, share: float) -> bool:
        return self._random() < share

    def between(self, least: int, most: int) -> int:
        return least + int(self._random() * (most - least + 1))

    def pick(self, choices: Sequence[Chosen]) -> Chosen:
        return choices[int(self._random() * len(choices))]

    # ---- rows

    def add(self, table: str, *values: object) -> None:
        self.rows[table].append("\t".join(NULL if v is None else str(v) for v in values) + "\n")

    def event(self, table: str, *values: object) -> None:
        self.add(table, next(self._events), *values)

    @property
    def waiting(self) -> int:
        return sum(map(len, self.rows.values()))

    # ---- one work order

    def order(self, number: int) -> None:
        """Make a work order: a mother lot, its splits, what they are merged into, rework."""
        minute = self.between(0, START_DAYS * DAY_MINUTES)
        name = f"WO26{minute // (30 * DAY_MINUTES) + 1:02}{number:05}"
        product = self.between(1, 60)
        mother = self.lot((name, minute, product), f"{name}-000", 25_000)
        self.work(mother, SAW)
        splits = [
            self.lot((name, mother.minute, product), f"{name}-{part:03}", 1_000, (None, mother.id))
            for part in range(1, self.between(8, 24) + 1)
        ]
        for lot in splits:
            for step in ROUTE:
                if self.chance(step.share):
                    self.work(lot, step)
        while splits:
            size = min(len(splits), self.between(2, 5))
            self.merge(name, splits[:size], product)
            splits = splits[size:]

    def merge(self, order: str, sources: Sequence[_Lot], product: int) -> None:
        minute = max(lot.minute for lot in sources)
        qty = sum(lot.qty for lot in sources)
        name = f"GA{sources[0].name[2:]}"
        finished = self.lot((order, minute, product), name, qty)
        finished.is_bad = any(lot.is_bad for lot in sources)
        for lot in sources:
            ratio = f"{lot.qty / max(qty, 1):.4f}"
            start = at(minute)
            self.add("combined_assy_lot", finished.id, lot.id, name, lot.qty, 0, ratio, start)
        for _ in range(self.between(1, 3)):
            self.work(finished, TEST)
        if self.chance(0.05):
            name = f"RW{finished.name[2:]}"
            minute = finished.minute
            rework = self.lot((order, minute, product), name, finished.qty, (finished.id, None))
            self.work(rework, TEST)

    def lot(
        self, place: tuple[str, int, int], name: str, qty: int, origin: _Origin = (None, None)
    ) -> _Lot:
        """Make a container; `place` is its work order, the minute, the product."""
        order, minute, product = place
        self.containers += 1
        # An odd factor visits each number of 64 bits once: no two containers have the same.
        number = (self.containers * 0x9E3779B97F4A7C15 + self.seed * 0x5851F42D4C957F2D) % 2**64
        lot = _Lot(f"{number:016x}", name, order, qty, minute)
        package = product % 12
        first = f"WL{order[2:]}" if product % 17 else None
        self.add(
            "container",
            *(lot.id, name, "LOT", order, first, *origin, "PRODUCTION"),
            *(f"PRD-{product:03}", f"PL-{package:02}", f"PKG{package}", f"BOP-{product % 5}"),
            *(qty, qty, "ACTIVE" if product % 3 else "CLOSED", at(minute), at(minute + 60)),
        )
        return lot

    # ---- one step of one lot

    def work(self, lot: _Lot, step: Step) -> None:
        moved_in = lot.minute + self.between(5, 600)
        number = self.between(1, step.machines)
        machine, name = f"EQ-{step.spec}-{number:02}", f"{step.spec[:2]}-{number:02}"
        began = moved_in + self.between(2, 240)
        ended = began + self.between(30, 270)
        lot.is_bad = lot.is_bad or name == BAD_BONDER
        for material in step.materials:
            for _ in range(1 + self.chance(0.12)):  # now and then one lot of it is used up
                self.consume(lot, step, name, material, began)
        self.track(lot, step, (machine, name), (moved_in, began, ended))
        if self.chance(0.45):  # a checkpoint: no machine
            self.event(
                "lot_wip_history",
                *(lot.id, lot.order, step.work_center, step.spec, None, None, at(moved_in)),
                *(lot.qty, None, None, None, None, at(moved_in + 1), lot.qty, None),
            )
        if self.chance(0.235):
            self.lose(lot, step, name, ended)
        if self.chance(0.006):
            self.hold(lot, step, ended)
        self.serve(lot, (machine, name), ended)
        lot.minute = ended

    def track(
        self, lot: _Lot, step: Step, machine: tuple[str, str], minutes: tuple[int, int, int]
    ) -> None:
        moved_in, began, ended = minutes
        parts, left = 1 + self.chance(0.13), lot.qty
        for part in range(1, parts + 1):
            out = left if part == parts else left * self.between(30, 70) // 100
            tracked_out = at(began + (ended - began) * part // parts)
            self.event(
                "lot_wip_history",
                *(lot.id, lot.order, step.work_center, step.spec, *machine, at(moved_in), lot.qty),
                *(at(began), left, tracked_out, out, at(ended), lot.qty, f"RC-{lot.name[2:]}"),
            )
            left -= out

    def consume(self, lot: _Lot, step: Step, machine: str, part: str, minute: int) -> None:
        code = "MC" if part == "COMPOUND" else part[:2]
        name = f"{code}-{self.between(1, 120):04}"
        lot.is_bad = lot.is_bad or name == BAD_COMPOUND
        qty = f"{self.between(1, 9999) / 100:.2f}"
        event = next(self._events)
        used = {11: "NaN", 13: None}.get(event % 5003, qty)
        self.add(
            "lot_materials_history",
            *(
                event,
                lot.id,
                lot.order,
                step.work_center,
                step.spec,
                machine,
                f"{part}-{step.sequence}",
            ),
            *(name, f"{part.lower()} for {step.group}", qty, used, at(minute)),
        )

    def lose(self, lot: _Lot, step: Step, machine: str, minute: int) -> None:
        factor = BAD_FACTOR if lot.is_bad else 1
        for _ in range(self.between(1, 3)):
            lost = [self.between(0, 4) * factor for _ in range(6)]
            comment = self.pick(COMMENTS) if self.chance(0.02) else None
            self.event(
                "lot_reject_history",
                *(lot.id, lot.order, step.work_center, step.spec, machine),
                *(self.pick(step.reasons), "PROCESS", *lost, self.pick("ABC"), comment),
                at(minute + self.between(0, 30)),
            )

    def hold(self, lot: _Lot, step: Step, minute: int) -> None:
        is_open = self.chance(0.03)
        until = None if is_open else at(minute + self.between(30, 6000))
        self.event(
            "hold_release_history",
            *(lot.id, lot.order, step.work_center, step.spec, lot.qty, at(minute), until),
            *(f"E{self.between(1000, 1999)}", "QA", self.pick(("yield", "visual", "engineering"))),
            *(self.pick(COMMENTS), None if is_open else f"E{self.between(1000, 1999)}"),
            *(None if is_open else "released after review", f"NCR-{self.between(1, 9999):04}"),
        )

    def serve(self, lot: _Lot, machine: tuple[str, str], minute: int) -> None:
        """Now and then a machine is repaired, after the last lots that were on it."""
        recent = self._recent.setdefault(machine[0], [])
        if lot.id not in recent:
            recent.append(lot.id)
        del recent[:-3]
        if not self.chance(0.006 * 4):
            return
        job = f"JOB{next(self._jobs):07}"
        is_done = not self.chance(0.04)
        self.add(
            "equipment_job",
            *(job, *machine, "COMPLETE" if is_done else "OPEN", "REPAIR", f"ORD-{job[3:]}"),
            *(at(minute), at(minute + self.between(20, 900)) if is_done else None),
            *(self.pick(("WORN", "DIRTY", "DRIFT")), self.pick(("REPLACE", "CLEAN", "ADJUST"))),
            self.pick(("ALARM", "YIELD", "NOISE")),
        )
        for container_id in recent:
            self.add("equipment_job_container", container_id, job)

    # ---- what is awkward, few and fixed

    def oddities(self) -> None:
        """Make a container without events, events without a container, a hold that is open."""
        self.lot(("WO2601ODD", 0, 1), "ODD-WITHOUT-EVENTS", 1)
        ghost = _Lot("00000000deadbeef", "ODD-WITHOUT-CONTAINER", "WO2601ODD", 10, 0)
        self.track(ghost, SAW, ("EQ-ODD", "ODD-01"), (0, 5, 65))
        for comment in COMMENTS:
            self.event(
                "lot_reject_history",
                *(ghost.id, ghost.order, SAW.work_center, SAW.spec, "ODD-01", "chipping"),
                *("PROCESS", 1, 0, 0, 0, 0, 0, "A", comment, at(70)),
            )
        self.event(
            "hold_release_history",
            *(ghost.id, ghost.order, SAW.work_center, SAW.spec, 10, at(80), None),
            *("E1000", "QA", "visual", COMMENTS[0], None, None, None),
        )


def at(minute: int) -> str:
    """Return a minute since the first day as a time."""
    return f"{DAYS[minute // DAY_MINUTES]} {CLOCK[minute % DAY_MINUTES]}"


def _specs() -> Iterator[tuple[object, ...]]:
    for step in (SAW, *ROUTE, TEST):
        yield step.spec, step.work_center, step.group, step.sequence


# ---- loading ------------------------------------------------------------------------------------

LOCK_KEY = 0x74726163  # "trac": one load at a time, whoever starts it

TRY_LOCK = "SELECT pg_try_advisory_xact_lock(%(key)s) AS is_ours"
UNLIMITED = """
SELECT set_config('statement_timeout', '0', true), set_config('timezone', 'UTC', true),
       set_config('datestyle', 'ISO', true)
"""
EXISTS = "SELECT to_regclass('trace_demo.load') IS NOT NULL AS is_there"
LOADED = "SELECT cids, seed FROM trace_demo.load"
NOTE_LOAD = "INSERT INTO trace_demo.load (cids, seed) VALUES (%(cids)s, %(seed)s)"


@dataclass(frozen=True, slots=True)
class Load:
    """What was asked for when the tables were filled; the same gives the same rows."""

    cids: int
    seed: int


def load(
    database_url: str,
    cids: int,
    *,
    seed: int = SEED,
    replace: bool = False,
    keep: bool = False,
    progress: Progress | None = None,
) -> bool:
    """Fill the demo's tables with about `cids` containers; False where they are there already.

    One transaction: a load that is killed has changed nothing. Where something else is loaded,
    `replace` puts this in its place and `keep` leaves it; else DemoTraceError is raised, as it is
    while another load runs.
    """
    asked = Load(cids, seed)
    database = Database(database_url, application="holdfast demo", most_connections=1)
    try:
        with database.transaction() as tx:
            _lock(tx)
            there = loaded(tx)
            if there == asked or (there and keep):
                return False
            if there and not replace:
                message = f"{there.cids} containers of seed {there.seed} are there: --replace"
                raise DemoTraceError(message)
            _fill(tx, asked, progress)
        return True
    finally:
        database.close()


def loaded(tx: Tx) -> Load | None:
    """Return what is loaded. Raises DemoTraceError where there are no tables for it."""
    exists = tx.execute(EXISTS).fetchone()
    if not exists or not exists["is_there"]:
        raise DemoTraceError("there is no schema trace_demo; run python -m migrations --demo")
    there = tx.execute(LOADED).fetchone()
    return Load(**there) if there else None


def _lock(tx: Tx) -> None:
    locked = tx.execute(TRY_LOCK, {"key": LOCK_KEY}).fetchone()
    if not locked or not locked["is_ours"]:
        raise DemoTraceError("another load is running; wait for its end")


def _fill(tx: Tx, asked: Load, progress: Progress | None) -> None:
    tx.execute(UNLIMITED)
    tables = ", ".join(f"trace_demo.{name}" for name in TABLES)
    tx.execute(f"TRUNCATE trace_demo.load, {tables}".encode())
    for index in INDEXES:
        name = index.split("INDEX ", 1)[1].split()[0]
        tx.execute(f"DROP INDEX IF EXISTS trace_demo.{name}".encode())
    for done in _grown(tx, asked):
        if progress:
            progress(min(done, asked.cids), asked.cids)
    for index in INDEXES:
        tx.execute(f"CREATE {index}".encode())
    for name in TABLES:
        tx.execute(f"ANALYZE trace_demo.{name}".encode())
    tx.execute(NOTE_LOAD, {"cids": asked.cids, "seed": asked.seed})


def _grown(tx: Tx, asked: Load) -> Iterator[int]:
    """Make containers and their events; yield how many there are, each time some are stored."""
    plant = _Plant(asked.seed)
    for spec in _specs():
        plant.add("spec_workcenter", *spec)
    plant.oddities()
    for number in count(1):
        plant.order(number)
        is_enough = plant.containers >= asked.cids
        if is_enough or plant.waiting >= FLUSH_ROWS:
            _flush(tx, plant)
            yield plant.containers
        if is_enough:
            return


def _flush(tx: Tx, plant: _Plant) -> None:
    for name, rows in plant.rows.items():
        if rows:
            with tx.cursor().copy(f"COPY trace_demo.{name} FROM STDIN".encode()) as copy:
                copy.write("".join(rows))
            rows.clear()


# ---- looking ------------------------------------------------------------------------------------

IDS = """
SELECT container_id FROM trace_demo.container
 ORDER BY md5(container_id), container_id LIMIT %(count)s
"""
# The same for every order of the rows; md5 is the same on every machine and version.
CHECK = """
SELECT count(*) AS rows,
       coalesce(bit_xor(('x' || substr(md5(t::text), 1, 16))::bit(64)::bigint), 0) AS checksum
  FROM trace_demo.{table} AS t
"""


def ids(tx: Tx, number: int) -> list[str]:
    """Return a fixed choice of container ids, scattered over all of them."""
    return [str(row["container_id"]) for row in tx.execute(IDS, {"count": number})]


def check(tx: Tx) -> tuple[dict[str, int], str]:
    """Return how many rows each table has, and one checksum over all of them."""
    tx.execute(UNLIMITED)
    counts: dict[str, int] = {}
    total = 0
    for name in TABLES:
        row = tx.execute(CHECK.replace("{table}", name).encode()).fetchone()
        assert row is not None  # noqa: S101 - an aggregate
        counts[name] = row["rows"]
        total ^= int(row["checksum"])
    return counts, f"{total % 2**64:016x}"


# ---- the command line ---------------------------------------------------------------------------


def main(arguments: Sequence[str]) -> int:
    """Run from the command line."""
    options = _parser().parse_args(arguments)
    try:
        return _run(options, config.load().database_url)
    except ConfigError as exc:
        print("\n".join(exc.faults), file=sys.stderr)
        return 78
    except (DemoTraceError, StoreUnavailable) as exc:
        print(f"demo_trace: {exc.message}", file=sys.stderr)
        return 1


def _run(options: argparse.Namespace, url: str) -> int:
    if options.command == "load":
        is_new = load(
            url,
            options.cids,
            seed=options.seed,
            replace=options.replace,
            keep=options.keep,
            progress=_bar,
        )
        print("loaded" if is_new else "loaded already")
        return 0
    lines = _look(url, options.count if options.command == "ids" else None)
    try:
        print("\n".join(lines), flush=True)
    except BrokenPipeError:  # whoever reads has seen enough, and nothing more can be written
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return 0


def _look(url: str, number: int | None) -> list[str]:
    """Return so many ids, or where no number is given the report of `check`."""
    database = Database(url, application="holdfast demo", most_connections=1)
    try:
        with database.transaction() as tx:
            if loaded(tx) is None:
                raise DemoTraceError("nothing is loaded; run python -m worker.demo_trace load")
            return _report(tx) if number is None else _chosen(tx, number)
    finally:
        database.close()


def _chosen(tx: Tx, number: int) -> list[str]:
    found = ids(tx, number)
    if len(found) < number:
        raise DemoTraceError(f"there are {len(found)} containers, and {number} were asked for")
    return found


def _report(tx: Tx) -> list[str]:
    counts, checksum = check(tx)
    return [
        *(f"{name:24} {rows:>10,}" for name, rows in counts.items()),
        f"checksum {checksum}",
        f"planted: bonder {BAD_BONDER}, mould compound {BAD_COMPOUND}: losses x {BAD_FACTOR}",
    ]


def _bar(done: int, total: int) -> None:
    filled = BAR_CHARACTERS * done // total
    bar = "#" * filled + "." * (BAR_CHARACTERS - filled)
    end = "\n" if done == total or not sys.stderr.isatty() else "\r"
    print(f"[{bar}] {done:,}/{total:,} containers", end=end, file=sys.stderr, flush=True)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m worker.demo_trace", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    fill = commands.add_parser("load", help="fill the tables of trace_demo")
    cids, seed = _number(1, MOST_CIDS), _number(0, MOST_SEED)
    fill.add_argument("--cids", type=cids, required=True, help="containers; some more are made")
    fill.add_argument("--seed", type=seed, default=SEED, help=f"other numbers; {SEED} if left out")
    there = fill.add_mutually_exclusive_group()
    there.add_argument("--replace", action="store_true", help="put it in place of what is loaded")
    there.add_argument("--keep", action="store_true", help="leave what is loaded as it is")
    commands.add_parser("check", help="counts, checksum, planted causes")
    some = commands.add_parser("ids", help="container ids, one a line")
    some.add_argument("--count", type=cids, required=True)
    return parser


def _number(least: int, most: int) -> Callable[[str], int]:
    def number(text: str) -> int:
        if not text.isascii() or not text.isdigit() or not least <= int(text) <= most:
            raise argparse.ArgumentTypeError(f"must be a whole number from {least} to {most}")
        return int(text)

    return number


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
