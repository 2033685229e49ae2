"""Real processes on servers of a test's own, a ledger of what was asked, and what strikes them."""

import json
import os
import signal
import threading
import time
from collections import Counter
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import httpx
import psycopg
import pytest
from psycopg.rows import dict_row

from tests.api import Answer, Door, item
from tests.fakes import Fake, float32, vector_of
from tests.faults import invariants
from tests.processes import Running, StartProcess, wait_for

MODEL = "bge-m3:latest"
TARGET = "ai_insights"
QUEUE = "embeddings"
FINAL = ("completed", "completed_with_errors", "failed", "cancelled")
START_SECONDS = 60.0
DRAIN_SECONDS = float(os.environ.get("HOLDFAST_DRAIN_SECONDS", "90"))  # noqa: TID251 - of the test alone
"""Much longer than anything takes: only what hangs for ever gets there."""

Found = TypeVar("Found")


def struck(fact: Found, what: str) -> Found:
    """Return the fact that shows that the fault struck; the scenario is void without one."""
    if not fact:
        pytest.fail(f"VOID: {what}")
    return fact


def wait_until_struck(find: Callable[[], Found], what: str, seconds: float = 30) -> Found:
    """Wait for such a fact."""
    with suppress(AssertionError):
        return wait_for(find, seconds)
    pytest.fail(f"VOID: {what}")


@dataclass(frozen=True, slots=True)
class Caught:
    """A horse that was stopped in the middle of a slice: its leases are live."""

    pid: int
    bell: str
    items: int


@dataclass
class Ledger:
    """The client's own books: what it sent, and what it was told, on disk before it goes on."""

    path: Path
    sent: list[tuple[int, str | None]] = field(default_factory=list)
    """Each row that was asked for, with the job that answered, or None."""

    def note(self, ids: Sequence[int], job_id: str | None = None) -> None:
        """Write down what is sent now, or which job was answered for it."""
        self.sent += [(number, job_id) for number in ids]
        with self.path.open("a", encoding="utf-8") as file:
            file.write(json.dumps({"ids": list(ids), "job_id": job_id}) + "\n")
            file.flush()
            os.fsync(file.fileno())


@dataclass
class Stage:
    """What a scenario plays on."""

    environ: Mapping[str, str]
    fake: Fake
    start_process: StartProcess
    door: Door
    ledger: Ledger
    record: Callable[[str, object], None]
    """Where the run's own line gets its figures from."""
    batch_size: int = 64
    kills: int = 0
    strikes: int = 0
    """How often a slice was lost by what a scenario did: each may be sent once more."""
    sent_again: int = 0
    """How many texts a scenario had sent again in other ways, such as an answer that was none."""
    job_ids: list[str] = field(default_factory=list)
    texts: dict[int, str] = field(default_factory=dict)
    polls: dict[str, list[tuple[str, float]]] = field(default_factory=dict)
    ended_at: float | None = None
    """When the fault was over, by the monotonic clock."""
    drain_seconds: float | None = None

    def __post_init__(self) -> None:
        self.connect()

    def connect(self) -> None:
        """Come to the database."""
        self._connection = psycopg.connect(
            self.environ["DATABASE_URL"], autocommit=True, row_factory=dict_row
        )

    def reconnect(self) -> None:
        """Come back to a database that was away."""
        self.close()
        self.connect()

    def close(self) -> None:
        """Leave the database."""
        self._connection.close()

    # ---- processes

    def start_worker(self, *launcher: str, **more: str) -> Running:
        """Start a worker, by a launcher where one is given, and wait until it hears bells."""
        worker = self.start_process(*launcher, "worker", "run", QUEUE, **more)
        self._wait_until_it_beats(worker)
        return worker

    def start_workers(self, number: int = 2) -> list[Running]:
        """Start workers side by side."""
        workers = [self.start_process("worker", "run", QUEUE) for _ in range(number)]
        for worker in workers:
            self._wait_until_it_beats(worker)
        return workers

    def start_sweeper(self, *launcher: str) -> Running:
        """Start a sweeper in the same way, and wait until it says that it lives."""
        sweeper = self.start_process(*launcher, "worker", "sweep")
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

    def rows_by(self, query: str, *values: object) -> None:
        """Tell Postgres something over a connection of its own, as another thread must."""
        with psycopg.connect(self.environ["DATABASE_URL"], autocommit=True) as connection:
            connection.execute(query, values)

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

    def new_rows(self, *texts: str) -> list[int]:
        """Make a row of the target table for each text, and return their ids."""
        first = len(self.texts) + 1
        ids = list(range(first, first + len(texts)))
        self.texts |= dict(zip(ids, texts, strict=True))
        self.rows(f"INSERT INTO {TARGET} (id, body) SELECT unnest(%s::bigint[]), ''", ids)
        return ids

    def post(self, *texts: str) -> str:
        """Post a batch through the API for new rows, and keep the books on it."""
        answer = self.send(self.new_rows(*texts))
        assert answer.status == httpx.codes.ACCEPTED, answer.body
        return answer.job_id

    def send(self, ids: Sequence[int], key: str | None = None) -> Answer:
        """Send the texts of some rows once, and note what was answered."""
        batch = [item(number, self.texts[number]) for number in ids]
        self.ledger.note(ids)
        answer = self.door.post(batch, headers={"Idempotency-Key": key} if key else None)
        if answer.status == httpx.codes.ACCEPTED:
            self.ledger.note(ids, answer.job_id)
            if answer.job_id not in self.job_ids:
                self.job_ids.append(answer.job_id)
        return answer

    def send_until_accepted(self, ids: Sequence[int], key: str) -> Answer:
        """Send them under one key until they are accepted, as a client should."""

        def accepted() -> Answer | None:
            with suppress(httpx.TransportError):
                answer = self.send(ids, key)
                if answer.status == httpx.codes.ACCEPTED:
                    return answer
                assert answer.status == httpx.codes.SERVICE_UNAVAILABLE, answer.body
                assert int(answer.headers["retry-after"]) > 0
            return None

        found = wait_for(accepted, DRAIN_SECONDS)
        assert found
        return found

    # ---- watching

    @contextmanager
    def polled(self) -> Generator[None]:
        """Poll all jobs through the API while the block runs, and keep what was seen."""
        stop, faults = threading.Event(), list[BaseException]()

        def poll() -> None:
            while not stop.wait(0.05):
                for job_id in list(self.job_ids):
                    self._poll(job_id)

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

    def _poll(self, job_id: str) -> None:
        answer = self.door.get(f"/api/job/{job_id}")
        if answer.status == httpx.codes.SERVICE_UNAVAILABLE:
            return
        assert answer.status == httpx.codes.OK, answer.body
        seen = (answer.json["state"], answer.json["progress"]["percent"])
        self.polls.setdefault(job_id, []).append(seen)

    @property
    def done(self) -> int:
        """How many items are done, by the counts that are kept."""
        return int(self.one("SELECT coalesce(sum(done), 0) FROM holdfast.job_counts"))

    @property
    def open_items(self) -> int:
        """How many items are not final, by the same counts."""
        return int(
            self.one("SELECT coalesce(sum(pending + processing), 0) FROM holdfast.job_counts")
        )

    def wait_until_done(self, number: int) -> None:
        """Wait until so many items are done."""
        wait_for(lambda: self.done >= number, DRAIN_SECONDS)

    def end_fault(self) -> None:
        """Note that what was broken is whole again: the drain begins."""
        self.ended_at = time.monotonic()

    def wait_until_final(self, seconds: float = DRAIN_SECONDS) -> None:
        """Wait until all jobs are final."""
        began = self.ended_at or time.monotonic()
        wait_for(lambda: self.are_final, seconds)
        self.drain_seconds = round(time.monotonic() - began, 2)

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

        found = wait_until_struck(caught, "nobody held a lease")
        assert found
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
        self._count_kill()
        return caught

    def kill_worker(self, *workers: Running) -> Running:
        """Kill one of these workers and its horse in the middle of a slice, and return which.

        As a service manager does it: what the parent leaves behind is killed too.
        """
        worker, caught = self.catch(workers)
        worker.kill()
        with suppress(ProcessLookupError):
            os.kill(caught.pid, signal.SIGKILL)
        self._count_kill()
        return worker

    def _count_kill(self) -> None:
        self.kills += 1
        self.strikes += 1
        self.end_fault()

    # ---- the verdict

    def check(self) -> None:
        """Check the invariants, what the stores hold, what was sent, and what pollers saw."""
        for name, value in self.figures.items():
            self.record(name, value)
        found = invariants.violations(self._audited())
        assert found == {}, found
        self._check_vectors()
        assert self.calls <= self.bound, (self.calls, self.bound)
        for job_id, seen in self.polls.items():
            states = [state for state, _ in seen]
            percents = [percent for _, percent in seen]
            first = next((n for n, state in enumerate(states) if state in FINAL), len(states))
            assert len(set(states[first:])) <= 1, (job_id, states)
            assert percents == sorted(percents), (job_id, percents)

    def check_now(self) -> None:
        """Check what must hold at any moment, in the middle of a fault too."""
        found = invariants.violations(self._audited(), at_any_time=True)
        assert found == {}, found

    def _audited(self) -> str:
        """Hand the client's books to the audit."""
        url = self.environ["DATABASE_URL"]
        invariants.keep_books(url, TARGET, self.ledger.sent)
        return url

    @property
    def figures(self) -> dict[str, object]:
        """What came of it, in numbers."""
        counted = invariants.figures(self._audited())
        sent = {"calls": self.calls, "bound": self.bound}
        return {**counted, **sent, "drain_seconds": self.drain_seconds}

    @property
    def calls(self) -> int:
        """How many texts were sent to the backend, each time counted."""
        return sum(map(len, map(self.fake.arrivals.__getitem__, set(self.texts.values()))))

    @property
    def bound(self) -> int:
        """How many may be: each once, and what was in hand at each strike once more."""
        return len(self.texts) + self.strikes * self.batch_size + self.sent_again

    def _check_vectors(self) -> None:
        query = f"SELECT id, embedding::real[] AS vector FROM {TARGET} WHERE id = ANY(%s)"  # noqa: S608
        stored = {row["id"]: row["vector"] for row in self.rows(query, list(self.texts))}
        done = {int(row["target_id"]) for row in self.items() if row["status"] == "done"}
        for number in done:
            right = vector_of(MODEL, self.texts[number], self.fake.dimension)
            assert stored[number] is not None, number
            assert float32(stored[number]) == right, number


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
