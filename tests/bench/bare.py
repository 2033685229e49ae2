"""What one would write without a ledger: an RQ job of 64 texts that embeds and stores them.

No claim, no lease, no check, no record: what is lost is lost. It is the yardstick for the drain.
"""

import sys
from collections.abc import Sequence

import httpx
import orjson
import psycopg
import redis
from psycopg.rows import dict_row
from rq import Queue, Worker

from app.adapters.sinks.pgvector import PgVector
from app.core.model import Target
from app.core.ports import Write

TARGET = Target(
    target_table="ai_insights",
    embedding_version="m",
    table_schema="public",
    table_name="ai_insights",
    id_column="id",
    id_type="bigint",
    vector_column="embedding",
    dimension=1024,
    model="m",
)
QUEUE = "bare"
UPDATE = """
UPDATE ai_insights AS t SET embedding = new.vector::vector
  FROM unnest(%(ids)s::bigint[], %(vectors)s::text[]) AS new(id, vector)
 WHERE t.id = new.id
"""


def embed(
    database_url: str, backend_url: str, ids: Sequence[int], texts: Sequence[str], form: str
) -> int:
    """Embed texts and store their vectors, sent as `text` or in pgvector's `binary` form."""
    # verify=False: the URL is plain http, and loading certificates would cost 0.1 s a job.
    answer = httpx.post(
        f"{backend_url}/api/embed",
        json={"model": "m", "input": texts},
        trust_env=False,
        verify=False,  # noqa: S501 - see above
    )
    vectors = orjson.loads(answer.content)["embeddings"]
    with psycopg.connect(database_url, row_factory=dict_row) as connection:
        if form == "binary":
            writes = [Write(str(id_), vector) for id_, vector in zip(ids, vectors, strict=True)]
            PgVector().write(connection, TARGET, writes)
        else:
            texts = [orjson.dumps(vector).decode() for vector in vectors]
            connection.execute(UPDATE, {"ids": ids, "vectors": texts})
    return len(ids)


def queue(redis_url: str) -> Queue:
    """Return the queue of these jobs."""
    return Queue(QUEUE, connection=redis.Redis.from_url(redis_url), serializer="json")


def main(redis_url: str) -> None:
    """Work until nothing is left; every module is loaded before the first fork."""
    Worker([queue(redis_url)], connection=redis.Redis.from_url(redis_url), serializer="json").work(
        burst=True, logging_level="WARNING"
    )


if __name__ == "__main__":
    main(sys.argv[1])
