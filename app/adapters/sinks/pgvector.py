"""The primary sink: a vector column of a table in the same Postgres, written at the settle."""

import struct
import sys
from array import array
from collections.abc import Mapping, Sequence
from typing import Any, LiteralString, cast

import psycopg
from psycopg import errors, sql
from psycopg.adapt import Buffer, Dumper
from psycopg.pq import Format
from psycopg.types import TypeInfo

from app.core.errors import ERROR_TEXT_CHARACTERS, BackendFault, ErrorClass
from app.core.model import Target
from app.core.ports import ReadRow, Transaction, Write, Written

# Names come from embedding_targets and reach SQL through sql.Identifier only. SKIP LOCKED: whoever
# changes a row and then enqueues its new text holds the row and waits for the item that we hold.
UPDATE = """
WITH held AS (
    SELECT t.{id} AS id
      FROM {table} t
     WHERE t.{id} = ANY(%(ids)s::text[]::{id_type}[])
       FOR NO KEY UPDATE SKIP LOCKED
)
UPDATE {table} AS t
   SET {vector} = new.vector
  FROM unnest(%(ids)s::text[], %(vectors)b::vector[]) AS new(target_id, vector)
  JOIN held ON held.id = new.target_id::{id_type}
 WHERE t.{id} = held.id
RETURNING t.{id}::text AS target_id
"""
EXISTING = """
SELECT {id}::text AS target_id FROM {table} WHERE {id} = ANY(%(ids)s::text[]::{id_type}[])
"""
READ = """
SELECT {id}::text AS target_id, {vector}::real[] AS vector
  FROM {table}
 WHERE {id} = ANY(%(ids)s::text[]::{id_type}[]) AND {vector} IS NOT NULL
"""
CLEAR = """
UPDATE {table}
   SET {vector} = NULL
 WHERE {id} = ANY(%(ids)s::text[]::{id_type}[]) AND {vector} IS NOT NULL
RETURNING {id}::text AS target_id
"""
# One pass over the rows and one over the ledger. Open work explains what it is about to change.
SURVEY = """
WITH seen AS MATERIALIZED (
    SELECT t.{id}::text AS id,
           CASE WHEN q.status IN ('pending', 'processing') THEN 'queued'
                WHEN q.status = 'failed' THEN 'failed'
                WHEN t.{vector} IS NULL AND v.is_wanted_empty THEN 'deleted'
                WHEN t.{vector} IS NULL THEN 'missing'
                WHEN v.id IS NULL OR v.deleted_at IS NOT NULL THEN 'unrecorded'
                WHEN vector_dims(t.{vector}) <> %(dimension)s THEN 'wrong_dimension'
                WHEN sha256(convert_to({text}, 'UTF8')) <> v.content_hash THEN 'stale'
                ELSE 'current' END AS kind
      FROM {table} t
      LEFT JOIN holdfast.vectors v
        ON v.target_table = %(target)s AND v.embedding_version = %(version)s
       AND v.target_id = t.{id}::text
      LEFT JOIN public.embedding_retry_queue q
        ON q.target_table = %(target)s AND q.embedding_version = %(version)s
       AND q.target_id = t.{id}::text
     UNION ALL
    SELECT v.target_id, 'gone'
      FROM holdfast.vectors v
     WHERE v.target_table = %(target)s AND v.embedding_version = %(version)s
       AND v.deleted_at IS NULL
       AND NOT EXISTS (SELECT FROM {table} t WHERE t.{id} = v.target_id::{id_type})
), named AS (
    INSERT INTO pg_temp.differences (kind, id) SELECT kind, id FROM seen WHERE kind <> 'current'
)
SELECT kind, count(*) AS rows FROM seen GROUP BY kind
"""
SIZE = """
SELECT count(*) AS rows, coalesce(sum(octet_length({text})), 0)::bigint AS text_bytes
  FROM {table} AS t
"""
PROGRESS = """
SELECT count(*) FILTER (WHERE {new_vector} IS NOT NULL) AS has,
       count(*) FILTER (WHERE {vector} IS NOT NULL AND {new_vector} IS NULL) AS missing
  FROM {table}
"""
# Driven by the ledger, so that only what differs there is looked up in the table.
OUTDATED = """
SELECT count(*) AS rows
  FROM holdfast.vectors o
  JOIN holdfast.vectors n
    ON n.target_table = o.target_table AND n.target_id = o.target_id
   AND n.embedding_version = %(new_version)s AND n.deleted_at IS NULL
  JOIN {table} t ON t.{id} = o.target_id::{id_type}
 WHERE o.target_table = %(target)s AND o.embedding_version = %(version)s AND o.deleted_at IS NULL
   AND n.content_hash <> o.content_hash AND t.{new_vector} IS NOT NULL
   AND sha256(convert_to({text}, 'UTF8')) = o.content_hash
"""
READ_ON = """
SELECT t.{id}::text AS target_id, {text} AS text,
       NOT coalesce(n.content_hash = sha256(convert_to({text}, 'UTF8')) AND n.deleted_at IS NULL
                    AND t.{new_vector} IS NOT NULL, false)
       AND NOT coalesce(o.is_wanted_empty, false) AS is_wanted
  FROM {table} t
  LEFT JOIN holdfast.vectors n
    ON n.target_table = %(target)s AND n.embedding_version = %(new_version)s
   AND n.target_id = t.{id}::text
  LEFT JOIN holdfast.vectors o
    ON o.target_table = %(target)s AND o.embedding_version = %(version)s
   AND o.target_id = t.{id}::text
 WHERE %(after)s::text IS NULL OR t.{id} > %(after)s::text::{id_type}
 ORDER BY t.{id}
 LIMIT %(limit)s
"""
TEXTS = """
SELECT {id}::text AS target_id, {text} AS text
  FROM {table} AS t
 WHERE {id} = ANY(%(ids)s::text[]::{id_type}[]) AND {text} IS NOT NULL
"""
ID_TYPES: Mapping[str, LiteralString] = {
    "bigint": "bigint",
    "integer": "integer",
    "smallint": "smallint",
    "uuid": "uuid",
    "text": "text",
}
COLUMN = """
SELECT atttypmod AS dimension
  FROM pg_attribute
 WHERE attrelid = to_regclass(%(table)s) AND attname = %(column)s
"""
# What says "not this row": bad values, broken constraints, and what a trigger of the table raises.
REFUSALS = (
    psycopg.DataError,
    psycopg.IntegrityError,
    psycopg.InternalError,
    errors.PlpgsqlError,
    errors.RaiseException,
    errors.AssertFailure,
    errors.NoDataFound,
    errors.TooManyRows,
    errors.TriggeredActionException,
    errors.WithCheckOptionViolation,
)


class _Vector:
    """A vector on its way to Postgres in pgvector's binary form."""

    __slots__ = ("packed",)

    def __init__(self, vector: Sequence[float]) -> None:
        numbers = array("f", vector)
        if sys.byteorder == "little":
            numbers.byteswap()
        self.packed = struct.pack("!HH", len(vector), 0) + numbers.tobytes()


class _VectorDumper(Dumper):
    format = Format.BINARY

    def dump(self, obj: _Vector) -> Buffer:
        return obj.packed


class PgVector:
    """Writes to and reads from the vector columns of registered targets."""

    def write(self, tx: Transaction, target: Target, writes: Sequence[Write]) -> Written:
        """Store the vectors in the open transaction; name rows that are gone, refused or locked.

        Raises BackendFault where the table itself is not as it was registered.
        """
        connection = cast("psycopg.Connection[dict[str, Any]]", tx)
        _register(connection)
        stored: set[str] = set()
        refused: dict[str, str] = {}
        self._write(connection, target, writes, stored, refused)
        missing = {write.target_id for write in writes} - stored - refused.keys()
        busy = self._existing(tx, target, missing) if missing else frozenset[str]()
        return Written(gone=frozenset(missing - busy), refused=refused, busy=busy)

    def _existing(self, tx: Transaction, target: Target, ids: set[str]) -> frozenset[str]:
        rows = tx.execute(_composed(EXISTING, target), {"ids": list(ids)})
        return frozenset(row["target_id"] for row in rows)

    def read(
        self, tx: Transaction, target: Target, target_ids: Sequence[str]
    ) -> dict[str, list[float]]:
        """Return the stored vector of each row that has one."""
        rows = tx.execute(_composed(READ, target), {"ids": list(target_ids)})
        return {row["target_id"]: row["vector"] for row in rows}

    def clear(self, tx: Transaction, target: Target, target_ids: Sequence[str]) -> list[str]:
        """Set the vectors of rows to NULL; return which had one."""
        rows = tx.execute(_composed(CLEAR, target), {"ids": list(target_ids)})
        return [row["target_id"] for row in rows]

    def size(self, tx: Transaction, target: Target) -> tuple[int, int]:
        """Return how many rows a target has, and how many bytes of text."""
        row = tx.execute(_composed(SIZE, target)).fetchone()
        return row["rows"], row["text_bytes"]

    def progress(self, tx: Transaction, old: Target, new: Target) -> tuple[int, int]:
        """Return how many rows have the new version, and how many have the old one only."""
        row = tx.execute(_composed(PROGRESS, old, new)).fetchone()
        return row["has"], row["missing"]

    def outdated(self, tx: Transaction, old: Target, new: Target) -> int:
        """Return how many rows have their text in the old version, and an older one in the new."""
        values = {
            "target": old.target_table,
            "version": old.embedding_version,
            "new_version": new.embedding_version,
        }
        row = tx.execute(_composed(OUTDATED, old, new), values).fetchone()
        count: int = row["rows"]
        return count

    def read_on(
        self, tx: Transaction, old: Target, new: Target, *, after: str | None, limit: int
    ) -> list[ReadRow]:
        """Return the next rows behind an id, in the order of their ids."""
        values = {
            "target": old.target_table,
            "version": old.embedding_version,
            "new_version": new.embedding_version,
            "after": after,
            "limit": limit,
        }
        return [ReadRow(**row) for row in tx.execute(_composed(READ_ON, old, new), values)]

    def survey(self, tx: Transaction, target: Target) -> dict[str, int]:
        """Compare the rows with the ledger and the queue; return how many are of which kind."""
        connection = cast("psycopg.Connection[dict[str, Any]]", tx)
        _register(connection)
        values = {
            "target": target.target_table,
            "version": target.embedding_version,
            "dimension": target.dimension,
        }
        rows = connection.execute(_composed(SURVEY, target), values)
        return {row["kind"]: row["rows"] for row in rows}

    def texts(self, tx: Transaction, target: Target, target_ids: Sequence[str]) -> dict[str, str]:
        """Return the present text of each row, where the target says in which column it is."""
        if target.text_column is None:
            return {}
        rows = tx.execute(_composed(TEXTS, target), {"ids": list(target_ids)})
        return {row["target_id"]: row["text"] for row in rows}

    def _write(
        self,
        connection: "psycopg.Connection[dict[str, Any]]",
        target: Target,
        writes: Sequence[Write],
        stored: set[str],
        refused: dict[str, str],
    ) -> None:
        values = {
            "ids": [write.target_id for write in writes],
            "vectors": [_Vector(write.vector) for write in writes],
        }
        try:
            with connection.transaction():
                rows = connection.execute(_composed(UPDATE, target), values)
                stored |= {row["target_id"] for row in rows}
        except REFUSALS as exc:
            _check_dimension(connection, target)
            if len(writes) == 1:
                refused[writes[0].target_id] = _reason(exc)
                return
            middle = len(writes) // 2
            self._write(connection, target, writes[:middle], stored, refused)
            self._write(connection, target, writes[middle:], stored, refused)
        except psycopg.ProgrammingError as exc:
            message = f"target {target.target_table}: {_reason(exc)}"
            raise BackendFault(ErrorClass.BAD_CONFIG, message) from exc


def build() -> PgVector:
    """Make the sink; it uses the connection that it is handed."""
    return PgVector()


def _check_dimension(connection: "psycopg.Connection[dict[str, Any]]", target: Target) -> None:
    """Raise BackendFault where the column was made anew: then no row is to blame."""
    table = sql.Identifier(target.table_schema, target.table_name).as_string(connection)
    values = {"table": table, "column": target.vector_column}
    row = connection.execute(COLUMN, values).fetchone()
    if row and row["dimension"] not in (-1, target.dimension):
        message = (
            f"target {target.target_table}: the column {target.vector_column} has"
            f" {row['dimension']} dimensions, registered are {target.dimension}"
        )
        raise BackendFault(ErrorClass.BAD_CONFIG, message)


def _composed(statement: LiteralString, target: Target, new: Target | None = None) -> sql.Composed:
    return sql.SQL(statement).format(
        table=_identifier(target.table_schema, target.table_name),
        id=_identifier(target.id_column),
        vector=_identifier(target.vector_column),
        id_type=sql.SQL(ID_TYPES[target.id_type]),
        text=_text(target),
        new_vector=_identifier((new or target).vector_column),
    )


def _text(target: Target) -> sql.Composable:
    # Compared with NULL nothing is stale: where no column is known no text can be read.
    if target.text_column is None:
        return sql.SQL("NULL::text")
    return sql.SQL("t.") + _identifier(target.text_column)


def _identifier(*names: str) -> sql.Identifier:
    # In a statement with parameters a percent sign would begin a placeholder, in a name too.
    return sql.Identifier(*(name.replace("%", "%%") for name in names))


def _register(connection: "psycopg.Connection[dict[str, Any]]") -> None:
    if connection.adapters.types.get("vector") is not None:
        return
    info = TypeInfo.fetch(connection, "vector")
    if info is None:
        message = "the extension vector is not in the database's search path"
        raise BackendFault(ErrorClass.BAD_CONFIG, message)
    info.register(connection)
    dumper = type("_ThisVectorDumper", (_VectorDumper,), {"oid": info.oid})
    connection.adapters.register_dumper(_Vector, dumper)


def _reason(exc: psycopg.Error) -> str:
    # Only the server's primary message: its detail may quote the row, and the row is the user's.
    said = exc.diag.message_primary or type(exc).__name__
    return f"{exc.sqlstate or ''} {said}".strip()[:ERROR_TEXT_CHARACTERS]
