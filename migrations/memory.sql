-- Only with --memory: the product's own target, chunks of ingested documents with their vectors.
-- The runner sets holdfast.dimension, holdfast.model and holdfast.version before.
--
-- Locks: none, all new. Undo: DROP TABLE holdfast.memory_chunks; DELETE FROM
-- holdfast.embedding_targets WHERE target_table = 'holdfast.memory_chunks'.

DO $$
DECLARE
    wanted  integer := current_setting('holdfast.dimension')::integer;
    found   integer;
    -- What pgvector's HNSW takes: 2,000 dimensions of a vector, 4,000 of a halfvec.
    kind    text := CASE WHEN wanted > 2000 THEN 'halfvec' ELSE 'vector' END;
BEGIN
    CREATE EXTENSION IF NOT EXISTS vector SCHEMA public;
    EXECUTE format('CREATE TABLE IF NOT EXISTS holdfast.memory_chunks (
        -- Made of all that follows up to chunk, so that the same ingest names the same rows.
        id          uuid PRIMARY KEY,
        client      text NOT NULL,
        project     text NOT NULL,
        source      text NOT NULL,
        ingest_id   text NOT NULL,
        record      integer NOT NULL,
        chunk       integer NOT NULL,
        text        text NOT NULL,
        metadata    json,
        created_at  timestamptz NOT NULL DEFAULT now(),
        updated_at  timestamptz NOT NULL DEFAULT now(),
        embedding   %s(%s),
        UNIQUE (client, project, source, ingest_id, record, chunk))', kind, wanted);
    SELECT atttypmod INTO found
      FROM pg_attribute
     WHERE attrelid = 'holdfast.memory_chunks'::regclass AND attname = 'embedding';
    IF found <> wanted THEN
        RAISE EXCEPTION 'EMBEDDING_DIM is %, but holdfast.memory_chunks.embedding has % dimensions',
                        wanted, found
            USING HINT = 'Set EMBEDDING_DIM to the column''s number; another model is another'
                         ' version with a column of its own: python -m worker targets add.';
    END IF;
    IF wanted <= 4000 THEN
        EXECUTE format('CREATE INDEX IF NOT EXISTS memory_chunks_embedding
                            ON holdfast.memory_chunks USING hnsw (embedding %s_cosine_ops)', kind);
    END IF;
    INSERT INTO holdfast.embedding_targets
           (target_table, embedding_version, table_schema, table_name, id_column, id_type,
            vector_column, dimension, model, text_column)
    VALUES ('holdfast.memory_chunks', current_setting('holdfast.version'), 'holdfast',
            'memory_chunks', 'id', 'uuid', 'embedding', wanted,
            current_setting('holdfast.model'), 'text')
        ON CONFLICT DO NOTHING;
END $$;
