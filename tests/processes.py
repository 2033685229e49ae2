"""Processes of ours as the tests start them, and waiting for a fact."""

import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Generator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol, TypeVar

ROOT = Path(__file__).parent.parent
POLL_SECONDS = 0.02
WAIT_SECONDS = 30.0
"""Much longer than anything takes on a machine with other work."""

Found = TypeVar("Found")


def wait_for(find: Callable[[], Found], seconds: float = WAIT_SECONDS) -> Found:
    """Return what `find` returns once it is true; fail where it is not within `seconds`."""
    end = time.monotonic() + seconds
    pause = threading.Event()
    while not (found := find()):
        assert time.monotonic() < end, f"still {found!r} after {seconds} s"
        pause.wait(POLL_SECONDS)
    return found


class WaitFor(Protocol):
    """The type of the fixture `wait_for`."""

    def __call__(self, find: Callable[[], Found], seconds: float = WAIT_SECONDS) -> Found:
        """Wait for a fact."""
        ...


@dataclass(frozen=True, slots=True)
class Running:
    """A process that a test has started, in a session of its own."""

    popen: "subprocess.Popen[bytes]"
    log: Path

    @property
    def pid(self) -> int:
        """Its process id."""
        return self.popen.pid

    @property
    def is_alive(self) -> bool:
        """Whether it still runs."""
        return self.popen.poll() is None

    @property
    def children(self) -> list[int]:
        """The ids of the processes that it has forked and not yet reaped."""
        found: list[int] = []
        for path in Path(f"/proc/{self.pid}/task").glob("*/children"):
            with suppress(OSError):
                found += map(int, path.read_text().split())
        return found

    @property
    def said(self) -> str:
        """What it has written so far."""
        return self.log.read_text("utf-8", "replace")

    def send(self, number: signal.Signals) -> None:
        """Send a signal to it alone."""
        self.popen.send_signal(number)

    def wait(self, seconds: float = 30) -> int:
        """Wait for its end and return its exit code."""
        return self.popen.wait(seconds)

    def stop(self, seconds: float = 30) -> int:
        """Ask it to stop, wait for it, and return its exit code."""
        self.send(signal.SIGTERM)
        return self.wait(seconds)

    def kill(self) -> None:
        """Kill it alone, as a machine that runs out of memory would."""
        self.popen.kill()
        self.popen.wait()

    def end(self) -> None:
        """Leave nothing of it behind."""
        if self.is_alive:
            with suppress(subprocess.TimeoutExpired):
                self.stop(10)
        with suppress(ProcessLookupError):
            os.killpg(self.pid, signal.SIGKILL)
        self.popen.wait()


@contextmanager
def open_folder() -> Generator[Path]:
    """Give a folder that every account can enter: pytest's own are closed to the servers'."""
    with tempfile.TemporaryDirectory(prefix="holdfast-test-", ignore_cleanup_errors=True) as name:
        Path(name).chmod(0o711)
        yield Path(name)


class StartProcess(Protocol):
    """The type of the fixture `start_process`."""

    def __call__(self, *arguments: str, **environ: str) -> Running:
        """Start `python -m <arguments>`; `environ` is set on top of the test's own."""
        ...


class StartApi(Protocol):
    """The type of the fixture `start_api`."""

    def __call__(self, *launcher: str, **environ: str) -> str:
        """Start the API, by a launcher where one is given, wait for it, and return its URL."""
        ...


def start(arguments: tuple[str, ...], environ: Mapping[str, str], log: Path) -> Running:
    """Start `python -m <arguments>` with `environ` on top of this process's environment."""
    with log.open("ab") as output:
        popen = subprocess.Popen(
            [sys.executable, "-m", *arguments],
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            cwd=ROOT,
            env={**os.environ, **environ},  # noqa: TID251 - handed on, with coverage's own in it
            start_new_session=True,
        )
    return Running(popen, log)
