"""What only a fence, a count at the claim, one transaction or one clock keeps whole."""

import os
import signal
from datetime import datetime
from threading import Event

import psycopg
import pytest

from tests.api import Door, item
from tests.fakes import Reply
from tests.faults.proxy import Moment, Wire
from tests.faults.stage import QUEUE, Stage, bell_of, events, numbered, state_of, struck
from tests.faults.stage import wait_until_struck as wait_until
from tests.processes import Running, wait_for

HELD = "SELECT count(*) FROM public.embedding_retry_queue WHERE lease_until > now()"
SETTLE = "SET status = CASE WHEN o.status = 'pending' AND holdfast.owner_of"
HOURS = 3600


# ---- F4: the token


@pytest.mark.slow
def test_f4_a_worker_that_wakes_while_another_has_its_items_with_new_texts_changes_nothing(
    stage: Stage,
) -> None:
    first_gate, second_gate = Event(), Event()
    for gate in (first_gate, second_gate):
        stage.fake.when(Reply(until=gate), times=1)
    stopped = stage.start_worker(QUEUE_VISIBILITY_TIMEOUT="600")
    stage.post(*numbered(60, "old text"))
    struck(wait_for(lambda: stage.fake.calls and stage.one(HELD) == 60, 30), "no live lease")
    [horse] = stopped.children
    for pid in (horse, stopped.pid):
        os.kill(pid, signal.SIGSTOP)
    calls = len(stage.fake.calls)

    ids = list(stage.texts)
    stage.texts |= {number: f"new text {number}" for number in ids}
    stage.send(ids)
    stage.start_worker(QUEUE_VISIBILITY_TIMEOUT="600")
    wait_until(lambda: len(stage.fake.calls) > calls and stage.one(HELD) == 60, "nobody else came")
    first_gate.set()
    for pid in (stopped.pid, horse):
        os.kill(pid, signal.SIGCONT)
    ends = wait_for(lambda: [e for e in events(stopped.log) if e.get("event") == "bell_end"], 30)
    stage.check_now()
    second_gate.set()
    stage.start_sweeper()
    stage.wait_until_final()

    stage.check()
    assert ends[0]["counts"] == {"lease_lost": 60}


# ---- F6: attempts are counted at the claim, and a text that kills is left alone


@pytest.mark.slow
def test_f6_a_text_that_kills_its_horse_each_time_fails_at_the_limit_and_takes_no_neighbour(
    stage: Stage,
) -> None:
    stage.fake.when(Reply(until=Event()), marker="poison")
    stage.start_sweeper()
    worker = stage.start_worker(QUEUE_MAX_RETRIES="3", QUEUE_BATCH_SIZE="8")
    stage.post("poison", *numbered(15))

    while waits_again(stage) and stage.kills < 6:
        [horse] = worker.children
        os.kill(horse, signal.SIGKILL)
        stage.kills += 1
        stage.strikes += 1
    struck(stage.kills, "nobody was killed")

    assert stage.kills == 3
    stage.wait_until_final()
    assert stage.statuses == {"done": 15, "failed": 1}
    attempts = {row["text_content"]: row["attempts"] for row in stage.items()}
    assert attempts.pop("poison") == 3
    assert set(attempts.values()) == {1, 2}
    stage.check()


def waits_again(stage: Stage) -> bool:
    """Wait until the poison is in a horse's hands once more; False where all is over."""
    arrived = stage.fake.arrivals["poison"]
    wait_for(lambda: stage.are_final or len(arrived) > stage.kills, 30)
    return not stage.are_final


# ---- F15: nothing is said before the COMMIT is heard


def test_f15_a_batch_whose_commit_never_arrived_is_not_accepted(
    wire: Wire, wired_door: Door, database_url: str
) -> None:
    wire.stop("INSERT INTO holdfast.jobs", Moment.BEFORE_COMMIT, is_cut=True)
    first = wired_door.post([item(1, "one")])
    struck(wire.cut == 1, "nothing was cut")
    second = wired_door.post([item(1, "one")])

    assert (first.status, second.status) == (503, 202)
    with psycopg.connect(database_url) as connection:
        assert connection.execute("SELECT id FROM holdfast.jobs").fetchall() == [(second.job_id,)]


# ---- an effect and its `done` are one


@pytest.mark.parametrize(
    ("words", "moment"),
    [
        (SETTLE, Moment.BEFORE),
        pytest.param(SETTLE, Moment.BEFORE_COMMIT, marks=pytest.mark.slow),
        pytest.param(SETTLE, Moment.AFTER_COMMIT, marks=pytest.mark.slow),
    ],
    ids=["before the settle", "before its commit", "after its commit"],
)
def test_f2_a_horse_that_is_killed_in_a_settle_leaves_all_of_it_or_nothing(
    stage: Stage, words: str, moment: Moment
) -> None:
    with Wire(stage.environ["DATABASE_URL"]) as wire:
        stage.start_sweeper()
        worker = stage.start_worker(DATABASE_URL=wire.url)
        stop = wire.stop(words, moment)
        stage.post(*numbered(60))
        stop.wait()
        [horse] = struck(worker.children, "nobody works")
        stage.check_now()

        os.kill(horse, signal.SIGKILL)
        stage.kills += 1
        stage.strikes += 1
        stage.end_fault()
        wait_for(lambda: state_of(horse) == "", 30)
        stage.check_now()
        stage.wait_until_final()

    attempts = 1 if moment.is_after else 2
    assert {row["attempts"] for row in stage.items()} == {attempts}
    assert stage.statuses == {"done": 60}
    stage.check()


# ---- F23: one clock


@pytest.mark.slow
def test_f23_hosts_whose_clocks_are_hours_apart_move_no_lease_and_no_back_off(
    stage: Stage,
) -> None:
    stage.fake.seconds_per_item = 0.002
    stage.fake.when(Reply(status=500, error="it broke"), marker="hard", times=11)
    start_shifted(stage, -HOURS, "sweep")
    workers = [start_shifted(stage, 2 * HOURS, "run", QUEUE)]
    stage.post(*numbered(300), "a hard text")
    # Whoever is ahead has set a time for its next try before anybody else could.
    tried = "SELECT 1 FROM holdfast.item_attempts"
    wait_until(lambda: stage.rows(tried), "it was not to be tried again")
    workers.append(start_shifted(stage, -2 * HOURS, "run", QUEUE))
    stage.post(*numbered(300, "more"))

    stage.wait_until_final()
    struck(all(map(bell_of, workers)), "one of them had nothing to do")

    attempts = {row["text_content"]: row["attempts"] for row in stage.items()}
    assert stage.statuses == {"done": 601}
    assert attempts.pop("a hard text") > 1
    assert set(attempts.values()) == {1}
    stage.sent_again = 64 * 11
    stage.check()


def start_shifted(stage: Stage, seconds: int, *arguments: str) -> Running:
    """Start a process of ours on a host whose clock is wrong, and wait until it lives."""
    process = stage.start_process("tests.shifted", str(seconds), "worker", *arguments)
    alive = "SELECT 1 FROM holdfast.processes WHERE pid = %s AND alive_until > now()"
    wait_for(lambda: not process.is_alive or stage.rows(alive, process.pid), 60)
    assert process.is_alive, process.said
    first = datetime.fromisoformat(events(process.log)[0]["ts"])
    off = (first - stage.one("SELECT now()")).total_seconds()
    struck(abs(off - seconds) < HOURS / 2, "its clock is right")
    return process
