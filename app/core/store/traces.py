"""Trace jobs: their request, their segments under a lease, and the manifest of their result.

Whoever changes a segment locks the row of its job first.
"""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import datetime
from typing import Any

from psycopg.rows import class_row
from psycopg.types.json import Jsonb

from app.core.errors import ErrorClass, LeaseLost
from app.core.model import Page, Reading
from app.core.store import jobs
from app.core.store.database import Tx

MOST_KILLS = 2
"""A segment whose process died is read once more; a second death in it is the end of the job."""

MOST_LOSSES = 2
"""The same for a segment whose pages vanished from Redis."""

INSERT = """
INSERT INTO holdfast.trace_jobs
       (job_id, profile, params, domains, is_partial, ids, ids_sha256, cid_count, source)
VALUES (%(job_id)s, %(profile)s, %(params)s, %(domains)s, %(is_partial)s, %(ids)s, %(ids_sha256)s,
        %(cid_count)s, %(source)s)
"""
INSERT_SEGMENTS = """
INSERT INTO holdfast.trace_segments (job_id, segment, first_id, last_id, cids)
SELECT %(job_id)s, row_number() OVER (), s.first_id, s.last_id, s.cids
  FROM unnest(%(first_ids)s::text[], %(last_ids)s::text[], %(cids)s::integer[])
       AS s(first_id, last_id, cids)
"""


@dataclass(frozen=True, slots=True)
class NewTrace:
    """An accepted request; its ids are sorted, one a line, and compressed."""

    job_id: str
    profile: str
    params: dict[str, Any]
    domains: Sequence[str]
    is_partial: bool
    ids: bytes
    ids_sha256: bytes
    cid_count: int
    source: str


def insert(tx: Tx, trace: NewTrace, segments: Sequence[Sequence[str]]) -> None:
    """Make the trace half of a job, and the segments that its ids are read in."""
    values = {**asdict(trace), "params": Jsonb(trace.params), "domains": list(trace.domains)}
    tx.execute(INSERT, values)
    bounds = {
        "job_id": trace.job_id,
        "first_ids": [ids[0] for ids in segments],
        "last_ids": [ids[-1] for ids in segments],
        "cids": [len(ids) for ids in segments],
    }
    tx.execute(INSERT_SEGMENTS, bounds)


FIND = """
SELECT profile, params, domains, is_partial, cid_count, source, as_of
  FROM holdfast.trace_jobs WHERE job_id = %(job_id)s
"""
IDS = "SELECT ids FROM holdfast.trace_jobs WHERE job_id = %(job_id)s"


@dataclass(frozen=True, slots=True)
class Trace:
    """What a trace job asks for; without its ids, which are large."""

    profile: str
    params: dict[str, Any]
    domains: list[str]
    is_partial: bool
    cid_count: int
    source: str
    as_of: datetime


def find(tx: Tx, job_id: str) -> Trace:
    """Return what a trace job asks for; there is one for each job of that kind."""
    with tx.cursor(row_factory=class_row(Trace)) as cursor:
        found = cursor.execute(FIND, {"job_id": job_id}).fetchone()
    assert found is not None, job_id  # noqa: S101 - inserted with the job
    return found


def ids(tx: Tx, job_id: str) -> bytes:
    """Return the ids of a trace job as they were stored."""
    row = tx.execute(IDS, {"job_id": job_id}).fetchone()
    return bytes(row["ids"]) if row else b""


# ---- the lease ----------------------------------------------------------------------------------

# A lease that ran out is no free job: the sweeper names the death first.
NEXT_SEGMENT = """
SELECT s.segment, s.cids, j.run, nextval('holdfast.trace_lease_tokens') AS lease_token,
       (SELECT coalesce(sum(before.cids), 0) FROM holdfast.trace_segments before
         WHERE before.job_id = s.job_id AND before.segment < s.segment) AS first_cid,
       (SELECT coalesce(sum(kept.cids), 0) FROM holdfast.trace_segments kept
         WHERE kept.job_id = s.job_id AND kept.status IN ('done', 'failed')) AS cids_before,
       (SELECT coalesce(sum((page.value ->> 1)::bigint), 0)
          FROM holdfast.trace_segments kept, jsonb_each(kept.pages) AS domain,
               jsonb_array_elements(domain.value) AS page
         WHERE kept.job_id = s.job_id AND kept.status IN ('done', 'failed')) AS bytes_before,
       extract(epoch FROM now() - coalesce(j.started_at, now()))::float8 AS seconds_running
  FROM holdfast.jobs j
  JOIN holdfast.trace_jobs t ON t.job_id = j.id
  JOIN holdfast.trace_segments s ON s.job_id = j.id
 WHERE j.id = %(job_id)s AND j.finished_at IS NULL AND j.cancelled_at IS NULL
   AND t.lease_token IS NULL AND t.next_attempt_at <= now() AND s.status = 'pending'
 ORDER BY s.segment
 LIMIT 1
"""
TAKE_SEGMENT = """
UPDATE holdfast.trace_segments
   SET status = 'processing', attempts = attempts + 1, run = %(run)s,
       lease_token = %(lease_token)s, read_from = now(), read_to = NULL, rows = '{}',
       seconds = '{}', pages = '{}', failures = '{}', error_class = NULL, last_error = NULL
 WHERE job_id = %(job_id)s AND segment = %(segment)s
"""
TAKE_LEASE = """
UPDATE holdfast.trace_jobs
   SET segment = %(segment)s, lease_token = %(lease_token)s, leased_by = %(leased_by)s,
       lease_until = now() + make_interval(secs => %(lease_seconds)s),
       waits_for = NULL, progress = NULL
 WHERE job_id = %(job_id)s
"""
START = """
UPDATE holdfast.jobs SET state = 'running', started_at = coalesce(started_at, now())
 WHERE id = %(job_id)s AND state = 'queued'
"""


@dataclass(frozen=True, slots=True)
class Claim:
    """A segment that this process may read until its lease ends."""

    job_id: str
    segment: int
    run: int
    lease_token: int
    first_cid: int
    """Where its ids begin among those of the job."""
    cids: int
    cids_before: int
    """Ids of the segments that are read already."""
    bytes_before: int
    """What their pages take, compressed."""
    seconds_running: float
    """How long the job runs already."""


def claim(tx: Tx, job_id: str, *, leased_by: str, lease_seconds: float) -> Claim | None:
    """Take the next segment of a job under a lease; None where nothing of it is due."""
    jobs.lock(tx, job_id)
    row = tx.execute(NEXT_SEGMENT, {"job_id": job_id}).fetchone()
    if row is None:
        return None
    found = Claim(job_id=job_id, **row)
    values = {**asdict(found), "leased_by": leased_by, "lease_seconds": lease_seconds}
    tx.execute(TAKE_SEGMENT, values)
    tx.execute(TAKE_LEASE, values)
    tx.execute(START, values)
    return found


EXTEND = """
UPDATE holdfast.trace_jobs
   SET lease_until = greatest(lease_until, now() + make_interval(secs => %(lease_seconds)s))
 WHERE job_id = %(job_id)s AND lease_token = %(lease_token)s
"""
NOTE_PROGRESS = """
UPDATE holdfast.trace_jobs
   SET progress = %(progress)s, furthest_cids = greatest(furthest_cids, %(cids)s)
 WHERE job_id = %(job_id)s AND lease_token = %(lease_token)s
"""


def extend(tx: Tx, claim: Claim, *, lease_seconds: float) -> None:
    """Prolong a lease; one that was lost stays lost, which its settle finds."""
    tx.execute(EXTEND, {**asdict(claim), "lease_seconds": lease_seconds})


def note_progress(tx: Tx, claim: Claim, *, cids: int, progress: Mapping[str, Any]) -> bool:
    """Record how far the segment in hand is; False where the lease is lost."""
    values = {**asdict(claim), "cids": cids, "progress": Jsonb(progress)}
    return tx.execute(NOTE_PROGRESS, values).rowcount == 1


SETTLE = """
UPDATE holdfast.trace_segments
   SET status = %(status)s, rows = %(rows)s, seconds = %(seconds)s, pages = %(pages)s,
       failures = %(failures)s, error_class = %(error_class)s, last_error = %(message)s,
       read_to = now()
 WHERE job_id = %(job_id)s AND segment = %(segment)s AND lease_token = %(lease_token)s
   AND status = 'processing'
"""
LEAVE_LEASE = """
UPDATE holdfast.trace_jobs
   SET segment = NULL, lease_token = NULL, lease_until = NULL, leased_by = NULL, progress = NULL,
       furthest_cids = greatest(furthest_cids, %(cids)s),
       waits_for = %(waits_for)s,
       next_attempt_at = now() + make_interval(secs => %(after_seconds)s)
 WHERE job_id = %(job_id)s AND lease_token = %(lease_token)s
"""
NOTE_ERROR = """
INSERT INTO holdfast.segment_errors (job_id, segment, run, error_class, message, leased_by)
VALUES (%(job_id)s, %(segment)s, %(run)s, %(error_class)s, %(message)s, %(leased_by)s)
"""
# A job that may not be partial ends with its first failed segment: what was not read is not read.
CANCEL_REST = """
UPDATE holdfast.trace_segments SET status = 'cancelled'
 WHERE job_id = %(job_id)s AND status = 'pending'
"""


def settle(tx: Tx, claim: Claim, reading: Reading, *, leased_by: str, ends_job: bool) -> None:
    """Write what came of a segment, and give the lease back.

    `ends_job`: no further segment is to be read. Raises LeaseLost where it is somebody else's.
    """
    error = reading.error
    values = {
        **asdict(claim),
        **{name: Jsonb(getattr(reading, name)) for name in ("rows", "seconds", "pages")},
        "failures": Jsonb(reading.failures),
        "status": "failed" if error else "done",
        "error_class": error.error_class if error else None,
        "message": error.message if error else None,
        "leased_by": leased_by,
    }
    jobs.lock(tx, claim.job_id)
    if tx.execute(SETTLE, values).rowcount != 1:
        raise LeaseLost
    _leave(tx, claim, cids=claim.cids_before + claim.cids)
    if error:
        tx.execute(NOTE_ERROR, values)
    if ends_job:
        tx.execute(CANCEL_REST, values)


def _leave(
    tx: Tx, claim: Claim, *, cids: int, after_seconds: float = 0.0, waits_for: str | None = None
) -> None:
    values = {"after_seconds": after_seconds, "waits_for": waits_for, "cids": cids}
    if tx.execute(LEAVE_LEASE, {**asdict(claim), **values}).rowcount != 1:
        raise LeaseLost


# A job that was cancelled meanwhile has no use for it.
RELEASE = """
UPDATE holdfast.trace_segments s
   SET status = CASE WHEN j.cancelled_at IS NULL THEN 'pending' ELSE 'cancelled' END,
       attempts = s.attempts - 1
  FROM holdfast.jobs j
 WHERE s.job_id = %(job_id)s AND s.segment = %(segment)s AND s.lease_token = %(lease_token)s
   AND s.status = 'processing' AND j.id = s.job_id
"""


def release(tx: Tx, claim: Claim, *, after_seconds: float, waits_for: str | None = None) -> None:
    """Give a segment back as if it had not been taken; raises LeaseLost."""
    jobs.lock(tx, claim.job_id)
    tx.execute(RELEASE, asdict(claim))
    _leave(tx, claim, cids=0, after_seconds=after_seconds, waits_for=waits_for)


# ---- deaths -------------------------------------------------------------------------------------

DEAD = """
SELECT t.job_id, t.segment, j.run, t.lease_token, t.leased_by, t.is_partial,
       j.cancelled_at IS NOT NULL AS is_cancelled
  FROM holdfast.trace_jobs t
  JOIN holdfast.jobs j ON j.id = t.job_id
 WHERE t.lease_token IS NOT NULL
   AND CASE WHEN %(leased_by)s::text IS NULL THEN t.lease_until < now()
            ELSE t.leased_by = %(leased_by)s END
 ORDER BY t.lease_until
 LIMIT 1
   FOR UPDATE OF j SKIP LOCKED
"""
RECOVER = """
UPDATE holdfast.trace_segments
   SET status = CASE WHEN kills + 1 >= %(most)s THEN 'failed'
                     WHEN %(is_cancelled)s THEN 'cancelled' ELSE 'pending' END,
       kills = kills + 1, error_class = %(error_class)s, last_error = %(message)s
 WHERE job_id = %(job_id)s AND segment = %(segment)s AND lease_token = %(lease_token)s
   AND status = 'processing'
RETURNING status
"""
FREE = """
UPDATE holdfast.trace_jobs
   SET segment = NULL, lease_token = NULL, lease_until = NULL, leased_by = NULL, progress = NULL,
       next_attempt_at = now()
 WHERE job_id = %(job_id)s
"""


def recover_expired(tx: Tx) -> str | None:
    """End one lease that ran out, naming the death; return who held it, None if there is none."""
    return _recover(
        tx,
        leased_by=None,
        error_class=ErrorClass.LEASE_EXPIRED,
        message="the lease ran out: its worker died, hung, or lost Postgres",
    )


def recover_dead(tx: Tx, *, leased_by: str, error_class: ErrorClass, message: str) -> bool:
    """End the lease of a bell whose horse is known to be dead, naming the death."""
    found = _recover(tx, leased_by=leased_by, error_class=error_class, message=message)
    return found is not None


def _recover(tx: Tx, *, leased_by: str | None, error_class: ErrorClass, message: str) -> str | None:
    with tx.transaction():
        dead = tx.execute(DEAD, {"leased_by": leased_by}).fetchone()
        if dead is None:
            return None
        values = {**dead, "error_class": error_class, "message": message, "most": MOST_KILLS}
        row = tx.execute(RECOVER, values).fetchone()
        tx.execute(FREE, values)
        tx.execute(NOTE_ERROR, values)
        if row and row["status"] == "failed" and not dead["is_partial"]:
            tx.execute(CANCEL_REST, values)
    return str(dead["leased_by"])


# ---- the end, and another beginning -------------------------------------------------------------

CANCEL = """
UPDATE holdfast.trace_segments SET status = 'cancelled'
 WHERE job_id = %(job_id)s AND status = 'pending'
"""


def cancel(tx: Tx, job_id: str) -> int:
    """Cancel the segments that nobody reads; return how many. The job's row is locked."""
    return tx.execute(CANCEL, {"job_id": job_id}).rowcount


SEGMENTS = """
SELECT segment, first_id, last_id, cids, status, attempts, run, lease_token, rows, seconds, pages,
       failures, read_from, read_to, error_class, last_error, losses
  FROM holdfast.trace_segments
 WHERE job_id = %(job_id)s AND segment > %(after)s
   AND (%(status)s::text IS NULL OR status = %(status)s)
 ORDER BY segment
 LIMIT %(limit)s
"""
ALL = 2**31 - 1


@dataclass(frozen=True, slots=True)
class Segment:
    """One segment as it stands."""

    segment: int
    first_id: str
    last_id: str
    cids: int
    status: str
    attempts: int
    run: int | None
    lease_token: int | None
    rows: dict[str, int]
    seconds: dict[str, float]
    pages: dict[str, list[Page]]
    failures: dict[str, str]
    read_from: datetime | None
    read_to: datetime | None
    error_class: str | None
    last_error: str | None
    losses: int


def segments(
    tx: Tx, job_id: str, *, after: int = 0, limit: int = ALL, status: str | None = None
) -> list[Segment]:
    """Return segments of a job in their order."""
    values = {"job_id": job_id, "after": after, "limit": limit, "status": status}
    return [_segment(row) for row in tx.execute(SEGMENTS, values)]


def _segment(row: dict[str, Any]) -> Segment:
    pages = {name: [Page(*page) for page in pages] for name, pages in row.pop("pages").items()}
    return Segment(**row, pages=pages)


ERRORS = """
SELECT segment, run, at, error_class, message
  FROM holdfast.segment_errors
 WHERE job_id = %(job_id)s AND segment = ANY(%(segments)s::integer[])
 ORDER BY at
"""
SUMMARY = """
SELECT error_class, count(*) AS count, min(last_error) AS sample
  FROM holdfast.trace_segments
 WHERE job_id = %(job_id)s AND status = 'failed'
 GROUP BY error_class
 ORDER BY count(*) DESC, error_class
"""


def errors(tx: Tx, job_id: str, segments: Sequence[int]) -> dict[int, list[dict[str, Any]]]:
    """Return what went wrong in segments, oldest first."""
    found: dict[int, list[dict[str, Any]]] = {}
    for row in tx.execute(ERRORS, {"job_id": job_id, "segments": list(segments)}):
        found.setdefault(row.pop("segment"), []).append(row)
    return found


def summary(tx: Tx, job_id: str) -> list[dict[str, Any]]:
    """Sum up why segments of a job failed, most frequent first."""
    return tx.execute(SUMMARY, {"job_id": job_id}).fetchall()


# What a finisher has decided holds only for what it has seen.
READY = """
SELECT j.cancelled_at IS NOT NULL AS is_cancelled, t.is_partial
  FROM holdfast.jobs j
  JOIN holdfast.trace_jobs t ON t.job_id = j.id
 WHERE j.id = %(job_id)s AND j.finished_at IS NULL AND t.lease_token IS NULL
   AND NOT EXISTS (SELECT FROM holdfast.trace_segments s
                    WHERE s.job_id = j.id AND s.status IN ('pending', 'processing'))
"""
KEEP_MANIFEST = """
UPDATE holdfast.trace_jobs SET manifest = %(manifest)s WHERE job_id = %(job_id)s
"""
MANIFEST = "SELECT manifest FROM holdfast.trace_jobs WHERE job_id = %(job_id)s"


@dataclass(frozen=True, slots=True)
class Ready:
    """A job of which nothing is open any more."""

    is_cancelled: bool
    is_partial: bool


def ready(tx: Tx, job_id: str) -> Ready | None:
    """Return how a job ends, where all its segments have ended and it has not."""
    row = tx.execute(READY, {"job_id": job_id}).fetchone()
    return Ready(**row) if row else None


def keep_manifest(tx: Tx, job_id: str, manifest: Mapping[str, Any] | None) -> None:
    """Keep what the result consists of, in the transaction that ends the job."""
    value = None if manifest is None else Jsonb(manifest)
    tx.execute(KEEP_MANIFEST, {"job_id": job_id, "manifest": value})


def manifest(tx: Tx, job_id: str) -> dict[str, Any] | None:
    """Return what the result of a job consists of; None where it has none."""
    row = tx.execute(MANIFEST, {"job_id": job_id}).fetchone()
    return row["manifest"] if row else None


LOSE = """
UPDATE holdfast.trace_segments
   SET status = CASE WHEN status = 'failed' OR losses + 1 >= %(most)s THEN 'failed'
                     ELSE 'pending' END,
       losses = losses + 1, error_class = %(error_class)s, last_error = %(message)s,
       rows = '{}', seconds = '{}', pages = '{}', failures = '{}'
 WHERE job_id = %(job_id)s AND segment = ANY(%(segments)s::integer[])
   AND status IN ('done', 'failed')
RETURNING segment, run, %(error_class)s AS error_class, %(message)s AS message,
          NULL AS leased_by, job_id, status
"""


def lose(tx: Tx, job_id: str, segments: Sequence[int]) -> None:
    """Have segments read once more whose pages vanished from Redis; a second time they fail."""
    values = {
        "job_id": job_id,
        "segments": list(segments),
        "most": MOST_LOSSES,
        "error_class": ErrorClass.RESULT_LOST,
        "message": "pages of the result vanished from Redis: it was emptied, or evicts keys",
    }
    for row in tx.execute(LOSE, values).fetchall():
        tx.execute(NOTE_ERROR, row)


REOPEN_SEGMENTS = """
UPDATE holdfast.trace_segments
   SET status = 'pending', kills = 0, losses = 0, rows = '{}', seconds = '{}', pages = '{}',
       failures = '{}'
 WHERE job_id = %(job_id)s AND segment = ANY(%(segments)s::integer[])
"""
RESTART = "UPDATE holdfast.jobs SET started_at = NULL WHERE id = %(job_id)s"
RESET = """
UPDATE holdfast.trace_jobs
   SET next_attempt_at = now(), waits_for = NULL, progress = NULL, furthest_cids = 0,
       manifest = NULL
 WHERE job_id = %(job_id)s
"""


def reopen(tx: Tx, job_id: str, segments: Sequence[int]) -> None:
    """Begin another run of a final job, in which these segments are read again."""
    values = {"job_id": job_id, "segments": list(segments)}
    jobs.reopen(tx, job_id)
    tx.execute(RESTART, values)
    tx.execute(RESET, values)
    tx.execute(REOPEN_SEGMENTS, values)


# ---- what is due --------------------------------------------------------------------------------

DUE = """
SELECT j.id
  FROM holdfast.jobs j
  JOIN holdfast.trace_jobs t ON t.job_id = j.id
 WHERE j.finished_at IS NULL AND j.cancelled_at IS NULL AND t.lease_token IS NULL
   AND t.next_attempt_at <= now()
   AND EXISTS (SELECT FROM holdfast.trace_segments s
                WHERE s.job_id = j.id AND s.status = 'pending')
 ORDER BY j.priority DESC, j.created_at
"""
COMPLETE = """
SELECT j.id
  FROM holdfast.jobs j
  JOIN holdfast.trace_jobs t ON t.job_id = j.id
 WHERE j.finished_at IS NULL AND t.lease_token IS NULL
   AND NOT EXISTS (SELECT FROM holdfast.trace_segments s
                    WHERE s.job_id = j.id AND s.status IN ('pending', 'processing'))
"""


def due(tx: Tx) -> list[str]:
    """Return the open jobs with a segment that could be read now, and that nobody reads."""
    return [str(row["id"]) for row in tx.execute(DUE)]


def complete(tx: Tx) -> list[str]:
    """Return the open jobs whose segments have all ended."""
    return [str(row["id"]) for row in tx.execute(COMPLETE)]


OPEN_JOBS = """
SELECT count(*) AS jobs FROM holdfast.jobs
 WHERE kind = 'trace' AND finished_at IS NULL AND client = %(client)s
"""


def open_jobs(tx: Tx, client: str) -> int:
    """Return how many trace jobs of a client are not final."""
    row = tx.execute(OPEN_JOBS, {"client": client}).fetchone()
    return int(row["jobs"]) if row else 0


# ---- what is shown ------------------------------------------------------------------------------

FACTS = """
SELECT t.profile, t.domains, t.cid_count, t.source, t.segment, t.waits_for, t.next_attempt_at,
       t.next_attempt_at > now() AS is_later, t.progress, t.furthest_cids,
       extract(epoch FROM now() - j.started_at)::float8 AS seconds_running,
       s.segments, s.cids_read, s.cids_now,
       (SELECT coalesce(jsonb_object_agg(d.domain, d.rows), '{}')
          FROM (SELECT each.key AS domain, sum(each.value::bigint) AS rows
                  FROM holdfast.trace_segments kept, jsonb_each_text(kept.rows) AS each
                 WHERE kept.job_id = t.job_id AND kept.status IN ('done', 'failed')
                 GROUP BY each.key) AS d) AS rows,
       (SELECT coalesce(sum(each.value::bigint), 0)::bigint
          FROM holdfast.trace_segments kept, jsonb_each_text(kept.rows) AS each
         WHERE kept.job_id = t.job_id AND kept.status IN ('done', 'failed')
           AND kept.run = j.run) AS rows_of_run
  FROM holdfast.trace_jobs t
  JOIN holdfast.jobs j ON j.id = t.job_id
 CROSS JOIN LATERAL (
       SELECT count(*) AS segments,
              coalesce(sum(cids) FILTER (WHERE status IN ('done', 'failed')), 0) AS cids_read,
              coalesce(sum(cids) FILTER (WHERE status IN ('done', 'failed') AND run = j.run), 0)
                  AS cids_now
         FROM holdfast.trace_segments WHERE job_id = t.job_id) AS s
 WHERE t.job_id = %(job_id)s
"""


@dataclass(frozen=True, slots=True)
class Facts:
    """What is shown of a trace job beside what is shown of every job."""

    profile: str
    domains: list[str]
    cid_count: int
    source: str
    segment: int | None
    waits_for: str | None
    next_attempt_at: datetime
    is_later: bool
    progress: dict[str, Any] | None
    furthest_cids: int
    seconds_running: float | None
    segments: int
    cids_read: int
    cids_now: int
    """Of them, those that were read in this run."""
    rows: dict[str, int]
    rows_of_run: int


def facts(tx: Tx, job_id: str) -> Facts:
    """Return how far a trace job is."""
    row = tx.execute(FACTS, {"job_id": job_id}).fetchone()
    assert row is not None, job_id  # noqa: S101 - inserted with the job
    return Facts(**row)


# Over the last segments of this profile on this source, seconds an id costs in each domain.
COST = """
SELECT domain.key AS domain,
       percentile_cont(0.5) WITHIN GROUP (ORDER BY domain.value::float8 / s.cids) AS p50,
       percentile_cont(0.9) WITHIN GROUP (ORDER BY domain.value::float8 / s.cids) AS p90
  FROM (SELECT r.job_id, r.cids, r.seconds FROM holdfast.trace_segments r
          JOIN holdfast.trace_jobs t ON t.job_id = r.job_id
         WHERE r.status = 'done' AND t.profile = %(profile)s AND t.source = %(source)s
         ORDER BY r.read_to DESC LIMIT 100) AS s,
       jsonb_each_text(s.seconds) AS domain
 GROUP BY domain.key
"""


@dataclass(frozen=True, slots=True)
class Cost:
    """Seconds that one id costs."""

    p50: float
    p90: float


def cost(tx: Tx, *, profile: str, source: str, domains: Sequence[str]) -> Cost | None:
    """Return what an id of such a request has cost lately; None without history of each domain."""
    rows = tx.execute(COST, {"profile": profile, "source": source}).fetchall()
    known = {row["domain"]: row for row in rows}
    if not set(domains) <= set(known):
        return None
    return Cost(
        sum(float(known[name]["p50"]) for name in domains),
        sum(float(known[name]["p90"]) for name in domains),
    )


AHEAD = """
SELECT count(DISTINCT j.id) AS jobs, coalesce(sum(s.cids), 0)::bigint AS cids
  FROM holdfast.jobs j
  JOIN holdfast.trace_segments s ON s.job_id = j.id AND s.status IN ('pending', 'processing')
 WHERE j.finished_at IS NULL AND j.kind = 'trace' AND j.id <> %(job_id)s
"""


@dataclass(frozen=True, slots=True)
class Ahead:
    """Other trace work that is under way."""

    jobs: int
    cids: int


def ahead(tx: Tx, job_id: str) -> Ahead:
    """Return how much other trace work is open."""
    row = tx.execute(AHEAD, {"job_id": job_id}).fetchone()
    return Ahead(int(row["jobs"]), int(row["cids"])) if row else Ahead(0, 0)
