"""The walk over the crash points: a process is killed at a word it says to a server, and all holds.

No hook of the product is needed: what a process says to Postgres and Redis goes through a wire that
stops at the word, before the server hears it or when it has been carried out and nobody knows.
"""

import os
import signal
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from threading import Event
from typing import Any

import httpx
import pytest
import redis
from rq.scripts import UNIQUE_ENQUEUE_SCRIPT

from tests.api import Door, item, serving
from tests.fakes import Reply
from tests.faults.proxy import Moment, Wire
from tests.faults.stage import FINAL, QUEUE, Stage, is_stopped, numbered, struck
from tests.processes import Running, wait_for
from tests.traces import TraceMill, open_trace_mill

BEFORE, AFTER = Moment.BEFORE, Moment.AFTER
BEFORE_COMMIT, AFTER_COMMIT = Moment.BEFORE_COMMIT, Moment.AFTER_COMMIT
ITEMS = 20
REFUSAL = Reply(status=400, error="the input length exceeds the context length")
TRACES = "trace-events"

Act = Callable[["Walk"], Iterator[Running]]
"""Leads a process to its end, gives it, and goes on when it is dead and the others are started."""


class Whose(StrEnum):
    """Which process dies."""

    API = "the API, gunicorn and all"
    WORKER = "the worker"
    HORSE = "the horse of the worker"
    SWEEPER = "the sweeper"


@dataclass(frozen=True, slots=True)
class Point:
    """Where a process is killed: at which words to which server, and at which moment of them."""

    name: str
    whose: Whose
    server: str
    words: str
    moment: Moment
    act: Act
    seen: str
    """What is true in Postgres then, as everybody else sees it."""
    rung: int | None = None
    """How many bells wait then."""


@dataclass
class Walk:
    """The stage of one crash, with wires for the process that dies."""

    stage: Stage
    wires: Mapping[str, Wire]
    trace_mill: Callable[[], TraceMill]
    folder: Path
    stack: ExitStack
    workers: list[Running] = field(default_factory=list)
    sweepers: list[Running] = field(default_factory=list)

    @property
    def wired(self) -> dict[str, str]:
        """The settings of the process that dies."""
        return {"DATABASE_URL": self.wires["postgres"].url, "REDIS_URL": self.wires["redis"].url}

    def start_worker(self, **more: str) -> Running:
        self.workers.append(self.stage.start_process("worker", "run", QUEUE, **more))
        return self.workers[-1]

    def start_sweeper(self, **more: str) -> Running:
        self.sweepers.append(self.stage.start_process("worker", "sweep", **more))
        return self.sweepers[-1]

    def start_missing(self) -> None:
        """Start anew what is dead."""
        if not any(worker.is_alive for worker in self.workers):
            self.start_worker()
        if not any(sweeper.is_alive for sweeper in self.sweepers):
            self.start_sweeper()

    def wait_until_final(self) -> None:
        """Poll all jobs until they are final."""
        stage = self.stage
        with stage.polled():
            stage.wait_until_final()
            wait_for(lambda: all(last_seen(stage, each)[0] in FINAL for each in stage.job_ids), 30)
        stage.record("percents", [last_seen(stage, each)[1] for each in stage.job_ids])

    def asking(self, send: Callable[[Door], object]) -> Running:
        """Ask an API that will never answer, and give the API."""
        environ = {**self.stage.environ, **self.wired}
        served = self.stack.enter_context(serving(environ, self.folder / "api.log"))
        pool = self.stack.enter_context(ThreadPoolExecutor(1))
        client = self.stack.enter_context(httpx.Client(base_url=served.url, trust_env=False))
        asked = pool.submit(send, Door(client, None))
        self.stack.callback(lambda: check_unheard(asked.exception()))
        return served.running


def last_seen(stage: Stage, job_id: str) -> tuple[str, float]:
    """Return state and percent as a poller saw them last."""
    return stage.polls[job_id][-1] if job_id in stage.polls else ("", 0.0)


def check_unheard(fault: BaseException | None) -> None:
    """Check that a client was told nothing."""
    assert isinstance(fault, httpx.TransportError), fault


# ---- how a process gets there


def submit(walk: Walk) -> Iterator[Running]:
    """Send a batch, and again when nothing was heard of it."""
    stage = walk.stage
    ids = stage.new_rows(*numbered(ITEMS))
    stage.ledger.note(ids)
    batch = [item(number, stage.texts[number]) for number in ids]
    yield walk.asking(lambda door: door.post(batch, headers={"Idempotency-Key": "key"}))
    stage.send_until_accepted(ids, "key")
    walk.wait_until_final()
    assert stage.one("SELECT count(*) FROM holdfast.jobs") == 1


def drain(walk: Walk) -> Iterator[Running]:
    """Follow a bell."""
    walk.stage.post(*numbered(ITEMS))
    yield walk.start_worker(**walk.wired)
    walk.wait_until_final()


def drain_in_turns(walk: Walk) -> Iterator[Running]:
    """Follow a bell whose turn is over before the job is."""
    walk.stage.fake.seconds_per_item = 0.02
    walk.stage.post(*numbered(ITEMS))
    yield walk.start_worker(**walk.wired, QUEUE_BATCH_SIZE="5", QUEUE_BELL_SECONDS="0.05")
    walk.wait_until_final()


def bury(walk: Walk) -> Iterator[Running]:
    """Find a horse dead that was killed in a call."""
    stage, gate = walk.stage, Event()
    stage.fake.when(Reply(until=gate), times=1)
    worker = walk.start_worker(**walk.wired)
    stage.post(*numbered(ITEMS))
    stage.fake.wait_for(lambda fake: fake.calls)
    kill(worker.children)
    yield worker
    walk.wait_until_final()


def recover(walk: Walk) -> Iterator[Running]:
    """Find leases that ran out."""
    stage = walk.stage
    stage.fake.when(Reply(until=Event()), times=1)
    worker = walk.start_worker()
    stage.post(*numbered(ITEMS))
    stage.fake.wait_for(lambda fake: fake.calls)
    kill_all(worker)
    wait_for(lambda: stage.one(f"SELECT count(*) FROM {ITEM} WHERE lease_until < now()"), 30)  # noqa: S608
    yield walk.start_sweeper(**walk.wired)
    walk.wait_until_final()


def requeue(walk: Walk) -> Iterator[Running]:
    """Requeue what failed of a job, and once more when nothing was heard of it."""
    stage = walk.stage
    stage.fake.when(REFUSAL, marker="refused")
    job_id = stage.post("refused", *numbered(ITEMS))
    walk.start_missing()
    stage.wait_until_final()
    assert stage.statuses == {"done": ITEMS, "failed": 1}
    stage.fake.rules.clear()
    stage.sent_again += 20  # the halves of the batch in which one was refused, and the last try
    yield walk.asking(lambda door: door.send(f"/api/job/{job_id}/requeue"))
    again = stage.door.send(f"/api/job/{job_id}/requeue")
    is_done = stage.one("SELECT count(*) FROM holdfast.requeues") and again.status == 409
    assert again.status == 202 or is_done, again.body
    assert stage.one("SELECT count(*) FROM holdfast.requeues") == 1
    walk.wait_until_final()
    assert stage.statuses == {"done": ITEMS + 1}


def cancel(walk: Walk) -> Iterator[Running]:
    """Cancel a job that nobody works on yet."""
    job_id = walk.stage.post(*numbered(ITEMS))
    yield walk.asking(lambda door: door.send(f"/api/job/{job_id}/cancel"))
    walk.wait_until_final()
    assert walk.stage.door.job(job_id)["state"] == "cancelled"


def clean_up(walk: Walk) -> Iterator[Running]:
    """Delete what is older than it is kept."""
    stage = walk.stage
    stage.post(*numbered(ITEMS))
    worker = walk.start_worker()
    stage.wait_until_done(ITEMS)
    wait_for(lambda: stage.are_final)
    worker.stop()
    stage.rows(f"UPDATE {ITEM} SET updated_at = now() - interval '40 days'")  # noqa: S608
    stage.rows(
        "UPDATE holdfast.jobs SET finished_at = now() - interval '40 days', expires_at = now()"
    )
    stage.job_ids.clear()
    stage.ledger.sent.clear()  # nobody is promised any more that they are there
    yield walk.start_sweeper(**walk.wired)
    wait_for(lambda: not stage.rows("SELECT id FROM holdfast.jobs"), 30)
    for table in (ITEM, "holdfast.job_items", "holdfast.job_counts", "holdfast.item_attempts"):
        assert stage.one(f"SELECT count(*) FROM {table}") == 0, table  # noqa: S608


def read_trace(walk: Walk) -> Iterator[Running]:
    """Read a trace job."""
    mill = walk.trace_mill()
    ids = mill.ids(300)
    job_id = mill.submit(ids, domains=["materials"])
    walk.stage.job_ids.append(job_id)
    environ = {"TRACE_SOURCE_URL": mill.settings.trace_source_url, "TRACE_SEGMENT_CIDS": "100"}
    yield walk.stage.start_process("worker", "run", TRACES, **environ, **walk.wired)
    walk.wait_until_final()
    assert mill.job(job_id).state == "completed"
    query = """SELECT count(*) AS n FROM trace_demo.lot_materials_history
                WHERE container_id = ANY(%(ids)s)"""
    assert mill.source_rows(query, ids=ids) == [{"n": len(mill.result(job_id, "materials"))}]


# ---- the points

ITEM = "public.embedding_retry_queue"
API, WORKER, HORSE, SWEEPER = Whose.API, Whose.WORKER, Whose.HORSE, Whose.SWEEPER
ENQUEUE = f"INSERT INTO {ITEM}"
CLAIM = "SET status = 'processing'"
HOLD = "AND status = 'processing'\n   FOR UPDATE SKIP LOCKED"
SETTLE = "SET status = CASE WHEN o.status"
BURY = "SELECT id, leased_by"
RECOVER = "kills = q.kills + 1"
TAKE_RINGS = "SET rings = rings +"
PUSH = "EVALSHA"
REQUEUE = "INSERT INTO holdfast.requeues"
CANCEL = "SET cancelled_at = now()"


def count(status: str) -> str:
    """Return SQL that counts the items that stand so."""
    return f"(SELECT count(*) FROM {ITEM} WHERE status = '{status}')"  # noqa: S608


NO_JOB = "NOT EXISTS (TABLE holdfast.jobs)"
ALL_WAIT = f"{count('pending')} = {ITEMS}"
ALL_HELD = f"{count('processing')} = {ITEMS}"
ALL_DONE = f"{count('done')} = {ITEMS}"
IS_FINAL = "(SELECT finished_at IS NOT NULL FROM holdfast.jobs)"
REQUEUED = "EXISTS (TABLE holdfast.requeues)"
NOT_REQUEUED = f"{count('failed')} = 1 AND {IS_FINAL} AND NOT {REQUEUED}"
CANCELLED = f"{count('cancelled')} = {ITEMS} AND NOT {IS_FINAL}"
SOME_DONE = f"{count('done')} BETWEEN 1 AND {ITEMS - 1}"
HALF_CLEAN = f"NOT EXISTS (TABLE {ITEM}) AND EXISTS (TABLE holdfast.jobs)"
NO_SEGMENT = "NOT EXISTS (SELECT FROM holdfast.trace_segments WHERE status = 'done')"
ALL_SEGMENTS = "NOT EXISTS (SELECT FROM holdfast.trace_segments WHERE status <> 'done')"

PG, RD = "postgres", "redis"

POINTS = [
    Point("submit.before_commit", API, PG, ENQUEUE, BEFORE_COMMIT, submit, NO_JOB, 0),
    Point("submit.after_commit", API, PG, ENQUEUE, AFTER_COMMIT, submit, ALL_WAIT, 0),
    Point("ring.after_count", API, RD, PUSH, BEFORE, submit, ALL_WAIT, 0),
    Point("ring.after_push", API, RD, PUSH, AFTER, submit, ALL_WAIT, 1),
    Point("bell.after_claim", HORSE, PG, CLAIM, AFTER_COMMIT, drain, ALL_HELD),
    Point("bell.after_backend", HORSE, PG, HOLD, BEFORE, drain, ALL_HELD),
    Point("settle.before_commit", HORSE, PG, SETTLE, BEFORE_COMMIT, drain, ALL_HELD),
    Point("settle.after_commit", HORSE, PG, SETTLE, AFTER_COMMIT, drain, ALL_DONE),
    Point("bell.before_ring", HORSE, PG, TAKE_RINGS, BEFORE, drain_in_turns, SOME_DONE, 0),
    Point("killed.before_write", WORKER, PG, BURY, BEFORE, bury, ALL_HELD),
    Point("sweep.after_recover", SWEEPER, PG, RECOVER, AFTER_COMMIT, recover, ALL_WAIT),
    Point("requeue.before_commit", API, PG, REQUEUE, BEFORE_COMMIT, requeue, NOT_REQUEUED, 0),
    Point("requeue.after_commit", API, PG, REQUEUE, AFTER_COMMIT, requeue, REQUEUED),
    Point("cancel.after_commit", API, PG, CANCEL, AFTER_COMMIT, cancel, CANCELLED),
    Point("cleanup.mid_delete", SWEEPER, PG, "WITH gone AS", AFTER_COMMIT, clean_up, HALF_CLEAN),
    Point("trace.after_page", HORSE, RD, ":result:", AFTER, read_trace, NO_SEGMENT),
    Point("trace.before_manifest", HORSE, PG, "SET manifest", BEFORE, read_trace, ALL_SEGMENTS),
]
LONG = {
    *("bell.after_claim", "settle.after_commit", "requeue.after_commit"),
    *("submit.before_commit", "ring.after_count", "ring.after_push", "bell.after_backend"),
    *("bell.before_ring", "killed.before_write", "requeue.before_commit", "cleanup.mid_delete"),
    *("sweep.after_recover", "cancel.after_commit", "trace.after_page", "trace.before_manifest"),
}
"""What is left to the long run: each has a neighbour in the short one."""


# ---- the walk


@pytest.fixture
def walk(stage: Stage, request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Walk]:
    """Set the stage of one crash."""
    database_url, redis_url = (stage.environ[name] for name in ("DATABASE_URL", "REDIS_URL"))
    with redis.Redis.from_url(redis_url) as client:
        client.script_load(UNIQUE_ENQUEUE_SCRIPT)  # else the first push would be another's
    with ExitStack() as stack:
        wires = {
            PG: stack.enter_context(Wire(database_url)),
            RD: stack.enter_context(Wire(redis_url)),
        }

        def trace_mill() -> TraceMill:
            source_url = request.getfixturevalue("trace_source_url")
            return stack.enter_context(open_trace_mill(database_url, redis_url, source_url))

        yield Walk(stage, wires, trace_mill, tmp_path, stack)


def param(point: Point) -> Any:  # noqa: ANN401 - pytest's own
    """Name a point, and mark it where it is left to the long run."""
    return pytest.param(point, id=point.name, marks=[pytest.mark.slow] * (point.name in LONG))


@pytest.mark.parametrize("point", [param(point) for point in POINTS])
def test_crash_at(point: Point, walk: Walk) -> None:
    stage = walk.stage
    stop = walk.wires[point.server].stop(point.words, point.moment)
    act = point.act(walk)
    process = next(act)
    stop.wait()
    struck(stage.one(f"SELECT {point.seen}"), f"it is not so that {point.seen}")
    check_rung(stage, point)
    if point.whose is Whose.HORSE:
        kill(struck(process.children, "there is no horse"))
    else:
        kill_all(process)
    stage.strikes += 1
    stage.end_fault()

    walk.start_missing()
    next(act, None)

    stage.check()


def check_rung(stage: Stage, point: Point) -> None:
    """Check how many bells wait."""
    with redis.Redis.from_url(stage.environ["REDIS_URL"]) as client:
        assert point.rung in (None, client.llen(f"rq:queue:{QUEUE}"))


def kill_all(process: Running) -> None:
    """Kill a process, and then what it has forked."""
    forked = process.children
    process.kill()
    kill(forked)


def kill(pids: list[int]) -> None:
    """Kill processes, and wait until they are gone."""
    for pid in pids:
        os.kill(pid, signal.SIGKILL)
    wait_for(lambda: all(is_stopped(pid) for pid in pids))
