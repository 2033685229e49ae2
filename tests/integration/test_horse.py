import copy
import json
import os
import re
import signal
import socket
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from threading import Event
from typing import Any

import psycopg
import pytest
import redis
from rq import Queue, Worker
from rq.registry import StartedJobRegistry
from rq.worker.base import BaseWorker

from app.core import rings, submission
from app.core.bells import BellJob
from app.core.config import Settings
from app.core.context import Context, open_context
from app.core.errors import ErrorClass
from app.core.model import Caller, Rings
from app.core.requests import BatchOptions
from app.core.store import fleet, jobs
from tests.fakes import Fake, Reply
from tests.processes import Running, StartProcess, WaitFor, wait_for
from worker import horse, runtime
from worker.horse import MemoryCgroup, death_class
from worker.notice import Notice

QUEUE = "embeddings"
MARKER = "hold this one"
CALLER = Caller("tests", frozenset({"submit"}))


@pytest.fixture
def backend(environ: dict[str, str]) -> Iterator[Fake]:
    """Give a backend of our own, and a worker that asks Redis often and works item by item."""
    with Fake() as fake:
        environ |= {"EMBEDDER_URL": fake.url, "QUEUE_WAIT_TIME": "1", "QUEUE_BATCH_SIZE": "1"}
        yield fake


@pytest.fixture
def ctx(backend: Fake, settings: Settings) -> Iterator[Context]:
    """Give the context of the process that the test is."""
    assert settings.embedder_url == backend.url
    context = open_context(settings, application="test", most_connections=4)
    yield context
    context.close()


@pytest.fixture
def gate(backend: Fake) -> Event:
    """Hold back the answer to every text with the marker until this is set."""
    event = Event()
    backend.when(Reply(until=event), marker=MARKER, times=1)
    return event


StartWorker = Callable[..., Running]


@pytest.fixture
def start_worker(start_process: StartProcess, ctx: Context, wait_for: WaitFor) -> StartWorker:
    """Start workers, each of which can hear bells when this returns."""

    def start_one(**more: str) -> Running:
        worker = start_process("worker", "run", QUEUE, **more)
        wait_for(lambda: process_of(ctx, worker) or not worker.is_alive, 30)
        assert worker.is_alive, worker.said
        return worker

    return start_one


def rows(ctx: Context, query: str, value: object) -> list[dict[str, Any]]:
    with ctx.database.session() as connection:
        return connection.execute(query, [value]).fetchall()


def process_of(ctx: Context, worker: Running) -> list[dict[str, Any]]:
    query = """SELECT name, counters, alive_until > now() AS is_alive
                 FROM holdfast.processes WHERE pid = %s"""
    return rows(ctx, query, worker.pid)


def submit(ctx: Context, texts: list[str]) -> str:
    """Submit texts for new rows of ai_insights, and ring."""
    values = [
        {"target_table": "ai_insights", "target_id": number, "text": text}
        for number, text in enumerate(texts, start=1)
    ]
    with ctx.database.transaction() as tx:
        for value in values:
            tx.execute("INSERT INTO ai_insights (id, body) VALUES (%(target_id)s, %(text)s)", value)
    return submission.submit(ctx, CALLER, submission.Incoming(BatchOptions(), values)).job_id


def items_of(ctx: Context, job_id: str) -> list[dict[str, Any]]:
    query = """SELECT target_id, status, attempts, kills, error_class, last_error, leased_by
                 FROM public.embedding_retry_queue WHERE job_id = %s ORDER BY id"""
    return rows(ctx, query, job_id)


def statuses(ctx: Context, job_id: str) -> list[str]:
    return [item["status"] for item in items_of(ctx, job_id)]


def is_done(ctx: Context, job_id: str) -> bool:
    return set(statuses(ctx, job_id)) == {"done"}


def bell_status(ctx: Context, bell: str) -> str:
    return str(BellJob.fetch(bell, ctx.link).get_status().value)


def events(worker: Running, event: str) -> list[dict[str, Any]]:
    lines = [json.loads(line) for line in worker.said.splitlines() if line.startswith("{")]
    return [line for line in lines if line.get("event") == event]


# ---- work


def test_a_worker_follows_a_bell_to_the_end_of_its_job(
    ctx: Context, start_worker: StartWorker, wait_for: WaitFor
) -> None:
    worker = start_worker()

    job_id = submit(ctx, ["first text", "second text", "third text"])

    wait_for(lambda: is_done(ctx, job_id))
    wait_for(lambda: bell_status(ctx, f"{job_id}-1") == "finished")
    result = BellJob.fetch(f"{job_id}-1", ctx.link).return_value()
    assert result == {"done": 3}
    assert [line["counts"] for line in events(worker, "bell_end")] == [result]
    assert "Queue worker starting" in worker.said
    assert "text" not in worker.said


def test_no_two_workers_have_one_name(ctx: Context, start_worker: StartWorker) -> None:
    workers = [start_worker(), start_worker()]

    names = {process_of(ctx, worker)[0]["name"] for worker in workers}
    registered = ctx.link.smembers("rq:workers:embeddings")
    assert registered == {f"rq:worker:{name}".encode() for name in names}
    assert len(names) == 2
    with ctx.database.transaction() as tx:
        assert fleet.alive(tx).workers == {QUEUE: 2}


def test_a_job_with_failed_items_shows_as_a_failed_bell_in_one_line(
    backend: Fake, ctx: Context, start_worker: StartWorker, wait_for: WaitFor
) -> None:
    backend.when(
        Reply(status=400, error="the input length exceeds the context length"), marker=MARKER
    )
    worker = start_worker()

    job_id = submit(ctx, [MARKER, "another"])

    wait_for(lambda: ctx.bells.failed(QUEUE))
    assert ctx.bells.failed(QUEUE) == [job_id]
    failed = said_of(ctx, f"{job_id}-1")
    assert failed.endswith("FailedItemsRemain: 1 of 2 items failed")
    assert MARKER not in failed + worker.said
    assert "embedding.py" not in failed


ADAPTER = """
class Bent:
    name = "bent"

    def embed(self, texts, *, model, seconds):
        {action}

    def close(self):
        pass


def build(options):
    return Bent()
"""


@pytest.fixture
def bend(tmp_path: Path, environ: dict[str, str]) -> Callable[[str], None]:
    """Make the embedder one that does something else, as a site's own might."""

    def use(action: str) -> None:
        (tmp_path / "bent.py").write_text(ADAPTER.format(action=action))
        environ.update(EMBEDDER="bent:build", PYTHONPATH=str(tmp_path))

    return use


def test_what_was_not_foreseen_leaves_a_bell_as_its_class_alone(
    bend: Callable[[str], None], ctx: Context, start_worker: StartWorker, wait_for: WaitFor
) -> None:
    bend("raise KeyError(texts[0])")
    worker = start_worker()

    job_id = submit(ctx, [MARKER])

    wait_for(lambda: ctx.bells.failed(QUEUE))
    failed = said_of(ctx, f"{job_id}-1")
    assert failed.endswith("WorkError: KeyError")
    assert MARKER not in failed + worker.said
    assert "Queue worker error" in worker.said
    assert worker.is_alive


def test_the_time_limit_of_rq_ends_a_bell(
    gate: Event, ctx: Context, start_worker: StartWorker, wait_for: WaitFor
) -> None:
    job_id = submit(ctx, [MARKER])
    ctx.link.flushdb()
    worker = start_worker()

    ctx.bells.ring(rung(job_id), queue=QUEUE, timeout_seconds=1)

    wait_for(lambda: ctx.bells.failed(QUEUE))
    assert "JobTimeoutException" in said_of(ctx, f"{job_id}-99")
    assert worker.is_alive
    gate.set()


def rung(job_id: str) -> Rings:
    return Rings(job_id=job_id, last=99, bells=1, run=1, project="", priority=0)


def said_of(ctx: Context, bell: str) -> str:
    """Return what RQ keeps, and the dashboard shows, of why a bell failed."""
    result = BellJob.fetch(bell, ctx.link).latest_result()
    assert result is not None
    return (result.exc_string or "").strip()


def test_a_worker_without_postgres_lives_and_its_bells_end(
    backend: Fake, ctx: Context, start_process: StartProcess, wait_for: WaitFor
) -> None:
    worker = start_process(
        "worker", "run", QUEUE, DATABASE_URL="postgresql://nobody@127.0.0.1:1/nothing"
    )

    ctx.bells.ring(rung("emb-0123456789abcdef"), queue=QUEUE, timeout_seconds=60)

    wait_for(lambda: bell_status(ctx, "emb-0123456789abcdef-99") == "finished", 30)
    bell = BellJob.fetch("emb-0123456789abcdef-99", ctx.link)
    assert bell.return_value() == {"store_unavailable": 1}
    assert len(events(worker, "postgres_lost")) == 1
    assert len(events(worker, "bell_put_off")) == 1
    assert worker.is_alive
    assert backend.calls == []


RECORDER = """
import os
import sys


def record():
    log = os.open(os.environ["IMPORTS"], os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)

    def note(event, values):
        if event == "import":
            os.write(log, f"{values[0]}\\n".encode())

    sys.addaudithook(note)


os.register_at_fork(after_in_child=record)
"""


def test_a_horse_imports_nothing(
    tmp_path: Path, ctx: Context, start_worker: StartWorker, wait_for: WaitFor
) -> None:
    (tmp_path / "sitecustomize.py").write_text(RECORDER)
    imports = tmp_path / "imports"
    start_worker(PYTHONPATH=str(tmp_path), IMPORTS=str(imports))

    job_id = submit(ctx, ["one", "two"])

    wait_for(lambda: is_done(ctx, job_id))
    wait_for(lambda: bell_status(ctx, f"{job_id}-1") == "finished")
    assert imports.read_text() == ""


# ---- death


def hold_a_horse(ctx: Context, worker: Running, wait_for: WaitFor) -> tuple[str, int]:
    """Have a horse wait for the backend's answer; return its job and its process id."""
    job_id = submit(ctx, [MARKER, "second", "third"])
    wait_for(lambda: "processing" in statuses(ctx, job_id))
    return job_id, worker.children[0]


def test_a_killed_horse_frees_its_items_at_once_and_by_name(
    gate: Event, ctx: Context, start_worker: StartWorker, wait_for: WaitFor
) -> None:
    worker = start_worker()
    job_id, pid = hold_a_horse(ctx, worker, wait_for)

    os.kill(pid, signal.SIGKILL)

    wait_for(lambda: "processing" not in statuses(ctx, job_id))  # its lease is far longer
    held = items_of(ctx, job_id)[0]
    assert (held["status"], held["attempts"], held["kills"]) == ("pending", 1, 1)
    assert (held["error_class"], held["leased_by"]) == (ErrorClass.KILLED, None)
    assert held["last_error"] == "its process ended with signal 9; in hand: 1 item, index 0"
    assert wait_for(lambda: [line["items"] for line in events(worker, "horse_killed")]) == [1]
    assert wait_for(lambda: ctx.bells.failed(QUEUE)) == [job_id]
    gate.set()
    assert rings.ring(ctx, job_id, bells=1, by="test") == 1
    wait_for(lambda: is_done(ctx, job_id))
    assert worker.is_alive


def test_a_death_that_postgres_cannot_hear_of_does_not_end_the_worker(
    settings: Settings, caplog: pytest.LogCaptureFixture
) -> None:
    deaf = replace(settings, database_url="postgresql://nobody@127.0.0.1:1/nothing")
    worker = horse.HoldfastWorker(deaf, QUEUE, stop=horse.StopByte(), notice=Notice(address=""))
    bell = BellJob("emb-0123456789abcdef-1", worker.connection)

    worker.handle_work_horse_killed(bell, 1, signal.SIGKILL, None)

    assert worker.counters["horses_killed"] == worker.counters["store_errors"] == 1
    assert caplog.records[-1].message == "horse died: its process ended with signal 9"


def test_a_horse_is_the_first_to_go_where_memory_runs_out(
    gate: Event, ctx: Context, start_worker: StartWorker, wait_for: WaitFor
) -> None:
    worker = start_worker()
    _, pid = hold_a_horse(ctx, worker, wait_for)

    scores = [int(Path(f"/proc/{each}/oom_score_adj").read_text()) for each in (pid, worker.pid)]

    assert scores[0] == 900 > scores[1]
    gate.set()


def test_a_horse_whose_worker_was_killed_stops_after_its_slice(
    gate: Event, ctx: Context, start_worker: StartWorker, wait_for: WaitFor
) -> None:
    worker = start_worker()
    job_id, pid = hold_a_horse(ctx, worker, wait_for)

    worker.kill()
    gate.set()

    wait_for(lambda: has_ended(pid))
    assert statuses(ctx, job_id) == ["done", "pending", "pending"]
    assert ctx.bells.waiting(QUEUE) == [job_id]


def has_ended(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except FileNotFoundError:
        return True


def test_a_horse_knows_its_worker_even_where_that_died_before_it_could_ask(
    settings: Settings,
) -> None:
    recipe = runtime.prepare(settings)

    mine, orphan = (
        runtime.open_horse(each, leased_by="a bell", stop_asked=lambda: False)
        for each in (recipe, replace(recipe, pid=-1))
    )

    assert not mine.must_stop()
    assert orphan.must_stop()
    mine.close()
    orphan.close()


OUT_OF_MEMORY = """
            import mmap
            hoard = mmap.mmap(-1, 2**30)
            for page in range(0, 2**30, 4096):
                hoard[page] = 1"""

JOIN_CGROUP = """
import os

with open(os.environ["CGROUP"] + "/cgroup.procs", "w") as procs:
    procs.write(str(os.getpid()))
"""


@pytest.fixture
def small_cgroup() -> Iterator[Path]:
    """Make a memory cgroup of 256 MiB below our own."""
    found = MemoryCgroup.of_process()
    if found is None or os.geteuid() != 0:
        pytest.skip("needs root, and a memory cgroup")
    folder = found.kills_file.parent / f"holdfast-{os.getpid()}"
    try:
        folder.mkdir()
        (folder / found.limit_file.name).write_text(str(256 * 2**20))
    except OSError as exc:
        pytest.skip(f"no memory cgroup can be made here: {exc}")
    yield folder
    folder.rmdir()


def test_a_text_that_ends_its_process_for_memory_is_found_named_and_takes_no_neighbour_with_it(
    small_cgroup: Path,
    tmp_path: Path,
    bend: Callable[[str], None],
    ctx: Context,
    start_worker: StartWorker,
    wait_for: WaitFor,
) -> None:
    answer = "[[len(text) + 1.0] * 8 for text in texts]"
    bend(f"if {MARKER!r} in texts:{OUT_OF_MEMORY}\n        return {answer}")
    (tmp_path / "sitecustomize.py").write_text(JOIN_CGROUP)
    worker = start_worker(CGROUP=str(small_cgroup), QUEUE_BATCH_SIZE="3", QUEUE_MAX_RETRIES="2")

    job_id = submit(ctx, ["one", MARKER, "two,"])
    wait_for(lambda: [item["kills"] for item in items_of(ctx, job_id)] == [1, 1, 1])
    rings.ring(ctx, job_id, bells=1, by="test")  # the first two of them, each alone
    wait_for(lambda: statuses(ctx, job_id) == ["done", "failed", "pending"])
    rings.ring(ctx, job_id, bells=1, by="test")

    wait_for(lambda: statuses(ctx, job_id) == ["done", "failed", "done"])
    limit_and_peak = r"memory ran out: limit 256 MiB, peak of its process 2\d\d MiB; in hand: "
    with ctx.database.transaction() as tx:
        [error] = jobs.errors(tx, job_id)
    assert (error["error_class"], error["count"]) == (ErrorClass.OOM_KILLED, 1)
    assert re.fullmatch(limit_and_peak + "1 item, index 1", error["sample"])
    query = """SELECT a.message FROM holdfast.item_attempts a
                 JOIN public.embedding_retry_queue q ON q.id = a.item_id
                WHERE q.job_id = %s AND a.attempt = 1"""
    first = {row["message"] for row in rows(ctx, query, job_id)}
    assert len(first) == 1
    assert re.fullmatch(limit_and_peak + "3 items, index 0 to 2", first.pop())
    assert [item["attempts"] for item in items_of(ctx, job_id)] == [2, 2, 2]
    deaths = events(worker, "horse_killed")
    assert [(line["error_class"], line["items"]) for line in deaths] == [
        ("oom_killed", 3),
        ("oom_killed", 1),
    ]
    assert worker.stop() == 0


@pytest.mark.parametrize(
    ("wait_status", "is_out_of_memory", "named"),
    [
        (None, False, ErrorClass.TIMEOUT_KILLED),
        (None, True, ErrorClass.TIMEOUT_KILLED),
        (signal.SIGKILL, True, ErrorClass.OOM_KILLED),
        (signal.SIGKILL, False, ErrorClass.KILLED),
        (signal.SIGTERM, False, ErrorClass.SERVICE_STOP),
        (signal.SIGTERM, True, ErrorClass.SERVICE_STOP),
        (signal.SIGHUP, False, ErrorClass.KILLED),
        *[(number, False, ErrorClass.CRASHED) for number in (4, 6, 7, 8, 11)],
        (signal.SIGSEGV | 0x80, True, ErrorClass.CRASHED),  # with a core
        (1 << 8, True, ErrorClass.EXITED),
        (0, False, ErrorClass.EXITED),
    ],
)
def test_each_death_has_its_class(
    wait_status: int | None,
    is_out_of_memory: bool,  # noqa: FBT001 - a parameter of the test
    named: ErrorClass,
) -> None:
    assert death_class(wait_status, is_out_of_memory=is_out_of_memory) is named


V1 = {"memory.oom_control": "oom_kill_disable 0\nunder_oom 0\noom_kill 3\n"}
V2 = {"memory.events": "low 0\nhigh 0\nmax 7\noom 4\noom_kill 3\noom_group_kill 0\n"}


@pytest.mark.parametrize(
    ("lines", "folder", "files", "limit"),
    [
        ("4:cpu,memory:/a/b\n0::/\n", "memory/a/b", V1 | {"memory.limit_in_bytes": "1024\n"}, 1024),
        ("4:memory:/a\n", "memory", V1 | {"memory.limit_in_bytes": f"{2**63 - 4096}\n"}, None),
        ("0::/a/b\n", "a/b", V2 | {"memory.max": "1024\n"}, 1024),
        ("0::/not/seen/here\n", "", V2 | {"memory.max": "max\n"}, None),
        ("1:name=systemd:/a\n0::/a:b\n", "a:b", V2, None),
    ],
)
def test_the_count_of_memory_kills_is_found(
    tmp_path: Path, lines: str, folder: str, files: dict[str, str], limit: int | None
) -> None:
    (tmp_path / folder).mkdir(parents=True, exist_ok=True)
    for name, text in files.items():
        (tmp_path / folder / name).write_text(text)
    (tmp_path / "self").write_text(lines)

    found = MemoryCgroup.of_process(tmp_path / "self", tmp_path)

    assert found is not None
    assert (found.kills(), found.limit_bytes()) == (3, limit)


@pytest.mark.parametrize("lines", ["", "0::/\n", "4:memory:/a\n", "nonsense\n"])
def test_where_nobody_counts_there_is_no_count(tmp_path: Path, lines: str) -> None:
    (tmp_path / "self").write_text(lines)

    assert MemoryCgroup.of_process(tmp_path / "self", tmp_path) is None


# ---- stop


def test_a_stop_lets_the_slice_end_and_rings_for_the_rest(
    gate: Event, ctx: Context, start_worker: StartWorker, wait_for: WaitFor
) -> None:
    worker = start_worker()
    job_id, _ = hold_a_horse(ctx, worker, wait_for)

    worker.send(signal.SIGTERM)
    gate.set()

    assert worker.wait() == 0
    assert statuses(ctx, job_id) == ["done", "pending", "pending"]
    assert bell_status(ctx, f"{job_id}-1") == "finished"
    assert ctx.bells.waiting(QUEUE) == [job_id]
    assert ctx.bells.failed(QUEUE) == []
    left = process_of(ctx, worker)[0]
    assert (left["is_alive"], left["counters"]) == (False, {"bells": 1})


def test_an_idle_worker_stops_at_once(
    ctx: Context, start_worker: StartWorker, wait_for: WaitFor
) -> None:
    worker = start_worker(QUEUE_WAIT_TIME="60")
    key = f"rq:worker:{process_of(ctx, worker)[0]['name']}"
    wait_for(lambda: ctx.link.hget(key, "state") == b"idle")

    assert worker.stop() == 0

    assert not process_of(ctx, worker)[0]["is_alive"]
    assert not ctx.link.exists("rq:workers", "rq:workers:embeddings")
    assert len(events(worker, "worker_stop")) == 1


def test_an_end_that_nobody_asked_for_is_a_failure(ctx: Context, start_worker: StartWorker) -> None:
    worker = start_worker()

    ctx.link.set("rq:queue:embeddings", "no list")

    assert worker.wait() == 1
    assert "Queue worker error" in worker.said
    assert not process_of(ctx, worker)[0]["is_alive"]


# ---- being seen to live


def test_a_worker_stands_in_an_emptied_redis_again_and_hears_bells(
    ctx: Context, start_worker: StartWorker, wait_for: WaitFor
) -> None:
    worker = start_worker()
    key = f"rq:worker:{process_of(ctx, worker)[0]['name']}"

    ctx.link.flushdb()

    wait_for(lambda: ctx.link.sismember("rq:workers:embeddings", key), 20)
    assert ctx.link.sismember("rq:workers", key)
    assert ctx.link.hget(key, "queues") == b"embeddings"
    assert ctx.link.hget(key, "birth")
    assert ctx.link.ttl(key) > 0
    job_id = submit(ctx, ["one"])
    wait_for(lambda: is_done(ctx, job_id))
    assert worker.is_alive


def test_the_loss_of_redis_is_said_once_and_so_is_its_return(
    caplog: pytest.LogCaptureFixture,
) -> None:
    retry = copy.deepcopy(horse.NotedRetry())  # as redis-py does for each connection
    answers = iter([redis.ConnectionError(), redis.TimeoutError(), None])

    def ask() -> str:
        error = next(answers)
        if error:
            raise error
        return "PONG"

    failures: list[Exception] = []
    assert retry.call_with_retry(ask, failures.append) == "PONG"

    assert len(failures) == 2
    told = [getattr(record, "event", "") for record in caplog.records]
    assert told == ["redis_lost", "redis_back"]


def test_a_service_manager_hears_that_a_worker_is_ready_and_lives(
    start_process: StartProcess,
) -> None:
    address = f"@holdfast-test-{os.getpid()}"
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as heard:
        heard.settimeout(30)
        heard.bind(f"\0{address[1:]}")

        start_process("worker", "run", QUEUE, NOTIFY_SOCKET=address)

        assert [heard.recv(100) for _ in range(2)] == [b"READY=1", b"WATCHDOG=1"]


OVERRIDDEN = [
    *("dequeue_job_and_maintain_ttl", "execute_job", "fork_work_horse", "handle_exception"),
    *("setup_work_horse_signals", "handle_work_horse_killed", "bootstrap", "heartbeat"),
    *("maintain_heartbeats", "run_maintenance_tasks", "clean_registries", "teardown"),
    *("perform_job", "check_for_suspension"),
    *("handle_warm_shutdown_request", "set_shutdown_requested_date", "_set_ip_address"),
    *("queue_class", "job_class", "max_connection_wait_time"),
]


@pytest.mark.parametrize("name", OVERRIDDEN)
def test_rq_still_has_what_our_worker_overrides(name: str) -> None:
    """Under another name RQ would go past what names a death, stops a horse, guards a worker."""
    assert hasattr(Worker, name)
    assert name in vars(horse.HoldfastWorker)


def test_rq_still_has_what_our_worker_uses() -> None:
    assert {"register_death", "handle_job_failure", "serialize", "key"} <= set(dir(Worker))
    assert {"redis_workers_keys", "death_penalty_class"} <= set(vars(BaseWorker))
    assert {"intermediate_queue", "intermediate_queue_key"} <= set(dir(Queue))
    assert "get_queue" in dir(StartedJobRegistry)


def test_a_target_that_no_longer_fits_is_named_with_both_numbers_when_a_worker_starts(
    environ: dict[str, str], start_process: StartProcess
) -> None:
    with psycopg.connect(environ["DATABASE_URL"], autocommit=True) as connection:
        connection.execute("ALTER TABLE ai_insights DROP COLUMN embedding")
        connection.execute("ALTER TABLE ai_insights ADD COLUMN embedding vector(5)")

    worker = start_process("worker", "run", "embeddings")

    wait_for(lambda: "target_mismatch" in worker.said)
    [line] = [line for line in worker.said.splitlines() if "target_mismatch" in line]
    assert "target ai_insights" in line
    assert "dimension is 8, the column's is 5" in line
    assert worker.is_alive
