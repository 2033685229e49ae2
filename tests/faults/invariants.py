"""What must hold of the queue whatever happened, as statements that find nothing when it does.

Some of them ask an audit: triggers, in a test's database only, that write down each claim, each
change of a status and each vector that reaches a target table. `install` before the first item.
"""

from collections.abc import Sequence
from typing import Any, LiteralString

import psycopg
from psycopg.rows import dict_row

from app.core.model import LEGAL_CHANGES

Connection = psycopg.Connection[dict[str, Any]]

AUDIT = """
CREATE SCHEMA audit;
-- What was posted; without a job until the 202 came.
CREATE TABLE audit.sent (target_table text, target_id text, job_id text);
CREATE TABLE audit.legal (old text, new text);
CREATE TABLE audit.claims (
    item_id bigint, token bigint, bell text, claimed_at timestamptz, due_at timestamptz,
    lease_until timestamptz, ended_at timestamptz, outcome text, was_refunded boolean
);
CREATE TABLE audit.changes (
    item_id bigint, old text, new text, is_same_text boolean
);
CREATE TABLE audit.effects (
    item_id bigint, content_hash bytea, token bigint, vector text, at timestamptz
);
CREATE INDEX ON audit.claims (item_id);
CREATE INDEX ON audit.effects (item_id);

CREATE FUNCTION audit.note_item() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
    IF OLD.status <> NEW.status THEN
        INSERT INTO audit.changes
        VALUES (NEW.id, OLD.status, NEW.status, OLD.content_hash = NEW.content_hash);
    END IF;
    IF OLD.lease_token = NEW.lease_token THEN
        UPDATE audit.claims SET lease_until = NEW.lease_until
         WHERE item_id = NEW.id AND token = NEW.lease_token;
        RETURN NULL;
    END IF;
    UPDATE audit.claims
       SET ended_at = clock_timestamp(), outcome = NEW.status,
           was_refunded = NEW.attempts < OLD.attempts
     WHERE item_id = NEW.id AND token = OLD.lease_token;
    IF NEW.lease_token IS NOT NULL THEN
        INSERT INTO audit.claims
        VALUES (NEW.id, NEW.lease_token, NEW.leased_by, clock_timestamp(), OLD.next_attempt_at,
                NEW.lease_until);
    END IF;
    RETURN NULL;
END $$;
CREATE TRIGGER audit_item AFTER UPDATE ON public.embedding_retry_queue
    FOR EACH ROW EXECUTE FUNCTION audit.note_item();

CREATE FUNCTION audit.note_effect() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
    INSERT INTO audit.effects
    SELECT q.id, q.content_hash, q.lease_token, NEW.embedding::text, clock_timestamp()
      FROM public.embedding_retry_queue q
     WHERE q.target_table = TG_TABLE_NAME AND q.target_id = NEW.id::text;
    IF NOT FOUND THEN
        INSERT INTO audit.effects (vector, at) VALUES (NEW.embedding::text, clock_timestamp());
    END IF;
    RETURN NULL;
END $$;
CREATE TRIGGER audit_effect AFTER UPDATE OF embedding ON public.ai_insights
    FOR EACH ROW EXECUTE FUNCTION audit.note_effect();
CREATE TRIGGER audit_effect AFTER UPDATE OF embedding ON public.conversations
    FOR EACH ROW EXECUTE FUNCTION audit.note_effect();
"""

INVARIANTS: dict[str, LiteralString] = {
    "I1 every accepted item is final": """
        SELECT s.job_id, s.target_id, q.status
          FROM audit.sent s
          LEFT JOIN public.embedding_retry_queue q USING (target_table, target_id)
         WHERE s.job_id IS NOT NULL
           AND (q.status IS NULL OR q.status NOT IN ('done', 'failed', 'cancelled'))
    """,
    "I2 every item and every effect was asked for": """
        SELECT q.target_table, q.target_id FROM public.embedding_retry_queue q
         WHERE NOT EXISTS (SELECT FROM audit.sent s
                            WHERE (s.target_table, s.target_id) = (q.target_table, q.target_id))
        UNION ALL
        SELECT NULL, vector FROM audit.effects WHERE item_id IS NULL
    """,
    "I3 one text of an item has one vector": """
        SELECT item_id, content_hash, count(DISTINCT vector) AS vectors
          FROM audit.effects
         GROUP BY item_id, content_hash HAVING count(DISTINCT vector) > 1
    """,
    "I4 nothing is written but under the newest lease": """
        SELECT e.item_id, e.token, c.token AS newer
          FROM audit.effects e
          LEFT JOIN audit.claims c
            ON c.item_id = e.item_id AND c.token > e.token AND c.claimed_at < e.at
         WHERE e.token IS NULL OR c.token IS NOT NULL
    """,
    "I4 what is stored is of the claim that reached done": """
        SELECT q.id, last.token
          FROM public.embedding_retry_queue q
          LEFT JOIN LATERAL (SELECT token FROM audit.effects
                              WHERE item_id = q.id ORDER BY at DESC LIMIT 1) AS last ON true
         WHERE q.status = 'done' AND q.skip_reason IS NULL
           AND NOT EXISTS (SELECT FROM audit.claims c
                            WHERE c.item_id = q.id AND c.token = last.token AND c.outcome = 'done')
    """,
    "I5 no item has two leases at a time": """
        SELECT a.item_id, a.token, b.token AS other
          FROM audit.claims a
          JOIN audit.claims b ON b.item_id = a.item_id AND b.token > a.token
           AND b.claimed_at < coalesce(a.ended_at, a.lease_until)
    """,
    "I6 attempts are the claims that were not handed back": """
        SELECT q.id, q.attempts, q.max_attempts, count(c) AS claims
          FROM public.embedding_retry_queue q
          LEFT JOIN audit.claims c ON c.item_id = q.id AND c.was_refunded IS NOT TRUE
         GROUP BY q.id
        HAVING q.attempts <> count(c) OR q.attempts > q.max_attempts
    """,
    "I6 nothing fails before its last attempt but for good": """
        SELECT id, attempts, max_attempts, error_class
          FROM public.embedding_retry_queue
         WHERE status = 'failed' AND attempts < max_attempts
           AND error_class NOT IN ('bad_input', 'store_reject')
    """,
    "I7 only legal changes": """
        SELECT c.* FROM audit.changes c
         WHERE NOT EXISTS (SELECT FROM audit.legal l WHERE (l.old, l.new) = (c.old, c.new))
    """,
    "I7 a failed item revives by a requeue or with a new text": """
        SELECT c.* FROM audit.changes c
         WHERE c.old = 'failed' AND c.is_same_text
           AND NOT EXISTS (SELECT FROM holdfast.requeues r
                             JOIN holdfast.job_items i USING (job_id)
                            WHERE i.item_id = c.item_id)
    """,
    "I8 done and a vector are one": """
        SELECT q.id, q.status, v.embedding IS NULL AS is_empty
          FROM public.embedding_retry_queue q
          JOIN (SELECT 'ai_insights' AS target_table, id, embedding FROM public.ai_insights
                 UNION ALL
                SELECT 'conversations', id, embedding FROM public.conversations) AS v
            ON v.target_table = q.target_table AND v.id::text = q.target_id
         WHERE (q.status = 'done' AND q.skip_reason IS NULL) = (v.embedding IS NULL)
           AND NOT EXISTS (SELECT FROM audit.changes c
                            WHERE c.item_id = q.id AND c.old = 'done')
    """,
    "I9 counts are those of the items": """
        SELECT * FROM (
            SELECT j.id, sum(c.pending) AS pending, sum(c.processing) AS processing,
                   sum(c.done) AS done, sum(c.skipped) AS skipped, sum(c.failed) AS failed,
                   sum(c.cancelled) AS cancelled
              FROM holdfast.jobs j JOIN holdfast.job_counts c ON c.job_id = j.id
             WHERE j.kind = 'embedding' AND (j.finished_at IS NULL OR NOT EXISTS (
                   SELECT FROM holdfast.job_items i WHERE i.job_id = j.id AND i.outcome <> ''))
             GROUP BY j.id) AS kept
        EXCEPT
        SELECT i.job_id, count(*) FILTER (WHERE q.status = 'pending'),
               count(*) FILTER (WHERE q.status = 'processing'),
               count(*) FILTER (WHERE q.status = 'done' AND q.skip_reason IS NULL),
               count(*) FILTER (WHERE q.skip_reason IS NOT NULL),
               count(*) FILTER (WHERE q.status = 'failed'),
               count(*) FILTER (WHERE q.status = 'cancelled')
          FROM holdfast.job_items i JOIN public.embedding_retry_queue q ON q.id = i.item_id
         GROUP BY i.job_id
    """,
    "I9 a job is final when all its items are": """
        SELECT j.id, j.state, j.final_counts
          FROM holdfast.jobs j
         WHERE (j.finished_at IS NULL) = NOT EXISTS (
                   SELECT FROM holdfast.job_items i
                     JOIN public.embedding_retry_queue q ON q.id = i.item_id
                    WHERE i.job_id = j.id AND i.outcome IS NULL
                      AND q.status IN ('pending', 'processing'))
    """,
    "I9 the words of a final job are right": """
        SELECT id, state, final_counts
          FROM holdfast.jobs, jsonb_to_record(final_counts)
               AS c(done int, skipped int, failed int, cancelled int, pending int, processing int)
         WHERE finished_at IS NOT NULL AND kind = 'embedding' AND (
               state <> CASE WHEN cancelled > 0 THEN 'cancelled' WHEN failed = 0 THEN 'completed'
                             WHEN done + skipped > 0 THEN 'completed_with_errors'
                             ELSE 'failed' END
            OR pending + processing > 0
            OR done + skipped + failed + cancelled <> (
                   SELECT count(*) FROM holdfast.job_items i WHERE i.job_id = jobs.id))
    """,
    "I10 what is done stands in the ledger with its text": """
        SELECT q.id, v.content_hash = q.content_hash AS is_its_text, v.deleted_at
          FROM public.embedding_retry_queue q
          LEFT JOIN holdfast.vectors v USING (target_table, target_id, embedding_version)
         WHERE q.status = 'done' AND q.skip_reason IS NULL AND q.target_table <> ''
           AND (v.content_hash = q.content_hash AND v.deleted_at IS NULL) IS NOT TRUE
    """,
    "I10 a follower holds no version that the ledger does not have": """
        SELECT s.vector_id, s.sink, s.version_wanted, s.version_written, v.version
          FROM holdfast.item_sinks s JOIN holdfast.vectors v ON v.id = s.vector_id
         WHERE greatest(s.version_wanted, s.version_written) > v.version
            OR (s.status = 'done' AND s.version_written <> v.version)
    """,
    "I10 every follower has caught up": """
        SELECT vector_id, sink, status, last_error FROM holdfast.item_sinks WHERE status = 'pending'
    """,
    "I12 nothing is claimed before its time": """
        SELECT item_id, due_at, claimed_at FROM audit.claims WHERE claimed_at < due_at
    """,
}

AT_THE_END = (
    "I1 every accepted item is final",
    "I9 a job is final when all its items are",
    "I10 every follower has caught up",
)

COUNTED = """
SELECT count(*) FILTER (WHERE is_accepted) AS accepted,
       count(*) FILTER (WHERE is_accepted AND status = 'done') AS done,
       count(*) FILTER (WHERE is_accepted AND status = 'failed') AS failed,
       count(*) FILTER (WHERE is_accepted
                          AND (status IS NULL OR status IN ('pending', 'processing'))) AS lost
  FROM (SELECT s.target_table, s.target_id, bool_or(s.job_id IS NOT NULL) AS is_accepted
          FROM audit.sent s GROUP BY 1, 2) AS sent
  LEFT JOIN public.embedding_retry_queue q USING (target_table, target_id)
"""


def install(database_url: str) -> None:
    """Begin the audit."""
    with psycopg.connect(database_url, autocommit=True) as connection:
        connection.execute(AUDIT)
        with connection.cursor() as cursor:
            legal = [(old.value, new.value) for old, new in LEGAL_CHANGES]
            cursor.executemany("INSERT INTO audit.legal VALUES (%s, %s)", legal)


def keep_books(
    database_url: str, target_table: str, sent: Sequence[tuple[int, str | None]]
) -> None:
    """Take over what the client's own books say."""
    rows = [(target_table, str(number), job_id) for number, job_id in sent]
    with psycopg.connect(database_url) as connection, connection.cursor() as cursor:
        cursor.execute("TRUNCATE audit.sent")
        with cursor.copy("COPY audit.sent (target_table, target_id, job_id) FROM STDIN") as copy:
            for row in rows:
                copy.write_row(row)


def violations(database_url: str, *, at_any_time: bool = False) -> dict[str, list[dict[str, Any]]]:
    """Return each invariant that does not hold, with the first rows that show it.

    `at_any_time`: without those that hold only when all is over.
    """
    found: dict[str, list[dict[str, Any]]] = {}
    with psycopg.connect(database_url, autocommit=True, row_factory=dict_row) as connection:
        for name, statement in INVARIANTS.items():
            if at_any_time and name in AT_THE_END:
                continue
            rows = connection.execute(statement).fetchmany(5)
            if rows:
                found[name] = rows
    return found


def figures(database_url: str) -> dict[str, int]:
    """Count what was accepted, and what came of it."""
    with psycopg.connect(database_url, autocommit=True, row_factory=dict_row) as connection:
        row = connection.execute(COUNTED).fetchone()
        assert row
        for name, invariant in (("unexpected", "I2"), ("duplicate_effects", "I3")):
            [statement] = [each for key, each in INVARIANTS.items() if key.startswith(invariant)]
            row[name] = len(connection.execute(statement).fetchall())
    return row
