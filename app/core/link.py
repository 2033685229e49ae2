"""How Redis is reached: a client that gives up fast, and its errors made ours."""

import time
from collections.abc import Callable, Generator
from contextlib import contextmanager
from typing import Any, Self

import redis
from redis.backoff import NoBackoff
from redis.retry import Retry

from app.core.errors import BellsUnavailable, RedisFull

CONNECT_SECONDS = 1.0
ANSWER_SECONDS = 2.0
REST_SECONDS = 5.0
"""How long a Redis that did not answer is left alone: each new wait would hold its caller again."""

Link = redis.Redis
"""A client that speaks bytes, as RQ needs it."""


def connect(url: str) -> Link:
    """Make a client; it connects at its first use.

    No retries: redis-py's ten would hold a web request for a minute, and whatever is not rung or
    written now is rung by the sweeper or read from Postgres. While Redis hangs, one call of several
    waits for it and the others fail at once.
    """
    return redis.Redis.from_url(
        url,
        socket_timeout=ANSWER_SECONDS,
        socket_connect_timeout=CONNECT_SECONDS,
        retry=_Wary(),
    )


class _Wary(Retry):
    """Tries once, and not at all for some time after a call that had no answer."""

    def __init__(self) -> None:
        super().__init__(NoBackoff(), 0)
        self._alone_until = 0.0

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        return self  # redis-py copies it for each connection; they share what is known

    def call_with_retry(
        self,
        do: Callable[[], Any],
        fail: Callable[..., Any],
        *args: Any,  # noqa: ANN401 - redis-py's
        **options: Any,  # noqa: ANN401 - redis-py's
    ) -> Any:  # noqa: ANN401 - redis-py's
        """Do it, unless Redis hung a moment ago."""
        if time.monotonic() < self._alone_until:
            raise redis.ConnectionError("Redis did not answer a moment ago")
        try:
            return super().call_with_retry(do, fail, *args, **options)
        except redis.TimeoutError:
            self._alone_until = time.monotonic() + REST_SECONDS
            raise


@contextmanager
def translated() -> Generator[None]:
    """Turn every way in which Redis can be away into BellsUnavailable."""
    try:
        yield
    except redis.OutOfMemoryError as exc:
        raise RedisFull from exc
    except redis.RedisError as exc:
        raise BellsUnavailable(f"Redis cannot answer now ({type(exc).__name__})") from exc
