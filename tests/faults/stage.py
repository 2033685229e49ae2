"""Real processes on servers of a test's own, a ledger of what was asked, and what strikes them."""

import json
import os
import signal
import threading
from collections import Counter
from collections.abc import Generator, Iterable, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import psycopg
from psycopg.rows import dict_row

from tests.api import Door, item
from tests.fakes import Fake, float32, vector_of
from tests.faults import invariants
from tests.processes import Running, StartProcess, wait_for

MODEL = "bge-m3:latest"
TARGET = "ai_insights"
QUEUE = "embeddings"
FINAL = ("completed", "completed_with_errors", "failed", "cancelled")
START_SECONDS = 60.0
DRAIN_SECONDS = 90.0
"""Much longer than anything takes: only what hangs for ever gets there."""


@dataclass(frozen=True, slots=True)
class Caught:
    """A horse that was stopped in the middle of a slice: its leases are live."""

    pid: int
    bell: str
    items: int


@dataclass
class Stage:
    """What a scenario plays on."""

    environ: Mapping[str, str]
    fake: Fake
    start_process: StartProcess
    door: Door
    batch_size: int = 64
    kills: int = 0
    job_ids: list[str] = field(default_factory=list)
    texts: dict[int, str] = field(default_factory=dict)
    polls: dict[str, list[tuple[str, float]]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._connection = psycopg.connect(
            self.environ["DATABASE_URL"], autocommit=True, row_factory=dict_row
        )

    def close(self) -> None:
        """Leave the database."""
        self._connection.close()

    # ---- processes

    def start_worker(self, **more: str) -> Running:
        """Start a worker, and wait until it hears bells."""
        worker = self.start_process("worker", "run", QUEUE, **more)
        self._wait_until_it_beats(worker)
        return worker

    def start_workers(self, number: int = 2) -> list[Running]:
        """Start workers side by side."""
        workers = [self.start_process("worker", "run", QUEUE) for _ in range(number)]
        for worker in workers:
            self._wait_until_it_beats(worker)
        return workers

    def start_sweeper(self) -> Running:
        """Start a sweeper, and wait until it says that it lives."""
        sweeper = self.start_process("worker", "sweep")
        self._wait_until_it_beats(sweeper)
        return sweeper

    def _wait_until_it_beats(self, process: Running) -> None:
        query = "SELECT 1 FROM holdfast.processes WHERE pid = %s AND alive_until > now()"
        wait_for(lambda: not process.is_alive or self.rows(query, process.pid), START_SECONDS)
        assert process.is_alive, process.said

    # ---- Postgres

    def rows(self, query: str, *values: object) -> list[dict[str, Any]]:
        """Ask Postgres."""
        cursor = self._connection.execute(query, values or None)
        return cursor.fetchall() if cursor.description else []

    def one(self, query: str, *values: object) -> Any:  # noqa: ANN401 - the query knows
        """Ask Postgres for one value."""
        [row] = self.rows(query, *values)
        [value] = row.values()
        return value

    @property
    def statuses(self) -> Counter[str]:
        """How many items stand where."""
        rows = self.rows(
            "SELECT status, count(*) AS n FROM public.embedding_retry_queue GROUP BY 1"
        )
        return Counter({row["status"]: row["n"] for row in rows})

    def items(self) -> list[dict[str, Any]]:
        """Return every item."""
        return self.rows("SELECT * FROM public.embedding_retry_queue ORDER BY id")

    @property
    def are_final(self) -> bool:
        """Whether every job that was accepted is final."""
        query = "SELECT count(*) FROM holdfast.jobs WHERE id = ANY(%s) AND finished_at IS NOT NULL"
        return bool(self.one(query, self.job_ids) == len(self.job_ids))

    # ---- asking for work

    def post(self, *texts: str) -> str:
        """Post a batch through the API for new rows, and keep the books on it."""
        first = len(self.texts) + 1
        ids = list(range(first, first + len(texts)))
        self.texts |= dict(zip(ids, texts, strict=True))
        self.rows(f"INSERT INTO {TARGET} (id, body) SELECT unnest(%s::bigint[]), ''", ids)
        sent = "INSERT INTO audit.sent SELECT %s, unnest(%s::text[])"
        self.rows(sent, TARGET, [str(number) for number in ids])
        batch = [item(number, text) for number, text in zip(ids, texts, strict=True)]
        answer = self.door.post(batch)
        assert answer.status == httpx.codes.ACCEPTED, answer.body
        done = "UPDATE audit.sent SET job_id = %s WHERE target_id = ANY(%s::text[])"
        self.rows(done, answer.job_id, [str(number) for number in ids])
        self.job_ids.append(answer.job_id)
        return answer.job_id

    # ---- watching

    @contextmanager
    def polled(self) -> Generator[None]:
        """Poll all jobs through the API while the block runs, and keep what was seen."""
        stop, faults = threading.Event(), list[BaseException]()

        def poll() -> None:
            while not stop.wait(0.05):
                for job_id in list(self.job_ids):
                    body = self.door.job(job_id)
                    seen = (body["state"], body["progress"]["percent"])
                    self.polls.setdefault(job_id, []).append(seen)

        def guarded() -> None:
            try:
                poll()
            except BaseException as exc:  # noqa: BLE001 - raised again below
                faults.append(exc)

        thread = threading.Thread(target=guarded)
        thread.start()
        try:
            yield
        finally:
            stop.set()
            thread.join()
        if faults:
            raise faults[0]

    @property
    def done(self) -> int:
        """How many items are done, by the counts that are kept."""
        return int(self.one("SELECT coalesce(sum(done), 0) FROM holdfast.job_counts"))

    def wait_until_done(self, number: int) -> None:
        """Wait until so many items are done."""
        wait_for(lambda: self.done >= number, DRAIN_SECONDS)

    def wait_until_final(self) -> None:
        """Wait until all jobs are final."""
        wait_for(lambda: self.are_final, DRAIN_SECONDS)

    # ---- striking

    def catch(self, workers: Iterable[Running]) -> tuple[Running, Caught]:
        """Stop the horse of one of these workers while it holds live leases."""
        victims = list(workers)

        def caught() -> tuple[Running, Caught] | None:
            for worker in victims:
                found = self._caught(worker)
                if found:
                    return worker, found
            return None

        found = wait_for(caught, DRAIN_SECONDS)
        assert found, "void: nobody held a lease"
        return found

    def _caught(self, worker: Running) -> Caught | None:
        bell = bell_of(worker)
        for pid in worker.children:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGSTOP)
                wait_for(partial(is_stopped, pid))
                number = self._held(bell) if bell else 0
                if number and state_of(pid) == "T":
                    return Caught(pid, str(bell), number)
                os.kill(pid, signal.SIGCONT)
        return None

    def _held(self, bell: str) -> int:
        """Count the live leases of a bell, once the server has done what it was told."""
        active = "SELECT 1 FROM pg_stat_activity WHERE application_name = %s AND state = 'active'"
        wait_for(lambda: not self.rows(active, f"holdfast {bell}"))
        query = """SELECT count(*) FROM public.embedding_retry_queue
                    WHERE status = 'processing' AND leased_by = %s AND lease_until > now()"""
        return int(self.one(query, bell))

    def kill_horse(self, *workers: Running) -> Caught:
        """Kill the horse of one of these workers in the middle of a slice."""
        _, caught = self.catch(workers)
        os.kill(caught.pid, signal.SIGKILL)
        self.kills += 1
        return caught

    def kill_worker(self, *workers: Running) -> Running:
        """Kill one of these workers and its horse in the middle of a slice, and return which.

        As a service manager does it: what the parent leaves behind is killed too.
        """
        worker, caught = self.catch(workers)
        worker.kill()
        with suppress(ProcessLookupError):
            os.kill(caught.pid, signal.SIGKILL)
        self.kills += 1
        return worker

    # ---- the verdict

    def check(self) -> None:
        """Check the invariants, what the stores hold, and what pollers saw."""
        assert invariants.violations(self.environ["DATABASE_URL"]) == {}
        self._check_vectors()
        for job_id, seen in self.polls.items():
            states = [state for state, _ in seen]
            percents = [percent for _, percent in seen]
            first = next((n for n, state in enumerate(states) if state in FINAL), len(states))
            assert len(set(states[first:])) <= 1, (job_id, states)
            assert percents == sorted(percents), (job_id, percents)

    def _check_vectors(self) -> None:
        query = f"SELECT id, embedding::real[] AS vector FROM {TARGET} WHERE id = ANY(%s)"  # noqa: S608
        stored = {row["id"]: row["vector"] for row in self.rows(query, list(self.texts))}
        done = {int(row["target_id"]) for row in self.items() if row["status"] == "done"}
        for number in done:
            right = vector_of(MODEL, self.texts[number], self.fake.dimension)
            assert stored[number] is not None, number
            assert float32(stored[number]) == right, number

    @property
    def calls_again(self) -> int:
        """How many texts were sent to the backend more than once, each time counted."""
        return sum(len(times) - 1 for text, times in self.fake.arrivals.items() if text != "ok")


def bell_of(worker: Running) -> str | None:
    """Return the bell that the worker's horse began last."""
    started = [line for line in events(worker.log) if line.get("event") == "bell_start"]
    return str(started[-1]["bell"]) if started else None


def events(log: Path) -> list[dict[str, Any]]:
    """Return the lines of a log that are whole."""
    lines = []
    for line in log.read_text("utf-8", "replace").splitlines():
        with suppress(ValueError):
            lines.append(json.loads(line))
    return lines


def state_of(pid: int) -> str:
    """Return the letter of a process's state; empty where there is none."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text("utf-8", "replace")
    except OSError:
        return ""
    return text.rpartition(")")[2].split()[0]


def is_stopped(pid: int) -> bool:
    """Whether a process does nothing any more, for now or for ever."""
    return state_of(pid) in ("T", "Z", "")


def numbered(number: int, prefix: str = "text") -> list[str]:
    """Return different short texts."""
    return [f"{prefix} {position}" for position in range(number)]
