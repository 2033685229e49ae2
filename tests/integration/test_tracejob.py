"""A trace job: segments under a lease, pages in Redis, and every way in which that goes wrong."""

from collections.abc import Iterator, Sequence
from typing import Any

import pytest
from psycopg.errors import CheckViolation
from rq import Queue

from app.core import requeue, trace_result
from app.core.bells import BellJob
from app.core.errors import (
    ErrorClass,
    FailedItemsRemain,
    JobFailed,
    JobNotFinished,
    NothingToRequeue,
    ResultExpired,
    SourceFault,
)
from app.core.model import JobState
from app.core.requeue import Why
from app.core.store import jobs, traces
from tests.processes import wait_for
from tests.traces import CALLER, LOOKUP, Hook, TraceMill, open_trace_mill
from worker.sweep import cleanup

WHY = Why("api")
COUNTS = {
    "history": """SELECT count(*) AS n FROM trace_demo.lot_wip_history
                   WHERE container_id = ANY(%(ids)s) AND equipment_id IS NOT NULL
                     AND track_in_at IS NOT NULL""",
    "materials": """SELECT count(*) AS n FROM trace_demo.lot_materials_history
                     WHERE container_id = ANY(%(ids)s)""",
    "holds": """SELECT count(*) AS n FROM trace_demo.hold_release_history
                 WHERE container_id = ANY(%(ids)s)""",
}


TTLS = """
local found = {}
for position, key in ipairs(KEYS) do found[position] = redis.call('PTTL', key) end
return found
"""
"""Before version 7 the clock goes on in a script: equal ends are seen so in nearly every look."""


@pytest.fixture
def mill(database_url: str, redis_url: str, trace_source_url: str) -> Iterator[TraceMill]:
    with open_trace_mill(database_url, redis_url, trace_source_url) as mill:
        yield mill


def counted(mill: TraceMill, domain: str, ids: Sequence[str]) -> int:
    [row] = mill.source_rows(COUNTS[domain], ids=list(ids))
    return int(row["n"])


class Interference:
    """A hook that notes every statement, and does something before the n-th segment is read."""

    def __init__(self, mill: TraceMill, job_id: str, actions: dict[int, Any]) -> None:
        self.firsts = {each.first_id: each.segment for each in mill.segments(job_id)}
        self.actions = actions
        self.seen: list[tuple[int, str]] = []

    def __call__(self, domain: str, ids: Sequence[str]) -> None:
        segment = self.firsts[ids[0]]
        self.seen.append((segment, domain))
        action = self.actions.get(segment)
        if action is not None and domain == "history":
            action()

    @property
    def segments(self) -> list[int]:
        return [segment for segment, domain in self.seen if domain == "history"]


def failing(error_class: ErrorClass = ErrorClass.SOURCE_FAILED) -> Any:  # noqa: ANN401
    def fail() -> None:
        raise SourceFault(error_class, "42P01 UndefinedTable")

    return fail


def drain_failing(mill: TraceMill, job_id: str, hook: Hook) -> None:
    with pytest.raises(FailedItemsRemain):
        mill.drain(job_id, hook=hook)


# ---- as it should go


def test_a_job_reads_every_segment_and_its_rows_are_those_of_the_source(mill: TraceMill) -> None:
    ids = mill.ids(450)
    job_id = mill.submit(ids)

    assert mill.drain(job_id) == {"done": 5}

    job = mill.job(job_id)
    assert job.state is JobState.COMPLETED
    assert (job.counts.total, job.counts.done) == (5, 5)
    manifest = mill.manifest(job_id)
    for domain in LOOKUP:
        rows = mill.result(job_id, domain)
        assert len(rows) == counted(mill, domain, ids) == manifest["domains"][domain]["rows"] > 0
        assert {row["container_id"] for row in rows} <= set(ids)
        assert [row["container_id"] for row in rows] == sorted(row["container_id"] for row in rows)
    assert manifest["quality"]["status"] == "complete"


def test_the_result_hangs_neither_on_the_order_of_the_ids_nor_on_the_size_of_segments(
    mill: TraceMill, database_url: str, redis_url: str, trace_source_url: str
) -> None:
    ids = mill.ids(150)
    small = mill.submit(ids)
    mill.drain(small)
    more = {"TRACE_SEGMENT_CIDS": "7"}
    with open_trace_mill(database_url, redis_url, trace_source_url, **more) as other:
        backwards = other.submit([f" {each} " for each in reversed(ids)] + ids)
        other.drain(backwards)

        assert len(other.segments(backwards)) == 22
        for domain in LOOKUP:
            assert other.result(backwards, domain) == mill.result(small, domain)


def test_progress_moves_and_never_falls(mill: TraceMill) -> None:
    job_id = mill.submit(300)
    bodies: list[dict[str, Any]] = []

    def look(*_: object) -> None:
        bodies.append(mill.body(job_id))

    mill.drain(job_id, hook=look)
    bodies.append(mill.body(job_id))

    assert [each["trace"]["segment"] for each in bodies[::2]] == ["1/3", "2/3", "3/3", "3/3"]
    percents = [each["progress"]["percent"] for each in bodies]
    assert percents == sorted(percents)
    assert (percents[0], percents[-1]) == (0.0, 100.0)
    assert bodies[0]["state"] == "running"
    assert bodies[-1]["trace"]["rows"]["history"] == len(mill.result(job_id, "history"))
    assert bodies[-1]["counts"] == {
        "total": 3,
        "pending": 0,
        "processing": 0,
        "done": 3,
        "skipped": 0,
        "failed": 0,
        "cancelled": 0,
    }


def test_a_turn_that_is_over_goes_on_by_another_bell(
    mill: TraceMill, database_url: str, redis_url: str, trace_source_url: str
) -> None:
    del mill
    more = {"QUEUE_BELL_SECONDS": "0.05"}
    with open_trace_mill(database_url, redis_url, trace_source_url, **more) as mill:
        job_id = mill.submit(500)
        queue = mill.settings.trace_worker_queue
        assert mill.ctx.bells.waiting(queue) == [job_id]

        drained = 0
        while not mill.job(job_id).state.is_final:
            drained += 1
            mill.drain(job_id)

        assert drained > 1
        assert mill.job(job_id).state is JobState.COMPLETED
        assert len(mill.ctx.bells.waiting(queue)) >= drained


def test_a_stop_ends_the_bell_after_its_segment(mill: TraceMill) -> None:
    job_id = mill.submit(300)
    stops = iter([False, True])

    assert mill.drain(job_id, stop=lambda: next(stops, True)) == {"done": 1}

    assert mill.statuses(job_id) == ["done", "pending", "pending"]
    assert mill.work(job_id).state is JobState.COMPLETED


def test_a_second_bell_finds_nothing_to_do(mill: TraceMill) -> None:
    job_id = mill.submit(200)
    others: list[dict[str, int]] = []

    def ring_again(*_: object) -> None:
        others.append(mill.drain(job_id))

    assert mill.drain(job_id, hook=ring_again) == {"done": 2}
    assert others == [{}] * 4
    assert mill.drain(job_id) == {"done": 0}


# ---- what lies in Redis


def test_every_page_has_a_ttl_at_any_time_and_all_end_together(mill: TraceMill) -> None:
    job_id = mill.submit(300)

    def look(*_: object) -> None:
        assert all(mill.ctx.link.ttl(key) > 0 for key in mill.page_keys())

    mill.drain(job_id, hook=look)

    keys = mill.page_keys()
    assert len(keys) == 6
    wait_for(lambda: len(set(mill.ctx.link.eval(TTLS, 6, *keys))) == 1)
    left = mill.ctx.link.ttl(mill.page_keys()[0])
    assert mill.settings.trace_job_ttl_seconds - 30 < left <= mill.settings.trace_job_ttl_seconds


def test_only_the_pages_that_are_touched_are_read(mill: TraceMill) -> None:
    job_id = mill.submit(500)
    mill.drain(job_id)
    rows = mill.result(job_id, "history")
    total = len(rows)

    for offset, limit in ((0, 1), (0, total), (17, 900), (total - 1, 5000), (total // 2, 3)):
        page = mill.page(job_id, "history", offset=offset, limit=limit)
        wanted = rows[offset : offset + limit]
        assert page["data"] == wanted
        assert (page["count"], page["total"]) == (len(wanted), total)
        ends = offset + limit
        assert page["next"] == (ends if ends < total else None)

    beyond = mill.page(job_id, "history", offset=total)
    assert (beyond["data"], beyond["count"], beyond["total"], beyond["next"]) == (
        [],
        0,
        total,
        None,
    )


def test_a_domain_that_fills_no_page_is_read_over_many_segments(mill: TraceMill) -> None:
    ids = mill.ids(2500)
    job_id = mill.submit(ids, domains=["holds"])
    mill.drain(job_id)

    rows = mill.result(job_id, "holds")
    assert len(rows) == counted(mill, "holds", ids) > 5
    assert mill.page(job_id, "holds", offset=3, limit=2)["data"] == rows[3:5]


def test_a_page_that_is_gone_is_an_end_of_the_result_and_never_fewer_rows(mill: TraceMill) -> None:
    job_id = mill.submit(300)
    mill.drain(job_id)
    lines = trace_result.stream(mill.ctx, CALLER, job_id, None)
    assert b'"meta"' in next(lines)
    gone = next(key for key in mill.page_keys() if b":materials:2-" in key)
    mill.ctx.link.delete(gone)

    with pytest.raises(ResultExpired):
        mill.manifest(job_id)
    with pytest.raises(ResultExpired):
        mill.page(job_id, "history")
    with pytest.raises(ResultExpired):
        trace_result.stream(mill.ctx, CALLER, job_id, "history")
    said: list[bytes] = []
    with pytest.raises(BrokenPipeError):
        said.extend(lines)
    assert b'"error"' in said[-1]
    assert b"result_expired" in said[-1]
    assert not any(b'"complete"' in line for line in said)

    done = requeue.requeue(mill.ctx, CALLER, job_id, WHY)
    assert done["requeued"] == 1
    assert mill.work(job_id).state is JobState.COMPLETED
    assert len(mill.result(job_id, "materials")) == counted(mill, "materials", mill.ids(300))


def test_a_page_that_was_changed_is_found_out_and_is_gone_from_then_on(mill: TraceMill) -> None:
    job_id = mill.submit(300)
    mill.drain(job_id)
    key = next(key for key in mill.page_keys() if b":history:3-" in key)
    mill.ctx.link.setrange(key, 40, b"\xff")
    assert mill.manifest(job_id)
    assert mill.page(job_id, "history", limit=1)["count"] == 1

    with pytest.raises(ResultExpired, match="damaged"):
        mill.result(job_id, "history")

    with pytest.raises(ResultExpired):
        mill.manifest(job_id)
    with pytest.raises(ResultExpired):
        mill.page(job_id, "history", limit=1)


def test_a_result_is_read_until_its_time_is_over(mill: TraceMill) -> None:
    job_id = mill.submit(100)
    with pytest.raises(JobNotFinished):
        mill.manifest(job_id)
    mill.drain(job_id)
    assert mill.manifest(job_id)["expires_at"] == mill.job(job_id).expires_at

    mill.rows("UPDATE holdfast.jobs SET expires_at = now()")

    with pytest.raises(ResultExpired):
        mill.manifest(job_id)
    assert mill.body(job_id)["state"] == "completed"
    assert requeue.requeue(mill.ctx, CALLER, job_id, WHY)["requeued"] == 1
    assert mill.work(job_id).state is JobState.COMPLETED
    assert mill.manifest(job_id)


def test_pages_that_vanish_while_it_runs_are_read_once_more(mill: TraceMill) -> None:
    job_id = mill.submit(300)
    hook = Interference(mill, job_id, {3: mill.ctx.link.flushdb})

    counts = mill.drain(job_id, hook=hook)

    assert counts == {"done": 5}
    assert hook.segments == [1, 2, 3, 1, 2]
    assert mill.job(job_id).state is JobState.COMPLETED
    assert len(mill.result(job_id, "history")) == counted(mill, "history", mill.ids(300))


def test_pages_that_vanish_a_second_time_are_the_end_of_the_job(mill: TraceMill) -> None:
    job_id = mill.submit(200)
    hook = Interference(mill, job_id, {2: mill.ctx.link.flushdb, 1: mill.ctx.link.flushdb})
    hook.actions[1] = None

    def flush_always(domain: str, ids: Sequence[str]) -> None:
        mill.ctx.link.flushdb()
        hook(domain, ids)

    drain_failing(mill, job_id, flush_always)

    assert mill.job(job_id).state is JobState.FAILED
    [error] = mill.body(job_id)["errors"]
    assert error["error_class"] == "result_lost"
    with pytest.raises(JobFailed):
        mill.manifest(job_id)


def test_a_result_over_the_limit_fails_and_leaves_no_page(
    mill: TraceMill, database_url: str, redis_url: str, trace_source_url: str
) -> None:
    ids = mill.ids(400)
    whole = mill.submit(ids)
    mill.drain(whole)
    domains = mill.manifest(whole)["domains"].values()
    size = sum(page["bytes"] for each in domains for page in each["pages"])
    mill.ctx.link.flushdb()
    more = {"TRACE_RESULT_BYTES": str(size // 2)}
    with open_trace_mill(database_url, redis_url, trace_source_url, **more) as small:
        job_id = small.submit(ids)

        with pytest.raises(FailedItemsRemain):
            small.drain(job_id)

        body = small.body(job_id)
        assert body["state"] == "failed"
        assert body["counts"]["done"] >= 1
        assert [each["error_class"] for each in body["errors"]] == ["result_too_large"]
        assert small.page_keys() == []
    requeue.requeue(mill.ctx, CALLER, job_id, WHY)
    mill.drain(job_id)
    assert len(mill.result(job_id, "history")) == counted(mill, "history", ids)


# ---- a query that fails


def test_a_query_that_fails_ends_the_job_at_once_and_nothing_is_tried_again(
    mill: TraceMill,
) -> None:
    job_id = mill.submit(500)
    hook = Interference(mill, job_id, {3: failing()})

    drain_failing(mill, job_id, hook)

    assert hook.segments == [1, 2, 3]
    body = mill.body(job_id)
    assert body["state"] == "failed"
    assert mill.statuses(job_id) == ["done", "done", "failed", "cancelled", "cancelled"]
    assert body["errors"] == [
        {"error_class": "source_failed", "count": 1, "sample": "42P01 UndefinedTable"}
    ]
    with pytest.raises(JobFailed):
        mill.manifest(job_id)
    mill.sweep()
    assert mill.drain(job_id, hook=hook) == {"done": 0}
    assert hook.segments == [1, 2, 3]


def test_a_domain_that_fails_leaves_nothing_of_its_segment(mill: TraceMill) -> None:
    job_id = mill.submit(200)

    def fail_materials(domain: str, _: Sequence[str]) -> None:
        if domain == "materials":
            failing()()

    drain_failing(mill, job_id, fail_materials)

    assert mill.job(job_id).state is JobState.FAILED
    assert mill.page_keys() == []


def test_a_requeue_keeps_what_was_read_and_reads_the_rest(mill: TraceMill) -> None:
    job_id = mill.submit(500)
    drain_failing(mill, job_id, Interference(mill, job_id, {3: failing()}))
    hook = Interference(mill, job_id, {})

    done = requeue.requeue(mill.ctx, CALLER, job_id, WHY)

    assert done == {"job_id": job_id, "requeued": 3, "state": "queued"}
    assert mill.body(job_id)["started_at"] is None
    mill.drain(job_id, hook=hook)
    assert hook.segments == [3, 4, 5]
    assert mill.job(job_id).state is JobState.COMPLETED
    for domain in LOOKUP:
        assert len(mill.result(job_id, domain)) == counted(mill, domain, mill.ids(500))
    [segment] = [each for each in mill.segments(job_id) if each.segment == 3]
    assert (segment.attempts, segment.run, segment.error_class) == (2, 2, None)
    [audit] = mill.rows("SELECT items, via, client FROM holdfast.requeues")
    assert audit == {"items": 3, "via": "api", "client": "tests"}


def test_a_requeue_after_redis_was_emptied_reads_everything_from_the_stored_ids(
    mill: TraceMill,
) -> None:
    job_id = mill.submit(300)
    drain_failing(mill, job_id, Interference(mill, job_id, {3: failing()}))
    mill.ctx.link.flushdb()

    assert requeue.requeue(mill.ctx, CALLER, job_id, WHY)["requeued"] == 3
    assert mill.work(job_id).state is JobState.COMPLETED
    assert len(mill.result(job_id, "history")) == counted(mill, "history", mill.ids(300))


def test_there_is_nothing_to_requeue_in_a_job_that_is_whole_or_under_way_or_cancelled(
    mill: TraceMill,
) -> None:
    job_id = mill.submit(200)
    with pytest.raises(NothingToRequeue):
        requeue.requeue(mill.ctx, CALLER, job_id, WHY)
    mill.drain(job_id)
    with pytest.raises(NothingToRequeue):
        requeue.requeue(mill.ctx, CALLER, job_id, WHY)
    cancelled = mill.submit(200)
    requeue.cancel(mill.ctx, CALLER, cancelled)
    with pytest.raises(NothingToRequeue):
        requeue.requeue(mill.ctx, CALLER, cancelled, WHY)


def test_rows_that_are_missing_are_found_out(mill: TraceMill) -> None:
    job_id = mill.submit(100)

    with pytest.raises(FailedItemsRemain):
        mill.drain(job_id, lost_rows=1)

    [error] = mill.body(job_id)["errors"]
    assert error["error_class"] == "count_mismatch"
    assert mill.page_keys() == []


# ---- partial results, where they were asked for


def test_a_partial_result_says_which_ids_are_missing_where(mill: TraceMill) -> None:
    ids = mill.ids(300)
    job_id = mill.submit(ids, params={"partial": True})

    def fail_materials(domain: str, some: Sequence[str]) -> None:
        if domain == "materials" and some[0] == sorted(ids)[100]:
            failing(ErrorClass.SOURCE_TIMEOUT)()

    drain_failing(mill, job_id, fail_materials)

    assert mill.job(job_id).state is JobState.COMPLETED_WITH_ERRORS
    manifest = mill.manifest(job_id)
    quality = manifest["quality"]
    assert quality["status"] == "partial"
    assert quality["domains"]["history"]["status"] == "complete"
    assert quality["domains"]["materials"]["failed"] == [
        {
            "segment": 2,
            "first_id": sorted(ids)[100],
            "last_id": sorted(ids)[199],
            "cids": 100,
            "error_class": "source_timeout",
        }
    ]
    read = sorted(ids)[:100] + sorted(ids)[200:]
    assert len(mill.result(job_id, "materials")) == counted(mill, "materials", read)
    assert len(mill.result(job_id, "history")) == counted(mill, "history", ids)

    assert requeue.requeue(mill.ctx, CALLER, job_id, WHY)["requeued"] == 1
    assert mill.work(job_id).state is JobState.COMPLETED
    assert mill.manifest(job_id)["quality"]["status"] == "complete"
    assert len(mill.result(job_id, "materials")) == counted(mill, "materials", ids)


def test_a_partial_result_whose_pages_vanish_says_so(mill: TraceMill) -> None:
    ids = mill.ids(200)
    job_id = mill.submit(ids, params={"partial": True})

    def fail_materials_and_flush(domain: str, some: Sequence[str]) -> None:
        if domain == "materials" and some[0] == min(ids):
            failing()()
        if domain == "history" and some[0] != min(ids):
            mill.ctx.link.flushdb()

    drain_failing(mill, job_id, fail_materials_and_flush)

    assert mill.job(job_id).state is JobState.COMPLETED_WITH_ERRORS
    quality = mill.manifest(job_id)["quality"]["domains"]
    for domain in LOOKUP:
        assert [each["error_class"] for each in quality[domain]["failed"]] == ["result_lost"]
        assert len(mill.result(job_id, domain)) == counted(mill, domain, sorted(ids)[100:])


def test_what_was_read_in_an_earlier_run_is_in_no_result_of_a_cancelled_one(
    mill: TraceMill,
) -> None:
    job_id = mill.submit(300)
    drain_failing(mill, job_id, Interference(mill, job_id, {3: failing()}))
    mill.ctx.link.flushdb()
    requeue.requeue(mill.ctx, CALLER, job_id, WHY)
    mill.drain(job_id, stop=iter([False, True]).__next__)

    requeue.cancel(mill.ctx, CALLER, job_id)

    assert mill.statuses(job_id) == ["done", "cancelled", "cancelled"]
    read = sorted(mill.ids(300))[:100]
    assert len(mill.result(job_id, "history")) == counted(mill, "history", read)


def test_a_partial_job_of_which_nothing_could_be_read_has_failed(mill: TraceMill) -> None:
    job_id = mill.submit(200, params={"partial": True})

    def fail(*_: object) -> None:
        failing(ErrorClass.SOURCE_UNAVAILABLE)()

    drain_failing(mill, job_id, fail)

    assert mill.job(job_id).state is JobState.FAILED
    assert mill.statuses(job_id) == ["failed", "failed"]


# ---- cancelled


def test_a_cancelled_job_that_was_queued_asks_the_source_nothing(mill: TraceMill) -> None:
    job_id = mill.submit(300)
    requeue.cancel(mill.ctx, CALLER, job_id)
    hook = Interference(mill, job_id, {})

    assert mill.job(job_id).state is JobState.CANCELLED
    mill.drain(job_id, hook=hook)

    assert hook.seen == []
    assert mill.job(job_id).counts.cancelled == 3


def test_a_cancelled_job_that_runs_stops_at_the_next_segment_and_what_is_done_can_be_read(
    mill: TraceMill,
) -> None:
    ids = mill.ids(400)
    job_id = mill.submit(ids)
    hook = Interference(mill, job_id, {2: lambda: requeue.cancel(mill.ctx, CALLER, job_id)})

    mill.drain(job_id, hook=hook)

    assert hook.segments == [1, 2]
    assert mill.job(job_id).state is JobState.CANCELLED
    assert mill.statuses(job_id) == ["done", "done", "cancelled", "cancelled"]
    quality = mill.manifest(job_id)["quality"]
    assert quality["status"] == "partial"
    failed = quality["domains"]["history"]["failed"]
    assert [(each["segment"], each["error_class"]) for each in failed] == [
        (3, "cancelled"),
        (4, "cancelled"),
    ]
    assert len(mill.result(job_id, "history")) == counted(mill, "history", sorted(ids)[:200])


# ---- leases and deaths


def die_in(mill: TraceMill, job_id: str) -> None:
    """Let a bell take the next segment and never be heard of again."""
    with mill.ctx.database.transaction() as tx:
        assert traces.claim(tx, job_id, leased_by="dead", lease_seconds=45)
    mill.elapse(60)
    mill.sweep()


def test_a_segment_whose_process_died_is_read_once_more(mill: TraceMill) -> None:
    job_id = mill.submit(200)
    die_in(mill, job_id)
    mill.elapse(1)

    body = mill.body(job_id)
    assert body["state"] == "running"
    assert mill.work(job_id).state is JobState.COMPLETED
    [first, _] = mill.segments(job_id)
    assert first.attempts == 2
    items = mill.rows("SELECT segment, error_class, leased_by FROM holdfast.segment_errors")
    assert items == [{"segment": 1, "error_class": "lease_expired", "leased_by": "dead"}]


def test_a_second_death_in_the_same_segment_is_the_end_of_the_job(mill: TraceMill) -> None:
    job_id = mill.submit(300)
    mill.drain(job_id, stop=iter([False, True]).__next__)
    die_in(mill, job_id)
    die_in(mill, job_id)

    job = mill.job(job_id)
    assert job.state is JobState.FAILED
    assert mill.statuses(job_id) == ["done", "failed", "cancelled"]
    [error] = mill.body(job_id)["errors"]
    assert error["error_class"] == "lease_expired"
    hook = Interference(mill, job_id, {})
    assert requeue.requeue(mill.ctx, CALLER, job_id, WHY)["requeued"] == 2
    mill.drain(job_id, hook=hook)
    assert hook.segments == [2, 3]
    assert mill.job(job_id).state is JobState.COMPLETED


def test_a_worker_that_lost_its_lease_changes_nothing(mill: TraceMill) -> None:
    job_id = mill.submit(200)
    others: list[dict[str, int]] = []

    def lose() -> None:
        if not others:
            others.append({})
            mill.elapse(60)
            mill.sweep()
            others.append(mill.drain(job_id))

    hook = Interference(mill, job_id, {1: lose})
    counts = mill.drain(job_id, hook=hook)

    assert others[1] == {"done": 2}
    assert counts == {"lease_lost": 1}
    assert mill.job(job_id).state is JobState.COMPLETED
    assert len(mill.page_keys()) == 4
    assert len(mill.result(job_id, "history")) == counted(mill, "history", mill.ids(200))


def test_a_job_that_ran_too_long_fails_by_that_name(mill: TraceMill) -> None:
    job_id = mill.submit(300)
    mill.drain(job_id, stop=iter([False, True]).__next__)
    mill.rows("UPDATE holdfast.jobs SET started_at = started_at - interval '31 minutes'")

    with pytest.raises(FailedItemsRemain):
        mill.drain(job_id)

    [error] = mill.body(job_id)["errors"]
    assert error["error_class"] == "job_timeout"
    assert "TRACE_JOB_TIMEOUT_SECONDS = 1800" in error["sample"]


def test_what_nobody_foresaw_ends_the_segment_by_name(mill: TraceMill) -> None:
    job_id = mill.submit(200)

    def break_down(*_: object) -> None:
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        mill.drain(job_id, hook=break_down)
    mill.sweep()

    assert mill.job(job_id).state is JobState.FAILED
    [error] = mill.body(job_id)["errors"]
    assert (error["error_class"], error["sample"]) == ("internal", "ZeroDivisionError")


# ---- estimates


def test_an_estimate_comes_from_what_such_jobs_have_cost(mill: TraceMill) -> None:
    first = mill.submit(200)
    assert mill.body(first)["progress"]["eta_seconds"] is None
    mill.drain(first)

    second = mill.submit(200)
    eta = mill.body(second)["progress"]["eta_seconds"]
    assert eta is not None
    assert 0 <= eta["p50"] <= eta["p90"]
    other = mill.submit(200, profile="query_tool_reverse")
    assert mill.body(other)["progress"]["eta_seconds"] is None


# ---- around it


def test_a_cancelled_job_whose_worker_died_ends_as_cancelled(mill: TraceMill) -> None:
    job_id = mill.submit(300)
    with mill.ctx.database.transaction() as tx:
        assert traces.claim(tx, job_id, leased_by="dead", lease_seconds=45)
    requeue.cancel(mill.ctx, CALLER, job_id)
    assert mill.job(job_id).state is JobState.RUNNING

    mill.elapse(60)
    mill.sweep()

    assert mill.job(job_id).state is JobState.CANCELLED
    assert mill.statuses(job_id) == ["cancelled"] * 3


def test_the_sweeper_rings_for_what_is_due_and_has_no_bell(mill: TraceMill) -> None:
    job_id = mill.submit(200)
    queue = mill.settings.trace_worker_queue
    mill.sweep()
    assert mill.ctx.bells.waiting(queue) == [job_id]
    mill.ctx.link.flushdb()

    mill.sweep()
    mill.sweep()

    assert mill.ctx.bells.waiting(queue) == [job_id]


def test_a_bell_that_calls_the_task_of_the_other_kind_is_refused(mill: TraceMill) -> None:
    job_id = mill.submit(200)
    queue = Queue(mill.settings.trace_worker_queue, connection=mill.ctx.link, serializer="json")
    queue.enqueue("worker.tasks.embed", job_id, 1, job_id=f"{job_id}-77")

    bell = BellJob.fetch(f"{job_id}-77", connection=mill.ctx.link)

    assert isinstance(bell, BellJob)
    assert bell.refusal == "it calls the task of another kind of job"
    with mill.ctx.database.transaction() as tx:
        mine = jobs.find(tx, job_id)
    assert mine
    assert mine.kind == "trace"


def test_old_jobs_are_forgotten_with_all_that_was_of_them(mill: TraceMill) -> None:
    job_id = mill.submit(200)
    drain_failing(mill, job_id, Interference(mill, job_id, {1: failing()}))
    mill.rows(
        """UPDATE holdfast.jobs SET finished_at = finished_at - interval '40 days',
                  expires_at = expires_at - interval '40 days'"""
    )

    assert cleanup.run_once(mill.ctx)["jobs"] == 1

    for table in ("jobs", "trace_jobs", "trace_segments", "segment_errors", "job_counts"):
        [row] = mill.rows(f"SELECT count(*) AS n FROM holdfast.{table}")  # noqa: S608
        assert row == {"n": 0}, table


@pytest.mark.parametrize(
    ("before", "after"),
    [("done", "processing"), ("cancelled", "done"), ("failed", "done"), ("pending", "done")],
)
def test_an_illegal_change_of_a_segment_is_refused_by_the_database(
    mill: TraceMill, before: str, after: str
) -> None:
    job_id = mill.submit(100)
    steps = {
        "pending": [],
        "done": ["processing", "done"],
        "failed": ["processing", "failed"],
        "cancelled": ["cancelled"],
    }
    change = """UPDATE holdfast.trace_segments SET status = %(status)s, error_class = 'internal'
                 WHERE job_id = %(job_id)s"""
    for status in steps[before]:
        mill.rows(change, status=status, job_id=job_id)

    with pytest.raises(CheckViolation, match=f"Invalid transition: {before} → {after}"):
        mill.rows(change, status=after, job_id=job_id)
