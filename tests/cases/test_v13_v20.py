"""V13 to V20: a backend that fails, is slow, or is away; the times divided by a factor."""

from collections.abc import Callable, Generator, Iterator
from contextlib import ExitStack
from threading import Event

import pytest

from tests.cases.casework import Case, open_case
from tests.fakes import Call, Fake, Reply
from tests.faults import invariants

MARK = "MARK"
OUTAGE_SECONDS = 400.0
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


@pytest.mark.parametrize(
    ("status", "error"),
    [
        (500, "failed to encode response: json: unsupported value: NaN"),
        (400, "embedding contains NaN or Inf values"),
    ],
)
def test_v13_one_text_makes_the_model_answer_nan(
    open_one: OpenCase, status: int, error: str
) -> None:
    case = open_one()
    case.fake.when(Reply(status=status, error=error), marker=MARK)
    job_id = case.post(*numbered(19), MARK)

    case.mill.work(job_id)

    *others, culprit = case.door.items(job_id)
    assert len(case.fake.calls) <= 14
    assert {item["status"] for item in others} == {"done"}
    assert {item["attempts"] for item in others} == {1}
    assert (culprit["status"], culprit["attempts"]) == ("failed", 1)
    assert error in culprit["errors"][0]["message"]


def test_v14_429_with_retry_after(open_one: OpenCase) -> None:
    case = open_one(QUEUE_BATCH_SIZE="10")
    limits = case.fake.limits
    limits.calls_per_window, limits.window_seconds, limits.retry_after_seconds = 3, 1.0, 1
    with case.works():
        job_id = case.post(*numbered(60))
        case.wait_until_final(job_id)

    calls = case.fake.calls
    refused = [place for place, call in enumerate(calls) if call.status == 429]
    assert case.job(job_id)["counts"]["done"] == 60
    assert set(case.mill.column(job_id, "attempts")) == {1}
    assert refused, "void: nothing was refused"
    for place in refused:
        assert calls[place + 1].at_seconds - end_of(calls[place]) >= 1
    # A pause costs one call of one item, which tries whether it is over; all else stays together.
    assert [call.items for call in calls].count(1) <= len(refused)


def end_of(call: Call) -> float:
    assert call.ended_seconds
    return call.ended_seconds


def test_v15_503_while_busy_or_reloading(open_one: OpenCase) -> None:
    case = open_one()
    case.fake.when(Reply(status=503, error="server busy, please try again"))
    case.beat()
    job_id = case.post(*numbered(20))

    for _ in range(10):
        case.mill.drain(job_id)
        shown = case.job(job_id)
        assert shown["state"] in ("queued", "running")
        assert shown["waiting"]["reason"] == "backend_paused"
        assert "busy" in shown["waiting"]["detail"]
        assert shown["waiting"]["until"]
        case.mill.elapse(OUTAGE_SECONDS)
    case.fake.rules.clear()
    case.mill.work(job_id)

    assert case.job(job_id)["counts"]["done"] == 20
    assert set(case.mill.column(job_id, "attempts")) == {1}


def test_v16_the_first_call_takes_minutes(open_one: OpenCase) -> None:
    case = open_one(
        QUEUE_VISIBILITY_TIMEOUT="1", EMBEDDER_TIMEOUT_SECONDS="1", EMBEDDER_LOAD_SECONDS="30"
    )
    case.fake.when(Reply(delay_seconds=2.5), numbers=[1])
    with case.works(2):
        job_id = case.post(*numbered(10))
        case.wait_until_final(job_id)

    # Two workers may share the ten between them: what counts is that no text was sent again.
    assert sum(case.mill.sizes) == 10
    assert set(case.mill.column(job_id, "attempts")) == {1}
    assert case.job(job_id)["counts"]["done"] == 10


def test_v17_the_request_that_was_given_up_still_runs(
    shared_database_url: str, redis_url: str
) -> None:
    deadline = 1.0
    times = {"EMBEDDER_TIMEOUT_SECONDS": f"{deadline}", "EMBEDDER_LOAD_SECONDS": f"{deadline}"}
    with (
        Fake(lanes=1, seconds_per_item=8 / 64 / 5) as fake,
        open_case(shared_database_url, redis_url, fake, EMBEDDER_MAX_CALLS="1", **times) as case,
    ):
        with case.works(2):
            job_id = case.post(*numbered(128))
            case.wait_until_final(job_id)

        # A call is over for us when its answer came or its time was up, and not before.
        spans = [
            (each.at_seconds, min(end_of(each), each.at_seconds + 0.9 * deadline))
            for each in fake.calls
        ]
        for start, _ in spans:
            assert sum(begun <= start < ended for begun, ended in spans) == 1
        assert fake.worked_items <= 2.25 * 128
        assert case.job(job_id)["counts"]["done"] == 128
        assert set(case.mill.column(job_id, "attempts")) == {1}
        case.close()


def test_v18_connection_cut_inside_the_answer(
    database_url: str, redis_url: str, fake: Fake
) -> None:
    invariants.install(database_url)
    with open_case(database_url, redis_url, fake) as case:
        case.fake.when(Reply(cut=0.5), numbers=[1])
        case.fake.when(Reply(reset=0.5), numbers=[2])
        job_id = case.post(*numbered(10))

        case.mill.work(job_id)

        assert case.job(job_id)["counts"]["done"] == 10
        assert set(case.mill.column(job_id, "attempts")) == {1}
        assert len(case.mill.rows("SELECT item_id FROM audit.effects")) == 10
        case.close()


def test_v19_model_not_found(open_one: OpenCase) -> None:
    case = open_one()
    error = 'model "bge-m3:latest" not found, try pulling it first'
    case.fake.when(Reply(status=404, error=error))
    case.beat()
    job_id = case.post(*numbered(50))

    for _ in range(10):
        case.mill.drain(job_id)
        case.mill.elapse(OUTAGE_SECONDS)
    case.mill.drain(job_id)

    assert len(case.fake.calls) <= 11
    detail = case.job(job_id)["waiting"]["detail"]
    assert "bad_config" in detail
    assert error in detail
    assert {item["status"] for item in case.door.items(job_id)} == {"pending"}
    assert {item["error_class"] for item in case.door.items(job_id)} <= {None, "bad_config"}
    metrics = case.door.get("/metrics").body.decode()
    assert 'holdfast_backend_paused{backend="ollama",model="bge-m3:latest"} 1.0' in metrics
    case.fake.rules.clear()
    case.mill.work(job_id)


def test_v20_an_outage_longer_than_all_attempts(open_one: OpenCase) -> None:
    case = open_one()
    case.beat()
    job_id = case.post(*numbered(30))

    with case.fake.refused():
        for _ in range(20):
            case.mill.drain(job_id)
            case.mill.elapse(OUTAGE_SECONDS)
        counts = case.job(job_id)["counts"]
        assert (counts["pending"], counts["failed"]) == (30, 0)
        assert set(case.mill.column(job_id, "attempts")) == {0}
    case.mill.work(job_id)

    assert case.job(job_id)["counts"]["done"] == 30
    assert set(case.mill.column(job_id, "attempts")) == {1}


def test_v20_and_in_real_time_without_anybodys_help(open_one: OpenCase) -> None:
    case = open_one(QUEUE_MAX_RETRIES="1", SWEEP_SECONDS="0.05")
    is_back = Event()
    case.fake.rules.append(lambda _: None if is_back.is_set() else Reply(status=502, error="gone"))
    with case.works(2):
        job_id = case.post(*numbered(30))
        case.fake.wait_for(lambda fake: len(fake.calls) >= 3)
        is_back.set()
        case.wait_until_final(job_id)

    assert case.job(job_id)["counts"]["done"] == 30
    assert set(case.mill.column(job_id, "attempts")) == {1}
