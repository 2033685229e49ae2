"""Memory: chunks of ingested documents, the product's own target (`python -m migrations --memory`).

The rows of one document are replaced together: an ingest is what a client, a project, a source and
an ingest_id name, and the later one holds entirely.
"""

from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from psycopg.types.json import Json

from app.core.store.database import Tx

CREATE_INCOMING = """
CREATE TEMPORARY TABLE IF NOT EXISTS incoming_chunks (
    id uuid, record integer, chunk integer, text text, metadata json
)
"""
EMPTY_INCOMING = "TRUNCATE pg_temp.incoming_chunks"
COPY_INCOMING = """
COPY pg_temp.incoming_chunks (id, record, chunk, text, metadata) FROM STDIN
"""


@dataclass(frozen=True, slots=True)
class Chunk:
    """One piece of one record."""

    id: str
    record: int
    number: int
    text: str
    metadata: dict[str, Any] | None


@dataclass(frozen=True, slots=True)
class Document:
    """What names an ingest."""

    client: str
    project: str
    source: str
    ingest_id: str


def copy_in(tx: Tx, chunks: Iterable[Chunk]) -> None:
    """Collect the chunks of an ingest in the session's temporary table."""
    tx.execute(CREATE_INCOMING)
    tx.execute(EMPTY_INCOMING)
    with tx.cursor() as cursor, cursor.copy(COPY_INCOMING) as copy:
        for each in chunks:
            metadata = None if each.metadata is None else Json(each.metadata)
            copy.write_row((each.id, each.record, each.number, each.text, metadata))


# Two ingests of one document come one after the other, and the later one holds entirely.
LOCK = """
SELECT pg_advisory_xact_lock(hashtextextended(
           concat_ws(E'\\n', %(client)s::text, %(project)s::text, %(source)s::text,
                     %(ingest_id)s::text), 0))
"""
REMOVE_GONE = """
DELETE FROM holdfast.memory_chunks m
 WHERE (m.client, m.project, m.source, m.ingest_id)
       = (%(client)s, %(project)s, %(source)s, %(ingest_id)s)
   AND NOT EXISTS (SELECT FROM pg_temp.incoming_chunks i WHERE i.id = m.id)
RETURNING m.id::text AS id
"""
# The vector of a changed text stays until the new one is there, so that a search misses no row.
REPLACE = """
INSERT INTO holdfast.memory_chunks AS m
       (id, client, project, source, ingest_id, record, chunk, text, metadata)
SELECT i.id, %(client)s, %(project)s, %(source)s, %(ingest_id)s, i.record, i.chunk, i.text,
       i.metadata
  FROM pg_temp.incoming_chunks i
 ORDER BY i.id
    ON CONFLICT (id) DO UPDATE
   SET text = excluded.text, metadata = excluded.metadata, updated_at = now()
 WHERE m.text <> excluded.text
    OR m.metadata::text IS DISTINCT FROM excluded.metadata::text
RETURNING m.id::text AS id, m.xmax = 0 AS is_new
"""


@dataclass(frozen=True, slots=True)
class Replaced:
    """The ids of rows that went, and of rows that were not there before."""

    gone: Sequence[str]
    new: Sequence[str]


def replace(tx: Tx, document: Document) -> Replaced:
    """Let a document consist of the collected chunks."""
    values = asdict(document)
    tx.execute(LOCK, values)
    gone = [str(row["id"]) for row in tx.execute(REMOVE_GONE, values)]
    written = tx.execute(REPLACE, values).fetchall()
    return Replaced(gone, [str(row["id"]) for row in written if row["is_new"]])
