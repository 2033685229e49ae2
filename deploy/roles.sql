-- Roles of Postgres with the least that each process needs. Once a cluster, by a superuser or whoever
-- may create roles, in the database that Holdfast is to use and before its first migration:
--
--     psql --dbname=… --file=deploy/roles.sql
--     psql --dbname=… --command='\password holdfast_api'      each of the four; without one none can log in
--
-- What each may do with which table stands in migrations/grants.sql: `python -m migrations`, run as the
-- owner, grants it anew at each upgrade, wherever these roles are. A database that was migrated by
-- another role already keeps that one as its owner. Run twice, this changes nothing.

DO $$
DECLARE
    the_role  text;
    -- Of an ADR-009 table that is here already only its owner can change the columns.
    old_table regclass := to_regclass('public.embedding_retry_queue');
BEGIN
    FOREACH the_role IN ARRAY ARRAY['holdfast_owner', 'holdfast_api', 'holdfast_worker',
                                    'holdfast_sweeper'] LOOP
        IF NOT EXISTS (SELECT FROM pg_roles WHERE rolname = the_role) THEN
            EXECUTE format('CREATE ROLE %I LOGIN NOSUPERUSER NOCREATEDB NOCREATEROLE NOREPLICATION'
                           ' NOBYPASSRLS', the_role);
        END IF;
        -- TEMPORARY: batches come in through temporary tables.
        EXECUTE format('GRANT CONNECT, TEMPORARY ON DATABASE %I TO %I', current_database(), the_role);
    END LOOP;

    -- The schema is the owner's; one that another role has made stays its own.
    EXECUTE format('GRANT CREATE ON DATABASE %I TO holdfast_owner', current_database());
    GRANT USAGE, CREATE ON SCHEMA public TO holdfast_owner;
    IF old_table IS NOT NULL AND to_regnamespace('holdfast') IS NULL THEN
        EXECUTE format('ALTER TABLE %s OWNER TO holdfast_owner', old_table);
    END IF;
END $$;
GRANT USAGE ON SCHEMA public TO holdfast_api, holdfast_worker, holdfast_sweeper;

-- Your own tables: the owner's functions and the three processes reach the columns of registered
-- targets and nothing else. `python -m worker targets add` prints the statements that are missing:
--
--     GRANT SELECT (id), UPDATE (embedding) ON ai_insights TO holdfast_worker;
--     GRANT SELECT (id, embedding), UPDATE (embedding) ON ai_insights TO holdfast_api, holdfast_owner;
--     GRANT SELECT (id, embedding, body) ON ai_insights TO holdfast_sweeper;
--
-- Wanted by some: the sweeper can name who keeps vacuum from its work only where it may see what
-- others do, their statements too.
--
--     GRANT pg_read_all_stats TO holdfast_sweeper;
