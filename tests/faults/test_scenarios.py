"""The scenarios of the fault suite, each by its number; a fault that did not hit fails as void."""

import os
import signal
from collections.abc import Iterator
from threading import Event, Thread

import httpx
import psycopg
import pytest
import redis

from app.core.errors import StoreUnavailable
from tests.api import Answer, Door, item
from tests.conftest import free_port
from tests.drains import Mill, open_mill
from tests.fakes import Fake, Reply, embedding, zeros
from tests.faults import invariants
from tests.faults.conftest import OpenStage
from tests.faults.proxy import Wire
from tests.faults.redis_alone import RedisAlone, open_redis
from tests.faults.stage import QUEUE, Stage, events, numbered, state_of, struck
from tests.processes import Running, StartApi, wait_for

BELLS = f"rq:queue:{QUEUE}"


@pytest.fixture
def gate(fake: Fake) -> Event:
    """Hold back the answer to the first call until this is set."""
    event = Event()
    fake.when(Reply(until=event), times=1)
    return event


@pytest.fixture
def bells(stage: Stage) -> Iterator["redis.Redis"]:
    """Give the Redis that the bells are in."""
    with redis.Redis.from_url(stage.environ["REDIS_URL"]) as client:
        yield client


def horse_in_a_call(stage: Stage, worker: Running) -> int:
    """Return the horse of the worker, which waits for the backend and holds live leases."""
    stage.fake.wait_for(lambda fake: fake.calls)
    held = "SELECT count(*) FROM public.embedding_retry_queue WHERE lease_until > now()"
    struck(stage.one(held), "no live lease")
    [horse] = worker.children
    return horse


# ---- F1 to F7: processes


def test_f1_a_horse_without_its_parent_ends_its_slice_and_takes_no_other(
    stage: Stage, gate: Event
) -> None:
    worker = stage.start_worker()
    stage.post(*numbered(200))
    horse = horse_in_a_call(stage, worker)

    worker.kill()
    struck(state_of(horse) not in ("", "Z"), "the horse died with its parent")
    gate.set()
    wait_for(lambda: state_of(horse) == "", 30)

    assert stage.statuses == {"done": 64, "pending": 136}
    stage.start_sweeper()
    stage.start_worker()
    stage.wait_until_final()
    assert {row["attempts"] for row in stage.items()} == {1}
    stage.check()


def test_f2_the_leases_of_a_killed_horse_end_at_once_and_cost_their_attempt(stage: Stage) -> None:
    stage.fake.seconds_per_item = 0.002
    stage.start_sweeper()
    worker = stage.start_worker(QUEUE_VISIBILITY_TIMEOUT="600")
    stage.post(*numbered(500))

    caught = stage.kill_horse(worker)
    stage.wait_until_final()

    assert worker.is_alive
    deaths = "SELECT count(*) FROM holdfast.item_attempts WHERE error_class = 'killed'"
    assert stage.one(f"{deaths} AND leased_by = %s", caught.bell) == caught.items
    assert sorted(row["attempts"] for row in stage.items()) == [
        *[1] * (500 - caught.items),
        *[2] * caught.items,
    ]
    stage.check()


def test_f4_a_worker_that_was_stopped_longer_than_its_leases_changes_nothing(
    stage: Stage, gate: Event
) -> None:
    stopped = stage.start_worker()
    stage.post(*numbered(100))
    horse = horse_in_a_call(stage, stopped)
    for pid in (horse, stopped.pid):
        os.kill(pid, signal.SIGSTOP)
    gate.set()

    stage.start_sweeper()
    stage.start_worker()
    stage.wait_until_final()
    before = stage.items()
    for pid in (stopped.pid, horse):
        os.kill(pid, signal.SIGCONT)
    wait_for(lambda: [e for e in events(stopped.log) if "lease_lost" in e.get("counts", {})], 30)

    [end] = [e for e in events(stopped.log) if e.get("event") == "bell_end"]
    assert end["counts"] == {"lease_lost": 64}
    assert stage.items() == before
    assert sorted(row["attempts"] for row in before) == [*[1] * 36, *[2] * 64]
    stage.strikes += 1
    stage.check()


def test_f7_a_stop_in_the_middle_of_a_bell_loses_nothing(stage: Stage, gate: Event) -> None:
    worker = stage.start_worker()
    stage.post(*numbered(200))
    horse_in_a_call(stage, worker)

    worker.send(signal.SIGTERM)
    gate.set()

    assert worker.wait() == 0
    assert stage.statuses == {"done": 64, "pending": 136}
    stage.start_worker()  # its bell was rung by the one that stopped: there is no sweeper here
    stage.wait_until_final()
    assert {row["attempts"] for row in stage.items()} == {1}
    stage.check()


# ---- F8 to F12: Redis


def test_f8_an_emptied_redis_costs_nothing_but_time(stage: Stage, bells: "redis.Redis") -> None:
    stage.fake.seconds_per_item = 0.002
    stage.start_sweeper()
    stage.start_workers(2)
    stage.post("finished before")
    stage.wait_until_final()
    for batch in range(6):
        stage.post(*numbered(300, f"batch {batch} text"))

    with stage.polled():
        stage.wait_until_done(200)
        struck(bells.llen(BELLS), "no bell waited")
        bells.flushall()
        stage.wait_until_final()

    assert {row["attempts"] for row in stage.items()} == {1}
    assert stage.statuses == {"done": 1801}
    stage.check()


@pytest.fixture
def alone(environ: dict[str, str]) -> Iterator[RedisAlone]:
    """Give this scenario a Redis of its own, before anything of the stage starts."""
    with open_redis(free_port()) as alone:
        environ["REDIS_URL"] = alone.url
        yield alone


def test_f9_a_redis_that_dies_and_comes_back_empty_loses_no_batch(
    alone: RedisAlone, served_stage: Stage
) -> None:
    stage = served_stage
    stage.fake.seconds_per_item = 0.002
    stage.start_sweeper()
    stage.start_workers(2)
    stage.post(*numbered(600))

    with stage.polled():
        stage.wait_until_done(100)
        before = alone.pid
        alone.kill()
        stage.post(*numbered(50, "posted while it was away"))
        alone.start()
        assert alone.pid != before
        stage.wait_until_final()

    assert stage.statuses == {"done": 650}
    stage.check()


def test_f12_while_redis_hangs_the_api_answers_and_work_goes_on(
    alone: RedisAlone, served_stage: Stage
) -> None:
    stage = served_stage
    stage.fake.seconds_per_item = 0.005
    stage.start_sweeper()
    stage.start_workers(2)
    first = stage.post(*numbered(1500))
    stage.wait_until_done(100)

    alone.freeze()
    done = stage.done
    stage.post(*numbered(50, "posted while it hung"))
    assert stage.door.job(first)["state"] == "running"
    stage.wait_until_done(done + 300)
    struck(state_of(alone.pid) == "T", "it did not hang")
    alone.thaw()

    stage.wait_until_final()
    assert stage.statuses == {"done": 1550}
    stage.check()


# ---- F14: a Postgres that hangs (one that dies has a file of its own)


@pytest.mark.slow
def test_f14_while_postgres_hangs_the_api_says_so_and_it_heals_by_itself(
    quick_environ: dict[str, str], start_api: StartApi, open_stage: OpenStage
) -> None:
    with Wire(quick_environ["DATABASE_URL"]) as wire:
        url = start_api(DATABASE_URL=wire.url)
        with httpx.Client(base_url=url, trust_env=False, timeout=20) as client:
            stage = open_stage(client)
            stage.door.may_be_away = True
            stage.post(*numbered(10, "before"))
            ids = stage.new_rows(*numbered(10, "meanwhile"))

            wire.go_dead()
            answers = [stage.send(ids, "k") for _ in range(2)]
            ready = [client.get(path).status_code for path in ("/readyz", "/health", "/livez")]
            wire.revive()
            stage.start_sweeper()
            stage.start_worker()
            stage.end_fault()
            stage.send_until_accepted(ids, "k")
            stage.wait_until_final()

    assert [each.status for each in answers] == [503] * 2
    assert all(int(each.headers["retry-after"]) > 0 for each in answers)
    assert ready == [503, 503, 200]
    assert stage.statuses == {"done": 20}
    stage.check()


# ---- F15: an answer of Postgres that is lost


def test_f15_a_batch_whose_commit_was_not_heard_is_the_same_when_it_is_sent_again(
    wire: Wire, wired_door: Door, database_url: str
) -> None:
    wire.lose_the_answer_behind("INSERT INTO holdfast.idempotency_keys")
    batch = {"items": [item(1, "one")]}

    def send() -> Answer:
        return wired_door.send("/api/embeddings", batch, {"Idempotency-Key": "k"})

    def answered() -> Answer | None:
        answer = send()  # 409 as long as Postgres has not seen that the first one is gone
        return None if answer.status == 409 else answer

    first, second = send(), wait_for(answered)
    assert second

    struck(wire.cut == 1, "nothing was cut")
    assert (first.status, second.status) == (503, 202)
    with psycopg.connect(database_url) as connection:
        assert connection.execute("SELECT id FROM holdfast.jobs").fetchall() == [(second.job_id,)]


def test_f15_a_slice_whose_commit_was_not_heard_is_not_done_twice(
    wire: Wire, database_url: str, redis_url: str
) -> None:
    with (
        Fake() as fake,
        open_mill(database_url, redis_url, fake) as mill,
        open_mill(wire.url, redis_url, fake) as cut,
    ):
        job_id = mill.submit("one", "two")
        wire.lose_the_answer_behind("INSERT INTO holdfast.slices")
        with pytest.raises(StoreUnavailable):
            cut.drain(job_id)
        struck(wire.cut == 1, "nothing was cut")

        mill.work(job_id)

        assert mill.sizes == [2]
        assert mill.column(job_id, "attempts") == [1, 1]
        assert list(mill.vectors().values()) == mill.right("one", "two")
        assert without_ledger(database_url) == {}


def without_ledger(database_url: str) -> dict[str, list[dict[str, object]]]:
    """Return what does not hold, but for what needs the ledger of the stage."""
    found = invariants.violations(database_url)
    return {name: rows for name, rows in found.items() if not name.startswith("I2 ")}


# ---- F20: the backend


def test_f20_a_backend_with_every_fault_in_turn_costs_nobody_an_attempt(stage: Stage) -> None:
    faults = {
        2: Reply(reset=0.0),
        4: Reply(cut=0.5),
        6: Reply(body=b"<html>welcome</html>"),
        8: Reply(bend=embedding(zeros)),
        10: Reply(status=503, error="busy"),
        14: Reply(status=429, error="slow down", headers={"Retry-After": "1"}),
        16: Reply(stall=0.2),
        24: Reply(drip_seconds=0.2),
        32: Reply(body=b'{"embeddings": [[1, 2], []]}'),
        40: Reply(hang_up=True),
    }
    for number, reply in faults.items():
        stage.fake.when(reply, numbers=[number])
    stage.start_sweeper()
    stage.start_worker(
        EMBEDDER_TIMEOUT_SECONDS="1", EMBEDDER_LOAD_SECONDS="1", QUEUE_BATCH_SIZE="8"
    )
    stage.post(*numbered(300))

    stage.wait_until_final()

    struck(len(stage.fake.calls) > max(faults), "not every fault was met")
    stage.sent_again = len(faults) * 8
    assert stage.statuses == {"done": 300}
    assert {row["attempts"] for row in stage.items()} == {1}
    stage.check()


# ---- F24: bells


def test_f24_bells_that_are_lost_doubled_or_emptied_change_nothing_but_time(
    stage: Stage, bells: "redis.Redis"
) -> None:
    lost, emptied, doubled = (stage.post(*numbered(100, name)) for name in ("a", "b", "c"))
    assert bells.lrem(BELLS, 0, f"{lost}-1") == 1
    assert bells.delete(f"rq:job:{emptied}-1") == 1
    assert bells.rpush(BELLS, f"{doubled}-1", f"{doubled}-1") == 4
    stage.start_workers(2)

    stage.start_sweeper()
    stage.wait_until_final()

    assert {row["attempts"] for row in stage.items()} == {1}
    stage.check()


def test_f24_nobody_rings_for_a_job_whose_bell_waits(stage: Stage) -> None:
    job_id = stage.post(*numbered(100))
    sweeper = stage.start_sweeper()

    beats = "SELECT heartbeat_at FROM holdfast.processes WHERE pid = %s"
    seen: set[object] = set()

    def have_four_ticks_passed() -> bool:
        seen.add(stage.one(beats, sweeper.pid))
        return len(seen) > 4

    wait_for(have_four_ticks_passed, 30)

    assert stage.one("SELECT rings FROM holdfast.jobs WHERE id = %s", job_id) == 1


def test_f24_a_sweeper_takes_over_from_one_that_hangs(stage: Stage, bells: "redis.Redis") -> None:
    hanging = stage.start_sweeper()
    leads = """SELECT count(*) FROM pg_locks l JOIN pg_stat_activity a USING (pid)
                WHERE l.locktype = 'advisory' AND l.granted
                  AND a.application_name = 'holdfast sweeper'
                  AND a.datname = current_database()"""
    wait_for(lambda: stage.one(leads) == 1)
    stage.start_sweeper()
    os.kill(hanging.pid, signal.SIGSTOP)
    stage.post(*numbered(50))
    assert bells.delete(BELLS) == 1
    stage.start_worker()

    stage.wait_until_final()

    struck(state_of(hanging.pid) == "T", "it did not hang")
    os.kill(hanging.pid, signal.SIGCONT)
    stage.check()


def test_f24_two_sweepers_at_once_are_harmless(database_url: str, redis_url: str) -> None:
    invariants.install(database_url)
    with Fake() as fake, open_mill(database_url, redis_url, fake) as mill:
        job_id = mill.submit(*numbered(50))
        mill.ctx.link.flushdb()

        sweep_twice_at_once(mill)
        mill.drain(job_id)
        sweep_twice_at_once(mill)

        assert mill.job(job_id).state == "completed"
        assert mill.job(job_id).rings <= 3
        assert without_ledger(database_url) == {}


def sweep_twice_at_once(mill: Mill) -> None:
    """Do what two leaders would do in the same moment."""
    threads = [Thread(target=mill.sweep) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
