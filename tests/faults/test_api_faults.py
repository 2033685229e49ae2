"""What clients and operators do at a bad moment: leave, click twice, requeue and read what goes."""

import json
import socket
import struct
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from threading import Barrier, Event
from typing import Any

import httpx
import pytest
import redis

from app.core.errors import FailedItemsRemain
from tests import rows
from tests.api import Answer, Door, item
from tests.cases.casework import Case, open_case
from tests.fakes import Fake, Reply
from tests.faults import invariants
from tests.faults.stage import QUEUE, Stage, events, numbered, struck, wait_until_struck
from tests.faults.test_scenarios import without_ledger
from tests.processes import ROOT, StartProcess, wait_for
from worker.sweep import cleanup

BUTTON = {"X-Requested-With": "XMLHttpRequest"}
REFUSED = "refuse this"
REFUSAL = Reply(status=400, error="the input length exceeds the context length")

Record = Callable[[str, object], None]


# ---- F22: who leaves, and who comes twice


def send_and_leave(stage: Stage, ids: Sequence[int], key: str) -> None:
    """Send a whole batch, and break the connection before anything can have been answered."""
    url = stage.door.http.base_url
    body = json.dumps({"items": [item(number, stage.texts[number]) for number in ids]}).encode()
    head = [
        "POST /api/embeddings HTTP/1.1",
        f"Host: {url.netloc.decode()}",
        "Content-Type: application/json",
        f"Content-Length: {len(body)}",
        f"Idempotency-Key: {key}",
    ]
    stage.ledger.note(ids)
    with socket.create_connection((url.host, url.port or 0)) as link:
        link.sendall("\r\n".join([*head, "", ""]).encode() + body)
        link.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))


def jobs_of(stage: Stage) -> int:
    """Return how many jobs there are."""
    return int(stage.one("SELECT count(*) FROM holdfast.jobs"))


def send_at_last(stage: Stage, ids: Sequence[int], key: str) -> Answer:
    """Send a batch under its key until it is no longer being stored."""

    def sent() -> Answer | None:
        answer = stage.send(ids, key)
        return None if answer.status == httpx.codes.CONFLICT else answer

    found = wait_for(sent, 30)
    assert found
    assert found.status == httpx.codes.ACCEPTED, found.body
    return found


@pytest.mark.slow
def test_f22_clients_that_leave_before_their_answer_have_sent_their_batches_once(
    served_stage: Stage,
) -> None:
    stage = served_stage
    batches = {f"key {number}": stage.new_rows(*numbered(20, f"{number}")) for number in range(20)}
    for key, ids in batches.items():
        send_and_leave(stage, ids, key)
    stored = wait_until_struck(lambda: jobs_of(stage), "no batch was stored before its client left")

    answers = {key: send_at_last(stage, ids, key) for key, ids in batches.items()}
    again = {key: send_at_last(stage, ids, key) for key, ids in batches.items()}
    stage.start_sweeper()
    stage.start_worker()
    stage.wait_until_final()

    stage.record("stored_before_anybody_asked_again", stored)
    assert {key: each.body for key, each in answers.items()} == {
        key: each.body for key, each in again.items()
    }
    assert jobs_of(stage) == len({each.job_id for each in answers.values()}) == len(batches)
    assert all(
        (each.json["accepted"], each.json["duplicates"]) == (20, 0) for each in answers.values()
    )
    assert stage.statuses == {"done": 400}
    stage.check()


def at_once(stage: Stage, ids: Sequence[int], key: str | None, times: int) -> list[Answer]:
    """Send a batch from many threads in the same moment, each until it is answered for good."""
    start = Barrier(times)
    batch = [item(number, stage.texts[number]) for number in ids]
    headers = {"Idempotency-Key": key} if key else None
    stage.ledger.note(ids)

    def send(_: int) -> Answer:
        # A client for each: one pool of many threads closes the wrong socket.
        with httpx.Client(base_url=stage.door.http.base_url, trust_env=False, timeout=60) as http:
            door = Door(http, None)
            start.wait()

            def answered() -> Answer | None:
                answer = door.post(batch, headers=headers)
                if answer.status == httpx.codes.CONFLICT:
                    assert answer.code == "idempotency_in_progress"
                    assert int(answer.headers["retry-after"]) > 0
                    return None
                return answer

            found = wait_for(answered, 60)
            assert found
            return found

    with ThreadPoolExecutor(times) as pool:
        answers = list(pool.map(send, range(times)))
    assert {answer.status for answer in answers} == {httpx.codes.ACCEPTED}
    for job_id in {answer.job_id for answer in answers}:
        stage.ledger.note(ids, job_id)
        stage.job_ids.append(job_id)
    return answers


def test_f22_a_double_click_is_embedded_once(served_stage: Stage) -> None:
    stage = served_stage
    ids = stage.new_rows(*numbered(100))
    one, other = at_once(stage, ids, None, 2)
    with_key = at_once(stage, stage.new_rows(*numbered(100, "with a key")), "the click", 2)
    stage.start_sweeper()
    stage.start_worker()
    stage.wait_until_final()

    struck(one.job_id != other.job_id, "it was no second batch")
    assert sorted(each.json["accepted"] for each in (one, other)) == [0, 100]
    assert sorted(each.json["duplicates"] for each in (one, other)) == [0, 100]
    assert len({each.body for each in with_key}) == 1
    for job_id in stage.job_ids:
        assert stage.door.job(job_id)["counts"]["done"] == 100
    assert stage.statuses == {"done": 200}
    stage.check()


@pytest.mark.slow  # a short form of it is among the tests of POST
def test_f22_fifty_at_once_with_one_key_are_one_job(served_stage: Stage) -> None:
    stage = served_stage
    ids = stage.new_rows(*numbered(100))
    answers = at_once(stage, ids, "one key", 50)
    other = stage.door.post([item(ids[0], "another body")], headers={"Idempotency-Key": "one key"})
    stage.start_sweeper()
    stage.start_worker()
    stage.wait_until_final()

    stage.record("posts", len(answers))
    assert len({each.body for each in answers}) == 1
    assert jobs_of(stage) == 1
    assert (other.status, other.code) == (422, "idempotency_key_reused")
    query = "SELECT count(*) FROM holdfast.job_items WHERE job_id = %s"
    assert stage.one(query, answers[0].job_id) == 100
    assert stage.statuses == {"done": 100}
    stage.check()


# ---- F25: requeues


@pytest.fixture
def case(database_url: str, redis_url: str) -> Iterator[Case]:
    """Give the API and a worker's flow in this process, with an audit."""
    invariants.install(database_url)
    with Fake() as fake, open_case(database_url, redis_url, fake, QUEUE_BATCH_SIZE="5") as case:
        fake.when(REFUSAL, marker=REFUSED)
        yield case
        assert without_ledger(database_url) == {}


def press(case: Case, job_id: str) -> Answer:
    """Press the requeue button of a job's first bell in rq-dashboard."""
    return case.door.send(f"/rq/job/{job_id}-1/requeue", headers=BUTTON)


def requeues(case: Case) -> list[tuple[str, str, int]]:
    """Return what the audit of requeues holds."""
    found = case.mill.rows("SELECT job_id, via, items FROM holdfast.requeues ORDER BY id")
    return [(row["job_id"], row["via"], row["items"]) for row in found]


@contextmanager
def in_each_state(case: Case) -> Iterator[dict[str, str]]:
    """Give a job in each state, by its state."""
    found = {
        "completed": case.post(*numbered(3, "good"), first=1),
        "completed_with_errors": case.post("good", f"{REFUSED} 1", first=11),
        "failed": case.post(f"{REFUSED} 2", f"{REFUSED} 3", first=21),
    }
    for job_id in found.values():
        case.mill.work(job_id)
    found["cancelled"] = case.post("never", first=31)
    case.door.send(f"/api/job/{found['cancelled']}/cancel")
    found["queued"] = case.post(*numbered(3, "later"), first=41)
    found["running"] = case.post("held", *numbered(8, "held"), first=51)
    gate, calls = Event(), len(case.fake.calls)
    case.fake.when(Reply(until=gate), marker="held", times=1)
    with case.mill.draining(found["running"]):
        case.fake.wait_for(lambda fake: len(fake.calls) > calls)
        try:
            yield found
        finally:
            gate.set()


def test_f25_the_button_revives_what_failed_in_whatever_state_its_job_is(
    case: Case, record_property: Record
) -> None:
    with in_each_state(case) as jobs:
        shown = {state: case.job(job_id)["state"] for state, job_id in jobs.items()}
        assert shown == {state: state for state in jobs}
        before = statuses(case)
        first = {state: press(case, job_id) for state, job_id in jobs.items()}
        revived = statuses(case)
        second = {state: press(case, job_id) for state, job_id in jobs.items()}

    struck(before["failed"] == 3, "nothing had failed")
    record_property("answers", {state: each.status for state, each in first.items()})
    for state, answer in first.items():
        wanted = 200 if state in ("failed", "completed_with_errors") else 409
        assert (state, answer.status) == (state, wanted)
    assert {each.status for each in second.values()} == {409}
    assert {each.code for each in second.values()} == {"nothing_to_requeue"}
    assert revived == {**before, "failed": 0, "pending": before["pending"] + 3}
    assert sorted(requeues(case)) == sorted(
        [(jobs["completed_with_errors"], "dashboard", 1), (jobs["failed"], "dashboard", 2)]
    )
    case.fake.rules.clear()
    for job_id in jobs.values():
        if case.job(job_id)["state"] != "cancelled":
            case.mill.work(job_id)
            assert case.job(job_id)["state"] == "completed"
    assert case.mill.column(jobs["failed"], "attempts") == [2, 2]


def statuses(case: Case) -> dict[str, int]:
    """Return how many items stand where, by every name that there is."""
    names = ("pending", "processing", "done", "failed", "cancelled")
    rows = case.mill.rows(
        "SELECT status, count(*) AS n FROM public.embedding_retry_queue GROUP BY 1"
    )
    return {**dict.fromkeys(names, 0), **{row["status"]: row["n"] for row in rows}}


def test_f25_of_requeues_by_every_door_at_once_one_wins(
    case: Case,
    environ: dict[str, str],
    start_process: StartProcess,
    record_property: Record,
) -> None:
    job_id = case.post(*(f"{REFUSED} {number}" for number in range(7)))
    case.mill.work(job_id)
    doors: list[Callable[[], bool]] = [
        *[lambda: press(case, job_id).status == 200] * 6,
        *[lambda: case.door.send(f"/api/job/{job_id}/requeue").status == 202] * 6,
        *[lambda: start_process("worker", "requeue", job_id).wait() == 0] * 2,
    ]
    start = Barrier(len(doors))
    assert environ["DATABASE_URL"] == case.mill.settings.database_url

    def go(door: Callable[[], bool]) -> bool:
        start.wait()
        return door()

    with ThreadPoolExecutor(len(doors)) as pool:
        won = list(pool.map(go, doors))

    record_property("doors", len(doors))
    record_property("winner", requeues(case)[0][1])
    assert sum(won) == 1
    assert [(each[0], each[2]) for each in requeues(case)] == [(job_id, 7)]
    assert case.mill.job(job_id).run == 2
    case.fake.rules.clear()
    case.mill.work(job_id)
    assert case.mill.column(job_id, "attempts") == [2] * 7


@pytest.mark.slow
@pytest.mark.parametrize("serializer", ["json", "pickle"])
def test_f25_rq_requeue_all_rings_old_bells_and_revives_nothing(
    stage: Stage, serializer: str
) -> None:
    stage.fake.when(REFUSAL, marker=REFUSED)
    stage.start_sweeper()
    worker = stage.start_worker()
    job_id = stage.post("good", f"{REFUSED} 1", f"{REFUSED} 2")
    stage.wait_until_final()
    with redis.Redis.from_url(stage.environ["REDIS_URL"]) as link:
        struck(wait_for(lambda: link.zcard(f"rq:failed:{QUEUE}"), 30), "no bell is shown as failed")
    before, rung = stage.items(), starts(worker.log)

    options = ["--all", "--queue", QUEUE, "--url", stage.environ["REDIS_URL"]]
    command = [sys.executable, "-m", "rq.cli", "requeue", *options, "--serializer", serializer]
    said = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    wait_until_struck(lambda: starts(worker.log) > rung, f"no bell rang: {said}")
    wait_for(lambda: ends(worker.log) == starts(worker.log), 30)

    assert stage.items() == before
    assert stage.rows("SELECT 1 FROM holdfast.requeues") == []
    assert worker.is_alive
    assert stage.door.job(job_id)["state"] == "completed_with_errors"
    stage.fake.rules.clear()
    assert stage.door.send(f"/api/job/{job_id}/requeue").status == 202
    wait_for(lambda: stage.statuses == {"done": 3}, 30)
    stage.wait_until_final()
    stage.sent_again = 64
    stage.check()


def starts(log: Any) -> int:  # noqa: ANN401
    """Count the bells that a worker has begun."""
    return sum(each.get("event") == "bell_start" for each in events(log))


def ends(log: Any) -> int:  # noqa: ANN401
    """Count the bells that a worker has ended."""
    return sum(each.get("event") == "bell_end" for each in events(log))


# ---- F27: cleanup beside those who still look

OLD_JOBS = 12
"""Of each kind."""


@dataclass(frozen=True)
class Old:
    """A job that is past its time, and what it was asked with."""

    job_id: str
    batch: list[dict[str, Any]]
    key: str


def make_old(case: Case) -> list[Old]:
    """Make jobs that ended well, badly, and half, and let all that was longer ago than is kept."""
    found: list[Old] = []
    for number in range(3 * OLD_JOBS):
        kind = (f"good {number}", f"{REFUSED} {number}")
        texts = ((kind[0],) * 2, kind, (kind[1],) * 2)[number % 3]
        ids = [100 * number + 1, 100 * number + 2]
        case.mill.rows(
            "INSERT INTO ai_insights (id, body) SELECT unnest(%(ids)s::bigint[]), ''", ids=ids
        )
        batch = [item(each, f"{text} of {each}") for each, text in zip(ids, texts, strict=True)]
        key = f"key {number}"
        answer = case.door.post(batch, headers={"Idempotency-Key": key})
        found.append(Old(answer.job_id, batch, key))
        case.mill.work(answer.job_id)
    with case.mill.ctx.database.transaction() as tx:
        rows.age(tx, days=40)
    case.mill.rows("UPDATE holdfast.idempotency_keys SET created_at = now() - interval '8 days'")
    case.mill.ctx.link.flushdb()  # Redis, too, would long have forgotten them
    return found


@dataclass
class Crowd:
    """Those who come while old rows are deleted: one reads, one requeues, one sends all again."""

    case: Case
    old: list[Old]
    young: list[str]
    seen: dict[str, list[str]] = field(default_factory=dict)
    """By job, the states that were read, or that it was gone."""
    deleted: Counter[str] = field(default_factory=Counter)
    others_are_done: Event = field(default_factory=Event)

    def look(self) -> None:
        """Read every job once, and all of it."""
        for job_id in [*[each.job_id for each in self.old], *self.young]:
            paths = [f"/api/job/{job_id}{more}" for more in ("", "/items", "/result")]
            answers = [self.case.door.get(path) for path in paths]
            assert {each.status for each in answers} <= {200, 404, 409, 410}, answers
            shown = answers[0].json["state"] if answers[0].status == 200 else "gone"
            self.seen.setdefault(job_id, []).append(shown)

    def look_on(self) -> None:
        """Read until the others are done."""
        while not self.others_are_done.is_set():
            self.look()

    def clean(self) -> None:
        """Clean up until the others are done."""
        while not self.others_are_done.is_set():
            self.deleted.update(cleanup.run_once(self.case.mill.ctx))

    def requeue(self) -> list[Answer]:
        """Requeue every old job once."""
        return [
            self.case.door.send(f"/api/job/{each.job_id}/requeue") for each in reversed(self.old)
        ]

    def send_again(self) -> list[Answer]:
        """Send every old batch again under its old key."""
        return [
            self.case.door.post(each.batch, headers={"Idempotency-Key": each.key})
            for each in self.old
        ]

    def meet(self) -> tuple[list[Answer], list[Answer]]:
        """Let all of them come at once; return what the requeues and the batches were answered."""
        with ThreadPoolExecutor(4) as pool:
            loops = [pool.submit(self.clean), pool.submit(self.look_on)]
            requeued, returned = pool.submit(self.requeue), pool.submit(self.send_again)
            try:
                found = requeued.result(), returned.result()
            finally:
                self.others_are_done.set()
            for each in loops:
                each.result()
        return found


def work_all(case: Case) -> None:
    """Follow bells of all open jobs, some of which wait for items of others."""
    query = "SELECT id FROM holdfast.jobs WHERE finished_at IS NULL ORDER BY id"
    for _ in range(40):
        open_ids = [row["id"] for row in case.mill.rows(query)]
        if not open_ids:
            return
        for job_id in open_ids:
            with suppress(FailedItemsRemain):  # a batch never revives what failed before
                case.mill.drain(job_id)
        case.mill.sweep()
        case.mill.elapse(400)
    pytest.fail(f"not final: {case.mill.rows(query)}")


@pytest.mark.slow
def test_f27_cleanup_beside_pollers_requeues_and_old_keys_loses_nothing_that_is_kept(
    case: Case, monkeypatch: pytest.MonkeyPatch, record_property: Record
) -> None:
    monkeypatch.setattr(cleanup, "BLOCK", 10)
    old = make_old(case)
    case.fake.rules.clear()
    young = [case.post(f"young {number}", first=90_000 + number) for number in range(5)]
    work_all(case)
    crowd = Crowd(case, old, young)
    crowd.look()

    requeued, returned = crowd.meet()
    crowd.look()
    work_all(case)

    gone = {job_id for job_id, seen in crowd.seen.items() if seen[-1] == "gone"}
    struck(gone and crowd.deleted["items"], "nothing was deleted meanwhile")
    revived = {each.json["job_id"] for each in requeued if each.status == 202}
    record_property("deleted", dict(crowd.deleted))
    record_property("gone_while_polled", len(gone))
    record_property("requeues", dict(Counter(each.status for each in requeued)))
    record_property("old_keys", dict(Counter(each.status for each in returned)))
    assert {each.status for each in requeued} <= {202, 404, 409}
    assert {each.status for each in returned} == {202}
    assert not {each.job_id for each in returned} & crowd.seen.keys()
    for job_id, seen in crowd.seen.items():
        check_seen(seen, is_young=job_id in young, is_revived=job_id in revived)
    for answer in returned:
        shown = case.job(answer.job_id)
        assert shown["counts"]["total"] == len(case.door.items(answer.job_id)) == 2, shown
        assert len(case.door.result(answer.job_id)) == 2


def check_seen(seen: Sequence[str], *, is_young: bool, is_revived: bool) -> None:
    """Check what a poller saw of one job: final and kept, or final until it was gone for good."""
    if is_young:
        assert set(seen) == {"completed"}
    elif is_revived:
        assert "gone" not in seen
    else:
        assert len(set(seen) - {"gone"}) == 1, seen
        assert sorted(seen, key="gone".__eq__) == seen
