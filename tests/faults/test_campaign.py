"""A re-embedding campaign by real processes: beside daily work, kills, and readers."""

import random
import threading
from collections import Counter
from collections.abc import Generator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import psycopg
import pytest
from psycopg import sql

from tests.fakes import float32, vector_of
from tests.faults.stage import DRAIN_SECONDS, TARGET, Stage, numbered, struck
from tests.processes import wait_for

NEW_MODEL = "another-model"
OLD, NEW = "bge-m3-latest-8", "another-model-8"
MOST_DAILY_OPEN = 10


def command(stage: Stage, *words: str) -> str:
    """Run an operator's command to its end."""
    running = stage.start_process("worker", *words)
    assert running.wait() == 0, running.said
    return running.said


LOST = """
SELECT id FROM ai_insights
 WHERE {} IS NULL AND embedding IS NOT NULL AND (id <= %s OR id = ANY(%s::bigint[]))
"""
NEW_ROWS = "SELECT id FROM ai_insights WHERE id > %s AND embedding IS NOT NULL"
PICKED = "SELECT id, {}::real[] AS vector FROM ai_insights WHERE id = ANY(%s) AND {} IS NOT NULL"


class Reader:
    """Searches all the while, as a user's program does: column and model by the view."""

    def __init__(self, stage: Stage, rows: int, texts: dict[int, list[str]]) -> None:
        self._url = stage.environ["DATABASE_URL"]
        self._rows = rows
        self._texts = texts
        """Every text that a row ever had."""
        self._chosen = random.Random(5)  # noqa: S311 - no secret
        self._found: set[int] = set()
        """New rows that a search in the old version could find."""
        self._stop = threading.Event()
        self.looks = self.compared = 0
        self.versions: list[str] = []
        self.faults: list[object] = []

    def _look(self, connection: "psycopg.Connection[Any]") -> None:
        column, version, model = connection.execute(
            """SELECT vector_column, embedding_version, model FROM holdfast.current_targets
                WHERE target_table = %s""",
            (TARGET,),
        ).fetchone() or ("", "", "")
        self.looks += 1
        if version not in self.versions:
            self.versions.append(version)
        name = sql.Identifier(column)
        lost = connection.execute(sql.SQL(LOST).format(name), (self._rows, [*self._found]))
        self.faults += [("lost", version, row) for row in lost]
        if version == OLD:
            self._found |= {row[0] for row in connection.execute(NEW_ROWS, (self._rows,))}
        picked = [self._chosen.randint(1, self._rows + 20) for _ in range(10)]
        for number, vector in connection.execute(sql.SQL(PICKED).format(name, name), (picked,)):
            self.compared += 1
            if not any(
                float32(vector) == vector_of(model, text, 8) for text in self._texts[number]
            ):
                self.faults.append(("mixed", version, number))

    def _run(self) -> None:
        with psycopg.connect(self._url, autocommit=True) as connection:
            while not self._stop.wait(0.01):
                self._look(connection)

    @contextmanager
    def looking(self) -> Generator["Reader"]:
        with ThreadPoolExecutor(1) as pool:
            running = pool.submit(self._run)
            try:
                yield self
            finally:
                self._stop.set()
        running.result()


class Daily:
    """Changes texts, adds rows and deletes some, one after the other, by their own connection."""

    def __init__(self, stage: Stage, texts: dict[int, list[str]]) -> None:
        self._stage = stage
        self._texts = texts
        self._chosen = random.Random(7)  # noqa: S311 - no secret
        self.done: Counter[str] = Counter()

    def turn(self, number: int) -> None:
        match number % 4:
            case 0:
                new = max(self._stage.texts) + 1
                self._write(new, f"new in turn {number}")
                self.done["added"] += 1
            case 1:
                self._delete(self._chosen.choice(sorted(self._stage.texts)))
                self.done["deleted"] += 1
            case _:
                row = self._chosen.choice(sorted(self._stage.texts))
                self._write(row, f"changed in turn {number}")
                self.done["changed"] += 1

    def _write(self, row: int, text: str) -> None:
        self._texts.setdefault(row, []).append(text)
        self._stage.texts[row] = text
        self._stage.rows_by(
            """INSERT INTO ai_insights (id, body) VALUES (%s, %s)
                   ON CONFLICT (id) DO UPDATE SET body = excluded.body""",
            row,
            text,
        )
        self._stage.send([row])

    def _delete(self, row: int) -> None:
        """Delete a row as its owner may: half of them by hand, without a word to anybody."""
        del self._stage.texts[row]
        with psycopg.connect(self._stage.environ["DATABASE_URL"]) as connection:
            if row % 2:
                connection.execute("SELECT delete_embedding('ai_insights', %s)", (str(row),))
            connection.execute("DELETE FROM ai_insights WHERE id = %s", (row,))


DAILY_OPEN = "SELECT count(*) FROM holdfast.jobs WHERE finished_at IS NULL AND priority = 0"


@contextmanager
def daily_work(stage: Stage, daily: Daily) -> Generator[None]:
    """Do it while the block runs, no more of it than these workers can carry."""
    stop = threading.Event()

    def work() -> None:
        for number in range(10**6):
            if stop.wait(0.1):
                return
            while stage.one(DAILY_OPEN) > MOST_DAILY_OPEN:
                if stop.wait(0.1):
                    return
            daily.turn(number)

    with ThreadPoolExecutor(1) as pool:
        working = pool.submit(work)
        try:
            yield
        finally:
            stop.set()
    working.result()


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
    texts = {number: [text] for number, text in stage.texts.items()}
    daily = Daily(stage, texts)
    with Reader(stage, rows, texts).looking() as reader, daily_work(stage, daily):
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
    check(stage, reader, daily)


def check(stage: Stage, reader: Reader, daily: Daily) -> None:
    struck(reader.looks > 20, "nobody was reading")
    struck(reader.versions == [OLD, NEW], "the reader saw no cut-over")
    struck(min(daily.done[each] for each in ("added", "changed", "deleted")), "no daily work")
    stage.record("looks", reader.looks)
    stage.record("vectors_compared", reader.compared)
    stage.record("daily_work", dict(daily.done))
    stage.record("status", command(stage, "reembed", "status").splitlines())
    assert reader.faults == []
    stored = stage.rows("SELECT id, body, other::real[] AS vector FROM ai_insights")
    assert {row["id"] for row in stored} == stage.texts.keys()
    for row in stored:
        assert float32(row["vector"]) == vector_of(NEW_MODEL, row["body"], 8), row["id"]
        assert row["body"] == stage.texts[row["id"]]


def test_a_campaign_beside_daily_work_leaves_no_query_without_a_vector(stage: Stage) -> None:
    campaign(stage, 500, kills=False)


@pytest.mark.slow
def test_a_campaign_of_twenty_thousand_rows_survives_kills(stage: Stage) -> None:
    campaign(stage, 20_000, kills=True)
