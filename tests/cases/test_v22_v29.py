"""V22, V25 (its first half) and V29: what is stored, and when it counts as done."""

import os
import signal
from collections.abc import Iterator
from threading import Event

import pytest

from tests.cases.casework import Case, open_case
from tests.fakes import Fake, Reply, embedding, of_dimension
from tests.processes import StartProcess, wait_for


@pytest.fixture
def fake() -> Iterator[Fake]:
    with Fake() as fake:
        yield fake


@pytest.fixture
def case(database_url: str, redis_url: str, fake: Fake) -> Iterator[Case]:
    """Give a case, and check at its end what must hold after every case."""
    with open_case(database_url, redis_url, fake) as case:
        yield case
        case.close()


def numbered(number: int) -> list[str]:
    return [f"text {position}" for position in range(number)]


def test_v22_wrong_dimension_counted_as_success(case: Case) -> None:
    case.fake.when(Reply(bend=embedding(of_dimension(6))))
    case.beat()
    job_id = case.post(*numbered(12))

    for _ in range(6):
        case.mill.drain(job_id)
        case.mill.elapse(400)
    case.mill.drain(job_id)

    shown = case.job(job_id)
    assert shown["counts"]["done"] == 0
    assert shown["waiting"]["reason"] == "backend_paused"
    assert "6 dimensions where the target has 8" in shown["waiting"]["detail"]
    assert set(case.mill.vectors().values()) == {None}
    assert set(case.mill.column(job_id, "attempts")) == {0}
    case.fake.rules.clear()
    case.mill.work(job_id)


def test_v25_row_changed_or_deleted_while_its_text_was_embedded(case: Case) -> None:
    gate = Event()
    case.fake.when(Reply(until=gate), times=1)
    job_id = case.post("old", "gone", "c")

    with case.mill.draining(job_id):
        case.fake.wait_for(lambda fake: fake.calls)
        newer = case.post("new")
        case.mill.rows("DELETE FROM ai_insights WHERE id = 2")
        case.mill.drain(newer)  # ends before the call with the old text does
        gate.set()
    case.mill.work(job_id)

    [new, kept] = case.mill.right("new", "c")
    assert case.mill.vectors() == {1: new, 3: kept}
    counts = case.job(job_id)["counts"]
    assert (counts["total"], counts["done"], counts["skipped"]) == (3, 2, 1)
    lines = case.door.result(job_id)
    assert [line["outcome"] for line in lines] == ["superseded", "skipped", "done"]
    assert [item["skip_reason"] for item in case.door.items(job_id)] == [
        *(None, "content_not_found", None)
    ]


def test_v25_and_where_the_old_call_ends_first(case: Case) -> None:
    gate = Event()
    case.fake.when(Reply(until=gate), times=1)
    job_id = case.post("old")

    with case.mill.draining(job_id) as bell:
        case.fake.wait_for(lambda fake: fake.calls)
        newer = case.post("new")
        gate.set()
        assert bell.result() == {"lease_lost": 1}
    case.mill.work(newer)

    assert list(case.mill.vectors().values()) == case.mill.right("new")


def test_v29_success_recorded_before_the_work(
    case: Case, environ: dict[str, str], start_process: StartProcess
) -> None:
    case.fake.when(Reply(until=Event()), times=1)
    environ |= {"EMBEDDER_URL": case.fake.url, "QUEUE_WAIT_TIME": "1"}
    first = case.post(*numbered(10))
    worker = start_process("worker", "run", "embeddings")
    case.fake.wait_for(lambda fake: fake.calls)
    assert set(case.mill.column(first, "status")) == {"processing"}, "void: nothing was claimed"
    [horse] = wait_for(lambda: worker.children)

    os.kill(horse, signal.SIGKILL)
    wait_for(lambda: set(case.mill.column(first, "status")) == {"pending"}, 30)
    worker.kill()

    assert set(case.mill.vectors().values()) == {None}
    again = case.post(*numbered(10))
    assert case.mill.column(again, "attempts") == [1] * 10
    case.mill.work(first)

    for job_id in (first, again):
        assert case.job(job_id)["counts"]["done"] == 10
    assert case.mill.column(first, "attempts") == [2] * 10
    assert case.mill.column(first, "id") == case.mill.column(again, "id")
