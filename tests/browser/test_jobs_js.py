"""jobs.js in a real browser: on the running server, and on one that misbehaves at will."""

import json
import shutil
import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, cast

import httpx
import psycopg
import pytest
import redis
from selenium.webdriver import Chrome, ChromeOptions
from selenium.webdriver.chrome.service import Service

from app.web.auth import COOKIE
from tests.processes import ROOT, StartApi, StartProcess

SCRIPT = (ROOT / "app" / "web" / "static" / "jobs.js").read_bytes()
FLAGS = ("--headless", "--no-sandbox", "--disable-gpu", "--no-first-run", "--disable-sync")
CALL = """
const [path, body, name, given, done] = arguments;
const options = { pollInterval: 20, ...given };
const seen = [], pieces = {};
options.onProgress = (job) => seen.push(job);
if (given.rows) {
  options.onRows = (domain, rows) => { pieces[domain] = (pieces[domain] ?? 0) + rows.length; };
}
if (given.abortAfterLooks) {
  const controller = new AbortController();
  options.signal = controller.signal;
  options.onProgress = (job) => {
    seen.push(job);
    if (seen.length === given.abortAfterLooks) controller.abort();
  };
}
import(path)
  .then((jobs) => jobs[name](...body, options))
  .then((answer) => done({ answer, seen, pieces }))
  .catch((error) => done({ seen, pieces, error: {
    name: error.name, code: error.code, status: error.status, message: String(error.message) } }));
"""
ASK = {"profile": "query_tool", "domains": ["history", "materials"]}
COUNT = """
SELECT count(*) FROM trace_demo.lot_materials_history WHERE container_id = ANY(%s)
"""


@pytest.fixture(scope="module")
def driver(chromium: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Chrome]:
    options = ChromeOptions()
    options.binary_location = chromium
    for flag in [*FLAGS, f"--user-data-dir={tmp_path_factory.mktemp('profile')}"]:
        options.add_argument(flag)
    driver = Chrome(options, Service(shutil.which("chromedriver")))
    driver.set_script_timeout(60)
    # A page of one's own has a policy of its own; those of the API load no script of strangers.
    driver.execute_cdp_cmd("Page.setBypassCSP", {"enabled": True})
    yield driver
    driver.quit()


@dataclass(frozen=True, slots=True)
class Site:
    """A server, seen from a page of it."""

    driver: Chrome
    url: str
    script: str

    def call(self, name: str, *arguments: object, **options: object) -> dict[str, Any]:
        """Call a function of jobs.js, and return what it answered, showed, or threw."""
        answer = self.driver.execute_async_script(CALL, self.script, arguments, name, options)
        return cast("dict[str, Any]", answer)


# ---- the running server


@pytest.fixture
def trace_environ(environ: dict[str, str], trace_source_url: str) -> dict[str, str]:
    environ |= {
        "AUTH": "off",
        "TRACE_SOURCE_URL": trace_source_url,
        "TRACE_ASYNC_CID_THRESHOLD": "50",
        "TRACE_SEGMENT_CIDS": "20",
        "SWEEP_SECONDS": "0.3",
    }
    return environ


@pytest.fixture
def site(trace_environ: dict[str, str], driver: Chrome, start_api: StartApi) -> Site:
    del trace_environ
    url = start_api()
    driver.get(f"{url}/livez")
    return Site(driver, url, "/static/jobs.js")


@pytest.fixture
def source(trace_source_url: str) -> Iterator[psycopg.Connection]:
    with psycopg.connect(trace_source_url) as connection:
        yield connection


def some_ids(source: psycopg.Connection, number: int) -> list[str]:
    query = "SELECT container_id FROM trace_demo.container ORDER BY md5(container_id) LIMIT %s"
    return [row[0] for row in source.execute(query, [number])]


def materials(source: psycopg.Connection, ids: Sequence[str]) -> int:
    row = source.execute(COUNT, [list(ids)]).fetchone()
    assert row
    return int(row[0])


def test_an_answer_at_once_and_a_job_are_the_same_to_a_page(
    site: Site, source: psycopg.Connection, start_process: StartProcess
) -> None:
    few, many = some_ids(source, 50), some_ids(source, 600)
    start_process("worker", "sweep")
    start_process("worker", "run", "trace-events")

    at_once = site.call("submitAndWait", "/api/trace/events", {**ASK, "container_ids": few})
    as_job = site.call("submitAndWait", "/api/trace/events", {**ASK, "container_ids": many})

    assert "error" not in at_once | as_job, (at_once.get("error"), as_job.get("error"))
    assert at_once["seen"] == []
    assert at_once["answer"]["job"] is None
    for found, ids in ((at_once, few), (as_job, many)):
        results = found["answer"]["results"]
        assert list(results) == ["history", "materials"]
        assert results["materials"]["count"] == len(results["materials"]["data"])
        assert results["materials"]["count"] == materials(source, ids) > 0
        assert found["answer"]["quality"]["status"] == "complete"
    looks = as_job["seen"]
    assert looks[-1]["state"] == "completed"
    percents = [each["progress"]["percent"] for each in looks]
    assert percents == sorted(percents)
    assert len(set(percents)) > 1
    assert looks[-1]["trace"]["segment"] == "30/30"


def test_rows_can_be_taken_as_they_come(
    site: Site, source: psycopg.Connection, start_process: StartProcess
) -> None:
    ids = some_ids(source, 600)
    start_process("worker", "run", "trace-events")

    found = site.call(
        "submitAndWait", "/api/trace/events", {**ASK, "container_ids": ids}, rows=True
    )

    assert found["pieces"]["materials"] == materials(source, ids)
    assert found["answer"]["results"]["materials"] == {"count": materials(source, ids)}


def test_a_result_that_is_gone_is_an_error_with_its_code(
    site: Site, source: psycopg.Connection, start_process: StartProcess, redis_url: str
) -> None:
    start_process("worker", "run", "trace-events")
    ids = some_ids(source, 100)
    found = site.call("submitAndWait", "/api/trace/events", {**ASK, "container_ids": ids})
    result_url = found["answer"]["job"]["links"]["result"]
    with redis.Redis.from_url(redis_url) as client:
        client.delete(*client.scan_iter("trace:job:*:result:materials:*"))

    gone = site.call("readRows", result_url, "history")
    cut = site.call("streamRows", result_url, None)

    assert gone["error"]["name"] == "JobError"
    assert (gone["error"]["code"], gone["error"]["status"]) == ("result_expired", 410)
    assert cut["error"]["code"] == "result_expired"


def test_a_person_who_goes_away_stops_waiting_and_can_cancel(
    site: Site, source: psycopg.Connection
) -> None:
    ids = some_ids(source, 100)

    left = site.call(
        "submitAndWait", "/api/trace/events", {**ASK, "container_ids": ids}, abortAfterLooks=2
    )
    job = left["seen"][-1]
    cancelled = site.call("cancelJob", job)

    assert left["error"]["name"] == "AbortError"
    assert job["waiting"]["reason"] == "no_worker"
    assert cancelled["answer"]["state"] == "cancelled"
    assert httpx.get(f"{site.url}/api/job/{job['job_id']}").json()["state"] == "cancelled"


def test_what_is_refused_and_what_fails_is_told(
    site: Site, source: psycopg.Connection, start_process: StartProcess, trace_source_url: str
) -> None:
    refused = site.call("submitAndWait", "/api/trace/events", {**ASK, "container_ids": []})
    assert refused["error"]["code"] == "invalid_request"
    assert "at least one container" in refused["error"]["message"]

    start_process(
        *("worker", "run", "trace-events"),
        TRACE_SOURCE_URL=trace_source_url.replace("trace_source", "nowhere"),
    )
    ids = some_ids(source, 100)
    failed = site.call("submitAndWait", "/api/trace/events", {**ASK, "container_ids": ids})
    assert failed["error"]["code"] == "job_failed"
    assert "source_" in failed["error"]["message"]


def test_a_page_of_somebody_who_is_signed_in_may_ask_and_cancel(
    environ: dict[str, str],
    driver: Chrome,
    start_api: StartApi,
    start_process: StartProcess,
    source: psycopg.Connection,
    trace_source_url: str,
) -> None:
    environ |= {"TRACE_SOURCE_URL": trace_source_url, "TRACE_ASYNC_CID_THRESHOLD": "50"}
    made = start_process("worker", "keys", "create", "--client", "acme", "--scopes", "submit,read")
    assert made.wait() == 0, made.said
    url = start_api()
    driver.get(f"{url}/livez")
    cookie = {"httpOnly": True, "sameSite": "Strict", "path": "/"}
    driver.add_cookie({"name": COOKIE, "value": made.said.strip(), **cookie})
    site = Site(driver, url, "/static/jobs.js")

    few = site.call(
        "submitAndWait", "/api/trace/events", {**ASK, "container_ids": some_ids(source, 10)}
    )
    left = site.call(
        *("submitAndWait", "/api/trace/events", {**ASK, "container_ids": some_ids(source, 100)}),
        abortAfterLooks=1,
    )
    cancelled = site.call("cancelJob", left["seen"][-1])
    driver.delete_all_cookies()

    assert few["answer"]["quality"]["status"] == "complete"
    assert cancelled["answer"]["state"] == "cancelled"


# ---- a server that misbehaves


@dataclass
class Scripted:
    """Answers by path, each path's in turn, the last one again and again."""

    answers: dict[str, list[tuple[int, dict[str, str], bytes]]] = field(default_factory=dict)
    asked: list[str] = field(default_factory=list)
    posted: list[dict[str, str]] = field(default_factory=list)
    """The headers of each POST."""

    def answer(self, path: str) -> tuple[int, dict[str, str], bytes]:
        self.asked.append(path)
        left = self.answers[path]
        return left.pop(0) if len(left) > 1 else left[0]


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    script: Scripted

    def do_GET(self) -> None:
        if self.path == "/":
            self._send(200, {"Content-Type": "text/html"}, b"<!doctype html>")
        elif self.path == "/jobs.js":
            self._send(200, {"Content-Type": "text/javascript"}, SCRIPT)
        elif self.path == "/favicon.ico":
            self._send(204, {}, b"")
        else:
            self._send(*self.script.answer(self.path.partition("?")[0]))

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers.get("Content-Length", "0")))
        self.script.posted.append({name.lower(): text for name, text in self.headers.items()})
        self._send(*self.script.answer(self.path))

    def _send(self, status: int, headers: dict[str, str], body: bytes) -> None:
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name, value)
        cut = int(headers.get("X-Cut", "0"))
        self.send_header("Content-Length", str(len(body) + cut))
        self.end_headers()
        self.wfile.write(body)
        if cut:
            self.close_connection = True

    def log_message(self, format: str, *args: object) -> None:  # noqa: A002 - its name there
        """Say nothing."""


@pytest.fixture
def script() -> Scripted:
    return Scripted()


@pytest.fixture
def wild(script: Scripted, driver: Chrome) -> Iterator[Site]:
    handler = type("Handler", (_Handler,), {"script": script})
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        url = f"http://127.0.0.1:{server.server_port}"
        driver.get(f"{url}/")
        yield Site(driver, url, "/jobs.js")
        server.shutdown()


def said(value: object, status: int = 200, **headers: str) -> tuple[int, dict[str, str], bytes]:
    named = {name.replace("_", "-"): text for name, text in headers.items()}
    return status, {"Content-Type": "application/json", **named}, json.dumps(value).encode()


def problem(status: int, code: str, **headers: str) -> tuple[int, dict[str, str], bytes]:
    return said({"code": code, "detail": "because", "status": status}, status, **headers)


def lines(*values: object, cut: int = 0) -> tuple[int, dict[str, str], bytes]:
    body = b"".join(json.dumps(value).encode() + b"\n" for value in values)
    return 200, {"Content-Type": "application/x-ndjson", "X-Cut": str(cut)}, body


JOB: dict[str, Any] = {
    "job_id": "trace-evt-1",
    "kind": "trace",
    "started_at": None,
    "errors": [],
    "links": {},
}
ACCEPTED = {"status_url": "/job", "result_url": "/result"}


def test_later_is_heeded_for_the_request_and_for_the_looks(wild: Site, script: Scripted) -> None:
    script.answers = {
        "/api": [problem(429, "too_many_queued", Retry_After="0"), said(ACCEPTED, 202)],
        "/job": [
            said({**JOB, "state": "queued"}),
            problem(429, "too_many_queued", Retry_After="0"),
            problem(503, "store_unavailable", Retry_After="0"),
            said({**JOB, "state": "completed"}),
        ],
        "/result": [said({"domains": {}, "quality": {"status": "complete"}})],
    }

    found = wild.call("submitAndWait", "/api", {})

    assert [each["state"] for each in found["seen"]] == ["queued", "completed"]
    assert found["answer"]["quality"] == {"status": "complete"}
    assert script.asked == ["/api", "/api", "/job", "/job", "/job", "/job", "/result"]


def test_a_request_whose_answer_was_cut_is_sent_again_as_the_same_one(
    wild: Site, script: Scripted
) -> None:
    cut = said(ACCEPTED, 202, X_Cut="10")
    script.answers = {
        "/api": [cut, said(ACCEPTED, 202)],
        "/job": [
            said({**JOB, "state": "completed"}, X_Cut="10"),
            said({**JOB, "state": "completed"}),
        ],
        "/result": [said({"domains": {}, "quality": {}})],
    }

    found = wild.call("submitAndWait", "/api", {})

    assert found["answer"]["job"]["state"] == "completed"
    assert script.asked == ["/api", "/api", "/job", "/job", "/result"]
    first, second = script.posted
    assert first["idempotency-key"] == second["idempotency-key"]
    assert len(first["idempotency-key"]) >= 32

    wild.call("submitAndWait", "/api", {})
    assert script.posted[2]["idempotency-key"] != first["idempotency-key"]


def test_a_page_that_names_a_key_of_its_own_is_heeded(wild: Site, script: Scripted) -> None:
    script.answers = {"/api": [said({"results": {}, "quality": {}})]}

    wild.call("submitAndWait", "/api", {}, headers={"Idempotency-Key": "mine"})

    assert script.posted[0]["idempotency-key"] == "mine"
    assert script.posted[0]["x-requested-with"] == "XMLHttpRequest"


def test_an_answer_that_is_cut_each_time_is_an_error(wild: Site, script: Scripted) -> None:
    script.answers = {"/job": [said({**JOB, "state": "completed"}, X_Cut="10")]}

    found = wild.call("waitForJob", "/job")

    assert (found["error"]["name"], found["error"]["code"]) == ("JobError", "no_answer")
    assert script.asked == ["/job"] * 5


def test_the_first_of_one_who_asked_with_the_same_key_is_waited_for(
    wild: Site, script: Scripted
) -> None:
    script.answers = {
        "/api": [problem(409, "idempotency_in_progress", Retry_After="0"), said({"results": {}})]
    }

    assert wild.call("submitAndWait", "/api", {})["answer"]["results"] == {}


@pytest.mark.parametrize(("status", "code"), [(404, "job_not_found"), (410, "result_expired")])
def test_a_job_that_is_not_there_is_not_asked_for_again(
    wild: Site, script: Scripted, status: int, code: str
) -> None:
    script.answers = {"/job": [problem(status, code)]}

    found = wild.call("waitForJob", "/job")

    assert (found["error"]["code"], found["error"]["status"]) == (code, status)
    assert script.asked == ["/job"]


def test_patience_counts_from_the_start_and_not_from_the_queue(
    wild: Site, script: Scripted
) -> None:
    long_ago = {"started_at": "2020-01-01T00:00:00+00:00"}
    script.answers = {
        "/job": [
            said({**JOB, "state": "queued", "created_at": "2020-01-01T00:00:00+00:00"}),
            said({**JOB, "state": "running", **long_ago}),
        ]
    }

    found = wild.call("waitForJob", "/job")

    assert found["error"]["code"] == "patience_over"
    assert len(found["seen"]) == 2


START = {"_": "domain_start", "domain": "history", "total": 2}
END = {"_": "domain_end", "domain": "history", "count": 2}
COMPLETE = {"_": "complete", "rows": 2, "quality": {"status": "complete"}}


@pytest.mark.parametrize(
    ("answer", "code"),
    [
        (lines(START, {"a": 1}, {"a": 2}, END), "stream_cut"),
        (lines(START, {"a": 1}, END, COMPLETE), "rows_missing"),
        (lines(START, {"a": 1}, {"a": 2}, END, {**COMPLETE, "rows": 3}), "rows_missing"),
        (lines(START, {"a": 1}, {"a": 2}, COMPLETE), "rows_missing"),
        (lines(START, {"a": 1}, {"a": 2}, {**START, "domain": "b"}, COMPLETE), "rows_missing"),
        (lines(START, {"a": 1}, cut=100), "stream_cut"),
        (
            lines(START, {"a": 1}, {"_": "error", "code": "result_expired", "message": "gone"}),
            "result_expired",
        ),
    ],
)
def test_a_stream_that_is_not_whole_is_an_error(
    wild: Site, script: Scripted, answer: tuple[int, dict[str, str], bytes], code: str
) -> None:
    script.answers = {"/result": [answer]}
    take = "streamRows"

    found = wild.driver.execute_async_script(
        "const done = arguments[1]; import(arguments[0]).then((jobs) =>"
        f" jobs.{take}('/result', () => {{}})).then(done, (error) => done(error.code));",
        wild.script,
    )

    assert found == code


def test_a_page_with_fewer_rows_than_it_says_is_an_error(wild: Site, script: Scripted) -> None:
    page = {"data": [{"a": 1}], "count": 1, "total": 2, "next": None}
    script.answers = {"/result": [said(page)]}

    assert wild.call("readRows", "/result", "history")["error"]["code"] == "rows_missing"


def test_a_batch_of_embeddings_is_read_in_pages_too(wild: Site, script: Scripted) -> None:
    job = {**JOB, "kind": "embedding", "state": "completed_with_errors"}
    script.answers = {
        "/api": [said(ACCEPTED, 202)],
        "/job": [said(job)],
        "/result": [
            said({"items": [{"index": 0}], "total": 2}),
            said({"items": [{"index": 1}], "total": 2}),
        ],
    }

    found = wild.call("submitAndWait", "/api", {"items": []})

    assert found["answer"]["items"] == [{"index": 0}, {"index": 1}]
    assert found["answer"]["job"]["state"] == "completed_with_errors"


def test_of_a_batch_that_was_waited_for_all_pages_are_read(wild: Site, script: Scripted) -> None:
    first = {"items": [{"index": 0}], "total": 2, "state": "completed"}
    script.answers = {
        "/api": [said(first, Location="/job")],
        "/job": [said({**JOB, "kind": "embedding", "state": "completed"})],
        "/job/result": [said({"items": [{"index": 1}], "total": 2})],
    }

    found = wild.call("submitAndWait", "/api", {}, headers={"Prefer": "wait=10"})

    assert found["answer"]["items"] == [{"index": 0}, {"index": 1}]
    assert found["answer"]["job"]["state"] == "completed"


def test_a_batch_that_was_waited_for_and_failed_is_an_error(wild: Site, script: Scripted) -> None:
    errors = [{"error_class": "too_large", "sample": "413"}]
    script.answers = {
        "/api": [said({"items": [{"index": 0}], "total": 1, "state": "failed"}, Location="/job")],
        "/job": [said({**JOB, "kind": "embedding", "state": "failed", "errors": errors})],
    }

    found = wild.call("submitAndWait", "/api", {}, headers={"Prefer": "wait=10"})

    assert found["error"]["code"] == "job_failed"
