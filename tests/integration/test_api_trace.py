"""POST /api/trace/events and what is read afterwards, as clients see it."""

import json
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import cast

import httpx
import psycopg
import pytest
from flask import Flask

from app.core import config
from app.core.context import Context
from app.core.errors import FailedItemsRemain
from app.core.keys import hash_of, new_key
from app.core.store import clients
from app.web import create_app
from tests.api import LINES, Answer, Door
from tests.conftest import free_port
from tests.processes import ROOT, wait_for
from tests.traces import IDS
from worker import tracejob
from worker.runtime import open_trace_horse, prepare_trace

ASYNC = {"Prefer": "respond-async"}
AS_LINES = {"Accept": LINES}
DOMAINS = ["history", "materials"]
THRESHOLD, SEGMENT = 60, 50


@dataclass
class Site:
    """The application, the source behind it, and a worker of traces in this process."""

    app: Flask
    source_url: str

    @property
    def ctx(self) -> Context:
        return cast("Context", self.app.extensions["context"])

    def door(self, client: str, *scopes: str, may_be_away: bool = False) -> Door:
        key = new_key(client)
        with self.ctx.database.transaction() as tx:
            clients.insert(
                tx,
                prefix=client,
                key_hash=hash_of(key),
                client=client,
                scopes=scopes or ("submit", "read", "requeue"),
                days=None,
            )
        transport = httpx.WSGITransport(app=self.app, raise_app_exceptions=False)
        http = httpx.Client(transport=transport, base_url="http://localhost")
        return Door(http, key, may_be_away=may_be_away)

    def ids(self, number: int) -> list[str]:
        with psycopg.connect(self.source_url) as connection:
            return [row[0] for row in connection.execute(IDS.encode(), {"count": number})]

    def work(self, job_id: str) -> None:
        """Follow one bell of a job, as a worker does."""
        recipe = prepare_trace(self.ctx.settings)
        horse = open_trace_horse(recipe, leased_by=f"{job_id}-0", stop_asked=lambda: False)
        with closing(horse), suppress(FailedItemsRemain):
            tracejob.drain(horse, job_id, 1000)


OpenSite = Callable[..., Site]


@pytest.fixture
def open_site(environ: dict[str, str], trace_source_url: str) -> Iterator[OpenSite]:
    with ExitStack() as stack:

        def open_one(**more: str) -> Site:
            sizes = {
                "TRACE_ASYNC_CID_THRESHOLD": str(THRESHOLD),
                "TRACE_SEGMENT_CIDS": str(SEGMENT),
            }
            source = {"TRACE_SOURCE_URL": trace_source_url}
            app = create_app(config.load({**environ, **sizes, **source, **more}))
            stack.callback(app.extensions["context"].close)
            stack.callback(app.extensions["source"].close)
            return Site(app, trace_source_url)

        yield open_one


@pytest.fixture
def site(open_site: OpenSite) -> Site:
    return open_site()


@pytest.fixture
def door(site: Site) -> Door:
    return site.door("alice")


def asked(ids: object, **more: object) -> dict[str, object]:
    return {"profile": "query_tool", "domains": DOMAINS, "container_ids": ids, **more}


def post(door: Door, ids: object, headers: dict[str, str] | None = None, **more: object) -> Answer:
    return door.send("/api/trace/events", asked(ids, **more), headers)


def done(site: Site, door: Door, ids: list[str], **more: object) -> str:
    """Post a request as a job, and work it off."""
    answer = post(door, ids, ASYNC, **more)
    assert answer.status == 202, answer.body
    site.work(answer.job_id)
    return answer.job_id


# ---- at once, or as a job


def test_up_to_the_threshold_an_answer_has_the_events(site: Site, door: Door) -> None:
    ids = site.ids(THRESHOLD)

    answer = post(door, [*ids, ids[0], f" {ids[1]} "])

    assert answer.status == 200
    body = answer.json
    assert (body["stage"], body["async"], body["cid_count"]) == ("events", False, THRESHOLD)
    assert list(body["results"]) == DOMAINS
    for found in body["results"].values():
        assert found["count"] == len(found["data"]) > 0
    assert body["quality"]["status"] == "complete"


def test_above_it_there_is_a_job_with_the_same_rows_in_the_same_order(
    site: Site, door: Door, open_site: OpenSite
) -> None:
    ids = site.ids(THRESHOLD + 1)

    answer = post(door, ids)

    assert answer.status == 202
    assert answer.headers["location"] == answer.json["status_url"] == f"/api/job/{answer.job_id}"
    assert answer.headers["retry-after"]
    assert answer.json == {
        "job_id": answer.job_id,
        "kind": "trace",
        "stage": "events",
        "async": True,
        "state": "queued",
        "status_url": f"/api/job/{answer.job_id}",
        "result_url": f"/api/job/{answer.job_id}/result",
        "accepted": THRESHOLD + 1,
        "duplicates": 0,
        "rejected": 0,
        "errors": [],
        "estimated_seconds": None,
    }
    assert answer.job_id.startswith("trace-evt-")
    site.work(answer.job_id)
    large = open_site(TRACE_ASYNC_CID_THRESHOLD="1000").door("bob")
    at_once = post(large, list(reversed(ids))).json["results"]
    for domain in DOMAINS:
        page = door.get(f"/api/job/{answer.job_id}/result?domain={domain}").json
        assert page["data"] == at_once[domain]["data"]


def test_one_duplicate_more_than_the_threshold_is_no_more_ids(site: Site, door: Door) -> None:
    ids = site.ids(THRESHOLD)
    assert post(door, [*ids, ids[0]]).status == 200
    answer = post(door, [*ids, ids[0]], ASYNC)
    assert (answer.json["accepted"], answer.json["duplicates"]) == (THRESHOLD, 1)


@pytest.mark.parametrize(("number", "segments"), [(20_000, None), (20_001, 3), (50_001, 6)])
def test_at_the_defaults(
    environ: dict[str, str], trace_source_url: str, number: int, segments: int | None
) -> None:
    app = create_app(config.load({**environ, "TRACE_SOURCE_URL": trace_source_url}))
    site = Site(app, trace_source_url)
    with closing(site.ctx), closing(app.extensions["source"]):
        door = site.door("alice")
        ids = site.ids(10_000)
        ids += [f"{position:016x}" for position in range(number - len(ids))]

        answer = post(door, ids)

        if segments is None:
            assert answer.status == 200
            assert answer.json["cid_count"] == number
            return
        assert answer.status == 202
        site.work(answer.job_id)
        body = door.job(answer.job_id)
        assert (body["state"], body["counts"]["total"]) == ("completed", segments)
        assert body["trace"]["segment"] == f"{segments}/{segments}"


def test_who_waits_gets_the_same_answer_from_the_job(site: Site, door: Door) -> None:
    ids = site.ids(THRESHOLD + 5)
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(post, door, ids, {"Prefer": "wait=50"})
        find = "SELECT id FROM holdfast.jobs"
        with site.ctx.database.session() as connection:
            [row] = wait_for(lambda: connection.execute(find).fetchall())
        site.work(row["id"])
        answer = waiting.result()

    assert answer.status == 200
    assert answer.headers["preference-applied"] == "wait=50"
    assert answer.headers["location"] == f"/api/job/{row['id']}"
    assert answer.json["async"] is False
    history = answer.json["results"]["history"]
    page = door.get(f"/api/job/{row['id']}/result?domain=history").json
    assert history == {"data": page["data"], "count": page["total"]}
    assert post(door, ids, {"Prefer": "wait=1"}).status == 202


def test_the_same_key_is_the_same_job(site: Site, door: Door) -> None:
    ids = site.ids(THRESHOLD + 1)
    key = {"Idempotency-Key": "once"}

    first = post(door, ids, key)

    assert post(door, ids, key).body == first.body
    other = post(door, ids[1:], {**key, **ASYNC})
    assert (other.status, other.code) == (422, "idempotency_key_reused")


# ---- limits


def test_a_client_with_too_many_open_jobs_is_asked_to_come_later(open_site: OpenSite) -> None:
    site = open_site(TRACE_MAX_QUEUED="2")
    door = site.door("alice")
    for _ in range(2):
        assert post(door, ["a"], ASYNC).status == 202

    refused = post(door, ["a"], ASYNC)

    assert (refused.status, refused.code) == (429, "too_many_queued")
    assert "trace_max_queued" in refused.json["detail"]
    assert int(refused.headers["retry-after"]) > 0
    assert post(site.door("bob"), ["a"], ASYNC).status == 202
    assert post(door, ["a"]).status == 200


def test_only_so_many_are_answered_at_once(open_site: OpenSite, trace_source_url: str) -> None:
    site = open_site(TRACE_MAX_SYNC="1")
    door = site.door("alice")
    ids = site.ids(5)
    waiting = """SELECT 1 FROM pg_locks
                  WHERE relation = 'trace_demo.container'::regclass AND NOT granted"""
    with psycopg.connect(trace_source_url) as holder, ThreadPoolExecutor(1) as pool:
        holder.execute("LOCK TABLE trace_demo.container")
        held = pool.submit(post, door, ids)
        wait_for(lambda: holder.execute(waiting.encode()).fetchone())
        refused = post(door, ["a"])
        holder.rollback()

        assert (refused.status, refused.code) == (429, "too_many_queued")
        assert "respond-async" in refused.json["detail"]
        assert held.result().status == 200
    assert post(door, ["a"]).status == 200


def test_every_limit_is_told(door: Door) -> None:
    limits = door.get("/api/limits").json
    for name in ("trace_async_cid_threshold", "trace_segment_cids", "trace_max_cids"):
        assert limits[name] > 0
    assert limits["trace_result_bytes"] == 512 * 2**20


# ---- bad input


@pytest.mark.parametrize(
    ("value", "status", "code", "field"),
    [
        (asked([]), 422, "no_items", "container_ids"),
        (asked(["ok", 7]), 422, "id_invalid", "container_ids"),
        (asked(["a\x00b"]), 422, "id_invalid", "container_ids"),
        (asked(["x" * 65]), 422, "id_invalid", "container_ids"),
        (asked("a"), 422, "wrong_type", "container_ids"),
        (asked(["a"], profile="nope"), 422, "unknown_value", "profile"),
        (asked(["a"], domains=["nope"]), 422, "unknown_value", "domains"),
        (asked(["a"], domains=["upstream_history"]), 422, "unknown_value", "domains"),
        (asked(["a"], domains=[]), 422, "too_short", "domains"),
        (asked(["a"], params={"partial": 1}), 422, "wrong_type", "params"),
        (asked(["a"], more=1), 422, "unknown_field", "more"),
        ({}, 422, "missing", "profile"),
    ],
)
def test_bad_input_is_named(door: Door, value: object, status: int, code: str, field: str) -> None:
    answer = door.send("/api/trace/events", value)

    assert (answer.status, answer.code) == (status, "invalid_request")
    assert (answer.faults[0]["field"], answer.faults[0]["code"]) == (field, code)


def test_a_million_ids_are_refused_by_name(door: Door) -> None:
    answer = post(door, [f"{number:016x}" for number in range(1_000_000)])

    assert (answer.status, answer.code) == (413, "too_large")
    assert answer.faults[0]["field"] == "container_ids"
    assert "trace_max_cids = 800000" in answer.json["detail"]


def test_a_body_that_is_no_request(open_site: OpenSite) -> None:
    door = open_site(MAX_BODY_BYTES="2048").door("alice")
    json_type = {"Content-Type": "application/json"}
    path = "/api/trace/events"

    assert post(door, ["x" * 60] * 50).code == "too_large"
    assert door.ask("POST", path, json_type, b"{").code == "malformed_json"
    assert door.ask("POST", path, json_type, b'{"profile": NaN}').code == "malformed_json"
    wrong_type = door.ask("POST", path, {"Content-Type": "text/plain"}, b"{}")
    assert (wrong_type.status, wrong_type.code) == (415, "unsupported_media_type")
    assert door.send(f"{path}?more=1", asked(["a"])).faults[0]["code"] == "unknown_argument"
    assert door.ask("GET", path).status == 405


@pytest.mark.parametrize(
    ("query", "field"),
    [
        *(("domain=history&limit=0", "limit"), ("domain=history&limit=-1", "limit")),
        *(("domain=history&limit=5001", "limit"), ("domain=history&limit=many", "limit")),
        *(("domain=history&offset=-1", "offset"), ("domain=nope", "domain")),
        *(("domain=holds", "domain"), ("limit=5", "limit"), ("page=1", "page")),
    ],
)
def test_a_bad_question_for_a_result_is_named(
    site: Site, door: Door, query: str, field: str
) -> None:
    job_id = done(site, door, site.ids(3))

    answer = door.get(f"/api/job/{job_id}/result?{query}")

    assert (answer.status, answer.code) == (422, "invalid_request")
    assert answer.faults[0]["field"] == field


# ---- reading


def test_a_result_is_read_by_page_whole_and_as_lines(site: Site, door: Door) -> None:
    job_id = done(site, door, site.ids(120))
    path = f"/api/trace/job/{job_id}/result"

    manifest = door.get(path).json
    assert manifest["job_id"] == job_id
    assert [column["name"] for column in manifest["domains"]["history"]["columns"]][:2] == [
        "container_id",
        "container_name",
    ]
    total = manifest["domains"]["history"]["rows"]
    page = door.get(f"{path}?domain=history&offset=10&limit=5").json
    assert (page["count"], page["total"], page["next"]) == (5, total, 15)
    assert door.get(f"{path}?domain=history&offset={total}").json["data"] == []
    lines = door.get(path, AS_LINES).lines
    assert [line["_"] for line in lines if "_" in line] == [
        *("meta", "domain_start", "domain_end", "domain_start", "domain_end", "complete")
    ]
    rows = [line for line in lines if "_" not in line]
    assert rows[10:15] == page["data"]
    assert lines[-1]["rows"] == len(rows)
    only = door.get(f"{path}?domain=materials", AS_LINES).lines
    assert [line for line in only if "_" not in line] == rows[total:]
    [first, *_] = door.items(job_id)
    assert (first["status"], first["cids"], first["errors"]) == ("done", SEGMENT, [])
    [listed] = door.get("/api/jobs?kind=trace").json["jobs"]
    assert listed["job_id"] == job_id


def test_too_early_failed_and_gone_are_told_apart(site: Site, door: Door) -> None:
    job_id = post(door, site.ids(5), ASYNC).job_id
    path = f"/api/job/{job_id}/result"
    assert (door.get(path).status, door.get(path).code) == (409, "job_not_finished")
    site.work(job_id)
    assert door.get(path).status == 200

    site.ctx.link.flushdb()

    for query, headers in (("", None), ("?domain=history", None), ("", AS_LINES)):
        gone = door.get(path + query, headers)
        assert (gone.status, gone.code) == (410, "result_expired")
    assert door.job(job_id)["state"] == "completed"
    assert door.send(f"/api/trace/job/{job_id}/requeue").json["requeued"] == 1
    site.work(job_id)
    assert door.get(path).status == 200


def test_another_client_s_job_is_byte_for_byte_a_missing_one(site: Site, door: Door) -> None:
    job_id = done(site, door, site.ids(3))
    missing = f"trace-evt-{'0' * 32}"
    stranger = site.door("mallory")

    for base in ("/api/job", "/api/trace/job"):
        for path in ("", "/items", "/result", "/result?domain=history", "/requeue", "/cancel"):
            method = "POST" if path in ("/requeue", "/cancel") else "GET"
            theirs = stranger.ask(method, f"{base}/{job_id}{path}")
            nobodys = stranger.ask(method, f"{base}/{missing}{path}")
            assert (theirs.status, theirs.body) == (404, nobodys.body)
    lines = stranger.get(f"/api/job/{job_id}/result", AS_LINES)
    assert (lines.status, lines.code) == (404, "job_not_found")


def test_a_cancelled_job_never_asks_the_source(site: Site, door: Door) -> None:
    job_id = post(door, site.ids(5), ASYNC).job_id

    assert door.send(f"/api/trace/job/{job_id}/cancel").json["state"] == "cancelled"
    assert door.get(f"/api/job/{job_id}/result").json["quality"]["status"] == "partial"


def test_an_estimate_comes_with_history(site: Site, door: Door) -> None:
    done(site, door, site.ids(100))

    answer = post(door, site.ids(100), ASYNC)

    assert answer.json["estimated_seconds"] >= 0


# ---- a source that fails


def broken_source(tmp_path: Path, domain: str, select: str) -> str:
    """Write queries of which one does not do what it should."""
    demo = ROOT / "app" / "adapters" / "sources" / "demo_queries.toml"
    text = demo.read_text("utf-8")
    begin = text.index(f"{domain} = '''")
    end = text.index("'''", begin + len(domain) + 6) + 3
    path = tmp_path / "broken.toml"
    path.write_text(f"{text[:begin]}{domain} = '''\n{select}\n'''{text[end:]}", "utf-8")
    return str(path)


MATERIALS = """
SELECT container_id, ''::text AS container_name, ''::text AS material_part_name,
       ''::text AS material_lot_name, ''::text AS material_description, 1.5 AS qty_consumed,
       ''::text AS workcenter_name, ''::text AS spec_name, ''::text AS equipment_name,
       txn_at
  FROM {table} WHERE container_id = ANY(%(ids)s) AND {condition}
"""
SLOW = MATERIALS.format(
    table="trace_demo.lot_materials_history", condition="pg_sleep(30) IS NOT NULL"
)
WRONG = MATERIALS.format(table="trace_demo.nowhere", condition="true")


@pytest.mark.parametrize(
    ("select", "status", "code"), [(SLOW, 504, "source_timeout"), (WRONG, 502, "source_failed")]
)
def test_a_source_that_is_slow_or_refuses_is_told_by_its_own_words(
    open_site: OpenSite, tmp_path: Path, select: str, status: int, code: str
) -> None:
    queries = broken_source(tmp_path, "materials", select)
    site = open_site(TRACE_SOURCE_QUERIES=queries, TRACE_SOURCE_TIMEOUT_SECONDS="0.3")
    door = site.door("alice", may_be_away=True)
    ids = site.ids(5)

    answer = raw(door, ids)

    assert answer.status_code == status
    assert answer.json()["code"] == code
    for secret in ("SELECT", "trace_demo", ids[0], "127.0.0.1"):
        assert secret not in answer.text
    partial = post(door, ids, params={"partial": True})
    assert partial.status == 200
    quality = partial.json["quality"]["domains"]
    assert quality["history"]["status"] == "complete"
    assert [each["error_class"] for each in quality["materials"]["failed"]] == [code]

    job_id = done(site, door, ids)
    body = door.job(job_id)
    assert (body["state"], body["errors"][0]["error_class"]) == ("failed", code)
    assert door.get(f"/api/job/{job_id}/result").code == "job_failed"


def raw(door: Door, ids: list[str]) -> httpx.Response:
    """Post without the checks for a fault of ours: this one is the source's."""
    headers = {"Authorization": f"Bearer {door.key}", "Content-Type": "application/json"}
    return door.http.post("/api/trace/events", content=json.dumps(asked(ids)), headers=headers)


def test_a_source_that_is_away_is_told_with_a_time_to_come_back(open_site: OpenSite) -> None:
    away = f"postgresql://nobody:secret@127.0.0.1:{free_port()}/x"
    site = open_site(TRACE_SOURCE_URL=away)
    door = site.door("alice")

    answer = raw(door, ["a"])

    assert (answer.status_code, answer.json()["code"]) == (503, "source_unavailable")
    assert int(answer.headers["retry-after"]) > 0
    assert "secret" not in answer.text
    job_id = done(site, door, ["a"])
    assert door.job(job_id)["errors"][0]["error_class"] == "source_unavailable"


# ---- Redis away, and nobody to work


def test_without_redis_few_are_answered_and_many_are_accepted(open_site: OpenSite) -> None:
    site = open_site(REDIS_URL=f"redis://127.0.0.1:{free_port()}/0")
    door = site.door("alice", may_be_away=True)

    assert post(door, site.ids(5)).status == 200
    answer = post(door, site.ids(THRESHOLD + 1))

    assert answer.status == 202
    body = door.job(answer.job_id)
    assert body["state"] == "queued"
    assert body["waiting"]["reason"] == "no_worker"
    degraded = door.get("/readyz").json["degraded"]
    assert "redis" in degraded
    assert "no_worker:trace-events" in degraded
    site.work(answer.job_id)
    assert door.job(answer.job_id)["waiting"]["reason"] in ("no_worker", "retry_scheduled")


def test_where_no_trace_worker_is_expected_none_is_missed(open_site: OpenSite) -> None:
    door = open_site(TRACE_WORKER_COUNT="0").door("alice")

    assert "no_worker:trace-events" not in door.get("/readyz").json["degraded"]


def test_what_needs_which_scope(site: Site) -> None:
    reader, writer = site.door("reader", "read"), site.door("writer", "submit")

    assert post(reader, ["a"]).status == 403
    job_id = post(writer, ["a"], ASYNC).job_id
    assert writer.get(f"/api/trace/job/{job_id}/result").status == 403
    assert writer.send(f"/api/trace/job/{job_id}/requeue").status == 403
