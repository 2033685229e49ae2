"""Jobs: one row for each accepted POST, its counts, its bells, and answers to repeated requests."""

from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from datetime import datetime
from typing import Any

from psycopg.types.json import Jsonb

from app.core.model import Counts, Job, JobState, Rings, job_state
from app.core.store.database import Tx

INSERT = """
INSERT INTO holdfast.jobs (id, kind, client, project, priority, return_vectors)
VALUES (%(id)s, %(kind)s, %(client)s, %(project)s, %(priority)s, %(return_vectors)s)
"""


@dataclass(frozen=True, slots=True)
class NewJob:
    """What a POST says of itself."""

    id: str
    client: str
    project: str = ""
    priority: int = 0
    return_vectors: bool = False
    kind: str = "embedding"


def insert(tx: Tx, job: NewJob) -> None:
    """Make the job; its items are counted when the transaction commits."""
    tx.execute(INSERT, asdict(job))


COUNT_NOW = "SET CONSTRAINTS holdfast.count_new_job IMMEDIATE"


def count_now(tx: Tx) -> None:
    """Count the new job's items now rather than at the commit."""
    tx.execute(COUNT_NOW)


# A final job shows what its end froze; an open one the sum that the triggers keep.
FIND = """
SELECT id, kind, client, state, project, priority, run, rings, return_vectors, created_at,
       started_at, finished_at, expires_at, cancelled_at, read_at, is_expired, final_counts,
       final_errors, pending, processing, done, skipped, failed, cancelled
  FROM holdfast.counted_jobs
 WHERE id = %(id)s AND (%(client)s::text IS NULL OR client = %(client)s)
"""


def find(tx: Tx, job_id: str, *, client: str | None = None) -> Job | None:
    """Return a job with its counts; with `client`, only if it is that client's."""
    row = tx.execute(FIND, {"id": job_id, "client": client}).fetchone()
    return _job(row) if row else None


LOCK = "SELECT id FROM holdfast.jobs WHERE id = %(id)s FOR UPDATE"


def lock(tx: Tx, job_id: str) -> None:
    """Lock the job's row until the transaction ends; always before locking its items."""
    tx.execute(LOCK, {"id": job_id})


# Newest first. Ids end a tie, so that a page never repeats or skips a job.
LIST = """
SELECT id, kind, client, state, project, priority, run, rings, return_vectors, created_at,
       started_at, finished_at, expires_at, cancelled_at, read_at, is_expired, final_counts,
       final_errors, pending, processing, done, skipped, failed, cancelled
  FROM holdfast.counted_jobs
 WHERE (%(client)s::text IS NULL OR client = %(client)s)
   AND (%(state)s::text IS NULL OR state = %(state)s)
   AND (%(kind)s::text IS NULL OR kind = %(kind)s)
   AND (%(before_at)s::timestamptz IS NULL
        OR (created_at, id) < (%(before_at)s, %(before_id)s))
 ORDER BY created_at DESC, id DESC
 LIMIT %(limit)s
"""


@dataclass(frozen=True, slots=True)
class JobFilter:
    """Which jobs a list shows."""

    client: str | None = None
    state: str | None = None
    kind: str | None = None
    before_at: datetime | None = None
    before_id: str | None = None


def page(tx: Tx, wanted: JobFilter, *, limit: int) -> list[Job]:
    """Return jobs, newest first."""
    return [_job(row) for row in tx.execute(LIST, {**asdict(wanted), "limit": limit})]


def _job(row: dict[str, Any]) -> Job:
    live = {name: row.pop(name) for name in Counts.__dataclass_fields__}
    counts = Counts(**(row.pop("final_counts") or live))
    errors: list[dict[str, Any]] = row.pop("final_errors") or []
    state = JobState(row.pop("state"))
    return Job(**row, state=state, counts=counts, errors=errors)


# Committed before the bell is rung, so that no RQ id is ever used twice.
TAKE_RINGS = """
UPDATE holdfast.jobs
   SET rings = rings + %(bells)s, rung_at = now()
 WHERE id = %(id)s AND finished_at IS NULL
RETURNING rings, run, project, priority
"""


def take_rings(tx: Tx, job_id: str, bells: int) -> Rings | None:
    """Reserve numbers for new bells; None where the job is final."""
    row = tx.execute(TAKE_RINGS, {"id": job_id, "bells": bells}).fetchone()
    if row is None:
        return None
    return Rings(job_id, row["rings"], bells, row["run"], row["project"], row["priority"])


# An open job is final when its counts say that nothing is open. A cancelled one ends when none of
# its own slices is under way; what goes on for another job is cancelled as far as it is concerned.
# Only one of several finishers finds finished_at still NULL.
OWN_IN_FLIGHT = """
SELECT EXISTS (SELECT FROM public.embedding_retry_queue
                WHERE status = 'processing' AND job_id = %(id)s) AS found
"""
GIVE_UP_SHARED = """
UPDATE holdfast.job_items i
   SET outcome = 'cancelled'
  FROM public.embedding_retry_queue q
 WHERE i.job_id = %(id)s AND q.id = i.item_id AND q.status IN ('pending', 'processing')
"""
FINISH = """
UPDATE holdfast.jobs
   SET state = %(state)s, finished_at = now(), started_at = coalesce(started_at, now()),
       expires_at = now() + make_interval(secs => %(ttl_seconds)s),
       final_counts = %(counts)s, final_errors = %(errors)s
 WHERE id = %(id)s AND finished_at IS NULL
"""


def finish(tx: Tx, job_id: str, *, ttl_seconds: int) -> Job | None:
    """Make a job final if nothing of it is open, and freeze its counts.

    Returns the job as it is now where this call was the one that finished it, else None.
    """
    lock(tx, job_id)
    job = find(tx, job_id)
    if job is None or job.state.is_final:
        return None
    counts = job.counts
    if job.cancelled_at and counts.open:
        row = tx.execute(OWN_IN_FLIGHT, {"id": job_id}).fetchone()
        if row and row["found"]:
            return None
        tx.execute(GIVE_UP_SHARED, {"id": job_id})
        counts = replace(counts, pending=0, processing=0, cancelled=counts.cancelled + counts.open)
    if counts.open:
        return None
    end = End(job_state(counts), counts, errors(tx, job_id) if counts.failed else [])
    return finish_as(tx, job_id, end, ttl_seconds=ttl_seconds)


@dataclass(frozen=True, slots=True)
class End:
    """How a job ends: what is frozen of it."""

    state: JobState
    counts: Counts
    errors: list[dict[str, Any]]


def finish_as(tx: Tx, job_id: str, end: End, *, ttl_seconds: int) -> Job | None:
    """Make an open job final as its caller decided, and return it. Its row is locked."""
    values = {
        "id": job_id,
        "state": end.state,
        "ttl_seconds": ttl_seconds,
        "counts": Jsonb(asdict(end.counts)),
        "errors": Jsonb(end.errors),
    }
    tx.execute(FINISH, values)
    return find(tx, job_id)


ERRORS = """
SELECT q.error_class, count(*) AS count, min(q.last_error) AS sample
  FROM public.embedding_retry_queue q
  JOIN holdfast.job_items i ON i.item_id = q.id AND i.job_id = %(job_id)s
 WHERE q.status = 'failed'
 GROUP BY q.error_class
 ORDER BY count(*) DESC, q.error_class
 LIMIT 20
"""


def errors(tx: Tx, job_id: str) -> list[dict[str, Any]]:
    """Sum up why items of a job failed, most frequent first."""
    return tx.execute(ERRORS, {"job_id": job_id}).fetchall()


CANCEL = """
UPDATE holdfast.jobs SET cancelled_at = now()
 WHERE id = %(id)s AND finished_at IS NULL AND cancelled_at IS NULL
"""


def cancel(tx: Tx, job_id: str) -> bool:
    """Ask an open job to stop; False where it is final or was asked before."""
    return tx.execute(CANCEL, {"id": job_id}).rowcount == 1


REOPEN = """
UPDATE holdfast.jobs
   SET state = 'queued', run = run + 1, finished_at = NULL, expires_at = NULL,
       final_counts = NULL, final_errors = NULL, cancelled_at = NULL
 WHERE id = %(id)s AND finished_at IS NOT NULL
"""
# What the items are counts again, so that lines and counts agree at the end of the next run too.
FORGET_OUTCOMES = """
UPDATE holdfast.job_items SET outcome = NULL, error_class = NULL
 WHERE job_id = %(id)s AND outcome IS NOT NULL
"""


def reopen(tx: Tx, job_id: str) -> None:
    """Begin another run of a final job."""
    if tx.execute(REOPEN, {"id": job_id}).rowcount:
        tx.execute(FORGET_OUTCOMES, {"id": job_id})


# Open jobs with an item that is due now, whose backend is not paused.
DUE = """
SELECT j.id, j.project,
       (SELECT coalesce(sum(c.pending), 0) FROM holdfast.job_counts c WHERE c.job_id = j.id)
           AS pending,
       (SELECT count(DISTINCT q.leased_by)
          FROM public.embedding_retry_queue q
         WHERE q.status = 'processing' AND q.lease_until > now() AND q.job_id = j.id) AS holders
  FROM holdfast.jobs j
 WHERE j.finished_at IS NULL AND j.cancelled_at IS NULL AND j.kind = 'embedding'
   AND (EXISTS (SELECT FROM public.embedding_retry_queue q
                 WHERE q.job_id = j.id AND q.status = 'pending' AND q.kills = 0
                   AND q.next_attempt_at <= now() AND q.model <> ALL(%(paused)s::text[])
                   AND q.target_table || ' ' || q.embedding_version
                       <> ALL(%(paused_targets)s::text[]))
     OR EXISTS (SELECT FROM public.embedding_retry_queue q
                 WHERE q.job_id = j.id AND q.status = 'pending' AND q.kills > 0
                   AND q.next_attempt_at <= now() AND q.model <> ALL(%(paused)s::text[])
                   AND q.target_table || ' ' || q.embedding_version
                       <> ALL(%(paused_targets)s::text[])))
 ORDER BY j.priority DESC, j.created_at
"""


@dataclass(frozen=True, slots=True)
class DueJob:
    """A job with work that could be done now, and how many bells are at it."""

    id: str
    project: str
    pending: int
    holders: int


def due(
    tx: Tx, *, paused_models: Sequence[str], paused_targets: Sequence[str] = ()
) -> list[DueJob]:
    """Return the open jobs with due work that neither a paused model nor a paused target holds."""
    values = {"paused": list(paused_models), "paused_targets": list(paused_targets)}
    return [DueJob(**row) for row in tx.execute(DUE, values)]


COMPLETE = """
SELECT j.id
  FROM holdfast.jobs j
  JOIN holdfast.job_counts c ON c.job_id = j.id
 WHERE j.finished_at IS NULL AND j.kind = 'embedding'
 GROUP BY j.id
HAVING sum(c.pending) + sum(c.processing) = 0 OR j.cancelled_at IS NOT NULL
"""


def complete(tx: Tx) -> list[str]:
    """Return open jobs whose items are all final, and those that were cancelled."""
    return [str(row["id"]) for row in tx.execute(COMPLETE)]


# The bytes of what is open are a share of all that the jobs brought: no item is looked at.
OPEN_WORK = """
SELECT coalesce(sum(c.open), 0)::bigint AS items,
       coalesce(sum(m.text_bytes * c.open / greatest(c.total, 1)), 0)::bigint AS text_bytes
  FROM holdfast.jobs j
 CROSS JOIN LATERAL (
       SELECT sum(pending + processing) AS open,
              sum(pending + processing + done + skipped + failed + cancelled) AS total
         FROM holdfast.job_counts WHERE job_id = j.id) AS c
  LEFT JOIN LATERAL (
       SELECT sum(text_bytes) AS text_bytes
         FROM holdfast.job_models WHERE job_id = j.id) AS m ON true
 WHERE j.finished_at IS NULL AND j.kind = 'embedding' AND j.client = %(client)s
"""


@dataclass(frozen=True, slots=True)
class OpenWork:
    """How much of a client is not final: items, and about how many bytes of text."""

    items: int
    text_bytes: int


def open_work(tx: Tx, client: str) -> OpenWork:
    """Return how much of a client's work is not final."""
    row = tx.execute(OPEN_WORK, {"client": client}).fetchone()
    return OpenWork(**row) if row else OpenWork(0, 0)


ITEMS_OF_MODEL = """
SELECT items FROM holdfast.job_models WHERE job_id = %(job_id)s AND model = %(model)s
"""


def items_of_model(tx: Tx, job_id: str, model: str) -> int:
    """Return how many items a job brought for a model."""
    row = tx.execute(ITEMS_OF_MODEL, {"job_id": job_id, "model": model}).fetchone()
    return int(row["items"]) if row else 0


LOW_TURN_SECONDS = 10.0
"""How long work with time waits while other work comes without end, until it has a turn."""

OWNERS = """
SELECT id, client, priority < 0 AS is_low,
       priority < 0 AND rung_at < now() - make_interval(secs => %(low_turn_seconds)s) AS is_overdue
  FROM holdfast.jobs
 WHERE id = ANY(%(ids)s::text[])
"""


@dataclass(frozen=True, slots=True)
class Owner:
    """Whose a job is, and whether it goes after everybody's."""

    client: str
    is_low: bool
    is_overdue: bool
    """It goes after everybody's, and has waited for so long that it is to have a turn now."""


def owners(tx: Tx, ids: Iterable[str]) -> dict[str, Owner]:
    """Return whose each of these jobs is; those that are none are left out."""
    rows = tx.execute(OWNERS, {"ids": list(ids), "low_turn_seconds": LOW_TURN_SECONDS})
    return {str(row.pop("id")): Owner(**row) for row in rows}


AHEAD = """
SELECT count(DISTINCT j.id) AS jobs, coalesce(sum(c.pending + c.processing), 0)::bigint AS items
  FROM holdfast.jobs j
  JOIN holdfast.job_counts c ON c.job_id = j.id
 WHERE j.finished_at IS NULL AND j.kind = 'embedding' AND j.id <> %(id)s
"""


@dataclass(frozen=True, slots=True)
class Ahead:
    """Other work that is under way."""

    jobs: int
    items: int


def ahead(tx: Tx, job_id: str) -> Ahead:
    """Return how much other embedding work is open."""
    row = tx.execute(AHEAD, {"id": job_id}).fetchone()
    return Ahead(int(row["jobs"]), int(row["items"])) if row else Ahead(0, 0)


# ---- answers to repeated requests ------------------------------------------------------------

# Taken while the request is being stored and given back with the connection, so a crash leaves
# no half-made key. Collisions of the hash cost a 409, nothing else.
TRY_LOCK_KEY = (
    "SELECT pg_try_advisory_lock(hashtextextended(%(client)s || chr(31) || %(key)s, 7)) AS won"
)
UNLOCK_KEY = "SELECT pg_advisory_unlock(hashtextextended(%(client)s || chr(31) || %(key)s, 7))"
FIND_ANSWER = """
SELECT fingerprint, answer FROM holdfast.idempotency_keys
 WHERE client = %(client)s AND key = %(key)s
   AND created_at > now() - make_interval(days => %(days)s)
"""
KEEP_ANSWER = """
INSERT INTO holdfast.idempotency_keys (client, key, fingerprint, job_id, answer)
VALUES (%(client)s, %(key)s, %(fingerprint)s, %(job_id)s, %(answer)s)
    ON CONFLICT (client, key) DO UPDATE
   SET fingerprint = excluded.fingerprint, job_id = excluded.job_id, answer = excluded.answer,
       created_at = now()
"""
IDEMPOTENCY_DAYS = 7


@dataclass(frozen=True, slots=True)
class IdempotencyKey:
    """What makes two requests the same: the client's key, and a hash over path, query and body."""

    client: str
    key: str
    fingerprint: bytes


def try_lock_key(tx: Tx, client: str, key: str) -> bool:
    """Hold the key on this connection; False where another request holds it."""
    row = tx.execute(TRY_LOCK_KEY, {"client": client, "key": key}).fetchone()
    return bool(row and row["won"])


def unlock_key(tx: Tx, client: str, key: str) -> None:
    """Give the key back."""
    tx.execute(UNLOCK_KEY, {"client": client, "key": key})


@dataclass(frozen=True, slots=True)
class Answer:
    """The answer that was given to a request, and that request's fingerprint."""

    fingerprint: bytes
    answer: str


def find_answer(tx: Tx, client: str, key: str) -> Answer | None:
    """Return the answer kept under a key, if any."""
    values = {"client": client, "key": key, "days": IDEMPOTENCY_DAYS}
    row = tx.execute(FIND_ANSWER, values).fetchone()
    return Answer(**row) if row else None


def keep_answer(tx: Tx, key: IdempotencyKey, *, job_id: str, answer: str) -> None:
    """Keep an answer in the transaction that makes it true."""
    tx.execute(KEEP_ANSWER, {**asdict(key), "job_id": job_id, "answer": answer})


# ---- cleanup -----------------------------------------------------------------------------------

PRUNE = """
WITH old AS (
    SELECT j.id
      FROM holdfast.jobs j
     WHERE j.finished_at < now() - make_interval(days => %(days)s) AND j.expires_at < now()
     ORDER BY j.finished_at
     LIMIT %(limit)s
       FOR UPDATE SKIP LOCKED
), links AS (
    DELETE FROM holdfast.job_items i USING old WHERE i.job_id = old.id
), counts AS (
    DELETE FROM holdfast.job_counts c USING old WHERE c.job_id = old.id
), gone AS (
    DELETE FROM holdfast.jobs j USING old WHERE j.id = old.id RETURNING j.id
)
SELECT count(*) AS jobs FROM gone
"""
PRUNE_KEYS = """
DELETE FROM holdfast.idempotency_keys
 WHERE (client, key) IN (SELECT client, key FROM holdfast.idempotency_keys
                          WHERE created_at < now() - make_interval(days => %(days)s)
                          LIMIT %(limit)s)
"""


def prune(tx: Tx, *, days: int, limit: int) -> int:
    """Delete a block of old finished jobs; return how many."""
    row = tx.execute(PRUNE, {"days": days, "limit": limit}).fetchone()
    return int(row["jobs"]) if row else 0


def prune_keys(tx: Tx, *, limit: int) -> int:
    """Delete a block of idempotency keys that no longer hold; return how many."""
    return tx.execute(PRUNE_KEYS, {"days": IDEMPOTENCY_DAYS, "limit": limit}).rowcount


COUNT_OLD = """
SELECT count(*) AS jobs
  FROM holdfast.jobs
 WHERE finished_at < now() - make_interval(days => %(days)s) AND expires_at < now()
"""
COUNT_OLD_KEYS = """
SELECT count(*) AS keys
  FROM holdfast.idempotency_keys
 WHERE created_at < now() - make_interval(days => %(days)s)
"""


def old(tx: Tx, *, days: int) -> int:
    """Count what `prune` would delete in all its blocks."""
    row = tx.execute(COUNT_OLD, {"days": days}).fetchone()
    return int(row["jobs"]) if row else 0


def old_keys(tx: Tx) -> int:
    """Count idempotency keys that no longer hold."""
    row = tx.execute(COUNT_OLD_KEYS, {"days": IDEMPOTENCY_DAYS}).fetchone()
    return int(row["keys"]) if row else 0
