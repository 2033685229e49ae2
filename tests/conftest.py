"""The test ground: servers once a run; for each test a database and a Redis number of its own."""

import shutil
import socket
from collections.abc import Iterator
from dataclasses import fields
from itertools import count, cycle
from pathlib import Path
from urllib.parse import urlsplit, urlunsplit

import httpx
import hypothesis
import psycopg
import pytest
import redis
from psycopg import sql

from app.core import config
from app.core.config import Settings
from migrations.__main__ import migrate
from tests import processes
from tests.processes import Running, StartApi, StartProcess, WaitFor
from worker.demo_trace import load
from worker.servers import find_place
from worker.up import Servers, start_servers

# No limit on the time of an example: a machine that is busy is no fault of ours.
hypothesis.settings.register_profile("ours", deadline=None, print_blob=True)
hypothesis.settings.load_profile("ours")

DIMENSION = 8
"""Of the demo's columns in the tests: small vectors are read faster, by people too."""

TRACE_CIDS = 5000

FOREIGN = [
    *("PGHOST", "PGHOSTADDR", "PGPORT", "PGUSER", "PGPASSWORD", "PGPASSFILE", "PGDATABASE"),
    *("PGOPTIONS", "PGSERVICE", "PGSSLMODE", "PGAPPNAME", "PGCONNECT_TIMEOUT", "PGTZ"),
    *("GUNICORN_CMD_ARGS", "WEB_CONCURRENCY", "HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY"),
    *("http_proxy", "https_proxy", "all_proxy"),
]

_database_numbers = count(1)
_redis_numbers = cycle(range(1, 64))


@pytest.fixture(scope="session", autouse=True)
def _scrubbed_environment() -> Iterator[None]:
    """Take every variable away that would change what a test sees."""
    with pytest.MonkeyPatch.context() as patch:
        for name in [item.name.upper() for item in fields(Settings)] + FOREIGN:
            patch.delenv(name, raising=False)
            patch.delenv(f"{name}_FILE", raising=False)
        yield


@pytest.fixture(scope="session")
def servers() -> Iterator[Servers]:
    """Start Postgres and Redis for the whole run."""
    with processes.open_folder() as home:
        running = start_servers(home)
        with psycopg.connect(running.database_url, autocommit=True) as connection:
            # Whatever a test kills, the machine goes on: what is written need not reach the disk.
            connection.execute("ALTER SYSTEM SET fsync = off")
            connection.execute("SELECT pg_reload_conf()")
        yield running
        running.stop()
        shutil.rmtree(find_place(home).folder)


@pytest.fixture(scope="session")
def template(servers: Servers) -> str:
    """Make a migrated database with the demo's tables, to be copied, and give its name."""
    settings = _settings(servers.database_url, servers.redis_url)
    with psycopg.connect(servers.database_url, autocommit=True) as connection:
        connection.execute("CREATE DATABASE template_of_tests")
    migrate(
        _at(servers.database_url, "template_of_tests"),
        demo=True,
        dimension=settings.embedding_dim,
        model=settings.embedding_model,
        version=settings.version_label,
    )
    return "template_of_tests"


@pytest.fixture(scope="session")
def trace_source_url(servers: Servers) -> str:
    """Make the demo's trace source, some 5,000 containers, and give its URL. Nobody changes it."""
    url = _at(servers.database_url, "trace_source")
    with psycopg.connect(servers.database_url, autocommit=True) as connection:
        connection.execute("CREATE DATABASE trace_source")
    migrate(url, demo=True, dimension=DIMENSION)
    load(url, cids=TRACE_CIDS)
    return url


@pytest.fixture
def empty_database_url(servers: Servers) -> Iterator[str]:
    """Give a database of this test's own with nothing in it."""
    yield from _database(servers.database_url, "template1")


@pytest.fixture
def database_url(servers: Servers, template: str) -> Iterator[str]:
    """Give a database of this test's own, migrated, with the demo's tables."""
    yield from _database(servers.database_url, template)


@pytest.fixture(scope="module")
def shared_database_url(servers: Servers, template: str) -> Iterator[str]:
    """Give the same to all tests of a file, each of which finds it as the one before left it."""
    yield from _database(servers.database_url, template)


def _database(url: str, template: str) -> Iterator[str]:
    name = f"test_{next(_database_numbers)}"
    names = {"name": sql.Identifier(name), "template": sql.Identifier(template)}
    create = "CREATE DATABASE {name} TEMPLATE {template} STRATEGY file_copy"
    with psycopg.connect(url, autocommit=True) as connection:
        connection.execute(sql.SQL(create).format(**names))
        yield _at(url, name)
        connection.execute(sql.SQL("DROP DATABASE {name} WITH (FORCE)").format(**names))


@pytest.fixture
def redis_url(servers: Servers) -> str:
    """Give a Redis database number of this test's own, empty."""
    url = _at(servers.redis_url, str(next(_redis_numbers)))
    with redis.Redis.from_url(url) as client:
        client.flushdb()
    return url


def _at(url: str, path: str) -> str:
    return urlunsplit(urlsplit(url)._replace(path=path))


@pytest.fixture
def environ(database_url: str, redis_url: str) -> dict[str, str]:
    """Give the environment of this test's processes; it may be changed before one is started."""
    return _environ(database_url, redis_url)


@pytest.fixture
def settings(environ: dict[str, str]) -> Settings:
    """Give the same as settings."""
    return config.load(environ)


def _settings(database_url: str, redis_url: str) -> Settings:
    return config.load(_environ(database_url, redis_url))


def _environ(database_url: str, redis_url: str) -> dict[str, str]:
    return {
        "DATABASE_URL": database_url,
        "REDIS_URL": redis_url,
        "EMBEDDING_DIM": str(DIMENSION),
        "AUTH": "on",
    }


@pytest.fixture
def start_process(environ: dict[str, str], tmp_path: Path) -> Iterator[StartProcess]:
    """Start processes of ours, and leave none behind."""
    started: list[Running] = []

    def start_one(*arguments: str, **more: str) -> Running:
        log = tmp_path / f"process-{len(started)}.log"
        running = processes.start(arguments, {**environ, **more}, log)
        started.append(running)
        return running

    yield start_one
    for running in reversed(started):
        running.end()


@pytest.fixture
def start_api(start_process: StartProcess) -> StartApi:
    """Start the API under gunicorn, as production does."""

    def start_one(*launcher: str, **more: str) -> str:
        bind = f"127.0.0.1:{free_port()}"
        gunicorn = [
            *launcher,
            "gunicorn",
            "app.web:create_app()",
            "--bind",
            bind,
            "--no-control-socket",
        ]
        options = ["--worker-class", "gthread", "--threads", "16", "--graceful-timeout", "2"]
        # Longer than a client of these tests rests: what is closed under a request is reset.
        options += ["--keep-alive", "75"]
        running = start_process(*gunicorn, *options, **more)
        processes.wait_for(lambda: _answers(f"http://{bind}/livez", running), 30)
        return f"http://{bind}"

    return start_one


def _answers(url: str, running: Running) -> bool:
    assert running.is_alive, running.said
    try:
        return httpx.get(url, trust_env=False).is_success
    except httpx.TransportError:
        return False


def free_port() -> int:
    """Return a port of the loopback that nobody listens on."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return int(listener.getsockname()[1])


@pytest.fixture
def wait_for() -> WaitFor:
    """Give the function that waits for a fact."""
    return processes.wait_for


@pytest.fixture(scope="session")
def chromium() -> str:
    """Give the path of a browser; what needs one is skipped, loudly, where there is none."""
    path = shutil.which("chromium")
    if path is None or shutil.which("chromedriver") is None:
        pytest.skip("chromium is not installed: apt-get install chromium chromium-driver")
    return path
