-- Only with --demo: two tables as a team might have them, registered as targets.
-- The runner sets holdfast.dimension, holdfast.model and holdfast.version before.

DO $$
DECLARE
    wanted  integer := current_setting('holdfast.dimension')::integer;
    found   integer;
    name    text;
BEGIN
    CREATE EXTENSION IF NOT EXISTS vector SCHEMA public;
    FOREACH name IN ARRAY ARRAY['ai_insights', 'conversations'] LOOP
        EXECUTE format('CREATE TABLE IF NOT EXISTS public.%I (id bigint PRIMARY KEY,'
                       ' body text NOT NULL, embedding vector(%s))', name, wanted);
        SELECT atttypmod INTO found
          FROM pg_attribute
         WHERE attrelid = format('public.%I', name)::regclass AND attname = 'embedding';
        IF found <> wanted THEN
            RAISE EXCEPTION 'EMBEDDING_DIM is %, but the column %.embedding has % dimensions',
                            wanted, name, found
                USING HINT = 'Set EMBEDDING_DIM to the column''s number, or start with another'
                             ' HOLDFAST_HOME.';
        END IF;
        INSERT INTO holdfast.embedding_targets
               (target_table, embedding_version, table_schema, table_name, id_column, id_type,
                vector_column, dimension, model)
        VALUES (name, current_setting('holdfast.version'), 'public', name, 'id', 'bigint',
                'embedding', wanted, current_setting('holdfast.model'))
            ON CONFLICT DO NOTHING;
    END LOOP;
END $$;
