"""The flow of a bell over an embedding job: what is claimed, called, charged and written."""

import argparse
import json
import math
import re
from collections.abc import Callable, Generator, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress
from dataclasses import replace
from threading import Event

import pytest

from app.core import checks, model, requeue, status, submission
from app.core.errors import ErrorClass, FailedItemsRemain, WorkError
from app.core.model import JobState, Retry, Settlement
from app.core.requests import BatchOptions
from app.core.store import fleet, items, targets
from app.core.store.targets import NewTarget
from tests import fakes
from tests.drains import CALLER, Mill, open_mill
from tests.fakes import Fake, Reply
from tests.processes import wait_for
from worker import admin, calls, embedding

MARK = "MARK"
TOO_LONG = Reply(status=400, error="the input length exceeds the context length")
OUTAGE_SECONDS = 400.0
"""Longer than any pause or retry."""

TIMEOUTS = {"EMBEDDER_TIMEOUT_SECONDS": "1", "EMBEDDER_LOAD_SECONDS": "1"}

OpenMill = Callable[..., Mill]


@pytest.fixture
def fake() -> Iterator[Fake]:
    """Give a backend that answers rightly until it is told otherwise."""
    with Fake() as fake:
        yield fake


@pytest.fixture
def open_one(shared_database_url: str, redis_url: str, fake: Fake) -> Generator[OpenMill]:
    """Open the flow with settings of a test's own, on a database where nothing is to be done."""
    with ExitStack() as stack:

        def open_one(**more: str) -> Mill:
            mill = stack.enter_context(open_mill(shared_database_url, redis_url, fake, **more))
            mill.empty()
            return mill

        yield open_one


@pytest.fixture
def mill(open_one: OpenMill) -> Mill:
    """Give the flow with the default settings."""
    return open_one()


@pytest.fixture
def own_mill(database_url: str, redis_url: str, fake: Fake) -> Iterator[Mill]:
    """Give the same on a database of a test's own, whose tables it may change."""
    with open_mill(database_url, redis_url, fake) as mill:
        yield mill


def texts(number: int, *, start: int = 0) -> list[str]:
    return [f"text {position}" for position in range(start, start + number)]


# ---- the straight way


def test_a_bell_works_in_slices_until_nothing_is_due(open_one: OpenMill) -> None:
    mill = open_one(QUEUE_BATCH_SIZE="4")
    job_id = mill.submit(*texts(10))

    counts = mill.drain(job_id)

    assert counts == {"done": 10}
    assert mill.sizes == [4, 4, 2]
    assert list(mill.vectors().values()) == mill.right(*texts(10))
    assert set(mill.column(job_id, "attempts")) == {1}
    assert mill.job(job_id).state == JobState.COMPLETED


def test_a_vector_of_another_text_in_the_same_slice_is_never_mixed_up(mill: Mill) -> None:
    first = mill.submit(*texts(3))
    second = mill.submit(*texts(3, start=3), first=4, table="conversations")

    mill.drain(first)
    mill.drain(second)

    assert list(mill.vectors().values()) == mill.right(*texts(3))
    assert list(mill.vectors("conversations").values()) == mill.right(*texts(3, start=3))


def test_an_older_run_does_nothing(mill: Mill) -> None:
    job_id = mill.submit("one")

    assert mill.drain(job_id, run=0) == {"done": 0}

    assert mill.sizes == []
    assert mill.column(job_id, "status") == ["pending"]


def test_a_bell_of_a_final_job_or_of_none_does_nothing(mill: Mill) -> None:
    job_id = mill.submit("one")
    mill.drain(job_id)

    with mill.horse() as horse:
        assert mill.drain(job_id) == {"done": 0}
        assert embedding.drain(horse, "emb-unknown", 1) == {"done": 0}

    assert mill.sizes == [1]


def test_an_item_of_two_jobs_makes_both_final(mill: Mill) -> None:
    one = mill.submit("shared", "mine")
    other = mill.submit("shared")

    mill.drain(one)

    assert mill.sizes == [2]
    assert mill.job(one).state == JobState.COMPLETED
    assert mill.job(other).state == JobState.COMPLETED


def test_an_item_whose_last_holder_was_killed_is_sent_alone(mill: Mill) -> None:
    job_id = mill.submit(*texts(5))
    mill.rows("UPDATE public.embedding_retry_queue SET kills = 1 WHERE target_id IN ('2', '4')")

    mill.drain(job_id)

    assert mill.sizes == [3, 1, 1]
    assert set(mill.column(job_id, "status")) == {"done"}
    assert set(mill.column(job_id, "kills")) == {0}


# ---- turns


def test_a_bell_whose_time_is_over_rings_one_at_the_tail(open_one: OpenMill) -> None:
    mill = open_one(QUEUE_BATCH_SIZE="2", QUEUE_BELL_SECONDS="0.05")
    mill.fake.seconds_per_item = 0.05
    job_id = mill.submit(*texts(6))
    other = mill.submit("other", first=10)

    assert mill.drain(job_id) == {"done": 2}

    assert mill.ctx.bells.waiting("embeddings") == [job_id, other, job_id]
    assert mill.job(job_id).state == JobState.RUNNING


def test_a_stop_is_heard_after_the_slice_in_hand(open_one: OpenMill) -> None:
    mill = open_one(QUEUE_BATCH_SIZE="2")
    job_id = mill.submit(*texts(6))

    assert mill.drain(job_id, stop=lambda: True) == {"done": 2}

    assert mill.column(job_id, "status") == ["done", "done", *["pending"] * 4]
    assert mill.ctx.bells.waiting("embeddings") == [job_id, job_id]


def test_a_bell_that_stops_at_the_last_item_finishes_the_job_and_rings_nobody(mill: Mill) -> None:
    job_id = mill.submit("one")

    mill.drain(job_id, stop=lambda: True)

    assert mill.job(job_id).state == JobState.COMPLETED
    assert mill.ctx.bells.waiting("embeddings") == [job_id]


@pytest.mark.parametrize(("priority", "is_whole"), [(0, False), (5, True)])
def test_only_a_job_without_priority_makes_room_for_those_that_wait(
    open_one: OpenMill, monkeypatch: pytest.MonkeyPatch, priority: int, *, is_whole: bool
) -> None:
    monkeypatch.setattr(embedding, "TURN_SECONDS", 0.0)
    mill = open_one(QUEUE_BATCH_SIZE="2")
    job_id = mill.submit(*texts(6), priority=priority)
    mill.submit("other", first=10)

    counts = mill.drain(job_id)

    assert counts == {"done": 6 if is_whole else 2}


def test_a_bell_goes_on_where_nobody_else_waits(
    open_one: OpenMill, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(embedding, "TURN_SECONDS", 0.0)
    mill = open_one(QUEUE_BATCH_SIZE="2")
    job_id = mill.submit(*texts(6))

    assert mill.drain(job_id) == {"done": 6}


def test_bells_of_a_job_with_priority_are_heard_first(mill: Mill) -> None:
    late = mill.submit("late")
    soon = mill.submit("soon", first=2, priority=1)

    assert mill.ctx.bells.waiting("embeddings") == [soon, late]


# ---- one text is to blame


@pytest.mark.parametrize("number", [2, 3, 7, 20, 64])
@pytest.mark.parametrize("status", [400, 500])
def test_one_culprit_is_found_within_the_budget_and_alone_pays(
    mill: Mill, number: int, status: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(model, "backoff", lambda _: OUTAGE_SECONDS)  # one try, on any machine
    error = "the input length exceeds the context length" if status == 400 else "it broke"
    mill.fake.when(Reply(status=status, error=error), marker=MARK)
    job_id = mill.submit(*texts(number - 1), MARK)

    if status == 400:
        with pytest.raises(FailedItemsRemain, match=f"1 of {number} items failed"):
            mill.drain(job_id)
    else:
        mill.drain(job_id)

    assert len(mill.sizes) <= 2 * math.ceil(math.log2(number)) + 4
    *others, culprit = mill.items(job_id)
    assert {item["status"] for item in others} == {"done"}
    assert {item["attempts"] for item in others} == {1}
    assert culprit["attempts"] == 1
    assert (culprit["status"], culprit["error_class"]) == (
        ("failed", "bad_input") if status == 400 else ("pending", "unclear")
    )
    assert culprit["last_error"] == f"{status}: {error}"


def test_what_is_refused_is_blamed_only_where_a_harmless_text_passes(mill: Mill) -> None:
    mill.fake.when(TOO_LONG)
    job_id = mill.submit(*texts(8))

    mill.drain(job_id)

    assert mill.backend()["is_paused"]
    assert "so does a harmless text" in mill.backend()["message"]
    assert set(mill.column(job_id, "status")) == {"pending"}
    assert set(mill.column(job_id, "attempts")) == {0}


def test_a_text_that_stays_unclear_is_failed_at_its_last_attempt_and_not_before(
    open_one: OpenMill,
) -> None:
    mill = open_one(QUEUE_MAX_RETRIES="3")
    mill.fake.when(Reply(status=500, error="it broke"), marker=MARK)
    job_id = mill.submit("good", MARK)

    for _ in range(2):
        mill.drain(job_id)
        assert mill.column(job_id, "status") == ["done", "pending"]
        mill.elapse(OUTAGE_SECONDS)
    with pytest.raises(FailedItemsRemain):
        mill.drain(job_id)

    item = mill.items(job_id)[1]
    assert (item["status"], item["attempts"]) == ("failed", 3)
    history = "SELECT attempt, error_class FROM holdfast.item_attempts ORDER BY attempt"
    assert [(row["attempt"], row["error_class"]) for row in mill.rows(history)] == [
        (number, "unclear") for number in (1, 2, 3)
    ]
    assert mill.job(job_id).state == JobState.COMPLETED_WITH_ERRORS


def test_what_broke_once_is_sent_once_more_as_it_was(mill: Mill) -> None:
    mill.fake.when(Reply(cut=0.5), times=1)
    job_id = mill.submit(*texts(10))

    mill.drain(job_id)

    assert mill.sizes == [10, 10]
    assert set(mill.column(job_id, "attempts")) == {1}


def test_the_job_of_failed_items_ends_its_last_bell_as_failed(mill: Mill) -> None:
    mill.fake.when(TOO_LONG, marker=MARK)
    job_id = mill.submit(f"{MARK} 1", f"{MARK} 2")

    with pytest.raises(FailedItemsRemain, match="2 of 2 items failed"):
        mill.drain(job_id)

    assert mill.job(job_id).state == JobState.FAILED
    assert mill.drain(job_id) == {"done": 0}


# ---- how much at a time


def test_a_limit_on_items_is_found_by_halving_and_remembered(mill: Mill) -> None:
    mill.fake.limits.max_items = 3
    job_id = mill.submit(*texts(8))

    mill.drain(job_id)
    first = len(mill.sizes)
    again = mill.submit(*texts(7), first=20)
    mill.drain(again)

    assert mill.sizes[:3] == [8, 4, 2]
    assert max(mill.sizes[first:]) <= 3
    assert mill.backend()["max_items"] <= 3
    assert set(mill.column(job_id, "attempts") + mill.column(again, "attempts")) == {1}
    assert set(mill.vectors().values() and mill.column(again, "status")) == {"done"}


def test_a_remembered_limit_is_doubled_after_a_while(mill: Mill) -> None:
    mill.fake.limits.max_items = 2
    mill.drain(mill.submit(*texts(4)))
    mill.fake.limits.max_items = None

    mill.rows("UPDATE holdfast.backends SET limited_at = limited_at - interval '11 minutes'")
    before = len(mill.sizes)
    mill.drain(mill.submit(*texts(8), first=20))

    assert mill.sizes[before:] == [4, 4]


def test_limits_of_the_settings_cut_a_slice_into_calls(open_one: OpenMill) -> None:
    mill = open_one(EMBEDDER_MAX_ITEMS="3", EMBEDDER_MAX_TOKENS="20")
    job_id = mill.submit(*["a" * 27] * 2, *["b" * 3] * 4, "c" * 300)

    mill.drain(job_id)

    assert mill.sizes == [2, 3, 1, 1]
    assert set(mill.column(job_id, "status")) == {"done"}


def test_a_slow_slice_is_halved_and_the_next_ones_are_no_larger(open_one: OpenMill) -> None:
    mill = open_one(QUEUE_BATCH_SIZE="8", **TIMEOUTS)
    is_large: list[int] = []

    def slow(request: fakes.Request) -> Reply | None:
        is_large.append(len(request.texts))
        return Reply(delay_seconds=60) if len(request.texts) > 4 else None

    mill.fake.rules.append(slow)
    job_id = mill.submit(*texts(20))

    mill.drain(job_id)

    assert mill.sizes == [8, 1, 4, 4, 4, 4, 4]
    assert set(mill.column(job_id, "attempts")) == {1}
    assert set(mill.column(job_id, "status")) == {"done"}


def test_slices_shrink_where_they_take_too_long(
    open_one: OpenMill, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(calls, "SLICE_SECONDS", 0.1)
    mill = open_one(QUEUE_BATCH_SIZE="8")
    mill.fake.seconds_per_item = 0.05
    job_id = mill.submit(*texts(12))

    assert mill.drain(job_id) == {"done": 12}

    assert mill.sizes[:2] == [8, 4]


def test_a_call_that_could_outlive_its_bell_is_left_to_the_next_one(
    open_one: OpenMill, monkeypatch: pytest.MonkeyPatch
) -> None:
    mill = open_one(**TIMEOUTS)
    limit = mill.ctx.bell_seconds
    monkeypatch.setattr(calls, "SETTLE_SECONDS", limit - 1.9)  # enough for one call
    too_many = Reply(delay_seconds=60)
    mill.fake.rules.append(lambda call: too_many if len(call.texts) > 4 else None)
    job_id = mill.submit(*texts(8))

    assert mill.drain(job_id) == {"release": 8}
    assert set(mill.column(job_id, "attempts")) == {0}
    assert not mill.backend()["is_paused"]

    assert mill.drain(job_id) == {"done": 8}
    assert mill.sizes == [8, 4, 4]


def test_a_text_that_is_slow_alone_pays_for_itself(open_one: OpenMill) -> None:
    mill = open_one(**TIMEOUTS)
    mill.fake.when(Reply(delay_seconds=60), marker=MARK)
    job_id = mill.submit("good", MARK)

    mill.drain(job_id)

    assert mill.column(job_id, "status") == ["done", "pending"]
    assert mill.column(job_id, "attempts") == [1, 1]
    assert mill.column(job_id, "error_class") == [None, "slow"]
    assert not mill.backend()["is_paused"]


# ---- the backend is to blame


def test_a_backend_that_hangs_is_paused_and_no_item_pays(open_one: OpenMill) -> None:
    mill = open_one(**TIMEOUTS)
    mill.fake.when(Reply(delay_seconds=60))
    job_id = mill.submit(*texts(8))

    mill.drain(job_id)

    assert mill.sizes == [8, 1]
    assert mill.backend()["is_paused"]
    assert mill.backend()["error_class"] == "slow"
    assert set(mill.column(job_id, "attempts")) == {0}


@pytest.mark.parametrize(
    ("reply", "error_class"),
    [
        (Reply(status=503, error="server busy"), "busy"),
        (Reply(status=429, error="slow down"), "busy"),
        (Reply(status=404, error='model "m" not found, try pulling it first'), "bad_config"),
        (Reply(status=401, error="no"), "bad_config"),
        (Reply(status=502, body=b"<html>bad gateway</html>"), "unreachable"),
        (Reply(bend=fakes.embedding(fakes.zeros)), "bad_answer"),
        (Reply(status=500, error="out of memory"), "unclear"),
        (Reply(body=b"<html>welcome</html>"), "unreachable"),
        (Reply(hang_up=True), "unreachable"),
        (Reply(bend=fakes.embedding(fakes.of_dimension(5))), "bad_answer"),
        (Reply(bend=fakes.embedding(fakes.ones)), "bad_answer"),
    ],
)
def test_an_outage_charges_nobody_and_is_named(mill: Mill, reply: Reply, error_class: str) -> None:
    mill.fake.when(reply)
    job_id = mill.submit(*texts(20))

    for _ in range(7):
        mill.drain(job_id)
        mill.elapse(OUTAGE_SECONDS)

    assert mill.backend()["error_class"] == error_class
    assert set(mill.column(job_id, "status")) == {"pending"}
    assert set(mill.column(job_id, "attempts")) == {0}
    assert len(mill.sizes) <= 7 * 3
    mill.fake.rules.clear()
    assert mill.drain(job_id) == {"done": 20}
    assert mill.backend()["is_paused"] is False
    assert set(mill.column(job_id, "attempts")) == {1}


class Fragile:
    """A backend that one text brings down, until it is started again."""

    def __init__(self, fake: Fake, poison: str) -> None:
        self.is_down = False
        self._poison = poison
        fake.rules.append(self._rule)

    def _rule(self, request: fakes.Request) -> Reply | None:
        if self.is_down:
            return Reply(status=503, error="starting")
        if self._poison not in request.texts:
            return None
        self.is_down = True
        return Reply(hang_up=True)


def test_what_was_in_hand_when_a_backend_went_down_is_uncharged_and_alone_next_time(
    mill: Mill,
) -> None:
    fragile = Fragile(mill.fake, "poison")
    job_id = mill.submit("one", "poison", "two")
    mill.drain(job_id)
    assert mill.column(job_id, "attempts") == [0, 0, 0]
    assert mill.column(job_id, "kills") == [1, 1, 1]

    fragile.is_down = False
    mill.elapse(OUTAGE_SECONDS)
    del mill.fake.requests[:]
    mill.drain(job_id)

    asked = [request.texts for request in mill.fake.requests]
    assert asked[:4] == [("ok",), ("one",), ("poison",), ("poison",)]
    assert mill.column(job_id, "status")[:2] == ["done", "pending"]
    assert mill.column(job_id, "attempts")[:2] == [1, 1]
    message = mill.column(job_id, "last_error")[1]
    assert "and the backend was away afterwards" in message


def test_a_text_that_brings_the_backend_down_fails_at_its_limit_and_nobody_else(
    mill: Mill,
) -> None:
    fragile = Fragile(mill.fake, "poison")
    job_id = mill.submit("one", "poison", "two")

    for _ in range(20):
        with suppress(FailedItemsRemain):
            mill.drain(job_id)
        fragile.is_down = False
        mill.elapse(OUTAGE_SECONDS)

    assert mill.column(job_id, "status") == ["done", "failed", "done"]
    assert mill.column(job_id, "attempts") == [1, mill.settings.queue_max_retries, 1]
    assert mill.column(job_id, "error_class")[1] == ErrorClass.UNREACHABLE


def test_a_text_under_suspicion_is_not_charged_for_an_outage_that_began_before_it(
    mill: Mill,
) -> None:
    fragile = Fragile(mill.fake, "poison")
    job_id = mill.submit("one", "poison")
    mill.drain(job_id)

    for _ in range(10):
        mill.elapse(OUTAGE_SECONDS)
        mill.drain(job_id)

    assert fragile.is_down
    assert mill.column(job_id, "attempts") == [0, 0]
    assert mill.column(job_id, "kills") == [1, 1]


def test_a_call_that_never_reached_the_backend_makes_nobody_suspicious(mill: Mill) -> None:
    mill.fake.when(Reply(status=503, error="busy"))
    job_id = mill.submit("one", "two")

    mill.drain(job_id)

    assert mill.column(job_id, "kills") == [0, 0]


def test_a_paused_backend_is_left_alone(mill: Mill) -> None:
    job_id = mill.submit(*texts(5))
    with mill.fake.refused():
        assert mill.drain(job_id) == {"release": 5}

    assert mill.drain(job_id) == {}

    assert mill.sizes == []
    assert mill.backend()["tries"] == 1


def test_a_pause_lasts_as_long_as_the_backend_asks(mill: Mill) -> None:
    mill.fake.when(Reply(status=429, error="later", headers={"Retry-After": "77"}))
    job_id = mill.submit(*texts(5))

    mill.drain(job_id)

    assert 70 < mill.backend()["seconds_left"] <= 77
    assert mill.sizes == [5]


def test_pauses_grow_with_each_try_that_fails(mill: Mill) -> None:
    job_id = mill.submit(*texts(5))

    with mill.fake.refused():
        for _ in range(9):
            mill.drain(job_id)
            assert mill.backend()["seconds_left"] <= 60
            mill.elapse(OUTAGE_SECONDS)

    assert mill.backend()["tries"] == 9


def test_bells_that_see_the_same_outage_count_it_once(mill: Mill) -> None:
    gate = Event()
    mill.fake.when(Reply(status=503, error="busy", until=gate))
    one, other = mill.submit(*texts(2)), mill.submit(*texts(2), first=10)

    with mill.draining(one), mill.draining(other):
        mill.fake.wait_for(lambda fake: len(fake.calls) == 2)
        gate.set()

    assert mill.backend()["tries"] == 1


def test_after_a_pause_one_item_tells_whether_the_rest_may_go_on(mill: Mill) -> None:
    job_id = mill.submit(*texts(8))
    with mill.fake.refused():
        mill.drain(job_id)
    mill.elapse(OUTAGE_SECONDS)

    counts = mill.drain(job_id)

    assert counts == {"done": 8}
    assert mill.sizes == [1, 7]


def test_only_one_of_all_bells_tries(mill: Mill) -> None:
    gate = Event()
    one, other = mill.submit(*texts(3)), mill.submit(*texts(3), first=10)
    with mill.fake.refused():
        mill.drain(one)
    mill.elapse(OUTAGE_SECONDS)
    mill.fake.when(Reply(until=gate), times=1)

    with mill.draining(one) as first:
        mill.fake.wait_for(lambda fake: fake.calls)
        assert mill.drain(other) == {}
        gate.set()

    assert first.result() == {"done": 3}
    assert mill.drain(other) == {"done": 3}


def test_who_dies_while_trying_holds_the_backend_no_longer_than_its_lease(mill: Mill) -> None:
    job_id = mill.submit(*texts(3))
    with mill.fake.refused():
        mill.drain(job_id)
    mill.elapse(OUTAGE_SECONDS)

    gate = Event()
    mill.fake.when(Reply(until=gate), times=1)
    with mill.draining(job_id):
        mill.fake.wait_for(lambda fake: fake.calls)
        probed_for = "SELECT extract(epoch FROM probe_until - now())::float8 AS s"
        [row] = mill.rows(f"{probed_for} FROM holdfast.backends")
        gate.set()

    assert 0 < row["s"] <= mill.settings.queue_visibility_timeout


def test_a_long_try_is_not_taken_for_a_dead_one(open_one: OpenMill) -> None:
    mill = open_one(QUEUE_VISIBILITY_TIMEOUT="1")
    gate = Event()
    one, other = mill.submit(*texts(3)), mill.submit(*texts(3), first=10)
    with mill.fake.refused():
        mill.drain(one)
    mill.elapse(OUTAGE_SECONDS)
    mill.fake.when(Reply(until=gate), times=1)

    with mill.draining(one) as first:
        mill.fake.wait_for(lambda fake: fake.calls)
        began = mill.rows("SELECT probe_until FROM holdfast.backends")
        wait_for(lambda: mill.rows("SELECT probe_until FROM holdfast.backends") != began)
        assert mill.drain(other) == {}
        gate.set()

    assert first.result() == {"done": 3}


def test_a_success_from_before_a_pause_does_not_end_it(mill: Mill) -> None:
    gate = Event()
    mill.fake.when(Reply(until=gate), marker="early", times=1)
    limit = Reply(status=429, error="later", headers={"Retry-After": "60"})
    mill.fake.when(limit, marker="late")
    early, late = mill.submit("early"), mill.submit("late", first=10)

    with mill.draining(early) as first:
        mill.fake.wait_for(lambda fake: fake.calls)
        mill.drain(late)
        gate.set()

    assert first.result() == {"done": 1}
    assert mill.backend()["is_paused"]
    assert mill.backend()["seconds_left"] > 50


def test_a_pause_that_ends_while_a_bell_works_is_ended_by_it(open_one: OpenMill) -> None:
    mill = open_one(QUEUE_BATCH_SIZE="2")
    gate = Event()
    mill.fake.when(Reply(until=gate), marker="text 2", times=1)
    mill.fake.when(Reply(status=503, error="busy"), marker="other", times=1)
    job_id, other = mill.submit(*texts(6)), mill.submit("other", first=10)

    with mill.draining(job_id) as bell:
        mill.fake.wait_for(lambda fake: len(fake.calls) == 2)
        mill.drain(other)
        mill.elapse(OUTAGE_SECONDS)
        gate.set()

    assert bell.result() == {"done": 6}
    assert mill.sizes == [2, 2, 1, 1, 1]
    assert not mill.backend()["is_paused"]


# ---- one vector for different texts


def test_a_backend_that_gives_every_text_the_same_vector_is_paused_and_nothing_is_stored(
    mill: Mill,
) -> None:
    mill.fake.when(Reply(bend=fakes.embedding(fakes.ones)))
    job_id = mill.submit(*texts(2))

    mill.drain(job_id)

    assert mill.sizes == [2, 2]
    assert mill.backend()["message"] == "it gives every text the same vector"
    assert set(mill.vectors().values()) == {None}
    assert mill.column(job_id, "attempts") == [0, 0]


def test_one_text_alone_does_not_end_such_a_pause(mill: Mill) -> None:
    mill.fake.when(Reply(bend=fakes.embedding(fakes.ones)))
    job_id = mill.submit(*texts(4))
    mill.drain(job_id)
    mill.elapse(OUTAGE_SECONDS)

    mill.drain(job_id)

    assert mill.backend()["is_paused"]
    assert set(mill.vectors().values()) == {None}
    mill.fake.rules.clear()
    assert mill.work(job_id).state == JobState.COMPLETED


def test_texts_that_are_alike_to_the_model_are_asked_for_one_by_one(mill: Mill) -> None:
    mill.fake.when(Reply(bend=fakes.embedding(fakes.ones)), marker="kiln")
    job_id = mill.submit("kiln", "kiln ", " kiln")

    assert mill.drain(job_id) == {"done": 3}

    assert mill.sizes == [3, 2, 1, 1, 2, 1, 1]
    assert set(mill.column(job_id, "attempts")) == {1}
    assert list(mill.vectors().values()) == [[1.0] * 8] * 3


def test_a_backend_that_mixes_up_large_calls_gives_right_vectors_in_small_ones(mill: Mill) -> None:
    def first_of_all(entries: list[fakes.Entry]) -> list[fakes.Entry]:
        return [replace(entry, embedding=entries[0].embedding) for entry in entries]

    mill.fake.rules.append(
        lambda request: Reply(bend=first_of_all) if len(request.texts) > 2 else None
    )
    job_id = mill.submit(*texts(8))

    mill.work(job_id)

    assert list(mill.vectors().values()) == mill.right(*texts(8))


def test_equal_texts_may_have_equal_vectors(mill: Mill) -> None:
    job_id = mill.submit("same", "same", "same")

    assert mill.drain(job_id) == {"done": 3}

    assert mill.sizes == [3]


# ---- another model behind the same name

CANARY = "The canary sings."


def swap_model(entries: list[fakes.Entry]) -> list[fakes.Entry]:
    """Answer as another model of the same dimension would."""
    return [
        replace(entry, embedding=fakes.vector_of("another", entry.text, 8)) for entry in entries
    ]


def canaries(mill: Mill) -> int:
    """Return how often the canary was asked for."""
    return len(mill.fake.arrivals[CANARY])


def test_a_model_that_was_swapped_behind_its_name_is_paused_before_a_text_is_sent(
    open_one: OpenMill,
) -> None:
    mill = open_one(EMBEDDER_CANARY=CANARY)
    mill.drain(mill.submit(*texts(2)))
    mill.fake.when(Reply(bend=swap_model))
    mill.elapse(OUTAGE_SECONDS)
    job_id = mill.submit(*texts(3, start=10), first=10)

    mill.drain(job_id)

    assert mill.sizes == [1, 2, 1]
    assert canaries(mill) == 2
    backend = mill.backend()
    assert backend["error_class"] == "bad_config"
    assert backend["message"].startswith("the model behind this name has changed: ")
    assert backend["message"].endswith(f"python -m worker backends accept {backend['model']}")
    assert set(mill.column(job_id, "attempts")) == {0}
    [incident] = mill.rows("SELECT error_class, until FROM holdfast.incidents")
    assert incident == {"error_class": "bad_config", "until": None}


def test_the_right_model_back_behind_its_name_goes_on_by_itself(open_one: OpenMill) -> None:
    mill = open_one(EMBEDDER_CANARY=CANARY)
    mill.drain(mill.submit(*texts(2)))
    mill.fake.when(Reply(bend=swap_model), times=1)
    mill.elapse(OUTAGE_SECONDS)
    job_id = mill.submit(*texts(3, start=10), first=10)
    mill.drain(job_id)

    assert mill.work(job_id).state == JobState.COMPLETED

    assert list(mill.vectors().values())[2:] == mill.right(*texts(3, start=10))
    assert mill.rows("SELECT FROM holdfast.incidents WHERE until IS NULL") == []


def test_a_new_model_that_an_operator_accepts_is_the_one_from_then_on(
    open_one: OpenMill, capsys: pytest.CaptureFixture[str]
) -> None:
    mill = open_one(EMBEDDER_CANARY=CANARY)
    accept = argparse.Namespace(act=admin.accept_model, model=mill.settings.embedding_model)
    assert admin.run(mill.settings, accept) == 1
    mill.drain(mill.submit(*texts(2)))
    mill.fake.when(Reply(bend=swap_model))
    mill.elapse(OUTAGE_SECONDS)
    job_id = mill.submit(*texts(3, start=10), first=10)
    mill.drain(job_id)

    assert admin.run(mill.settings, accept) == 0

    assert mill.work(job_id).state == JobState.COMPLETED
    assert "accepted" in capsys.readouterr().out
    mill.fake.rules.clear()
    mill.elapse(OUTAGE_SECONDS)
    mill.drain(mill.submit("again", first=20))
    assert mill.backend()["error_class"] == "bad_config"


def test_a_canary_is_asked_for_at_first_calls_and_not_at_each(open_one: OpenMill) -> None:
    mill = open_one(EMBEDDER_CANARY=CANARY, QUEUE_BATCH_SIZE="2")
    for first in (1, 10):
        mill.drain(mill.submit(*texts(4), first=first))
    assert canaries(mill) == 1

    with mill.fake.refused():
        mill.drain(mill.submit("later", first=20))
    mill.elapse(1)
    mill.work(mill.submit("last", first=30))

    assert canaries(mill) == 2


def test_a_backend_that_cannot_even_take_the_canary_is_paused(open_one: OpenMill) -> None:
    mill = open_one(EMBEDDER_CANARY=CANARY)
    mill.fake.when(TOO_LONG, marker=CANARY)
    job_id = mill.submit(*texts(2))

    mill.drain(job_id)

    assert mill.sizes == [1]
    assert mill.backend()["error_class"] == "bad_input"
    assert mill.column(job_id, "attempts") == [0, 0]


# ---- an outage is one incident

INCIDENTS = "SELECT error_class, reason, until FROM holdfast.incidents ORDER BY id"


def test_an_outage_that_stops_several_bells_and_many_tries_is_one_incident(mill: Mill) -> None:
    one, other = mill.submit(*texts(5)), mill.submit(*texts(5), first=10)

    with mill.fake.refused():
        for _ in range(3):
            with mill.draining(one), mill.draining(other):
                pass
            mill.elapse(OUTAGE_SECONDS)

    [incident] = mill.rows(INCIDENTS)
    assert (incident["error_class"], incident["until"]) == ("unreachable", None)
    mill.drain(one)
    [incident] = mill.rows(INCIDENTS)
    assert incident["until"] is not None
    mill.drain(other)
    assert set(mill.column(one, "status") + mill.column(other, "status")) == {"done"}


def test_a_job_says_in_one_sentence_what_of_it_waits_for_a_backend(
    own_mill: Mill, second_model: str
) -> None:
    with own_mill.ctx.database.transaction() as tx:
        fleet.beat(
            tx, fleet.Process("w", "worker", "embeddings", "here", 1), seconds=60, counters={}
        )
    own_mill.rows("INSERT INTO conversations (id, body) SELECT generate_series(1, 1500), ''")
    mixed = [
        *({"target_table": "conversations", "target_id": n, "text": "two"} for n in range(1, 1501)),
        {"target_table": "ai_insights", "target_id": 1, "text": "one"},
    ]
    incoming = submission.Incoming(BatchOptions(), mixed)
    job_id = submission.submit(own_mill.ctx, CALLER, incoming).job_id
    own_mill.fake.rules.append(is_of(second_model, Reply(status=503, error="server busy")))
    own_mill.drain(job_id)

    body = json.loads(status.read(own_mill.ctx, CALLER, job_id).body)

    assert body["waiting"]["reason"] == "backend_paused"
    moment = r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\dZ"
    assert re.fullmatch(
        rf"ollama m-two busy since {moment}: 1,500 items of this job wait, 0 lost;"
        rf" next try at {moment} \(.*503.*\)",
        body["waiting"]["detail"],
    )


# ---- several models


@pytest.fixture
def second_model(own_mill: Mill) -> str:
    """Give conversations a second, now current, version of another model."""
    own_mill.rows("ALTER TABLE conversations ADD COLUMN embedding_two vector(8)")
    new = NewTarget("conversations", "id", "embedding_two", "m-two", "two", 8)
    with own_mill.ctx.database.transaction() as tx:
        targets.register(tx, new)
    return "m-two"


def test_what_a_target_wants_said_before_a_text_is_sent_and_is_not_kept(own_mill: Mill) -> None:
    own_mill.rows("ALTER TABLE conversations ADD COLUMN embedding_e5 vector(8)")
    wanted = NewTarget("conversations", "id", "embedding_e5", "e5", "e5-8", 8, prefix="passage: ")
    with own_mill.ctx.database.transaction() as tx:
        targets.register(tx, wanted)

    job_id = own_mill.submit("one", "two", table="conversations")
    own_mill.drain(job_id)

    assert sorted(own_mill.fake.arrivals) == ["passage: one", "passage: two"]
    assert own_mill.column(job_id, "text_content") == ["one", "two"]
    assert own_mill.column(job_id, "status") == ["done", "done"]


def is_of(model: str, reply: Reply) -> fakes.Rule:
    return lambda request: reply if request.model == model else None


def test_a_paused_model_does_not_hold_up_another(own_mill: Mill, second_model: str) -> None:
    own_mill.fake.rules.append(is_of(second_model, Reply(status=404, error="model not found")))
    paused = own_mill.submit("for two", table="conversations")
    own_mill.drain(paused)
    job_id = own_mill.submit(*texts(3))

    assert own_mill.drain(job_id) == {"done": 3}

    assert own_mill.backend(second_model)["is_paused"]
    assert own_mill.column(paused, "status") == ["pending"]


def test_a_job_without_work_for_a_model_does_not_try_it(own_mill: Mill, second_model: str) -> None:
    own_mill.fake.rules.append(is_of(second_model, Reply(status=503, error="busy")))
    paused = own_mill.submit("for two", table="conversations")
    own_mill.drain(paused)
    own_mill.elapse(OUTAGE_SECONDS)
    job_id = own_mill.submit(*texts(3))

    assert own_mill.drain(job_id) == {"done": 3}

    own_mill.fake.rules.clear()
    assert own_mill.drain(paused) == {"done": 1}


def test_what_exactly_was_behind_the_model_s_name_is_written_down_and_a_change_is_said(
    own_mill: Mill, caplog: pytest.LogCaptureFixture
) -> None:
    model = own_mill.settings.embedding_model
    digests = "SELECT model_digest FROM holdfast.vectors ORDER BY target_id"
    own_mill.drain(own_mill.submit("before it was told"))
    own_mill.fake.digests = {"other": "sha256:0", model: "sha256:aaaa"}
    own_mill.elapse(OUTAGE_SECONDS)
    own_mill.drain(own_mill.submit("one", first=2))
    own_mill.drain(own_mill.submit("two", first=3))
    assert [row["model_digest"] for row in own_mill.rows(digests)] == [None, *["sha256:aaaa"] * 2]
    assert "has changed" not in caplog.text

    own_mill.fake.digests = {model: "sha256:bbbb"}
    own_mill.elapse(OUTAGE_SECONDS)
    own_mill.drain(own_mill.submit("three", first=4))

    assert own_mill.rows(digests)[-1]["model_digest"] == "sha256:bbbb"
    assert "has changed: sha256:bbbb" in caplog.text
    assert own_mill.column(own_mill.submit("one", first=2), "status") == ["done"]


# ---- writing


def test_an_item_whose_row_is_gone_is_skipped(mill: Mill) -> None:
    job_id = mill.submit("one", "two", "three")
    mill.rows("DELETE FROM ai_insights WHERE id = 2")

    assert mill.drain(job_id) == {"done": 2, "skipped": 1}

    assert mill.column(job_id, "skip_reason") == [None, "content_not_found", None]
    job = mill.job(job_id)
    assert (job.state, job.counts.done, job.counts.skipped) == (JobState.COMPLETED, 2, 1)


REFUSE_ROW = """
CREATE FUNCTION refuse_row() RETURNS trigger LANGUAGE plpgsql AS
$$BEGIN IF NEW.id = 3 THEN RAISE EXCEPTION 'row % is frozen', NEW.id; END IF; RETURN NEW; END$$;
CREATE TRIGGER refuse_row BEFORE UPDATE ON ai_insights
   FOR EACH ROW EXECUTE FUNCTION refuse_row()
"""


@pytest.mark.parametrize(
    ("refusal", "said"),
    [
        ("ALTER TABLE ai_insights ADD CHECK (id <> 3 OR embedding IS NULL)", "23514 new row"),
        (REFUSE_ROW, "P0001 row 3 is frozen"),
    ],
)
def test_a_row_that_its_table_refuses_fails_by_name_and_its_neighbours_are_done(
    own_mill: Mill, refusal: str, said: str
) -> None:
    job_id = own_mill.submit(*texts(7))
    own_mill.rows(refusal)

    with pytest.raises(FailedItemsRemain):
        own_mill.drain(job_id)

    assert own_mill.column(job_id, "status") == ["done", "done", "failed", *["done"] * 4]
    item = own_mill.items(job_id)[2]
    assert item["error_class"] == "store_reject"
    assert item["last_error"].startswith(said)
    assert list(own_mill.vectors().values())[2] is None
    assert not own_mill.backend()["is_paused"]


def test_a_column_of_another_dimension_pauses_and_names_both(own_mill: Mill) -> None:
    job_id = own_mill.submit(*texts(3))
    own_mill.rows("ALTER TABLE ai_insights DROP COLUMN embedding, ADD COLUMN embedding vector(4)")

    assert own_mill.drain(job_id) == {"release": 3}

    backend = own_mill.backend(own_mill.label())
    assert (backend["is_paused"], backend["error_class"]) == (True, "bad_config")
    assert "ai_insights" in backend["message"]
    assert "4 dimensions" in backend["message"]
    assert " 8" in backend["message"]
    assert set(own_mill.column(job_id, "attempts")) == {0}


@pytest.mark.parametrize(
    "change",
    ["DROP TABLE ai_insights", "ALTER TABLE ai_insights RENAME COLUMN embedding TO other"],
)
def test_a_table_that_is_not_as_registered_pauses_and_is_named(own_mill: Mill, change: str) -> None:
    job_id = own_mill.submit(*texts(3))
    own_mill.rows(change)

    assert own_mill.drain(job_id) == {"release": 3}

    assert own_mill.backend(own_mill.label())["error_class"] == "bad_config"
    assert "ai_insights" in own_mill.backend(own_mill.label())["message"]
    assert set(own_mill.column(job_id, "attempts")) == {0}


def test_one_table_that_is_not_as_registered_holds_up_no_other(own_mill: Mill) -> None:
    own_mill.rows("ALTER TABLE ai_insights DROP COLUMN embedding, ADD COLUMN embedding vector(4)")
    own_mill.rows("INSERT INTO conversations (id, body) VALUES (1, ''), (2, '')")
    more = [
        {"target_table": "conversations", "target_id": number, "text": f"text {number}"}
        for number in (1, 2)
    ]
    own_mill.rows("INSERT INTO ai_insights (id, body) VALUES (1, '')")
    with own_mill.ctx.database.transaction() as tx:
        fleet.beat(
            tx, fleet.Process("w", "worker", "embeddings", "here", 1), seconds=60, counters={}
        )
    broken = {"target_table": "ai_insights", "target_id": 1, "text": "text of the broken table"}
    incoming = submission.Incoming(BatchOptions(), [broken, *more])
    job_id = submission.submit(own_mill.ctx, CALLER, incoming).job_id

    own_mill.drain(job_id)

    assert own_mill.column(job_id, "status") == ["pending", "done", "done"]
    assert not own_mill.backend()["is_paused"]
    waiting = json.loads(status.read(own_mill.ctx, CALLER, job_id).body)["waiting"]
    assert waiting["reason"] == "backend_paused"
    assert "ai_insights" in waiting["detail"]
    admin_caller = replace(CALLER, scopes=frozenset({"admin"}))
    [incident] = checks.incidents(own_mill.ctx, admin_caller, cursor=None, limit=9)["incidents"]
    assert (incident["backend"], incident["items_waiting"]) == ("pgvector", 1)

    # Still broken when the pause is over: the table is looked at, and no text is sent for it.
    sent = len(own_mill.fake.calls)
    own_mill.elapse(OUTAGE_SECONDS)
    own_mill.drain(job_id)
    assert len(own_mill.fake.calls) == sent
    assert own_mill.column(job_id, "attempts") == [0, 1, 1]

    own_mill.rows("ALTER TABLE ai_insights DROP COLUMN embedding, ADD COLUMN embedding vector(8)")
    own_mill.elapse(OUTAGE_SECONDS)
    own_mill.drain(job_id)
    assert own_mill.column(job_id, "status") == ["done"] * 3
    assert not own_mill.backend(own_mill.label())["is_paused"]


# ---- what happened meanwhile


@pytest.fixture
def gate(fake: Fake) -> Event:
    """Hold back the answer to the first call until this is set."""
    event = Event()
    fake.when(Reply(until=event), times=1)
    return event


def test_with_a_lost_lease_nothing_is_written_and_it_is_counted(mill: Mill, gate: Event) -> None:
    job_id = mill.submit("one", "two")

    with mill.draining(job_id) as bell:
        mill.fake.wait_for(lambda fake: fake.calls)
        lapse = "UPDATE public.embedding_retry_queue SET lease_until = now() - interval '1 s'"
        mill.rows(f"{lapse} WHERE target_id = '1'")
        mill.sweep()
        item = mill.items(job_id)[0]
        gate.set()
        counts = bell.result()

    assert (item["status"], item["attempts"], item["error_class"]) == (
        *("pending", 1),
        "lease_expired",
    )
    assert counts == {"done": 2, "lease_lost": 1}
    assert mill.column(job_id, "attempts") == [2, 1]
    assert list(mill.vectors().values()) == mill.right("one", "two")


def test_a_text_that_changed_meanwhile_ends_with_the_vector_of_the_new_one(
    mill: Mill, gate: Event
) -> None:
    old = mill.submit("old", "two")

    with mill.draining(old) as bell:
        mill.fake.wait_for(lambda fake: fake.calls)
        new = mill.submit("new")
        gate.set()
        counts = bell.result()
    mill.drain(new)

    assert counts == {"done": 1, "lease_lost": 1}
    assert list(mill.vectors().values()) == mill.right("new", "two")
    assert mill.job(old).state == mill.job(new).state == JobState.COMPLETED


def test_a_job_cancelled_meanwhile_keeps_what_is_done_and_tries_nothing_again(
    open_one: OpenMill,
) -> None:
    mill = open_one(QUEUE_BATCH_SIZE="3")
    gate = Event()
    mill.fake.when(Reply(status=500, error="it broke", until=gate), marker=MARK)
    job_id = mill.submit("one", "two", MARK, "never sent")

    with mill.draining(job_id):
        mill.fake.wait_for(lambda fake: fake.calls)
        requeue.cancel(mill.ctx, CALLER, job_id)
        gate.set()

    assert mill.column(job_id, "status") == ["done", "done", "cancelled", "cancelled"]
    assert mill.job(job_id).state == JobState.CANCELLED
    assert list(mill.vectors().values()) == [*mill.right("one", "two"), None, None]


def test_a_cancel_that_waits_for_a_settle_leaves_nothing_open(mill: Mill) -> None:
    job_id = mill.submit("one")
    terms = items.ClaimTerms(job_id, "bell", lease_seconds=60, allowance=5)
    with mill.ctx.database.transaction() as tx:
        [claim] = items.claim(tx, terms, limit=10, paused_models=[])
    retry = Settlement(claim, Retry(WorkError(ErrorClass.UNCLEAR, "it broke"), 0))
    waiting = "SELECT 1 FROM pg_stat_activity WHERE datname = current_database()"

    with ThreadPoolExecutor(1) as pool, mill.ctx.database.transaction() as tx:
        items.settle(tx, [retry], leased_by="bell")
        cancelled = pool.submit(requeue.cancel, mill.ctx, CALLER, job_id)
        wait_for(lambda: mill.rows(f"{waiting} AND wait_event_type = 'Lock'"))
    cancelled.result()

    assert mill.column(job_id, "status") == ["cancelled"]
    assert mill.job(job_id).state == JobState.CANCELLED


# ---- what nobody foresaw


class Broken:
    """An embedder with a bug."""

    name = "broken"

    def embed(self, texts: Sequence[str], *, model: str, seconds: float) -> list[list[float]]:
        """Fail as no embedder should."""
        raise ZeroDivisionError(f"{texts} {model} {seconds}")

    def close(self) -> None:
        """Have nothing to close."""


def test_what_nobody_foresaw_is_charged_by_name_and_goes_on_upwards(mill: Mill) -> None:
    job_id = mill.submit("one", "two")

    with pytest.raises(ZeroDivisionError):
        mill.drain(job_id, embedder=Broken())

    assert mill.column(job_id, "status") == ["pending", "pending"]
    assert mill.column(job_id, "attempts") == [1, 1]
    assert mill.column(job_id, "error_class") == ["internal", "internal"]
    assert mill.column(job_id, "last_error") == ["ZeroDivisionError"] * 2
