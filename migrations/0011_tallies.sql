-- What has become of items since the beginning, as numbers; and which alerts are on.
--
-- Each statement that changes items leaves a line, and the sweeper adds the lines up: so no row is
-- written by two at a time. Locks: embedding_retry_queue for a moment, for its trigger. Old code:
-- may go on beside this. Undo: DROP TRIGGER tally_changes ON public.embedding_retry_queue;
-- DROP FUNCTION holdfast.tally_changes(); DROP TABLE holdfast.tallies, holdfast.totals,
-- holdfast.alerts.

CREATE TABLE holdfast.tallies (
    claimed             bigint NOT NULL,
    done                bigint NOT NULL,
    skipped             bigint NOT NULL,
    -- Will be tried again, the attempt spent; and handed back uncharged.
    retried             bigint NOT NULL,
    released            bigint NOT NULL,
    failed              bigint NOT NULL,
    -- From the claim to done.
    processing_seconds  double precision NOT NULL
);
CREATE TABLE holdfast.totals (
    is_only             boolean PRIMARY KEY DEFAULT true CHECK (is_only),
    since               timestamptz NOT NULL DEFAULT now(),
    claimed             bigint NOT NULL DEFAULT 0,
    done                bigint NOT NULL DEFAULT 0,
    skipped             bigint NOT NULL DEFAULT 0,
    retried             bigint NOT NULL DEFAULT 0,
    released            bigint NOT NULL DEFAULT 0,
    failed              bigint NOT NULL DEFAULT 0,
    processing_seconds  double precision NOT NULL DEFAULT 0
);
INSERT INTO holdfast.totals DEFAULT VALUES;

CREATE FUNCTION holdfast.tally_changes() RETURNS trigger
LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
BEGIN
    INSERT INTO holdfast.tallies
    SELECT count(*) FILTER (WHERE n.status = 'processing'),
           count(*) FILTER (WHERE n.status = 'done' AND n.skip_reason IS NULL),
           count(*) FILTER (WHERE n.status = 'done' AND n.skip_reason IS NOT NULL),
           count(*) FILTER (WHERE o.status = 'processing' AND n.status = 'pending'
                              AND n.attempts = o.attempts AND n.error_class IS NOT NULL),
           count(*) FILTER (WHERE o.status = 'processing' AND n.status = 'pending'
                              AND n.attempts < o.attempts),
           count(*) FILTER (WHERE n.status = 'failed'),
           coalesce(sum(extract(epoch FROM n.updated_at - o.updated_at))
                    FILTER (WHERE n.status = 'done' AND n.skip_reason IS NULL), 0)
      FROM old_items o JOIN new_items n USING (id)
     WHERE o.status <> n.status
    HAVING count(*) > 0;
    RETURN NULL;
END $$;
CREATE TRIGGER tally_changes AFTER UPDATE ON public.embedding_retry_queue
    REFERENCING OLD TABLE AS old_items NEW TABLE AS new_items
    FOR EACH STATEMENT EXECUTE FUNCTION holdfast.tally_changes();

CREATE TABLE holdfast.alerts (
    name     text PRIMARY KEY,
    since    timestamptz NOT NULL DEFAULT now(),
    message  text NOT NULL
);
