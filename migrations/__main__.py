"""Applies the numbered SQL files in order, each once, each in its own transaction; then the grants.

python -m migrations            apply what is missing
python -m migrations --check    change nothing; exit 1 where something is missing or differs
python -m migrations --memory   also the table that POST /memory/ingest writes to
python -m migrations --demo     also the demo's tables and targets
"""

import argparse
import hashlib
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import psycopg
from psycopg.rows import scalar_row

from app.core import config
from app.core.errors import ConfigError, HoldfastError
from app.core.model import index_note

HERE = Path(__file__).parent
LOCK_KEY = 0x686F6C64  # "hold": one migration at a time, whoever starts it

PREPARE = """
CREATE SCHEMA IF NOT EXISTS holdfast;
CREATE TABLE IF NOT EXISTS holdfast.schema_migrations (
    name        text PRIMARY KEY,
    checksum    text NOT NULL,
    applied_at  timestamptz NOT NULL DEFAULT now()
);
"""
APPLIED = "SELECT name || ' ' || checksum FROM holdfast.schema_migrations ORDER BY name"
EXISTS = "SELECT to_regclass('holdfast.schema_migrations') IS NOT NULL"
RECORD = "INSERT INTO holdfast.schema_migrations (name, checksum) VALUES (%(name)s, %(checksum)s)"
TRY_LOCK = "SELECT pg_try_advisory_lock(%(key)s)"
DEMO = ("demo_targets", "demo_trace")
OPTIONAL_VALUES = """
SELECT set_config('holdfast.dimension', %(dimension)s, true),
       set_config('holdfast.model', %(model)s, true),
       set_config('holdfast.version', %(version)s, true)
"""


class MigrationError(HoldfastError):
    """The database cannot be brought to this version."""

    code = "migration_error"


@dataclass(frozen=True, slots=True)
class Step:
    """One numbered file."""

    name: str
    checksum: str
    sql: bytes


def steps() -> list[Step]:
    """Return the numbered files in order."""
    found: list[Step] = []
    for path in sorted(HERE.glob("[0-9][0-9][0-9][0-9]_*.sql")):
        sql = path.read_bytes()
        found.append(Step(path.stem, hashlib.sha256(sql).hexdigest(), sql))
    return found


def pending(connection: psycopg.Connection, known: Sequence[Step]) -> list[Step]:
    """Return the steps that were not applied yet, in order.

    Raises MigrationError where an applied file was edited, or where the database is newer.
    """
    with connection.cursor(row_factory=scalar_row) as cursor:
        if not cursor.execute(EXISTS).fetchone():
            return list(known)
        applied = dict(str(row).split(" ", 1) for row in cursor.execute(APPLIED))
    missing: list[Step] = []
    for step in known:
        if step.name not in applied:
            missing.append(step)
        elif applied.pop(step.name) != step.checksum:
            message = f"{step.name}.sql was edited after it had been applied; restore the file"
            raise MigrationError(message)
    strangers = set(applied) - {step.name for step in known}
    if strangers:
        raise MigrationError(
            f"the database has {min(strangers)}, which this version does not know: "
            "install the version that made it, or a newer one"
        )
    return missing


def migrate(
    database_url: str,
    *,
    demo: bool = False,
    memory: bool = False,
    dimension: int = 1024,
    model: str = "bge-m3:latest",
    version: str = "bge-m3-latest-1024",
) -> list[str]:
    """Apply what is missing and return the names of the files applied; run twice = no change."""
    with psycopg.connect(database_url, autocommit=True, connect_timeout=10) as connection:
        connection.execute("SET lock_timeout = '30s'")
        locked = connection.execute(TRY_LOCK, {"key": LOCK_KEY}).fetchone()
        if not locked or not locked[0]:
            raise MigrationError("another migration is running on this database; wait for its end")
        _refuse_encoding(connection)
        missing = pending(connection, steps())
        if missing:
            connection.execute(PREPARE)
        for step in missing:
            _apply(connection, step)
        values = {"dimension": str(dimension), "model": model, "version": version}
        for name in (*(["memory"] if memory else []), *(DEMO if demo else ())):
            with connection.transaction():
                connection.execute(OPTIONAL_VALUES, values)
                connection.execute((HERE / f"{name}.sql").read_bytes())
        with connection.transaction():
            connection.execute((HERE / "grants.sql").read_bytes())
        return [step.name for step in missing]


def _apply(connection: psycopg.Connection, step: Step, *, tries: int = 10) -> None:
    """Apply one file; again where it and a program at work waited for each other in a circle."""
    try:
        with connection.transaction():
            connection.execute(step.sql)
            connection.execute(RECORD, {"name": step.name, "checksum": step.checksum})
    except psycopg.errors.DeadlockDetected:
        if tries == 1:
            raise
        _apply(connection, step, tries=tries - 1)


def _refuse_encoding(connection: psycopg.Connection) -> None:
    with connection.cursor(row_factory=scalar_row) as cursor:
        encoding = cursor.execute("SHOW server_encoding").fetchone()
    if encoding != "UTF8":
        raise MigrationError(f"the database's encoding is {encoding}; texts need one of UTF8")


def check(database_url: str) -> list[str]:
    """Return the names of the files that are missing in the database; change nothing."""
    with psycopg.connect(database_url, autocommit=True, connect_timeout=10) as connection:
        return [step.name for step in pending(connection, steps())]


def main(arguments: Sequence[str]) -> int:
    """Run from the command line."""
    parser = argparse.ArgumentParser(prog="python -m migrations", description=__doc__)
    parser.add_argument("--check", action="store_true", help="change nothing, exit 1 if behind")
    parser.add_argument("--demo", action="store_true", help="also the demo's tables and targets")
    parser.add_argument("--memory", action="store_true", help="also what /memory/ingest writes to")
    options = parser.parse_args(arguments)
    try:
        settings = config.load()
        if options.check:
            missing = check(settings.database_url)
            print("missing: " + ", ".join(missing) if missing else "up to date")
            return 1 if missing else 0
        has_vectors = options.demo or options.memory
        note = index_note(settings.embedding_dim) if has_vectors else None
        if note:
            print(note)
        applied = migrate(
            settings.database_url,
            demo=options.demo,
            memory=options.memory,
            dimension=settings.embedding_dim,
            model=settings.embedding_model,
            version=settings.version_label,
        )
    except ConfigError as exc:
        print("\n".join(exc.faults), file=sys.stderr)
        return 78
    except (MigrationError, psycopg.Error) as exc:
        print(f"migrations: {exc}", file=sys.stderr)
        return 1
    print("applied: " + ", ".join(applied) if applied else "up to date")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
