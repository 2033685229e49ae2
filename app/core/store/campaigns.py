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


# What was stored in the old version and the new one does not have, and nothing is on its way. The
# text is that of the old version's item, as long as the queue has it.
BEHIND = """
SELECT v.target_id, q.text_content AS text
  FROM holdfast.vectors v
  LEFT JOIN holdfast.vectors n
    ON n.target_table = v.target_table AND n.target_id = v.target_id
   AND n.embedding_version = %(to_version)s AND n.deleted_at IS NULL
  LEFT JOIN public.embedding_retry_queue o
    ON o.target_table = v.target_table AND o.target_id = v.target_id
   AND o.embedding_version = %(to_version)s
  LEFT JOIN public.embedding_retry_queue q
    ON q.target_table = v.target_table AND q.target_id = v.target_id
   AND q.embedding_version = %(from_version)s AND q.content_hash = v.content_hash
 WHERE v.target_table = %(target_table)s AND v.embedding_version = %(from_version)s
   AND v.deleted_at IS NULL AND v.stored_at >= %(since)s
   AND n.content_hash IS DISTINCT FROM v.content_hash
   AND (o.id IS NULL OR o.content_hash <> v.content_hash
        OR o.status NOT IN ('pending', 'processing', 'failed'))
 ORDER BY v.stored_at
 LIMIT %(limit)s
"""
NOW = "SELECT now() - interval '10 minutes' AS at"
CAUGHT_UP = "UPDATE holdfast.campaigns SET caught_up_to = %(at)s WHERE id = %(id)s"


def behind(tx: Tx, campaign: Campaign, *, limit: int) -> dict[str, str | None]:
    """Return rows whose newest text only the old version has, with that text where it is known.

    None left: what was looked at is not looked at again.
    """
    before = tx.execute(NOW).fetchone()
    values = {
        "target_table": campaign.target_table,
        "from_version": campaign.from_version,
        "to_version": campaign.to_version,
        "since": campaign.caught_up_to,
        "limit": limit,
    }
    found = {str(row["target_id"]): row["text"] for row in tx.execute(BEHIND, values)}
    if not found and before:
        tx.execute(CAUGHT_UP, {"id": campaign.id, "at": before["at"]})
    return found


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
FINISH = "UPDATE holdfast.campaigns SET finished_at = now() WHERE id = %(id)s"


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


MARK = """
INSERT INTO holdfast.campaign_marks (campaign_id, has, wants)
SELECT %(id)s, %(has)s, %(wants)s
 WHERE NOT EXISTS (SELECT FROM holdfast.campaign_marks
                    WHERE campaign_id = %(id)s
                      AND (at > now() - make_interval(secs => %(seconds)s)
                           OR (at = (SELECT max(at) FROM holdfast.campaign_marks
                                      WHERE campaign_id = %(id)s)
                               AND has = %(has)s AND wants = %(wants)s)))
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


def mark(tx: Tx, campaign_id: int, has: int, wants: int, *, seconds: float) -> None:
    """Keep how far a campaign is, unless that was done less than `seconds` ago."""
    tx.execute(MARK, {"id": campaign_id, "has": has, "wants": wants, "seconds": seconds})


def marks(tx: Tx, campaign_id: int) -> list[Mark]:
    """Return how far a campaign was, over its time."""
    with tx.cursor(row_factory=class_row(Mark)) as cursor:
        return cursor.execute(MARKS, {"id": campaign_id}).fetchall()
