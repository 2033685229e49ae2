"""One job: polled, listed, read, cancelled, requeued."""

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Barrier
from typing import Any

import orjson
import pytest

from app.core import status
from app.core.live import Meta
from app.core.model import Caller
from app.core.store import fleet
from tests.api import (  # noqa: F401 - fixtures among them
    DIMENSION,
    LINES,
    MODEL,
    REFUSED,
    VERSION,
    Answer,
    Door,
    Ground,
    item,
    make_backend,
    make_door,
    make_ground,
    serving,
    strictly,
)
from tests.fakes import Fake, Reply, float32, vector_of
from tests.processes import wait_for

NONE = {
    "pending": 0,
    "processing": 0,
    "done": 0,
    "skipped": 0,
    "failed": 0,
    "cancelled": 0,
}
ADMIN = Caller("operator", frozenset({"admin"}))


def counts(**some: int) -> dict[str, int]:
    return {"total": sum(some.values()), **NONE, **some}


def run_of(ground: Ground, job_id: str) -> int:
    [row] = ground.rows("SELECT run FROM holdfast.jobs WHERE id = %s", job_id)
    return int(row["run"])


def expire(ground: Ground, job_id: str) -> None:
    """Let the time of a job's result be over; what Redis would forget by itself goes too."""
    ground.rows(
        "UPDATE holdfast.jobs SET expires_at = now() - interval '1 s' WHERE id = %s", job_id
    )
    ground.ctx.live.forget(job_id)


# ---- the job


def test_a_job_tells_all_that_the_contract_names(ground: Ground, door: Door) -> None:
    job_id = ground.done(door, ground.new_items("one", "two", REFUSED))

    job = door.job(job_id)

    link = f"/api/job/{job_id}"
    times = {name: job[name] for name in ("created_at", "started_at", "finished_at", "expires_at")}
    assert job == {
        **times,
        "job_id": job_id,
        "kind": "embedding",
        "state": "completed_with_errors",
        "counts": counts(done=2, failed=1),
        "progress": {
            "percent": 100.0,
            "stage": "embedding",
            "rate_per_second": 0.0,
            "eta_seconds": None,
        },
        "waiting": None,
        "errors": job["errors"],
        "links": {
            "result": f"{link}/result",
            "items": f"{link}/items",
            "requeue": f"{link}/requeue",
            "cancel": f"{link}/cancel",
        },
    }
    assert list(times.values()) == sorted(times.values())
    assert all(time.endswith("+00:00") for time in times.values())
    [error] = job["errors"]
    assert (error["error_class"], error["count"]) == ("bad_input", 1)
    assert "context length" in error["sample"]
    assert REFUSED not in error["sample"]


@pytest.mark.parametrize(
    ("texts", "state", "counted"),
    [
        (["one", "two"], "completed", counts(done=2)),
        (["one", REFUSED], "completed_with_errors", counts(done=1, failed=1)),
        ([REFUSED], "failed", counts(failed=1)),
    ],
)
def test_a_job_ends_as_its_items_did(
    ground: Ground, door: Door, texts: list[str], state: str, counted: dict[str, int]
) -> None:
    job = door.job(ground.done(door, ground.new_items(*texts)))

    assert (job["state"], job["counts"]) == (state, counted)


def test_an_item_whose_row_is_gone_is_skipped_and_counted_apart(ground: Ground, door: Door) -> None:
    job_id = ground.done(door, [*ground.new_items("one"), item(next(ground.target_ids), "gone")])

    job = door.job(job_id)

    assert (job["state"], job["counts"]) == ("completed", counts(done=1, skipped=1))
    [skipped] = door.items(job_id, "?status=skipped")
    assert (skipped["index"], skipped["skip_reason"]) == (1, "content_not_found")
    assert [shown["index"] for shown in door.items(job_id, "?status=done")] == [0]
    assert [line["outcome"] for line in door.result(job_id)] == ["done", "skipped"]


def test_an_open_job_is_counted_as_it_stands(ground: Ground, door: Door) -> None:
    job_id = door.post(ground.new_items("one", "two")).job_id
    assert door.job(job_id)["counts"] == counts(pending=2)

    ground.hold(job_id)
    ground.ctx.link.flushdb()

    job = door.job(job_id)
    assert (job["state"], job["counts"]) == ("running", counts(processing=2))
    assert job["progress"]["percent"] == 0
    assert job["started_at"]
    assert job["finished_at"] is None


# ---- from Redis and from Postgres


def test_both_stores_give_the_same_bytes(ground: Ground, door: Door) -> None:
    for is_final in (False, True):
        job_id = door.post(ground.new_items("one", REFUSED)).job_id
        if is_final:
            ground.work(job_id)
        from_redis = ground.ctx.live.find(job_id, client=None)
        ground.ctx.link.flushdb()
        from_postgres = door.get(f"/api/job/{job_id}")
        assert from_redis == from_postgres.body
        assert ground.ctx.live.find(job_id, client=None) == from_postgres.body


def test_a_job_can_be_polled_while_redis_is_emptied_again_and_again(
    ground: Ground, door: Door
) -> None:
    job_id = door.post(ground.new_items("one", "two", REFUSED)).job_id
    states = [door.job(job_id)["state"]]

    for step in (ground.hold, ground.let_go, ground.work):
        ground.ctx.link.flushdb()
        step(job_id)
        ground.ctx.link.flushdb()
        states.append(door.job(job_id)["state"])

    assert states == ["queued", "running", "running", "completed_with_errors"]


def test_a_fresh_body_is_given_from_redis_and_a_stale_one_not(ground: Ground, door: Door) -> None:
    job_id = door.post(ground.new_items("one")).job_id
    ttl = ground.ctx.link.pttl(f"embedding:job:{job_id}:meta")

    ground.hold(job_id)
    assert door.job(job_id)["state"] == "queued"
    ground.ctx.link.pexpire(f"embedding:job:{job_id}:meta", 1)

    assert 0 < int(ttl) <= 5000
    wait_for(lambda: door.job(job_id)["state"] == "running")


def test_what_redis_holds_of_a_final_job_ends_with_its_result(ground: Ground, door: Door) -> None:
    job_id = ground.done(door, ground.new_items("one"))

    seconds = int(ground.ctx.link.ttl(f"embedding:job:{job_id}:meta"))

    assert abs(seconds - ground.settings.job_result_ttl_seconds) < 60


def meta(body: str, *, run: int, is_final: bool, read_at: float) -> Meta:
    return Meta(
        job_id="emb-1",
        client="one",
        run=run,
        is_final=is_final,
        read_at=read_at,
        body=body.encode(),
        ttl_seconds=60,
    )


NEWEST_LAST = [
    meta("queued", run=1, is_final=False, read_at=1.0),
    meta("running", run=1, is_final=False, read_at=2.25),
    meta("half", run=1, is_final=False, read_at=1764540000.123456),
    meta("failed", run=1, is_final=True, read_at=1764540000.123457),
    meta("again", run=2, is_final=False, read_at=1764540001.0),
    meta("completed", run=2, is_final=True, read_at=1764540002.0),
]


def test_a_body_written_late_never_replaces_a_newer_one(ground: Ground) -> None:
    live = ground.ctx.live

    for newest in range(1, len(NEWEST_LAST)):
        for late in NEWEST_LAST[:newest]:
            ground.ctx.link.flushdb()
            assert live.keep(NEWEST_LAST[newest])
            assert not live.keep(late)
            assert live.find("emb-1", client=None) == NEWEST_LAST[newest].body


def test_an_open_body_never_replaces_a_final_one_of_its_run_even_read_later(ground: Ground) -> None:
    live = ground.ctx.live
    ground.ctx.link.flushdb()
    live.keep(meta("completed", run=1, is_final=True, read_at=5.0))

    assert not live.keep(meta("running", run=1, is_final=False, read_at=6.0))
    assert live.keep(meta("requeued", run=2, is_final=False, read_at=4.0))


def test_a_body_that_is_no_longer_fresh_is_not_written(
    ground: Ground, door: Door, monkeypatch: pytest.MonkeyPatch
) -> None:
    job_id = ground.done(door, ground.new_items("one"))
    ground.ctx.link.flushdb()
    monkeypatch.setattr(status, "FRESH_SECONDS", 0.0)

    status.publish(ground.ctx, job_id)

    assert ground.ctx.live.find(job_id, client=None) is None
    assert door.job(job_id)["state"] == "completed"


def test_another_client_finds_nothing_in_redis(ground: Ground) -> None:
    live = ground.ctx.live
    ground.ctx.link.flushdb()
    live.keep(NEWEST_LAST[0])

    assert live.find("emb-1", client="one") == b"queued"
    assert live.find("emb-1", client="two") is None
    assert live.find("emb-2", client="one") is None


# ---- waiting for it


def test_a_wait_ends_when_something_changes(ground: Ground, door: Door) -> None:
    job_id = door.post(ground.new_items("one", "two")).job_id

    changed = during_a_wait(door, job_id, lambda: ground.hold(job_id))

    assert (changed["state"], changed["counts"]) == ("running", counts(processing=2))


def test_a_wait_for_a_final_job_ends_at_once(ground: Ground, door: Door) -> None:
    job_id = ground.done(door, ground.new_items("one"))

    assert door.get(f"/api/job/{job_id}?wait=55").json["state"] == "completed"


def during_a_wait(door: Door, job_id: str, act: Callable[[], None]) -> dict[str, Any]:
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(door.get, f"/api/job/{job_id}?wait=55")
        act()
        return waiting.result().json


def test_a_wait_for_nothing_ends_after_its_time(ground: Ground, door: Door) -> None:
    job_id = door.post(ground.new_items("one")).job_id

    assert door.get(f"/api/job/{job_id}?wait=1").json["state"] == "queued"


def test_a_wait_ends_when_the_process_is_to_stop(ground: Ground, door: Door) -> None:
    job_id = door.post(ground.new_items("one")).job_id
    stopping = ground.app.extensions["stopping"]

    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(door.get, f"/api/job/{job_id}?wait=55")
        stopping.set()
        answer = waiting.result()
    stopping.clear()

    assert answer.json["state"] == "queued"


# ---- why it waits


@pytest.mark.usefixtures("fleet_at_rest")
def test_a_job_says_why_it_waits(ground: Ground, door: Door) -> None:
    job_id = door.post(ground.new_items("one")).job_id
    assert reason(ground, door, job_id) == "no_worker"

    worker = fleet.Process("w", "worker", "embeddings", "here", 1)
    with ground.ctx.database.transaction() as tx:
        fleet.beat(tx, worker, seconds=3600, counters={})
    assert reason(ground, door, job_id) == "queued_behind"

    ground.rows(
        """UPDATE public.embedding_retry_queue SET next_attempt_at = now() + interval '1 hour'
            WHERE job_id = %s""",
        job_id,
    )
    assert reason(ground, door, job_id) == "retry_scheduled"

    with ground.ctx.database.transaction() as tx:
        fleet.pause(
            tx, "ollama", MODEL, seconds=3600, error_class="busy", message="come back later"
        )
    assert reason(ground, door, job_id) == "backend_paused"
    assert "come back later" in door.job(job_id)["waiting"]["detail"]

    ground.hold(job_id)
    assert reason(ground, door, job_id) is None


@pytest.fixture
def fleet_at_rest(ground: Ground) -> Iterator[None]:
    """Leave no worker and no pause behind, nor find one."""
    ground.rows("TRUNCATE holdfast.processes, holdfast.backends")
    yield
    ground.rows("TRUNCATE holdfast.processes, holdfast.backends")


def reason(ground: Ground, door: Door, job_id: str) -> str | None:
    ground.ctx.link.flushdb()
    waiting = door.job(job_id)["waiting"]
    if waiting is None:
        return None
    assert waiting.keys() == {"reason", "detail", "until"}
    has_end = waiting["reason"] in ("backend_paused", "retry_scheduled")
    assert bool(waiting["until"]) == has_end
    return str(waiting["reason"])


# ---- its items


def test_an_item_tells_all_that_the_contract_names(ground: Ground, door: Door) -> None:
    [number] = ground.new_rows(1)
    job_id = ground.done(door, [item(number, REFUSED, custom_id="mine", metadata={"a": 1})])

    [shown] = door.items(job_id)

    [error] = shown["errors"]
    assert shown == {
        "index": 0,
        "target_table": "ai_insights",
        "target_id": str(number),
        "custom_id": "mine",
        "embedding_version": VERSION,
        "model": MODEL,
        "status": "failed",
        "skip_reason": None,
        "attempts": 1,
        "error_class": "bad_input",
        "errors": [error],
        **({"sinks": shown["sinks"]} if "sinks" in shown else {}),
    }
    assert (error["attempt"], error["error_class"]) == (1, "bad_input")
    assert error["at"].endswith("+00:00")
    assert "context length" in error["message"]


def test_every_attempt_leaves_its_error(ground: Ground, door: Door, backend: Fake) -> None:
    backend.when(Reply(status=500, error="something broke"), marker="broken", times=4)
    job_id = ground.done(door, ground.new_items("broken", "fine"))

    broken, fine = door.items(job_id)

    assert [error["attempt"] for error in broken["errors"]] == list(range(1, broken["attempts"]))
    assert {error["message"][:3] for error in broken["errors"]} != set()
    assert fine["errors"] == []
    assert (broken["status"], fine["status"]) == ("done", "done")


def test_items_come_in_pages_that_leave_none_out(ground: Ground, door: Door) -> None:
    job_id = ground.done(door, ground.new_items(*(f"text {number}" for number in range(7))))

    seen, cursor = [], ""
    while True:
        page = door.get(f"/api/job/{job_id}/items?limit=3{cursor}").json
        assert len(page["items"]) <= 3
        seen += [shown["index"] for shown in page["items"]]
        if page["next"] is None:
            break
        cursor = f"&cursor={page['next']}"

    assert seen == list(range(7))


def test_items_are_found_by_status(ground: Ground, door: Door) -> None:
    job_id = ground.done(door, ground.new_items("one", REFUSED, "two", f"{REFUSED} too"))

    assert [shown["index"] for shown in door.items(job_id, "?status=failed")] == [1, 3]
    assert [shown["index"] for shown in door.items(job_id, "?status=done&limit=1&cursor=0")] == [2]
    for name in ("pending", "processing", "skipped", "cancelled"):
        assert door.items(job_id, f"?status={name}") == []


# ---- its result


def test_a_result_has_a_line_for_each_item_in_the_order_of_input(
    ground: Ground, door: Door
) -> None:
    one, two, three = ground.new_items("one", REFUSED, "three")
    two |= {"custom_id": "mine"}

    job_id = ground.done(door, [three, one, two, one])

    answer = door.get(f"/api/job/{job_id}/result")
    assert {name: answer.json[name] for name in ("job_id", "state", "total", "offset")} == {
        "job_id": job_id,
        "state": "completed_with_errors",
        "total": 4,
        "offset": 0,
    }
    assert answer.json["items"] == [
        line(0, three, "done"),
        line(1, one, "done"),
        {**line(2, two, "failed"), "error_class": "bad_input"},
        line(3, one, "done"),
    ]


def line(index: int, sent: dict[str, Any], outcome: str) -> dict[str, Any]:
    return {
        "index": index,
        "target_table": sent["target_table"],
        "target_id": str(sent["target_id"]),
        "custom_id": sent.get("custom_id"),
        "outcome": outcome,
    }


def test_vectors_are_in_the_result_where_they_were_asked_for(ground: Ground, door: Door) -> None:
    texts = ["one", "two", REFUSED]
    asked = ground.done(door, ground.new_items(*texts), return_vectors=True)
    unasked = ground.done(door, ground.new_items("one"))

    lines = door.result(asked)

    assert [vector_in(each) for each in lines[:2]] == [
        vector_of(MODEL, "one", DIMENSION),
        vector_of(MODEL, "two", DIMENSION),
    ]
    assert "vector" not in lines[2]
    assert "vector" not in door.result(unasked)[0]


def vector_in(line: dict[str, Any]) -> list[float]:
    """Return the vector of a line, each number as the float32 that it was stored as."""
    return float32(line["vector"])


def test_a_result_comes_in_pages_and_whole_as_lines(ground: Ground, door: Door) -> None:
    job_id = ground.done(door, ground.new_items(*(f"text {number}" for number in range(7))))
    whole = door.result(job_id)

    pages = [door.result(job_id, f"?offset={offset}&limit=3") for offset in (0, 3, 6, 9)]
    as_lines = door.get(f"/api/job/{job_id}/result", {"Accept": LINES})

    assert [len(page) for page in pages] == [3, 3, 1, 0]
    assert [each for page in pages for each in page] == whole
    assert as_lines.lines == whole


def test_lines_of_a_result_of_many_blocks_leave_none_out(ground: Ground, door: Door) -> None:
    job_id = ground.done(door, [*ground.new_items("one")] * 1201, return_vectors=True)

    lines = door.get(f"/api/job/{job_id}/result", {"Accept": LINES}).lines

    assert [each["index"] for each in lines] == list(range(1201))
    assert all(vector_in(each) == vector_of(MODEL, "one", DIMENSION) for each in lines)


METADATA = {
    "page": 3,
    "\u00fc": "\U0001f44d\u2028",
    "nested": {"a": [1, 2.5, None, True, {"b": []}]},
    "large": 1e300,
    "small": 1e-300,
    "least": -(2**63),
    "most": 2**64 - 1,
}


def test_metadata_comes_back_as_it_was_sent(ground: Ground, door: Door) -> None:
    one, two = ground.new_items("one", "two")

    job_id = ground.done(door, [{**one, "metadata": METADATA}, two])

    first, second = door.result(job_id)
    assert first["metadata"] == METADATA
    assert "metadata" not in second
    lines = door.get(f"/api/job/{job_id}/result", {"Accept": LINES}).lines
    assert lines[0]["metadata"] == METADATA


def test_a_result_before_the_end_is_refused_in_both_forms(ground: Ground, door: Door) -> None:
    job_id = door.post(ground.new_items("one")).job_id

    for accept in ("application/json", LINES):
        answer = door.get(f"/api/job/{job_id}/result", {"Accept": accept})
        assert (answer.status, answer.code) == (409, "job_not_finished")


def test_a_result_is_gone_when_its_time_is_over_and_the_summary_stays(
    ground: Ground, door: Door
) -> None:
    job_id = ground.done(door, ground.new_items("one", REFUSED))
    before = door.job(job_id)

    expire(ground, job_id)

    for accept in ("application/json", LINES):
        answer = door.get(f"/api/job/{job_id}/result", {"Accept": accept})
        assert (answer.status, answer.code) == (410, "result_expired")
    after = door.job(job_id)
    assert {**after, "expires_at": None} == {**before, "expires_at": None}
    assert len(door.items(job_id)) == 2


def test_a_text_changed_by_a_later_batch_is_superseded_in_the_earlier_one(
    ground: Ground, door: Door
) -> None:
    one, two = ground.new_items("old", "kept")
    first = ground.done(door, [one, two], return_vectors=True)

    second = ground.done(door, [{**one, "text": "new"}], return_vectors=True)

    superseded, kept = door.result(first)
    assert superseded["outcome"] == "superseded"
    assert "vector" not in superseded
    assert vector_in(kept) == vector_of(MODEL, "kept", DIMENSION)
    assert vector_in(door.result(second)[0]) == vector_of(MODEL, "new", DIMENSION)
    assert door.job(first)["counts"] == counts(done=2)


def test_the_result_does_not_need_redis(ground: Ground, door: Door) -> None:
    job_id = ground.done(door, ground.new_items("one"), return_vectors=True)
    before = door.result(job_id)

    ground.ctx.link.flushdb()

    assert door.result(job_id) == before


# ---- the list


def test_a_client_sees_its_own_jobs_newest_first(ground: Ground) -> None:
    mine, others = ground.door(), ground.door()
    ids = [ground.done(mine, ground.new_items("one")) for _ in range(3)]
    others.post(ground.new_items("one"))

    page = mine.get("/api/jobs").json

    assert [job["job_id"] for job in page["jobs"]] == ids[::-1]
    assert page["next"] is None
    assert page["jobs"][0] == mine.job(ids[-1])


def test_jobs_come_in_pages_that_leave_none_out_even_where_they_began_together(
    ground: Ground, door: Door
) -> None:
    ids = [door.post(ground.new_items("one")).job_id for _ in range(7)]
    ground.rows("UPDATE holdfast.jobs SET created_at = now() WHERE id = ANY(%s)", ids[:5])

    seen, cursor = [], ""
    while True:
        page = door.get(f"/api/jobs?limit=2{cursor}").json
        seen += [job["job_id"] for job in page["jobs"]]
        if page["next"] is None:
            break
        cursor = f"&cursor={page['next']}"

    assert sorted(seen) == sorted(ids)


def test_jobs_are_found_by_state_and_kind(ground: Ground, door: Door) -> None:
    waiting = door.post(ground.new_items("one")).job_id
    final = ground.done(door, ground.new_items(REFUSED))

    def found(query: str) -> list[str]:
        return [job["job_id"] for job in door.get(f"/api/jobs{query}").json["jobs"]]

    assert found("?state=queued") == [waiting]
    assert found("?state=failed&kind=embedding") == [final]
    assert found("?state=completed") == []
    assert found("?kind=trace") == []


def test_an_administrator_sees_the_jobs_of_all(ground: Ground, door: Door) -> None:
    job_id = door.post(ground.new_items("one")).job_id
    admin = ground.door("operator", "admin")

    listed = [job["job_id"] for job in admin.get("/api/jobs?limit=200").json["jobs"]]

    assert job_id in listed
    assert admin.job(job_id) == door.job(job_id)


# ---- cancel


def test_a_queued_job_is_cancelled_at_once(ground: Ground, door: Door) -> None:
    batch = ground.new_items("one", "two")
    job_id = door.post(batch).job_id

    answer = door.send(f"/api/job/{job_id}/cancel")

    assert (answer.status, answer.json["state"]) == (200, "cancelled")
    assert answer.json["counts"] == counts(cancelled=2)
    assert answer.body == door.get(f"/api/job/{job_id}").body
    assert [line["outcome"] for line in door.result(job_id)] == ["cancelled"] * 2
    assert [shown["status"] for shown in door.items(job_id)] == ["cancelled"] * 2


def test_what_runs_is_not_stopped_by_a_cancel_and_what_is_done_is_kept(
    ground: Ground, door: Door
) -> None:
    done, running = ground.new_items("done", "running")
    ground.done(door, [done])
    job_id = door.post([done, running]).job_id
    ground.hold(job_id)

    answer = door.send(f"/api/job/{job_id}/cancel")

    assert answer.json["state"] == "running"
    assert answer.json["counts"] == counts(done=1, processing=1)
    ground.let_go(job_id)
    status.finish(ground.ctx, job_id, ttl_seconds=60)
    job = door.job(job_id)
    assert (job["state"], job["counts"]) == ("cancelled", counts(done=1, cancelled=1))
    assert [line["outcome"] for line in door.result(job_id)] == ["done", "cancelled"]


def test_a_final_job_is_left_as_it_is(ground: Ground, door: Door) -> None:
    job_id = ground.done(door, ground.new_items("one", REFUSED))
    before = door.get(f"/api/job/{job_id}").body

    for _ in range(2):
        answer = door.send(f"/api/job/{job_id}/cancel", {})
        assert (answer.status, answer.body) == (200, before)


def test_an_item_that_another_job_waits_for_goes_on(ground: Ground, door: Door) -> None:
    shared, own = ground.new_items("shared", "own")
    first = door.post([shared, own]).job_id
    second = door.post([shared]).job_id

    cancelled = door.send(f"/api/job/{first}/cancel").json

    assert (cancelled["state"], cancelled["counts"]) == ("cancelled", counts(cancelled=2))
    ground.work(second)
    assert door.job(second)["state"] == "completed"
    assert [line["outcome"] for line in door.result(first)] == ["cancelled"] * 2
    assert [line["outcome"] for line in door.result(second)] == ["done"]


# ---- requeue


def failed_job(ground: Ground, door: Door, backend: Fake) -> str:
    """Let a job with one item fail, at a backend that is right again afterwards."""
    backend.when(Reply(status=400, error="the input length exceeds it"), marker="once", times=1)
    return ground.done(door, ground.new_items("only refused once"))


def test_failed_items_get_another_allowance_of_attempts(
    ground: Ground, door: Door, backend: Fake
) -> None:
    job_id = failed_job(ground, door, backend)

    answer = door.send(f"/api/job/{job_id}/requeue", {"reason": "mended"})

    assert answer.status == 202
    assert answer.json == {"job_id": job_id, "requeued": 1, "state": "queued"}
    job = door.job(job_id)
    assert (job["state"], job["counts"], job["finished_at"]) == ("queued", counts(pending=1), None)
    ground.work(job_id)
    assert door.job(job_id)["state"] == "completed"
    assert [line["outcome"] for line in door.result(job_id)] == ["done"]


def test_a_requeue_is_recorded(ground: Ground, backend: Fake) -> None:
    door = ground.door("acme")
    job_id = failed_job(ground, door, backend)

    door.send(f"/api/job/{job_id}/requeue", {"reason": "mended"})

    assert ground.rows(
        "SELECT client, via, reason, items FROM holdfast.requeues WHERE job_id = %s", job_id
    ) == [{"client": "acme", "via": "api", "reason": "mended", "items": 1}]


def test_a_job_without_failed_items_cannot_be_requeued(ground: Ground, door: Door) -> None:
    for job_id in (
        ground.done(door, ground.new_items("one")),
        door.post(ground.new_items("two")).job_id,
    ):
        before = door.get(f"/api/job/{job_id}").body
        answer = door.send(f"/api/job/{job_id}/requeue")
        assert (answer.status, answer.code) == (409, "nothing_to_requeue")
        assert door.get(f"/api/job/{job_id}").body == before
        assert run_of(ground, job_id) == 1


def test_of_requeues_at_once_one_wins(ground: Ground, door: Door, backend: Fake) -> None:
    job_id = failed_job(ground, door, backend)
    start = Barrier(8)

    def send(_: int) -> Answer:
        start.wait()
        return door.send(f"/api/job/{job_id}/requeue")

    with ThreadPoolExecutor(8) as pool:
        answers = list(pool.map(send, range(8)))

    assert sorted(answer.status for answer in answers) == [202] + [409] * 7
    assert run_of(ground, job_id) == 2
    [row] = ground.rows("SELECT count(*) AS n FROM holdfast.requeues WHERE job_id = %s", job_id)
    assert row["n"] == 1


def test_the_failed_items_of_a_job_that_runs_can_be_requeued(
    ground: Ground, door: Door, backend: Fake
) -> None:
    first = failed_job(ground, door, backend)
    [failed] = ground.rows(
        "SELECT target_id FROM public.embedding_retry_queue WHERE job_id = %s", first
    )
    job_id = door.post(
        [item(failed["target_id"], "only refused once"), *ground.new_items("other")]
    ).job_id
    ground.hold(job_id)

    answer = door.send(f"/api/job/{job_id}/requeue")

    assert answer.json == {"job_id": job_id, "requeued": 1, "state": "running"}
    assert run_of(ground, job_id) == 1
    assert door.job(job_id)["counts"] == counts(pending=1, processing=1)


def test_a_job_that_is_being_cancelled_is_not_requeued(
    ground: Ground, door: Door, backend: Fake
) -> None:
    first = failed_job(ground, door, backend)
    [failed] = ground.rows(
        "SELECT target_id FROM public.embedding_retry_queue WHERE job_id = %s", first
    )
    job_id = door.post(
        [item(failed["target_id"], "only refused once"), *ground.new_items("other")]
    ).job_id
    ground.hold(job_id)
    door.send(f"/api/job/{job_id}/cancel")

    answer = door.send(f"/api/job/{job_id}/requeue")

    assert (answer.status, answer.code) == (409, "nothing_to_requeue")
    assert ground.rows(
        "SELECT status FROM public.embedding_retry_queue WHERE target_id = %s", failed["target_id"]
    ) == [{"status": "failed"}]


def test_a_cancelled_job_may_have_its_failed_items_requeued(
    ground: Ground, door: Door, backend: Fake
) -> None:
    first = failed_job(ground, door, backend)
    [failed] = ground.rows(
        "SELECT target_id FROM public.embedding_retry_queue WHERE job_id = %s", first
    )
    job_id = door.post(
        [item(failed["target_id"], "only refused once"), *ground.new_items("other")]
    ).job_id
    door.send(f"/api/job/{job_id}/cancel")

    assert door.send(f"/api/job/{job_id}/requeue").json["requeued"] == 1

    ground.work(job_id)
    assert door.job(job_id)["counts"] == counts(done=1, cancelled=1)
    assert [line["outcome"] for line in door.result(job_id)] == ["done", "cancelled"]


# ---- under gunicorn


def test_long_polls_end_when_the_server_is_asked_to_stop(
    ground: Ground, door: Door, tmp_path: Path
) -> None:
    ids = [door.post(ground.new_items("one")).job_id for _ in range(4)]
    ground.ctx.link.flushdb()
    with serving(ground.environ, tmp_path / "api.log") as served, ThreadPoolExecutor(4) as pool:
        get = served.door(door.key).get
        polls = [pool.submit(get, f"/api/job/{job_id}?wait=55") for job_id in ids]
        # The first thing that a long poll does is to read the job, which writes it to Redis.
        wait_for(lambda: all(ground.ctx.live.find(job_id, client=None) for job_id in ids))
        assert served.running.stop() == 0
        answers = [poll.result() for poll in polls]

    assert [answer.json["job_id"] for answer in answers] == ids


def test_the_body_of_a_job_is_strict_json(ground: Ground, door: Door) -> None:
    job_id = ground.done(door, ground.new_items("one"))

    view = status.read(ground.ctx, ADMIN, job_id)

    assert strictly(view.body) == orjson.loads(view.body)
