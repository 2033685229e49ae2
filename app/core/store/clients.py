"""Clients: their hashed keys with scopes, and the record of who asked for a second try."""

from collections.abc import Sequence
from typing import Any

from app.core.store.database import Tx

FIND = """
SELECT key_hash, client, scopes FROM holdfast.api_keys
 WHERE prefix = %(prefix)s AND revoked_at IS NULL AND (expires_at IS NULL OR expires_at > now())
"""


def find(tx: Tx, prefix: str) -> dict[str, Any] | None:
    """Return hash, client and scopes of a live key."""
    return tx.execute(FIND, {"prefix": prefix}).fetchone()


INSERT = """
INSERT INTO holdfast.api_keys (prefix, key_hash, client, scopes, expires_at)
VALUES (%(prefix)s, %(key_hash)s, %(client)s, %(scopes)s,
        now() + make_interval(days => %(days)s))
"""


def insert(
    tx: Tx, *, prefix: str, key_hash: bytes, client: str, scopes: Sequence[str], days: int | None
) -> None:
    """Keep a new key's hash; it ends after `days`, or never."""
    values = {
        "prefix": prefix,
        "key_hash": key_hash,
        "client": client,
        "scopes": list(scopes),
        "days": days,
    }
    tx.execute(INSERT, values)


REVOKE = """
UPDATE holdfast.api_keys SET revoked_at = now()
 WHERE prefix = %(prefix)s AND revoked_at IS NULL
"""


def revoke(tx: Tx, prefix: str) -> bool:
    """End a key; False where there is no live one with this prefix."""
    return tx.execute(REVOKE, {"prefix": prefix}).rowcount == 1


LIST = """
SELECT prefix, client, scopes, created_at, expires_at, revoked_at
  FROM holdfast.api_keys
 ORDER BY client, created_at
"""


def listed(tx: Tx) -> list[dict[str, Any]]:
    """Return every key without its hash."""
    return tx.execute(LIST).fetchall()


NOTE_REQUEUE = """
INSERT INTO holdfast.requeues (job_id, client, via, reason, items)
VALUES (%(job_id)s, %(client)s, %(via)s, %(reason)s, %(items)s)
"""


def note_requeue(
    tx: Tx, *, job_id: str, client: str, via: str, reason: str | None, items: int
) -> None:
    """Record who gave a job's failed items another try, by which door, and why."""
    values = {"job_id": job_id, "client": client, "via": via, "reason": reason, "items": items}
    tx.execute(NOTE_REQUEUE, values)
