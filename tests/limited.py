"""Runs a module of ours in a memory cgroup: python -m tests.limited GROUP MODULE [ARGUMENT…]."""

import os
import signal
import sys
from collections.abc import Generator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.processes import wait_for

ROOT = Path("/sys/fs/cgroup")


@dataclass(frozen=True, slots=True)
class MemoryGroup:
    """A memory cgroup of a test's own, of either version."""

    path: Path

    @property
    def kills(self) -> int:
        """How many processes the kernel has killed in it."""
        name = "memory.events" if (self.path / "memory.events").exists() else "memory.oom_control"
        words = (self.path / name).read_text("ascii").split()
        return int(words[words.index("oom_kill") + 1])

    @property
    def peak_bytes(self) -> int:
        """How much was ever used in it at a time."""
        names = ("memory.peak", "memory.max_usage_in_bytes")
        [peak] = [self.path / name for name in names if (self.path / name).exists()]
        return int(peak.read_text("ascii"))

    def remove(self) -> bool:
        """Kill whoever is left in it, and remove it; return whether that was possible yet."""
        for pid in (self.path / "cgroup.procs").read_text("ascii").split():
            with suppress(ProcessLookupError):
                os.kill(int(pid), signal.SIGKILL)
        with suppress(OSError):
            self.path.rmdir()
        return not self.path.exists()


@contextmanager
def open_group(limit_bytes: int) -> Generator[MemoryGroup]:
    """Make a group with a limit; skips, loudly, where this machine does not let us."""
    is_first_version = (ROOT / "memory").is_dir()
    path = (ROOT / "memory" if is_first_version else ROOT) / f"holdfast-test-{os.getpid()}"
    name = "memory.limit_in_bytes" if is_first_version else "memory.max"
    try:
        path.mkdir()
        (path / name).write_text(str(limit_bytes), "ascii")
        with suppress(OSError):  # where there is no swap, there is no file for it
            (path / "memory.swap.max").write_text("0", "ascii")
    except OSError as exc:
        with suppress(OSError):
            path.rmdir()
        pytest.skip(f"no memory cgroup can be made here: {exc}")
    group = MemoryGroup(path)
    try:
        yield group
    finally:
        wait_for(group.remove, 30)


if __name__ == "__main__":
    group, *command = sys.argv[1:]
    (Path(group) / "cgroup.procs").write_text(str(os.getpid()), "ascii")
    os.execv(sys.executable, [sys.executable, "-m", *command])  # noqa: S606
