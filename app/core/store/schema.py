"""The version of the schema that this code was written for."""

from collections.abc import Sequence

from app.core.store.database import Tx

EXPECTED = (
    *("0001_jobs", "0002_queue", "0003_targets", "0004_clients", "0005_fleet"),
    *("0006_trace", "0007_incidents", "0008_targets", "0009_sinks", "0010_withdrawals"),
    *("0011_tallies", "0012_campaigns"),
)
"""The files in migrations/, in order; a test compares."""

EXISTS = "SELECT to_regclass('holdfast.schema_migrations') IS NOT NULL AS found"
APPLIED = "SELECT name FROM holdfast.schema_migrations"


def missing(tx: Tx) -> Sequence[str]:
    """Return the migrations that this code needs and the database lacks."""
    row = tx.execute(EXISTS).fetchone()
    if not row or not row["found"]:
        return EXPECTED
    applied = {str(row["name"]) for row in tx.execute(APPLIED)}
    return [name for name in EXPECTED if name not in applied]


def fault(tx: Tx) -> str | None:
    """Say what the database lacks and what to do, or nothing where all is there."""
    names = ", ".join(missing(tx))
    return f"migrations: {names} missing; run python -m migrations" if names else None
