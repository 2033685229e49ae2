-- Deletion: the vectors of a row go from every sink, and what was still to be embedded for it stops.
--
-- Locks: embedding_retry_queue for a moment, for its triggers. Old code: may go on beside this.
-- Undo: DROP FUNCTION public.delete_embedding(text, text); DROP FUNCTION holdfast.withdraw;
-- DROP TRIGGER freeze_withdrawn ON public.embedding_retry_queue; count_changes() as in 0002.

-- As in 0002, and a done item whose vector was deleted moves from `done` to `skipped`.
CREATE OR REPLACE FUNCTION holdfast.count_changes() RETURNS trigger
LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
BEGIN
    INSERT INTO holdfast.job_counts AS c
           (job_id, shard, pending, processing, done, skipped, failed, cancelled)
    SELECT i.job_id, pg_backend_pid() % 16,
           sum((n.status = 'pending')::int - (o.status = 'pending')::int),
           sum((n.status = 'processing')::int - (o.status = 'processing')::int),
           sum((n.status = 'done' AND n.skip_reason IS NULL)::int
               - (o.status = 'done' AND o.skip_reason IS NULL)::int),
           sum((n.skip_reason IS NOT NULL)::int - (o.skip_reason IS NOT NULL)::int),
           sum((n.status = 'failed')::int - (o.status = 'failed')::int),
           sum((n.status = 'cancelled')::int - (o.status = 'cancelled')::int)
      FROM old_items o
      JOIN new_items n USING (id)
      JOIN holdfast.job_items i ON i.item_id = n.id
     WHERE o.status <> n.status OR (o.skip_reason IS NULL) <> (n.skip_reason IS NULL)
     GROUP BY i.job_id
     ORDER BY i.job_id
        ON CONFLICT (job_id, shard) DO UPDATE
       SET pending = c.pending + excluded.pending,
           processing = c.processing + excluded.processing,
           done = c.done + excluded.done,
           skipped = c.skipped + excluded.skipped,
           failed = c.failed + excluded.failed,
           cancelled = c.cancelled + excluded.cancelled;

    IF EXISTS (SELECT FROM new_items WHERE status = 'processing') THEN
        -- SKIP LOCKED: whoever holds the job's row waits for its items next, never the other way.
        UPDATE holdfast.jobs
           SET state = 'running', started_at = coalesce(started_at, now())
         WHERE id IN (SELECT j.id
                        FROM holdfast.jobs j
                       WHERE j.state = 'queued'
                         AND j.id IN (SELECT i.job_id
                                        FROM new_items n
                                        JOIN holdfast.job_items i ON i.item_id = n.id
                                       WHERE n.status = 'processing')
                         FOR UPDATE SKIP LOCKED);
    END IF;
    RETURN NULL;
END $$;

-- What a final job has told of the item stays told.
CREATE TRIGGER freeze_withdrawn AFTER UPDATE ON public.embedding_retry_queue
    FOR EACH ROW
    WHEN (OLD.status = 'done' AND NEW.status = 'done' AND OLD.skip_reason IS NULL
          AND NEW.skip_reason IS NOT NULL)
    EXECUTE FUNCTION holdfast.freeze_outcome();

-- In every version: open items are cancelled, so that a worker's lease is lost; done ones are no
-- duplicate of a later batch any more; failed ones hold nothing and are left. The followers are
-- told. The vector in the table itself is the caller's to clear, in the same transaction;
-- `keeps_rows`: the row may stay without one, and that is no fault.
CREATE FUNCTION holdfast.withdraw(the_table text, the_ids text[], keeps_rows boolean,
                                  OUT deleted bigint, OUT cancelled bigint)
LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp AS $$
BEGIN
    PERFORM FROM public.embedding_retry_queue q
      WHERE q.target_table = the_table AND q.target_id = ANY(the_ids)
      ORDER BY q.target_table, q.target_id, q.embedding_version
        FOR UPDATE;
    WITH stopped AS (
        UPDATE public.embedding_retry_queue q
           SET status = CASE q.status WHEN 'done' THEN 'done' ELSE 'cancelled' END,
               skip_reason = CASE q.status WHEN 'done' THEN 'deleted' END,
               lease_token = NULL, lease_until = NULL, leased_by = NULL, updated_at = now()
         WHERE q.target_table = the_table AND q.target_id = ANY(the_ids)
           AND (q.status IN ('pending', 'processing')
                OR (q.status = 'done' AND q.skip_reason IS NULL))
        RETURNING q.status
    )
    SELECT count(*) FILTER (WHERE s.status = 'cancelled') INTO cancelled FROM stopped s;
    WITH gone AS (
        SELECT v.id
          FROM holdfast.vectors v
         WHERE v.target_table = the_table AND v.target_id = ANY(the_ids) AND v.deleted_at IS NULL
         ORDER BY v.target_table, v.target_id, v.embedding_version
           FOR UPDATE
    ), removed AS (
        UPDATE holdfast.vectors v
           SET deleted_at = now(), version = nextval('holdfast.lease_tokens'),
               is_wanted_empty = keeps_rows
          FROM gone
         WHERE v.id = gone.id
        RETURNING v.id, v.version, v.target_id
    ), told AS (
        UPDATE holdfast.item_sinks s
           SET version_wanted = r.version, status = 'pending', attempts = 0,
               next_attempt_at = now(), error_class = NULL, last_error = NULL, updated_at = now()
          FROM removed r
         WHERE s.vector_id = r.id
    )
    SELECT count(DISTINCT r.target_id) INTO deleted FROM removed r;
END $$;

-- The same from inside the caller's own transaction, such as the one that deletes the row. Where
-- the row is still there its vector is cleared, in every version. Returns whether there was one.
CREATE FUNCTION public.delete_embedding(target_table text, target_id text) RETURNS boolean
LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
#variable_conflict use_column
DECLARE
    target  holdfast.embedding_targets;
    found   bigint;
BEGIN
    IF NOT EXISTS (SELECT FROM holdfast.embedding_targets t
                    WHERE t.target_table = delete_embedding.target_table) THEN
        RAISE EXCEPTION 'target_table: % is not a registered target',
                        quote_nullable(delete_embedding.target_table)
            USING ERRCODE = 'invalid_parameter_value',
                  HINT = 'python -m worker targets list shows them, targets add registers one.';
    END IF;
    FOR target IN SELECT t.* FROM holdfast.embedding_targets t
                   WHERE t.target_table = delete_embedding.target_table LOOP
        IF target.client IS NOT NULL THEN
            RAISE EXCEPTION 'target_table: % belongs to a client', target.target_table
                USING ERRCODE = 'insufficient_privilege';
        ELSIF holdfast.is_id(delete_embedding.target_id, target.id_type) IS NOT TRUE THEN
            RAISE EXCEPTION 'target_id: % is not an id of type %',
                            quote_nullable(delete_embedding.target_id), target.id_type
                USING ERRCODE = 'invalid_parameter_value';
        END IF;
    END LOOP;
    SELECT w.deleted INTO found
      FROM holdfast.withdraw(delete_embedding.target_table,
                                ARRAY[delete_embedding.target_id], true) w;
    FOR target IN SELECT t.* FROM holdfast.embedding_targets t
                   WHERE t.target_table = delete_embedding.target_table LOOP
        EXECUTE format('UPDATE %I.%I SET %I = NULL WHERE %I = $1::%s AND %3$I IS NOT NULL',
                       target.table_schema, target.table_name, target.vector_column,
                       target.id_column, target.id_type)
          USING delete_embedding.target_id;
    END LOOP;
    RETURN found > 0;
END $$;
REVOKE ALL ON FUNCTION public.delete_embedding(text, text) FROM PUBLIC;
REVOKE ALL ON FUNCTION holdfast.withdraw(text, text[], boolean) FROM PUBLIC;
