"""Rows that came without a job: ADR-009's, and those of code that still inserts as it did."""

import logging
import secrets
from collections import Counter

from app.core.context import Context
from app.core.model import EMBEDDING_PREFIX
from app.core.store import items, jobs
from app.core.store.jobs import NewJob

log = logging.getLogger(__name__)


def run_once(ctx: Context) -> Counter[str]:
    """Make one job of the client `sql` of all rows without one whose target is registered."""
    with ctx.database.transaction() as tx:
        if not items.has_unowned(tx):
            return Counter()
        job_id = f"{EMBEDDING_PREFIX}{secrets.token_hex(16)}"
        adopted = items.adopt(tx, job_id)
        if not adopted:
            return Counter()
        jobs.insert(tx, NewJob(job_id, client="sql"))
    facts = {"event": "job_accepted", "job_id": job_id, "client": "sql", "items": adopted}
    log.info("rows without a job taken up", extra=facts)
    return Counter(adopted=adopted)
