"""V08 to V12: answers with status 200 that are wrong."""

from collections.abc import Callable, Generator, Iterator
from contextlib import ExitStack

import pytest

from tests import fakes
from tests.cases.casework import Case, open_case
from tests.fakes import Entry, Fake, Reply, embedding
from tests.faults import invariants

OpenCase = Callable[..., Case]


@pytest.fixture
def fake() -> Iterator[Fake]:
    with Fake() as fake:
        yield fake


@pytest.fixture
def open_one(shared_database_url: str, redis_url: str, fake: Fake) -> Generator[OpenCase]:
    """Open a case, and check at its end what must hold after every case."""
    opened: list[Case] = []
    with ExitStack() as stack:

        def open_one(**more: str) -> Case:
            case = stack.enter_context(open_case(shared_database_url, redis_url, fake, **more))
            opened.append(case)
            return case

        yield open_one
        for case in opened:
            case.close()


def numbered(number: int) -> list[str]:
    return [f"text {position}" for position in range(number)]


def test_v08_order_by_index(open_one: OpenCase) -> None:
    case = open_one(EMBEDDER="openai")
    case.fake.when(Reply(bend=fakes.backwards))
    job_id = case.post("a", "b", "c")

    case.mill.work(job_id)

    assert case.job(job_id)["state"] == "completed"
    assert list(case.mill.vectors().values()) == case.mill.right("a", "b", "c")


def one_too_few(entries: list[Entry]) -> list[Entry]:
    return fakes.without_index(fakes.missing(entries))


def test_v09_fewer_vectors_than_inputs(open_one: OpenCase) -> None:
    case = open_one(EMBEDDER="openai")
    case.fake.rules.append(lambda call: Reply(bend=one_too_few) if len(call.texts) > 1 else None)
    job_id = case.post(*numbered(10))

    case.mill.work(job_id)

    assert case.job(job_id)["counts"]["done"] == 10
    assert case.mill.sizes.count(1) >= 10
    assert set(case.mill.column(job_id, "attempts")) == {1}


def test_v09_and_where_it_persists_for_one_text(open_one: OpenCase) -> None:
    case = open_one(EMBEDDER="openai")
    case.fake.when(Reply(bend=one_too_few), marker="MARK")
    job_id = case.post(*numbered(9), "MARK")

    case.mill.work(job_id)

    counts = case.job(job_id)["counts"]
    assert (counts["done"], counts["failed"]) == (9, 1)
    [error] = case.job(job_id)["errors"]
    assert (error["error_class"], error["count"]) == ("bad_answer", 1)


def test_v10_empty_or_null_vectors(open_one: OpenCase) -> None:
    case = open_one()
    wrong = {"x": fakes.empty, "y": fakes.nulls, "z": fakes.strings}

    def bend(entries: list[Entry]) -> list[Entry]:
        for marker, make in wrong.items():
            entries = [
                embedding(make)([entry])[0] if entry.text == marker else entry for entry in entries
            ]
        return entries

    case.fake.when(Reply(bend=bend))
    job_id = case.post(*numbered(7), "x", "y", "z")

    case.mill.work(job_id)

    items = case.door.items(job_id)
    assert [item["status"] for item in items] == [*["done"] * 7, *["failed"] * 3]
    assert {item["error_class"] for item in items[7:]} == {"bad_answer"}
    assert [item["attempts"] for item in items[7:]] == [5, 5, 5]


def test_v11_vectors_of_zeros(open_one: OpenCase) -> None:
    case = open_one()
    case.fake.when(Reply(bend=embedding(fakes.zeros)))
    case.beat()
    job_id = case.post(*numbered(20))

    for _ in range(8):
        case.mill.drain(job_id)
        shown = case.job(job_id)
        assert shown["counts"]["pending"] == 20
        assert shown["waiting"]["reason"] == "backend_paused"
        assert "zero" in shown["waiting"]["detail"]
        case.mill.elapse(400)
    assert set(case.mill.column(job_id, "attempts")) == {0}

    case.fake.rules.clear()
    case.mill.work(job_id)

    assert case.job(job_id)["counts"]["done"] == 20


def test_v12_a_200_that_is_no_embedding_answer(
    database_url: str, redis_url: str, fake: Fake
) -> None:
    invariants.install(database_url)
    with open_case(database_url, redis_url, fake) as case:
        bodies = [b"<html><body>Please log in</body></html>", b"", b'{"error": "x"}']
        for number, body in enumerate(bodies, start=1):
            case.fake.when(Reply(body=body), numbers=range(2 * number - 1, 2 * number + 1))
        job_id = case.post("a", "b")

        kept = []
        while case.mill.job(job_id).counts.open:
            case.mill.drain(job_id)
            kept += [case.mill.backend().get("message"), *case.mill.column(job_id, "last_error")]
            case.mill.elapse(400)

        effects = "SELECT item_id FROM audit.effects"
        assert len(case.mill.rows(effects)) == 2
        assert case.job(job_id)["counts"]["done"] == 2
        assert any(kept)
        assert all(len(text) <= 300 and "<" not in text for text in kept if text)
        case.close()
