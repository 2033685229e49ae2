"""API keys: `hf_<prefix>_<secret>`; only a hash of the whole is kept."""

import hashlib
import secrets

SCOPES = ("submit", "read", "requeue", "admin")


def new_key(prefix: str) -> str:
    """Return a key with a fresh secret of 32 random bytes."""
    return f"hf_{prefix}_{secrets.token_urlsafe(32)}"


def hash_of(key: str) -> bytes:
    """Return what is kept of a key. Its 256 random bits need no slow hash."""
    return hashlib.sha256(key.encode("utf-8", "replace")).digest()


def prefix_of(key: str) -> str | None:
    """Return the public part of a key; None where it has not the form of one."""
    parts = key.split("_", 2)
    return parts[1] if len(parts) == 3 and parts[0] == "hf" and parts[1].isalnum() else None  # noqa: PLR2004 - the three parts
