"""How Redis is reached: a client that gives up fast, and its errors made ours."""

from collections.abc import Generator
from contextlib import contextmanager

import redis
from redis.backoff import NoBackoff
from redis.retry import Retry

from app.core.errors import BellsUnavailable

CONNECT_SECONDS = 1.0
ANSWER_SECONDS = 2.0

Link = redis.Redis
"""A client that speaks bytes, as RQ needs it."""


def connect(url: str) -> Link:
    """Make a client; it connects at its first use.

    No retries: redis-py's ten would hold a web request for a minute, and whatever is not rung or
    written now is rung by the sweeper or read from Postgres.
    """
    return redis.Redis.from_url(
        url,
        socket_timeout=ANSWER_SECONDS,
        socket_connect_timeout=CONNECT_SECONDS,
        retry=Retry(NoBackoff(), 0),
    )


@contextmanager
def translated() -> Generator[None]:
    """Turn every way in which Redis can be away into BellsUnavailable."""
    try:
        yield
    except redis.RedisError as exc:
        raise BellsUnavailable(f"Redis cannot answer now ({type(exc).__name__})") from exc
