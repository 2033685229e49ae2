-- Jobs: one row for each accepted POST, its counts, and the answers kept for repeated requests.
--
-- Locks: none that matter, all tables are new. Old code: does not know them.
-- Undo: DROP SCHEMA holdfast CASCADE, after the tables of the later migrations.

CREATE TABLE holdfast.jobs (
    id              text PRIMARY KEY,
    kind            text NOT NULL CHECK (kind IN ('embedding', 'trace')),
    client          text NOT NULL,
    state           text NOT NULL DEFAULT 'queued'
                    CHECK (state IN ('queued', 'running', 'completed', 'completed_with_errors',
                                     'failed', 'cancelled')),
    project         text NOT NULL DEFAULT '',
    priority        smallint NOT NULL DEFAULT 0 CHECK (priority BETWEEN -10 AND 10),
    return_vectors  boolean NOT NULL DEFAULT false,
    -- A run is one go at the job: a bell that names an older one ends at once.
    run             integer NOT NULL DEFAULT 1,
    -- Bells rung so far: the n of the next RQ id, which is never used twice.
    rings           bigint NOT NULL DEFAULT 0,
    rung_at         timestamptz,
    created_at      timestamptz NOT NULL DEFAULT now(),
    started_at      timestamptz,
    finished_at     timestamptz,
    expires_at      timestamptz,
    cancelled_at    timestamptz,
    -- Frozen when the job becomes final, so that later batches with the same items change nothing.
    final_counts    jsonb,
    final_errors    jsonb,
    CHECK ((state IN ('queued', 'running')) = (finished_at IS NULL)),
    CHECK ((finished_at IS NULL) = (final_counts IS NULL))
);

CREATE INDEX jobs_open ON holdfast.jobs (created_at) WHERE finished_at IS NULL;
CREATE INDEX jobs_by_client ON holdfast.jobs (client, created_at DESC, id DESC);
CREATE INDEX jobs_finished ON holdfast.jobs (finished_at) WHERE finished_at IS NOT NULL;

-- Counts are kept by triggers, in the transaction that changes the items, so that a poll of a job
-- of a million items reads a few rows. Sharded by backend, so that workers of one job never wait
-- for each other here. A single shard may be negative: only the sum means something.
CREATE TABLE holdfast.job_counts (
    job_id      text NOT NULL,
    shard       smallint NOT NULL,
    pending     bigint NOT NULL DEFAULT 0,
    processing  bigint NOT NULL DEFAULT 0,
    done        bigint NOT NULL DEFAULT 0,
    skipped     bigint NOT NULL DEFAULT 0,
    failed      bigint NOT NULL DEFAULT 0,
    cancelled   bigint NOT NULL DEFAULT 0,
    PRIMARY KEY (job_id, shard)
) WITH (fillfactor = 50, autovacuum_vacuum_scale_factor = 0.1);

CREATE VIEW holdfast.counted_jobs AS
SELECT j.id, j.kind, j.client, j.state, j.project, j.priority, j.run, j.rings, j.return_vectors,
       j.created_at, j.started_at, j.finished_at, j.expires_at, j.cancelled_at,
       -- Never later than what is seen: a snapshot is taken after its statement has begun.
       extract(epoch FROM statement_timestamp())::float8 AS read_at,
       coalesce(j.expires_at <= now(), false) AS is_expired, j.final_counts, j.final_errors,
       c.pending, c.processing, c.done, c.skipped, c.failed, c.cancelled
  FROM holdfast.jobs j
 CROSS JOIN LATERAL (
       SELECT coalesce(sum(pending), 0)::bigint AS pending,
              coalesce(sum(processing), 0)::bigint AS processing,
              coalesce(sum(done), 0)::bigint AS done,
              coalesce(sum(skipped), 0)::bigint AS skipped,
              coalesce(sum(failed), 0)::bigint AS failed,
              coalesce(sum(cancelled), 0)::bigint AS cancelled
         FROM holdfast.job_counts WHERE job_id = j.id) AS c;

CREATE TABLE holdfast.idempotency_keys (
    client       text NOT NULL,
    key          text NOT NULL,
    fingerprint  bytea NOT NULL,
    job_id       text NOT NULL,
    answer       text NOT NULL,
    created_at   timestamptz NOT NULL DEFAULT now(),
    PRIMARY KEY (client, key)
);
CREATE INDEX idempotency_keys_by_age ON holdfast.idempotency_keys (created_at);
