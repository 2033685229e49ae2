"""Rows of the queue made by the product's own functions, moved in time, and counted anew."""

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from app.core.errors import AnswerFault, BackendFault, ErrorClass, RequestFault, SinkFault
from app.core.model import (
    Claim,
    Counts,
    Done,
    Failed,
    NewItem,
    Outcome,
    Release,
    Retry,
    Settlement,
    Skipped,
)
from app.core.store import items, jobs
from app.core.store.database import Database, Tx
from app.core.store.items import ClaimTerms
from app.core.store.jobs import NewJob

TABLE = "ai_insights"
MODEL = "bge-m3:latest"
VERSION = "bge-m3-latest-8"
"""What the demo's targets are registered with in the tests."""

TTL_SECONDS = 3600

BUSY = BackendFault(ErrorClass.BUSY, "come back later")
UNCLEAR = RequestFault(ErrorClass.UNCLEAR, "500: it broke")
REFUSED = RequestFault(ErrorClass.BAD_INPUT, "400: too long")
WRONG = AnswerFault("1 vectors for 2 texts")
ROW_REFUSED = SinkFault("23514 a check of the table")

DONE = Done()
SKIPPED = Skipped("content_not_found")
RETRIED = Retry(UNCLEAR, 0.0)
RELEASED = Release(BUSY, 0.0)
FAILED = Failed(REFUSED)


@contextmanager
def open_database(url: str, *, most_connections: int = 4) -> Iterator[Database]:
    """Open a database as a process of ours does, and close it."""
    database = Database(url, application="test", most_connections=most_connections)
    try:
        yield database
    finally:
        database.close()


# A few rows are deleted faster than a dozen tables are truncated.
EMPTY = """
DELETE FROM public.embedding_retry_queue;
DELETE FROM public.ai_insights;
DELETE FROM public.conversations;
DELETE FROM holdfast.jobs;
DELETE FROM holdfast.job_counts;
DELETE FROM holdfast.job_items;
DELETE FROM holdfast.item_attempts;
DELETE FROM holdfast.idempotency_keys;
DELETE FROM holdfast.api_keys;
DELETE FROM holdfast.requeues;
DELETE FROM holdfast.processes;
DELETE FROM holdfast.backends;
DELETE FROM holdfast.incidents;
DELETE FROM holdfast.canaries;
DELETE FROM holdfast.slices;
"""


def empty(tx: Tx) -> None:
    """Take every row away that a test may have left, but for the registered targets."""
    tx.execute(EMPTY)


def line(
    position: int,
    target_id: str,
    text: str,
    *,
    table: str = TABLE,
    custom_id: str | None = None,
) -> NewItem:
    """Make one accepted line of a batch."""
    return NewItem(
        position=position,
        target_table=table,
        target_id=target_id,
        embedding_version=VERSION,
        model=MODEL,
        text=text,
        content_hash=hashlib.sha256(text.encode()).digest(),
        custom_id=custom_id,
        metadata=None,
    )


def submit(
    tx: Tx, job_id: str, batch: Mapping[str, str] | Sequence[NewItem], *, client: str = "alice"
) -> int:
    """Make a job of texts by target id, as a POST does; return how many were no duplicates."""
    lines = (
        [line(position, *pair) for position, pair in enumerate(batch.items())]
        if isinstance(batch, Mapping)
        else batch
    )
    items.begin_batch(tx)
    items.copy_in(tx, lines)
    with tx.transaction():
        jobs.insert(tx, NewJob(job_id, client))
        return items.enqueue(tx, job_id=job_id, project="", priority=0)


def numbered(count: int, text: str = "text") -> dict[str, str]:
    """Give texts for the target ids 1 to `count`."""
    return {str(number): f"{text} {number}" for number in range(1, count + 1)}


def claim(
    tx: Tx,
    job_id: str,
    *,
    limit: int = 1000,
    leased_by: str = "bell-1",
    allowance: int = 5,
    lease_seconds: float = 60,
) -> list[Claim]:
    """Claim due items of a job."""
    terms = ClaimTerms(job_id, leased_by, lease_seconds, allowance)
    return items.claim(tx, terms, limit=limit, paused_models=[])


def settle(tx: Tx, claims: Sequence[Claim], outcome: Outcome = DONE) -> int:
    """Write one outcome for all claims; return how many were still held."""
    settlements = [Settlement(each, outcome) for each in claims]
    return items.settle(tx, settlements, leased_by="bell-1")


def work(tx: Tx, job_id: str, outcome: Outcome = DONE) -> int:
    """Claim whatever of a job is due and give it one outcome; return how many."""
    return settle(tx, claim(tx, job_id), outcome)


def finish(tx: Tx, job_id: str) -> bool:
    """Make a job final if it can be; return whether this did so."""
    with tx.transaction():
        return jobs.finish(tx, job_id, ttl_seconds=TTL_SECONDS) is not None


def end_leases(tx: Tx) -> None:
    """Let every lease have run out a second ago."""
    tx.execute(
        "UPDATE public.embedding_retry_queue SET lease_until = now() - interval '1 second'"
        " WHERE status = 'processing'"
    )


def make_due(tx: Tx) -> None:
    """Let every item that waits be due."""
    tx.execute(
        "UPDATE public.embedding_retry_queue SET next_attempt_at = now() WHERE status = 'pending'"
    )


AGE_ITEMS = """
UPDATE public.embedding_retry_queue SET updated_at = now() - make_interval(days => %(days)s)
 WHERE status IN ('done', 'cancelled', 'failed')
"""
AGE_JOBS = """
UPDATE holdfast.jobs SET finished_at = finished_at - make_interval(days => %(days)s),
       expires_at = expires_at - make_interval(days => %(days)s)
 WHERE finished_at IS NOT NULL
"""


def age(tx: Tx, *, days: int) -> None:
    """Let everything that is final have become so many days ago."""
    tx.execute(AGE_ITEMS, {"days": days})
    tx.execute(AGE_JOBS, {"days": days})


def row(tx: Tx, target_id: str, *, table: str = TABLE) -> dict[str, Any]:
    """Return the row of an item."""
    found = tx.execute(
        "SELECT * FROM public.embedding_retry_queue"
        " WHERE target_table = %(table)s AND target_id = %(id)s",
        {"table": table, "id": target_id},
    ).fetchall()
    assert len(found) == 1, f"{len(found)} rows for {table} {target_id}"
    return found[0]


def statuses(tx: Tx) -> dict[str, str]:
    """Return the status of each item by its target id."""
    return {
        str(each["target_id"]): str(each["status"])
        for each in tx.execute("SELECT target_id, status FROM public.embedding_retry_queue")
    }


def counts(tx: Tx, job_id: str) -> Counts:
    """Return the counts that a job shows."""
    job = jobs.find(tx, job_id)
    assert job is not None
    return job.counts


RECOUNT = """
SELECT count(*) FILTER (WHERE q.status = 'pending') AS pending,
       count(*) FILTER (WHERE q.status = 'processing') AS processing,
       count(*) FILTER (WHERE q.status = 'done' AND q.skip_reason IS NULL) AS done,
       count(*) FILTER (WHERE q.skip_reason IS NOT NULL) AS skipped,
       count(*) FILTER (WHERE q.status = 'failed') AS failed,
       count(*) FILTER (WHERE q.status = 'cancelled') AS cancelled
  FROM holdfast.job_items i
  JOIN public.embedding_retry_queue q ON q.id = i.item_id
 WHERE i.job_id = %(job_id)s
"""


def recounted(tx: Tx, job_id: str) -> Counts:
    """Count the items of a job one by one."""
    found = tx.execute(RECOUNT, {"job_id": job_id}).fetchone()
    assert found is not None
    return Counts(**found)


# An open item must be its job's to work on: open, not cancelled unless a lease still stands, and
# one that waits for it. Otherwise nobody would ever claim it.
STRANDED = """
SELECT q.target_id, q.status, q.job_id, j.state, j.cancelled_at IS NOT NULL AS was_cancelled
  FROM public.embedding_retry_queue q
  LEFT JOIN holdfast.jobs j ON j.id = q.job_id
 WHERE q.status IN ('pending', 'processing') AND q.job_id IS NOT NULL
   AND (j.id IS NULL OR j.finished_at IS NOT NULL
        OR (j.cancelled_at IS NOT NULL AND q.status = 'pending')
        OR NOT EXISTS (SELECT FROM holdfast.job_items i
                        WHERE i.job_id = q.job_id AND i.item_id = q.id))
"""


def stranded(tx: Tx) -> list[dict[str, Any]]:
    """Return the open items that no bell would ever work on."""
    return tx.execute(STRANDED).fetchall()


def waiting(tx: Tx) -> int:
    """Return how many connections to this database wait for a lock."""
    found = tx.execute(
        "SELECT count(*) AS waiting FROM pg_stat_activity"
        " WHERE datname = current_database() AND wait_event_type = 'Lock'"
    ).fetchone()
    return int(found["waiting"]) if found else 0
