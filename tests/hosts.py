"""Another host on this machine: python -m tests.hosts NAME MODULE [ARGUMENT…] runs a module there.

It is a network namespace with a cable to us, which can be cut: the other end then has its address
and its routes, and hears nothing, as with a plug that was pulled.
"""

import ctypes
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Generator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import pytest

NETWORK, NAMES = 0x40000000, 0x04000000  # CLONE_NEWNET, CLONE_NEWUTS
PLACE = Path("/run/netns")
NET = "198.18.{}."
"""A range that is kept for tests between networks, so it is nobody's."""

Made = TypeVar("Made")


@dataclass(frozen=True, slots=True)
class Host:
    """The other host."""

    name: str
    net: str

    @property
    def our_address(self) -> str:
        """Where it finds us, as long as the cable is whole."""
        return f"{self.net}1"

    @property
    def plug(self) -> str:
        """Our end of the cable."""
        return f"{self.name}-a"

    def cut(self) -> None:
        """Pull the plug."""
        _ip("link", "set", self.plug, "down")

    def mend(self) -> None:
        """Put it back."""
        _ip("link", "set", self.plug, "up")

    def make(self, make: Callable[[], Made]) -> Made:
        """Make something there, such as a server that listens on its loopback."""
        with ThreadPoolExecutor(1) as other:  # a namespace is a thread's own

            def go_and_make() -> Made:
                _enter(self.name)
                return make()

            return other.submit(go_and_make).result()


@contextmanager
def open_host() -> Generator[Host]:
    """Make a host and its cable; skips, loudly, where this machine does not let us."""
    number = os.getpid() % 250
    host = Host(f"hf{number}", NET.format(number))
    try:
        _ip("netns", "add", host.name)
    except (OSError, subprocess.CalledProcessError) as exc:
        pytest.skip(f"no network namespace can be made here: {exc}")
    try:
        _connect(host)
        yield host
    finally:
        for pid in map(int, _ip("netns", "pids", host.name).split()):  # a horse that waits for us
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        with suppress(subprocess.CalledProcessError):  # none was laid
            _ip("link", "delete", host.plug)
        _ip("netns", "delete", host.name)


def _connect(host: Host) -> None:
    theirs = f"{host.name}-b"
    end = ("peer", "name", theirs, "netns", host.name)
    try:
        _ip("link", "add", host.plug, "type", "veth", *end)
    except subprocess.CalledProcessError as exc:
        pytest.skip(f"no cable can be laid here: {exc.stderr.decode()}")
    _ip("address", "add", f"{host.our_address}/30", "dev", host.plug)
    _ip("link", "set", host.plug, "up")
    _ip("-n", host.name, "address", "add", f"{host.net}2/30", "dev", theirs)
    for name in ("lo", theirs):
        _ip("-n", host.name, "link", "set", name, "up")


def _ip(*arguments: str) -> bytes:
    return subprocess.run(["ip", *arguments], check=True, capture_output=True).stdout  # noqa: S607


def _enter(name: str) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    with (PLACE / name).open("rb") as place:
        if libc.setns(place.fileno(), NETWORK) != 0:
            raise OSError(ctypes.get_errno(), "setns")


if __name__ == "__main__":
    host_name, *command = sys.argv[1:]
    _enter(host_name)
    ctypes.CDLL(None).unshare(NAMES)
    socket.sethostname(host_name)
    os.execv(sys.executable, [sys.executable, "-m", *command])  # noqa: S606
