"""A re-embedding campaign by real processes: beside daily work, kills, and readers."""

import random
import threading
from collections.abc import Generator
from contextlib import contextmanager, suppress
from typing import Any

import psycopg
import pytest
from psycopg import sql

from tests.fakes import float32, vector_of
from tests.faults.stage import DRAIN_SECONDS, TARGET, Stage, numbered, struck
from tests.processes import wait_for

NEW_MODEL = "another-model"
OLD, NEW = "bge-m3-latest-8", "another-model-8"


def command(stage: Stage, *words: str) -> str:
    """Run an operator's command to its end."""
    running = stage.start_process("worker", *words)
    assert running.wait() == 0, running.said
    return running.said


class Reader:
    """Searches all the while, as a user's program does: column and model by the view."""

    def __init__(self, url: str) -> None:
        self._url = url
        self._stop = threading.Event()
        self.looks = 0
        self.versions: list[str] = []
        self.faults: list[object] = []

    def _look(self, connection: "psycopg.Connection[Any]") -> None:
        column, version = connection.execute(
            """SELECT vector_column, embedding_version FROM holdfast.current_targets
                WHERE target_table = %s""",
            (TARGET,),
        ).fetchone() or ("", "")
        # Rows that a search in the old version could have found, and this one cannot.
        query = sql.SQL("SELECT count(*) FROM ai_insights WHERE {} IS NULL AND {} IS NOT NULL")
        found = connection.execute(
            query.format(sql.Identifier(column), sql.Identifier("embedding"))
        ).fetchone()
        self.looks += 1
        if version not in self.versions:
            self.versions.append(version)
        if found is None or found[0]:
            self.faults.append((version, found))

    def _run(self) -> None:
        with psycopg.connect(self._url, autocommit=True) as connection:
            while not self._stop.wait(0.01):
                self._look(connection)

    @contextmanager
    def looking(self) -> Generator["Reader"]:
        thread = threading.Thread(target=self._run)
        thread.start()
        try:
            yield self
        finally:
            self._stop.set()
            thread.join()


@contextmanager
def daily_work(stage: Stage, rows: int) -> Generator[None]:
    """Change texts, add rows and delete some while the block runs, by their own connection."""
    stop, chosen = threading.Event(), random.Random(7)  # noqa: S311 - no secret

    def work() -> None:
        for turn in range(10**6):
            if stop.wait(0.1):
                return
            number = chosen.randint(1, rows)
            with suppress(KeyError):
                stage.texts[number] = f"changed in turn {turn}"
                stage.rows_by(
                    "UPDATE ai_insights SET body = %s WHERE id = %s", stage.texts[number], number
                )
                stage.send([number])

    thread = threading.Thread(target=work)
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join()


def campaign(stage: Stage, rows: int, *, kills: bool) -> None:
    stage.rows("UPDATE holdfast.embedding_targets SET text_column = 'body'")
    stage.rows("ALTER TABLE ai_insights ADD COLUMN other vector(8)")
    sweeper = stage.start_sweeper()
    workers = stage.start_workers(2)
    for first in range(0, rows, 1000):
        stage.post(*numbered(min(1000, rows - first), f"block {first} text"))
    stage.rows(
        """UPDATE ai_insights t SET body = q.text_content FROM embedding_retry_queue q
            WHERE q.target_id = t.id::text"""
    )
    stage.wait_until_final()
    new = ["--vector-column", "other", "--model", NEW_MODEL]
    stage.record("plan", command(stage, "reembed", "plan", TARGET, *new).splitlines())
    with (
        Reader(stage.environ["DATABASE_URL"]).looking() as reader,
        daily_work(stage, rows),
    ):
        command(stage, "reembed", "start", TARGET, *new)
        has = "SELECT count(*) FROM ai_insights WHERE other IS NOT NULL"
        wait_for(lambda: stage.one(has) >= rows // 2, DRAIN_SECONDS)
        if kills:
            sweeper.kill()
            workers[0].kill()
            stage.start_sweeper()
            stage.start_worker()
        read = "SELECT is_read FROM holdfast.campaigns ORDER BY id DESC LIMIT 1"
        wait_for(lambda: stage.one(read), DRAIN_SECONDS)
        command(stage, "reembed", "cutover", TARGET)
        over = "SELECT state = 'cut_over' FROM holdfast.campaigns ORDER BY id DESC LIMIT 1"
        wait_for(lambda: stage.one(over), DRAIN_SECONDS)
        stage.one("SELECT pg_sleep(1)")  # daily work goes on in the new version
    done = "SELECT finished_at IS NOT NULL FROM holdfast.campaigns ORDER BY id DESC LIMIT 1"
    still = "SELECT count(*) FROM holdfast.jobs WHERE finished_at IS NULL"
    wait_for(lambda: stage.one(done) and not stage.one(still), DRAIN_SECONDS)
    check(stage, reader, rows)


def check(stage: Stage, reader: Reader, rows: int) -> None:
    struck(reader.looks > 20, "nobody was reading")
    struck(reader.versions == [OLD, NEW], "the reader saw no cut-over")
    changed = sum("changed" in text for text in stage.texts.values())
    struck(changed > 2, "there was no daily work")
    stage.record("looks", reader.looks)
    stage.record("texts_changed", changed)
    stage.record("status", command(stage, "reembed", "status").splitlines())
    assert reader.faults == []
    stored = stage.rows("SELECT id, body, other::real[] AS vector FROM ai_insights")
    assert len(stored) == rows
    for row in stored:
        assert float32(row["vector"]) == vector_of(NEW_MODEL, row["body"], 8), row["id"]
        assert row["body"] == stage.texts[row["id"]]


def test_a_campaign_beside_daily_work_leaves_no_query_without_a_vector(stage: Stage) -> None:
    campaign(stage, 500, kills=False)


@pytest.mark.slow
def test_a_campaign_of_twenty_thousand_rows_survives_kills(stage: Stage) -> None:
    campaign(stage, 20_000, kills=True)
