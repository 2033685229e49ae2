"""Campaigns: targets whose rows are embedded in another version beside daily work."""

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime

from psycopg.rows import class_row

from app.core.store.database import Tx

START = """
INSERT INTO holdfast.campaigns (target_table, from_version, to_version)
VALUES (%(target_table)s, %(from_version)s, %(to_version)s)
    ON CONFLICT (target_table) WHERE finished_at IS NULL DO NOTHING
RETURNING id
"""
OPEN = """
SELECT id, target_table, from_version, to_version, state, cursor, is_read, submitted, skipped,
       caught_up_to, coalesce(closes_until <= now(), false) AS is_overdue, leaves_failed, said,
       started_at, cut_over_at, finished_at
  FROM holdfast.campaigns
 WHERE finished_at IS NULL
 ORDER BY id
"""
LATEST = """
SELECT DISTINCT ON (target_table)
       id, target_table, from_version, to_version, state, cursor, is_read, submitted, skipped,
       caught_up_to, coalesce(closes_until <= now(), false) AS is_overdue, leaves_failed, said,
       started_at, cut_over_at, finished_at
  FROM holdfast.campaigns
 WHERE %(target_table)s::text IS NULL OR target_table = %(target_table)s
 ORDER BY target_table, id DESC
"""


@dataclass(frozen=True, slots=True)
class Campaign:
    """One go at embedding a target's rows in another version."""

    id: int
    target_table: str
    from_version: str
    to_version: str
    state: str
    cursor: str | None
    is_read: bool
    submitted: int
    skipped: int
    caught_up_to: datetime
    is_overdue: bool
    """Whether it could not be closed in its time."""
    leaves_failed: bool
    said: str | None
    started_at: datetime
    cut_over_at: datetime | None
    finished_at: datetime | None


def start(tx: Tx, target_table: str, from_version: str, to_version: str) -> bool:
    """Begin a campaign; False where the target has one already."""
    values = {
        "target_table": target_table,
        "from_version": from_version,
        "to_version": to_version,
    }
    return tx.execute(START, values).rowcount == 1


def unfinished(tx: Tx) -> list[Campaign]:
    """Return the campaigns that there is still something to do for."""
    with tx.cursor(row_factory=class_row(Campaign)) as cursor:
        return cursor.execute(OPEN).fetchall()


def latest(tx: Tx, target_table: str | None = None) -> list[Campaign]:
    """Return the last campaign of each target, or of one."""
    with tx.cursor(row_factory=class_row(Campaign)) as cursor:
        return cursor.execute(LATEST, {"target_table": target_table}).fetchall()


CHANGE = """
UPDATE holdfast.campaigns
   SET state = %(state)s, said = %(said)s,
       leaves_failed = CASE WHEN %(state)s = 'closing' THEN %(leaves_failed)s
                            ELSE leaves_failed END,
       closes_until = CASE WHEN %(state)s = 'closing'
                           THEN now() + make_interval(secs => %(seconds)s) END,
       finished_at = CASE WHEN %(state)s = 'cancelled' THEN now() END
 WHERE target_table = %(target_table)s AND finished_at IS NULL
   AND state = ANY(%(before)s::text[])
"""


@dataclass(frozen=True, slots=True)
class Change:
    """What a campaign is to become, of what it may be now."""

    state: str
    before: Sequence[str]
    said: str | None = None
    seconds: float = 0.0
    leaves_failed: bool = False


def change(tx: Tx, target_table: str, wanted: Change) -> bool:
    """Change the state of a target's open campaign; False where it is not one of those before."""
    values = {
        "target_table": target_table,
        "state": wanted.state,
        "before": list(wanted.before),
        "said": wanted.said,
        "seconds": wanted.seconds,
        "leaves_failed": wanted.leaves_failed,
    }
    return tx.execute(CHANGE, values).rowcount == 1


ADVANCE = """
UPDATE holdfast.campaigns
   SET cursor = coalesce(%(cursor)s, cursor), is_read = is_read OR %(is_read)s,
       submitted = submitted + %(submitted)s, skipped = skipped + %(skipped)s
 WHERE id = %(id)s
"""


def advance(tx: Tx, campaign_id: int, cursor: str | None, *, submitted: int, skipped: int) -> None:
    """Note how far the rows have been read; a cursor of None: to the end."""
    values = {
        "id": campaign_id,
        "cursor": cursor,
        "is_read": cursor is None,
        "submitted": submitted,
        "skipped": skipped,
    }
    tx.execute(ADVANCE, values)


# What was stored in the old version of late and the new one holds of another text. Which of the two
# is the newer the row itself tells.
BEHIND = """
SELECT v.id, v.target_id, encode(n.content_hash, 'hex') AS held,
       CASE WHEN o.status IN ('pending', 'processing', 'failed')
            THEN encode(o.content_hash, 'hex') END AS on_its_way
  FROM holdfast.vectors v
  LEFT JOIN holdfast.vectors n
    ON n.target_table = v.target_table AND n.target_id = v.target_id
   AND n.embedding_version = %(to_version)s AND n.deleted_at IS NULL
  LEFT JOIN public.embedding_retry_queue o
    ON o.target_table = v.target_table AND o.target_id = v.target_id
   AND o.embedding_version = %(to_version)s
 WHERE v.target_table = %(target_table)s AND v.embedding_version = %(from_version)s
   AND v.deleted_at IS NULL AND v.stored_at >= %(since)s AND v.id > %(after)s
   AND n.content_hash IS DISTINCT FROM v.content_hash
 ORDER BY v.id
 LIMIT %(limit)s
"""
BEFORE = "SELECT now() - interval '10 minutes' AS at"
CAUGHT_UP = "UPDATE holdfast.campaigns SET caught_up_to = %(at)s WHERE id = %(id)s"


@dataclass(frozen=True, slots=True)
class Behind:
    """A row of which the new version may lack the newest text."""

    id: int
    target_id: str
    held: str | None
    """The hash of the text that the new version holds."""
    on_its_way: str | None
    """That of the text which an item brings it, or could not."""


def behind(tx: Tx, campaign: Campaign, *, after: int, limit: int) -> list[Behind]:
    """Return rows that daily work has stored in the old version of late, in the ledger's order."""
    values = {
        "target_table": campaign.target_table,
        "from_version": campaign.from_version,
        "to_version": campaign.to_version,
        "since": campaign.caught_up_to,
        "after": after,
        "limit": limit,
    }
    with tx.cursor(row_factory=class_row(Behind)) as cursor:
        return cursor.execute(BEHIND, values).fetchall()


def before(tx: Tx) -> datetime:
    """Return a time before which no transaction that is still open can have begun."""
    row = tx.execute(BEFORE).fetchone()
    assert row is not None  # noqa: S101 - it has no FROM
    at: datetime = row["at"]
    return at


def caught_up(tx: Tx, campaign: Campaign, at: datetime) -> None:
    """Note that what was stored before this need not be looked at again."""
    tx.execute(CAUGHT_UP, {"id": campaign.id, "at": at})


UNSETTLED = """
SELECT count(*) FILTER (WHERE embedding_version = %(to_version)s
                          AND status IN ('pending', 'processing')) AS open_new,
       count(*) FILTER (WHERE embedding_version = %(to_version)s AND status = 'failed')
           AS failed_new,
       count(*) FILTER (WHERE embedding_version = %(from_version)s
                          AND status = 'processing') AS held_old,
       count(*) FILTER (WHERE embedding_version = %(from_version)s
                          AND status IN ('pending', 'processing')) AS open_old
  FROM public.embedding_retry_queue
 WHERE target_table = %(target_table)s AND status IN ('pending', 'processing', 'failed')
   AND embedding_version IN (%(from_version)s, %(to_version)s)
"""


@dataclass(frozen=True, slots=True)
class Unsettled:
    """How many items of a campaign's two versions are not done."""

    open_new: int
    failed_new: int
    held_old: int
    open_old: int


def unsettled(tx: Tx, campaign: Campaign) -> Unsettled:
    """Count what is open or failed in both versions."""
    values = {
        "target_table": campaign.target_table,
        "from_version": campaign.from_version,
        "to_version": campaign.to_version,
    }
    with tx.cursor(row_factory=class_row(Unsettled)) as cursor:
        found = cursor.execute(UNSETTLED, values).fetchone()
    return found or Unsettled(0, 0, 0, 0)


# A job of a campaign is of one target and version throughout: its first item tells which.
OPEN_WORK = """
SELECT coalesce(sum(c.open), 0)::bigint AS items
  FROM holdfast.jobs j
 CROSS JOIN LATERAL (
       SELECT q.target_table, q.embedding_version
         FROM holdfast.job_items i
         JOIN public.embedding_retry_queue q ON q.id = i.item_id
        WHERE i.job_id = j.id LIMIT 1) AS first
 CROSS JOIN LATERAL (
       SELECT sum(pending + processing) AS open
         FROM holdfast.job_counts WHERE job_id = j.id) AS c
 WHERE j.finished_at IS NULL AND j.kind = 'embedding' AND j.client = %(client)s
   AND first.target_table = %(target_table)s AND first.embedding_version = %(to_version)s
"""


def open_work(tx: Tx, campaign: Campaign, client: str) -> int:
    """Return how many items of a client's jobs for a campaign are not final."""
    values = {
        "client": client,
        "target_table": campaign.target_table,
        "to_version": campaign.to_version,
    }
    row = tx.execute(OPEN_WORK, values).fetchone()
    return int(row["items"]) if row else 0


# Only what a follower holds in the old version and the first store in both: so neither a follower
# that came later nor a row that was deleted by hand ('result_lost') is waited for.
LACKING = """
SELECT s.sink, count(*) AS documents
  FROM holdfast.vectors v
  JOIN holdfast.vectors n
    ON n.target_table = v.target_table AND n.target_id = v.target_id
   AND n.embedding_version = %(to_version)s AND n.deleted_at IS NULL
  JOIN holdfast.item_sinks s
    ON s.vector_id = v.id AND s.sink = ANY(%(sinks)s::text[]) AND s.version_written IS NOT NULL
  LEFT JOIN holdfast.item_sinks w ON w.vector_id = n.id AND w.sink = s.sink
 WHERE v.target_table = %(target_table)s AND v.embedding_version = %(from_version)s
   AND v.deleted_at IS NULL AND w.status IS DISTINCT FROM 'done'
   AND w.error_class IS DISTINCT FROM 'result_lost'
   AND NOT (%(leaves_failed)s AND coalesce(w.status = 'failed', false))
 GROUP BY s.sink
 ORDER BY s.sink
"""


def lacking(tx: Tx, campaign: Campaign, sinks: Sequence[str]) -> dict[str, int]:
    """Return how many documents followers hold in the old version and not yet in the new one."""
    values = {
        "target_table": campaign.target_table,
        "from_version": campaign.from_version,
        "to_version": campaign.to_version,
        "leaves_failed": campaign.leaves_failed,
        "sinks": list(sinks),
    }
    return {row["sink"]: row["documents"] for row in tx.execute(LACKING, values)}


# Of a campaign that rests, its own items; of one that closes, those of daily work, for a moment.
HELD_BACK = """
SELECT target_table || ' ' || CASE state WHEN 'paused' THEN to_version ELSE from_version END
           AS label
  FROM holdfast.campaigns
 WHERE finished_at IS NULL AND (state = 'paused' OR (state = 'closing' AND closes_until > now()))
"""


def held_back(tx: Tx) -> list[str]:
    """Return the targets (model.Target.label) whose items are not taken in hand now."""
    return [str(row["label"]) for row in tx.execute(HELD_BACK)]


OPEN_JOBS = """
SELECT DISTINCT q.job_id
  FROM public.embedding_retry_queue q
  JOIN holdfast.jobs j ON j.id = q.job_id AND j.client = %(client)s
 WHERE q.target_table = %(target_table)s AND q.embedding_version = %(to_version)s
   AND q.status IN ('pending', 'processing')
"""


def open_jobs(tx: Tx, campaign: Campaign, client: str) -> list[str]:
    """Return the jobs of a client that still have something to do for a campaign."""
    values = {
        "client": client,
        "target_table": campaign.target_table,
        "to_version": campaign.to_version,
    }
    return [str(row["job_id"]) for row in tx.execute(OPEN_JOBS, values)]


CUT_OVER = """
WITH campaign AS (
    UPDATE holdfast.campaigns
       SET state = 'cut_over', cut_over_at = now(), closes_until = NULL, said = NULL
     WHERE id = %(id)s AND state = 'closing'
    RETURNING target_table, to_version
), unset AS (
    UPDATE holdfast.embedding_targets t
       SET is_current = false
      FROM campaign c
     WHERE t.target_table = c.target_table AND t.is_current
    RETURNING t.target_table
)
SELECT count(*) AS targets FROM unset
"""
SET_CURRENT = """
UPDATE holdfast.embedding_targets
   SET is_current = true
 WHERE target_table = %(target_table)s AND embedding_version = %(to_version)s
"""
FINISH = "UPDATE holdfast.campaigns SET finished_at = now(), said = NULL WHERE id = %(id)s"
SAY = "UPDATE holdfast.campaigns SET said = %(said)s WHERE id = %(id)s"


def cut_over(tx: Tx, campaign: Campaign) -> bool:
    """Make the new version the current one; False where it is no longer wanted."""
    row = tx.execute(CUT_OVER, {"id": campaign.id}).fetchone()
    if not row or not row["targets"]:
        return False
    values = {"target_table": campaign.target_table, "to_version": campaign.to_version}
    tx.execute(SET_CURRENT, values)
    return True


def finish(tx: Tx, campaign: Campaign) -> None:
    """Note that nothing is left to do."""
    tx.execute(FINISH, {"id": campaign.id})


def say(tx: Tx, campaign: Campaign, said: str) -> None:
    """Let whoever asks for the state read what keeps it from going on."""
    tx.execute(SAY, {"id": campaign.id, "said": said})


IS_MARK_DUE = """
SELECT NOT EXISTS (SELECT FROM holdfast.campaign_marks
                    WHERE campaign_id = %(id)s
                      AND at > now() - make_interval(secs => %(seconds)s)) AS is_due
"""
MARK = """
INSERT INTO holdfast.campaign_marks (campaign_id, has, wants) VALUES (%(id)s, %(has)s, %(wants)s)
    ON CONFLICT DO NOTHING
"""
MARKS = """
SELECT extract(epoch FROM at - (SELECT started_at FROM holdfast.campaigns WHERE id = %(id)s))
           ::float8 AS seconds, has, wants
  FROM holdfast.campaign_marks WHERE campaign_id = %(id)s ORDER BY at
"""


@dataclass(frozen=True, slots=True)
class Mark:
    """How many rows had the new version so long after the start, of how many."""

    seconds: float
    has: int
    wants: int


def is_mark_due(tx: Tx, campaign_id: int, *, seconds: float) -> bool:
    """Whether how far a campaign is was last kept so long ago."""
    row = tx.execute(IS_MARK_DUE, {"id": campaign_id, "seconds": seconds}).fetchone()
    return bool(row and row["is_due"])


def mark(tx: Tx, campaign_id: int, has: int, wants: int) -> None:
    """Keep how far a campaign is now."""
    tx.execute(MARK, {"id": campaign_id, "has": has, "wants": wants})


def marks(tx: Tx, campaign_id: int) -> list[Mark]:
    """Return how far a campaign was, over its time."""
    with tx.cursor(row_factory=class_row(Mark)) as cursor:
        return cursor.execute(MARKS, {"id": campaign_id}).fetchall()
