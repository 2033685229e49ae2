"""A Redis that is full, forgets, refuses to write or answers nobody: bells wait, work does not."""

from collections.abc import Callable, Iterator
from threading import Event

import pytest
import redis

from tests.conftest import free_port
from tests.fakes import Fake, Reply
from tests.faults.proxy import Moment, Wire
from tests.faults.redis_alone import RedisAlone, open_redis
from tests.faults.stage import QUEUE, Stage, events, numbered, struck, wait_until_struck
from tests.processes import Running, wait_for


@pytest.fixture(autouse=True)
def alone(environ: dict[str, str]) -> Iterator[RedisAlone]:
    """Give each scenario a Redis of its own, before anything of the stage starts."""
    with open_redis(free_port()) as alone:
        environ["REDIS_URL"] = alone.url
        yield alone


@pytest.fixture
def link(alone: RedisAlone) -> Iterator["redis.Redis"]:
    """Give a client of it that is nobody's worker."""
    with redis.Redis.from_url(alone.url) as client:
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


def is_in_a_call(stage: Stage) -> None:
    """Wait until a horse waits for the backend, and holds live leases."""
    stage.fake.wait_for(lambda fake: fake.calls)
    held = "SELECT count(*) FROM public.embedding_retry_queue WHERE lease_until > now()"
    struck(stage.one(held), "no live lease")


def is_refused(worker: Running, name: str) -> bool:
    """Whether a worker says that Redis takes nothing of it, and why."""
    return any(line.get("reason") == name for line in events(worker.log))


# ---- F10: Redis is full


@pytest.fixture
def full(link: "redis.Redis") -> Iterator[Callable[[], None]]:
    """Let Redis take nothing any more."""

    def fill() -> None:
        link.config_set("maxmemory", "1")
        with pytest.raises(redis.OutOfMemoryError):
            link.set("more", "")

    yield fill
    link.config_set("maxmemory", "0")


def test_f10_a_redis_that_is_full_at_a_post_and_at_a_start_only_costs_time(
    stage: Stage, link: "redis.Redis", full: Callable[[], None]
) -> None:
    full()
    stage.start_sweeper()
    worker = stage.start_process("worker", "run", QUEUE)
    jobs = [stage.post(*numbered(50, name)) for name in ("a", "b")]
    wait_until_struck(lambda: is_refused(worker, "OutOfMemoryError"), "it had its room")
    assert [stage.door.job(job)["state"] for job in jobs] == ["queued", "queued"]

    link.config_set("maxmemory", "0")
    stage.end_fault()
    stage.wait_until_final()

    assert worker.is_alive
    assert {row["attempts"] for row in stage.items()} == {1}
    stage.check()


def test_f10_a_bell_that_ends_while_redis_is_full_keeps_nobody(
    stage: Stage, link: "redis.Redis", alone: RedisAlone, full: Callable[[], None]
) -> None:
    with Wire(alone.url) as wire:
        worker = stage.start_worker(REDIS_URL=wire.url)
        end = wire.stop("WATCH", Moment.BEFORE)  # when RQ is to write how a bell ended
        stage.post(*numbered(100))
        end.wait()
        full()
        before = calls_of(link, "watch")
        end.released.set()

        stage.wait_until_final()
        wait_for(lambda: not worker.children, 30)
        told = calls_of(link, "watch") - before
        struck(is_refused(worker, "OutOfMemoryError"), "it had its room")
        assert told < 5, told
        link.config_set("maxmemory", "0")
        stage.end_fault()
        stage.post(*numbered(20, "afterwards"))
        stage.wait_until_final()

    assert worker.is_alive
    assert not [line for line in events(worker.log) if line.get("event") == "horse_killed"]
    assert len(worker.said.splitlines()) < 100
    stage.check()
