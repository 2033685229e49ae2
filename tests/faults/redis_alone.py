"""A Redis of a scenario's own: one that may be killed, come back empty, or hang."""

import os
import shutil
import signal
from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from tests.processes import open_folder, wait_for
from worker import servers
from worker.process import Process
from worker.servers import Place, find_place

READY_SECONDS = 30.0


@dataclass
class RedisAlone:
    """The server, and what it may suffer."""

    place: Place
    port: int
    log: Path
    process: Process

    @property
    def url(self) -> str:
        """Where it listens, whether it is up or not."""
        return self.process.url

    @property
    def pid(self) -> int:
        """Its process."""
        assert self.process.running
        return self.process.running.pid

    def start(self) -> None:
        """Start it on the same port, and wait until it answers."""
        self.process = servers.redis(self.place, self.port, self.log)
        self.process.start()
        wait_for(lambda: self.process.is_ready(self.process), READY_SECONDS)

    def kill(self) -> None:
        """Kill it, and lose all that it knew."""
        os.kill(self.pid, signal.SIGKILL)
        wait_for(lambda: self.process.death)
        shutil.rmtree(self.place.folder / "redis")

    def freeze(self) -> None:
        """Let it hang: connections are taken, and nothing is answered."""
        os.kill(self.pid, signal.SIGSTOP)

    def thaw(self) -> None:
        """Let it go on."""
        os.kill(self.pid, signal.SIGCONT)


@contextmanager
def open_redis(port: int) -> Generator[RedisAlone]:
    """Start one, and stop it whatever comes."""
    with open_folder() as home:
        place = find_place(home)
        log = home / "redis.log"
        alone = RedisAlone(place, port, log, servers.redis(place, port, log))
        alone.start()
        try:
            yield alone
        finally:
            alone.thaw()
            alone.process.stop()
