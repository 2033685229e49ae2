"""A Redis that is full, forgets, refuses to write or answers nobody: bells wait, work does not."""

import os
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from threading import Event

import pytest
import redis
from redis.backoff import NoBackoff
from redis.retry import Retry

from tests.conftest import free_port
from tests.fakes import Fake, Reply
from tests.faults.proxy import Moment, Wire
from tests.faults.redis_alone import RedisAlone, open_redis
from tests.faults.stage import (
    QUEUE,
    Stage,
    events,
    numbered,
    state_of,
    struck,
    wait_until_struck,
)
from tests.processes import ROOT, Running, wait_for
from worker import servers

BELLS = f"rq:queue:{QUEUE}"


@pytest.fixture(autouse=True)
def alone(environ: dict[str, str]) -> Iterator[RedisAlone]:
    """Give each scenario a Redis of its own, before anything of the stage starts."""
    with open_redis(free_port()) as alone:
        environ["REDIS_URL"] = alone.url
        yield alone


@pytest.fixture
def link(alone: RedisAlone) -> Iterator["redis.Redis"]:
    """Give a client of it that is nobody's worker."""
    with redis.Redis.from_url(alone.url, retry=Retry(NoBackoff(), 0)) as client:
        yield client


@pytest.fixture
def gate(fake: Fake) -> Event:
    """Hold back the answer to the first call until this is set."""
    event = Event()
    fake.when(Reply(until=event), times=1)
    return event


def calls_of(link: "redis.Redis", command: str) -> int:
    """Return how often Redis has carried out a command."""
    told = link.info("commandstats").get(f"cmdstat_{command}", {})
    return int(told.get("calls", 0))


def refusals(worker: Running, name: str) -> int:
    """Count how often a worker says that Redis takes nothing of it, and why."""
    return sum(line.get("reason") == name for line in events(worker.log))


@pytest.fixture
def impatient(environ: dict[str, str], tmp_path: Path) -> None:
    """Let workers lose their patience with Redis soon, so that they do so many times."""
    (tmp_path / "sitecustomize.py").write_text(IMPATIENCE)
    environ["PYTHONPATH"] = f"{tmp_path}:{ROOT}"


IMPATIENCE = "from worker import horse; horse.REDIS_RETRIES = 1"


def outlast(worker: Running, name: str) -> None:
    """Wait until a worker has lost its patience many times, and lives."""
    wait_for(lambda: not worker.is_alive or refusals(worker, name) > REFUSALS, 30)
    assert worker.is_alive, "it gave up"


REFUSALS = 20


# ---- F10: Redis is full


@pytest.fixture
def fill(link: "redis.Redis") -> Iterator[Callable[[], None]]:
    """Let Redis take nothing any more."""

    def fill() -> None:
        link.config_set("maxmemory", "1")
        with pytest.raises(redis.OutOfMemoryError):
            link.set("more", "")

    yield fill
    make_room(link)


def make_room(link: "redis.Redis") -> None:
    """Give Redis its memory back."""
    link.config_set("maxmemory", "0")


@pytest.mark.slow
def test_f10_a_redis_that_is_full_at_a_post_and_at_a_start_costs_only_time(
    stage: Stage, link: "redis.Redis", fill: Callable[[], None]
) -> None:
    fill()
    stage.start_sweeper()
    worker = stage.start_process("worker", "run", QUEUE)
    jobs = [stage.post(*numbered(50, name)) for name in ("a", "b")]
    wait_until_struck(lambda: refusals(worker, "OutOfMemoryError"), "it had its room")
    assert [stage.door.job(job)["state"] for job in jobs] == ["queued", "queued"]
    stage.check_now()

    make_room(link)
    stage.end_fault()
    stage.wait_until_final()

    assert worker.is_alive
    assert {row["attempts"] for row in stage.items()} == {1}
    stage.check()


def test_f10_a_bell_that_ends_while_redis_is_full_keeps_nobody(
    stage: Stage, link: "redis.Redis", alone: RedisAlone, fill: Callable[[], None]
) -> None:
    with Wire(alone.url) as wire:
        worker = stage.start_worker(REDIS_URL=wire.url)
        end = wire.stop("WATCH", Moment.BEFORE)  # when RQ is to write how a bell ended
        stage.post(*numbered(100))
        end.wait()
        fill()
        before = calls_of(link, "watch")
        end.released.set()

        stage.wait_until_final()
        wait_for(lambda: not worker.children, 30)
        struck(refusals(worker, "OutOfMemoryError"), "it had its room")
        assert calls_of(link, "watch") - before == 1
        make_room(link)
        stage.end_fault()
        stage.post(*numbered(20, "afterwards"))
        stage.wait_until_final()
        assert worker.stop() == 0

    assert not [line for line in events(worker.log) if line.get("event") == "horse_killed"]
    stage.check()


@pytest.mark.slow
@pytest.mark.usefixtures("impatient")
def test_f10_a_worker_outlasts_a_redis_that_stays_full(
    stage: Stage, link: "redis.Redis", gate: Event, fill: Callable[[], None]
) -> None:
    stage.start_sweeper()
    worker = stage.start_worker()
    stage.post(*numbered(100))
    stage.fake.wait_for(lambda fake: fake.calls)
    fill()
    gate.set()

    stage.wait_until_final()
    outlast(worker, "OutOfMemoryError")
    stage.post(*numbered(20, "posted while it was full"))
    make_room(link)
    stage.end_fault()
    stage.wait_until_final()

    assert {row["attempts"] for row in stage.items()} == {1}
    assert worker.stop() == 0
    stage.check()


# ---- F11: Redis throws away what it was given


@pytest.mark.slow
def test_f11_bells_that_redis_threw_away_are_said_and_rung_again(
    stage: Stage, link: "redis.Redis"
) -> None:
    jobs = [stage.post(*numbered(20, f"batch {batch} text")) for batch in range(10)]
    link.config_set("maxmemory", str(link.info("memory")["used_memory"] + 2**20))
    link.config_set("maxmemory-policy", "allkeys-lru")
    gone = fill_until_bells_go(link, jobs)

    stage.record("bells_thrown_away", gone)
    assert "redis_policy" in stage.door.get("/readyz").json["degraded"]
    assert stage.door.get("/health").json["redis"]["policy"] == "allkeys-lru"
    assert "holdfast_redis_policy_ok 0.0" in stage.door.http.get("/metrics").text
    worker = stage.start_worker()
    assert [line["level"] for line in events(worker.log) if line.get("event") == "redis_policy"]
    stage.start_sweeper()
    stage.wait_until_final()

    rung = "SELECT count(*) FROM holdfast.jobs WHERE rings > 1"
    struck(stage.one(rung), "no bell was dropped in silence")
    assert {row["attempts"] for row in stage.items()} == {1}
    assert worker.is_alive
    stage.check()


def fill_until_bells_go(link: "redis.Redis", jobs: list[str]) -> int:
    """Fill Redis until a bell has nothing behind its number; return how many have not.

    What was touched within one second is all the same to it, so the line of bells may go first:
    then it is laid again, as the bells themselves are what is to go.
    """
    line = link.lrange(BELLS, 0, -1)
    for filler in range(10_000):
        link.set(f"filler:{filler}", "x" * 4096)
        gone = sum(not link.exists(f"rq:job:{job}-1") for job in jobs)
        if gone and link.exists(BELLS):
            return gone
        if not link.exists(BELLS):
            link.rpush(BELLS, *line)
    pytest.fail("VOID: nothing was thrown away")


# ---- F12: Redis answers nobody


@pytest.mark.slow
def test_f12_work_goes_on_over_a_redis_that_is_half_open(
    alone: RedisAlone, environ: dict[str, str], request: pytest.FixtureRequest
) -> None:
    with Wire(alone.url) as wire:
        environ["REDIS_URL"] = wire.url
        stage: Stage = request.getfixturevalue("served_stage")
        stage.fake.seconds_per_item = 0.005
        stage.start_sweeper()
        workers = stage.start_workers(2)
        first = stage.post(*numbered(1500))
        stage.wait_until_done(100)

        wire.go_dead()
        struck(wire.connections, "nobody was connected")
        done, heard = stage.done, wire.passed_bytes
        slowest = Slowest()
        with slowest.timed():
            stage.post(*numbered(50, "posted while it was dead"))
        with slowest.timed():
            assert stage.door.job(first)["state"] == "running"
        stage.wait_until_done(done + 300)
        struck(wire.passed_bytes == heard, "something came through")
        wire.revive()
        stage.end_fault()
        stage.wait_until_final()

        stage.record("slowest_answer_seconds", slowest.seconds)
        assert all(worker.is_alive for worker in workers)
        assert stage.statuses == {"done": 1550}
        stage.check()
        assert [worker.stop() for worker in workers] == [0, 0]


def test_f12_a_stop_while_rq_keeps_its_lists_does_not_wait_for_redis(
    stage: Stage, alone: RedisAlone
) -> None:
    with Wire(alone.url) as wire:
        upkeep = wire.stop("ZREMRANGEBYSCORE", Moment.BEFORE)
        worker = stage.start_worker(REDIS_URL=wire.url)
        upkeep.wait()
        wire.go_dead()
        assert worker.stop() == 0


@dataclass
class Slowest:
    """How long the slowest of some answers took."""

    seconds: float = 0.0

    @contextmanager
    def timed(self) -> Iterator[None]:
        """Take the time of one."""
        began = time.monotonic()
        yield
        self.seconds = max(self.seconds, round(time.monotonic() - began, 3))


HANG_SECONDS, POSTS = 60.0, 30


@pytest.mark.slow
def test_f12_a_redis_that_hangs_for_a_minute_holds_up_no_answer_and_ends_no_worker(
    alone: RedisAlone, served_stage: Stage
) -> None:
    stage, slowest = served_stage, Slowest()
    stage.fake.seconds_per_item = 0.02
    stage.start_sweeper()
    workers = stage.start_workers(2)
    first = stage.post(*numbered(3000))
    stage.wait_until_done(100)

    alone.freeze()
    began, posted, asked, done = time.monotonic(), 0, 0, stage.done
    while (passed := time.monotonic() - began) < HANG_SECONDS:
        if passed > posted * HANG_SECONDS / POSTS:
            with slowest.timed():
                stage.post(f"posted while it hung {posted}")
            posted += 1
        with slowest.timed():
            stage.door.job(first)
        asked += 1
    struck(state_of(alone.pid) == "T", "it did not hang")
    stage.record("done_while_it_hung", struck(stage.done - done, "nobody worked"))
    alone.thaw()
    stage.end_fault()
    stage.wait_until_final()

    stage.record("slowest_answer_seconds", slowest.seconds)
    stage.record("answers", posted + asked)
    assert all(worker.is_alive for worker in workers)
    assert stage.statuses == {"done": 3000 + posted}
    stage.check()


# ---- F13: Redis forgets scripts, is a replica, or loads


@pytest.mark.slow
def test_f13_forgotten_scripts_are_loaded_again(stage: Stage, link: "redis.Redis") -> None:
    stage.start_sweeper()
    workers = stage.start_workers(2)
    for batch in range(10):
        stage.post(*numbered(30, f"batch {batch} text"))
        link.script_flush()
    stage.wait_until_final()

    struck(link.info("errorstats").get("errorstat_NOSCRIPT"), "no script was missed")
    assert all(worker.is_alive for worker in workers)
    assert {row["attempts"] for row in stage.items()} == {1}
    stage.check()


@pytest.mark.slow
@pytest.mark.usefixtures("impatient")
def test_f13_a_redis_that_became_a_replica_ends_no_worker(
    stage: Stage, link: "redis.Redis", gate: Event
) -> None:
    stage.start_sweeper()
    worker = stage.start_worker()
    stage.post(*numbered(100))
    stage.fake.wait_for(lambda fake: fake.calls)

    link.replicaof("127.0.0.1", str(free_port()))
    stage.post(*numbered(20, "posted to a replica"))
    gate.set()
    outlast(worker, "ReadOnlyError")
    link.replicaof("NO", "ONE")
    stage.end_fault()
    stage.wait_until_final()

    assert {row["attempts"] for row in stage.items()} == {1}
    assert worker.stop() == 0
    stage.check()


@pytest.mark.slow
@pytest.mark.usefixtures("impatient")
def test_f13_a_redis_that_cannot_save_to_its_disk_ends_no_worker(
    stage: Stage, link: "redis.Redis", alone: RedisAlone
) -> None:
    (alone.place.folder / "redis" / "taken.rdb").mkdir()  # no file can be put in its place
    stage.start_sweeper()
    worker = stage.start_worker()
    for name, value in (("dbfilename", "taken.rdb"), ("save", "3600 1")):
        link.config_set(name, value)
    link.bgsave()
    wait_until_struck(lambda: is_unsaved(link), "it could save")

    stage.post(*numbered(100))
    outlast(worker, "UnsavedError")
    link.config_set("save", "")
    stage.end_fault()
    stage.wait_until_final()

    assert worker.is_alive
    assert {row["attempts"] for row in stage.items()} == {1}
    stage.check()


def is_unsaved(link: "redis.Redis") -> bool:
    """Whether Redis says that it could not save."""
    return bool(link.info("persistence")["rdb_last_bgsave_status"] != "ok")


@pytest.mark.slow
def test_f13_a_redis_that_loads_its_data_is_waited_for(
    stage: Stage, link: "redis.Redis", alone: RedisAlone
) -> None:
    stage.fake.seconds_per_item = 0.002
    with link.pipeline(transaction=False) as pipeline:
        for key in range(KEYS):
            pipeline.set(f"filler:{key}", "")
        pipeline.execute()
    stage.start_sweeper()
    worker = stage.start_worker()
    stage.post(*numbered(500))
    stage.wait_until_done(100)

    start_slowly(alone)
    wait_until_struck(lambda: is_loading(link), "it loaded nothing")
    stage.post(*numbered(50, "posted while it loaded"))
    struck(is_loading(link), "it had loaded")
    wait_for(lambda: not is_loading(link), 30)
    stage.end_fault()
    stage.wait_until_final()

    assert {row["attempts"] for row in stage.items()} == {1}
    assert worker.stop() == 0
    stage.check()


KEYS = 20_000
"""It listens after each thousand."""

SLOWLY = "key-load-delay 100\n"


def start_slowly(alone: RedisAlone) -> None:
    """Kill it, and let it come back with its data, slowly."""
    os.kill(alone.pid, signal.SIGKILL)
    wait_for(lambda: alone.process.death)
    alone.process = servers.redis(alone.place, alone.port, alone.log)
    alone.process.stdin += SLOWLY
    alone.process.start()


def is_loading(link: "redis.Redis") -> bool:
    """Whether Redis says that it loads its data."""
    try:
        link.ping()
    except redis.BusyLoadingError:
        return True
    except redis.ConnectionError:
        return False
    return False
