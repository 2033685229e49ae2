"""`make up`: everything in the foreground, and nothing of it afterwards."""

import os
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path

import httpx
import psycopg
import pytest
import redis

from tests import processes
from tests.processes import ROOT, Running, open_folder, wait_for
from worker.process import read_proc
from worker.up import Servers

Up = Callable[..., Running]
START_SECONDS = 90


def _begin(home: Path, log: Path, environ: dict[str, str]) -> Running:
    more = {"HOLDFAST_HOME": str(home), "PORT": "0", **environ}
    return processes.start(("worker", "up"), more, log)


@pytest.fixture
def home() -> Iterator[Path]:
    """Give a home that every account can enter."""
    with open_folder() as folder:
        yield folder / "home"


@pytest.fixture
def up(home: Path, tmp_path: Path) -> Iterator[Up]:
    """Start it on that home, and stop it whatever comes."""
    begun: list[Running] = []

    def begin(**environ: str) -> Running:
        begun.append(_begin(home, tmp_path / f"up-{len(begun)}.log", environ))
        return begun[-1]

    yield begin
    for each in begun:
        each.end()


@pytest.fixture(scope="module")
def shared_home() -> Iterator[Path]:
    """Give the home of the one that is only looked at."""
    with open_folder() as folder:
        yield folder / "home"


@pytest.fixture(scope="module")
def shared(shared_home: Path) -> Iterator[Running]:
    """Start one, with everything embedded, that is only looked at."""
    running = _begin(shared_home, shared_home.parent / "up.log", {})
    _ready_url(running)
    yield running
    running.end()


def _ready_url(running: Running) -> str:
    """Wait until it can serve, and return where."""

    def ready_lines() -> list[str]:
        lines = [line for line in running.said.splitlines() if line.startswith("ready ")]
        assert lines or running.is_alive, running.said
        return lines

    [line] = wait_for(ready_lines, START_SECONDS)
    return line.removeprefix("ready ")


def _env(home: Path) -> dict[str, str]:
    lines = (home / "env").read_text().splitlines()
    return dict(line.split("=", 1) for line in lines)


def _processes_of(home: Path) -> list[int]:
    """Return every process that runs on that home, its servers included."""
    marks = (f"HOLDFAST_HOME={home}\0".encode(), f"{home}/postgres\0".encode())
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            seen = (folder / "environ").read_bytes() + (folder / "cmdline").read_bytes()
            cwd = str((folder / "cwd").readlink())
        except OSError:
            continue
        if any(mark in seen for mark in marks) or cwd.startswith(f"{home}/"):
            found.append(int(folder.name))
    return found


def test_one_line_says_where_it_serves(shared: Running) -> None:
    url = _ready_url(shared)

    assert shared.said.count("ready ") == 1
    assert url.startswith("http://127.0.0.1:")
    assert httpx.get(f"{url}/livez").status_code == httpx.codes.OK
    assert httpx.get(f"{url}/readyz").json().get("degraded", []) == []


def test_the_file_env_lets_other_tools_connect_and_nobody_else(
    shared: Running, shared_home: Path
) -> None:
    _ready_url(shared)

    env = _env(shared_home)

    assert list(env) == ["DATABASE_URL", "REDIS_URL"]
    assert (shared_home / "env").stat().st_mode & 0o777 == 0o600
    with psycopg.connect(env["DATABASE_URL"]) as connection:
        targets = connection.execute(
            "SELECT target_table, dimension FROM holdfast.embedding_targets ORDER BY target_table"
        ).fetchall()
    with redis.Redis.from_url(env["REDIS_URL"]) as client:
        assert client.ping()
    demo = [("ai_insights", 384), ("conversations", 384)]
    assert targets == [*demo, ("holdfast.memory_chunks", 384)]


def test_no_secret_stands_in_an_argument(shared: Running, shared_home: Path) -> None:
    _ready_url(shared)

    secret = (shared_home / "password").read_bytes()
    lines = [(Path("/proc") / str(pid) / "cmdline") for pid in _processes_of(shared_home)]

    assert len(lines) > 5
    assert not [line for line in lines if secret in line.read_bytes()]


def test_a_second_one_on_the_same_home_says_so_and_leaves_the_first_alone(
    shared: Running, shared_home: Path, tmp_path: Path
) -> None:
    url = _ready_url(shared)

    second = _begin(shared_home, tmp_path / "second.log", {})

    assert second.wait(START_SECONDS) == 1
    assert f"another `make up` runs on {shared_home}" in second.said
    assert httpx.get(f"{url}/readyz").status_code == httpx.codes.OK
    assert (shared_home / "env").exists()


@pytest.mark.parametrize(
    "name", ["run embeddings", "run trace-events", "worker sweep", "gunicorn", "/postgres", "redis"]
)
def test_what_dies_is_named_and_started_again(
    shared: Running, shared_home: Path, name: str
) -> None:
    url = _ready_url(shared)
    [victim] = [pid for pid in shared.children if name in _command(pid)]
    deaths = shared.said.count("died (SIGKILL)")

    os.kill(victim, signal.SIGKILL)

    wait_for(lambda: shared.said.count("died (SIGKILL)") == deaths + 1)
    wait_for(lambda: [pid for pid in shared.children if name in _command(pid)], 60)
    wait_for(lambda: _is_whole(url), 60)
    assert victim not in _processes_of(shared_home)


def _runs(running: Running, name: str) -> bool:
    return any(name in _command(pid) for pid in running.children)


def _command(pid: int) -> str:
    return read_proc(pid, "cmdline").replace("\0", " ")


def _is_whole(url: str) -> bool:
    try:
        answer = httpx.get(f"{url}/readyz")
        return answer.is_success and not answer.json().get("degraded")
    except httpx.TransportError:
        return False


def test_it_stops_everything_and_finds_its_data_at_the_next_start(up: Up, home: Path) -> None:
    first = up()
    _ready_url(first)
    with psycopg.connect(_env(home)["DATABASE_URL"]) as connection:
        connection.execute("INSERT INTO ai_insights (id, body) VALUES (7, 'kept')")

    assert first.stop() == 0
    assert _processes_of(home) == []
    assert not (home / "env").exists()

    second = up()
    _ready_url(second)
    with psycopg.connect(_env(home)["DATABASE_URL"]) as connection:
        rows = connection.execute("SELECT body FROM ai_insights WHERE id = 7").fetchall()
    assert rows == [("kept",)]
    second.send(signal.SIGINT)
    assert second.wait() == 0
    assert _processes_of(home) == []


def test_another_dimension_than_the_columns_have_is_refused_with_both_numbers(
    up: Up, home: Path
) -> None:
    first = up(EMBEDDING_DIM="16", ENABLE_QUEUE_WORKER="false", EMBEDDER="ollama")
    _ready_url(first)
    first.stop()

    second = up(EMBEDDING_DIM="8", ENABLE_QUEUE_WORKER="false", EMBEDDER="ollama")

    assert second.wait(START_SECONDS) == 1
    assert "EMBEDDING_DIM is 8" in second.said
    assert "16 dimensions" in second.said
    assert "ready " not in second.said
    assert _processes_of(home) == []


def test_a_port_that_is_taken_is_named_before_anything_starts(up: Up, home: Path) -> None:
    with closing(socket.create_server(("127.0.0.1", 0))) as listener:
        port = str(listener.getsockname()[1])

        running = up(PORT=port)

        assert running.wait(START_SECONDS) == 1
    assert f"PORT {port}" in running.said
    assert not (home / "postgres").exists()


def test_a_setting_that_is_wrong_starts_nothing(up: Up, home: Path) -> None:
    running = up(QUEUE_MAX_RETRIES="many")

    assert running.wait(START_SECONDS) == 78
    assert "QUEUE_MAX_RETRIES" in running.said
    assert not home.exists()


def test_a_part_that_ends_at_once_stops_all_the_rest_with_its_own_words(up: Up, home: Path) -> None:
    running = up(GUNICORN_CMD_ARGS="--no-such-option")

    assert running.wait(START_SECONDS) == 1
    assert "api ended with" in running.said
    assert "--no-such-option" in running.said
    assert _processes_of(home) == []


def test_stopped_while_it_starts_it_leaves_nothing(up: Up, home: Path) -> None:
    running = up()
    wait_for(lambda: (home / "postgres.lock").exists() or not running.is_alive)

    running.send(signal.SIGTERM)

    assert running.wait(START_SECONDS) == 0
    assert "ready " not in running.said
    assert _processes_of(home) == []


def test_killed_it_takes_everything_with_it(up: Up, home: Path) -> None:
    running = up(ENABLE_QUEUE_WORKER="false")
    _ready_url(running)

    running.kill()

    wait_for(lambda: _processes_of(home) == [], 30)


def test_servers_of_ones_own_are_used_as_they_are_and_workers_can_be_left_out(
    up: Up, home: Path, empty_database_url: str, redis_url: str, servers: Servers
) -> None:
    assert servers.database_url != empty_database_url

    running = up(DATABASE_URL=empty_database_url, REDIS_URL=redis_url, ENABLE_QUEUE_WORKER="false")
    _ready_url(running)

    assert _env(home) == {"DATABASE_URL": empty_database_url, "REDIS_URL": redis_url}
    assert not (home / "postgres").exists()
    assert not (home / "redis").exists()
    with psycopg.connect(empty_database_url) as connection:
        demo = connection.execute("SELECT to_regclass('ai_insights')").fetchone()
    assert demo == (None,)
    assert _runs(running, "gunicorn")
    assert not _runs(running, "worker run")
    assert not _runs(running, "worker sweep")


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_to_make_alone_stops_it(
    tmp_path: Path, home: Path, empty_database_url: str, redis_url: str, number: signal.Signals
) -> None:
    makefile = tmp_path / "Makefile"
    makefile.write_text(f"up:\n\t@exec {sys.executable} -m worker up\n.PHONY: up\n")
    environ = {"DATABASE_URL": empty_database_url, "REDIS_URL": redis_url, "PORT": "0"}
    environ |= {"HOLDFAST_HOME": str(home), "ENABLE_QUEUE_WORKER": "false"}
    environ |= {"PYTHONPATH": str(ROOT), "PATH": os.defpath}
    log = tmp_path / "make.log"
    with log.open("wb") as output:
        make = Running(
            subprocess.Popen(
                # Whoever runs these tests may ignore SIGINT, as a job in the background does.
                ["/usr/bin/env", "--default-signal=INT", "/usr/bin/make", "-f", makefile, "up"],
                env=environ,
                stdout=output,
                stderr=output,
                cwd=ROOT,
                start_new_session=True,
            ),
            log,
        )
    _ready_url(make)

    make.send(number)

    make.wait()
    assert _processes_of(home) == []
