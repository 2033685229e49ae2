"""The outbox as its users write it: change a row, enqueue its text, while a worker settles it."""

from collections.abc import Generator
from threading import Event
from typing import Any

import psycopg
import pytest

from tests.drains import Mill, open_mill
from tests.fakes import Fake, Reply
from tests.processes import WaitFor

CHANGE = "UPDATE ai_insights SET body = 'new' WHERE id = %s"
ENQUEUE = "SELECT enqueue_embedding('ai_insights', %s, 'new')"


@pytest.fixture
def mill(database_url: str, redis_url: str) -> Generator[Mill]:
    with Fake() as fake, open_mill(database_url, redis_url, fake) as opened:
        yield opened


@pytest.fixture
def user(database_url: str) -> "Generator[psycopg.Connection[Any]]":
    with psycopg.connect(database_url) as connection:
        connection.execute("SET deadlock_timeout = '100ms'")
        yield connection


def test_a_row_that_its_owner_holds_keeps_no_neighbour_and_nobody_waits_in_a_ring(
    mill: Mill, user: "psycopg.Connection[Any]", wait_for: WaitFor
) -> None:
    job_id = mill.submit("one", "two", "three")
    user.execute(CHANGE, [2])

    with mill.draining(job_id) as drained:
        wait_for(lambda: mill.column(job_id, "status").count("done") == 2)
        user.execute(ENQUEUE, ["2"])  # the item of row 2 is still in the worker's hands
        user.commit()
        assert drained.result()["lease_lost"] == 1

    [again] = mill.rows("SELECT id FROM holdfast.jobs WHERE client = 'sql'")
    mill.work(again["id"])
    assert list(mill.vectors().values()) == mill.right("one", "new", "three")


def test_items_that_a_user_enqueues_in_any_order_stop_no_settle(
    mill: Mill, user: "psycopg.Connection[Any]", wait_for: WaitFor
) -> None:
    job_id = mill.submit("one", "two", "three")
    gate = Event()
    mill.fake.when(Reply(until=gate), times=1)

    with mill.draining(job_id) as drained:
        wait_for(lambda: mill.fake.calls)
        user.execute(ENQUEUE, ["3"])
        gate.set()
        wait_for(lambda: mill.column(job_id, "status").count("done") == 2)
        user.execute(ENQUEUE, ["1"])
        user.commit()
        assert drained.result()["lease_lost"] == 1

    [again] = mill.rows("SELECT id FROM holdfast.jobs WHERE client = 'sql'")
    mill.work(again["id"])
    assert list(mill.vectors().values()) == mill.right("new", "two", "new")


def test_an_item_that_is_locked_for_a_moment_costs_no_attempt(
    mill: Mill, user: "psycopg.Connection[Any]", wait_for: WaitFor
) -> None:
    job_id = mill.submit("one", "two")
    gate = Event()
    mill.fake.when(Reply(until=gate), times=1)

    with mill.draining(job_id) as drained:
        wait_for(lambda: mill.fake.calls)
        user.execute("SELECT FROM embedding_retry_queue WHERE target_id = '2' FOR UPDATE")
        gate.set()
        wait_for(lambda: "done" in mill.column(job_id, "status"))
        user.rollback()
        assert drained.result() == {"done": 2}

    assert mill.column(job_id, "attempts") == [1, 1]
    assert len(mill.fake.calls) == 1
