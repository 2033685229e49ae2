"""Sinks that follow: each with its own state, no second embedding, the newest text at last."""

from collections import deque
from collections.abc import Callable, Generator, Iterator
from contextlib import ExitStack, suppress
from typing import Any

import pytest

from app.core import checks, requeue, status
from app.core.errors import (
    BackendFault,
    ErrorClass,
    FailedItemsRemain,
    NothingToRequeue,
    SinkFault,
)
from app.core.model import Caller, JobState
from app.core.ports import find
from app.core.store import vectors
from tests.drains import CALLER, TARGET, Mill, open_mill
from tests.fakes import Fake, Reply, float32
from tests.processes import wait_for
from tests.shelf import NAME, Shelf
from worker.sweep import cleanup
from worker.sweep.followers import Follower, Following

ADMIN = Caller("ops", frozenset({"admin"}))
WHY = requeue.Why("api")
AWAY = BackendFault(ErrorClass.UNREACHABLE, "no connection")

OpenMill = Callable[..., Mill]


@pytest.fixture
def fake() -> Iterator[Fake]:
    with Fake() as fake:
        yield fake


@pytest.fixture
def open_one(shared_database_url: str, redis_url: str, fake: Fake) -> Generator[OpenMill]:
    with ExitStack() as stack:

        def open_one(**more: str) -> Mill:
            more = {"SINKS": f"pgvector,{NAME}", **more}
            mill = stack.enter_context(open_mill(shared_database_url, redis_url, fake, **more))
            mill.empty()
            return mill

        yield open_one


@pytest.fixture
def mill(open_one: OpenMill) -> Mill:
    return open_one()


@pytest.fixture
def shelf() -> Shelf:
    return Shelf()


@pytest.fixture
def follower(mill: Mill, shelf: Shelf) -> Follower:
    return Follower(mill.ctx, find("sinks", "pgvector")(), NAME, shelf)


def follow(follower: Follower) -> None:
    """Write until nothing is due."""
    for _ in range(50):
        if not follower.run_once():
            return
    raise AssertionError("it never rests")


def states(mill: Mill) -> list[dict[str, Any]]:
    return mill.rows(
        """SELECT v.target_id, s.status, s.attempts, s.error_class, s.last_error,
                  s.version_wanted = v.version AS is_newest,
                  s.version_written IS NOT DISTINCT FROM v.version AS is_written
             FROM holdfast.item_sinks s JOIN holdfast.vectors v ON v.id = s.vector_id
            ORDER BY v.target_id::bigint"""
    )


def column(mill: Mill, name: str) -> list[Any]:
    return [row[name] for row in states(mill)]


def shown(mill: Mill, job_id: str) -> list[dict[str, Any]]:
    wanted = status.ItemsWanted(after=-1, limit=100)
    return [item["sinks"] for item in status.list_items(mill.ctx, CALLER, job_id, wanted)["items"]]


def test_what_is_done_comes_to_the_follower_with_its_text_and_the_same_vector(
    mill: Mill, shelf: Shelf, follower: Follower
) -> None:
    job_id = mill.submit("one", "two")
    mill.work(job_id)
    assert shown(mill, job_id)[0] == {
        "pgvector": {"status": "done", "attempts": 1, "error": None},
        NAME: {"status": "pending", "attempts": 0, "error": None},
    }

    follow(follower)

    assert shelf.texts() == {"1": "one", "2": "two"}
    held = shelf.places[TARGET, mill.settings.version_label]
    assert [float32(held[each].vector or ()) for each in "12"] == mill.right("one", "two")
    assert shown(mill, job_id)[0][NAME] == {"status": "done", "attempts": 1, "error": None}
    assert column(mill, "is_written") == [True, True]


def test_one_that_is_down_delays_only_itself_and_nothing_is_embedded_twice(
    mill: Mill, shelf: Shelf, follower: Follower, fake: Fake
) -> None:
    shelf.away = AWAY
    job_id = mill.submit("one", "two", "three")

    job = mill.work(job_id)
    follow(follower)
    follower.run_once()  # paused: not asked again

    assert job.state is JobState.COMPLETED
    assert len(shelf.sent) == 1
    assert column(mill, "attempts") == [0, 0, 0]
    [incident] = checks.incidents(mill.ctx, ADMIN, cursor=None, limit=5)["incidents"]
    assert (incident["backend"], incident["items_waiting"], incident["until"]) == (NAME, 3, None)
    assert checks.incidents(mill.ctx, CALLER, cursor=None, limit=5)["incidents"] == []
    assert f"sink_paused:{NAME}" in checks.readiness(mill.ctx).shown["degraded"]

    shelf.away = None
    mill.elapse(400)
    follow(follower)

    assert shelf.texts() == {"1": "one", "2": "two", "3": "three"}
    assert [len(sent) for sent in shelf.sent] == [3, 1, 2]  # half open: one tells
    assert sum(call.items for call in fake.calls) == 3
    [incident] = checks.incidents(mill.ctx, ADMIN, cursor=None, limit=5)["incidents"]
    assert (incident["items_waiting"], incident["until"] is not None) == (0, True)


def test_a_row_refused_for_good_shows_the_difference_and_a_requeue_sends_it_again(
    mill: Mill, shelf: Shelf, follower: Follower, fake: Fake
) -> None:
    shelf.faults["2"] = deque([SinkFault("400 mapper_parsing_exception")])
    job_id = mill.submit("one", "two", "three")
    mill.work(job_id)
    follow(follower)

    assert [each["pgvector"]["status"] for each in shown(mill, job_id)] == ["done"] * 3
    assert [each[NAME]["status"] for each in shown(mill, job_id)] == ["done", "failed", "done"]
    assert shown(mill, job_id)[1][NAME]["error"] == "store_reject: 400 mapper_parsing_exception"
    assert mill.job(job_id).state is JobState.COMPLETED

    done = requeue.requeue(mill.ctx, CALLER, job_id, WHY)
    follow(follower)

    assert done == {"job_id": job_id, "requeued": 1, "state": "completed"}
    assert shelf.texts() == {"1": "one", "2": "two", "3": "three"}
    assert sum(call.items for call in fake.calls) == 3
    with pytest.raises(NothingToRequeue):
        requeue.requeue(mill.ctx, CALLER, job_id, WHY)


def test_a_row_that_it_is_too_busy_for_is_sent_again_alone_and_uncharged(
    mill: Mill, shelf: Shelf, follower: Follower
) -> None:
    shelf.faults["2"] = deque([BackendFault(ErrorClass.BUSY, "429")] * 8)
    mill.work(mill.submit("one", "two"))

    for _ in range(9):
        follow(follower)
        mill.elapse(400)

    assert [[each.target_id for each in sent] for sent in shelf.sent] == [["1", "2"]] + [["2"]] * 8
    assert column(mill, "attempts") == [1, 1]
    assert column(mill, "status") == ["done", "done"]


def test_a_text_that_changes_while_the_old_one_is_in_hand_is_the_last_one_written(
    mill: Mill, shelf: Shelf, follower: Follower
) -> None:
    mill.work(mill.submit("old"))
    shelf.before_write = lambda: void(mill.work(mill.submit("new")))

    follower.run_once()

    assert shelf.texts() == {"1": "old"}
    assert column(mill, "status") == ["pending"]  # the late settle changed nothing
    follow(follower)
    assert shelf.texts() == {"1": "new"}
    assert (column(mill, "is_newest"), column(mill, "is_written")) == ([True], [True])


def void(value: object) -> None:
    del value


def test_an_older_document_written_late_does_not_replace_the_newer_one(
    mill: Mill, shelf: Shelf, follower: Follower
) -> None:
    other = Follower(mill.ctx, find("sinks", "pgvector")(), NAME, shelf)
    mill.work(mill.submit("old"))

    def newer_first() -> None:  # A has read the old vector; meanwhile the text changes and B writes
        mill.work(mill.submit("new"))
        mill.elapse(400)
        follow(other)

    shelf.before_write = newer_first
    follower.run_once()

    assert shelf.texts() == {"1": "new"}
    assert (column(mill, "status"), column(mill, "is_written")) == (["done"], [True])


def test_what_the_primary_found_to_be_gone_goes_from_the_follower(
    mill: Mill, shelf: Shelf, follower: Follower
) -> None:
    mill.work(mill.submit("one", "two"))
    follow(follower)
    again = mill.submit("another")
    mill.rows("DELETE FROM ai_insights WHERE id = 1")

    mill.work(again)
    assert shelf.texts() == {"1": "one", "2": "two"}
    kept = cleanup.run_once(mill.ctx)["vectors"]
    follow(follower)

    assert shelf.texts() == {"2": "two"}
    assert (kept, cleanup.run_once(mill.ctx)["vectors"]) == (0, 1)
    assert [row["target_id"] for row in mill.rows("SELECT target_id FROM holdfast.vectors")] == [
        "2"
    ]


def test_a_vector_that_vanished_from_the_primary_is_named(
    mill: Mill, shelf: Shelf, follower: Follower
) -> None:
    mill.work(mill.submit("one", "two"))
    mill.rows("UPDATE ai_insights SET embedding = NULL WHERE id = 1")

    follow(follower)

    assert shelf.texts() == {"2": "two"}
    assert column(mill, "error_class") == ["result_lost", None]
    assert "repair" in column(mill, "last_error")[0]


def test_a_row_that_each_writer_dies_of_is_failed_at_the_limit(
    mill: Mill, shelf: Shelf, follower: Follower
) -> None:
    mill.work(mill.submit("one"))

    def die() -> None:
        raise KeyboardInterrupt

    for _ in range(mill.settings.queue_max_retries):
        shelf.before_write = die
        with suppress(KeyboardInterrupt):
            follower.run_once()
        mill.elapse(400)
    follow(follower)

    assert column(mill, "error_class") == ["crashed"]
    assert len(shelf.sent) == mill.settings.queue_max_retries


def test_what_is_wrong_with_one_index_holds_up_no_other(
    mill: Mill, shelf: Shelf, follower: Follower
) -> None:
    shelf.away = BackendFault(ErrorClass.BAD_CONFIG, "the index has 8 dimensions, the target 1024")
    mill.work(mill.submit("one"))
    follower.run_once()
    shelf.away = None
    mill.work(mill.submit("two", table="conversations"))

    follow(follower)

    assert list(shelf.places) == [("conversations", mill.settings.version_label)]
    mill.elapse(400)
    follow(follower)
    assert len(shelf.places) == 2


def test_a_failed_item_has_no_row_at_the_follower(
    mill: Mill, shelf: Shelf, follower: Follower, fake: Fake
) -> None:
    fake.when(Reply(status=400, error="the input length exceeds"), marker="too long")
    job_id = mill.submit("a text that is too long", "short")
    with suppress(FailedItemsRemain):
        mill.work(job_id)
    follow(follower)

    assert shelf.texts() == {"2": "short"}
    first = shown(mill, job_id)[0]
    assert list(first) == ["pgvector"]
    assert first["pgvector"]["status"] == "failed"
    assert first["pgvector"]["error"].startswith("bad_input: ")


def test_each_sink_has_a_thread_of_its_own_and_stops_after_the_call_in_hand(
    open_one: OpenMill,
) -> None:
    other = "tests.shelf:Shelf"
    mill = open_one(SINKS=f"pgvector,{NAME},{other}")
    down, well = Shelf(), Shelf()
    down.away = AWAY
    following = Following(mill.ctx, find("sinks", "pgvector")(), {NAME: down, other: well})
    following.start()
    try:
        mill.work(mill.submit("one", "two"))
        wait_for(lambda: len(well.texts()) == 2)
        wait_for(lambda: following.counts.get(f"{NAME}_pending"))
    finally:
        following.stop()

    assert following.counts[f"{other}_done"] == 2
    assert down.texts() == {}


def test_only_one_process_at_a_time_writes_to_a_sink(mill: Mill) -> None:
    with mill.ctx.database.dedicated() as one, mill.ctx.database.dedicated() as two:
        assert vectors.try_follow(one, NAME)
        assert not vectors.try_follow(two, NAME)
        assert vectors.try_follow(two, "another")
    with mill.ctx.database.dedicated() as two:
        wait_for(lambda: vectors.try_follow(two, NAME))
