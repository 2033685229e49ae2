"""Runs a module of ours on a host whose clock is wrong: python -m tests.shifted SECONDS MODULE."""

import datetime as dt
import runpy
import sys
import time
from collections.abc import Callable
from typing import Self


class _Kind(type):
    """Lets every moment count as one of the shifted class, wherever it was made."""

    def __instancecheck__(cls, value: object) -> bool:
        return isinstance(value, _datetime)


_datetime = dt.datetime


class _Shifted(_datetime, metaclass=_Kind):
    seconds = 0.0

    @classmethod
    def now(cls, tz: dt.tzinfo | None = None) -> Self:
        return super().now(tz) + dt.timedelta(seconds=cls.seconds)

    @classmethod
    def utcnow(cls) -> Self:
        return cls.now(dt.UTC).replace(tzinfo=None)


def _later(clock: Callable[[], float], seconds: float) -> Callable[[], float]:
    return lambda: clock() + seconds


def shift(seconds: float) -> None:
    """Let the time of day be wrong in this process, and in what it forks; durations stay right."""
    _Shifted.seconds = seconds
    dt.datetime = _Shifted  # type: ignore[misc]
    time.time = _later(time.time, seconds)  # noqa: TID251 - the fault


if __name__ == "__main__":
    shift(float(sys.argv[1]))
    sys.argv = sys.argv[2:]
    runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
