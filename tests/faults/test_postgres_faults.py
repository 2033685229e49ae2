"""Postgres under faults: stopped at once, connections cut, its disk full, taken up by others."""

from collections.abc import Iterator

import pytest

from tests.api import Answer
from tests.faults.postgres_alone import PostgresAlone, open_postgres
from tests.faults.stage import Stage, events, numbered, struck, wait_until_struck
from tests.processes import Running

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
def database_url(postgres: PostgresAlone) -> str:
    """Have everything of the stage on it."""
    return postgres.url


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
    stage.close()
    stage.connect()
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
