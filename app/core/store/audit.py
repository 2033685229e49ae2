"""The self-audit: statements that find nothing as long as all is well, whatever has happened.

Each is read at one moment, beside work that goes on, so it leaves out what may just be changing.
"""

from dataclasses import dataclass
from typing import Any, LiteralString

from app.core.store.database import Tx

AUDIT: dict[str, LiteralString] = {
    "an item waits or is in hand for a job that is not open": """
        SELECT q.id AS item, q.status, q.job_id
          FROM public.embedding_retry_queue q
          LEFT JOIN holdfast.jobs j ON j.id = q.job_id
         WHERE q.status IN ('pending', 'processing') AND q.job_id IS NOT NULL
           AND (j.id IS NULL OR j.finished_at < now() - interval '10 minutes')
    """,
    "a lease ran out and nobody recovered it": """
        SELECT id AS item, leased_by, lease_until
          FROM public.embedding_retry_queue
         WHERE status = 'processing' AND lease_until < now() - interval '10 minutes'
    """,
    "an item has more attempts than it may have": """
        SELECT id AS item, attempts, max_attempts
          FROM public.embedding_retry_queue WHERE attempts > max_attempts
    """,
    "a job has nothing open and is not final": """
        SELECT j.id AS job, j.state
          FROM holdfast.jobs j
         WHERE j.finished_at IS NULL AND j.created_at < now() - interval '10 minutes'
           AND j.kind = 'embedding'
           AND NOT EXISTS (SELECT FROM holdfast.job_items i
                             JOIN public.embedding_retry_queue q ON q.id = i.item_id
                            WHERE i.job_id = j.id
                              AND (q.status IN ('pending', 'processing')
                                   OR q.updated_at > now() - interval '10 minutes'))
    """,
    "a job counts other items than it has": """
        SELECT j.id AS job, c.total AS counted, i.items AS has
          FROM holdfast.jobs j
         CROSS JOIN LATERAL (SELECT sum(pending + processing + done + skipped + failed + cancelled)
                                    AS total
                               FROM holdfast.job_counts WHERE job_id = j.id) AS c
         CROSS JOIN LATERAL (SELECT count(*) AS items
                               FROM holdfast.job_items WHERE job_id = j.id) AS i
         WHERE j.kind = 'embedding' AND j.finished_at IS NULL AND c.total <> i.items
    """,
    "a final job does not add up": """
        SELECT id AS job, state, final_counts
          FROM holdfast.jobs
         WHERE finished_at IS NOT NULL
           AND ((final_counts ->> 'pending')::bigint > 0
                OR (final_counts ->> 'processing')::bigint > 0)
    """,
    "what is done does not stand in the ledger": """
        SELECT q.id AS item, q.target_table, q.processed_at
          FROM public.embedding_retry_queue q
          LEFT JOIN holdfast.vectors v USING (target_table, target_id, embedding_version)
         WHERE q.status = 'done' AND q.skip_reason IS NULL AND q.target_table <> ''
           AND (v.content_hash = q.content_hash AND v.deleted_at IS NULL) IS NOT TRUE
    """,
    "a sink claims a version that the ledger does not have": """
        SELECT s.vector_id, s.sink, s.version_written, v.version
          FROM holdfast.item_sinks s JOIN holdfast.vectors v ON v.id = s.vector_id
         WHERE s.version_wanted > v.version OR (s.status = 'done' AND s.version_written > v.version)
    """,
    "a failed item has no attempt that says why": """
        SELECT q.id AS item, q.error_class
          FROM public.embedding_retry_queue q
         WHERE q.status = 'failed' AND q.job_id IS NOT NULL AND q.attempts > 0
           AND q.deliveries > 0
           AND NOT EXISTS (SELECT FROM holdfast.item_attempts a WHERE a.item_id = q.id)
    """,
}
SHOWN = 5


@dataclass(frozen=True, slots=True)
class Violation:
    """Something that must never be so, and the first rows that show it."""

    what: str
    rows: list[dict[str, Any]]


def audit(tx: Tx) -> list[Violation]:
    """Return what does not hold; nothing where all is well."""
    found: list[Violation] = []
    for what, statement in AUDIT.items():
        rows = tx.execute(statement).fetchmany(SHOWN)
        if rows:
            found.append(Violation(what, rows))
    return found
