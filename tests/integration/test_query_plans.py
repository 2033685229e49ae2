"""The plans of the hot statements on a queue of 50,000 rows: each finds its rows by an index."""

from collections.abc import Iterator
from typing import Any, LiteralString

import pytest

from app.core.store import fleet, items, jobs, vectors
from app.core.store.database import Database, Tx
from tests import rows
from tests.rows import MODEL

FILL = """
INSERT INTO holdfast.jobs (id, kind, client)
SELECT 'emb-' || n, 'embedding', 'client-' || n % 5 FROM generate_series(0, 499) AS n;
INSERT INTO public.embedding_retry_queue
       (target_table, target_id, text_content, embedding_version, model, job_id, status,
        next_attempt_at, kills, attempts, max_attempts, lease_token, lease_until, leased_by,
        processed_at, updated_at, error_class)
SELECT 'ai_insights', n::text, 'a text of some words, number ' || n, 'bge-m3-latest-8',
       'bge-m3:latest', 'emb-' || n % 500, s.status,
       now() + make_interval(secs => CASE WHEN n % 3 = 0 THEN 3600 ELSE -n % 1000 END),
       (n % 97 = 0)::integer, 1, 5,
       CASE WHEN s.status = 'processing' THEN n END,
       CASE WHEN s.status = 'processing' THEN now() + make_interval(secs => n % 60 - 5) END,
       CASE WHEN s.status = 'processing' THEN 'emb-' || n % 500 || '-1' END,
       CASE WHEN s.status = 'done' THEN now() - make_interval(hours => n % 400) END,
       now() - make_interval(hours => n % 400),
       CASE WHEN s.status = 'failed' THEN 'unclear' END
  FROM generate_series(1, 50000) AS n
 CROSS JOIN LATERAL (
       SELECT CASE WHEN n % 10 < 4 THEN 'pending' WHEN n % 10 < 9 THEN 'done'
                   WHEN n % 100 = 9 THEN 'processing' ELSE 'failed' END AS status) AS s;
INSERT INTO holdfast.job_items (job_id, position, item_id, content_hash)
SELECT job_id, row_number() OVER (PARTITION BY job_id ORDER BY id) - 1, id, content_hash
  FROM public.embedding_retry_queue;
INSERT INTO holdfast.item_attempts (item_id, attempt, error_class, message)
SELECT id, 1, 'unclear', '500' FROM public.embedding_retry_queue WHERE id % 5 = 0;
"""
BIG = frozenset({"embedding_retry_queue", "job_items", "item_attempts"})
IDS = list(range(1000, 1064))
CLAIM: dict[str, object] = {
    "job_id": "emb-7",
    "leased_by": "bell-1",
    "lease_seconds": 45,
    "allowance": 5,
    "limit": 64,
    "paused": [],
    "paused_targets": [],
}
SETTLE: dict[str, object] = {
    "ids": IDS,
    "tokens": IDS,
    "statuses": ["done"] * len(IDS),
    "refunds": [0] * len(IDS),
    "afters": [0.0] * len(IDS),
    "classes": [None] * len(IDS),
    "messages": [None] * len(IDS),
    "reasons": [None] * len(IDS),
    "suspects": [0] * len(IDS),
}
JOB: dict[str, object] = {"job_id": "emb-7"}

STATEMENTS: dict[str, tuple[LiteralString, dict[str, object]]] = {
    "claim": (items.CLAIM, CLAIM),
    "claim alone": (items.CLAIM_ALONE, CLAIM),
    "extend": (items.EXTEND, {"ids": IDS, "token": 1009, "lease_seconds": 45}),
    "hold": (items.HOLD, {"ids": IDS, "token": 1009}),
    "still ours": (items.STILL_OURS, {"ids": IDS, "token": 1009}),
    "settle": (items.SETTLE, SETTLE),
    "record": (vectors.RECORD, {"ids": IDS, "tokens": IDS, "digest": None, "followers": []}),
    "recover expired": (items.LOCK_DEAD, {"leased_by": None, "limit": 1000}),
    "recover dead": (items.LOCK_DEAD, {"leased_by": "emb-9-1", "limit": 1000}),
    "next due": (items.NEXT_DUE, JOB),
    "needs": (items.NEEDS, JOB),
    "revive": (items.REVIVE, JOB),
    "lock open": (items.LOCK_OPEN, JOB),
    "cancel": (items.CANCEL, JOB),
    "other jobs": (items.OTHER_JOBS, {"ids": IDS, "job_id": "emb-7"}),
    "unowned": (items.UNOWNED, {}),
    "page": (items.PAGE, {**JOB, "after": 9, "limit": 100, "status": None}),
    "page by status": (items.PAGE, {**JOB, "after": -1, "limit": 100, "status": "failed"}),
    "offset": (items.BEFORE_OFFSET, {**JOB, "offset": 50}),
    "attempts": (items.ATTEMPTS, {"ids": IDS}),
    "old items": (items.LOCK_OLD, {"days": 7, "limit": 1000}),
    "prune": (items.PRUNE, {"ids": IDS}),
    "find": (jobs.FIND, {"id": "emb-7", "client": None}),
    "list": (
        jobs.LIST,
        {
            **dict.fromkeys(("state", "kind", "before_at", "before_id")),
            "client": "client-3",
            "limit": 50,
        },
    ),
    "due": (jobs.DUE, {"paused": [MODEL], "paused_targets": [f"other {MODEL}"]}),
    "complete": (jobs.COMPLETE, {}),
    "open work": (jobs.OPEN_WORK, {"client": "client-3"}),
    "errors": (jobs.ERRORS, JOB),
    "own in flight": (jobs.OWN_IN_FLIGHT, {"id": "emb-7"}),
    "give up shared": (jobs.GIVE_UP_SHARED, {"id": "emb-7"}),
    "next event": (fleet.NEXT_EVENT, {}),
    "in hand": (items.IN_HAND, {"ids": IDS}),
    "incidents": (
        fleet.INCIDENTS,
        {
            **dict.fromkeys(("client", "before_at", "before_id")),
            "backend": "ollama",
            "sinks": [],
            "limit": 50,
        },
    ),
}


@pytest.fixture(scope="module")
def database(shared_database_url: str) -> Iterator[Database]:
    """Give a queue of 50,000 rows of 500 jobs, as a busy day leaves it."""
    with rows.open_database(shared_database_url) as database:
        with database.session() as tx:
            tx.execute(FILL)
            tx.execute("ANALYZE")
        yield database


@pytest.fixture
def tx(database: Database) -> Iterator[Tx]:
    with database.session() as connection:
        yield connection


def nodes(plan: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Yield each step of a plan."""
    yield plan
    for part in plan.get("Plans", ()):
        yield from nodes(part)


def plan_of(tx: Tx, statement: LiteralString, values: dict[str, object]) -> list[dict[str, Any]]:
    found = tx.execute(b"EXPLAIN (FORMAT JSON) " + statement.encode(), values).fetchone()
    assert found
    (plan,) = found["QUERY PLAN"]
    return list(nodes(plan["Plan"]))


@pytest.mark.parametrize("name", STATEMENTS)
def test_no_hot_statement_reads_a_whole_table(tx: Tx, name: str) -> None:
    plan = plan_of(tx, *STATEMENTS[name])

    scanned = {step["Relation Name"] for step in plan if step["Node Type"] == "Seq Scan"}
    assert not scanned & BIG


@pytest.mark.parametrize(
    ("name", "index"),
    [
        ("claim", "embedding_retry_queue_due"),
        ("claim alone", "embedding_retry_queue_due_alone"),
        ("hold", "embedding_retry_queue_pkey"),
        ("settle", "embedding_retry_queue_pkey"),
        ("recover expired", "embedding_retry_queue_leased"),
        ("recover dead", "embedding_retry_queue_leased"),
        ("unowned", "embedding_retry_queue_unowned"),
        ("old items", "embedding_retry_queue_finished"),
        ("next event", "embedding_retry_queue_due"),
        ("page", "job_items_pkey"),
    ],
)
def test_each_finds_its_rows_by_the_index_that_was_made_for_it(
    tx: Tx, name: str, index: str
) -> None:
    plan = plan_of(tx, *STATEMENTS[name])

    assert index in {step.get("Index Name") for step in plan}


@pytest.mark.parametrize("name", ["claim", "claim alone", "hold", "settle", "record", "other jobs"])
def test_a_slice_reads_no_more_than_its_own_rows_where_there_are_no_statistics_yet(
    database: Database, name: str
) -> None:
    with database.session() as tx, tx.transaction(force_rollback=True):
        tx.execute("DELETE FROM pg_statistic WHERE starelid > 16383")
        plan = plan_of(tx, *STATEMENTS[name])

    used = {step.get("Index Name") for step in plan}
    assert "job_items_pkey" not in used  # which is all that a job has
    assert not {step["Relation Name"] for step in plan if step["Node Type"] == "Seq Scan"} & BIG


def test_a_claim_needs_no_sort(tx: Tx) -> None:
    for name in ("claim", "claim alone"):
        plan = plan_of(tx, *STATEMENTS[name])

        assert not any("Sort" in step["Node Type"] for step in plan)


def test_no_item_is_counted_by_the_statements_that_a_poll_waits_for(tx: Tx) -> None:
    for name in ("find", "list", "open work", "complete", "incidents"):
        touched = {step.get("Relation Name") for step in plan_of(tx, *STATEMENTS[name])}

        assert not touched & BIG, name
