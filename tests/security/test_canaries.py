"""S12, S13, I15: no text, key or password where it has no place, whatever goes wrong."""

import os
import secrets
import signal
from collections.abc import Collection, Iterator
from functools import partial
from pathlib import Path
from threading import Event
from urllib.parse import urlsplit

import psycopg
import pytest
from psycopg import sql

from tests.api import (  # noqa: F401 - fixtures among them
    Door,
    Ground,
    in_redis,
    item,
    make_backend,
    make_ground,
    serving,
)
from tests.conftest import free_port
from tests.fakes import Reply
from tests.processes import Running, StartProcess, wait_for

TEXT, KEY, NAME, PASSWORD = (f"canary-{secrets.token_hex(8)}" for _ in range(4))

OF_THE_USER = {
    ("embedding_retry_queue", "text_content"),
    ("job_items", "custom_id"),
    ("job_items", "metadata"),
    ("vectors", "metadata"),
    ("ai_insights", "body"),
}
"""Where texts and names belong: nowhere else in Postgres may they be."""

COLUMNS = """
SELECT c.table_schema, c.table_name, c.column_name
  FROM information_schema.columns c JOIN information_schema.tables t
    ON (t.table_schema, t.table_name) = (c.table_schema, c.table_name)
 WHERE c.table_schema IN ('holdfast', 'public') AND t.table_type = 'BASE TABLE'
"""


@pytest.fixture(name="files")
def make_files(ground: Ground, tmp_path: Path) -> dict[str, str]:
    """Give an environment in which each secret is a file's, as a service manager hands it over."""
    values = {
        "DATABASE_URL": ground.environ["DATABASE_URL"],
        "REDIS_URL": ground.environ["REDIS_URL"],
        "EMBEDDER_API_KEY": KEY,
    }
    for name, value in values.items():
        (tmp_path / name).write_text(value)
    named = {f"{name}_FILE": str(tmp_path / name) for name in values}
    quick = {
        "LOG_LEVEL": "DEBUG",
        "QUEUE_WAIT_TIME": "1",
        "SWEEP_SECONDS": "0.3",
        "QUEUE_MAX_RETRIES": "2",
    }
    return {**ground.environ, **dict.fromkeys(values, ""), **named, **quick}


def of_process(pid: int) -> bytes:
    """Return what anybody on the machine, or its owner, can read of how a process was started."""
    return b"\0".join(Path(f"/proc/{pid}/{name}").read_bytes() for name in ("cmdline", "environ"))


def in_postgres(ground: Ground, besides: Collection[tuple[str, str]] = ()) -> str:
    """Return every column of every table as text, but for some."""
    found = []
    with psycopg.connect(ground.environ["DATABASE_URL"]) as connection:
        for schema, table, column in connection.execute(COLUMNS).fetchall():
            if (table, column) not in besides:
                names = sql.Identifier(column), sql.Identifier(schema, table)
                query = sql.SQL("SELECT {}::text FROM {}").format(*names)
                found += [str(row[0]) for row in connection.execute(query)]
    return "\n".join(found)


@pytest.fixture(name="gate")
def make_gate(ground: Ground) -> Iterator[Event]:
    """Bend the backend's answers so that they repeat what they were sent, and hold one of them."""
    gate = Event()
    backend = ground.backend
    backend.when(Reply(until=gate), marker="held")
    backend.when(
        Reply(status=400, error=f"cannot read {TEXT} refused, key {KEY}"), marker="refused"
    )
    backend.when(Reply(status=500, error=f"{TEXT} broke it, key {KEY}"), marker="broken")
    backend.when(Reply(body=f"<html>{TEXT} {KEY}".encode()), marker="page")
    backend.when(Reply(body=f'{{"embeddings": ["{TEXT}"]}}'.encode()), marker="vector")
    yield gate
    gate.set()
    backend.rules.clear()


def test_after_a_run_with_every_failure_no_secret_and_no_text_is_found(
    ground: Ground, files: dict[str, str], gate: Event, start_process: StartProcess, tmp_path: Path
) -> None:
    ground.ctx.link.flushdb()
    key = ground.door().key
    assert key
    with serving(files, tmp_path / "api.log") as served:
        worker = start_process("worker", "run", "embeddings", **files)
        sweeper = start_process("worker", "sweep", **files)
        door = served.door(key)
        seen = go_through_everything(ground, door, worker, gate)
        pids = [each.pid for each in (served.running, worker, sweeper)]
        pids += served.running.children
        seen += b"".join(map(of_process, pids))
        ends = [each.stop() for each in (worker, sweeper, served.running)]
        said = served.running.said + worker.said + sweeper.said

    assert ends == [0, 0, 0]
    assert ground.sizes()["jobs"] == 3
    for event in ("item_failed", "item_retry", "horse_killed", "request_refused"):
        assert f'"{event}"' in said, event
    assert TEXT in in_postgres(ground)
    assert NAME in in_postgres(ground)
    assert seen.count(b"DATABASE_URL_FILE=") >= 4
    places = {
        "logs": said.encode(),
        "Postgres": in_postgres(ground, OF_THE_USER).encode(),
        "Redis": in_redis(ground.ctx.link),
        "/proc": seen,
    }
    passwords = [urlsplit(ground.environ[name]).password for name in ("DATABASE_URL", "REDIS_URL")]
    canaries = {"text": TEXT, "name": NAME, "key of the backend": KEY, "key of the API": key}
    canaries |= {f"password {number}": str(each) for number, each in enumerate(passwords)}
    assert all(len(canary) > 16 for canary in canaries.values())
    found = [
        (what, where)
        for what, c in canaries.items()
        for where in places
        if c.encode() in places[where]
    ]
    assert found == []


def go_through_everything(ground: Ground, door: Door, worker: Running, gate: Event) -> bytes:
    """Let items fail in every way and a horse be killed; return what /proc said of that horse."""
    kinds = ("fine", "refused", "broken", "page", "vector")
    batch = ground.new_items(*(f"{TEXT} {kind}" for kind in kinds))
    batch = [
        {**each, "custom_id": f"{NAME} {n}", "metadata": {"of": NAME}}
        for n, each in enumerate(batch)
    ]
    forbidden = ground.new_items(f"{TEXT} of a row that its table refuses")
    ground.rows("UPDATE ai_insights SET body = %s WHERE id = %s", TEXT, forbidden[0]["target_id"])
    ground.rows(
        f"""ALTER TABLE ai_insights ADD CONSTRAINT no_canary
              CHECK (embedding IS NULL OR body NOT LIKE '{TEXT}%%')"""
    )
    held = door.post(ground.new_items(f"{TEXT} held")).job_id
    ground.backend.wait_for(lambda fake: any(each.has("held") for each in fake.requests))
    [horse] = worker.children
    seen = of_process(horse)
    os.kill(horse, signal.SIGKILL)
    gate.set()

    failing = [door.post(batch).job_id, door.post(forbidden).job_id]
    door.post([{**batch[0], "text": f"{TEXT}\0"}, item("no id", TEXT)])
    door.post_raw(f'{{"items": [{{"text": "{TEXT}'.encode())
    door.get(f"/api/job/{TEXT}")
    cut_every_connection(ground)
    for job_id in (held, *failing):
        wait_for(partial(is_final, door, job_id), 90)
        for rest in ("", "/items", "/result"):
            seen += door.get(f"/api/job/{job_id}{rest}").body.replace(NAME.encode(), b"")
    return seen


def cut_every_connection(ground: Ground) -> None:
    with psycopg.connect(ground.environ["DATABASE_URL"], autocommit=True) as connection:
        connection.execute(
            "SELECT pg_terminate_backend(pid) FROM pg_stat_activity"
            " WHERE datname = current_database() AND application_name LIKE 'holdfast%'"
            " AND application_name <> 'holdfast api'"
        )


def is_final(door: Door, job_id: str) -> bool:
    return bool(door.job(job_id)["finished_at"])


@pytest.mark.parametrize(
    "arguments",
    [("run", "embeddings"), pytest.param(("sweep",), marks=pytest.mark.slow)],
    ids=["worker", "sweeper"],
)
def test_a_server_that_is_away_or_refuses_is_named_without_its_password(
    environ: dict[str, str], start_process: StartProcess, arguments: tuple[str, ...]
) -> None:
    def with_password(url: str, port: int | None = None) -> str:
        parts = urlsplit(url)
        place = f"{parts.username or ''}:{PASSWORD}@127.0.0.1:{port or parts.port}"
        return parts._replace(netloc=place).geturl()

    urls = [environ[name] for name in ("DATABASE_URL", "REDIS_URL")]
    for port in (None, free_port()):  # a wrong password, and nobody there
        database, redis = (with_password(url, port) for url in urls)
        running = start_process("worker", *arguments, DATABASE_URL=database, REDIS_URL=redis)
        wait_for(partial(has_noticed, running), 30)
        running.end()
        assert PASSWORD not in running.said


def has_noticed(running: Running) -> bool:
    return not running.is_alive or '_lost"' in running.said
