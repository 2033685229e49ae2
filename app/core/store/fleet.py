"""The fleet: processes that live, backends that are paused, and how fast slices go."""

import random
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from datetime import datetime
from typing import Any, cast

from psycopg import errors as pg
from psycopg.rows import class_row
from psycopg.types.json import Jsonb

from app.core.store.database import Tx

BEAT = """
INSERT INTO holdfast.processes AS p (name, kind, queue, host, pid, alive_until, counters)
VALUES (%(name)s, %(kind)s, %(queue)s, %(host)s, %(pid)s,
        now() + make_interval(secs => %(seconds)s), %(counters)s)
    ON CONFLICT (name) DO UPDATE
   SET heartbeat_at = now(), alive_until = excluded.alive_until, counters = excluded.counters
"""


@dataclass(frozen=True, slots=True)
class Process:
    """A worker or a sweeper, as it names itself."""

    name: str
    kind: str
    queue: str
    host: str
    pid: int


def beat(tx: Tx, process: Process, *, seconds: float, counters: dict[str, int]) -> None:
    """Say that a process lives, and that it is to be thought dead after `seconds`."""
    values = {**asdict(process), "seconds": seconds, "counters": Jsonb(counters)}
    tx.execute(BEAT, values)


LEAVE = "UPDATE holdfast.processes SET alive_until = now() WHERE name = %(name)s"


def leave(tx: Tx, name: str) -> None:
    """Say that a process has ended in order."""
    tx.execute(LEAVE, {"name": name})


ALIVE = """
SELECT kind, queue, count(*) AS processes
  FROM holdfast.processes
 WHERE alive_until > now()
 GROUP BY kind, queue
"""


@dataclass(frozen=True, slots=True)
class Alive:
    """How many workers serve each queue, and how many sweepers there are."""

    workers: dict[str, int]
    sweepers: int


def alive(tx: Tx) -> Alive:
    """Return who lives, by the heartbeats in Postgres."""
    rows = tx.execute(ALIVE).fetchall()
    workers = {row["queue"]: int(row["processes"]) for row in rows if row["kind"] == "worker"}
    sweepers = sum(int(row["processes"]) for row in rows if row["kind"] == "sweeper")
    return Alive(workers, sweepers)


PRUNE_PROCESSES = "DELETE FROM holdfast.processes WHERE alive_until < now() - interval '1 day'"
PRUNE_SLICES = """
DELETE FROM holdfast.slices
 WHERE ctid IN (SELECT ctid FROM holdfast.slices
                 WHERE at < now() - interval '1 hour' LIMIT %(limit)s)
"""

PRUNE_INCIDENTS = "DELETE FROM holdfast.incidents WHERE until < now() - interval '7 days'"


def prune(tx: Tx, *, limit: int) -> int:
    """Forget who and what is long gone, and a block of slices older than an hour."""
    gone = tx.execute(PRUNE_PROCESSES).rowcount + tx.execute(PRUNE_INCIDENTS).rowcount
    return gone + tx.execute(PRUNE_SLICES, {"limit": limit}).rowcount


COUNT_OLD = """
SELECT (SELECT count(*) FROM holdfast.processes WHERE alive_until < now() - interval '1 day')
       + (SELECT count(*) FROM holdfast.incidents WHERE until < now() - interval '7 days')
       + (SELECT count(*) FROM holdfast.slices WHERE at < now() - interval '1 hour') AS rows
"""


def old(tx: Tx) -> int:
    """Count what `prune` would delete in all its blocks."""
    row = tx.execute(COUNT_OLD).fetchone()
    return int(row["rows"]) if row else 0


# ---- backends --------------------------------------------------------------------------------

BACKENDS = """
SELECT model, paused_since, greatest(paused_until, probe_until) AS paused_until,
       coalesce(greatest(paused_until, probe_until) > now(), false) AS is_paused,
       tries, error_class, message,
       -- Doubled for each ten minutes since it was found, so that a limit is not kept for ever.
       least(1000000, max_items * power(2, floor(extract(epoch FROM now() - limited_at) / 600)))
           ::integer AS max_items,
       coalesce(last_ok_at > now() - interval '5 minutes' AND paused_since IS NULL, false)
           AS is_warm, digest
  FROM holdfast.backends
 WHERE name = %(name)s
"""


@dataclass(frozen=True, slots=True)
class Backend:
    """An embedder and a model: paused or not, loaded or not, and the most items it takes."""

    model: str
    paused_since: datetime | None
    paused_until: datetime | None
    is_paused: bool
    tries: int
    error_class: str | None
    message: str | None
    max_items: int | None
    is_warm: bool
    digest: str | None = None
    """What exactly was behind the model's name when it was last asked for."""


def backends(tx: Tx, name: str) -> dict[str, Backend]:
    """Return what is known of a backend, by model."""
    with tx.cursor(row_factory=class_row(Backend)) as cursor:
        return {each.model: each for each in cursor.execute(BACKENDS, {"name": name})}


# The outage gets its row with its first pause, and is the same one until it ends.
PAUSE = """
WITH paused AS (
    INSERT INTO holdfast.backends AS b
           (name, model, paused_since, paused_until, tries, error_class, message)
    VALUES (%(name)s, %(model)s, now(), now() + make_interval(secs => %(seconds)s), 1,
            %(error_class)s, %(message)s)
        ON CONFLICT (name, model) DO UPDATE
       SET paused_since = coalesce(b.paused_since, now()),
           paused_until = greatest(b.paused_until, excluded.paused_until), probe_until = NULL,
           -- All who had a call under way see the same outage: it counts once.
           tries = b.tries + (b.paused_since IS NULL OR b.probe_until IS NOT NULL)::integer,
           error_class = excluded.error_class, message = excluded.message
    RETURNING b.paused_since
), incident AS (
    INSERT INTO holdfast.incidents AS i (backend, model, error_class, reason, since)
    SELECT %(name)s, %(model)s, %(error_class)s, %(message)s, paused_since FROM paused
        ON CONFLICT (backend, model) WHERE until IS NULL DO UPDATE
       SET error_class = excluded.error_class, reason = excluded.reason,
           since = greatest(i.since, excluded.since)
)
SELECT paused_since = now() AS is_new FROM paused
"""


def pause(tx: Tx, name: str, model: str, *, seconds: float, error_class: str, message: str) -> bool:
    """Leave a backend alone for a time, as an incident; return whether it was not paused before."""
    values = {
        "name": name,
        "model": model,
        "seconds": seconds,
        "error_class": error_class,
        "message": message,
    }
    row = tx.execute(PAUSE, values).fetchone()
    return bool(row and row["is_new"])


# Half open: of all who find the pause over, one may try, the others see a pause of a few seconds.
TAKE_PROBE = """
UPDATE holdfast.backends
   SET probe_until = now() + make_interval(secs => %(seconds)s)
 WHERE name = %(name)s AND model = %(model)s
   AND paused_until <= now() AND (probe_until IS NULL OR probe_until <= now())
"""


def take_probe(tx: Tx, name: str, model: str, *, seconds: float) -> bool:
    """Take the right to try a backend whose pause is over; False where somebody else has it."""
    values = {"name": name, "model": model, "seconds": seconds}
    return tx.execute(TAKE_PROBE, values).rowcount == 1


EXTEND_PROBE = """
UPDATE holdfast.backends
   SET probe_until = now() + make_interval(secs => %(seconds)s)
 WHERE name = %(name)s AND model = %(model)s AND probe_until IS NOT NULL
"""
LEAVE_PROBE = """
UPDATE holdfast.backends SET probe_until = NULL WHERE name = %(name)s AND model = %(model)s
"""


def extend_probe(tx: Tx, name: str, model: str, *, seconds: float) -> None:
    """Prolong the right to try a backend, while the try goes on."""
    tx.execute(EXTEND_PROBE, {"name": name, "model": model, "seconds": seconds})


def leave_probe(tx: Tx, name: str, model: str) -> None:
    """Give back the right to try a backend, unused."""
    tx.execute(LEAVE_PROBE, {"name": name, "model": model})


# A pause that somebody else asked for meanwhile goes on: what answers now was sent before it.
RESUME = """
WITH resumed AS (
    INSERT INTO holdfast.backends AS b (name, model, last_ok_at)
    VALUES (%(name)s, %(model)s, now())
        ON CONFLICT (name, model) DO UPDATE
       SET last_ok_at = now(), paused_since = NULL, paused_until = NULL, probe_until = NULL,
           tries = 0, error_class = NULL, message = NULL
     WHERE b.paused_until IS NULL OR b.paused_until <= now()
    RETURNING b.name, b.model
)
UPDATE holdfast.incidents i
   SET until = now()
  FROM resumed r
 WHERE i.backend = r.name AND i.model = r.model AND i.until IS NULL
"""


def note_ok(tx: Tx, name: str, model: str) -> None:
    """Record that a backend answered rightly: its outage is over, and its model is loaded."""
    tx.execute(RESUME, {"name": name, "model": model})


# Open ones first, then what ended in the last seven days. What waits comes from the counts of open
# jobs: of a job with several models never more than it brought for this one.
INCIDENTS = """
SELECT i.id, i.backend, i.model, i.error_class, i.reason, i.since, i.until,
       CASE WHEN i.until IS NULL THEN greatest(b.paused_until, b.probe_until) END AS next_try_at,
       CASE WHEN i.until IS NOT NULL OR i.backend <> %(backend)s THEN 0 ELSE (
           SELECT coalesce(sum(least(m.items, c.open)), 0)
             FROM holdfast.jobs j
             JOIN holdfast.job_models m ON m.job_id = j.id AND m.model = i.model
            CROSS JOIN LATERAL (SELECT sum(pending + processing) AS open
                                  FROM holdfast.job_counts WHERE job_id = j.id) AS c
            WHERE j.finished_at IS NULL AND (%(client)s::text IS NULL OR j.client = %(client)s)
       ) END::bigint AS items_waiting
  FROM holdfast.incidents i
  LEFT JOIN holdfast.backends b ON b.name = i.backend AND b.model = i.model
 WHERE (i.backend = %(backend)s OR i.backend = ANY(%(sinks)s::text[]))
   AND coalesce(i.until, 'infinity') > now() - interval '7 days'
   AND (%(before_id)s::bigint IS NULL
        OR (coalesce(i.until, 'infinity'), i.id)
           < (coalesce(%(before_at)s::timestamptz, 'infinity'), %(before_id)s))
 ORDER BY coalesce(i.until, 'infinity') DESC, i.id DESC
 LIMIT %(limit)s
"""


# Row by row, so only while a sink's outage lasts and an admin asks.
WAITING_FOR_TABLE = """
SELECT count(*) AS items
  FROM public.embedding_retry_queue
 WHERE status = 'pending' AND target_table || ' ' || embedding_version = %(label)s
"""
WAITING_FOR_SINK = """
SELECT count(*) AS items
  FROM holdfast.item_sinks s
  JOIN holdfast.vectors v ON v.id = s.vector_id
 WHERE s.sink = %(sink)s AND s.status = 'pending'
   AND %(label)s IN ('', v.target_table || ' ' || v.embedding_version)
"""


@dataclass(frozen=True, slots=True)
class Incident:
    """One outage of a backend and model, as long as it lasts and for a week after."""

    id: int
    backend: str
    model: str
    error_class: str
    reason: str
    since: datetime
    until: datetime | None
    next_try_at: datetime | None
    items_waiting: int


@dataclass(frozen=True, slots=True)
class IncidentFilter:
    """Which outages are listed: a backend's, and whose items are counted as waiting."""

    backend: str
    sinks: Sequence[str] = ()
    """Those whose outages are listed too; the first is the primary."""
    client: str | None = None
    """None: everybody's."""
    before_at: datetime | None = None
    before_id: int | None = None


def incidents(tx: Tx, wanted: IncidentFilter, *, limit: int) -> list[Incident]:
    """Return outages: open ones first, then those that ended lately, each newest first."""
    values = {**asdict(wanted), "sinks": list(wanted.sinks), "limit": limit}
    with tx.cursor(row_factory=class_row(Incident)) as cursor:
        found = cursor.execute(INCIDENTS, values).fetchall()
    return [_with_waiting(tx, wanted, each) for each in found]


def _with_waiting(tx: Tx, wanted: IncidentFilter, incident: Incident) -> Incident:
    """Count what waits for a sink while its outage lasts."""
    if incident.until is not None or incident.backend not in wanted.sinks:
        return incident
    is_primary = incident.backend == wanted.sinks[0]
    values = {"sink": incident.backend, "label": incident.model}
    row = tx.execute(WAITING_FOR_TABLE if is_primary else WAITING_FOR_SINK, values).fetchone()
    return replace(incident, items_waiting=row["items"] if row else 0)


# Who comes first is believed; the others get that one to compare with.
KEEP_CANARY = """
INSERT INTO holdfast.canaries (model, text_hash, vector)
VALUES (%(model)s, %(text_hash)s, %(vector)s)
    ON CONFLICT (model, text_hash) DO NOTHING
"""
CANARY = """
SELECT vector FROM holdfast.canaries WHERE model = %(model)s AND text_hash = %(text_hash)s
"""
FORGET_CANARY = "DELETE FROM holdfast.canaries WHERE model = %(model)s"


def canary(tx: Tx, model: str, text_hash: bytes, vector: Sequence[float]) -> list[float]:
    """Return what a model once gave for a text: this vector where it is the first."""
    values = {"model": model, "text_hash": text_hash, "vector": list(vector)}
    tx.execute(KEEP_CANARY, values)
    row = tx.execute(CANARY, values).fetchone()
    return list(row["vector"]) if row else list(vector)


def forget_canary(tx: Tx, model: str) -> int:
    """Let the next vectors of a model be the first; return how many were forgotten."""
    return tx.execute(FORGET_CANARY, {"model": model}).rowcount


NOTE_DIGEST = """
WITH known AS (
    SELECT digest FROM holdfast.backends WHERE name = %(name)s AND model = %(model)s
), noted AS (
    INSERT INTO holdfast.backends AS b (name, model, digest)
    VALUES (%(name)s, %(model)s, %(digest)s)
        ON CONFLICT (name, model) DO UPDATE SET digest = excluded.digest
     WHERE b.digest IS DISTINCT FROM excluded.digest
)
SELECT digest FROM known
"""


def note_digest(tx: Tx, name: str, model: str, digest: str) -> str | None:
    """Keep what exactly is behind a model's name; return what was before, None at first."""
    values = {"name": name, "model": model, "digest": digest}
    row = tx.execute(NOTE_DIGEST, values).fetchone()
    return row["digest"] if row else None


REMEMBER_LIMIT = """
INSERT INTO holdfast.backends AS b (name, model, max_items, limited_at)
VALUES (%(name)s, %(model)s, %(max_items)s, now())
    ON CONFLICT (name, model) DO UPDATE
   SET max_items = excluded.max_items, limited_at = now()
"""


def remember_limit(tx: Tx, name: str, model: str, max_items: int) -> None:
    """Remember the most items that a backend takes in one call, for some time."""
    tx.execute(REMEMBER_LIMIT, {"name": name, "model": model, "max_items": max_items})


# Advisory locks of the session: they are free again when their holder dies.
TRY_CALL = "SELECT pg_try_advisory_lock(hashtext(%(name)s), %(slot)s) AS won"
WAIT_CALL = "SELECT pg_advisory_lock(hashtext(%(name)s), %(slot)s)"
LEAVE_CALL = "SELECT pg_advisory_unlock(hashtext(%(name)s), %(slot)s)"


def take_call(connection: Tx, name: str, *, most: int, seconds: float) -> int | None:
    """Wait for one of the calls that a backend is to have at a time; None where the time is up.

    It is held until leave_call, or as long as the connection lives.
    """
    ends = time.monotonic() + seconds
    slots = random.sample(range(most), most)
    while time.monotonic() < ends:
        for slot in slots:
            row = connection.execute(TRY_CALL, {"name": name, "slot": slot}).fetchone()
            if row and row["won"]:
                return slot
        with suppress(pg.LockNotAvailable):  # the session's time limit for a lock
            connection.execute(WAIT_CALL, {"name": name, "slot": slots[0]})
            return slots[0]
    return None


def leave_call(connection: Tx, name: str, slot: int) -> None:
    """Let the next one call."""
    connection.execute(LEAVE_CALL, {"name": name, "slot": slot})


# ---- rates -----------------------------------------------------------------------------------

NOTE_SLICE = """
INSERT INTO holdfast.slices (job_id, backend, items, seconds)
VALUES (%(job_id)s, %(backend)s, %(items)s, %(seconds)s)
"""


def note_slice(tx: Tx, *, job_id: str, backend: str, items: int, seconds: float) -> None:
    """Record how long a slice took, from its claim to its settle."""
    values = {"job_id": job_id, "backend": backend, "items": items, "seconds": seconds}
    tx.execute(NOTE_SLICE, values)


# Seconds an item costs one worker, over the last slices: median and ninth decile.
HISTORY = """
SELECT percentile_cont(0.5) WITHIN GROUP (ORDER BY cost) AS p50,
       percentile_cont(0.9) WITHIN GROUP (ORDER BY cost) AS p90
  FROM (SELECT seconds / items AS cost FROM holdfast.slices
         WHERE items > 0 ORDER BY at DESC LIMIT 200) AS recent
"""
RATE = """
SELECT coalesce(sum(items), 0)::float8
       / greatest(1.0, extract(epoch FROM now() - min(at - make_interval(secs => seconds)))::float8)
       AS per_second
  FROM holdfast.slices
 WHERE job_id = %(job_id)s AND at > now() - interval '30 seconds'
"""


@dataclass(frozen=True, slots=True)
class Cost:
    """Seconds that an item costs one worker."""

    p50: float
    p90: float


def cost(tx: Tx) -> Cost | None:
    """Return what recent items cost; None without history."""
    row = tx.execute(HISTORY).fetchone()
    return Cost(row["p50"], row["p90"]) if row and row["p50"] is not None else None


def rate(tx: Tx, job_id: str) -> float:
    """Return how many items of a job were finished per second lately."""
    row = tx.execute(RATE, {"job_id": job_id}).fetchone()
    return float(row["per_second"]) if row else 0.0


# When something happens by itself next: a retry comes due, a pause ends, a lease runs out. Two
# halves for the retries, as the claim has two indexes.
NEXT_EVENT = """
SELECT extract(epoch FROM min(at) - now())::float8 AS seconds
  FROM (SELECT min(greatest(paused_until, probe_until)) AS at FROM holdfast.backends
         WHERE greatest(paused_until, probe_until) > now()
        UNION ALL
        SELECT min(lease_until) FROM public.embedding_retry_queue WHERE status = 'processing'
        UNION ALL
        SELECT min(CASE WHEN t.lease_token IS NULL THEN t.next_attempt_at ELSE t.lease_until END)
          FROM holdfast.jobs j
          JOIN holdfast.trace_jobs t ON t.job_id = j.id
         WHERE j.finished_at IS NULL
           AND (t.lease_token IS NOT NULL OR t.next_attempt_at > now())
        UNION ALL
        SELECT min(n.next_attempt_at)
          FROM holdfast.jobs j
         CROSS JOIN LATERAL (
               (SELECT q.next_attempt_at FROM public.embedding_retry_queue q
                 WHERE q.job_id = j.id AND q.status = 'pending' AND q.kills = 0
                   AND q.next_attempt_at > now()
                 ORDER BY q.next_attempt_at LIMIT 1)
               UNION ALL
               (SELECT q.next_attempt_at FROM public.embedding_retry_queue q
                 WHERE q.job_id = j.id AND q.status = 'pending' AND q.kills > 0
                   AND q.next_attempt_at > now()
                 ORDER BY q.next_attempt_at LIMIT 1)) AS n
         WHERE j.finished_at IS NULL) AS events
"""


def next_event_seconds(tx: Tx) -> float | None:
    """Return in how many seconds a sweep has something to do again."""
    row = tx.execute(NEXT_EVENT).fetchone()
    return None if row is None else row["seconds"]


SWEEP_LOCK = 0x73776570  # "swep"
TRY_LEAD = "SELECT pg_try_advisory_lock(%(key)s) AS won"
LISTEN = "LISTEN holdfast"


def try_lead(connection: Tx) -> bool:
    """Become the one sweeper, as long as this connection lives; False where another is."""
    row = connection.execute(TRY_LEAD, {"key": SWEEP_LOCK}).fetchone()
    return bool(row and row["won"])


def listen(connection: Tx) -> None:
    """Hear the door inside the database."""
    connection.execute(LISTEN)


def wait_for_notice(connection: Tx, seconds: float) -> bool:
    """Wait until the door inside the database was used; False where the time passed first."""
    return any(True for _ in connection.notifies(timeout=seconds, stop_after=1))


NOW = "SELECT now() AS at"


def now(tx: Tx) -> datetime:
    """Return the time of this transaction."""
    row = tx.execute(NOW).fetchone()
    assert row is not None  # noqa: S101 - it has no FROM
    return cast("datetime", row["at"])


FACTS = """
SELECT current_setting('server_version') AS version, pg_is_in_recovery() AS is_replica
"""


def facts(tx: Tx) -> dict[str, Any]:
    """Return what a health check says of the server."""
    return tx.execute(FACTS).fetchone() or {}


MODELS = "SELECT DISTINCT model FROM holdfast.embedding_targets ORDER BY model"


def models(tx: Tx) -> Sequence[str]:
    """Return the models that the registered targets need."""
    return [str(row["model"]) for row in tx.execute(MODELS)]


# ---- numbers ---------------------------------------------------------------------------------

ADD_UP = """
WITH lines AS (
    DELETE FROM holdfast.tallies
    RETURNING claimed, done, skipped, retried, released, failed, processing_seconds
), added AS (
    SELECT sum(claimed) AS claimed, sum(done) AS done, sum(skipped) AS skipped,
           sum(retried) AS retried, sum(released) AS released, sum(failed) AS failed,
           sum(processing_seconds) AS processing_seconds, count(*) AS lines
      FROM lines
)
UPDATE holdfast.totals t
   SET claimed = t.claimed + a.claimed, done = t.done + a.done, skipped = t.skipped + a.skipped,
       retried = t.retried + a.retried, released = t.released + a.released,
       failed = t.failed + a.failed,
       processing_seconds = t.processing_seconds + a.processing_seconds
  FROM added a
 WHERE a.lines > 0
RETURNING a.lines
"""
TOTALS = """
SELECT sum(claimed)::float8 AS claimed, sum(done)::float8 AS done, sum(skipped)::float8 AS skipped,
       sum(retried)::float8 AS retried, sum(released)::float8 AS released,
       sum(failed)::float8 AS failed, sum(processing_seconds) AS processing_seconds
  FROM (SELECT claimed, done, skipped, retried, released, failed, processing_seconds
          FROM holdfast.totals
         UNION ALL
        SELECT claimed, done, skipped, retried, released, failed, processing_seconds
          FROM holdfast.tallies) AS both_of_them
"""


def add_up(tx: Tx) -> int:
    """Add the lines that changes of items have left to the totals; return how many there were."""
    row = tx.execute(ADD_UP).fetchone()
    return int(row["lines"]) if row else 0


def totals(tx: Tx) -> dict[str, float]:
    """Return what has become of items since the beginning, by outcome."""
    row = tx.execute(TOTALS).fetchone() or {}
    return {str(name): float(number or 0) for name, number in row.items()}


# Whoever holds an old snapshot keeps dead rows from being cleaned away, in every table. Since when
# a slot is left alone is told from Postgres 17 on; before, one far behind counts from the start.
OLDEST_SNAPSHOT = """
SELECT holder, seconds, remedy
  FROM (SELECT 'pid ' || pid || coalesce(' (' || nullif(application_name, '') || ')', '')
                   || ' of ' || coalesce(usename, 'nobody') AS holder,
               extract(epoch FROM now() - xact_start)::float8 AS seconds,
               'SELECT pg_terminate_backend(' || pid || ')' AS remedy
          FROM pg_stat_activity
         WHERE xact_start IS NOT NULL AND datname = current_database()
           AND (backend_xmin IS NOT NULL OR backend_xid IS NOT NULL)
           AND pid <> pg_backend_pid()
         UNION ALL
        SELECT 'prepared transaction ' || quote_literal(gid),
               extract(epoch FROM now() - prepared)::float8,
               'ROLLBACK PREPARED ' || quote_literal(gid)
          FROM pg_prepared_xacts
         WHERE database = current_database()
         UNION ALL
        SELECT 'replication slot ' || quote_literal(slot_name),
               extract(epoch FROM now() - coalesce(
                   (to_jsonb(s) ->> 'inactive_since')::timestamptz,
                   CASE WHEN age(s.xmin) > 1000000 THEN pg_postmaster_start_time() END))::float8,
               'SELECT pg_drop_replication_slot(' || quote_literal(slot_name) || ')'
          FROM pg_replication_slots s
         WHERE NOT s.active AND s.xmin IS NOT NULL) AS holders
 WHERE seconds IS NOT NULL
 ORDER BY seconds DESC
 LIMIT 1
"""


@dataclass(frozen=True, slots=True)
class Snapshot:
    """Who holds the oldest snapshot, for how long, and the statement that ends it."""

    holder: str
    seconds: float
    remedy: str


def oldest_snapshot(tx: Tx) -> Snapshot | None:
    """Return who keeps vacuum from its work for the longest; None where nobody does."""
    with tx.cursor(row_factory=class_row(Snapshot)) as cursor:
        return cursor.execute(OLDEST_SNAPSHOT).fetchone()


RAISE_ALERT = """
INSERT INTO holdfast.alerts AS a (name, message) VALUES (%(name)s, %(message)s)
    ON CONFLICT (name) DO UPDATE SET message = excluded.message
RETURNING xmax = 0 AS is_new
"""
END_ALERT = "DELETE FROM holdfast.alerts WHERE name = %(name)s"
ALERTS = "SELECT name, since, message FROM holdfast.alerts ORDER BY name"


@dataclass(frozen=True, slots=True)
class Alert:
    """Something that somebody should look at, as long as it is so."""

    name: str
    since: datetime
    message: str


def raise_alert(tx: Tx, name: str, message: str) -> bool:
    """Say that something is so; return whether it was not before."""
    row = tx.execute(RAISE_ALERT, {"name": name, "message": message}).fetchone()
    return bool(row and row["is_new"])


def end_alert(tx: Tx, name: str) -> bool:
    """Say that it is so no longer; return whether it was."""
    return tx.execute(END_ALERT, {"name": name}).rowcount == 1


def alerts(tx: Tx) -> list[Alert]:
    """Return the alerts that are on."""
    with tx.cursor(row_factory=class_row(Alert)) as cursor:
        return cursor.execute(ALERTS).fetchall()


# Cheap enough for each scrape: open items from the counts that the triggers keep, failed ones and
# the oldest due one from their partial indexes.
GAUGES = """
SELECT (SELECT count(*) FROM holdfast.jobs WHERE finished_at IS NULL) AS open_jobs,
       (SELECT coalesce(sum(c.pending), 0) FROM holdfast.job_counts c
          JOIN holdfast.jobs j ON j.id = c.job_id AND j.finished_at IS NULL
           AND j.kind = 'embedding')::float8 AS pending,
       (SELECT count(*) FROM public.embedding_retry_queue WHERE status = 'processing')::float8
           AS processing,
       (SELECT count(*) FROM public.embedding_retry_queue WHERE status = 'failed')::float8
           AS failed,
       (SELECT coalesce(extract(epoch FROM now() - min(n.next_attempt_at)), 0)
          FROM holdfast.jobs j
         CROSS JOIN LATERAL (
               (SELECT q.next_attempt_at FROM public.embedding_retry_queue q
                 WHERE q.job_id = j.id AND q.status = 'pending' AND q.kills = 0
                   AND q.next_attempt_at <= now()
                 ORDER BY q.next_attempt_at LIMIT 1)
               UNION ALL
               (SELECT q.next_attempt_at FROM public.embedding_retry_queue q
                 WHERE q.job_id = j.id AND q.status = 'pending' AND q.kills > 0
                   AND q.next_attempt_at <= now()
                 ORDER BY q.next_attempt_at LIMIT 1)) AS n
         WHERE j.finished_at IS NULL)::float8 AS oldest_due_seconds
"""


@dataclass(frozen=True, slots=True)
class Gauges:
    """How much work there is, and how long the oldest of it has waited."""

    items: dict[str, float]
    open_jobs: int
    oldest_due_seconds: float


def gauges(tx: Tx) -> Gauges:
    """Return the state of the queue as numbers."""
    row = tx.execute(GAUGES).fetchone() or {}
    counted = {name: row[name] for name in ("pending", "processing", "failed")}
    return Gauges(counted, row["open_jobs"], row["oldest_due_seconds"])
