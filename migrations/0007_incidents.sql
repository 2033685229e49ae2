-- Outages as rows, what a job brought by model, and how a model answered its canary.
--
-- Locks: holdfast.jobs against new jobs while the items of open ones are counted, about two seconds
-- for a million. Old code: may go on beside this; an outage that only old workers see is no row,
-- and one that they end stays open until a new one has an answer. Undo: DROP TABLE all three, and
-- count_new_job as 0002 has it.

-- One row an outage, however many workers saw it; open until the backend answers rightly.
CREATE TABLE holdfast.incidents (
    id           bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    backend      text NOT NULL,
    model        text NOT NULL,
    error_class  text NOT NULL,
    reason       text NOT NULL,
    since        timestamptz NOT NULL,
    until        timestamptz
);
CREATE UNIQUE INDEX incidents_open ON holdfast.incidents (backend, model) WHERE until IS NULL;
CREATE INDEX incidents_listed ON holdfast.incidents (backend, coalesce(until, 'infinity'), id);

INSERT INTO holdfast.incidents (backend, model, error_class, reason, since)
SELECT name, model, coalesce(error_class, 'unclear'), coalesce(message, ''), paused_since
  FROM holdfast.backends
 WHERE paused_since IS NOT NULL;

-- The vector that a model once gave for the canary's text.
CREATE TABLE holdfast.canaries (
    model      text NOT NULL,
    text_hash  bytea NOT NULL,
    vector     real[] NOT NULL,
    kept_at    timestamptz NOT NULL DEFAULT now(),
    PRIMARY KEY (model, text_hash)
);

-- What a job brought, counted once: how many items for each model, and the bytes of their texts.
-- With the counts it says what waits for a backend, and how much text waits, without a look at
-- the items.
CREATE TABLE holdfast.job_models (
    job_id      text NOT NULL REFERENCES holdfast.jobs (id) ON DELETE CASCADE,
    model       text NOT NULL,
    items       bigint NOT NULL,
    text_bytes  bigint NOT NULL,
    PRIMARY KEY (job_id, model)
);

-- As it was, and what the job brought by model. The length of a text that is stored out of line
-- stands in its row, so none is fetched.
CREATE OR REPLACE FUNCTION holdfast.count_new_job() RETURNS trigger
LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
BEGIN
    DELETE FROM holdfast.job_counts WHERE job_id = NEW.id;
    WITH counted AS MATERIALIZED (
        SELECT q.model, count(*) AS items, sum(octet_length(q.text_content)) AS text_bytes,
               count(*) FILTER (WHERE q.status = 'pending') AS pending,
               count(*) FILTER (WHERE q.status = 'processing') AS processing,
               count(*) FILTER (WHERE q.status = 'done' AND q.skip_reason IS NULL) AS done,
               count(*) FILTER (WHERE q.skip_reason IS NOT NULL) AS skipped,
               count(*) FILTER (WHERE q.status = 'failed') AS failed,
               count(*) FILTER (WHERE q.status = 'cancelled') AS cancelled
          FROM holdfast.job_items i
          JOIN public.embedding_retry_queue q ON q.id = i.item_id
         WHERE i.job_id = NEW.id
         GROUP BY q.model
    ), by_model AS (
        INSERT INTO holdfast.job_models (job_id, model, items, text_bytes)
        SELECT NEW.id, model, items, text_bytes FROM counted WHERE model IS NOT NULL
    )
    INSERT INTO holdfast.job_counts
           (job_id, shard, pending, processing, done, skipped, failed, cancelled)
    SELECT NEW.id, 0, coalesce(sum(pending), 0), coalesce(sum(processing), 0),
           coalesce(sum(done), 0), coalesce(sum(skipped), 0), coalesce(sum(failed), 0),
           coalesce(sum(cancelled), 0)
      FROM counted;
    IF NEW.client = 'sql' THEN
        -- What the same transaction enqueues after this is not counted here: it gets another job.
        PERFORM set_config('holdfast.sql_job', '', true);
    END IF;
    RETURN NULL;
END $$;

INSERT INTO holdfast.job_models (job_id, model, items, text_bytes)
SELECT i.job_id, q.model, count(*), sum(octet_length(q.text_content))
  FROM holdfast.jobs j
  JOIN holdfast.job_items i ON i.job_id = j.id
  JOIN public.embedding_retry_queue q ON q.id = i.item_id
 WHERE j.finished_at IS NULL AND j.kind = 'embedding' AND q.model IS NOT NULL
 GROUP BY i.job_id, q.model;
