"""A million rows through the table: what a claim costs at the start and at the end."""

import json
import time
from collections.abc import Iterator
from contextlib import contextmanager
from statistics import quantiles
from threading import Event, Lock, Thread
from typing import Any

import psycopg
import pytest

from app.core.model import Claim, Done, Settlement
from app.core.store import items, jobs, vectors
from app.core.store.database import Database, Tx
from app.core.store.items import ClaimTerms
from migrations.__main__ import migrate
from tests import rows

pytestmark = pytest.mark.slow

ROWS = 1_000_000
STREAM_ROWS = 50_000
"""Items of one job; so many are open at the start as ROWS has of them."""
SLICE = 64
WORKERS = 2
WINDOWS = 10
CLEAN_ROWS = 1_000

TABLE = """
SELECT pg_relation_size(relid) / 1048576.0 AS heap_mb,
       pg_indexes_size(relid) / 1048576.0 AS index_mb,
       n_live_tup AS live, n_dead_tup AS dead, n_tup_upd AS updates,
       round(n_tup_hot_upd / greatest(n_tup_upd, 1)::numeric, 3)::float8 AS hot,
       autovacuum_count AS autovacuums
  FROM pg_stat_user_tables
 WHERE relid = %(table)s::regclass
"""
TABLES = (
    "public.embedding_retry_queue",
    "holdfast.job_counts",
    "holdfast.jobs",
    "holdfast.vectors",
)


@pytest.fixture
def database_url(empty_database_url: str) -> str:
    """Give a database whose server writes to its disk, as one in production does."""
    migrate(empty_database_url, demo=True, dimension=8)
    return empty_database_url


@pytest.fixture
def connection(database_url: str) -> "Iterator[psycopg.Connection[Any]]":
    """Give a connection to look at the tables with, while `fsync` is on."""
    with psycopg.connect(
        database_url, autocommit=True, row_factory=psycopg.rows.dict_row
    ) as opened:
        opened.execute("ALTER SYSTEM SET fsync = on")
        opened.execute("SELECT pg_reload_conf()")
        yield opened
        opened.execute("ALTER SYSTEM SET fsync = off")
        opened.execute("SELECT pg_reload_conf()")


class Drain:
    """Workers that claim and settle with the product's own statements, and embed nothing."""

    def __init__(self, database: Database, job_ids: list[str]) -> None:
        self._database = database
        self._job_ids = job_ids
        self._lock = Lock()
        self.claims: list[tuple[float, float]] = []
        """Items that were done before it, and seconds that it took."""
        self.settles: list[float] = []
        self.done = 0

    def work(self) -> None:
        """Take one job after the other until none is left."""
        while True:
            with self._lock:
                if not self._job_ids:
                    return
                job_id = self._job_ids.pop(0)
            while self._slice(job_id):
                pass
            with self._database.transaction() as tx:
                assert jobs.finish(tx, job_id, ttl_seconds=0)

    def _slice(self, job_id: str) -> bool:
        began = time.monotonic()
        with self._database.transaction() as tx:
            terms = ClaimTerms(job_id, "bench", 45, 5)
            claims = items.claim(tx, terms, limit=SLICE, paused_models=[])
        claimed = time.monotonic()
        if not claims:
            return False
        with self._database.transaction() as tx:
            settle(tx, claims)
        with self._lock:
            self.claims.append((self.done, claimed - began))
            self.settles.append(time.monotonic() - claimed)
            self.done += len(claims)
        return True


def settle(tx: Tx, claims: list[Claim]) -> None:
    """Do what a slice's settle does, but for the vectors in the target's own table."""
    items.hold(tx, claims)
    outcomes = [Settlement(claim, Done()) for claim in claims]
    assert items.settle(tx, outcomes, leased_by="bench") == len(claims)
    vectors.record(tx, outcomes, followers=(), digest=None)


@contextmanager
def cleaning(database: Database, *, is_on: bool) -> Iterator[list[int]]:
    """Delete what is done for as long as this lasts, block by block; give how many rows went."""
    stop = Event()
    gone = [0]

    def clean() -> None:
        while not stop.wait(0.1):
            with database.transaction() as tx:
                gone[0] += items.prune(tx, days=0, limit=CLEAN_ROWS)

    thread = Thread(target=clean)
    if is_on:
        thread.start()
    try:
        yield gone
    finally:
        stop.set()
        if is_on:
            thread.join()


def say(name: str, **figures: Any) -> None:  # noqa: ANN401
    """Print one line of figures."""
    shown = {
        key: round(value, 3) if isinstance(value, float) else value
        for key, value in figures.items()
    }
    print(f"\nBENCH {name} {json.dumps(shown, default=float)}", flush=True)  # noqa: T201 - a benchmark


def table(connection: "psycopg.Connection[Any]", when: str) -> dict[str, Any]:
    """Print what the statistics say of each table, and return it for the queue."""
    found: dict[str, dict[str, Any]] = {}
    for name in TABLES:
        [found[name]] = connection.execute(TABLE, {"table": name}).fetchall()
        say(f"table {when} {name}", **{key: float(each) for key, each in found[name].items()})
    return found[TABLES[0]]


def fill(database: Database) -> list[str]:
    """Submit ROWS items in streams; return the jobs."""
    job_ids = [f"emb-bench-{number:04}" for number in range(ROWS // STREAM_ROWS)]
    for number, job_id in enumerate(job_ids):
        first = number * STREAM_ROWS
        lines = [
            rows.line(position, str(first + position), f"short text {first + position}")
            for position in range(STREAM_ROWS)
        ]
        with database.transaction() as tx:
            rows.submit(tx, job_id, lines)
    return job_ids


@pytest.mark.parametrize("is_cleaned", [False, True], ids=["alone", "beside-cleaning"])
def test_a_million_rows_through_the_table(
    database_url: str, connection: "psycopg.Connection[Any]", *, is_cleaned: bool
) -> None:
    name = "beside cleaning" if is_cleaned else "alone"
    with rows.open_database(database_url, most_connections=WORKERS + 2) as database:
        began = time.monotonic()
        drain = Drain(database, fill(database))
        say(f"fill {name}", rows=ROWS, seconds=time.monotonic() - began)
        filled = table(connection, f"{name}, filled")
        began = time.monotonic()
        with cleaning(database, is_on=is_cleaned) as gone:
            threads = [Thread(target=drain.work) for _ in range(WORKERS)]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
        seconds = time.monotonic() - began
        found = table(connection, f"{name}, drained")
    windows = by_window(drain.claims)
    for number, times in enumerate(windows):
        cuts = quantiles(times, n=20)
        say(f"claim {name}", window=number, p50_ms=1000 * cuts[9], p95_ms=1000 * cuts[18])
    cuts = quantiles(drain.settles, n=20)
    say(f"settle {name}", p50_ms=1000 * cuts[9], p95_ms=1000 * cuts[18])
    say(f"drain {name}", rows=drain.done, seconds=seconds, deleted=gone[0])
    assert drain.done == ROWS
    # Floors against ruin; the figures are for reading.
    assert found["heap_mb"] < 3 * filled["heap_mb"]
    assert quantiles(windows[-1], n=20)[9] < 5 * quantiles(windows[0], n=20)[9]


def by_window(claims: list[tuple[float, float]]) -> list[list[float]]:
    """Return the seconds of the claims of each tenth of the rows."""
    found: list[list[float]] = [[] for _ in range(WINDOWS)]
    for done, seconds in claims:
        found[min(WINDOWS - 1, int(done * WINDOWS / ROWS))].append(seconds)
    return found
