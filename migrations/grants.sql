-- What each role of deploy/roles.sql may do, granted anew at the end of every run; where the roles
-- are not, nothing. Whoever owns the tables runs this. A new table can be read by all three, and is
-- written by nobody until its line is here.
--
-- The API takes work in and gives it up again, the worker does it, the sweeper makes good and cleans
-- up. None makes or changes a table; keys of the API are made by the owner alone.

CREATE OR REPLACE FUNCTION holdfast.refuse_finish() RETURNS trigger
LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp AS $$
BEGIN
    RAISE EXCEPTION 'the role % makes no item %', current_user, NEW.status
        USING ERRCODE = 'insufficient_privilege',
              HINT = 'Only a worker claims and finishes items.';
END $$;

DO $$
DECLARE
    roles    text[] := ARRAY['holdfast_api', 'holdfast_worker', 'holdfast_sweeper'];
    api      text := 'holdfast_api';
    worker   text := 'holdfast_worker';
    sweeper  text := 'holdfast_sweeper';
    line     record;
BEGIN
    IF (SELECT count(*) FROM pg_roles WHERE rolname = ANY(roles)) < 3 THEN
        RETURN;
    END IF;

    GRANT USAGE ON SCHEMA holdfast TO holdfast_api, holdfast_worker, holdfast_sweeper;
    REVOKE ALL ON ALL TABLES IN SCHEMA holdfast FROM holdfast_api, holdfast_worker, holdfast_sweeper;
    REVOKE ALL ON public.embedding_retry_queue FROM holdfast_api, holdfast_worker, holdfast_sweeper;
    GRANT SELECT ON ALL TABLES IN SCHEMA holdfast
       TO holdfast_api, holdfast_worker, holdfast_sweeper;
    GRANT SELECT ON public.embedding_retry_queue TO holdfast_api, holdfast_worker, holdfast_sweeper;
    -- Hashes of keys, and answers to clients.
    REVOKE ALL ON holdfast.api_keys FROM holdfast_worker, holdfast_sweeper;
    REVOKE ALL ON holdfast.idempotency_keys FROM holdfast_worker;

    FOR line IN SELECT * FROM (VALUES
        ('public.embedding_retry_queue', api, 'INSERT, UPDATE'),
        ('public.embedding_retry_queue', worker, 'UPDATE'),
        ('public.embedding_retry_queue', sweeper, 'INSERT, UPDATE, DELETE'),
        ('holdfast.jobs', api, 'INSERT, UPDATE'),
        ('holdfast.jobs', worker, 'UPDATE'),
        ('holdfast.jobs', sweeper, 'INSERT, UPDATE, DELETE'),
        ('holdfast.job_items', api, 'INSERT, UPDATE'),
        ('holdfast.job_items', worker, 'UPDATE'),
        ('holdfast.job_items', sweeper, 'INSERT, UPDATE, DELETE'),
        ('holdfast.job_counts', sweeper, 'DELETE'),
        ('holdfast.item_attempts', worker, 'INSERT'),
        ('holdfast.item_attempts', sweeper, 'INSERT, DELETE'),
        ('holdfast.idempotency_keys', api, 'INSERT'),
        ('holdfast.idempotency_keys', sweeper, 'DELETE'),
        ('holdfast.requeues', api, 'INSERT'),
        ('holdfast.embedding_targets', api, 'INSERT, UPDATE'),
        ('holdfast.embedding_targets', sweeper, 'UPDATE'),
        ('holdfast.processes', worker, 'INSERT, UPDATE'),
        ('holdfast.processes', sweeper, 'INSERT, UPDATE, DELETE'),
        ('holdfast.backends', worker, 'INSERT, UPDATE'),
        ('holdfast.backends', sweeper, 'INSERT, UPDATE'),
        ('holdfast.incidents', worker, 'INSERT, UPDATE'),
        ('holdfast.incidents', sweeper, 'INSERT, UPDATE, DELETE'),
        ('holdfast.canaries', worker, 'INSERT'),
        ('holdfast.slices', worker, 'INSERT'),
        ('holdfast.slices', sweeper, 'DELETE'),
        ('holdfast.trace_jobs', api, 'INSERT, UPDATE'),
        ('holdfast.trace_jobs', worker, 'UPDATE'),
        ('holdfast.trace_jobs', sweeper, 'UPDATE'),
        ('holdfast.trace_segments', api, 'INSERT, UPDATE'),
        ('holdfast.trace_segments', worker, 'UPDATE'),
        ('holdfast.trace_segments', sweeper, 'UPDATE'),
        ('holdfast.segment_errors', worker, 'INSERT'),
        ('holdfast.segment_errors', sweeper, 'INSERT'),
        ('holdfast.vectors', api, 'UPDATE'),
        ('holdfast.vectors', worker, 'INSERT, UPDATE'),
        ('holdfast.vectors', sweeper, 'UPDATE, DELETE'),
        ('holdfast.item_sinks', api, 'UPDATE'),
        ('holdfast.item_sinks', worker, 'INSERT, UPDATE'),
        ('holdfast.item_sinks', sweeper, 'UPDATE'),
        ('holdfast.coverage', sweeper, 'INSERT, UPDATE'),
        ('holdfast.tallies', sweeper, 'DELETE'),
        ('holdfast.totals', sweeper, 'UPDATE'),
        ('holdfast.alerts', sweeper, 'INSERT, UPDATE, DELETE'),
        ('holdfast.campaigns', sweeper, 'UPDATE'),
        ('holdfast.campaign_marks', sweeper, 'INSERT'),
        ('holdfast.memory_chunks', api, 'INSERT, UPDATE, DELETE'),
        ('holdfast.memory_chunks', worker, 'UPDATE (embedding)')
    ) AS granted (its_table, its_role, rights) WHERE to_regclass(its_table) IS NOT NULL LOOP
        EXECUTE format('GRANT %s ON %s TO %I', line.rights, line.its_table, line.its_role);
    END LOOP;

    -- Deletion gives what it takes away a newer version than any that is on its way.
    GRANT USAGE ON SEQUENCE holdfast.lease_tokens TO holdfast_api, holdfast_worker;
    GRANT USAGE ON SEQUENCE holdfast.trace_lease_tokens TO holdfast_worker;
    GRANT EXECUTE ON FUNCTION holdfast.withdraw(text, text[], boolean) TO holdfast_api;

    -- What rights cannot say. Once: making a trigger waits for whoever writes to the table.
    IF NOT EXISTS (SELECT FROM pg_trigger WHERE tgname = 'refuse_finish'
                      AND tgrelid = 'public.embedding_retry_queue'::regclass) THEN
        CREATE TRIGGER refuse_finish BEFORE UPDATE ON public.embedding_retry_queue
            FOR EACH ROW
            WHEN (NEW.status IN ('processing', 'done') AND OLD.status <> NEW.status
                  AND current_user IN ('holdfast_api', 'holdfast_sweeper'))
            EXECUTE FUNCTION holdfast.refuse_finish();
        CREATE TRIGGER refuse_finished BEFORE INSERT ON public.embedding_retry_queue
            FOR EACH ROW
            WHEN (NEW.status <> 'pending' AND current_user IN ('holdfast_api', 'holdfast_sweeper'))
            EXECUTE FUNCTION holdfast.refuse_finish();
    END IF;
END $$;
