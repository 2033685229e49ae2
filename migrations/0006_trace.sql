-- Trace jobs: the request, its segments, and the manifest of the result. The rows of a result lie
-- in Redis; everything that is needed to read them again lies here.
--
-- Locks: holdfast.jobs for a moment, to put a condition on its trigger. Old code: does not know the
-- tables and makes no trace jobs, and it may go on beside this. Undo: DROP TABLE all three, the
-- sequence and the two functions.

CREATE TABLE holdfast.trace_jobs (
    job_id           text PRIMARY KEY REFERENCES holdfast.jobs (id) ON DELETE CASCADE,
    profile          text NOT NULL,
    params           jsonb NOT NULL,
    domains          text[] NOT NULL,
    is_partial       boolean NOT NULL,
    -- Container ids, sorted bytewise, one a line, compressed with zstd.
    ids              bytea NOT NULL,
    ids_sha256       bytea NOT NULL,
    cid_count        integer NOT NULL,
    source           text NOT NULL,
    -- What is open, such as a hold, is measured up to here, whenever it is read.
    as_of            timestamptz NOT NULL DEFAULT now(),
    -- One bell at a time: the lease is on the job, and the segment is what its holder reads.
    segment          integer,
    lease_token      bigint,
    lease_until      timestamptz,
    leased_by        text,
    next_attempt_at  timestamptz NOT NULL DEFAULT now(),
    -- Why it waits though a worker could have it: Redis is full, or away.
    waits_for        text CHECK (waits_for IN ('memory', 'redis')),
    -- What is known of the segment in hand, and how many ids this run ever had behind it.
    progress         jsonb,
    furthest_cids    integer NOT NULL DEFAULT 0,
    manifest         jsonb,
    CHECK ((lease_token IS NULL) = (lease_until IS NULL)
           AND (lease_token IS NULL) = (leased_by IS NULL)
           AND (lease_token IS NULL) = (segment IS NULL))
) WITH (fillfactor = 70);
ALTER TABLE holdfast.trace_jobs ALTER COLUMN ids SET STORAGE EXTERNAL;

CREATE INDEX trace_jobs_leased ON holdfast.trace_jobs (lease_until) WHERE lease_token IS NOT NULL;
CREATE SEQUENCE holdfast.trace_lease_tokens;

CREATE TABLE holdfast.trace_segments (
    job_id       text NOT NULL REFERENCES holdfast.jobs (id) ON DELETE CASCADE,
    segment      integer NOT NULL,
    first_id     text NOT NULL,
    last_id      text NOT NULL,
    cids         integer NOT NULL,
    status       text NOT NULL DEFAULT 'pending'
                 CHECK (status IN ('pending', 'processing', 'done', 'failed', 'cancelled')),
    attempts     integer NOT NULL DEFAULT 0,
    -- In this run: how often its process died, how often its pages vanished.
    kills        integer NOT NULL DEFAULT 0,
    losses       integer NOT NULL DEFAULT 0,
    -- Run and lease token that its pages are named by.
    run          integer,
    lease_token  bigint,
    -- By domain: rows, seconds, pages as [rows, bytes, CRC-32], and the class of what went wrong.
    rows         jsonb NOT NULL DEFAULT '{}',
    seconds      jsonb NOT NULL DEFAULT '{}',
    pages        jsonb NOT NULL DEFAULT '{}',
    failures     jsonb NOT NULL DEFAULT '{}',
    read_from    timestamptz,
    read_to      timestamptz,
    error_class  text,
    last_error   text,
    PRIMARY KEY (job_id, segment),
    CHECK (status <> 'failed' OR error_class IS NOT NULL)
);
-- What a segment cost lately, for estimates.
CREATE INDEX trace_segments_read ON holdfast.trace_segments (read_to DESC) WHERE status = 'done';

CREATE TABLE holdfast.segment_errors (
    job_id       text NOT NULL REFERENCES holdfast.jobs (id) ON DELETE CASCADE,
    segment      integer NOT NULL,
    run          integer NOT NULL,
    at           timestamptz NOT NULL DEFAULT now(),
    error_class  text NOT NULL,
    message      text NOT NULL,
    leased_by    text
);
CREATE INDEX segment_errors_by_segment ON holdfast.segment_errors (job_id, segment, at);

CREATE FUNCTION holdfast.refuse_segment_change() RETURNS trigger
LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp AS $$
BEGIN
    RAISE EXCEPTION 'Invalid transition: % → % (segment % of %)',
                    OLD.status, NEW.status, OLD.segment, OLD.job_id
        USING ERRCODE = 'check_violation';
END $$;
CREATE TRIGGER refuse_segment_change BEFORE UPDATE ON holdfast.trace_segments
    FOR EACH ROW
    WHEN (OLD.status <> NEW.status AND NOT (
             (OLD.status, NEW.status) IN (('pending', 'processing'), ('pending', 'cancelled'),
                                          ('processing', 'done'), ('processing', 'pending'),
                                          ('processing', 'failed'), ('processing', 'cancelled'),
                                          ('done', 'pending'), ('done', 'failed'),
                                          ('failed', 'pending'), ('cancelled', 'pending'))))
    EXECUTE FUNCTION holdfast.refuse_segment_change();

-- Counted anew at each change: a job has few segments, and whoever changes one holds its job.
CREATE FUNCTION holdfast.count_segments() RETURNS trigger
LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
BEGIN
    INSERT INTO holdfast.job_counts AS c
           (job_id, shard, pending, processing, done, failed, cancelled)
    SELECT s.job_id, 0,
           count(*) FILTER (WHERE s.status = 'pending'),
           count(*) FILTER (WHERE s.status = 'processing'),
           count(*) FILTER (WHERE s.status = 'done'),
           count(*) FILTER (WHERE s.status = 'failed'),
           count(*) FILTER (WHERE s.status = 'cancelled')
      FROM holdfast.trace_segments s
     WHERE s.job_id IN (SELECT job_id FROM changed)
     GROUP BY s.job_id
        ON CONFLICT (job_id, shard) DO UPDATE
       SET pending = excluded.pending, processing = excluded.processing, done = excluded.done,
           failed = excluded.failed, cancelled = excluded.cancelled;
    RETURN NULL;
END $$;
CREATE TRIGGER count_new_segments AFTER INSERT ON holdfast.trace_segments
    REFERENCING NEW TABLE AS changed
    FOR EACH STATEMENT EXECUTE FUNCTION holdfast.count_segments();
CREATE TRIGGER count_segments AFTER UPDATE ON holdfast.trace_segments
    REFERENCING NEW TABLE AS changed
    FOR EACH STATEMENT EXECUTE FUNCTION holdfast.count_segments();

-- The items of an embedding job are counted at its COMMIT; a trace job has none.
DROP TRIGGER count_new_job ON holdfast.jobs;
CREATE CONSTRAINT TRIGGER count_new_job AFTER INSERT ON holdfast.jobs
    DEFERRABLE INITIALLY DEFERRED FOR EACH ROW WHEN (NEW.kind = 'embedding')
    EXECUTE FUNCTION holdfast.count_new_job();
