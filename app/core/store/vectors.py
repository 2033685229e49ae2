"""The ledger of stored vectors, one row a key, and the state of each follower per key.

A vector is written down in the transaction that stores it. A follower's row says what it is to hold
(`version_wanted`) and what it holds; whoever changes a key makes its rows pending in the same
transaction. Locks: items before vectors, both by key; who settles a follower's rows waits for none.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from psycopg.rows import class_row
from psycopg.types.json import Jsonb

from app.core.errors import WorkError
from app.core.model import Done, Settlement, Skipped, Target
from app.core.ports import HeldDocument
from app.core.store.database import Tx

# `updated_at = now()`: only what this transaction has settled itself. OFFSET 0: by the item alone;
# a planner without statistics, as after a large POST, would read the links of its whole job too.
RECORD = """
WITH stored AS (
    INSERT INTO holdfast.vectors AS v
           (target_table, target_id, embedding_version, model, model_digest, content_hash,
            metadata, version)
    SELECT q.target_table, q.target_id, q.embedding_version, q.model, %(digest)s, q.content_hash,
           (SELECT i.metadata
              FROM (SELECT job_id, position, metadata FROM holdfast.job_items
                     WHERE item_id = q.id OFFSET 0) AS i
             WHERE i.job_id = q.job_id ORDER BY i.position DESC LIMIT 1),
           o.token
      FROM unnest(%(ids)s::bigint[], %(tokens)s::bigint[]) AS o(id, token)
      JOIN public.embedding_retry_queue q ON q.id = o.id
     WHERE q.status = 'done' AND q.skip_reason IS NULL AND q.updated_at = now()
       AND q.target_table <> ''
     ORDER BY q.target_table, q.target_id, q.embedding_version
        ON CONFLICT ON CONSTRAINT vectors_key DO UPDATE
       SET model = excluded.model, model_digest = excluded.model_digest,
           content_hash = excluded.content_hash, metadata = excluded.metadata,
           version = excluded.version, stored_at = now(), deleted_at = NULL,
           is_wanted_empty = false
    RETURNING v.id, v.version
)
INSERT INTO holdfast.item_sinks AS s (vector_id, sink, version_wanted)
SELECT stored.id, sink, stored.version
  FROM stored CROSS JOIN unnest(%(followers)s::text[]) AS sink
    ON CONFLICT (vector_id, sink) DO UPDATE
   SET version_wanted = excluded.version_wanted, status = 'pending', attempts = 0,
       next_attempt_at = now(), error_class = NULL, last_error = NULL, updated_at = now()
"""


def record(
    tx: Tx, settlements: Sequence[Settlement], *, followers: Sequence[str], digest: str | None
) -> None:
    """Write down what this transaction has stored, and what it found to be gone, for the followers.

    `digest` is the model's, where the backend tells it.
    """
    done = [each.claim for each in settlements if isinstance(each.outcome, Done)]
    gone = [each.claim for each in settlements if isinstance(each.outcome, Skipped)]
    if done:
        values = {
            "ids": [claim.item_id for claim in done],
            "tokens": [claim.lease_token for claim in done],
            "digest": digest,
            "followers": list(followers),
        }
        tx.execute(RECORD, values)
    if gone:
        remove(tx, [(each.target_table, each.target_id, each.embedding_version) for each in gone])


REMOVE = """
WITH gone AS (
    SELECT v.id
      FROM unnest(%(tables)s::text[], %(ids)s::text[], %(versions)s::text[])
           AS k(target_table, target_id, embedding_version)
      JOIN holdfast.vectors v USING (target_table, target_id, embedding_version)
     WHERE v.deleted_at IS NULL
     ORDER BY v.target_table, v.target_id, v.embedding_version
       FOR UPDATE OF v
), removed AS (
    UPDATE holdfast.vectors v
       SET deleted_at = now(), version = nextval('holdfast.lease_tokens')
      FROM gone
     WHERE v.id = gone.id
    RETURNING v.id, v.version
), told AS (
    UPDATE holdfast.item_sinks s
       SET version_wanted = r.version, status = 'pending', attempts = 0, next_attempt_at = now(),
           error_class = NULL, last_error = NULL, updated_at = now()
      FROM removed r
     WHERE s.vector_id = r.id
)
SELECT count(*) AS keys FROM removed
"""

Key = tuple[str, str, str]
"""target_table, target_id, embedding_version."""


def remove(tx: Tx, keys: Sequence[Key]) -> int:
    """Let the vectors of these keys go from every follower; return how many were in the ledger.

    What the primary holds is its writer's to remove, in the same transaction.
    """
    values = {
        "tables": [key[0] for key in keys],
        "ids": [key[1] for key in keys],
        "versions": [key[2] for key in keys],
    }
    row = tx.execute(REMOVE, values).fetchone()
    return int(row["keys"]) if row else 0


# Only what is done: an item that is in hand writes its own, under a number that it has already.
REDESCRIBE = """
WITH changed AS (
    SELECT v.id, i.metadata
      FROM pg_temp.incoming i
      JOIN public.embedding_retry_queue q USING (target_table, target_id, embedding_version)
      JOIN holdfast.vectors v USING (target_table, target_id, embedding_version)
     WHERE q.status = 'done' AND v.deleted_at IS NULL AND v.content_hash = i.content_hash
       AND v.metadata::text IS DISTINCT FROM i.metadata::text
     ORDER BY target_table, target_id, embedding_version
       FOR UPDATE OF v
), described AS (
    UPDATE holdfast.vectors v
       SET metadata = c.metadata, version = nextval('holdfast.lease_tokens')
      FROM changed c
     WHERE v.id = c.id
    RETURNING v.id, v.version
)
UPDATE holdfast.item_sinks s
   SET version_wanted = d.version, status = 'pending', attempts = 0, next_attempt_at = now(),
       error_class = NULL, last_error = NULL, updated_at = now()
  FROM described d
 WHERE s.vector_id = d.id
"""


def redescribe(tx: Tx) -> None:
    """Send other metadata of the batch to the followers, where the text is stored already.

    Nothing is embedded for it. Comes after the batch was merged, so that its items are locked.
    """
    tx.execute(REDESCRIBE)


# ---- followers -----------------------------------------------------------------------------------

# A row that was claimed as often as an item may be and never settled: its writer dies of it.
GIVE_UP = """
UPDATE holdfast.item_sinks
   SET status = 'failed', error_class = 'crashed', updated_at = now(),
       last_error = 'whoever was to write it has died each time'
 WHERE sink = %(sink)s AND status = 'pending' AND next_attempt_at <= now()
   AND attempts >= %(allowance)s
"""
# The attempt is spent here, as in the claim of an item. The text is told where somebody still has
# it: the queue, as long as the item is there.
CLAIM = """
WITH due AS (
    SELECT s.vector_id
      FROM holdfast.item_sinks s
      JOIN holdfast.vectors v ON v.id = s.vector_id
     WHERE s.sink = %(sink)s AND s.status = 'pending' AND s.next_attempt_at <= now()
       AND v.target_table || ' ' || v.embedding_version <> ALL(%(paused)s::text[])
     ORDER BY s.next_attempt_at, s.vector_id
     LIMIT %(limit)s
       FOR UPDATE OF s SKIP LOCKED
), claimed AS (
    UPDATE holdfast.item_sinks s
       SET attempts = s.attempts + 1,
           next_attempt_at = now() + make_interval(secs => %(lease_seconds)s)
      FROM due
     WHERE s.vector_id = due.vector_id AND s.sink = %(sink)s
    RETURNING s.vector_id, s.version_wanted
)
SELECT v.id AS vector_id, v.target_table, v.target_id, v.embedding_version, v.version, v.model,
       v.model_digest, encode(v.content_hash, 'hex') AS content_hash, v.metadata,
       v.deleted_at IS NOT NULL AS is_deleted,
       (SELECT q.text_content FROM public.embedding_retry_queue q
         WHERE (q.target_table, q.target_id, q.embedding_version)
               = (v.target_table, v.target_id, v.embedding_version)
           AND q.content_hash = v.content_hash) AS text
  FROM claimed c
  JOIN holdfast.vectors v ON v.id = c.vector_id
"""


@dataclass(frozen=True, slots=True)
class Due:
    """What a follower is to hold of one key: a vector of this version, or nothing any more."""

    vector_id: int
    target_table: str
    target_id: str
    embedding_version: str
    version: int
    model: str
    model_digest: str | None
    content_hash: str
    metadata: dict[str, Any] | None
    is_deleted: bool
    text: str | None


@dataclass(frozen=True, slots=True)
class FollowTerms:
    """Which follower claims, for how long, and how often a row may be claimed."""

    sink: str
    lease_seconds: float
    allowance: int


def claim(tx: Tx, terms: FollowTerms, *, limit: int, paused: Sequence[str]) -> list[Due]:
    """Take due rows of a follower in hand, for a time; those of paused targets are left."""
    values = {
        "sink": terms.sink,
        "lease_seconds": terms.lease_seconds,
        "allowance": terms.allowance,
        "limit": limit,
        "paused": list(paused),
    }
    tx.execute(GIVE_UP, values)
    with tx.cursor(row_factory=class_row(Due)) as cursor:
        return cursor.execute(CLAIM, values).fetchall()


UNCHANGED = """
SELECT v.id
  FROM unnest(%(ids)s::bigint[], %(versions)s::bigint[]) AS k(id, version)
  JOIN holdfast.vectors v ON v.id = k.id AND v.version = k.version
"""


def unchanged(tx: Tx, due: Sequence[Due]) -> set[int]:
    """Return which vectors are still what they were when they were claimed."""
    values = {"ids": [each.vector_id for each in due], "versions": [each.version for each in due]}
    return {int(row["id"]) for row in tx.execute(UNCHANGED, values)}


# The version is the fence: a row that a newer text has made pending again stays so. SKIP LOCKED, as
# whoever has such a row is making it pending again.
SETTLE = """
WITH held AS (
    SELECT s.vector_id, o.version, o.status, o.refund, o.after_seconds, o.error_class, o.message
      FROM unnest(%(ids)s::bigint[], %(versions)s::bigint[], %(statuses)s::text[],
                  %(refunds)s::integer[], %(afters)s::float8[], %(classes)s::text[],
                  %(messages)s::text[])
           AS o(id, version, status, refund, after_seconds, error_class, message)
      JOIN holdfast.item_sinks s ON s.vector_id = o.id AND s.sink = %(sink)s
     WHERE s.status = 'pending' AND s.version_wanted <= o.version
       FOR UPDATE OF s SKIP LOCKED
)
UPDATE holdfast.item_sinks s
   SET status = h.status, attempts = s.attempts - h.refund,
       version_written = CASE WHEN h.status = 'done' THEN h.version ELSE s.version_written END,
       next_attempt_at = now() + make_interval(secs => h.after_seconds),
       error_class = h.error_class, last_error = h.message, updated_at = now()
  FROM held h
 WHERE s.vector_id = h.vector_id AND s.sink = %(sink)s
"""


@dataclass(frozen=True, slots=True)
class Followed:
    """What became of one row: done, failed for good, or pending again after a time, uncharged."""

    due: Due
    status: str
    error: WorkError | None = None
    after_seconds: float = 0.0


def settle(tx: Tx, sink: str, outcomes: Sequence[Followed]) -> int:
    """Write what became of a follower's rows; return how many still wanted that version."""
    values = {
        "sink": sink,
        "ids": [each.due.vector_id for each in outcomes],
        "versions": [each.due.version for each in outcomes],
        "statuses": [each.status for each in outcomes],
        "refunds": [int(each.status == "pending") for each in outcomes],
        "afters": [each.after_seconds for each in outcomes],
        "classes": [each.error.error_class if each.error else None for each in outcomes],
        "messages": [each.error.message if each.error else None for each in outcomes],
    }
    return tx.execute(SETTLE, values).rowcount


STATES = """
SELECT v.target_table, v.target_id, v.embedding_version, s.sink, s.status, s.attempts,
       s.error_class, s.last_error
  FROM unnest(%(tables)s::text[], %(ids)s::text[], %(versions)s::text[])
       AS k(target_table, target_id, embedding_version)
  JOIN holdfast.vectors v USING (target_table, target_id, embedding_version)
  JOIN holdfast.item_sinks s ON s.vector_id = v.id
 WHERE v.deleted_at IS NULL
 ORDER BY s.sink
"""


def states(tx: Tx, keys: Sequence[Key]) -> dict[Key, list[dict[str, Any]]]:
    """Return how far each follower is with these keys."""
    values = {
        "tables": [key[0] for key in keys],
        "ids": [key[1] for key in keys],
        "versions": [key[2] for key in keys],
    }
    found: dict[Key, list[dict[str, Any]]] = {}
    for row in tx.execute(STATES, values):
        key = (row["target_table"], row["target_id"], row["embedding_version"])
        found.setdefault(key, []).append(row)
    return found


REVIVE = """
WITH again AS (
    UPDATE holdfast.item_sinks s
       SET status = 'pending', attempts = 0, next_attempt_at = now(), error_class = NULL,
           last_error = NULL, updated_at = now()
      FROM holdfast.job_items i
      JOIN public.embedding_retry_queue q ON q.id = i.item_id
      JOIN holdfast.vectors v USING (target_table, target_id, embedding_version)
     WHERE i.job_id = %(job_id)s AND s.vector_id = v.id AND s.status = 'failed'
    RETURNING s.vector_id
)
SELECT count(DISTINCT vector_id) AS keys FROM again
"""


def revive(tx: Tx, job_id: str) -> int:
    """Give what followers refused of a job's items another allowance; return how many items."""
    row = tx.execute(REVIVE, {"job_id": job_id}).fetchone()
    return int(row["keys"]) if row else 0


BACKLOG = """
SELECT sink, status, count(*) AS rows,
       coalesce(extract(epoch FROM now() - min(updated_at)), 0)::float8 AS oldest_seconds
  FROM holdfast.item_sinks
 WHERE status IN ('pending', 'failed')
 GROUP BY sink, status
"""


@dataclass(frozen=True, slots=True)
class Backlog:
    """How many rows a follower has not done, and how long the oldest has stood so."""

    sink: str
    status: str
    rows: int
    oldest_seconds: float


def backlog(tx: Tx) -> list[Backlog]:
    """Return what followers have not done, by sink and status; nothing where all have caught up."""
    with tx.cursor(row_factory=class_row(Backlog)) as cursor:
        return cursor.execute(BACKLOG).fetchall()


# Rows of a sink that is no longer set wait for nobody.
PRUNE = """
WITH gone AS (
    SELECT v.id
      FROM holdfast.vectors v
     WHERE v.deleted_at IS NOT NULL AND NOT v.is_wanted_empty
       AND NOT EXISTS (SELECT FROM holdfast.item_sinks s
                        WHERE s.vector_id = v.id AND s.sink = ANY(%(followers)s::text[])
                          AND s.status <> 'done')
     ORDER BY v.deleted_at
     LIMIT %(limit)s
       FOR UPDATE SKIP LOCKED
)
DELETE FROM holdfast.vectors v USING gone WHERE v.id = gone.id
"""


def prune(tx: Tx, *, followers: Sequence[str], limit: int) -> int:
    """Forget a block of keys whose vectors are gone from every follower; return how many."""
    return tx.execute(PRUNE, {"followers": list(followers), "limit": limit}).rowcount


COUNT_OLD = """
SELECT count(*) AS keys
  FROM holdfast.vectors v
 WHERE v.deleted_at IS NOT NULL AND NOT v.is_wanted_empty
   AND NOT EXISTS (SELECT FROM holdfast.item_sinks s
                    WHERE s.vector_id = v.id AND s.sink = ANY(%(followers)s::text[])
                      AND s.status <> 'done')
"""


def old(tx: Tx, *, followers: Sequence[str]) -> int:
    """Count what `prune` would delete in all its blocks."""
    row = tx.execute(COUNT_OLD, {"followers": list(followers)}).fetchone()
    return int(row["keys"]) if row else 0


TRY_FOLLOW = "SELECT pg_try_advisory_lock(%(key)s, hashtext(%(sink)s)) AS won"
FOLLOW_LOCK = 0x666F6C6C  # "foll"


def try_follow(connection: Tx, sink: str) -> bool:
    """Become the one writer of a follower, as long as this connection lives."""
    row = connection.execute(TRY_FOLLOW, {"key": FOLLOW_LOCK, "sink": sink}).fetchone()
    return bool(row and row["won"])


# ---- what the stores really hold ---------------------------------------------------------------

BEGIN_SURVEY = """
CREATE TEMPORARY TABLE IF NOT EXISTS differences (kind text, id text)
"""
BEGIN_HELD = """
CREATE TEMPORARY TABLE IF NOT EXISTS held_documents (
    target_id text, version bigint, content_hash text, dimension integer
)
"""
EMPTY_SURVEY = "TRUNCATE pg_temp.differences"
EMPTY_HELD = "TRUNCATE pg_temp.held_documents"
COPY_HELD = """
COPY pg_temp.held_documents (target_id, version, content_hash, dimension) FROM STDIN
"""
# A document twice is compared by its newest version.
SURVEY_HELD = """
WITH held AS (
    SELECT DISTINCT ON (target_id) target_id, version, content_hash, dimension
      FROM pg_temp.held_documents
     ORDER BY target_id, version DESC
), ledger AS (
    SELECT v.id, v.target_id, v.version, encode(v.content_hash, 'hex') AS content_hash,
           v.deleted_at IS NOT NULL AS is_deleted, s.status
      FROM holdfast.vectors v
      LEFT JOIN holdfast.item_sinks s ON s.vector_id = v.id AND s.sink = %(sink)s
     WHERE v.target_table = %(target)s AND v.embedding_version = %(version)s
), seen AS MATERIALIZED (
    SELECT coalesce(l.target_id, h.target_id) AS id,
           CASE WHEN l.status = 'pending' THEN 'queued'
                WHEN l.id IS NULL OR l.is_deleted THEN 'orphan'
                WHEN l.status = 'failed' THEN 'failed'
                WHEN h.target_id IS NULL THEN 'missing'
                WHEN h.version <> l.version OR h.content_hash <> l.content_hash THEN 'stale'
                WHEN h.dimension NOT IN (0, %(dimension)s) THEN 'wrong_dimension'
                ELSE 'current' END AS kind
      FROM ledger l FULL JOIN held h ON h.target_id = l.target_id
     WHERE h.target_id IS NOT NULL OR NOT l.is_deleted
), named AS (
    INSERT INTO pg_temp.differences (kind, id) SELECT kind, id FROM seen WHERE kind <> 'current'
)
SELECT kind, count(*) AS rows FROM seen GROUP BY kind
"""


def begin_survey(tx: Tx) -> None:
    """Make ready the temporary table that a survey names its differences in."""
    tx.execute(BEGIN_SURVEY)
    tx.execute(EMPTY_SURVEY)


def begin_held(tx: Tx) -> None:
    """Make ready the temporary table of what a follower says that it holds."""
    tx.execute(BEGIN_HELD)
    tx.execute(EMPTY_HELD)


def note_held(tx: Tx, held: Sequence[HeldDocument]) -> None:
    """Add documents to it."""
    with tx.cursor() as cursor, cursor.copy(COPY_HELD) as copy:
        for each in held:
            copy.write_row((each.target_id, each.version, each.content_hash, each.dimension))


def survey_held(tx: Tx, target: Target, sink: str) -> dict[str, int]:
    """Compare it with the ledger, as PrimarySink.survey does with the rows."""
    values = {
        "sink": sink,
        "target": target.target_table,
        "version": target.embedding_version,
        "dimension": target.dimension,
    }
    return {str(row["kind"]): int(row["rows"]) for row in tx.execute(SURVEY_HELD, values)}


DIFFERENCES = """
SELECT id FROM pg_temp.differences
 WHERE kind = %(kind)s AND id > %(after)s
 ORDER BY id LIMIT %(limit)s
"""


def differences(tx: Tx, kind: str, *, after: str, limit: int) -> list[str]:
    """Return target_ids of one kind that the last survey of this session found, in order."""
    values = {"kind": kind, "after": after, "limit": limit}
    return [str(row["id"]) for row in tx.execute(DIFFERENCES, values)]


# A store that claims a version of its own is passed by a newer one.
RESEND = """
WITH wanted AS (
    UPDATE holdfast.vectors v
       SET version = CASE WHEN %(is_newer)s THEN nextval('holdfast.lease_tokens')
                          ELSE v.version END
     WHERE v.target_table = %(target)s AND v.embedding_version = %(version)s
       AND v.target_id = ANY(%(ids)s::text[]) AND v.deleted_at IS NULL
    RETURNING v.id, v.version
)
INSERT INTO holdfast.item_sinks AS s (vector_id, sink, version_wanted)
SELECT id, %(sink)s, version FROM wanted
    ON CONFLICT (vector_id, sink) DO UPDATE
   SET version_wanted = excluded.version_wanted, status = 'pending', attempts = 0,
       next_attempt_at = now(), error_class = NULL, last_error = NULL, updated_at = now()
"""
# Never back: others take numbers meanwhile, so where it must go on it goes far.
OVERTAKE = """
SELECT setval('holdfast.lease_tokens', held.newest + 1000000)
  FROM (SELECT max(version) AS newest FROM pg_temp.held_documents) AS held,
       holdfast.lease_tokens AS given
 WHERE held.newest >= given.last_value
"""


def resend(tx: Tx, target: Target, sink: str, ids: Sequence[str], *, is_newer: bool) -> int:
    """Let a follower be given these keys again; `is_newer`: over whatever it holds of them."""
    if is_newer:
        tx.execute(OVERTAKE)
    values = {
        "target": target.target_table,
        "version": target.embedding_version,
        "sink": sink,
        "ids": list(ids),
        "is_newer": is_newer,
    }
    return tx.execute(RESEND, values).rowcount


# A line that says: nothing of this key is to be there. It goes when the follower has done so.
CONDEMN = """
WITH condemned AS (
    INSERT INTO holdfast.vectors AS v
           (target_table, target_id, embedding_version, model, content_hash, deleted_at)
    SELECT %(target)s, id, %(version)s, %(model)s, ''::bytea, now()
      FROM unnest(%(ids)s::text[]) AS id
     ORDER BY id
        ON CONFLICT ON CONSTRAINT vectors_key DO UPDATE
       SET version = excluded.version
     WHERE v.deleted_at IS NOT NULL
    RETURNING v.id, v.version
)
INSERT INTO holdfast.item_sinks AS s (vector_id, sink, version_wanted)
SELECT id, %(sink)s, version FROM condemned
    ON CONFLICT (vector_id, sink) DO UPDATE
   SET version_wanted = excluded.version_wanted, status = 'pending', attempts = 0,
       next_attempt_at = now(), error_class = NULL, last_error = NULL, updated_at = now()
"""


def condemn(tx: Tx, target: Target, sink: str, ids: Sequence[str]) -> int:
    """Let a follower remove documents that the ledger does not know."""
    tx.execute(OVERTAKE)
    values = {
        "target": target.target_table,
        "version": target.embedding_version,
        "model": target.model,
        "sink": sink,
        "ids": list(ids),
    }
    return tx.execute(CONDEMN, values).rowcount


# What was stored when nobody wrote it down, as far as its done item still tells of which text.
WRITE_DOWN = """
INSERT INTO holdfast.vectors AS v
       (target_table, target_id, embedding_version, model, content_hash, stored_at)
SELECT q.target_table, q.target_id, q.embedding_version, q.model, q.content_hash, q.processed_at
  FROM public.embedding_retry_queue q
 WHERE q.target_table = %(target)s AND q.embedding_version = %(version)s
   AND q.target_id = ANY(%(ids)s::text[]) AND q.status = 'done' AND q.skip_reason IS NULL
 ORDER BY q.target_id
    ON CONFLICT ON CONSTRAINT vectors_key DO UPDATE
   SET content_hash = excluded.content_hash, model = excluded.model, version = excluded.version,
       stored_at = excluded.stored_at, deleted_at = NULL, is_wanted_empty = false
 WHERE v.deleted_at IS NOT NULL
"""


def write_down(tx: Tx, target: Target, ids: Sequence[str]) -> int:
    """Record vectors that are there without a line; return of how many the text is known."""
    values = {
        "target": target.target_table,
        "version": target.embedding_version,
        "ids": list(ids),
    }
    return tx.execute(WRITE_DOWN, values).rowcount


# Locked until what is written back is committed. Nothing is open for them, so nobody else writes.
KEPT = """
SELECT v.target_id, encode(v.content_hash, 'hex') AS content_hash
  FROM holdfast.vectors v
 WHERE v.target_table = %(target)s AND v.embedding_version = %(version)s
   AND v.target_id = ANY(%(ids)s::text[]) AND v.deleted_at IS NULL
   AND NOT EXISTS (SELECT FROM public.embedding_retry_queue q
                    WHERE (q.target_table, q.target_id, q.embedding_version)
                          = (v.target_table, v.target_id, v.embedding_version)
                      AND q.status IN ('pending', 'processing'))
 ORDER BY v.target_id
   FOR UPDATE OF v
"""


def kept_hashes(tx: Tx, target: Target, ids: Sequence[str]) -> dict[str, str]:
    """Lock the lines of keys that nothing is open for; return the hash of the text of each."""
    values = {
        "target": target.target_table,
        "version": target.embedding_version,
        "ids": list(ids),
    }
    return {str(row["target_id"]): str(row["content_hash"]) for row in tx.execute(KEPT, values)}


KEEP_COVERAGE = """
INSERT INTO holdfast.coverage AS c (target_table, embedding_version, sink, seconds, kinds)
VALUES (%(target)s, %(version)s, %(sink)s, %(seconds)s, %(kinds)s)
    ON CONFLICT (target_table, embedding_version, sink) DO UPDATE
   SET measured_at = now(), seconds = excluded.seconds, kinds = excluded.kinds
"""
COVERAGE = """
SELECT c.target_table, c.embedding_version, c.sink, t.is_current, t.client, c.measured_at,
       c.seconds, c.kinds
  FROM holdfast.coverage c
  JOIN holdfast.embedding_targets t USING (target_table, embedding_version)
 ORDER BY c.target_table, c.embedding_version, c.sink <> 'pgvector', c.sink
"""


def keep_coverage(
    tx: Tx, target: Target, sink: str, kinds: Mapping[str, int], *, seconds: float
) -> None:
    """Keep what a survey counted, in place of the one before."""
    values = {
        "target": target.target_table,
        "version": target.embedding_version,
        "sink": sink,
        "seconds": seconds,
        "kinds": Jsonb(dict(kinds)),
    }
    tx.execute(KEEP_COVERAGE, values)


def coverage(tx: Tx) -> list[dict[str, Any]]:
    """Return the last survey of each target, version and sink."""
    return tx.execute(COVERAGE).fetchall()


OPEN_ITEMS = """
SELECT count(*) AS items
  FROM public.embedding_retry_queue
 WHERE target_table = %(target)s AND embedding_version = %(version)s
   AND status IN ('pending', 'processing')
"""


def open_items(tx: Tx, target: Target) -> int:
    """Return how many items of a target's version are not final."""
    values = {"target": target.target_table, "version": target.embedding_version}
    row = tx.execute(OPEN_ITEMS, values).fetchone()
    return int(row["items"]) if row else 0


FORGET_VERSION = """
WITH items AS (
    DELETE FROM public.embedding_retry_queue
     WHERE target_table = %(target)s AND embedding_version = %(version)s
    RETURNING id
), links AS (
    DELETE FROM holdfast.job_items i USING items WHERE i.item_id = items.id
), history AS (
    DELETE FROM holdfast.item_attempts a USING items WHERE a.item_id = items.id
), surveys AS (
    DELETE FROM holdfast.coverage
     WHERE target_table = %(target)s AND embedding_version = %(version)s
)
DELETE FROM holdfast.vectors
 WHERE target_table = %(target)s AND embedding_version = %(version)s
"""


def forget_version(tx: Tx, target: Target) -> None:
    """Forget a version of a target, with what was asked for in it."""
    values = {"target": target.target_table, "version": target.embedding_version}
    tx.execute(FORGET_VERSION, values)
