"""Trace jobs under faults: real workers that die, stop, lose Redis or the source in a segment."""

import json
import os
import signal
import tomllib
from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import psycopg
import pytest
import redis
from psycopg.rows import dict_row

from app.core import config
from app.web import create_app
from tests.api import Answer, Door
from tests.conftest import free_port
from tests.faults.redis_alone import open_redis
from tests.faults.stage import state_of
from tests.limited import open_group
from tests.processes import ROOT, Running, StartApi, StartProcess, wait_for
from tests.traces import IDS

QUEUE = "trace-events"
QUEUE_ENVIRON = {
    "QUEUE_VISIBILITY_TIMEOUT": "2",
    "SWEEP_SECONDS": "0.3",
    "QUEUE_WAIT_TIME": "1",
    "AUTH": "off",
    "TRACE_SEGMENT_CIDS": "100",
}
DEMO_QUERIES = ROOT / "app" / "adapters" / "sources" / "demo_queries.toml"
FROM = "FROM trace_demo.lot_wip_history h\n  LEFT JOIN"
GATE = FROM.replace(
    "FROM",
    "FROM (SELECT pg_advisory_xact_lock_shared(hashtext((%(ids)s::text[])[1]))) AS gate CROSS JOIN",
    1,
)
COUNTS = {
    "history": """SELECT count(*) AS n FROM trace_demo.lot_wip_history
                   WHERE container_id = ANY(%s) AND equipment_id IS NOT NULL
                     AND track_in_at IS NOT NULL""",
    "materials": """SELECT count(*) AS n FROM trace_demo.lot_materials_history
                     WHERE container_id = ANY(%s)""",
}
ASK: dict[str, Any] = {"profile": "query_tool", "domains": list(COUNTS)}
ASYNC = {"Prefer": "respond-async"}
FINAL = ("completed", "completed_with_errors", "failed", "cancelled")
SECONDS = 60.0
"""Much longer than anything takes."""

LIMIT_BYTES = 256 * 2**20
TIMES = 7
"""Each row so often: some 370,000 rows, which take more than a gigabyte as dicts."""

WITHOUT_END = """
local found = {}
for _, key in ipairs(redis.call('KEYS', 'trace:*')) do
    if redis.call('PTTL', key) == -1 then table.insert(found, key) end
end
return found
"""
ENDS = """
local found = {}
for _, key in ipairs(redis.call('KEYS', 'trace:job:*:result:*')) do
    table.insert(found, redis.call('PTTL', key))
end
return found
"""
"""Before version 7 the clock goes on in a script: equal ends are seen so in nearly every look."""

FROM_HISTORY, FROM_MATERIALS = "trace_demo.lot_wip_history h", "trace_demo.lot_materials_history m"


@dataclass
class Stage:
    """The API in this process, workers beside it, and a gate in the source for each segment."""

    door: Door
    start_process: StartProcess
    source: psycopg.Connection[dict[str, Any]]
    redis_url: str

    # ---- asking

    def ids(self, number: int) -> list[str]:
        rows = self.source.execute(IDS.encode(), {"count": number})
        return [row["container_id"] for row in rows]

    def post(self, ids: list[str]) -> str:
        answer = self.door.send("/api/trace/events", {**ASK, "container_ids": ids}, ASYNC)
        assert answer.status == 202, answer.body
        return answer.job_id

    def wait_until_final(self, job_id: str) -> dict[str, Any]:
        wait_for(lambda: self.door.job(job_id)["state"] in FINAL, SECONDS)
        return self.door.job(job_id)

    def result(self, job_id: str, query: str = "") -> Answer:
        return self.door.get(f"/api/job/{job_id}/result{query}")

    def check_whole(self, job_id: str, ids: list[str]) -> None:
        """Compare what can be read with what the source has."""
        for domain, query in COUNTS.items():
            row = self.source.execute(query.encode(), [ids]).fetchone()
            assert row
            page = self.result(job_id, f"?domain={domain}")
            assert page.status == 200, page.body
            assert page.json["total"] == row["n"] > 0
        lines = self.door.get(f"/api/job/{job_id}/result", {"Accept": "application/x-ndjson"}).lines
        assert lines[-1]["_"] == "complete"

    def errors(self, job_id: str) -> list[tuple[int, str]]:
        """Return the segment and the class of everything that went wrong."""
        return [
            (item["index"] + 1, error["error_class"])
            for item in self.door.items(job_id)
            for error in item["errors"]
        ]

    # ---- processes

    def start_worker(self, **more: str) -> Running:
        return self.start_process("worker", "run", QUEUE, **more)

    def start_sweeper(self) -> Running:
        return self.start_process("worker", "sweep")

    @contextmanager
    def closed(self, first_id: str) -> Iterator[None]:
        """Hold up whoever reads the segment that begins with an id."""
        self.source.execute("SELECT pg_advisory_lock(hashtext(%s))", [first_id])
        try:
            yield
        finally:
            self.source.execute("SELECT pg_advisory_unlock(hashtext(%s))", [first_id])

    def stuck(self, worker: Running, *, but: int = 0) -> int:
        """Return the horse of a worker that waits at the gate."""
        query = "SELECT 1 FROM pg_locks WHERE locktype = 'advisory' AND NOT granted"

        def found() -> list[int]:
            horses = [pid for pid in worker.children if pid != but]
            return horses if self.source.execute(query).fetchone() else []

        return wait_for(found, SECONDS)[0]

    def kill(self, horse: int) -> None:
        """Kill a horse, and wait until what it asked the source has ended too."""
        waiting = "SELECT pid FROM pg_locks WHERE locktype = 'advisory' AND NOT granted"
        [asked] = [row["pid"] for row in self.source.execute(waiting)]
        os.kill(horse, signal.SIGKILL)
        there = "SELECT 1 FROM pg_stat_activity WHERE pid = %s"
        wait_for(lambda: not self.source.execute(there, [asked]).fetchone(), SECONDS)


@pytest.fixture
def trace_environ(environ: dict[str, str], trace_source_url: str, tmp_path: Path) -> dict[str, str]:
    queries = tmp_path / "queries.toml"
    text = DEMO_QUERIES.read_text("utf-8")
    assert FROM in text
    queries.write_text(text.replace(FROM, GATE), "utf-8")
    named = {"TRACE_SOURCE_URL": trace_source_url, "TRACE_SOURCE_QUERIES": str(queries)}
    environ |= {**QUEUE_ENVIRON, **named}
    return environ


@contextmanager
def open_stage(environ: dict[str, str], start_process: StartProcess) -> Iterator[Stage]:
    app = create_app(config.load(environ))
    transport = httpx.WSGITransport(app=app, raise_app_exceptions=False)
    with (
        closing(app.extensions["context"]),
        closing(app.extensions["source"]),
        httpx.Client(transport=transport, base_url="http://127.0.0.1") as client,
        psycopg.connect(
            environ["TRACE_SOURCE_URL"], autocommit=True, row_factory=dict_row
        ) as source,
    ):
        yield Stage(Door(client, None), start_process, source, environ["REDIS_URL"])


@pytest.fixture
def stage(trace_environ: dict[str, str], start_process: StartProcess) -> Iterator[Stage]:
    with open_stage(trace_environ, start_process) as stage:
        yield stage


# ---- deaths


def test_a_killed_horse_is_named_and_its_segment_read_again(stage: Stage) -> None:
    ids = stage.ids(500)
    worker = stage.start_worker()
    stage.start_sweeper()
    third = sorted(ids)[200]
    with stage.closed(third):
        job_id = stage.post(ids)
        horse = stage.stuck(worker)
        wait_for(lambda: stage.door.job(job_id)["trace"]["segment"] == "3/5")
        stage.kill(horse)
        wait_for(lambda: stage.errors(job_id), SECONDS)

    body = stage.wait_until_final(job_id)

    assert body["state"] == "completed"
    assert stage.errors(job_id) == [(3, "killed")]
    assert [item["attempts"] for item in stage.door.items(job_id)] == [1, 1, 2, 1, 1]
    stage.check_whole(job_id, ids)


def test_a_horse_killed_twice_in_a_segment_fails_the_job_and_the_button_gives_all_of_it(
    stage: Stage,
) -> None:
    ids = stage.ids(500)
    worker = stage.start_worker()
    stage.start_sweeper()
    with stage.closed(sorted(ids)[200]):
        job_id = stage.post(ids)
        first = stage.stuck(worker)
        stage.kill(first)
        stage.kill(stage.stuck(worker, but=first))
        body = stage.wait_until_final(job_id)

    assert body["state"] == "failed"
    [error] = body["errors"]
    assert (error["error_class"], error["count"]) == ("killed", 1)
    assert "signal 9" in error["sample"]
    assert stage.errors(job_id) == [(3, "killed"), (3, "killed")]
    assert stage.result(job_id).code == "job_failed"
    # As it comes: of a bell that ended by an error RQ keeps a traceback, which is its own.
    failed = stage.door.http.get(f"/rq/0/data/jobs/{QUEUE}/failed/8/asc/1.json").json()["jobs"]
    assert {f"{job_id}-1"} <= {bell["id"] for bell in failed}

    pressed = stage.door.ask(
        "POST", f"/rq/job/{job_id}-1/requeue", {"X-Requested-With": "XMLHttpRequest"}
    )
    assert pressed.status == 200, pressed.body
    assert stage.wait_until_final(job_id)["state"] == "completed"
    assert [item["attempts"] for item in stage.door.items(job_id)] == [1, 1, 3, 1, 1]
    assert [item["run"] for item in stage.door.items(job_id)] == [1, 1, 2, 2, 2]
    stage.check_whole(job_id, ids)


def test_a_worker_killed_with_its_horse_is_made_good_by_the_lease(stage: Stage) -> None:
    ids = stage.ids(300)
    worker = stage.start_worker()
    stage.start_sweeper()
    with stage.closed(sorted(ids)[100]):
        job_id = stage.post(ids)
        horse = stage.stuck(worker)
        worker.kill()
        stage.kill(horse)
    stage.start_worker()

    assert stage.wait_until_final(job_id)["state"] == "completed"
    assert stage.errors(job_id) == [(2, "lease_expired")]
    stage.check_whole(job_id, ids)


def test_a_horse_stopped_longer_than_its_lease_changes_nothing_when_it_wakes(stage: Stage) -> None:
    ids = stage.ids(300)
    worker = stage.start_worker()
    stage.start_sweeper()
    with stage.closed(sorted(ids)[100]):
        job_id = stage.post(ids)
        horse = stage.stuck(worker)
        os.kill(horse, signal.SIGSTOP)
        wait_for(lambda: state_of(horse) == "T")
        wait_for(lambda: stage.errors(job_id), SECONDS)
        other = stage.start_worker()
    body = stage.wait_until_final(job_id)
    keys = page_keys(stage)

    os.kill(horse, signal.SIGCONT)
    wait_for(lambda: "the lease was lost" in worker.said, SECONDS)

    assert body["state"] == "completed"
    assert stage.errors(job_id) == [(2, "lease_expired")]
    assert other.is_alive
    assert page_keys(stage) == keys
    stage.check_whole(job_id, ids)


def test_a_stop_ends_after_the_segment_in_hand_and_another_worker_goes_on(stage: Stage) -> None:
    ids = stage.ids(500)
    worker = stage.start_worker()
    stage.start_sweeper()
    with stage.closed(sorted(ids)[100]):
        job_id = stage.post(ids)
        stage.stuck(worker)
        worker.send(signal.SIGTERM)
    assert worker.wait() == 0

    counts = stage.door.job(job_id)["counts"]
    assert (counts["failed"], counts["processing"]) == (0, 0)
    assert counts["pending"] > 0, "void: it was at its end"
    stage.start_worker()
    assert stage.wait_until_final(job_id)["state"] == "completed"
    assert stage.errors(job_id) == []
    stage.check_whole(job_id, ids)


# ---- Redis


def page_keys(stage: Stage) -> list[bytes]:
    with redis.Redis.from_url(stage.redis_url) as client:
        return sorted(client.scan_iter("trace:job:*:result:*"))


def test_an_emptied_redis_costs_time_and_results_but_no_rows(stage: Stage) -> None:
    ids = stage.ids(400)
    with redis.Redis.from_url(stage.redis_url) as client:
        job_id = stage.post(ids)
        assert client.dbsize() > 0
        client.flushdb()  # while it is queued
        stage.start_sweeper()
        with stage.closed(sorted(ids)[300]):
            worker = stage.start_worker()
            stage.stuck(worker)
            assert page_keys(stage), "void: there was no page"
            client.flushdb()  # while it runs
        assert stage.wait_until_final(job_id)["state"] == "completed"
        stage.check_whole(job_id, ids)
        assert {error_class for _, error_class in stage.errors(job_id)} == {"result_lost"}

        client.flushdb()  # when it is over
    gone = stage.result(job_id)
    assert (gone.status, gone.code) == (410, "result_expired")
    assert stage.door.job(job_id)["state"] == "completed"
    assert stage.door.send(f"/api/job/{job_id}/requeue").status == 202
    assert stage.wait_until_final(job_id)["state"] == "completed"
    stage.check_whole(job_id, ids)


@dataclass
class Full:
    """A stage on a Redis of its own, which may have no room."""

    stage: Stage
    client: redis.Redis
    database_url: str

    def room(self, size_bytes: int) -> None:
        """Limit what it holds; 0 is no limit."""
        self.client.config_set("maxmemory", size_bytes)

    def pressure(self, job_id: str) -> str:
        """Wait until the job waits for room, and return what it says of that."""
        found = wait_for(lambda: waits_for(self.stage, job_id, "memory_pressure"), SECONDS)
        assert found
        return found

    def let_time_pass(self) -> None:
        """Have the job due that waits."""
        with psycopg.connect(self.database_url) as connection:
            connection.execute("UPDATE holdfast.trace_jobs SET next_attempt_at = now()")

    def check_that_it_only_waited(self, job_id: str, ids: list[str]) -> None:
        """Check that no reading was charged or called a failure."""
        assert self.stage.wait_until_final(job_id)["state"] == "completed"
        assert [item["attempts"] for item in self.stage.door.items(job_id)] == [1, 1, 1]
        assert self.stage.errors(job_id) == []
        self.stage.check_whole(job_id, ids)


@pytest.fixture
def full(trace_environ: dict[str, str], start_process: StartProcess) -> Iterator[Full]:
    with open_redis(free_port()) as alone, redis.Redis.from_url(alone.url) as client:
        environ = {**trace_environ, "REDIS_URL": alone.url}

        def start(*arguments: str, **more: str) -> Running:
            return start_process(*arguments, **{"REDIS_URL": alone.url, **more})

        with open_stage(environ, start) as stage:
            yield Full(stage, client, environ["DATABASE_URL"])


def test_a_redis_that_is_nearly_full_makes_the_job_wait(full: Full) -> None:
    stage, client = full.stage, full.client
    client.mset({f"ballast {number}": bytes(10_000) for number in range(3000)})
    client.close()  # and with it the memory that so large a command took
    full.room(int(client.info("memory")["used_memory"]) * 100 // 85)
    ids = stage.ids(300)
    job_id = stage.post(ids)
    stage.start_worker()
    stage.start_sweeper()
    assert "Redis is nearly full" in full.pressure(job_id)

    full.room(0)
    full.let_time_pass()

    full.check_that_it_only_waited(job_id, ids)


def test_a_redis_that_has_no_room_for_a_page_makes_the_job_wait(full: Full) -> None:
    stage = full.stage
    ids = stage.ids(300)
    worker = stage.start_worker()
    stage.start_sweeper()
    with stage.closed(sorted(ids)[100]):
        job_id = stage.post(ids)
        stage.stuck(worker)
        pages = page_keys(stage)
        full.room(1)  # byte: whatever is written is refused
    full.pressure(job_id)
    assert page_keys(stage) == pages
    assert pages, "void: there was no page"

    full.room(0)
    full.let_time_pass()

    full.check_that_it_only_waited(job_id, ids)


def waits_for(stage: Stage, job_id: str, reason: str) -> str | None:
    waiting = stage.door.job(job_id)["waiting"]
    return str(waiting["detail"]) if waiting and waiting["reason"] == reason else None


def test_no_key_is_ever_without_an_end_and_the_pages_go_together(
    trace_environ: dict[str, str], start_process: StartProcess, start_api: StartApi
) -> None:
    trace_environ["TRACE_JOB_TTL_SECONDS"] = "3"
    with (
        open_stage(trace_environ, start_process) as stage,
        httpx.Client(base_url=start_api(), trust_env=False, timeout=30) as client,
        redis.Redis.from_url(stage.redis_url) as link,
    ):
        stage.door = Door(client, None)
        ids = stage.ids(500)
        worker = stage.start_worker()
        stage.start_sweeper()

        def is_final(job_id: str) -> bool:
            assert link.eval(WITHOUT_END, 0) == []
            return stage.door.job(job_id)["state"] in FINAL

        with stage.closed(sorted(ids)[200]):
            job_id = stage.post(ids)
            stage.stuck(worker)
            assert not is_final(job_id)
            assert page_keys(stage), "void: there was no page"
        wait_for(lambda: is_final(job_id), SECONDS)
        ends: list[list[int]] = []

        def are_gone() -> bool:
            ends.append(link.eval(ENDS, 0))
            return not ends[-1]

        wait_for(are_gone, SECONDS)
        assert {len(found) for found in ends} == {10, 0}, "void, where there is 0 alone"
        assert any(len(set(found)) == 1 for found in ends)
        assert stage.result(job_id).code == "result_expired"
        assert stage.door.job(job_id)["state"] == "completed"


# ---- the source


def test_a_source_that_goes_away_in_a_query_fails_the_job_and_leaves_no_half_segment(
    stage: Stage,
) -> None:
    ids = stage.ids(300)
    worker = stage.start_worker()
    stage.start_sweeper()
    with stage.closed(sorted(ids)[100]):
        job_id = stage.post(ids)
        stage.stuck(worker)
        killed = stage.source.execute(
            """SELECT count(pg_terminate_backend(pid)) AS n FROM pg_locks
                WHERE locktype = 'advisory' AND NOT granted"""
        ).fetchone()
        assert killed
        assert killed["n"] == 1
        body = stage.wait_until_final(job_id)

    assert body["state"] == "failed"
    assert [each["error_class"] for each in body["errors"]] == ["source_unavailable"]
    assert body["counts"]["cancelled"] == 1
    assert all(b":1-" in key for key in page_keys(stage))
    assert stage.door.send(f"/api/job/{job_id}/requeue").status == 202
    assert stage.wait_until_final(job_id)["state"] == "completed"
    stage.check_whole(job_id, ids)


def test_without_a_worker_a_job_is_accepted_and_says_what_it_waits_for(stage: Stage) -> None:
    ids = stage.ids(200)
    job_id = stage.post(ids)

    detail = waits_for(stage, job_id, "no_worker")
    assert detail
    assert f"python -m worker run {QUEUE}" in detail
    assert f"no_worker:{QUEUE}" in stage.door.get("/readyz").json["degraded"]
    assert f'holdfast_workers{{queue="{QUEUE}"}} 0.0' in stage.door.http.get("/metrics").text

    stage.start_worker()
    assert stage.wait_until_final(job_id)["state"] == "completed"
    assert f"no_worker:{QUEUE}" not in stage.door.get("/readyz").json["degraded"]
    stage.check_whole(job_id, ids)


# ---- memory


def multiplied(text: str) -> str:
    """Return queries that give each row several times."""
    for name in (FROM_HISTORY, FROM_MATERIALS):
        assert f"FROM {name}" in text
        text = text.replace(f"FROM {name}", f"FROM generate_series(1, {TIMES}) CROSS JOIN {name}")
    return text


def test_a_job_fits_into_256_mb_where_the_naive_way_is_killed(
    stage: Stage, trace_environ: dict[str, str], start_process: StartProcess, tmp_path: Path
) -> None:
    ids = stage.ids(10_000)
    queries = tmp_path / "multiplied.toml"
    queries.write_text(multiplied(DEMO_QUERIES.read_text("utf-8")), "utf-8")
    with open_group(LIMIT_BYTES) as group:
        worker = start_process(
            *("tests.limited", str(group.path), "worker", "run", "trace-events"),
            TRACE_SOURCE_QUERIES=str(queries),
            TRACE_SEGMENT_CIDS="10000",
        )
        job_id = stage.post(ids)
        body = stage.wait_until_final(job_id)
        assert body["state"] == "completed", body["errors"]
        assert group.kills == 0
        peak_bytes = group.peak_bytes
        rows = sum(body["trace"]["rows"].values())
        assert rows > 300_000
        worker.stop()

        selects = tomllib.loads(queries.read_text("utf-8"))
        ask = tmp_path / "ask.json"
        chosen = [selects[name] for name in ("history", "materials")]
        ask.write_text(json.dumps({"ids": sorted(ids), "selects": chosen}), "utf-8")
        naive = start_process(
            *("tests.limited", str(group.path), "tests.naive_trace"),
            *(trace_environ["TRACE_SOURCE_URL"], str(ask)),
        )
        assert naive.wait(60) == -signal.SIGKILL, naive.said
        assert group.kills == 1

    told = {"scenario": "trace in 256 MB", "rows": rows, "peak_mb": peak_bytes // 2**20}
    print(json.dumps(told))  # noqa: T201 - the run's own line
