"""The development mode: Postgres and Redis from wheels, and everything of ours beside them.

`run` is `make up`; `start_servers` is the two servers alone, for the tests.

    HOLDFAST_HOME/env                         DATABASE_URL=… and REDIS_URL=… while they can be used
    HOLDFAST_HOME/logs                        one log a process
    HOLDFAST_HOME/postgres, redis, password   the data; where HOLDFAST_HOME/servers names another
                                              folder, they are there
"""

import functools
import http.client
import json
import os
import re
import signal
import socket
import sys
import threading
from collections.abc import Callable, Generator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from ipaddress import ip_address
from pathlib import Path
from typing import Any, NoReturn

from app.core import config
from app.core.config import Settings
from app.core.errors import ConfigError
from worker import servers
from worker.process import Process, StartError, can_lock, poll, read_proc, say

TICK_SECONDS = 0.1
GUNICORN = Path(__file__).parent.parent / "deploy" / "systemd" / "gunicorn.conf.py"
SERVER_SECONDS = 60.0  # a database that was killed reads its log again before it answers
READY_SECONDS = 180.0  # a worker loads its model before it says that it lives
CONFIG_EXIT = 78
DEMO_CIDS = 5000
UNSET_DATABASE, UNSET_REDIS = "postgresql://embedded", "redis://embedded"


class _StopAsked(BaseException):
    """SIGINT or SIGTERM came."""


def run(environ: Mapping[str, str]) -> int:
    """Run everything in the foreground until SIGINT or SIGTERM, and return the exit code."""
    try:
        settings, chosen = _choose(environ)
    except ConfigError as exc:
        say("\n".join(exc.faults))
        return CONFIG_EXIT
    with _stop_signals() as is_stopped:
        crew = Crew(Path(settings.holdfast_home).absolute(), is_stopped)
        try:
            _serve(crew, settings, chosen)
        except _StopAsked:
            return 0
        except StartError as exc:
            say(str(exc))
            return 1
        finally:
            crew.stop()


@dataclass(frozen=True, slots=True)
class Servers:
    """The two embedded servers, running."""

    database_url: str
    redis_url: str
    stop: Callable[[], None]


def start_servers(home: Path) -> Servers:
    """Start Postgres and Redis on the data in `home`, and return when both answer.

    They end by `stop`, or with the thread that calls this. Raises StartError.
    """
    crew = Crew(home.absolute())
    try:
        crew.take_home()
        return Servers(crew.add_postgres(), crew.add_redis(), crew.stop)
    except BaseException:
        crew.stop()
        raise


def _choose(environ: Mapping[str, str]) -> tuple[Settings, dict[str, str]]:
    """Return the settings, and the environment of what is to be started, with our defaults."""

    def is_set(name: str) -> bool:
        return bool(environ.get(name, "").strip() or environ.get(f"{name}_FILE"))

    defaults = {"AUTH": "off", "EMBEDDER": "local"}
    if not is_set("EMBEDDER") or environ.get("EMBEDDER", "").strip() == "local":
        defaults |= {"EMBEDDING_MODEL": "multilingual-e5-small", "EMBEDDING_DIM": "384"}
    chosen = dict(environ) | {name: value for name, value in defaults.items() if not is_set(name)}
    embedded = {"database_url": UNSET_DATABASE, "redis_url": UNSET_REDIS}
    unset = {name: url for name, url in embedded.items() if not is_set(name.upper())}
    return config.load(chosen, **unset), chosen


def _serve(crew: "Crew", settings: Settings, environ: dict[str, str]) -> NoReturn:
    """Start one after the other, say so when all can serve, and keep them running."""
    crew.take_home()
    port = _listenable_port(settings.host, settings.port)
    database_url, redis_url = settings.database_url, settings.redis_url
    is_embedded = database_url == UNSET_DATABASE
    if is_embedded:
        database_url = environ["DATABASE_URL"] = crew.add_postgres()
    if redis_url == UNSET_REDIS:
        redis_url = environ["REDIS_URL"] = crew.add_redis()
    environ |= {"PORT": str(port), "HOLDFAST_HOME": str(crew.home), "PYTHONUNBUFFERED": "1"}
    crew.write_env(database_url, redis_url)
    crew.migrate(environ, demo=is_embedded)
    api, *others = _processes(crew, settings, environ)
    for process in (api, *others):
        crew.add(process)
    crew.wait_until_ready(api, READY_SECONDS)
    print(f"ready {api.url}", flush=True)
    while True:
        crew.watch()


def _processes(crew: "Crew", settings: Settings, environ: Mapping[str, str]) -> list[Process]:
    """Return what serves, in the order of starting; it is stopped in the opposite one."""
    host, port = settings.host, int(environ["PORT"])
    commands = {"api": ["gunicorn", "--config", str(GUNICORN), "app.web:create_app()"]}
    if settings.enable_queue_worker:
        commands["sweeper"] = ["worker", "sweep"]
        commands["worker-embeddings"] = ["worker", "run", "embeddings"]
        for number in range(1, settings.trace_worker_count + 1):
            trace_worker = ["worker", "run", settings.trace_worker_queue]
            commands[f"worker-traces-{number}"] = trace_worker
    return [
        Process(
            name=name,
            argv=[sys.executable, "-m", *command],
            log=crew.log(name),
            environ=environ,
            url=_shown_url(host, port),
            is_ready=functools.partial(_can_serve, with_worker=settings.enable_queue_worker),
        )
        for name, command in commands.items()
    ]


def _shown_url(host: str, port: int) -> str:
    with suppress(ValueError):
        if not ip_address(host).is_unspecified:
            return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"
    return f"http://127.0.0.1:{port}"


def _can_serve(api: Process, *, with_worker: bool) -> bool:
    connection = http.client.HTTPConnection(api.url.removeprefix("http://"), timeout=5)
    try:
        connection.request("GET", "/readyz")
        answer = connection.getresponse()
        body: dict[str, Any] = json.loads(answer.read())
    except (OSError, ValueError, http.client.HTTPException):
        return False
    finally:
        connection.close()
    degraded = [str(reason) for reason in body.get("degraded", ())]
    lacks_worker = any(reason.startswith(("no_worker", "no_sweeper")) for reason in degraded)
    return answer.status == http.HTTPStatus.OK and not (with_worker and lacks_worker)


def _listenable_port(host: str, port: int) -> int:
    """Return `port`, or a free one for 0. Raises StartError where it is taken."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        with socket.create_server((host, port), family=family) as listener:
            return int(listener.getsockname()[1])
    except OSError as exc:
        where = f"HOST {host}, PORT {port}"
        raise StartError(f"{where}: cannot listen there ({exc.strerror}); set another") from exc


@contextmanager
def _stop_signals() -> Generator[Callable[[], bool]]:
    """Note SIGINT and SIGTERM, and yield the question whether one came."""
    asked: list[int] = []
    parent = os.getppid()
    is_made = read_proc(parent, "comm").strip() in ("make", "gmake")
    numbers = (signal.SIGINT, signal.SIGTERM)
    before = {number: signal.signal(number, lambda got, _: asked.append(got)) for number in numbers}
    try:
        yield lambda: bool(asked) or (is_made and _has_make_ended(parent))
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _has_make_ended(parent: int) -> bool:
    # GNU make that gets SIGINT alone, without its group, tells nobody and waits for us, its
    # handler still open: the signal that it blocks meanwhile is all that can be seen of it.
    blocked = re.search(r"^SigBlk:\s*(\w+)", read_proc(parent, "status"), re.MULTILINE)
    is_interrupted = blocked and int(blocked[1], 16) >> (signal.SIGINT - 1) & 1
    return os.getppid() != parent or bool(is_interrupted)


# ---- all that was started on one home


class Crew:
    """Everything that was started on one home, in the order of starting."""

    def __init__(self, home: Path, is_stopped: Callable[[], bool] = lambda: False) -> None:
        self.home = home
        self.processes: list[Process] = []
        self._is_stopped = is_stopped
        self._lock: int | None = None

    def take_home(self) -> None:
        """Make the home and lock it. Raises StartError where somebody else runs on it."""
        try:
            self.home.mkdir(parents=True, exist_ok=True)
            (self.home / "logs").mkdir(mode=0o700, exist_ok=True)
            lock = os.open(self.home / "lock", os.O_RDWR | os.O_CREAT, 0o600)
        except OSError as exc:
            raise StartError(f"{self.home} cannot be used as HOLDFAST_HOME: {exc}") from exc
        if not can_lock(lock):
            os.close(lock)
            raise StartError(f"another `make up` runs on {self.home}; stop it first")
        self._lock = lock

    def add_postgres(self) -> str:
        """Start Postgres and return its URL."""
        return self._add_server("postgres", servers.postgres)

    def add_redis(self) -> str:
        """Start Redis and return its URL."""
        return self._add_server("redis", servers.redis)

    def _add_server(self, name: str, make: Callable[[servers.Place, int, Path], Process]) -> str:
        for is_last in (False, False, True):  # between looking and listening a port can be taken
            process = make(self._place, _listenable_port("127.0.0.1", 0), self.log(name))
            self.add(process)
            try:
                self.wait_until_ready(process, SERVER_SECONDS)
            except StartError:
                if is_last or "in use" not in process.tail:
                    raise
                self.processes.remove(process)
                process.stop()
            else:
                return process.url
        raise AssertionError

    @functools.cached_property
    def _place(self) -> servers.Place:
        return servers.find_place(self.home)

    def add(self, process: Process) -> None:
        """Start a process and keep it."""
        self.processes.append(process)
        process.start()

    def log(self, name: str) -> Path:
        """Return where a process of that name writes."""
        return self.home / "logs" / f"{name}.log"

    def wait_until_ready(self, process: Process, seconds: float) -> None:
        """Wait for a process. Raises StartError where it, or any other, ended before."""

        def is_ready() -> bool:
            for each in self.processes:
                if each.death:
                    raise StartError(f"{each.name} ended with {each.death}\n{each.tail}")
            return process.is_ready(process)

        if not self._poll(is_ready, seconds):
            raise StartError(f"{process.name} was not ready in {seconds:g} s\n{process.tail}")

    def write_env(self, database_url: str, redis_url: str) -> None:
        """Say in HOLDFAST_HOME/env how other tools connect."""
        lines = f"DATABASE_URL={database_url}\nREDIS_URL={redis_url}\n"
        servers.write_private(self.home / "env", lines)

    def migrate(self, environ: Mapping[str, str], *, demo: bool) -> None:
        """Bring the database to this version; with `demo` add memory and what is to be traced.

        Raises StartError with what was said against it.
        """
        self._run("migrations", environ, "migrations", *(["--demo", "--memory"] if demo else []))
        if demo:
            load = ["load", "--cids", str(DEMO_CIDS), "--keep"]
            self._run("demo-trace", environ, "worker.demo_trace", *load)

    def _run(self, name: str, environ: Mapping[str, str], *command: str) -> None:
        log = self.log(name)
        log.unlink(missing_ok=True)
        argv = [sys.executable, "-m", *command]
        process = Process(name=name, argv=argv, log=log, environ=environ)
        process.start()
        try:
            self._poll(lambda: process.death is not None, float("inf"))
            if process.death != "exit code 0":
                raise StartError(log.read_text("utf-8", "replace").strip())
        finally:
            process.stop()

    def watch(self) -> None:
        """Start again what died, and wait a moment."""
        if self._is_stopped():
            raise _StopAsked
        for process in self.processes:
            process.look_after()
        threading.Event().wait(TICK_SECONDS)

    def _poll(self, is_true: Callable[[], bool], seconds: float) -> bool:
        def is_settled() -> bool:
            if self._is_stopped():
                raise _StopAsked
            return is_true()

        return poll(is_settled, seconds)

    def stop(self) -> None:
        """Stop everything, the last one first, and let go of the home."""
        while self.processes:
            self.processes.pop().stop()
        if self._lock is not None:
            (self.home / "env").unlink(missing_ok=True)
            os.close(self._lock)
            self._lock = None
