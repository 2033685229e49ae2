"""A case of the list: a batch posted through the API, a backend that misbehaves, and what must be.

`works` runs workers and a sweeper as threads in real time; `Mill.work` moves time instead.
"""

import threading
from collections.abc import Generator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from typing import Any

import httpx

from app.core.errors import FailedItemsRemain, StoreUnavailable
from app.core.store import fleet, jobs
from app.web import create_app
from tests.api import Door, item
from tests.drains import Mill, open_mill
from tests.fakes import Fake, vector_of
from tests.processes import wait_for
from worker.sweep import Sweeper

LOOK_SECONDS = 0.02
DRAIN_SECONDS = 60.0
FINAL = ("done", "failed", "cancelled")
PERMANENT = ("bad_input", "store_reject")


@dataclass
class Case:
    """One case at work."""

    mill: Mill
    door: Door

    @property
    def fake(self) -> Fake:
        """The backend."""
        return self.mill.fake

    def post(self, *texts: str, first: int = 1) -> str:
        """Post a batch as the list has it: position + 1 is the row's id."""
        ids = list(range(first, first + len(texts)))
        self.mill.rows(
            """INSERT INTO ai_insights (id, body) SELECT unnest(%(ids)s::bigint[]), ''
                   ON CONFLICT DO NOTHING""",
            ids=ids,
        )
        batch = [item(number, text) for number, text in zip(ids, texts, strict=True)]
        answer = self.door.post(batch)
        assert answer.status == httpx.codes.ACCEPTED, answer.body
        return answer.job_id

    def job(self, job_id: str) -> dict[str, Any]:
        """Return a job as the API shows it, read anew."""
        self.mill.ctx.live.forget(job_id)
        return self.door.job(job_id)

    def beat(self, workers: int = 1) -> None:
        """Say that workers live: else a job says that it waits for one."""
        with self.mill.ctx.database.transaction() as tx:
            for number in range(workers):
                process = fleet.Process(f"w{number}", "worker", "embeddings", "here", number)
                fleet.beat(tx, process, seconds=600, counters={})

    # ---- in real time

    @contextmanager
    def works(self, workers: int = 1) -> Generator[None]:
        """Run workers and a sweeper while the block runs."""
        stop = threading.Event()
        self.beat(workers)
        with ThreadPoolExecutor(workers + 1) as pool:
            threads = [pool.submit(self._serve, stop) for _ in range(workers)]
            threads.append(pool.submit(self._sweep, stop))
            try:
                yield
            finally:
                stop.set()
        for thread in threads:
            thread.result()

    def _serve(self, stop: threading.Event) -> None:
        while not stop.wait(LOOK_SECONDS):
            for job_id in self._due():
                with suppress(FailedItemsRemain, StoreUnavailable):
                    self.mill.drain(job_id, stop=stop.is_set)

    def _sweep(self, stop: threading.Event) -> None:
        sweeper = Sweeper(self.mill.ctx)
        while not stop.wait(LOOK_SECONDS):
            sweeper.tick()

    def _due(self) -> list[str]:
        with self.mill.ctx.database.transaction() as tx:
            paused = [
                model
                for model, each in fleet.backends(tx, self.mill.settings.embedder).items()
                if each.is_paused
            ]
            return [job.id for job in jobs.due(tx, paused_models=paused)]

    def wait_until_final(self, job_id: str) -> None:
        """Wait until a job is final."""
        wait_for(lambda: self.mill.job(job_id).state.is_final, DRAIN_SECONDS)

    # ---- what holds after every case

    def close(self) -> None:
        """Check what must hold after every case; that answers are JSON the door has checked."""
        limit = self.mill.settings.queue_max_retries
        stored = self.mill.vectors()
        rows = self.mill.rows("SELECT * FROM public.embedding_retry_queue")
        assert len({(row["target_table"], row["target_id"]) for row in rows}) == len(rows)
        for row in rows:
            assert row["status"] in FINAL, row
            assert row["attempts"] <= limit, row
            if row["status"] == "failed":
                assert row["attempts"] == limit or row["error_class"] in PERMANENT, row
            vector = stored.get(int(row["target_id"]))
            if row["status"] == "done" and row["skip_reason"] is None:
                text, size = row["text_content"], self.mill.settings.embedding_dim
                assert vector == vector_of(row["model"], text, size), row
            else:
                assert vector is None, row
        for job in self.mill.rows("SELECT id FROM holdfast.jobs"):
            counts = self.door.job(job["id"])["counts"]
            total = counts.pop("total")
            assert sum(counts.values()) == total


@contextmanager
def open_case(database_url: str, redis_url: str, fake: Fake, **more: str) -> Generator[Case]:
    """Open one on a database where nothing is to be done."""
    with ExitStack() as stack:
        mill = stack.enter_context(open_mill(database_url, redis_url, fake, AUTH="off", **more))
        mill.empty()
        app = create_app(mill.settings)
        stack.callback(app.extensions["context"].close)
        transport = httpx.WSGITransport(app=app, raise_app_exceptions=False)
        client = stack.enter_context(httpx.Client(transport=transport, base_url="http://127.0.0.1"))
        yield Case(mill, Door(client, None))
