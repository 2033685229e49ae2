"""Postgres under faults: stopped at once, connections cut, its disk full, taken up by others."""

from collections import Counter
from collections.abc import Generator, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from threading import Event
from typing import Any

import psycopg
import pytest
from psycopg.rows import dict_row

from app.core.errors import StoreUnavailable
from app.core.store import database
from tests.api import Answer
from tests.drains import Mill, open_mill
from tests.fakes import Fake, Reply
from tests.faults import invariants
from tests.faults.postgres_alone import PostgresAlone, SmallDisk, open_disk, open_postgres
from tests.faults.proxy import Moment, Wire
from tests.faults.stage import Stage, events, numbered, struck, wait_until_struck
from tests.processes import Running, wait_for

LEASED = "SELECT count(*) FROM public.embedding_retry_queue WHERE lease_until > now()"


@pytest.fixture
def options() -> tuple[str, ...]:
    """Give what Postgres is started with on top of its usual options."""
    return ()


@pytest.fixture
def postgres(options: tuple[str, ...]) -> Iterator[PostgresAlone]:
    """Give this scenario a Postgres of its own."""
    with open_postgres(*options) as alone:
        yield alone


@pytest.fixture
def environ(environ: dict[str, str], postgres: PostgresAlone) -> dict[str, str]:
    """Have everything of the stage on it."""
    return environ | {"DATABASE_URL": postgres.url}


@pytest.fixture
def stage(served_stage: Stage) -> Stage:
    """Give the stage with the API under gunicorn, which may answer 503 here."""
    served_stage.door.may_be_away = True
    served_stage.fake.seconds_per_item = 0.002
    return served_stage


def check_refusal(answer: Answer) -> None:
    """Check that a client is told to come again."""
    assert (answer.status, answer.code) == (503, "store_unavailable")
    assert int(answer.headers["retry-after"]) > 0


def lost(worker: Running) -> int:
    """Return how many bells of a worker lost Postgres."""
    ends = [line for line in events(worker.log) if line.get("event") == "bell_end"]
    return sum("store_unavailable" in line.get("counts", {}) for line in ends)


# ---- F14: stopped at once


def stop_at_once(stage: Stage, postgres: PostgresAlone, workers: list[Running], key: str) -> None:
    """Stop Postgres under load, ask the API meanwhile, and start it again."""
    wait_until_struck(lambda: stage.one(LEASED), "nobody held a lease")
    lost_before = sum(map(lost, workers))
    ids = stage.new_rows(*numbered(50, f"sent while it was away: {key}"))
    postgres.stop_at_once()
    check_refusal(stage.send(ids, key))
    wait_until_struck(lambda: sum(map(lost, workers)) > lost_before, "no bell was under way")
    recoveries = postgres.recoveries
    postgres.start()
    struck(postgres.recoveries > recoveries, "it was stopped in order")
    stage.reconnect()
    stage.check_now()
    stage.send_until_accepted(ids, key)
    stage.strikes += len(workers)
    stage.end_fault()


def test_f14_postgres_stopped_at_once_loses_nothing_and_the_pools_heal(
    stage: Stage, postgres: PostgresAlone
) -> None:
    stage.start_sweeper()
    workers = stage.start_workers(2)
    stage.post(*numbered(1000))

    with stage.polled():
        stage.wait_until_done(100)
        stop_at_once(stage, postgres, workers, "once")
        stage.wait_until_final()

    assert all(worker.is_alive for worker in workers)
    assert stage.statuses == {"done": 1050}
    stage.check()


@pytest.mark.slow
def test_f14_postgres_stopped_at_once_five_times_loses_nothing(
    stage: Stage, postgres: PostgresAlone
) -> None:
    stage.start_sweeper()
    workers = stage.start_workers(2)
    for batch in range(4):
        stage.post(*numbered(1000, f"batch {batch} text"))

    with stage.polled():
        for number in range(5):
            stage.wait_until_done((number + 1) * 300)
            stop_at_once(stage, postgres, workers, f"stop {number}")
        stage.wait_until_final()

    assert all(worker.is_alive for worker in workers)
    assert stage.statuses == {"done": 4250}
    stage.check()


# ---- F16: connections that are cut, and limits of time

OTHERS = "pid <> pg_backend_pid() AND datname = current_database()"


@pytest.mark.slow
def test_f16_connections_that_are_terminated_cost_no_item_an_attempt(stage: Stage) -> None:
    stage.start_sweeper()
    workers = stage.start_workers(2)
    stage.post(*numbered(1000))

    with stage.polled():
        for number in range(5):
            stage.wait_until_done(1 + number * 150)
            terminate(stage)
        wait_until_struck(lambda: sum(map(lost, workers)), "no bell was under way")
        stage.end_fault()
        stage.wait_until_final()

    stage.strikes += 5 * len(workers)
    assert all(worker.is_alive for worker in workers)
    assert {row["attempts"] for row in stage.items()} == {1}
    assert stage.statuses == {"done": 1000}
    stage.check()


def terminate(stage: Stage) -> int:
    """Cut every connection to the database but the stage's own."""
    cut = f"SELECT count(pg_terminate_backend(pid)) FROM pg_stat_activity WHERE {OTHERS}"  # noqa: S608
    return int(stage.one(cut))


@pytest.fixture
def mill(database_url: str, redis_url: str, fake: Fake) -> Iterator[Mill]:
    """Give a worker's flow in this process, on the servers of all tests."""
    invariants.install(database_url)
    with open_mill(database_url, redis_url, fake) as mill:
        yield mill


@pytest.fixture
def outsider(database_url: str) -> Iterator["psycopg.Connection[dict[str, Any]]"]:
    """Give a session of somebody else, who is never the one to give way."""
    with psycopg.connect(database_url, row_factory=dict_row) as connection:
        connection.execute("SET deadlock_timeout = '10min'")
        connection.commit()
        yield connection
        connection.rollback()


WAITERS = """
SELECT xact_start FROM pg_stat_activity
 WHERE datname = current_database() AND wait_event_type = 'Lock' AND pid <> %(pid)s
"""


def waiter(mill: Mill, outsider: "psycopg.Connection[dict[str, Any]]") -> object:
    """Wait for a transaction of ours that waits for a lock, and say when it began."""
    pid = outsider.info.backend_pid
    return wait_for(lambda: mill.rows(WAITERS, pid=pid), 30)[0]["xact_start"]


@pytest.mark.parametrize(
    ("limit", "state"), [("LOCK_SECONDS", "55P03"), ("STATEMENT_SECONDS", "57014")]
)
def test_f16_a_settle_that_takes_too_long_costs_no_attempt(
    mill: Mill,
    outsider: "psycopg.Connection[dict[str, Any]]",
    limit: str,
    state: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    job_id = mill.submit("one", "two")
    gate = Event()
    mill.fake.when(Reply(until=gate), times=1)
    monkeypatch.setattr(database, limit, 1)

    with mill.draining(job_id) as drained:
        mill.fake.wait_for(lambda fake: fake.calls)
        outsider.execute("SELECT FROM holdfast.job_counts FOR UPDATE")
        gate.set()
        first = waiter(mill, outsider)
        wait_for(lambda: waiter(mill, outsider) != first, 30)  # it gives back what it holds
        outsider.rollback()

    fault = drained.exception()
    struck(isinstance(fault, StoreUnavailable) and state in fault.message, f"no {state}: {fault!r}")
    assert mill.column(job_id, "status") == ["pending", "pending"]
    check_that_it_cost_nothing(mill, job_id, ["one", "two"])


def test_f16_a_session_that_was_idle_in_its_settle_too_long_costs_no_attempt(
    mill: Mill, database_url: str, redis_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    job_id = mill.submit("one", "two")
    monkeypatch.setattr(database, "IDLE_SECONDS", 1)
    there = """SELECT count(*) AS n FROM pg_stat_activity
                WHERE datname = current_database() AND state = 'idle in transaction'"""

    with (
        Wire(database_url) as wire,
        open_mill(wire.url, redis_url, mill.fake) as slow,
        ThreadPoolExecutor(1) as pool,
    ):
        stop = wire.stop("SET status = CASE WHEN o.status", Moment.BEFORE_COMMIT)
        drained = pool.submit(slow.drain, job_id)
        stop.wait()
        wait_for(lambda: mill.rows(there) == [{"n": 0}], 30)
        stop.released.set()
        fault = drained.exception()

    struck(isinstance(fault, StoreUnavailable), f"it was not cut: {fault!r}")
    assert mill.column(job_id, "status") == ["pending", "pending"]
    check_that_it_cost_nothing(mill, job_id, ["one", "two"])


def check_that_it_cost_nothing(mill: Mill, job_id: str, texts: list[str]) -> None:
    """Check that the items are done once they are worked on again, as if nothing had been."""
    assert mill.work(job_id).state == "completed"
    assert mill.column(job_id, "attempts") == [1] * len(texts)
    assert list(mill.vectors().values()) == mill.right(*texts)
    found = invariants.violations(mill.settings.database_url)
    assert {name: rows for name, rows in found.items() if not name.startswith("I2 ")} == {}


# ---- F17: a full disk


@pytest.fixture
def disk() -> Iterator[SmallDisk]:
    """Give a disk that Postgres can fill."""
    with open_disk(80 * 2**20) as disk:
        yield disk


@pytest.mark.slow
@pytest.mark.parametrize("name", ["base", "pg_wal"])
def test_f17_a_full_disk_of_postgres_fails_nothing_and_heals(
    disk: SmallDisk, postgres: PostgresAlone, stage: Stage, name: str
) -> None:
    postgres.move(name, disk)
    stage.reconnect()
    stage.start_sweeper()
    workers = stage.start_workers(2)
    stage.post(*numbered(1000))
    ids = stage.new_rows(*numbered(1000, "sent while the disk was full: a longer text " * 5))

    with stage.polled():
        stage.wait_until_done(100)
        disk.fill()
        use_up(postgres)
        wait_until_struck(lambda: "No space left on device" in postgres.said, "there was room")
        check_refusal(stage.send(ids, "key"))
        wait_until_struck(lambda: sum(map(lost, workers)), "no bell was under way")
        disk.make_room()
        if not postgres.is_up:  # without room for its log it gives up, and is to be started again
            postgres.start()
        stage.reconnect()
        stage.check_now()
        stage.send_until_accepted(ids, "key")
        stage.end_fault()
        stage.wait_until_final()

    attempts = Counter(row["attempts"] for row in stage.items())
    stage.record("attempts", dict(attempts))
    stage.strikes += len(workers)
    assert all(worker.is_alive for worker in workers)
    assert stage.statuses == {"done": 2000}
    # What was in hand could not be given back; nothing more was claimed while there was no room.
    assert attempts[1] >= 2000 - len(workers) * stage.batch_size
    assert max(attempts) <= 2
    stage.check()


def use_up(postgres: PostgresAlone) -> None:
    """Have Postgres begin new files of its log until there is no room for one."""
    with suppress(psycopg.OperationalError):
        for _ in range(10):
            postgres.execute("SELECT pg_switch_wal()")
            postgres.execute("SELECT pg_logical_emit_message(false, 'test', 'more')")


# ---- F18: connections taken up by others


@pytest.mark.slow
@pytest.mark.parametrize("options", [("-c", "max_connections=20")])
def test_f18_where_others_take_all_connections_the_api_says_so_and_all_goes_on_afterwards(
    stage: Stage, postgres: PostgresAlone
) -> None:
    sweeper = stage.start_sweeper()
    workers = stage.start_workers(2)
    stage.post(*numbered(1000))
    ids = stage.new_rows(*numbered(50, "sent while all was taken"))

    with stage.polled():
        stage.wait_until_done(100)
        with taken_up(stage, postgres) as others:
            check_refusal(stage.send(ids, "key"))
            wait_until_struck(lambda: sum(map(lost, workers)), "no bell was under way")
            wait_for(lambda: "postgres_lost" in sweeper.said, 30)
            stage.record("others", len(others))
        stage.send_until_accepted(ids, "key")
        stage.end_fault()
        stage.wait_until_final()

    assert all(process.is_alive for process in [sweeper, *workers])
    assert stage.statuses == {"done": 1050}
    stage.check()


OURS = "application_name LIKE 'holdfast %' AND datname = current_database()"


@contextmanager
def taken_up(stage: Stage, postgres: PostgresAlone) -> Generator[list["psycopg.Connection"]]:
    """Have others take every connection that is free, and those of ours that come free."""
    others: list[psycopg.Connection] = []

    def is_full() -> bool:
        stage.strikes += 2
        stage.rows(f"SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE {OURS}")  # noqa: S608
        with suppress(psycopg.OperationalError):
            while True:
                others.append(psycopg.connect(postgres.url))
        return bool(stage.one(f"SELECT count(*) FROM pg_stat_activity WHERE {OURS}") == 0)  # noqa: S608

    try:
        wait_for(is_full, 30)
        yield others
    finally:
        for each in others:
            each.close()


# ---- F19: deadlocks


def test_f19_a_settle_that_closes_a_circle_gives_way_and_is_done_again(
    mill: Mill, outsider: "psycopg.Connection[dict[str, Any]]"
) -> None:
    job_id = mill.submit("one", "two")
    gate = Event()
    mill.fake.when(Reply(until=gate), times=1)

    with mill.draining(job_id) as drained:
        mill.fake.wait_for(lambda fake: fake.calls)
        outsider.execute("SELECT FROM holdfast.job_counts FOR UPDATE")
        gate.set()
        waiter(mill, outsider)
        outsider.execute("UPDATE public.embedding_retry_queue SET updated_at = now()")
        outsider.commit()

    check_deadlock(drained.exception())
    check_that_it_cost_nothing(mill, job_id, ["one", "two"])


def test_f19_a_batch_that_closes_a_circle_is_refused_and_sent_again(
    mill: Mill, outsider: "psycopg.Connection[dict[str, Any]]"
) -> None:
    mill.submit("one", "two")
    lock = "UPDATE public.embedding_retry_queue SET updated_at = now() WHERE target_id = %s"

    with ThreadPoolExecutor(1) as pool:
        outsider.execute(lock, ["2"])
        submitted = pool.submit(mill.submit, "new one", "new two")
        waiter(mill, outsider)
        outsider.execute(lock, ["1"])
        outsider.commit()
        check_deadlock(submitted.exception())

    assert mill.rows("SELECT count(*) AS n FROM holdfast.jobs") == [{"n": 1}]
    again = mill.submit("new one", "new two")
    check_that_it_cost_nothing(mill, again, ["new one", "new two"])


def check_deadlock(fault: BaseException | None) -> None:
    """Check that somebody gave way, and that it was one of ours."""
    is_ours = isinstance(fault, StoreUnavailable) and "40P01" in fault.message
    struck(is_ours, f"there was no deadlock: {fault!r}")


REFUSE_ONCE = """
CREATE SEQUENCE audit.writes;
CREATE FUNCTION audit.refuse_once() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
    IF nextval('audit.writes') = 1 THEN
        RAISE 'could not serialize access' USING ERRCODE = 'serialization_failure';
    END IF;
    RETURN NEW;
END $$;
CREATE TRIGGER refuse_once BEFORE UPDATE ON ai_insights
    FOR EACH ROW EXECUTE FUNCTION audit.refuse_once();
"""
"""The first write only: what a sequence gave out is not taken back."""


def test_f19_a_settle_that_cannot_be_serialized_is_done_again(mill: Mill) -> None:
    mill.rows(REFUSE_ONCE)
    job_id = mill.submit("one", "two")

    with pytest.raises(StoreUnavailable, match="40001"):
        mill.drain(job_id)

    check_that_it_cost_nothing(mill, job_id, ["one", "two"])


@pytest.mark.slow
def test_f19_where_transactions_are_serializable_unless_told_otherwise_ours_are_told(
    postgres: PostgresAlone, stage: Stage
) -> None:
    postgres.execute("ALTER DATABASE holdfast SET default_transaction_isolation = 'serializable'")
    stage.reconnect()
    struck(stage.one("SHOW transaction_isolation") == "serializable", "they are not")
    stage.start_sweeper()
    workers = stage.start_workers(2)
    ids = stage.new_rows(*numbered(600))

    with stage.polled():
        for first in range(0, 600, 200):
            stage.send_until_accepted(ids[first : first + 200], f"from {first}")
        stage.wait_until_final()

    assert "could not serialize access" not in postgres.said
    assert all(worker.is_alive for worker in workers)
    assert stage.statuses == {"done": 600}
    assert {row["attempts"] for row in stage.items()} == {1}
    stage.check()
