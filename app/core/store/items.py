"""The queue: `embedding_retry_queue`, the items of each job, and their failed attempts.

Locks are taken in one order everywhere: a job's row before its items, items by key. A worker that
holds items waits for no other row.
"""

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from datetime import datetime
from typing import Any

from psycopg.rows import args_row
from psycopg.types.json import Json

from app.core.errors import ErrorClass
from app.core.model import (
    Claim,
    Done,
    Failed,
    ItemStatus,
    NewItem,
    Release,
    Retry,
    Settlement,
    Skipped,
    Target,
)
from app.core.store.database import Tx, take_time

# PRESERVE ROWS, emptied before each use: a stream fills it over many short transactions.
CREATE_INCOMING = """
CREATE TEMPORARY TABLE IF NOT EXISTS incoming (
    position integer, target_table text, target_id text, embedding_version text, model text,
    text_content text, content_hash bytea, custom_id text, metadata json
)
"""
EMPTY_INCOMING = "TRUNCATE pg_temp.incoming"
COPY_INCOMING = """
COPY pg_temp.incoming (position, target_table, target_id, embedding_version, model, text_content,
                       content_hash, custom_id, metadata) FROM STDIN
"""


def begin_batch(tx: Tx) -> None:
    """Make ready the temporary table that a batch is collected in."""
    tx.execute(CREATE_INCOMING)
    tx.execute(EMPTY_INCOMING)


def copy_in(tx: Tx, items: Iterable[NewItem]) -> None:
    """Add items to the batch."""
    with tx.cursor() as cursor, cursor.copy(COPY_INCOMING) as copy:
        for item in items:
            copy.write_row(
                (
                    item.position,
                    item.target_table,
                    item.target_id,
                    item.embedding_version,
                    item.model,
                    item.text,
                    item.content_hash,
                    item.custom_id,
                    None if item.metadata is None else Json(item.metadata),
                )
            )


REPEATED_CUSTOM_IDS = """
SELECT position
  FROM (SELECT position, row_number() OVER (PARTITION BY custom_id ORDER BY position) AS nth
          FROM pg_temp.incoming WHERE custom_id IS NOT NULL) AS numbered
 WHERE nth > 1
 ORDER BY position
 LIMIT %(limit)s
"""


def repeated_custom_ids(tx: Tx, *, limit: int) -> list[int]:
    """Return the positions whose custom_id stands earlier in the same batch."""
    return [int(row["position"]) for row in tx.execute(REPEATED_CUSTOM_IDS, {"limit": limit})]


DROP_INCOMING = "DELETE FROM pg_temp.incoming WHERE position = ANY(%(positions)s::integer[])"


def drop_incoming(tx: Tx, positions: Sequence[int]) -> None:
    """Take items out of the batch again."""
    tx.execute(DROP_INCOMING, {"positions": list(positions)})


# Of two texts for one key the last one counts. Sorted by key, as every statement that locks
# several items is. A row that is here with the same text is only locked: that holds its status
# still until this transaction has linked and counted it.
ENQUEUE = """
INSERT INTO public.embedding_retry_queue AS q
       (target_table, target_id, embedding_version, model, text_content, content_hash,
        project, priority, job_id)
SELECT target_table, target_id, embedding_version, model, text_content, content_hash,
       %(project)s, %(priority)s, %(job_id)s
  FROM (SELECT DISTINCT ON (target_table, target_id, embedding_version) *
          FROM pg_temp.incoming
         ORDER BY target_table, target_id, embedding_version, position DESC) AS last
 ORDER BY target_table, target_id, embedding_version
    ON CONFLICT ON CONSTRAINT embedding_retry_queue_key DO UPDATE
   SET text_content = excluded.text_content, content_hash = excluded.content_hash,
       model = excluded.model, project = excluded.project, priority = excluded.priority,
       job_id = excluded.job_id, status = 'pending', max_attempts = NULL, kills = 0,
       next_attempt_at = now(), lease_token = NULL, lease_until = NULL, leased_by = NULL,
       error_class = NULL, skip_reason = NULL, processed_at = NULL, updated_at = now()
 WHERE q.content_hash <> excluded.content_hash OR q.status = 'cancelled'
    OR q.skip_reason IS NOT NULL
"""

LINK = """
INSERT INTO holdfast.job_items (job_id, position, item_id, content_hash, custom_id, metadata)
SELECT %(job_id)s, i.position, q.id, i.content_hash, i.custom_id, i.metadata
  FROM pg_temp.incoming i
  JOIN public.embedding_retry_queue q USING (target_table, target_id, embedding_version)
"""


def enqueue(tx: Tx, *, job_id: str, project: str, priority: int) -> int:
    """Merge the batch into the queue and link it to its job; return how many were not duplicates.

    An item that waits already, or is done or failed with the same text, is a duplicate. A changed
    text, a cancelled or a skipped item is queued again with a fresh allowance of attempts; a claim
    on an old text loses its lease by it.
    """
    values = {"job_id": job_id, "project": project, "priority": priority}
    accepted = tx.execute(ENQUEUE, values).rowcount
    tx.execute(LINK, values)
    return accepted


# The attempt is spent here and not when it fails, so that a text that kills its worker cannot
# loop. NULL max_attempts: a fresh allowance begins with this claim.
CLAIM = """
WITH due AS (
    SELECT id
      FROM public.embedding_retry_queue
     WHERE job_id = %(job_id)s AND status = 'pending' AND kills = 0 AND next_attempt_at <= now()
       AND model <> ALL(%(paused)s::text[])
       AND target_table || ' ' || embedding_version <> ALL(%(paused_targets)s::text[])
     ORDER BY next_attempt_at, id
     LIMIT %(limit)s
       FOR UPDATE SKIP LOCKED
), lease AS (
    SELECT nextval('holdfast.lease_tokens') AS token
)
UPDATE public.embedding_retry_queue AS q
   SET status = 'processing', attempts = q.attempts + 1, deliveries = q.deliveries + 1,
       max_attempts = coalesce(q.max_attempts, q.attempts + %(allowance)s),
       lease_token = lease.token, leased_by = %(leased_by)s,
       lease_until = now() + make_interval(secs => %(lease_seconds)s), updated_at = now()
  FROM due, lease
 WHERE q.id = due.id
RETURNING q.id, q.lease_token, q.target_table, q.target_id, q.embedding_version, q.text_content,
          q.attempts, q.max_attempts, q.kills
"""

# The same for one item that was in hand at a crash, of its worker or of the backend: it takes no
# neighbour with it.
CLAIM_ALONE = """
WITH due AS (
    SELECT id
      FROM public.embedding_retry_queue
     WHERE job_id = %(job_id)s AND status = 'pending' AND kills > 0 AND next_attempt_at <= now()
       AND model <> ALL(%(paused)s::text[])
       AND target_table || ' ' || embedding_version <> ALL(%(paused_targets)s::text[])
     ORDER BY next_attempt_at, id
     LIMIT 1
       FOR UPDATE SKIP LOCKED
), lease AS (
    SELECT nextval('holdfast.lease_tokens') AS token
)
UPDATE public.embedding_retry_queue AS q
   SET status = 'processing', attempts = q.attempts + 1, deliveries = q.deliveries + 1,
       max_attempts = coalesce(q.max_attempts, q.attempts + %(allowance)s),
       lease_token = lease.token, leased_by = %(leased_by)s,
       lease_until = now() + make_interval(secs => %(lease_seconds)s), updated_at = now()
  FROM due, lease
 WHERE q.id = due.id
RETURNING q.id, q.lease_token, q.target_table, q.target_id, q.embedding_version, q.text_content,
          q.attempts, q.max_attempts, q.kills
"""


@dataclass(frozen=True, slots=True)
class ClaimTerms:
    """For whom, how long, and under which policy items are claimed."""

    job_id: str
    leased_by: str
    lease_seconds: float
    allowance: int


def claim(
    tx: Tx,
    terms: ClaimTerms,
    *,
    limit: int,
    paused_models: Sequence[str],
    paused_targets: Sequence[str] = (),
) -> list[Claim]:
    """Take a lease on due items of a job: up to `limit`, or one that must be alone.

    Items of paused models are left, and those of paused targets (model.Target.label).
    """
    values = {**asdict(terms), "limit": limit, "paused": list(paused_models)}
    values["paused_targets"] = list(paused_targets)
    with tx.cursor(row_factory=args_row(Claim)) as cursor:
        return (
            cursor.execute(CLAIM, values).fetchall()
            or cursor.execute(CLAIM_ALONE, values).fetchall()
        )


# SKIP LOCKED here and in HOLD: who else has such a row is a batch that brings it again, and waits
# for the others of this slice next. Nobody who holds items waits for one.
EXTEND = """
WITH held AS (
    SELECT id
      FROM public.embedding_retry_queue
     WHERE id = ANY(%(ids)s::bigint[]) AND lease_token = %(token)s AND status = 'processing'
       FOR UPDATE SKIP LOCKED
)
UPDATE public.embedding_retry_queue AS q
   SET lease_until = now() + make_interval(secs => %(lease_seconds)s)
  FROM held
 WHERE q.id = held.id
RETURNING q.id
"""


def extend(tx: Tx, ids: Sequence[int], token: int, *, lease_seconds: float) -> int:
    """Prolong the leases that are still held and not locked; return how many were."""
    values = {"ids": list(ids), "token": token, "lease_seconds": lease_seconds}
    return tx.execute(EXTEND, values).rowcount


HOLD = """
SELECT id
  FROM public.embedding_retry_queue
 WHERE id = ANY(%(ids)s::bigint[]) AND lease_token = %(token)s AND status = 'processing'
   FOR UPDATE SKIP LOCKED
"""
STILL_OURS = """
SELECT id
  FROM public.embedding_retry_queue
 WHERE id = ANY(%(ids)s::bigint[]) AND lease_token = %(token)s AND status = 'processing'
"""


@dataclass(frozen=True, slots=True)
class Held:
    """Claimed items whose lease still stands: those locked by us now, and by somebody else."""

    ours: frozenset[int]
    busy: frozenset[int]


def hold(tx: Tx, claims: Sequence[Claim]) -> Held:
    """Lock the claimed items whose lease still stands.

    Until this transaction ends nobody can take them, so what is written for them now is fenced.
    """
    if not claims:
        return Held(frozenset(), frozenset())
    values = {"ids": [claim.item_id for claim in claims], "token": claims[0].lease_token}
    ours = frozenset(int(row["id"]) for row in tx.execute(HOLD, values))
    if len(ours) == len(claims):
        return Held(ours, frozenset())
    leased = frozenset(int(row["id"]) for row in tx.execute(STILL_OURS, values))
    return Held(ours, leased - ours)


# The token is the fence. What would go back to 'pending' for a job that was cancelled meanwhile
# goes on as another's that waits for it, or is cancelled.
SETTLE = """
UPDATE public.embedding_retry_queue AS q
   SET status = CASE WHEN o.status = 'pending' AND holdfast.owner_of(q.id, q.job_id) IS NULL
                     THEN 'cancelled' ELSE o.status END,
       job_id = CASE WHEN o.status = 'pending'
                     THEN coalesce(holdfast.owner_of(q.id, q.job_id), q.job_id)
                     ELSE q.job_id END,
       attempts = q.attempts - o.refund,
       kills = CASE WHEN o.status = 'done' THEN 0 ELSE q.kills + o.suspect END,
       next_attempt_at = now() + make_interval(secs => o.after_seconds),
       error_class = o.error_class, last_error = coalesce(o.message, q.last_error),
       skip_reason = o.skip_reason,
       processed_at = CASE WHEN o.status = 'done' THEN now() END,
       lease_token = NULL, lease_until = NULL, leased_by = NULL, updated_at = now()
  FROM unnest(%(ids)s::bigint[], %(tokens)s::bigint[], %(statuses)s::text[],
              %(refunds)s::integer[], %(afters)s::float8[], %(classes)s::text[],
              %(messages)s::text[], %(reasons)s::text[], %(suspects)s::integer[])
       AS o(id, token, status, refund, after_seconds, error_class, message, skip_reason, suspect)
 WHERE q.id = o.id AND q.lease_token = o.token AND q.status = 'processing'
RETURNING q.id
"""

NOTE_ATTEMPTS = """
INSERT INTO holdfast.item_attempts (item_id, attempt, error_class, message, leased_by)
SELECT o.id, o.attempt, o.error_class, o.message, %(leased_by)s
  FROM unnest(%(ids)s::bigint[], %(attempts)s::integer[], %(classes)s::text[],
              %(messages)s::text[]) AS o(id, attempt, error_class, message)
"""


def settle(tx: Tx, settlements: Sequence[Settlement], *, leased_by: str) -> int:
    """Write the outcomes of claimed items, and what went wrong; return how many were still ours."""
    rows = [_row(settlement) for settlement in settlements]
    values = {
        "ids": [row.item_id for row in rows],
        "tokens": [row.token for row in rows],
        "statuses": [row.status for row in rows],
        "refunds": [row.refund for row in rows],
        "afters": [row.after_seconds for row in rows],
        "classes": [row.error_class for row in rows],
        "messages": [row.message for row in rows],
        "reasons": [row.skip_reason for row in rows],
        "suspects": [int(row.is_suspect) for row in rows],
    }
    settled = {int(row["id"]) for row in tx.execute(SETTLE, values)}
    charged = [row for row in rows if row.error_class and not row.refund and row.item_id in settled]
    if charged:
        noted = {
            "ids": [row.item_id for row in charged],
            "attempts": [row.attempt for row in charged],
            "classes": [row.error_class for row in charged],
            "messages": [row.message for row in charged],
            "leased_by": leased_by,
        }
        tx.execute(NOTE_ATTEMPTS, noted)
    return len(settled)


@dataclass(frozen=True, slots=True)
class _Row:
    item_id: int
    token: int
    attempt: int
    status: ItemStatus
    refund: int = 0
    after_seconds: float = 0.0
    error_class: str | None = None
    message: str | None = None
    skip_reason: str | None = None
    is_suspect: bool = False


def _row(settlement: Settlement) -> _Row:
    claim = settlement.claim
    ids = (claim.item_id, claim.lease_token, claim.attempts)
    match settlement.outcome:
        case Done():
            return _Row(*ids, ItemStatus.DONE)
        case Skipped(reason):
            return _Row(*ids, ItemStatus.DONE, skip_reason=reason)
        case Failed(error):
            return _Row(
                *ids, ItemStatus.FAILED, error_class=error.error_class, message=error.message
            )
        case Retry(error, seconds):
            return _Row(*ids, ItemStatus.PENDING, 0, seconds, error.error_class, error.message)
        case Release(error, seconds, is_suspect):
            told = (error.error_class, error.message)
            return _Row(*ids, ItemStatus.PENDING, 1, seconds, *told, is_suspect=is_suspect)


# Locked by one statement and changed by the next, which so sees what was committed meanwhile.
LOCK_DEAD = """
SELECT id, leased_by
  FROM public.embedding_retry_queue
 WHERE status = 'processing'
   AND CASE WHEN %(leased_by)s::text IS NULL THEN lease_until < now()
            ELSE leased_by = %(leased_by)s END
 ORDER BY lease_until
 LIMIT %(limit)s
   FOR UPDATE SKIP LOCKED
"""

# A crash is never refunded. At the limit there is no further claim: a person decides.
RECOVER = """
WITH recovered AS (
    UPDATE public.embedding_retry_queue AS q
       SET status = CASE WHEN q.attempts >= q.max_attempts THEN 'failed'
                         WHEN holdfast.owner_of(q.id, q.job_id) IS NULL THEN 'cancelled'
                         ELSE 'pending' END,
           job_id = coalesce(holdfast.owner_of(q.id, q.job_id), q.job_id),
           kills = q.kills + 1, next_attempt_at = now(), updated_at = now(),
           error_class = %(error_class)s, last_error = %(message)s,
           lease_token = NULL, lease_until = NULL, leased_by = NULL
      FROM unnest(%(ids)s::bigint[], %(holders)s::text[]) AS dead(id, leased_by)
     WHERE q.id = dead.id
    RETURNING q.id, q.attempts, dead.leased_by
)
INSERT INTO holdfast.item_attempts (item_id, attempt, error_class, message, leased_by)
SELECT id, attempts, %(error_class)s, %(message)s, leased_by FROM recovered
"""
RECOVER_BLOCK = 1000


def recover_expired(tx: Tx) -> Counter[str]:
    """End the leases that ran out; return how many items each dead holder had."""
    return _recover(
        tx,
        leased_by=None,
        error_class=ErrorClass.LEASE_EXPIRED,
        message="the lease ran out: its worker died, hung, or lost Postgres",
    )


# By their places in the job: where a text brought the death, it is one of these.
IN_HAND = """
SELECT count(DISTINCT q.id) AS items, min(i.position) AS first, max(i.position) AS last
  FROM public.embedding_retry_queue q
  LEFT JOIN holdfast.job_items i ON i.item_id = q.id AND i.job_id = q.job_id
 WHERE q.id = ANY(%(ids)s::bigint[])
"""


def recover_dead(tx: Tx, *, leased_by: str, error_class: ErrorClass, message: str) -> int:
    """End the leases of a bell whose horse is known to be dead, naming the death and its items."""
    return _recover(tx, leased_by=leased_by, error_class=error_class, message=message).total()


def _in_hand(tx: Tx, ids: Sequence[int]) -> str:
    row = tx.execute(IN_HAND, {"ids": list(ids)}).fetchone()
    if row is None or row["first"] is None:
        return ""
    if row["items"] == 1:
        return f"; in hand: 1 item, index {row['first']}"
    return f"; in hand: {row['items']} items, index {row['first']} to {row['last']}"


def _recover(
    tx: Tx, *, leased_by: str | None, error_class: ErrorClass, message: str
) -> Counter[str]:
    with tx.transaction():
        limits = {"leased_by": leased_by, "limit": RECOVER_BLOCK}
        dead = tx.execute(LOCK_DEAD, limits).fetchall()
        ids = [row["id"] for row in dead]
        values = {
            "ids": ids,
            "holders": [row["leased_by"] for row in dead],
            "error_class": error_class,
            "message": message if leased_by is None else message + _in_hand(tx, ids),
        }
        tx.execute(RECOVER, values)
    return Counter(str(row["leased_by"]) for row in dead)


# A new allowance, never a reset: the history of attempts stays true.
REVIVE = """
WITH again AS (
    SELECT q.id
      FROM public.embedding_retry_queue q
     WHERE q.status = 'failed'
       AND q.id IN (SELECT i.item_id
                      FROM holdfast.job_items i
                      JOIN holdfast.jobs j ON j.id = i.job_id
                     WHERE i.job_id = %(job_id)s AND j.cancelled_at IS NULL)
     ORDER BY q.target_table, q.target_id, q.embedding_version
       FOR UPDATE
)
UPDATE public.embedding_retry_queue AS q
   SET status = 'pending', job_id = %(job_id)s, max_attempts = NULL, kills = 0,
       next_attempt_at = now(), error_class = NULL, updated_at = now()
  FROM again
 WHERE q.id = again.id
"""


def revive(tx: Tx, job_id: str) -> int:
    """Give the failed items of a job another allowance of attempts; return how many.

    None where the job is being cancelled: nobody would work on them.
    """
    with tx.transaction():
        take_time(tx)
        return tx.execute(REVIVE, {"job_id": job_id}).rowcount


# Locked by one statement and changed by the next, as in RECOVER; those of other jobs too, as their
# cancel may be handing them over just now.
LOCK_OPEN = """
SELECT count(*)
  FROM (SELECT FROM public.embedding_retry_queue
         WHERE status IN ('pending', 'processing')
           AND id IN (SELECT item_id FROM holdfast.job_items WHERE job_id = %(job_id)s)
         ORDER BY target_table, target_id, embedding_version
           FOR UPDATE) AS locked
"""
# An item that another open job waits for goes on, as that job's (holdfast.owner_of does the same
# for one item).
CANCEL = """
WITH stopped AS MATERIALIZED (
    SELECT q.id, q.status,
           (SELECT min(j.id)
              FROM holdfast.job_items i
              JOIN holdfast.jobs j ON j.id = i.job_id
             WHERE i.item_id = q.id AND j.finished_at IS NULL AND j.cancelled_at IS NULL) AS heir
      FROM public.embedding_retry_queue q
     WHERE q.job_id = %(job_id)s AND q.status IN ('pending', 'processing')
       AND q.id IN (SELECT item_id FROM holdfast.job_items WHERE job_id = %(job_id)s)
)
UPDATE public.embedding_retry_queue AS q
   SET status = CASE WHEN s.status = 'pending' AND s.heir IS NULL THEN 'cancelled'
                     ELSE s.status END,
       job_id = coalesce(s.heir, q.job_id),
       updated_at = now()
  FROM stopped s
 WHERE q.id = s.id AND (s.heir IS NOT NULL OR s.status = 'pending')
RETURNING q.status, q.job_id
"""


def cancel(tx: Tx, job_id: str) -> tuple[int, set[str]]:
    """Stop what has not begun of a job that was asked to be cancelled.

    Returns how many items were cancelled, and the jobs that took over some.
    """
    with tx.transaction():
        take_time(tx)
        tx.execute(LOCK_OPEN, {"job_id": job_id})
        rows = tx.execute(CANCEL, {"job_id": job_id}).fetchall()
    cancelled = sum(row["status"] == ItemStatus.CANCELLED for row in rows)
    return cancelled, {row["job_id"] for row in rows} - {job_id}


WITHDRAW = """
SELECT deleted, cancelled
  FROM holdfast.withdraw(%(table)s, %(ids)s::text[], %(keeps_rows)s)
"""


@dataclass(frozen=True, slots=True)
class Withdrawn:
    """How many ids were in the ledger, and how many items were open."""

    deleted: int
    cancelled: int


def withdraw(
    tx: Tx, target_table: str, target_ids: Sequence[str], *, keeps_rows: bool
) -> Withdrawn:
    """Stop what is open for these rows, and let their vectors go from every follower.

    What the primary holds is the caller's to clear in the same transaction. `keeps_rows`: the rows
    may stay without a vector, and that is no fault.
    """
    values = {"table": target_table, "ids": list(target_ids), "keeps_rows": keeps_rows}
    row = tx.execute(WITHDRAW, values).fetchone()
    return Withdrawn(**row) if row else Withdrawn(0, 0)


TEXTS = """
SELECT target_id, text_content
  FROM public.embedding_retry_queue
 WHERE target_table = %(target)s AND embedding_version = %(version)s
   AND target_id = ANY(%(ids)s::text[])
"""


def texts(tx: Tx, target: Target, target_ids: Sequence[str]) -> dict[str, str]:
    """Return the last text that came for each row, as far as the queue still has it."""
    values = {
        "target": target.target_table,
        "version": target.embedding_version,
        "ids": list(target_ids),
    }
    return {str(row["target_id"]): str(row["text_content"]) for row in tx.execute(TEXTS, values)}


# Its text is no duplicate any more when it comes again.
NOTE_LOST = """
WITH lost AS (
    SELECT id
      FROM public.embedding_retry_queue
     WHERE target_table = %(target)s AND embedding_version = %(version)s
       AND target_id = ANY(%(ids)s::text[]) AND status = 'done' AND skip_reason IS NULL
     ORDER BY target_table, target_id, embedding_version
       FOR UPDATE
)
UPDATE public.embedding_retry_queue q
   SET skip_reason = 'vector_lost', updated_at = now()
  FROM lost
 WHERE q.id = lost.id
"""


def note_lost(tx: Tx, target: Target, target_ids: Sequence[str]) -> int:
    """Say of done items that what they stored is not there any more; return how many."""
    values = {
        "target": target.target_table,
        "version": target.embedding_version,
        "ids": list(target_ids),
    }
    return tx.execute(NOTE_LOST, values).rowcount


OTHER_JOBS = """
SELECT DISTINCT job_id
  FROM holdfast.job_items
 WHERE item_id = ANY(%(ids)s::bigint[]) AND job_id <> %(job_id)s
"""


def other_jobs(tx: Tx, ids: Sequence[int], *, job_id: str) -> set[str]:
    """Return the other jobs that these items belong to."""
    rows = tx.execute(OTHER_JOBS, {"ids": list(ids), "job_id": job_id})
    return {str(row["job_id"]) for row in rows}


# Rows that came without a job: ADR-009's, and those of code that still inserts as ADR-009 did.
# The newest row of a key is taken up, older open ones are cancelled: their text was replaced.
UNOWNED = """
SELECT EXISTS (
    SELECT FROM public.embedding_retry_queue q
      JOIN holdfast.embedding_targets t ON t.target_table = q.target_table AND t.is_current
     WHERE q.job_id IS NULL AND q.embedding_version IS NULL AND q.status = 'pending'
       AND holdfast.is_id(q.target_id, t.id_type)) AS found
"""
# What came after this is left to the next sweep by all that follows.
LOCK_UNOWNED = """
SELECT q.id
  FROM public.embedding_retry_queue q
  JOIN holdfast.embedding_targets t ON t.target_table = q.target_table AND t.is_current
 WHERE q.job_id IS NULL AND q.embedding_version IS NULL AND q.status <> 'cancelled'
   AND holdfast.is_id(q.target_id, t.id_type)
   FOR UPDATE OF q
"""
ADOPT = """
WITH newest AS (
    SELECT DISTINCT ON (q.target_table, q.target_id) q.id, t.embedding_version, t.model
      FROM public.embedding_retry_queue q
      JOIN holdfast.embedding_targets t ON t.target_table = q.target_table AND t.is_current
     WHERE q.id = ANY(%(unowned)s::bigint[])
       AND NOT EXISTS (SELECT FROM public.embedding_retry_queue k
                        WHERE k.target_table = q.target_table AND k.target_id = q.target_id
                          AND k.embedding_version = t.embedding_version)
     ORDER BY q.target_table, q.target_id, q.created_at DESC, q.id DESC
)
UPDATE public.embedding_retry_queue AS q
   SET embedding_version = n.embedding_version, model = n.model, job_id = %(job_id)s
  FROM newest n
 WHERE q.id = n.id
RETURNING q.id
"""
LINK_ADOPTED = """
INSERT INTO holdfast.job_items (job_id, position, item_id, content_hash)
SELECT %(job_id)s, row_number() OVER (ORDER BY q.id) - 1, q.id, q.content_hash
  FROM public.embedding_retry_queue q
 WHERE q.id = ANY(%(ids)s::bigint[])
"""
# A row for a key that is in the queue already brings a newer text, or asks again for what was
# cancelled or skipped, as a POST may; otherwise it is a duplicate.
REPLACE_TEXT = """
WITH newest AS (
    SELECT DISTINCT ON (k.target_table, k.target_id, k.embedding_version)
           k.id, q.text_content, q.content_hash
      FROM public.embedding_retry_queue q
      JOIN holdfast.embedding_targets t ON t.target_table = q.target_table AND t.is_current
      JOIN public.embedding_retry_queue k
        ON k.target_table = q.target_table AND k.target_id = q.target_id
       AND k.embedding_version = t.embedding_version
     WHERE q.id = ANY(%(unowned)s::bigint[]) AND q.job_id IS NULL AND q.status = 'pending'
       AND q.created_at >= k.created_at AND k.id <> ALL(%(ids)s::bigint[])
     ORDER BY k.target_table, k.target_id, k.embedding_version, q.created_at DESC, q.id DESC
)
UPDATE public.embedding_retry_queue AS k
   SET text_content = n.text_content, content_hash = n.content_hash, job_id = %(job_id)s,
       project = '', priority = 0, status = 'pending', max_attempts = NULL, kills = 0,
       next_attempt_at = now(), lease_token = NULL, lease_until = NULL, leased_by = NULL,
       error_class = NULL, skip_reason = NULL, processed_at = NULL, updated_at = now()
  FROM newest n
 WHERE k.id = n.id
   AND (k.content_hash <> n.content_hash OR k.status = 'cancelled' OR k.skip_reason IS NOT NULL)
RETURNING k.id
"""
CANCEL_REPLACED = """
UPDATE public.embedding_retry_queue AS q
   SET status = 'cancelled', updated_at = now(),
       last_error = 'replaced by a newer row for the same target'
 WHERE q.id = ANY(%(unowned)s::bigint[]) AND q.job_id IS NULL AND q.status = 'pending'
"""


def has_unowned(tx: Tx) -> bool:
    """Whether rows without a job wait whose target is registered."""
    row = tx.execute(UNOWNED).fetchone()
    return bool(row and row["found"])


def adopt(tx: Tx, job_id: str) -> int:
    """Make every row without a job, whose target is registered, an item of this job.

    Returns how many; none where each was a duplicate of what is in the queue.
    """
    take_time(tx)
    values: dict[str, Any] = {"job_id": job_id}
    values["unowned"] = [row["id"] for row in tx.execute(LOCK_UNOWNED)]
    values["ids"] = [row["id"] for row in tx.execute(ADOPT, values)]
    replaced = [row["id"] for row in tx.execute(REPLACE_TEXT, values)]
    tx.execute(CANCEL_REPLACED, values)
    values["ids"] += replaced
    return tx.execute(LINK_ADOPTED, values).rowcount


# Keyset by position. What a final job has frozen goes before what the item is now, so that its
# items and its counts agree; `skipped` is apart from `done`.
PAGE = """
SELECT i.position, i.custom_id, i.metadata, i.outcome, i.error_class AS frozen_class,
       i.content_hash = q.content_hash AS is_current,
       q.id AS item_id, q.target_table, q.target_id, q.embedding_version, q.model, q.attempts,
       q.skip_reason, q.error_class,
       coalesce(i.outcome,
                CASE WHEN q.skip_reason IS NULL THEN q.status ELSE 'skipped' END) AS status
  FROM holdfast.job_items i
  JOIN public.embedding_retry_queue q ON q.id = i.item_id
 WHERE i.job_id = %(job_id)s AND i.position > %(after)s
   AND (%(status)s::text IS NULL
        OR coalesce(i.outcome, CASE WHEN q.skip_reason IS NULL THEN q.status ELSE 'skipped' END)
           = %(status)s)
 ORDER BY i.position
 LIMIT %(limit)s
"""


def page(
    tx: Tx, job_id: str, *, after: int, limit: int, status: str | None = None
) -> list[dict[str, Any]]:
    """Return items of a job behind a position, in input order, each as it stands now."""
    values = {"job_id": job_id, "after": after, "limit": limit, "status": status}
    return tx.execute(PAGE, values).fetchall()


LAST_UNTARGETED = """
SELECT i.position
  FROM holdfast.job_items i
  JOIN public.embedding_retry_queue q ON q.id = i.item_id
 WHERE i.job_id = %(job_id)s AND q.target_table = ''
 ORDER BY i.position DESC
 LIMIT 1
"""
UNTARGETED_DONE = """
SELECT i.position, q.id
  FROM holdfast.job_items i
  JOIN public.embedding_retry_queue q ON q.id = i.item_id
 WHERE i.job_id = %(job_id)s AND q.target_table = '' AND q.status = 'done'
 ORDER BY i.position
"""


def last_untargeted(tx: Tx, job_id: str) -> int | None:
    """Return the last position of a job's items without a target; None where it has none."""
    row = tx.execute(LAST_UNTARGETED, {"job_id": job_id}).fetchone()
    return int(row["position"]) if row else None


def untargeted_done(tx: Tx, job_id: str) -> dict[int, int]:
    """Return the ids of a job's done items without a target, by position."""
    rows = tx.execute(UNTARGETED_DONE, {"job_id": job_id})
    return {int(row["position"]): int(row["id"]) for row in rows}


# Two statements: a done item goes back only when it says why it is not what it was.
NOTE_GONE = """
UPDATE public.embedding_retry_queue
   SET skip_reason = 'vector_lost', updated_at = now()
 WHERE id = ANY(%(ids)s::bigint[]) AND status = 'done' AND skip_reason IS NULL
"""
REVIVE_GONE = """
UPDATE public.embedding_retry_queue
   SET status = 'pending', skip_reason = NULL, processed_at = NULL, max_attempts = NULL, kills = 0,
       next_attempt_at = now(), updated_at = now()
 WHERE id = ANY(%(ids)s::bigint[]) AND status = 'done' AND skip_reason = 'vector_lost'
"""


def revive_gone(tx: Tx, ids: Sequence[int]) -> int:
    """Let done items be embedded again whose vectors are gone; return how many."""
    if not ids:
        return 0
    values = {"ids": list(ids)}
    tx.execute(NOTE_GONE, values)
    return tx.execute(REVIVE_GONE, values).rowcount


BEFORE_OFFSET = """
SELECT max(position) AS position
  FROM (SELECT position FROM holdfast.job_items
         WHERE job_id = %(job_id)s ORDER BY position LIMIT %(offset)s) AS skipped
"""


def position_before(tx: Tx, job_id: str, offset: int) -> int:
    """Return the position of the last line before an offset; -1 before the first."""
    row = tx.execute(BEFORE_OFFSET, {"job_id": job_id, "offset": offset}).fetchone()
    return -1 if row is None or row["position"] is None else int(row["position"])


# A handful of models at most, and the first pending rows tell: no need to read them all.
NEEDS = """
SELECT DISTINCT model, target_table || ' ' || embedding_version AS target
  FROM ((SELECT model, target_table, embedding_version FROM public.embedding_retry_queue
          WHERE job_id = %(job_id)s AND status = 'pending' AND kills = 0
          ORDER BY next_attempt_at LIMIT 100)
        UNION ALL
        (SELECT model, target_table, embedding_version FROM public.embedding_retry_queue
          WHERE job_id = %(job_id)s AND status = 'pending' AND kills > 0
          ORDER BY next_attempt_at LIMIT 100)) AS first
 WHERE model IS NOT NULL
"""


def needs(tx: Tx, job_id: str) -> tuple[set[str], set[str]]:
    """Return the models and the targets (model.Target.label) that a job's first items wait for."""
    rows = tx.execute(NEEDS, {"job_id": job_id}).fetchall()
    return {str(row["model"]) for row in rows}, {str(row["target"]) for row in rows}


ATTEMPTS = """
SELECT item_id, attempt, at, error_class, message
  FROM holdfast.item_attempts
 WHERE item_id = ANY(%(ids)s::bigint[])
 ORDER BY item_id, at, attempt
"""


def attempts(tx: Tx, ids: Sequence[int]) -> dict[int, list[dict[str, Any]]]:
    """Return the failed attempts of items, oldest first."""
    found: dict[int, list[dict[str, Any]]] = {}
    for row in tx.execute(ATTEMPTS, {"ids": list(ids)}):
        found.setdefault(int(row.pop("item_id")), []).append(row)
    return found


# Two halves, as the claim has two indexes.
NEXT_DUE = """
SELECT min(due.next_attempt_at) AS next_at, min(due.next_attempt_at) <= now() AS is_due
  FROM ((SELECT next_attempt_at
           FROM public.embedding_retry_queue
          WHERE job_id = %(job_id)s AND status = 'pending' AND kills = 0
          ORDER BY next_attempt_at LIMIT 1)
        UNION ALL
        (SELECT next_attempt_at
           FROM public.embedding_retry_queue
          WHERE job_id = %(job_id)s AND status = 'pending' AND kills > 0
          ORDER BY next_attempt_at LIMIT 1)) AS due
"""


def next_due(tx: Tx, job_id: str) -> tuple[bool, datetime | None]:
    """Say whether an item of the job is due now, and when the first one is or was."""
    row = tx.execute(NEXT_DUE, {"job_id": job_id}).fetchone()
    return (bool(row["is_due"]), row["next_at"]) if row else (False, None)


# An item stays as long as any job that can still show it, or that would again after a requeue.
# Locked first and looked at again by the statement that deletes: a batch may have been linked to it
# in between. OFFSET 0: item by item, where the planner would rather hash the links of all jobs.
LOCK_OLD = """
SELECT q.id
  FROM public.embedding_retry_queue q
 WHERE q.status IN ('done', 'cancelled')
   AND q.updated_at < now() - make_interval(days => %(days)s)
   AND NOT EXISTS (SELECT FROM holdfast.job_items i
                     JOIN holdfast.jobs j ON j.id = i.job_id
                    WHERE i.item_id = q.id
                      AND (j.finished_at IS NULL OR j.expires_at > now()
                           OR (j.final_counts ->> 'failed')::integer > 0)
                   OFFSET 0)
 ORDER BY q.updated_at
 LIMIT %(limit)s
   FOR UPDATE OF q SKIP LOCKED
"""
PRUNE = """
WITH gone AS (
    DELETE FROM public.embedding_retry_queue q
     WHERE q.id = ANY(%(ids)s::bigint[])
       AND NOT EXISTS (SELECT FROM holdfast.job_items i
                         JOIN holdfast.jobs j ON j.id = i.job_id
                        WHERE i.item_id = q.id
                          AND (j.finished_at IS NULL OR j.expires_at > now()
                               OR (j.final_counts ->> 'failed')::integer > 0))
    RETURNING q.id
), links AS (
    DELETE FROM holdfast.job_items i USING gone WHERE i.item_id = gone.id
), history AS (
    DELETE FROM holdfast.item_attempts a USING gone WHERE a.item_id = gone.id
)
SELECT count(*) AS items FROM gone
"""


def prune(tx: Tx, *, days: int, limit: int) -> int:
    """Delete a block of old finished items with their links; return how many."""
    with tx.transaction():
        old = tx.execute(LOCK_OLD, {"days": days, "limit": limit}).fetchall()
        row = tx.execute(PRUNE, {"ids": [each["id"] for each in old]}).fetchone()
    return int(row["items"]) if row else 0


COUNT_OLD = """
SELECT count(*) AS items
  FROM public.embedding_retry_queue q
 WHERE q.status IN ('done', 'cancelled')
   AND q.updated_at < now() - make_interval(days => %(days)s)
   AND NOT EXISTS (SELECT FROM holdfast.job_items i
                     JOIN holdfast.jobs j ON j.id = i.job_id
                    WHERE i.item_id = q.id
                      AND (j.finished_at IS NULL OR j.expires_at > now()
                           OR (j.final_counts ->> 'failed')::integer > 0))
"""
COUNT_OLD_FAILED = """
SELECT count(*) AS items
  FROM public.embedding_retry_queue q
 WHERE q.status = 'failed' AND q.updated_at < now() - make_interval(days => %(days)s)
   AND NOT EXISTS (SELECT FROM holdfast.job_items i
                     JOIN holdfast.jobs j ON j.id = i.job_id
                    WHERE i.item_id = q.id AND j.finished_at IS NULL)
"""
# An open job still counts on its items.
PRUNE_FAILED = """
WITH old AS (
    SELECT q.id
      FROM public.embedding_retry_queue q
     WHERE q.status = 'failed' AND q.updated_at < now() - make_interval(days => %(days)s)
       AND NOT EXISTS (SELECT FROM holdfast.job_items i
                         JOIN holdfast.jobs j ON j.id = i.job_id
                        WHERE i.item_id = q.id AND j.finished_at IS NULL)
     ORDER BY q.updated_at
     LIMIT %(limit)s
       FOR UPDATE OF q SKIP LOCKED
), gone AS (
    DELETE FROM public.embedding_retry_queue q USING old WHERE q.id = old.id RETURNING q.id
), links AS (
    DELETE FROM holdfast.job_items i USING gone WHERE i.item_id = gone.id
), history AS (
    DELETE FROM holdfast.item_attempts a USING gone WHERE a.item_id = gone.id
)
SELECT count(*) AS items FROM gone
"""


def old(tx: Tx, *, days: int) -> int:
    """Count what `prune` would delete in all its blocks."""
    row = tx.execute(COUNT_OLD, {"days": days}).fetchone()
    return int(row["items"]) if row else 0


def old_failed(tx: Tx, *, days: int) -> int:
    """Count what `prune_failed` would delete in all its blocks."""
    row = tx.execute(COUNT_OLD_FAILED, {"days": days}).fetchone()
    return int(row["items"]) if row else 0


def prune_failed(tx: Tx, *, days: int, limit: int) -> int:
    """Delete a block of failed items that have waited for so long; return how many."""
    row = tx.execute(PRUNE_FAILED, {"days": days, "limit": limit}).fetchone()
    return int(row["items"]) if row else 0
