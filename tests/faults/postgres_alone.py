"""A Postgres of a scenario's own: one that may be restarted, filled, or taken up by others."""

import os
import signal
import subprocess
from collections.abc import Generator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import psycopg
import pytest

from app.core import config
from migrations.__main__ import migrate
from tests.conftest import DIMENSION, free_port
from tests.processes import open_folder, wait_for
from worker import servers
from worker.process import Process
from worker.servers import Place, find_place

READY_SECONDS = 60.0


@dataclass
class PostgresAlone:
    """The server, and what it may suffer."""

    place: Place
    port: int
    log: Path
    process: Process
    settings: tuple[str, ...] = ()

    @property
    def url(self) -> str:
        """Where it listens, whether it is up or not."""
        return self.process.url

    @property
    def data(self) -> Path:
        """The folder of its files."""
        return self.place.folder / "postgres"

    @property
    def is_up(self) -> bool:
        """Whether it runs."""
        return self.process.running is not None and self.process.death is None

    @property
    def said(self) -> str:
        """What it has written to its log."""
        return self.log.read_text("utf-8", "replace")

    @property
    def recoveries(self) -> int:
        """How often it came up and found that it had not been stopped in order."""
        return self.said.count("was not properly shut down")

    def start(self) -> None:
        """Start it on the same port, and wait until it takes connections."""
        self.process = servers.postgres(self.place, self.port, self.log)
        self.process.argv = [*self.process.argv, *self.settings]
        self.process.start()
        wait_for(self._is_ready, READY_SECONDS)

    def _is_ready(self) -> bool:
        assert self.is_up, self.process.tail
        return self.process.is_ready(self.process)

    def stop_at_once(self) -> None:
        """Stop it as `pg_ctl stop -m immediate` does: nothing is written, nobody is told."""
        assert self.process.running
        os.kill(self.process.running.pid, signal.SIGQUIT)
        wait_for(lambda: self.process.death, READY_SECONDS)

    def move(self, name: str, disk: "SmallDisk") -> None:
        """Stop it, put a folder of its data on another disk, and start it again."""
        self.process.stop()
        old, new = self.data / name, disk.folder / name
        assert self.place.output("cp", "--archive", old, new) is not None
        assert self.place.output("rm", "--recursive", old) is not None
        old.symlink_to(new)
        self.start()

    def execute(self, statement: str) -> None:
        """Run one statement as the superuser, on a connection for it alone."""
        with psycopg.connect(self.url, autocommit=True) as connection:
            connection.execute(statement.encode())


@dataclass(frozen=True, slots=True)
class SmallDisk:
    """A disk of a scenario's own, which may be filled."""

    folder: Path

    @property
    def ballast(self) -> Path:
        """What fills it."""
        return self.folder / "ballast"

    def fill(self) -> None:
        """Leave no room on it."""
        with suppress(OSError), self.ballast.open("ab", buffering=0) as file:
            while True:
                file.write(bytes(4096))

    def make_room(self) -> None:
        """Give the room back."""
        self.ballast.unlink()


@contextmanager
def open_disk(size_bytes: int) -> Generator[SmallDisk]:
    """Mount one for everybody; skips, loudly, where this machine does not let us."""
    with open_folder() as folder:
        options = f"size={size_bytes},mode=1777"
        mount = ["/bin/mount", "-t", "tmpfs", "-o", options, "tmpfs", str(folder)]
        done = subprocess.run(mount, check=False, capture_output=True)
        if done.returncode != 0:
            pytest.skip(f"no disk can be mounted here: {done.stderr.decode()}")
        try:
            yield SmallDisk(folder)
        finally:
            subprocess.run(["/bin/umount", "--lazy", str(folder)], check=True)


@contextmanager
def open_postgres(*options: str) -> Generator[PostgresAlone]:
    """Start one that is migrated, and stop it whatever comes."""
    with open_folder() as home:
        place, port, log = find_place(home), free_port(), home / "postgres.log"
        alone = PostgresAlone(place, port, log, servers.postgres(place, port, log), options)
        alone.start()
        try:
            _migrate(alone.url)
            yield alone
        finally:
            alone.process.stop()


def _migrate(url: str) -> None:
    environ = {"DATABASE_URL": url, "REDIS_URL": "redis://127.0.0.1:1"}
    settings = config.load({**environ, "EMBEDDING_DIM": str(DIMENSION)})
    model, version = settings.embedding_model, settings.version_label
    migrate(url, demo=True, dimension=DIMENSION, model=model, version=version)
