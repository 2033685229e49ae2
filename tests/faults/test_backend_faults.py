"""A backend that lies, hangs, refuses, goes away or is crashed by a text: it pays, no item does."""

import math
import os
import statistics
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import pytest

from app.core.errors import FailedItemsRemain
from tests.api import Answer
from tests.drains import Mill, open_mill
from tests.fakes import (
    OLLAMA,
    Bend,
    Call,
    Fake,
    Reply,
    Request,
    embedding,
    empty,
    missing,
    nans,
    nulls,
    of_dimension,
    ones,
    same_index,
    strings,
    zeros,
)
from tests.faults import invariants
from tests.faults.conftest import OpenStage
from tests.faults.stage import Stage, numbered, struck, wait_until_struck
from tests.faults.test_scenarios import without_ledger
from tests.faults.test_soak import GROWTH, api_processes, family_of, is_flat, memory_mb
from tests.processes import ROOT, StartApi, wait_for

NEVER = 3600.0
SHORT = {"EMBEDDER_TIMEOUT_SECONDS": "0.2", "EMBEDDER_LOAD_SECONDS": "0.2"}
OPENAI = {"EMBEDDER": "openai"}
LONG_TIME = 400.0
"""Seconds: longer than any pause."""


# ---- F20: every fault of a backend, one by one


@dataclass(frozen=True)
class Kind:
    """One way to be bad, and what the outage is then called."""

    reply: Reply
    error_class: str | None
    """None: there is no outage, work goes on in smaller calls or as it was."""
    settings: dict[str, str] = field(default_factory=dict)
    most_items: int = 0
    """A call with no more texts than that is answered rightly."""


@dataclass
class Badness:
    """A backend that is bad in one way, until it is over; counts how often."""

    kind: Kind
    times: int = 0

    def __call__(self, request: Request) -> Reply | None:
        if request.route != OLLAMA and self.kind.reply.status == 307:
            return None
        if len(request.texts) <= self.kind.most_items:
            return None
        self.times += 1
        return self.kind.reply


def bent(bend: Bend, **settings: str) -> Kind:
    """Return a kind of wrong answer with status 200."""
    return Kind(Reply(bend=bend), "bad_answer", settings)


def infinite(vector: list[float]) -> object:
    """Give a last element that no column can hold."""
    return [*vector[:-1], math.inf]


PAGE = b"<!doctype html><html><body>Sign in</body></html>"

KINDS = {
    # It does not answer, or not in time.
    "hang": Kind(Reply(delay_seconds=NEVER), "slow", SHORT),
    "hang_after_the_headers": Kind(Reply(stall=0.0), "slow", SHORT),
    "stall_in_the_body": Kind(Reply(stall=0.5), "slow", SHORT),
    "slow_drip": Kind(Reply(drip_seconds=0.1), "slow", SHORT),
    "slow_drip_of_the_headers": Kind(Reply(drip_seconds=0.1, drip_headers=True), "slow", SHORT),
    # The connection breaks.
    "reset": Kind(Reply(reset=0.0), "unreachable"),
    "reset_in_the_body": Kind(Reply(reset=0.5), "unreachable"),
    "cut_in_the_body": Kind(Reply(cut=0.5), "unreachable"),
    "hang_up": Kind(Reply(hang_up=True), "unreachable"),
    # It says that it cannot.
    "busy_429": Kind(Reply(status=429, error="x", headers={"Retry-After": "2"}), "busy"),
    "busy_503": Kind(Reply(status=503, error="loading"), "busy"),
    "broken_500": Kind(Reply(status=500, error="out of memory"), "unclear"),
    "away_502": Kind(Reply(status=502, body=PAGE), "unreachable"),
    "refused_400": Kind(Reply(status=400, error="invalid input type"), "bad_input"),
    # It is not set up as we think.
    "unauthorised_401": Kind(Reply(status=401, error="invalid key"), "bad_config"),
    "model_missing_404": Kind(Reply(status=404, error="model not found"), "bad_config"),
    "redirect_307": Kind(Reply(status=307, headers={"Location": "/v1/embeddings"}), "bad_config"),
    # It takes less in a call than it did.
    "size_413": Kind(Reply(status=413, error="payload too large"), None, most_items=3),
    "size_400": Kind(
        Reply(status=400, error="x", code="max_tokens_per_request"), None, OPENAI, most_items=3
    ),
    # It answers 200, and the answer is wrong.
    "wrong_count": bent(missing),
    "wrong_order": Kind(Reply(bend=same_index), None, OPENAI),
    "wrong_dimension": bent(embedding(of_dimension(6))),
    "nan": bent(embedding(nans)),
    "infinity": bent(embedding(infinite)),
    "zeros": bent(embedding(zeros)),
    "nulls": bent(embedding(nulls)),
    "strings": bent(embedding(strings)),
    "empty_vectors": bent(embedding(empty)),
    "all_the_same": bent(embedding(ones)),
    "all_the_same_by_index": bent(embedding(ones), **OPENAI),
    "no_content": Kind(Reply(status=204, body=b""), "unreachable"),
    "no_json": Kind(Reply(body=b"ok"), "unreachable"),
    "no_embeddings": Kind(Reply(body=b'{"error": "x"}'), "bad_answer"),
    "a_page": Kind(Reply(body=PAGE, headers={"Content-Type": "text/html"}), "unreachable"),
    "wrong_content_type": Kind(Reply(headers={"Content-Type": "text/plain"}), None),
}


EMPTY_AUDIT = "TRUNCATE audit.sent, audit.claims, audit.changes, audit.effects"


SHORTLY = {
    *("hang", "slow_drip", "reset", "cut_in_the_body", "a_page", "away_502", "busy_429"),
    *("unauthorised_401", "refused_400", "wrong_dimension", "zeros", "all_the_same"),
}
"""What the short run has of them: one of each sort."""


@pytest.fixture(scope="module")
def audited_url(shared_database_url: str) -> str:
    """Give one audited database to all kinds: they leave nothing to each other."""
    invariants.install(shared_database_url)
    return shared_database_url


@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=[pytest.mark.slow] * (name not in SHORTLY)) for name in KINDS],
)
def test_f20_a_backend_that_is_bad_for_a_while_costs_nobody_an_attempt(
    name: str,
    audited_url: str,
    redis_url: str,
    record_property: Callable[[str, object], None],
) -> None:
    kind = KINDS[name]
    with Fake() as fake, open_mill(audited_url, redis_url, fake, **kind.settings) as mill:
        mill.empty()
        mill.rows(EMPTY_AUDIT)
        bad = Badness(kind)
        fake.rules.append(bad)
        job_id = mill.submit(*numbered(20))
        for _ in range(3):
            mill.drain(job_id)
            mill.elapse(LONG_TIME)

        struck(bad.times, "the backend was never bad")
        if kind.error_class:
            assert mill.backend()["error_class"] == kind.error_class, mill.backend()
            assert set(mill.column(job_id, "attempts")) == {0}
            assert set(mill.vectors().values()) == {None}
        calls_while_bad = len(fake.calls)
        fake.rules.clear()
        mill.work(job_id)

        for figure, value in (
            ("error_class", kind.error_class),
            ("calls_while_bad", calls_while_bad),
            ("calls", len(fake.calls)),
        ):
            record_property(figure, value)
        assert mill.column(job_id, "status") == ["done"] * 20
        assert set(mill.column(job_id, "attempts")) == {1}
        assert list(mill.vectors().values()) == mill.right(*numbered(20))
        assert mill.rows("SELECT 1 FROM holdfast.incidents WHERE until IS NULL") == []
        assert len({call.route for call in fake.calls}) == 1, "a redirect was followed"
        assert without_ledger(audited_url) == {}


@pytest.mark.parametrize("drip_headers", [False, True])
def test_f20_an_answer_that_drips_is_left_at_the_deadline_of_the_whole_call(
    audited_url: str,
    redis_url: str,
    record_property: Callable[[str, object], None],
    drip_headers: bool,  # noqa: FBT001 - a parameter of the test
) -> None:
    with Fake() as fake, open_mill(audited_url, redis_url, fake, **SHORT) as mill:
        mill.empty()
        # Each byte comes well in time; all of them would take most of a minute.
        fake.when(Reply(drip_seconds=0.05, drip_headers=drip_headers))
        job_id = mill.submit(*numbered(4))
        mill.drain(job_id)

        struck(fake.calls, "it was not asked")
        fake.wait_for(lambda fake: all(call.was_given_up for call in fake.calls))
        record_property("calls", len(fake.calls))
        assert mill.backend()["error_class"] == "slow"
        assert set(mill.column(job_id, "attempts")) == {0}


@pytest.mark.slow
def test_f20_a_real_worker_outlasts_every_badness_in_turn(stage: Stage) -> None:
    kinds = {name: kind for name, kind in KINDS.items() if kind.settings != OPENAI}
    # What makes calls small for some minutes comes last: one text alone tells less.
    names = sorted(kinds, key=lambda name: (kinds[name].settings == SHORT, kinds[name].most_items))
    stage.start_sweeper()
    worker = stage.start_worker(
        EMBEDDER_TIMEOUT_SECONDS="1", EMBEDDER_LOAD_SECONDS="1", QUEUE_BATCH_SIZE="8"
    )
    for name in names:
        kind, bad = kinds[name], Badness(kinds[name])
        stage.fake.rules.append(bad)
        stage.post(*numbered(40, f"{name} text"))
        wait_until_struck(partial(getattr, bad, "times"), f"{name}: it was never bad")
        if kind.error_class:
            wait_for(partial(is_called, stage, kind.error_class), 30)
        stage.check_now()
        stage.fake.rules.clear()
        stage.wait_until_final()

    stage.record("kinds", len(names))
    assert worker.is_alive
    assert {row["attempts"] for row in stage.items()} == {1}
    stage.sent_again = len(names) * 64
    stage.check()


def is_called(stage: Stage, error_class: str) -> bool:
    """Whether one outage goes on, and how the API calls it."""
    listed = stage.door.get("/api/incidents").json["incidents"]
    return [each["error_class"] for each in listed if each["until"] is None] == [error_class]


# ---- F20: more calls than it takes

WINDOW_SECONDS, ADMITTED, RETRY_AFTER_SECONDS = 10.0, 3, 4
BATCH = 10


@pytest.mark.parametrize(
    ("batches", "times_as_fast"), [(6, 4), pytest.param(12, 1, marks=pytest.mark.slow)]
)
def test_f20_a_storm_of_429_costs_time_and_nothing_else(
    stage: Stage, batches: int, times_as_fast: int
) -> None:
    window = WINDOW_SECONDS / times_as_fast
    limits = stage.fake.limits
    limits.calls_per_window, limits.window_seconds = ADMITTED, window
    limits.retry_after_seconds = RETRY_AFTER_SECONDS // times_as_fast
    stage.start_sweeper()
    stage.start_worker(QUEUE_BATCH_SIZE=str(BATCH))
    began = time.monotonic()
    stage.post(*numbered(BATCH * batches))

    wait_for(lambda: stage.are_final, 300)

    calls = stage.fake.calls
    refused = [place for place, call in enumerate(calls) if call.status == 429]
    admitted = [call.items for call in calls if call.status == 200]
    struck(refused, "nothing was refused")
    stage.record("seconds", round(time.monotonic() - began, 1))
    stage.record("ideal_seconds", (math.ceil(batches / ADMITTED) - 1) * window)
    stage.record("admitted_sizes", admitted)
    stage.record("refused_sizes", [calls[place].items for place in refused])
    for place in refused:
        assert calls[place + 1].at_seconds - ended(calls[place]) >= limits.retry_after_seconds
    assert {row["attempts"] for row in stage.items()} == {1}
    # One text tries whether it is over; all else stays together.
    assert {size for size in admitted[:-1] if size > 1} == {BATCH}
    # In each window one batch finds out that it is full, and some tries that it still is.
    windows = math.ceil(len(admitted) / ADMITTED)
    tries = math.ceil(window / limits.retry_after_seconds)
    assert len(refused) <= windows * (1 + tries)
    stage.sent_again = windows * (BATCH + tries)
    stage.check()


def ended(call: Call) -> float:
    """Return when a call was answered."""
    assert call.ended_seconds
    return call.ended_seconds


# ---- F20: ten minutes of nothing

OUTAGE_SECONDS = float(os.environ.get("HOLDFAST_OUTAGE_SECONDS", "10"))  # noqa: TID251 - of the test alone
"""How long ten minutes take here: the longest pause is as much shorter. 600: as in life."""

MOST_PAUSE_SECONDS = OUTAGE_SECONDS / 10
BRISK = f"from worker import calls; calls.PAUSE_CAP_SECONDS = {MOST_PAUSE_SECONDS}"


@pytest.fixture
def _brisk(environ: dict[str, str], tmp_path: Path) -> None:
    """Let pauses be as much shorter as the outage is."""
    (tmp_path / "sitecustomize.py").write_text(BRISK)
    environ["PYTHONPATH"] = f"{tmp_path}:{ROOT}"


@pytest.mark.usefixtures("_brisk")
@pytest.mark.parametrize(
    "sizes",
    [(840, 400), pytest.param((8400, 4000), marks=pytest.mark.slow)],
    ids=["of_1240", "of_12400"],
)
def test_f20_an_outage_is_one_incident_that_says_what_waits_and_loses_nothing(
    stage: Stage, sizes: tuple[int, int]
) -> None:
    stage.start_sweeper()
    stage.start_workers(2)
    stage.fake.refuse()
    jobs = [stage.post(*numbered(size, f"one of {size}")) for size in sizes]
    began = time.monotonic()
    incident = wait_until_struck(lambda: waiting_for_all(stage, sum(sizes)), "no incident")

    said = [wait_for(partial(outage_of, stage, job), 30) for job in jobs]
    wait_for(lambda: tries(stage) >= 4 and is_over(stage, began, sizes), OUTAGE_SECONDS + 60)
    tried, lasted = tries(stage), time.monotonic() - began
    shown = stage.door.get("/api/incidents").json["incidents"]
    assert stage.fake.calls == []
    stage.fake.accept()
    stage.end_fault()
    stage.wait_until_final()

    stage.record("incident", incident)
    stage.record("said", said[0])
    stage.record("outage_seconds", round(lasted, 1))
    stage.record("tries", tried)
    for size, text in zip(sizes, said, strict=True):
        assert f"{size:,} items of this job wait, 0 lost" in text
    assert [(each["until"], each["since"]) for each in shown] == [(None, incident["since"])]
    # Two workers find out, then one tries at a time, no sooner than after a tenth of a pause.
    assert tried <= 2 + lasted / (MOST_PAUSE_SECONDS / 10)
    [closed] = stage.door.get("/api/incidents").json["incidents"]
    assert closed["since"] == incident["since"]
    assert closed["until"]
    assert (closed["items_waiting"], closed["items_lost"]) == (0, 0)
    assert stage.statuses == {"done": sum(sizes)}
    assert {row["attempts"] for row in stage.items()} == {1}
    stage.check()


def waiting_for_all(stage: Stage, number: int) -> dict[str, Any]:
    """Return the incident once it names all items; there is never more than one."""
    listed = stage.door.get("/api/incidents").json["incidents"]
    assert len(listed) <= 1
    return listed[0] if listed and listed[0]["items_waiting"] == number else {}


def outage_of(stage: Stage, job_id: str) -> str:
    """Return what a job says of the outage; nothing while one of its items is tried."""
    waiting = stage.door.job(job_id)["waiting"]
    return waiting["detail"] if waiting and waiting["reason"] == "backend_paused" else ""


def tries(stage: Stage) -> int:
    """Return how often the backend was tried in vain."""
    return int(stage.one("SELECT coalesce(max(tries), 0) FROM holdfast.backends"))


def is_over(stage: Stage, began: float, sizes: tuple[int, int]) -> bool:
    """Whether the outage has lasted: where there are few items, only as long as is needed."""
    assert waiting_for_all(stage, sum(sizes))
    return sum(sizes) < 10_000 or time.monotonic() - began >= OUTAGE_SECONDS


# ---- F20: a text that crashes the backend

MARK = "MARK"
DOWN_SECONDS = 0.3


class Crashing:
    """A backend that some texts end: it is gone with all that it had in hand, for a moment."""

    def __init__(self, fake: Fake, marker: str, *, comes_back: bool = False) -> None:
        self.fake = fake
        self.marker = marker
        self.comes_back = comes_back
        self.calls: list[int] = []
        self.is_down = False
        self.restarts: list[threading.Timer] = []
        fake.rules.append(self)

    def __call__(self, request: Request) -> Reply | None:
        if not request.has(self.marker):
            return None
        self.calls.append(len(request.texts))
        self.is_down = True
        self.fake.refuse()
        if self.comes_back:
            self.restarts.append(threading.Timer(DOWN_SECONDS, self.restart))
            self.restarts[-1].start()
        return Reply(reset=0.0)

    def restart(self) -> None:
        """Bring it up again."""
        if self.is_down:
            self.is_down = False
            self.fake.accept()

    def wait(self) -> None:
        """Wait until it is up again by itself."""
        for each in self.restarts:
            each.join()


def with_one_that_crashes(number: int) -> list[str]:
    """Return different texts, one of which no backend survives."""
    texts = numbered(number)
    texts[number // 2] = f"a text with {MARK} in it"
    return texts


def test_f20_a_text_that_crashes_the_backend_is_found_and_fails_alone(
    audited_url: str, redis_url: str, record_property: Callable[[str, object], None]
) -> None:
    with Fake() as fake, open_mill(audited_url, redis_url, fake) as mill:
        mill.empty()
        mill.rows(EMPTY_AUDIT)
        crashing = Crashing(fake, MARK)
        texts = with_one_that_crashes(200)
        job_id = mill.submit(*texts)
        work_through_crashes(mill, job_id, crashing)

        struck(crashing.calls, "the backend was never crashed")
        record_property("calls_with_the_text", crashing.calls)
        record_property("calls", len(fake.calls))
        failed = mill.items(job_id)[100]
        record_property("error", failed["last_error"])
        others = [row for row in mill.items(job_id) if row["id"] != failed["id"]]
        assert {row["status"] for row in others} == {"done"}
        assert {row["attempts"] for row in others} == {1}
        assert (failed["status"], failed["attempts"]) == ("failed", 5)
        assert "the backend was away afterwards" in failed["last_error"]
        assert crashing.calls == [64, 1, 1, 1, 1, 1]
        # Four slices, the 63 innocents one by one, and for each crash at most a try of the backend,
        # a harmless text and the culprit.
        assert len(fake.calls) <= 4 + 63 + 3 * 6
        assert without_ledger(audited_url) == {}


def test_f20_a_backend_that_any_text_crashes_blames_none(
    audited_url: str, redis_url: str, record_property: Callable[[str, object], None]
) -> None:
    with Fake() as fake, open_mill(audited_url, redis_url, fake) as mill:
        mill.empty()
        mill.rows(EMPTY_AUDIT)
        crashing = Crashing(fake, "")
        job_id = mill.submit(*numbered(20))
        for _ in range(10):
            mill.drain(job_id)
            crashing.restart()
            mill.elapse(LONG_TIME)
        assert set(mill.column(job_id, "attempts")) == {0}
        fake.rules.clear()
        mill.work(job_id)

        record_property("crashes", len(crashing.calls))
        struck(len(crashing.calls) == 10, "it was not crashed at each try")
        assert mill.column(job_id, "status") == ["done"] * 20
        assert set(mill.column(job_id, "attempts")) == {1}
        assert without_ledger(audited_url) == {}


def work_through_crashes(mill: Mill, job_id: str, crashing: Crashing) -> None:
    """Follow bells until a job is final; the backend is up again whenever one begins."""
    for _ in range(40):
        with suppress(FailedItemsRemain):
            mill.drain(job_id)
        crashing.restart()
        mill.sweep()
        if mill.job(job_id).state.is_final:
            return
        mill.elapse(LONG_TIME)
    pytest.fail(f"it is not final: {mill.job(job_id).counts}")


@pytest.mark.slow
def test_f20_a_text_that_crashes_the_backend_among_a_thousand(stage: Stage) -> None:
    crashing = Crashing(stage.fake, MARK, comes_back=True)
    stage.start_sweeper()
    stage.start_workers(2)
    job_id = stage.post(*with_one_that_crashes(1000))

    stage.wait_until_final()
    crashing.wait()

    struck(crashing.calls, "the backend was never crashed")
    stage.record("calls_with_the_text", crashing.calls)
    assert stage.statuses == {"done": 999, "failed": 1}
    assert {row["attempts"] for row in stage.items() if row["status"] == "done"} == {1}
    [failed] = stage.door.items(job_id, "?status=failed")
    stage.record("error", failed["errors"][-1]["message"])
    assert "the backend was away afterwards" in failed["errors"][-1]["message"]
    assert len(crashing.calls) <= 2 * (1 + 5)
    # At each crash what two workers had in hand: once more as it was, and then one by one.
    stage.strikes = 2 * 2 * len(crashing.calls)
    stage.check()


# ---- F21: a backend that is slower than what comes

MOST_OPEN = 1000
OFFERED = 5
"""Times what is done."""

OFFERS = 150
AHEAD = 20


@pytest.mark.slow
def test_f21_five_times_the_load_is_refused_by_name_and_fills_no_memory(
    start_api: StartApi, open_stage: OpenStage
) -> None:
    url = start_api(QUEUE_MAX_PER_CLIENT=str(MOST_OPEN))
    with httpx.Client(base_url=url, trust_env=False, timeout=30) as client:
        stage = open_stage(client)
        stage.fake.seconds_per_item = 0.004
        stage.start_sweeper()
        worker = stage.start_worker()
        refusals: list[Answer] = []
        memory: dict[str, list[float]] = {"api": [], "worker": []}
        for offer in range(OFFERS):
            wait_for(partial(may_offer, stage, offer), 60)
            answer = stage.send(stage.new_rows(*long_texts(offer)))
            if answer.status != 202:
                refusals.append(answer)
            memory["api"].append(memory_mb(api_processes()))
            memory["worker"].append(memory_mb(list(family_of(worker.pid))))
        stage.wait_until_final()

    struck(refusals, "nothing was refused")
    stage.record("offered", OFFERS)
    stage.record("refused", len(refusals))
    for name, values in memory.items():
        stage.record(f"{name}_mb_start_middle_end", thirds(values))
        assert is_flat(values, GROWTH, SPARE_MB), (name, values)
    for answer in refusals:
        assert (answer.status, answer.code) == (429, "too_many_queued")
        assert int(answer.headers["retry-after"]) > 0
        assert f"open_items_per_client = {MOST_OPEN}" in answer.json["detail"]
    assert stage.statuses == {"done": (OFFERS - len(refusals)) * 100}
    assert {row["attempts"] for row in stage.items()} == {1}
    stage.check()


SPARE_MB = 4.0


def may_offer(stage: Stage, offer: int) -> bool:
    """Whether five times of what is done were offered, but for what fills the queue at first."""
    return stage.done * OFFERED >= (offer - AHEAD) * 100


def long_texts(offer: int) -> list[str]:
    """Return a hundred texts of two kilobytes."""
    return [f"offer {offer} text {number} {'word ' * 400}" for number in range(100)]


def thirds(values: list[float]) -> list[float]:
    """Return the medians of the first, middle and last third."""
    size = len(values) // 3
    return [statistics.median(values[at : at + size]) for at in (0, size, 2 * size)]
