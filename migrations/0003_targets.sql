-- Targets: which tables and columns vectors may be written to; and the door inside the database.
--
-- Locks: none, all new. Old code: does not know them.
-- Undo: DROP FUNCTION public.enqueue_embedding(text, text, text); DROP TABLE the rest.

CREATE TABLE holdfast.embedding_targets (
    target_table       text NOT NULL,
    embedding_version  text NOT NULL,
    table_schema       text NOT NULL,
    table_name         text NOT NULL,
    id_column          text NOT NULL,
    id_type            text NOT NULL
                       CHECK (id_type IN ('bigint', 'integer', 'smallint', 'uuid', 'text')),
    vector_column      text NOT NULL,
    dimension          integer NOT NULL CHECK (dimension BETWEEN 1 AND 16000),
    model              text NOT NULL,
    client             text,
    is_current         boolean NOT NULL DEFAULT true,
    created_at         timestamptz NOT NULL DEFAULT now(),
    PRIMARY KEY (target_table, embedding_version),
    -- Vectors of two versions never share a column.
    UNIQUE (table_schema, table_name, vector_column)
);
CREATE UNIQUE INDEX embedding_targets_current
    ON holdfast.embedding_targets (target_table) WHERE is_current;

-- Whether a text names a row of this kind of id, in the one form that comes back unchanged.
CREATE FUNCTION holdfast.is_id(id text, id_type text) RETURNS boolean
LANGUAGE sql IMMUTABLE SET search_path = pg_catalog, pg_temp AS $$
    SELECT CASE id_type
           WHEN 'text' THEN id <> '' AND length(id) <= 512
           WHEN 'uuid' THEN id ~ '^[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}$'
           ELSE id ~ '^(0|-?[1-9][0-9]{0,18})$'
                AND CASE id_type
                    WHEN 'bigint' THEN id::numeric BETWEEN -9223372036854775808 AND 9223372036854775807
                    WHEN 'integer' THEN id::numeric BETWEEN -2147483648 AND 2147483647
                    ELSE id::numeric BETWEEN -32768 AND 32767
                    END
           END
$$;

-- The transactional outbox: the caller's row and its item are committed, or not, together.
-- All items of one transaction are one job of the client 'sql'. Returns that job's id.
CREATE FUNCTION public.enqueue_embedding(target_table text, target_id text, text_content text)
RETURNS text
LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
#variable_conflict use_column
DECLARE
    target      holdfast.embedding_targets;
    -- Local to the transaction, and taken back with a savepoint like the rows that it stands for.
    mark        text := coalesce(current_setting('holdfast.sql_job', true), '');
    the_job     text := split_part(mark, ' ', 1);
    the_number  integer := 0;
    the_item    bigint;
    the_hash    bytea := sha256(convert_to(text_content, 'UTF8'));
    -- What Python's str.isspace() holds for one, so that both doors find the same texts empty.
    spaces      text := E' \t\n\v\f\r\x1c\x1d\x1e\x1f\u0085\u00a0\u1680\u2000\u2001\u2002\u2003'
                         '\u2004\u2005\u2006\u2007\u2008\u2009\u200a\u2028\u2029\u202f\u205f\u3000';
BEGIN
    SELECT t.* INTO target
      FROM holdfast.embedding_targets t
     WHERE t.target_table = enqueue_embedding.target_table AND t.is_current;
    IF NOT FOUND THEN
        RAISE EXCEPTION 'target_table: % is not a registered target', quote_nullable(target_table)
            USING ERRCODE = 'invalid_parameter_value',
                  HINT = 'python -m worker targets list shows them, targets add registers one.';
    ELSIF target.client IS NOT NULL THEN
        RAISE EXCEPTION 'target_table: % belongs to a client', target_table
            USING ERRCODE = 'insufficient_privilege';
    ELSIF holdfast.is_id(target_id, target.id_type) IS NOT TRUE THEN
        RAISE EXCEPTION 'target_id: % is not an id of type %', quote_nullable(target_id),
                        target.id_type
            USING ERRCODE = 'invalid_parameter_value';
    ELSIF text_content IS NULL OR btrim(text_content, spaces) = '' THEN
        RAISE EXCEPTION 'text_content: is empty' USING ERRCODE = 'invalid_parameter_value';
    ELSIF octet_length(text_content) > 262144 THEN
        RAISE EXCEPTION 'text_content: is longer than 262144 bytes'
            USING ERRCODE = 'invalid_parameter_value';
    END IF;

    -- Anybody can set the mark, so it counts only for a job that this transaction has made.
    IF EXISTS (SELECT FROM holdfast.jobs j
                WHERE j.id = the_job AND j.client = 'sql' AND j.created_at = now()) THEN
        the_number := split_part(mark, ' ', 2)::integer + 1;
    ELSE
        the_job := 'emb-' || replace(gen_random_uuid()::text, '-', '');
        -- Whatever the caller has set: the items are counted when they are all there.
        SET CONSTRAINTS holdfast.count_new_job DEFERRED;
        INSERT INTO holdfast.jobs (id, kind, client) VALUES (the_job, 'embedding', 'sql');
        PERFORM pg_notify('holdfast', the_job);
    END IF;
    PERFORM set_config('holdfast.sql_job', the_job || ' ' || the_number, true);

    INSERT INTO public.embedding_retry_queue AS q
           (target_table, target_id, embedding_version, model, text_content, content_hash, job_id)
    VALUES (target.target_table, target_id, target.embedding_version, target.model,
            enqueue_embedding.text_content, the_hash, the_job)
        ON CONFLICT ON CONSTRAINT embedding_retry_queue_key DO UPDATE
       SET text_content = excluded.text_content, content_hash = excluded.content_hash,
           model = excluded.model, project = excluded.project, priority = excluded.priority,
           job_id = excluded.job_id, status = 'pending',
           max_attempts = NULL, next_attempt_at = now(), kills = 0,
           lease_token = NULL, lease_until = NULL, leased_by = NULL,
           error_class = NULL, skip_reason = NULL, processed_at = NULL, updated_at = now()
     WHERE q.content_hash <> excluded.content_hash OR q.status = 'cancelled'
        OR q.skip_reason IS NOT NULL;
    SELECT q.id INTO STRICT the_item
      FROM public.embedding_retry_queue q
     WHERE q.target_table = target.target_table AND q.target_id = enqueue_embedding.target_id
       AND q.embedding_version = target.embedding_version;
    INSERT INTO holdfast.job_items (job_id, position, item_id, content_hash)
    VALUES (the_job, the_number, the_item, the_hash);
    RETURN the_job;
END $$;
REVOKE ALL ON FUNCTION public.enqueue_embedding(text, text, text) FROM PUBLIC;
