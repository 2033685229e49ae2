-- The ledger of stored vectors, one row a key, and how far each further sink has followed.
--
-- A queue row goes a week after it is done; what it stored stays, and so does its line here.
-- Locks: holdfast.embedding_targets for a moment. The ledger is filled from the items that are done:
-- about ten seconds a million, beside which workers go on. Old code: may go on beside this, but
-- what it stores is not written down; repair finds and records it.
-- Undo: DROP VIEW holdfast.current_targets; DROP TABLE holdfast.item_sinks, holdfast.vectors,
-- holdfast.coverage;
-- ALTER TABLE holdfast.embedding_targets DROP COLUMN text_column.

-- Where the text of a row can be read again: to embed it in another version, and to find out that
-- it was changed behind our back.
ALTER TABLE holdfast.embedding_targets ADD COLUMN text_column text;

-- Which column, model and version a reader is to use now: one row a target, changed in one step.
CREATE VIEW holdfast.current_targets AS
SELECT target_table, table_schema, table_name, id_column, vector_column, embedding_version, model,
       dimension, prefix
  FROM holdfast.embedding_targets
 WHERE is_current;

CREATE TABLE holdfast.vectors (
    id                 bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    target_table       text NOT NULL,
    target_id          text NOT NULL,
    embedding_version  text NOT NULL,
    model              text NOT NULL,
    model_digest       text,
    -- Of the text that the stored vector was made of.
    content_hash       bytea NOT NULL,
    -- json and not jsonb, as in job_items.
    metadata           json,
    -- The lease token of the write, or a number of the same sequence: it only grows, so whoever
    -- writes a further sink late is told from who writes what is newest.
    version            bigint NOT NULL DEFAULT nextval('holdfast.lease_tokens'),
    stored_at          timestamptz NOT NULL DEFAULT now(),
    -- The vector is to go from every sink; the row goes when it is gone from all, but for one that
    -- says why a row of the table has no vector: somebody wanted it so.
    deleted_at         timestamptz,
    is_wanted_empty    boolean NOT NULL DEFAULT false,
    CONSTRAINT vectors_key UNIQUE (target_table, target_id, embedding_version)
) WITH (fillfactor = 85, autovacuum_vacuum_scale_factor = 0.05);
CREATE INDEX vectors_deleted ON holdfast.vectors (deleted_at)
 WHERE deleted_at IS NOT NULL AND NOT is_wanted_empty;

CREATE TABLE holdfast.item_sinks (
    vector_id        bigint NOT NULL REFERENCES holdfast.vectors (id) ON DELETE CASCADE,
    sink             text NOT NULL,
    status           text NOT NULL DEFAULT 'pending'
                     CHECK (status IN ('pending', 'done', 'failed')),
    -- What the sink is to hold, and what it was last seen to hold: numbers of vectors.version.
    version_wanted   bigint NOT NULL,
    version_written  bigint,
    attempts         integer NOT NULL DEFAULT 0,
    -- Also the lease of whoever has it in hand: two who write the same version do no harm.
    next_attempt_at  timestamptz NOT NULL DEFAULT now(),
    error_class      text,
    last_error       text,
    updated_at       timestamptz NOT NULL DEFAULT now(),
    PRIMARY KEY (vector_id, sink),
    CHECK (status <> 'failed' OR error_class IS NOT NULL),
    CHECK (status <> 'done' OR version_written >= version_wanted)
) WITH (fillfactor = 70, autovacuum_vacuum_scale_factor = 0.02, autovacuum_vacuum_cost_delay = 0);
CREATE INDEX item_sinks_due ON holdfast.item_sinks (sink, next_attempt_at, vector_id)
 WHERE status = 'pending';
CREATE INDEX item_sinks_failed ON holdfast.item_sinks (sink, error_class) WHERE status = 'failed';

-- What share of each target's rows has the vector of its text, as last measured, by sink.
CREATE TABLE holdfast.coverage (
    target_table       text NOT NULL,
    embedding_version  text NOT NULL,
    sink               text NOT NULL,
    measured_at        timestamptz NOT NULL DEFAULT now(),
    seconds            double precision NOT NULL,
    -- How many rows or documents are of which kind.
    kinds              jsonb NOT NULL,
    PRIMARY KEY (target_table, embedding_version, sink)
);

INSERT INTO holdfast.vectors
       (target_table, target_id, embedding_version, model, content_hash, stored_at)
SELECT q.target_table, q.target_id, q.embedding_version, q.model, q.content_hash, q.processed_at
  FROM public.embedding_retry_queue q
 WHERE q.status = 'done' AND q.skip_reason IS NULL AND q.embedding_version IS NOT NULL
 ORDER BY q.id;
