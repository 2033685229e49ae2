"""A million rows through the queue: whether a claim stays as quick, and the table as small."""

import statistics
import time
from collections.abc import Iterator
from typing import Any

import psycopg
import pytest

from app.core import config, submission
from app.core.context import Context, open_context
from app.core.model import Caller, Claim, Done, Settlement
from app.core.ports import Write, find
from app.core.requests import BatchOptions
from app.core.store import items, targets, vectors
from app.core.store.items import ClaimTerms
from migrations.__main__ import migrate
from worker.sweep import cleanup

pytestmark = pytest.mark.slow

ROWS, BATCH, SLICE, DIMENSION = 1_000_000, 100_000, 200, 8
SAMPLE = 200
CALLER = Caller("bench", frozenset({"submit"}))
STATE = """
SELECT pg_size_pretty(pg_table_size('public.embedding_retry_queue')) AS table_size,
       pg_size_pretty(pg_indexes_size('public.embedding_retry_queue')) AS indexes_size,
       s.n_live_tup AS live, s.n_dead_tup AS dead,
       round(100.0 * s.n_tup_hot_upd / greatest(1, s.n_tup_upd), 1) AS hot_percent,
       s.autovacuum_count AS vacuums
  FROM pg_stat_user_tables s WHERE s.relid = 'public.embedding_retry_queue'::regclass
"""


@pytest.fixture
def ctx(empty_database_url: str, redis_url: str) -> Iterator[Context]:
    """Give a context on a database of its own."""
    migrate(empty_database_url, demo=True, dimension=DIMENSION)
    environ = {"DATABASE_URL": empty_database_url, "REDIS_URL": redis_url}
    more = {"EMBEDDING_DIM": str(DIMENSION), "QUEUE_MAX_PER_CLIENT": str(2 * ROWS)}
    opened = open_context(config.load({**environ, **more}), application="bench", most_connections=4)
    yield opened
    opened.close()


def say(what: str, **figures: object) -> None:
    """Print a line of figures."""
    shown = "  ".join(f"{name} {value}" for name, value in figures.items())
    print(f"\nmillion rows | {what}: {shown}", flush=True)  # noqa: T201 - what it is for


def state(ctx: Context) -> dict[str, Any]:
    """Return how large the table is, and how much of it is dead."""
    with ctx.database.session() as session:
        session.execute("SELECT pg_stat_force_next_flush()")
        return session.execute(STATE).fetchone() or {}


def test_a_million_rows_leave_the_claim_as_quick_as_it_was(ctx: Context) -> None:
    with psycopg.connect(ctx.settings.database_url, autocommit=True) as connection:
        connection.execute(
            "INSERT INTO ai_insights (id, body) SELECT n, '' FROM generate_series(1, %s) AS n",
            (ROWS,),
        )
    began = time.perf_counter()
    jobs = [submit(ctx, first) for first in range(1, ROWS + 1, BATCH)]
    say("submitted", seconds=round(time.perf_counter() - began, 1), **state(ctx))

    began = time.perf_counter()
    seconds = [each for job_id in jobs for each in drain(ctx, job_id)]
    say("drained", seconds=round(time.perf_counter() - began, 1), **state(ctx))
    first, last = seconds[:SAMPLE], seconds[-SAMPLE:]
    for name, sample in (("the first claims", first), ("the last claims", last)):
        middle = statistics.median(sample)
        say(name, p50=f"{1000 * middle:.2f} ms", p95=f"{1000 * ninety_five(sample):.2f} ms")

    with ctx.database.session() as session:
        for table, column in (("public.embedding_retry_queue", "updated_at"),):
            session.execute("SET statement_timeout = 0")
            session.execute(f"UPDATE {table} SET {column} = now() - interval '60 days'")  # noqa: S608
        session.execute(
            """UPDATE holdfast.jobs SET finished_at = now() - interval '60 days',
                      expires_at = now() - interval '60 days', state = 'completed',
                      final_counts = '{}'"""
        )
        session.execute("RESET statement_timeout")
    began = time.perf_counter()
    gone = cleanup.run_once(ctx)
    say("cleaned", seconds=round(time.perf_counter() - began, 1), items=gone["items"])
    again = submit(ctx, 1)
    after = drain(ctx, again)[:SAMPLE]
    say("claims after the cleaning", p50=f"{1000 * statistics.median(after):.2f} ms", **state(ctx))

    assert statistics.median(last) < 3 * statistics.median(first)


def submit(ctx: Context, first: int) -> str:
    """Submit a batch of short texts."""
    values = (
        {"target_table": "ai_insights", "target_id": number, "text": f"text {number}"}
        for number in range(first, first + BATCH)
    )
    incoming = submission.Incoming(BatchOptions(), values, is_stream=True)
    return submission.submit(ctx, CALLER, incoming).job_id


def drain(ctx: Context, job_id: str) -> list[float]:
    """Claim, write and settle all of a job as a worker does; return how long each claim took."""
    sink = find("sinks", "pgvector")()
    terms = ClaimTerms(job_id, "bell", 45, 5)
    taken: list[float] = []
    with ctx.database.session() as session:
        target = targets.registered(session)[0]
    while True:
        began = time.perf_counter()
        with ctx.database.transaction() as tx:
            claims = items.claim(tx, terms, limit=SLICE, paused_models=[])
        taken.append(time.perf_counter() - began)
        if not claims:
            return taken[:-1]
        settle(ctx, sink, target, claims)


def settle(ctx: Context, sink: Any, target: Any, claims: list[Claim]) -> None:  # noqa: ANN401
    """Store a vector for each, in the same transaction as its outcome."""
    vector = [1.0] * DIMENSION
    with ctx.database.transaction() as tx:
        items.hold(tx, claims)
        sink.write(tx, target, [Write(claim.target_id, vector) for claim in claims])
        outcomes = [Settlement(claim, Done()) for claim in claims]
        items.settle(tx, outcomes, leased_by="bell")
        vectors.record(tx, outcomes, followers=(), digest=None)


def ninety_five(sample: list[float]) -> float:
    """Return what 95 of 100 stay below."""
    return statistics.quantiles(sample, n=20)[-1]
