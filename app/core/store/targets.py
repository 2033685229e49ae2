"""Targets: the registered tables and columns that vectors may be written to."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from psycopg.rows import class_row

from app.core import model
from app.core.config import Settings, label_of
from app.core.errors import Fault, InvalidRequest
from app.core.model import Target
from app.core.requests import TargetRequest
from app.core.store.database import Tx

LIST = """
SELECT target_table, embedding_version, table_schema, table_name, id_column, id_type,
       vector_column, dimension, model, client, prefix, text_column, is_current
  FROM holdfast.embedding_targets
 ORDER BY target_table, embedding_version
"""


def registered(tx: Tx) -> list[Target]:
    """Return every registered target."""
    with tx.cursor(row_factory=class_row(Target)) as cursor:
        return cursor.execute(LIST).fetchall()


def untargeted(known: Sequence[Target], settings: Settings) -> list[Target]:
    """Return what stands for a target where an item has none: one for each model of known size.

    The usual model comes first.
    """
    usual = model.untargeted(
        settings.embedding_model, settings.embedding_dim, settings.version_label
    )
    found = {settings.embedding_model: usual}
    for each in known:
        label = label_of(each.model, each.dimension)
        found.setdefault(each.model, model.untargeted(each.model, each.dimension, label))
    return [*found.values()]


# What the database says of a column: its table must exist, and the types must be ones we write.
# Not to_regclass for a schema that is named: it is an error where that may not be used.
LOOK = """
SELECT n.nspname AS table_schema, c.relname AS table_name, a.attname AS column_name,
       format_type(a.atttypid, NULL) AS type_name, a.atttypmod AS modifier,
       EXISTS (SELECT FROM pg_index i
                WHERE i.indrelid = c.oid AND i.indisunique AND i.indnkeyatts = 1
                  AND i.indkey[0] = a.attnum AND i.indpred IS NULL) AS is_unique
  FROM pg_class c
  JOIN pg_namespace n ON n.oid = c.relnamespace
  JOIN pg_attribute a ON a.attrelid = c.oid AND a.attnum > 0 AND NOT a.attisdropped
 WHERE c.oid = CASE WHEN %(schema)s::text IS NULL THEN to_regclass(quote_ident(%(name)s))::oid
                    ELSE (SELECT k.oid FROM pg_class k JOIN pg_namespace m ON m.oid = k.relnamespace
                           WHERE m.nspname = %(schema)s AND k.relname = %(name)s) END
   AND c.relkind IN ('r', 'p')
   AND a.attname = ANY(%(columns)s::text[])
"""
ELSEWHERE = """
SELECT n.nspname || '.' || c.relname AS name
  FROM pg_class c
  JOIN pg_namespace n ON n.oid = c.relnamespace
 WHERE c.relname = %(name)s AND c.relkind IN ('r', 'p')
   AND n.nspname IS DISTINCT FROM %(schema)s::text
 ORDER BY 1 LIMIT 5
"""
ID_TYPES = {
    "bigint": "bigint",
    "integer": "integer",
    "smallint": "smallint",
    "uuid": "uuid",
    "text": "text",
    "character varying": "text",
}
TEXT_TYPES = frozenset({"text", "character varying"})
MOST_DIMENSIONS = 16000
MISMATCH = "the target does not fit the database"


@dataclass(frozen=True, slots=True)
class NewTarget:
    """What an operator says of a target."""

    target_table: str
    id_column: str
    vector_column: str
    model: str
    embedding_version: str
    dimension: int
    client: str | None = None
    prefix: str = ""
    text_column: str | None = None
    is_current: bool = True


def asked(request: TargetRequest, settings: Settings) -> NewTarget:
    """Return what is asked for, with what it leaves out: the dimension, and a label made of it."""
    dimension = request.dimension or settings.embedding_dim
    is_usual = (request.model, dimension) == (settings.embedding_model, settings.embedding_dim)
    label = settings.version_label if is_usual else label_of(request.model, dimension)
    values = request.model_dump()
    values |= {"dimension": dimension, "embedding_version": request.embedding_version or label}
    return NewTarget(**values)


UNSET_CURRENT = """
UPDATE holdfast.embedding_targets SET is_current = false
 WHERE target_table = %(target_table)s AND is_current
"""
INSERT = """
INSERT INTO holdfast.embedding_targets
       (target_table, embedding_version, table_schema, table_name, id_column, id_type,
        vector_column, dimension, model, client, prefix, text_column, is_current)
VALUES (%(target_table)s, %(embedding_version)s, %(table_schema)s, %(table_name)s, %(id_column)s,
        %(id_type)s, %(vector_column)s, %(dimension)s, %(model)s, %(client)s,
        %(prefix)s, %(text_column)s, %(is_current)s)
    ON CONFLICT (target_table, embedding_version) DO UPDATE
   SET client = excluded.client, id_type = excluded.id_type, is_current = excluded.is_current,
       text_column = coalesce(excluded.text_column, embedding_targets.text_column)
 WHERE (embedding_targets.id_column, embedding_targets.vector_column, embedding_targets.model,
        embedding_targets.dimension, embedding_targets.prefix)
     = (excluded.id_column, excluded.vector_column, excluded.model, excluded.dimension,
        excluded.prefix)
"""
COLUMN_TAKEN = """
SELECT embedding_version FROM holdfast.embedding_targets
 WHERE table_schema = %(table_schema)s AND table_name = %(table_name)s
   AND vector_column = %(vector_column)s
   AND (target_table, embedding_version) <> (%(target_table)s, %(embedding_version)s)
"""


def register(tx: Tx, new: NewTarget) -> Target:
    """Register a target, or a new current version of one, after looking at its table.

    Raises InvalidRequest naming every field that does not fit the database.
    """
    target = looked_up(tx, new)
    values = asdict(target)
    taken = tx.execute(COLUMN_TAKEN, values).fetchone()
    if taken:
        message = (
            f"holds version {taken['embedding_version']}; another version needs its own column"
        )
        raise InvalidRequest("the target does not fit", faults=[_fault("vector_column", message)])
    if target.is_current:
        tx.execute(UNSET_CURRENT, values)
    if not tx.execute(INSERT, values).rowcount:
        message = (
            "is registered with another column, model, dimension or prefix; choose a new version"
        )
        raise InvalidRequest(
            "the target does not fit", faults=[_fault("embedding_version", message)]
        )
    return target


# Which role does what with a row: the worker writes vectors, the API reads and clears them, the
# sweeper reads all, and the owner's functions and commands do what both do.
MISSING_GRANTS = """
WITH roles AS (
    SELECT rolname AS name, rolname::text AS part FROM pg_roles
     WHERE rolname IN ('holdfast_api', 'holdfast_worker', 'holdfast_sweeper')
     UNION
    SELECT tableowner, 'owner' FROM pg_tables
     WHERE schemaname = 'holdfast' AND tablename = 'embedding_targets'
), the_table AS (
    SELECT c.oid FROM pg_class c JOIN pg_namespace n ON n.oid = c.relnamespace
     WHERE n.nspname = %(table_schema)s AND c.relname = %(table_name)s
), needs (part, place, privilege, name) AS (
    VALUES ('holdfast_worker', 1, 'SELECT', %(id_column)s::text),
           ('holdfast_worker', 2, 'UPDATE', %(vector_column)s),
           ('holdfast_api', 1, 'SELECT', %(id_column)s),
           ('holdfast_api', 1, 'SELECT', %(vector_column)s),
           ('holdfast_api', 2, 'UPDATE', %(vector_column)s),
           ('holdfast_sweeper', 1, 'SELECT', %(id_column)s),
           ('holdfast_sweeper', 1, 'SELECT', %(vector_column)s),
           ('holdfast_sweeper', 1, 'SELECT', %(text_column)s),
           ('owner', 1, 'SELECT', %(id_column)s),
           ('owner', 1, 'SELECT', %(vector_column)s),
           ('owner', 1, 'SELECT', %(text_column)s),
           ('owner', 2, 'UPDATE', %(vector_column)s)
), lacking AS (
    SELECT roles.name AS role, n.place, n.privilege,
           string_agg(DISTINCT quote_ident(n.name), ', ') AS columns
      FROM roles
      JOIN needs n USING (part)
      JOIN the_table ON true
     WHERE n.name IS NOT NULL
       AND NOT has_column_privilege(roles.name, the_table.oid, n.name, n.privilege)
     GROUP BY roles.name, n.place, n.privilege
)
SELECT format('GRANT USAGE ON SCHEMA %%I TO %%I', %(table_schema)s::text, name) AS statement,
       name = current_user AS is_mine, name AS role, 0 AS place
  FROM roles
 WHERE NOT has_schema_privilege(name, %(table_schema)s, 'USAGE')
 UNION ALL
SELECT format('GRANT %%s (%%s) ON %%I.%%I TO %%I', privilege, columns, %(table_schema)s::text,
              %(table_name)s::text, role), role = current_user, role, place
  FROM lacking
 ORDER BY role, place
"""


def missing_grants(tx: Tx, target: Target) -> list[str]:
    """Return the statements that the roles of deploy/roles.sql lack for a target that fits."""
    return [row["statement"] for row in tx.execute(MISSING_GRANTS, asdict(target))]


def faults(tx: Tx, target: Target) -> list[Fault]:
    """Say what no longer fits between a registered target and the database."""
    try:
        seen = looked_up(
            tx,
            NewTarget(
                target_table=target.target_table,
                id_column=target.id_column,
                vector_column=target.vector_column,
                model=target.model,
                embedding_version=target.embedding_version,
                dimension=target.dimension,
                client=target.client,
                prefix=target.prefix,
                text_column=target.text_column,
            ),
        )
    except InvalidRequest as exc:
        return list(exc.faults)
    if seen.id_type != target.id_type:
        return [_fault("id_column", f"was {target.id_type}, is {seen.id_type}")]
    rows = tx.execute(MISSING_GRANTS, asdict(target))
    return [
        _fault("target_table", f"not granted yet: {row['statement']}")
        for row in rows
        if row["is_mine"]
    ]


REMOVE = """
DELETE FROM holdfast.embedding_targets
 WHERE target_table = %(target_table)s AND embedding_version = %(embedding_version)s
   AND NOT is_current
"""


def remove(tx: Tx, target: Target) -> None:
    """Forget a version that is not the current one."""
    tx.execute(REMOVE, asdict(target))


def looked_up(tx: Tx, new: NewTarget) -> Target:
    """Return what the database says of a target; raises InvalidRequest where it does not fit."""
    columns = [new.id_column, new.vector_column, new.text_column]
    schema, name = _parts(new.target_table)
    rows = tx.execute(LOOK, {"schema": schema, "name": name, "columns": columns}).fetchall()
    if not rows:
        message = "no such table, or neither column is in it"
        elsewhere = tx.execute(ELSEWHERE, {"schema": schema, "name": name}).fetchall()
        if elsewhere:
            message += f"; there is {', '.join(row['name'] for row in elsewhere)}"
        raise InvalidRequest(MISMATCH, faults=[_fault("target_table", message)])
    found = {row["column_name"]: row for row in rows}
    id_row = found.get(new.id_column)
    id_problem = _id_problem(id_row)
    problems = [id_problem] if id_problem else []
    problems += _vector_problems(found.get(new.vector_column), new.dimension)
    if new.text_column is not None:
        problems += _text_problems(found.get(new.text_column))
    if problems or id_row is None:
        raise InvalidRequest(MISMATCH, faults=problems)
    return Target(
        **asdict(new),
        table_schema=id_row["table_schema"],
        table_name=id_row["table_name"],
        id_type=ID_TYPES[id_row["type_name"]],
    )


def _id_problem(row: dict[str, Any] | None) -> Fault | None:
    if row is None or not row["is_unique"]:
        return _fault("id_column", "no such column, or it is not unique by itself")
    if row["type_name"] not in ID_TYPES:
        return _fault("id_column", f"type {row['type_name']} is not supported")
    return None


def _vector_problems(row: dict[str, Any] | None, dimension: int) -> list[Fault]:
    if row is None or row["type_name"] not in ("vector", "halfvec"):
        return [_fault("vector_column", "no such column, or not of type vector or halfvec")]
    if row["modifier"] not in (-1, dimension):
        return [_fault("dimension", f"is {dimension}, the column's is {row['modifier']}")]
    if not 1 <= dimension <= MOST_DIMENSIONS:
        return [_fault("dimension", f"is {dimension}, not between 1 and {MOST_DIMENSIONS}")]
    return []


def _text_problems(row: dict[str, Any] | None) -> list[Fault]:
    if row is None or row["type_name"] not in TEXT_TYPES:
        return [_fault("text_column", "no such column, or not of type text")]
    return []


def _parts(name: str) -> tuple[str | None, str]:
    schema, dot, table = name.partition(".")
    return (schema, table) if dot else (None, name)


def _fault(field: str, message: str) -> Fault:
    return Fault(code="target_mismatch", message=message, field=field)
