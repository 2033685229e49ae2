"""How one process of the development mode is started, watched and stopped."""

import fcntl
import functools
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypedDict

from app.core.errors import HoldfastError

POLL_SECONDS = 0.02
STOP_SECONDS = 30.0
STEADY_SECONDS = 60.0  # who lived that long is started again after the first pause
FIRST_PAUSE_SECONDS, LONGEST_PAUSE_SECONDS = 0.5, 30.0
TAIL_LINES = 15


class StartError(HoldfastError):
    """Something that was to be started did not come up."""

    code = "start_error"


class Account(TypedDict):
    """Whom a process runs as, in the words of subprocess."""

    user: int | None
    group: int | None
    extra_groups: list[int] | None


OURSELVES = Account(user=None, group=None, extra_groups=None)


@dataclass(frozen=True, slots=True)
class Guard:
    """What keeps two servers from the same data: a lock that the server itself holds."""

    lock: Path
    pid_file: Path


@dataclass(slots=True, kw_only=True)
class Process:
    """One process: what is run, and how it is doing."""

    name: str
    argv: Sequence[str | Path]
    log: Path
    environ: Mapping[str, str]
    stdin: str = ""
    folder: Path | None = None
    account: Account = field(default_factory=lambda: OURSELVES)
    guard: Guard | None = None
    url: str = ""
    is_ready: "Callable[[Process], bool]" = lambda _: True
    stop_signal: signal.Signals = signal.SIGTERM
    running: subprocess.Popen[bytes] | None = None
    due: float = 0.0  # on the monotonic clock: when it was started, or is to be
    pause_seconds: float = FIRST_PAUSE_SECONDS

    def start(self) -> None:
        """Start it in a session of its own, without a terminal, writing to its log."""
        self.due = time.monotonic()
        with self._guarded() as kept, self.log.open("ab") as log:
            try:
                self.running = subprocess.Popen(  # noqa: S603 - our own programs
                    [*_dying_with_us(self.stop_signal), *self.argv],
                    stdin=subprocess.PIPE,
                    stdout=log,
                    stderr=log,
                    env=self.environ,
                    cwd=self.folder,
                    pass_fds=kept,
                    start_new_session=True,
                    **self.account,
                )
            except OSError as exc:
                raise StartError(f"{self.name} cannot be started: {exc}") from exc
        if self.running.stdin:
            with suppress(BrokenPipeError), self.running.stdin as pipe:  # a death is seen later
                pipe.write(self.stdin.encode())

    @contextmanager
    def _guarded(self) -> Generator[list[int]]:
        """Take the lock of its data, and yield it for the process to inherit."""
        if self.guard is None:
            yield []
            return
        lock = os.open(self.guard.lock, os.O_RDWR | os.O_CREAT, 0o600)
        try:
            if not can_lock(lock):
                self._end_leftover(self.guard, lock)
            self.guard.pid_file.unlink(missing_ok=True)  # its number may be somebody else's now
            yield [lock]
        finally:
            os.close(lock)

    def _end_leftover(self, guard: Guard, lock: int) -> None:
        """Stop what an earlier start, itself killed, left running on the same data."""
        say(f"{self.name} of an earlier start still runs, and is stopped")
        for by in (self.stop_signal, signal.SIGKILL):
            with suppress(OSError, ValueError, IndexError):
                os.kill(int(guard.pid_file.read_text("ascii").split()[0]), by)
            if poll(lambda: can_lock(lock), STOP_SECONDS):
                return
        raise StartError(f"{self.name} of an earlier start cannot be stopped; see {guard.pid_file}")

    @property
    def death(self) -> str | None:
        """How it ended; None where it runs."""
        code = self.running.poll() if self.running else None
        if code is None:
            return None
        return signal.Signals(-code).name if code < 0 else f"exit code {code}"

    @property
    def tail(self) -> str:
        """The end of its log."""
        lines = self.log.read_text("utf-8", "replace").splitlines()
        return "\n".join([f"the end of {self.log}:", *lines[-TAIL_LINES:]])

    def look_after(self) -> None:
        """Start it again where it died, after a pause that grows with each death."""
        now = time.monotonic()
        if self.running is None and now >= self.due:
            try:
                self.start()
            except StartError as exc:
                self._put_off(str(exc))
        elif self.running and self.death:
            self._put_off(f"{self.name} died ({self.death}), see {self.log}")
            _end_session(self.running.pid)
            self.running = None
        elif self.running and now > self.due + STEADY_SECONDS:
            self.pause_seconds = FIRST_PAUSE_SECONDS

    def _put_off(self, why: str) -> None:
        say(f"{why}; it is started again in {self.pause_seconds:g} s")
        self.due = time.monotonic() + self.pause_seconds
        self.pause_seconds = min(2 * self.pause_seconds, LONGEST_PAUSE_SECONDS)

    def stop(self) -> None:
        """Ask it to stop and wait; kill it where it does not, and whatever it leaves behind."""
        if self.running is None:
            return
        if self.running.poll() is None:
            self.running.send_signal(self.stop_signal)
            try:
                self.running.wait(STOP_SECONDS)
            except subprocess.TimeoutExpired:
                say(f"{self.name} did not stop in {STOP_SECONDS:g} s, and is killed")
                self.running.kill()
                self.running.wait()
        _end_session(self.running.pid)
        self.running = None


def _dying_with_us(by: signal.Signals) -> list[str]:
    """Return the words before a command that stop it when the thread that started it dies."""
    return ["setpriv", "--pdeathsig", by.name.removeprefix("SIG"), "--"] if _has_setpriv() else []


@functools.cache
def _has_setpriv() -> bool:
    try:
        test = ["setpriv", "--pdeathsig", "clear", "--", "true"]
        done = subprocess.run(test, check=False, capture_output=True)  # noqa: S603 - a constant
    except OSError:
        return False
    return done.returncode == 0


def _end_session(leader: int) -> None:
    """Kill what a process has left of its session."""
    for folder in Path("/proc").glob("[0-9]*"):
        # The name in parentheses can hold anything; then come state, parent, group, session.
        words = read_proc(int(folder.name), "stat").rpartition(")")[2].split()
        if words[3:4] == [str(leader)]:
            with suppress(OSError):
                os.kill(int(folder.name), signal.SIGKILL)


def read_proc(pid: int, name: str) -> str:
    """Return what the kernel says about a process; empty where there is none."""
    try:
        return Path(f"/proc/{pid}/{name}").read_text("utf-8", "replace")
    except OSError:
        return ""


def can_lock(lock: int) -> bool:
    """Take the lock on an open file, or say that somebody else has it."""
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def poll(is_true: Callable[[], bool], seconds: float) -> bool:
    """Ask until it is true, or until the time is over."""
    end = time.monotonic() + seconds
    pause = threading.Event()
    while not is_true():
        if time.monotonic() >= end:
            return False
        pause.wait(POLL_SECONDS)
    return True


def say(what: str) -> None:
    """Tell the person who started this."""
    sys.stderr.write(f"{what}\n")
    sys.stderr.flush()
