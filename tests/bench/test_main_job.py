"""Speed of the main job, printed beside a yardstick measured in the same run (`make bench`)."""

import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import psycopg
import pytest
import redis

from app.core.config import Settings
from migrations.__main__ import migrate
from tests.bench import bare
from tests.processes import Running, StartApi, StartProcess, WaitFor

pytestmark = pytest.mark.slow

ITEMS = 50_000
CHARACTERS = 1_000
DIMENSION = 1_024
SLICE = 64
STREAM_ITEMS = 1_000_000
POST_ITEMS = 10_000
ROUNDS = 3


def text_of(number: int) -> str:
    """Return a text of CHARACTERS characters that no other number has."""
    return (f"{number} " + "lorem ipsum " * (CHARACTERS // 12 + 1))[:CHARACTERS]


@pytest.fixture
def database_url(empty_database_url: str) -> str:
    """Give a database whose demo tables have the benchmark's dimension."""
    migrate(empty_database_url, demo=True, dimension=DIMENSION)
    return empty_database_url


@pytest.fixture
def connection(database_url: str) -> "Iterator[psycopg.Connection[Any]]":
    """Give a connection to look at the tables with."""
    with psycopg.connect(database_url, autocommit=True) as opened:
        yield opened


@pytest.fixture
def backend(start_process: StartProcess, wait_for: WaitFor, environ: dict[str, str]) -> str:
    """Start the stub and give its URL."""
    stub = start_process("tests.bench.stub", str(DIMENSION))
    url = wait_for(lambda: stub.said.strip())  # noqa: PLW0108 - read anew each time
    environ |= {"EMBEDDER_URL": url, "EMBEDDING_DIM": str(DIMENSION), "AUTH": "off"}
    return url


def say(name: str, **figures: float | str) -> None:
    """Print one line of figures."""
    shown = {
        key: round(value, 2) if isinstance(value, float) else value
        for key, value in figures.items()
    }
    print(f"\nBENCH {name} {json.dumps(shown)}")  # noqa: T201 - what a benchmark is for


def fill(connection: "psycopg.Connection[Any]", rows: int) -> None:
    connection.execute(
        "INSERT INTO ai_insights (id, body) SELECT g, 'x' FROM generate_series(1, %s) g", [rows]
    )
    connection.execute("VACUUM ANALYZE ai_insights")


def test_drain_beside_bare_rq_jobs(
    connection: "psycopg.Connection[Any]",
    backend: str,
    start_api: StartApi,
    start_process: StartProcess,
    settings: Settings,
    wait_for: WaitFor,
) -> None:
    fill(connection, ITEMS)
    for round_ in range(ROUNDS):
        speeds = {
            f"bare_{form}": _bare(connection, backend, start_process, settings, form)
            for form in ("text", "binary")
        }
        ours = _ours(connection, start_api, start_process, wait_for, round_)
        ratios = {f"ratio_{form}": ours / speed for form, speed in speeds.items()}
        say("drain", items=ITEMS, ours=ours, **speeds, **ratios)
        assert min(ratios.values()) > 0.3  # a floor against ruin; the figures are for reading


def _stored(connection: "psycopg.Connection[Any]") -> int:
    row = connection.execute(
        "SELECT count(*) FROM ai_insights WHERE embedding IS NOT NULL"
    ).fetchone()
    assert row
    return int(row[0])


def _forget_vectors(connection: "psycopg.Connection[Any]") -> None:
    connection.execute("UPDATE ai_insights SET embedding = NULL")
    connection.execute("VACUUM FULL ai_insights")
    connection.execute("CHECKPOINT")


def _bare(
    connection: "psycopg.Connection[Any]",
    backend: str,
    start_process: StartProcess,
    settings: Settings,
    form: str,
) -> float:
    _forget_vectors(connection)
    queue = bare.queue(settings.redis_url)
    for first in range(1, ITEMS + 1, SLICE):
        ids = list(range(first, min(first + SLICE, ITEMS + 1)))
        texts = [text_of(number) for number in ids]
        arguments = (settings.database_url, backend, ids, texts, form)
        queue.enqueue(bare.embed, *arguments, description="bare")
    began = time.monotonic()
    workers = [start_process("tests.bench.bare", settings.redis_url) for _ in range(2)]
    for worker in workers:
        assert worker.wait(600) == 0, worker.said[-2000:]
    seconds = time.monotonic() - began
    assert _stored(connection) == ITEMS
    with redis.Redis.from_url(settings.redis_url) as client:
        client.flushdb()
    return ITEMS / seconds


def _ours(
    connection: "psycopg.Connection[Any]",
    start_api: StartApi,
    start_process: StartProcess,
    wait_for: WaitFor,
    round_: int,
) -> float:
    _forget_vectors(connection)
    url = start_api()
    sweeper = start_process("worker", "sweep")
    workers: list[Running] = []
    lines = b"".join(
        json.dumps(
            {
                "target_table": "ai_insights",
                "target_id": number,
                "text": f"{round_} {text_of(number)}"[:CHARACTERS],
            }
        ).encode()
        + b"\n"
        for number in range(1, ITEMS + 1)
    )
    answer = httpx.post(
        f"{url}/api/embeddings",
        content=lines,
        headers={"Content-Type": "application/x-ndjson"},
        timeout=300,
    )
    assert answer.status_code == 202, answer.text
    assert answer.json()["accepted"] == ITEMS
    connection.execute("CHECKPOINT")
    began = time.monotonic()
    workers += [start_process("worker", "run", "embeddings") for _ in range(2)]
    wait_for(lambda: _state(url, answer.json()["job_id"]) == "completed", 600)
    seconds = time.monotonic() - began
    assert _stored(connection) == ITEMS
    for process in [*workers, sweeper]:
        process.stop()
    return ITEMS / seconds


def _state(url: str, job_id: str) -> str:
    return str(httpx.get(f"{url}/api/job/{job_id}?wait=10", timeout=60).json()["state"])


def test_post_beside_a_bare_copy(
    connection: "psycopg.Connection[Any]", environ: dict[str, str], start_api: StartApi
) -> None:
    environ |= {"EMBEDDING_DIM": str(DIMENSION), "AUTH": "off"}
    url = start_api()
    connection.execute("CREATE TABLE bare (target_table text, target_id text, text_content text)")
    for round_ in range(ROUNDS + 1):
        rows = [
            ("ai_insights", str(number), f"{round_} {text_of(number)}"[:CHARACTERS])
            for number in range(1, POST_ITEMS + 1)
        ]
        began = time.monotonic()
        with connection.cursor().copy(
            "COPY bare (target_table, target_id, text_content) FROM STDIN"
        ) as copy:
            for row in rows:
                copy.write_row(row)
        plain = time.monotonic() - began
        connection.execute("TRUNCATE bare")
        names = ("target_table", "target_id", "text")
        body = json.dumps({"items": [dict(zip(names, row, strict=True)) for row in rows]})
        connection.execute("TRUNCATE embedding_retry_queue, holdfast.job_items")
        connection.execute("CHECKPOINT")
        began = time.monotonic()
        answer = httpx.post(
            f"{url}/api/embeddings",
            content=body,
            headers={"Content-Type": "application/json"},
            timeout=300,
        )
        ours = time.monotonic() - began
        assert answer.status_code == 202, answer.text
        if round_:  # the first one warms the pool and the caches
            say("post", items=POST_ITEMS, copy_seconds=plain, post_seconds=ours, ratio=ours / plain)


def test_stream_of_a_million_items_in_bounded_memory(
    environ: dict[str, str],
    start_api: StartApi,
) -> None:
    environ |= {"EMBEDDING_DIM": str(DIMENSION), "AUTH": "off"}
    url = start_api()
    pid = _api_process(url)
    before = _peak_megabytes(pid)

    def body() -> Iterator[bytes]:
        for first in range(1, STREAM_ITEMS + 1, 1000):
            yield b"".join(
                b'{"target_table":"ai_insights","target_id":%d,"text":"short text %d"}\n' % (n, n)
                for n in range(first, first + 1000)
            )

    began = time.monotonic()
    answer = httpx.post(
        f"{url}/api/embeddings",
        content=body(),
        headers={"Content-Type": "application/x-ndjson"},
        timeout=900,
    )
    seconds = time.monotonic() - began
    assert answer.status_code == 202, answer.text
    assert answer.json()["accepted"] == STREAM_ITEMS
    after = _peak_megabytes(pid)
    say("stream", items=STREAM_ITEMS, seconds=seconds, peak_before_mb=before, peak_after_mb=after)
    assert after < before + 150


def _api_process(url: str) -> int:
    """Return the process that serves: the child of the gunicorn that was told this address."""
    address = url.removeprefix("http://").encode()
    return max(
        int(path.parent.name)
        for path in Path("/proc").glob("[0-9]*/cmdline")
        if address in _read(path)
    )


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError:
        return b""


def _peak_megabytes(pid: int) -> float:
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith("VmHWM"):
            return int(line.split()[1]) / 1024
    raise AssertionError(pid)
