"""A backend that is too busy, away for long, or brought down by one text: counted, and drained."""

import os
import threading
import time
from collections import Counter
from typing import Any

import pytest

from tests.fakes import Fake, Reply, Request
from tests.faults.stage import Stage, numbered, struck, wait_until_struck
from tests.processes import wait_for

OUTAGE_SECONDS = float(os.environ.get("HOLDFAST_OUTAGE_SECONDS", "600"))  # noqa: TID251 - of the test alone
ITEMS = 12_400
BATCH = 64


def incidents(stage: Stage) -> list[dict[str, Any]]:
    """Return the outages as an admin sees them."""
    found: list[dict[str, Any]] = stage.door.get("/api/incidents").json["incidents"]
    return found


# ---- too many requests


def storm(stage: Stage, *, window_seconds: float, retry_after_seconds: int, batches: int) -> None:
    """Let a backend admit three calls in each window while as many batches wait for it."""
    limits = stage.fake.limits
    limits.calls_per_window, limits.window_seconds = 3, window_seconds
    limits.retry_after_seconds = retry_after_seconds
    stage.start_sweeper()
    stage.start_workers(2)
    began = time.monotonic()
    stage.post(*numbered(batches * BATCH))
    stage.wait_until_final(window_seconds * batches)

    calls = Counter(call.status for call in stage.fake.calls)
    admitted = [call.items for call in stage.fake.calls if call.status == 200]
    struck(calls[429], "nothing was refused")
    stage.record("ideal_seconds", window_seconds * ((batches - 1) // 3))
    stage.record("seconds", round(time.monotonic() - began, 1))
    stage.record("answers", dict(calls))
    stage.record("batches", dict(Counter(admitted)))
    assert stage.statuses == {"done": batches * BATCH}
    assert {row["attempts"] for row in stage.items()} == {1}
    # A refused call is sent again whole; what is tried after a pause is one item.
    windows = calls[429] + 1
    assert len([size for size in admitted if size < BATCH // 2]) <= 2 * windows, admitted
    stage.sent_again = sum(call.items for call in stage.fake.calls if call.status == 429)
    stage.check()


def test_f20_a_storm_of_429_costs_no_attempt_and_splits_no_batch(stage: Stage) -> None:
    storm(stage, window_seconds=2.5, retry_after_seconds=1, batches=9)


@pytest.mark.slow
def test_f20_a_storm_of_429_at_three_calls_in_ten_seconds(stage: Stage) -> None:
    storm(stage, window_seconds=10, retry_after_seconds=4, batches=30)


# ---- away


def outage(stage: Stage, *, least_tries: int, least_seconds: float) -> None:
    """Take the backend away while 12,400 items wait for it, and give it back."""
    stage.start_sweeper()
    stage.start_workers(2)
    fake = stage.fake
    fake.refuse()
    began = time.monotonic()
    jobs = [stage.post(*numbered(ITEMS // 2, name)) for name in ("a", "b")]
    tries = "SELECT coalesce(max(tries), 0) FROM holdfast.backends"
    wait_until_struck(lambda: stage.one(tries) >= least_tries, "it was not tried", 120)
    wait_for(lambda: time.monotonic() >= began + least_seconds, least_seconds + 1)

    [incident] = wait_for(lambda: [each for each in incidents(stage) if no_one_works(stage)])
    assert (incident["error_class"], incident["until"]) == ("unreachable", None)
    assert (incident["items_waiting"], incident["items_lost"]) == (ITEMS, 0)
    for job in jobs:
        waiting = stage.door.job(job)["waiting"]
        assert waiting["reason"] == "backend_paused"
        assert f"{ITEMS // 2:,} items of this job wait, 0 lost" in waiting["detail"]
    assert not fake.calls
    stage.record("tries_while_away", stage.one(tries))
    stage.record("away_seconds", round(time.monotonic() - began, 1))
    stage.check_now()

    fake.accept()
    stage.end_fault()
    stage.wait_until_final()
    [incident] = incidents(stage)
    assert incident["until"] is not None
    assert incident["items_waiting"] == 0
    assert stage.statuses == {"done": ITEMS}
    assert {row["attempts"] for row in stage.items()} == {1}
    stage.check()


def no_one_works(stage: Stage) -> bool:
    """Whether nobody holds an item, so that all of them wait."""
    query = "SELECT count(*) FROM public.embedding_retry_queue WHERE status = 'processing'"
    return bool(stage.one(query) == 0)


def test_f20_an_outage_is_one_incident_and_what_waits_is_done_by_itself(stage: Stage) -> None:
    outage(stage, least_tries=4, least_seconds=0)


@pytest.mark.slow
def test_f20_an_outage_of_ten_minutes_fails_nothing(stage: Stage) -> None:
    outage(stage, least_tries=4, least_seconds=OUTAGE_SECONDS)


# ---- brought down by one text


class Crashing:
    """A backend that one text ends each time, and that somebody starts again a moment later."""

    def __init__(self, fake: Fake, poison: str, restart_seconds: float) -> None:
        self.crashes = 0
        self._fake, self._poison, self._restart_seconds = fake, poison, restart_seconds
        fake.rules.append(self._rule)

    def _rule(self, request: Request) -> Reply | None:
        if self._poison not in request.texts:
            return None
        self.crashes += 1
        threading.Thread(target=self._crash).start()
        return Reply(hang_up=True)

    def _crash(self) -> None:
        self._fake.refuse()
        threading.Event().wait(self._restart_seconds)
        self._fake.accept()


@pytest.mark.parametrize("restart_seconds", [0.0, 1.0])
def test_f20_a_text_that_brings_the_backend_down_each_time_fails_alone(
    stage: Stage, restart_seconds: float
) -> None:
    texts = numbered(1000)
    crashing = Crashing(stage.fake, texts[500], restart_seconds)
    stage.start_sweeper()
    stage.start_workers(2)
    stage.post(*texts)

    stage.wait_until_final()

    struck(crashing.crashes, "the text was never sent")
    stage.record("crashes", crashing.crashes)
    stage.record("requests", len(stage.fake.calls))
    assert stage.statuses == {"done": 999, "failed": 1}
    [failed] = [row for row in stage.items() if row["status"] == "failed"]
    assert failed["text_content"] == texts[500]
    assert failed["attempts"] == failed["max_attempts"]
    assert max(row["attempts"] for row in stage.items() if row["status"] == "done") <= 2
    stage.sent_again = crashing.crashes * BATCH
    stage.check()
