import importlib.util
import json
import re
import subprocess
import sys
import zlib
from base64 import b64encode
from collections.abc import Callable, Iterator, Mapping
from itertools import product
from pathlib import Path
from typing import cast

import pytest
import rq_dashboard
from flask import Flask
from flask.testing import FlaskClient
from redis.typing import EncodableT
from rq import Worker
from rq.registry import FailedJobRegistry, FinishedJobRegistry
from rq.results import Result
from werkzeug.test import TestResponse

from app.core import config
from app.core.bells import TASK, BellJob, BellQueue
from app.core.config import Settings
from app.core.context import Context
from app.core.errors import ErrorClass, WorkError
from app.core.keys import hash_of, new_key
from app.core.link import ANSWER_SECONDS
from app.core.model import EMBEDDINGS, Failed, Settlement
from app.core.store import clients, items, jobs
from app.web import create_app
from app.web.auth import COOKIE
from app.web.pages import ERROR_BYTES, PATCHES, REWRITES
from tests.conftest import free_port

BUTTON = {"X-Requested-With": "XMLHttpRequest"}
BROWSER = {"Accept": "text/html,application/xhtml+xml,application/xml;q=0.9,*/*;q=0.8"}
ORIGIN = "http://localhost"
NO_HEADERS: dict[str, str] = {}
REGISTRIES = ["queued", "scheduled", "deferred", "started", "finished", "failed", "canceled"]
BELL = "emb-0123456789abcdef-1"

Open = Callable[[Settings], "Site"]


class Site:
    """The application with two keys, and what a test asks of it."""

    def __init__(self, app: Flask) -> None:
        self.app = app
        self.ctx = cast("Context", app.extensions["context"])
        self.link = self.ctx.link
        self.queue = BellQueue(EMBEDDINGS, connection=self.link, serializer="json")
        self.admin = self.key("ops", "admin")
        self.reader = self.key("reader", "submit", "read", "requeue")

    def key(self, client: str, *scopes: str) -> str:
        key = new_key(client)
        with self.ctx.database.transaction() as tx:
            clients.insert(
                tx, prefix=client, key_hash=hash_of(key), client=client, scopes=scopes, days=None
            )
        return key

    def browser(self) -> FlaskClient:
        """Return a client that keeps cookies."""
        return self.app.test_client()

    def ask(
        self,
        path: str,
        method: str = "GET",
        headers: Mapping[str, str] = NO_HEADERS,
        *,
        key: str | None = None,
        follow: bool = False,
    ) -> TestResponse:
        """Send one request, by default with the administrator's key."""
        bearer = self.admin if key is None else key
        sent = {**headers, "Authorization": f"Bearer {bearer}"} if bearer else headers
        client = self.app.test_client()
        return client.open(
            path, method=method, headers=sent, buffered=True, follow_redirects=follow
        )

    def press(self, path: str) -> TestResponse:
        """Send what one of rq-dashboard's buttons sends."""
        return self.ask(path, "POST", BUTTON)

    def routes(self, bell: str = BELL) -> list[tuple[str, str]]:
        """Return method and path of everything that rq-dashboard serves."""
        values = {"instance_number": 0, "queue_name": EMBEDDINGS, "registry_name": "failed"}
        more = {
            "per_page": 8,
            "order": "asc",
            "page": 1,
            "job_id": bell,
            "filename": "css/main.css",
        }
        found = []
        for rule in self.app.url_map.iter_rules():
            if rule.endpoint.startswith("rq_dashboard."):
                built = rule.build({**values, **more}, append_unknown=False)
                assert built
                found += [(method, built[1]) for method in sorted(rule.methods or set())]
        return found

    def submit(self, count: int = 1) -> str:
        """Post a batch and return its job's id."""
        batch = [
            {"target_table": "ai_insights", "target_id": number, "text": f"text {number}"}
            for number in range(1, count + 1)
        ]
        headers = {"Authorization": f"Bearer {self.reader}"}
        answer = self.app.test_client().post(
            "/api/embeddings", json={"items": batch}, headers=headers
        )
        assert answer.status_code == 202, answer.text
        return str(answer.get_json()["job_id"])

    def fail(self, job_id: str) -> str:
        """Let every item of a job fail, and its bell with them; return the bell's id."""
        bell = f"{job_id}-1"
        terms = items.ClaimTerms(job_id=job_id, leased_by=bell, lease_seconds=60, allowance=5)
        outcome = Failed(WorkError(ErrorClass.BAD_INPUT, "refused"))
        with self.ctx.database.transaction() as tx:
            claims = items.claim(tx, terms, limit=100, paused_models=[])
            items.settle(tx, [Settlement(claim, outcome) for claim in claims], leased_by=bell)
            jobs.finish(tx, job_id, ttl_seconds=60)
        self.queue.remove(bell)
        job = BellJob.fetch(bell, self.link)
        FailedJobRegistry(queue=self.queue, job_class=BellJob).add(job, ttl=60, exc_string="")
        Result.create_failure(job, 60, f"FailedItemsRemain: {len(claims)} items failed")
        return bell

    def ring(self, bell: str = BELL) -> BellJob:
        """Let a bell wait."""
        job_id = bell.rpartition("-")[0]
        job = self.queue.enqueue(TASK, job_id, 1, job_id=bell, job_timeout=60, description="bell")
        assert isinstance(job, BellJob)
        return job

    def statuses(self) -> dict[str, int]:
        """Return how many items stand where."""
        query = "SELECT status, count(*) AS n FROM public.embedding_retry_queue GROUP BY status"
        with self.ctx.database.transaction() as tx:
            return {str(row["status"]): int(row["n"]) for row in tx.execute(query)}

    def requeues(self) -> list[tuple[str, str, str]]:
        """Return who asked for a second try, by which door, of which job."""
        query = "SELECT client, via, job_id FROM holdfast.requeues ORDER BY id"
        with self.ctx.database.transaction() as tx:
            return [(row["client"], row["via"], row["job_id"]) for row in tx.execute(query)]


@pytest.fixture
def open_site() -> Iterator[Open]:
    opened: list[Site] = []

    def open_one(settings: Settings) -> Site:
        opened.append(Site(create_app(settings)))
        return opened[-1]

    yield open_one
    for site in opened:
        site.ctx.close()


@pytest.fixture
def site(open_site: Open, settings: Settings) -> Site:
    return open_site(settings)


# ---- who may enter -------------------------------------------------------------------------------


def test_every_route_asks_for_a_key_with_the_scope_admin(site: Site) -> None:
    routes = site.routes()
    assert len(routes) > 30

    for method, path in routes:
        nobody = site.ask(path, method, BUTTON, key="")
        stranger = site.ask(path, method, BUTTON, key="hf_ops_guessed")
        reader = site.ask(path, method, BUTTON, key=site.reader)

        assert (method, path, nobody.status_code) == (method, path, 401)
        assert (method, path, stranger.status_code) == (method, path, 401)
        assert (method, path, reader.status_code) == (method, path, 403)
        assert nobody.mimetype == reader.mimetype == "application/problem+json"


def test_paths_that_do_not_exist_ask_for_a_key_too(site: Site) -> None:
    assert site.ask("/rq/nothing", key="").status_code == 401
    assert site.ask("/rq/nothing").status_code == 404
    assert site.ask("/rq/job/x/requeue", key="").status_code == 401
    assert site.ask("/rq/job/x/requeue").status_code == 405


def test_a_person_without_a_key_gets_the_form_and_the_same_status(site: Site) -> None:
    nobody = site.ask("/rq/", headers=BROWSER, key="")
    browser = site.browser()
    browser.set_cookie(COOKIE, site.reader)
    reader = browser.get("/rq/0/view/workers", headers=BROWSER)

    assert (nobody.status_code, reader.status_code) == (401, 403)
    assert nobody.headers["WWW-Authenticate"] == "Bearer"
    assert 'name="key"' in nobody.text
    assert 'role="alert"' not in nobody.text
    assert "the key lacks the scope admin" in reader.text


def test_nobody_is_asked_with_auth_off(open_site: Open, environ: dict[str, str]) -> None:
    site = open_site(config.load({**environ, "AUTH": "off"}))

    assert site.ask("/rq/", key="").status_code == 200
    assert site.ask("/rq/requeue/embeddings", "POST", BUTTON, key="").status_code == 200
    foreign = {**BUTTON, "Origin": "https://elsewhere.example"}
    assert site.ask("/rq/requeue/embeddings", "POST", foreign, key="").status_code == 403


# ---- the login -----------------------------------------------------------------------------------


def test_a_right_key_becomes_a_cookie_that_opens_the_pages(site: Site) -> None:
    browser = site.browser()

    answer = browser.post("/login", data={"key": f" {site.admin} "}, headers={"Origin": ORIGIN})

    assert (answer.status_code, answer.location) == (303, "/rq/")
    attributes = answer.headers["Set-Cookie"].split("; ")
    assert attributes[0] == f"{COOKIE}={site.admin}"
    assert {"HttpOnly", "SameSite=Strict", "Path=/"} <= set(attributes)
    assert "Secure" not in attributes
    assert browser.get("/rq/", headers=BROWSER).status_code == 200


def test_the_cookie_of_an_encrypted_site_is_never_sent_in_the_clear(site: Site) -> None:
    answer = site.browser().post("/login", data={"key": site.admin}, base_url="https://localhost")

    assert "Secure" in answer.headers["Set-Cookie"].split("; ")


def test_a_wrong_key_gets_the_form_again(site: Site) -> None:
    for key in ["", "wrong", "hf_ops_guessed", "hf_\0_x", "hf_ö_" + 3000 * "x"]:
        person = site.browser().post("/login", data={"key": key}, headers=BROWSER)
        program = site.browser().post("/login", data={"key": key})

        assert (key, person.status_code, program.status_code) == (key, 401, 401)
        assert "not valid" in person.text
        assert not key or key not in person.text
        assert program.get_json()["code"] == "unauthenticated"
        assert "Set-Cookie" not in person.headers


def test_the_login_goes_nowhere_else_and_takes_nothing_big(site: Site) -> None:
    browser = site.browser()

    away = browser.post("/login?next=//elsewhere.example", data={"key": site.admin, "next": "//x"})
    big = browser.post("/login", data={"key": 10000 * "x"})

    assert away.location == "/rq/"
    assert big.status_code == 413


def test_no_foreign_page_signs_a_person_in_or_out(site: Site) -> None:
    origins = [("Origin", "https://elsewhere.example"), ("Origin", "null")]
    sites = [("Sec-Fetch-Site", "cross-site"), ("Sec-Fetch-Site", "same-site")]

    for path, header in product(["/login", "/logout"], origins + sites):
        answer = site.browser().post(path, data={"key": site.admin}, headers=[header])

        assert (path, header, answer.status_code) == (path, header, 403)
        assert "Set-Cookie" not in answer.headers


def test_signing_out_forgets_the_cookie(site: Site) -> None:
    browser = site.browser()
    browser.post("/login", data={"key": site.admin})

    answer = browser.post("/logout", headers={"Origin": ORIGIN})

    assert (answer.status_code, answer.location) == (303, "/login")
    assert browser.get("/rq/").status_code == 401


# ---- what a browser is told ----------------------------------------------------------------------


def test_a_page_runs_no_script_but_those_it_was_sent_with(site: Site) -> None:
    first, second = site.ask("/rq/"), site.ask("/rq/")

    nonces = set(re.findall(r"'nonce-([^']+)'", first.headers["Content-Security-Policy"]))
    assert len(nonces) == 1
    assert set(re.findall(r'<script nonce="([^"]+)"', first.text)) == nonces
    assert not nonces & set(
        re.findall(r"'nonce-([^']+)'", second.headers["Content-Security-Policy"])
    )
    assert "unsafe-inline" not in first.headers["Content-Security-Policy"]
    assert not re.findall(r"<script src|<script>| style=| on[a-z]+=", first.text)


def test_every_answer_says_how_little_a_browser_may_do_with_it(site: Site) -> None:
    answers = [
        site.ask("/rq/"),
        site.ask("/rq/", headers=BROWSER, key=""),
        site.ask("/rq/0/data/queues.json"),
        site.ask("/login"),
        site.ask("/static/login.css", key=""),
        site.ask("/livez"),
        site.ask("/nothing"),
        site.press("/rq/job/emb-00000000-1/requeue"),
    ]

    for answer in answers:
        assert answer.headers["X-Content-Type-Options"] == "nosniff"
        assert answer.headers["X-Frame-Options"] == "DENY"
        assert answer.headers["Referrer-Policy"] == "same-origin"
        assert "frame-ancestors 'none'" in answer.headers["Content-Security-Policy"]
        assert "default-src 'none'" in answer.headers["Content-Security-Policy"]


def test_no_page_shows_the_password_of_redis(open_site: Open, environ: dict[str, str]) -> None:
    settings = config.load(
        {**environ, "REDIS_URL": f"{environ['REDIS_URL']}?client_name=undisclosed"}
    )
    site = open_site(settings)
    password = re.search(r":([^:@/]+)@", settings.redis_url)
    assert password

    page = site.ask("/rq/0/view/workers")

    assert re.search(r"redis://127\.0\.0\.1:\d+/\d+", page.text)
    assert password[1] not in page.text
    assert "undisclosed" not in page.text


# ---- reading -------------------------------------------------------------------------------------


def busy_worker(site: Site, bell: BellJob) -> Worker:
    """Register a worker that has a bell in hand, as RQ's own parent process does."""
    worker = Worker([site.queue], connection=site.ctx.link, serializer="json", job_class=BellJob)
    site.link.connection_pool.connection_kwargs["socket_timeout"] = ANSWER_SECONDS
    worker.register_birth()  # type: ignore[no-untyped-call]
    site.queue.remove(bell.id)
    worker.prepare_execution(bell)
    worker.prepare_job_execution(bell)
    return worker


def test_every_page_and_all_data_can_be_read_while_a_worker_is_busy(site: Site) -> None:
    site.fail(site.submit())
    site.ring("emb-waiting0-1")
    done = site.ring("emb-finished-1")
    site.queue.remove(done.id)
    FinishedJobRegistry(queue=site.queue, job_class=BellJob).add(done, ttl=60)
    Result.create(done, Result.Type.SUCCESSFUL, 60, return_value={"done": 5})
    worker = busy_worker(site, site.ring())

    for path in sorted({path for _, path in site.routes() + site.routes(done.id)}):
        by_button = path.endswith(("requeue", "delete", "compact", "empty", "requeue/embeddings"))
        answer = site.ask(path, follow=True)
        assert (path, answer.status_code) == (path, 405 if by_button else 200)
    shown = site.ask("/rq/0/data/workers.json").get_json()["workers"]
    assert [each["name"] for each in shown] == [worker.name]
    assert shown[0]["state"] == "busy"
    assert shown[0]["current_job"]["call_string"] == f"{TASK}('emb-0123456789abcdef', 1)"
    assert site.ask(f"/rq/0/data/job/{done.id}.json").get_json()["result"] == {"done": 5}


def test_every_registry_can_be_read(site: Site) -> None:
    bell = site.fail(site.submit())
    site.ring()
    bells = {"failed": [bell], "queued": [BELL]}

    for registry in REGISTRIES:
        listed = site.ask(f"/rq/0/data/jobs/embeddings/{registry}/8/dsc/1.json")
        page = site.ask(f"/rq/0/view/jobs/embeddings/{registry}/8/dsc/1")

        assert (registry, listed.status_code, page.status_code) == (registry, 200, 200)
        found = [each["id"] for each in listed.get_json()["jobs"]]
        assert (registry, found) == (registry, bells.get(registry, []))


def test_the_tab_for_jobs_opens_on_a_queue_that_exists(site: Site) -> None:
    assert 'value="embeddings"' in site.ask("/rq/0/view/jobs").text


def test_a_look_at_the_workers_gives_the_api_no_more_patience(site: Site) -> None:
    busy_worker(site, site.ring())

    site.ask("/rq/0/data/workers.json")

    assert site.link.connection_pool.connection_kwargs["socket_timeout"] == ANSWER_SECONDS


def test_a_worker_whose_bell_is_gone_is_shown_all_the_same(site: Site) -> None:
    worker = busy_worker(site, site.ring())
    site.link.delete(f"rq:job:{BELL}")

    shown = site.ask("/rq/0/data/workers.json").get_json()["workers"]

    assert [(each["name"], each["current_job"]) for each in shown] == [(worker.name, "idle")]


def test_a_bell_depends_on_nothing_whatever_stands_beside_it(site: Site) -> None:
    bell = site.ring()
    site.link.sadd(bell.dependencies_key, "rq:job:another")

    shown = site.ask(f"/rq/0/data/job/{BELL}.json")

    assert shown.status_code == 200
    assert "depends_on" not in shown.get_json()


def test_looking_changes_nothing_in_redis(site: Site) -> None:
    busy_worker(site, site.ring())
    site.link.delete(f"rq:job:{BELL}")
    site.link.rpush("rq:queue:embeddings", "emb-vanished-1", "no bell", "")
    site.link.zadd("rq:failed:embeddings", {"emb-vanished-1": 9e9, "no bell": 9e9})
    before = site.link.info("commandstats")

    for method, path in site.routes():
        if method == "GET":
            assert site.ask(path).status_code < 500

    after = site.link.info("commandstats")
    called = {name for name in after if after[name] != before.get(name)}
    reads = "get hget hgetall smembers lrange llen zrange zcard exists xrevrange"
    connection = "multi exec info select hello auth client|setinfo"
    known = {f"cmdstat_{name}" for name in [*reads.split(), *connection.split()]}
    assert called - known == set()


def test_what_does_not_exist_is_not_found(site: Site) -> None:
    for path in [
        "/rq/1/view/queues",
        "/rq/0/view/job/emb-unknown0-1",
        "/rq/0/data/job/emb-unknown0-1.json",
        "/rq/0/data/job/a:b.json",
        "/rq/0/view/jobs/');alert(1);('/failed/8/asc/1",
        "/rq/0/view/jobs/embeddings/nothing/8/asc/1",
        "/rq/0/data/jobs/embeddings/nothing/8/asc/1.json",
        "/rq/0/data/jobs/embeddings/failed/0/asc/1.json",
        "/rq/0/data/jobs/embeddings/failed/201/asc/1.json",
        "/rq/0/data/jobs/embeddings/failed/-1/asc/1.json",
        "/rq/0/data/jobs/embeddings/failed/8/asc/0.json",
        "/rq/0/data/jobs/embeddings/failed/8/up/1.json",
        "/rq/0/data/jobs/embeddings/failed/x/asc/x.json",
    ]:
        answer = site.ask(path)

        assert (path, answer.status_code) == (path, 404)
        assert answer.mimetype == "application/problem+json"


# ---- changing ------------------------------------------------------------------------------------


def test_the_requeue_button_requeues_in_postgres_once(site: Site) -> None:
    job_id = site.submit(3)
    bell = site.fail(job_id)
    assert site.statuses() == {"failed": 3}

    first = site.press(f"/rq/job/{bell}/requeue")
    second = site.press(f"/rq/job/{bell}/requeue")

    assert (first.status_code, first.get_json()) == (200, {"status": "OK"})
    assert (second.status_code, second.get_json()["code"]) == (409, "nothing_to_requeue")
    assert site.statuses() == {"pending": 3}
    assert site.requeues() == [("ops", "dashboard", job_id)]
    assert site.ctx.bells.waiting(EMBEDDINGS) == [job_id]
    assert site.ctx.bells.failed(EMBEDDINGS) == []


def test_the_button_of_a_bell_without_a_job_says_so(site: Site) -> None:
    site.ring()

    answer = site.press(f"/rq/job/{BELL}/requeue")

    assert (answer.status_code, answer.get_json()["code"]) == (404, "job_not_found")


def test_requeue_all_requeues_what_failed_and_skips_what_is_gone(site: Site) -> None:
    bell = site.fail(site.submit(2))
    site.link.zadd("rq:failed:embeddings", {"emb-vanished-1": 9e9, "no bell": 9e9})
    again = bell.rpartition("-")[0] + "-7"
    site.link.zadd("rq:failed:embeddings", {again: 9e9})

    answer = site.press("/rq/requeue/embeddings")

    assert (answer.status_code, answer.get_json()) == (200, {"status": "OK", "count": 1})
    assert site.statuses() == {"pending": 2}
    assert len(site.requeues()) == 1


def test_a_cookie_may_press_the_button(site: Site) -> None:
    bell = site.fail(site.submit())
    browser = site.browser()
    browser.post("/login", data={"key": site.admin})

    answer = browser.post(f"/rq/job/{bell}/requeue", headers={**BUTTON, "Origin": ORIGIN})

    assert answer.status_code == 200
    assert site.statuses() == {"pending": 1}


def test_nothing_is_requeued_by_get_or_by_a_foreign_page(site: Site) -> None:
    bell = site.fail(site.submit())
    foreign = [
        {**BUTTON, "Origin": "https://elsewhere.example"},
        {**BUTTON, "Origin": "null"},
        {**BUTTON, "Sec-Fetch-Site": "cross-site"},
        {"Origin": ORIGIN},
        {},
    ]

    for path in ("/rq/requeue/embeddings", f"/rq/job/{bell}/requeue"):
        for method in ("GET", "HEAD"):
            refused = site.ask(path, method)
            assert (path, refused.status_code) == (path, 405)
            assert "POST" in refused.headers["Allow"]
        for headers in foreign:
            assert (path, site.ask(path, "POST", headers).status_code) == (path, 403)

    assert site.statuses() == {"failed": 1}
    assert site.requeues() == []


def test_no_button_removes_a_bell(site: Site) -> None:
    bell = site.fail(site.submit())
    site.ring()
    paths = [f"/rq/job/{bell}/delete", "/rq/queue/embeddings/compact"]
    paths += [f"/rq/queue/embeddings/{registry}/empty" for registry in REGISTRIES]

    for path in paths:
        assert (path, site.press(path).status_code) == (path, 403)

    assert site.ctx.bells.failed(EMBEDDINGS) == [bell.rpartition("-")[0]]
    assert site.link.lrange("rq:queue:embeddings", 0, -1) == [BELL.encode()]
    for page in ("/rq/0/view/jobs/embeddings/failed/8/asc/1", f"/rq/0/view/job/{bell}"):
        assert 'id="delete-job-btn"' not in site.ask(page).text
        assert 'id="empty-btn"' not in site.ask(page).text


# ---- Redis is not trusted ------------------------------------------------------------------------


def bomb(mark: Path) -> bytes:
    """Return a pickle that touches a file when it is loaded."""
    return f"cos\nsystem\n(S'touch {mark}'\ntR.".encode()


def load_as_rq_does_by_default(stored: bytes) -> None:
    code = "import sys, rq.serializers as s; s.DefaultSerializer.loads(sys.stdin.buffer.read())"
    subprocess.run([sys.executable, "-c", code], input=stored, check=True)


def test_a_pickle_in_redis_is_never_loaded(site: Site, tmp_path: Path) -> None:
    proof, mark = tmp_path / "proof", tmp_path / "mark"
    load_as_rq_does_by_default(bomb(proof))
    assert proof.exists()
    in_data, in_meta = "emb-0123456789abcdef-1", "emb-0123456789abcdef-2"
    busy_worker(site, site.ring(in_data))
    site.ring(in_meta)
    site.link.hset(f"rq:job:{in_data}", "data", zlib.compress(bomb(mark)))
    for bell in (in_data, in_meta):
        site.link.hset(f"rq:job:{bell}", mapping={"meta": bomb(mark), "result": bomb(mark)})
        value = b64encode(bomb(mark)).decode()
        site.link.xadd(f"rq:results:{bell}", {"type": 1, "return_value": value})
        for registry in ("finished", "failed", "deferred", "scheduled", "canceled"):
            site.link.zadd(f"rq:{registry}:embeddings", {bell: 9e9})

    for bell in (in_data, in_meta):
        for method, path in site.routes(bell):
            answer = site.ask(path, method, BUTTON)
            assert (method, path, answer.status_code < 500) == (method, path, True)
        for registry in REGISTRIES:
            page = f"/rq/0/data/jobs/embeddings/{registry}/8/asc/1.json"
            assert site.ask(page).status_code == 200

    assert not mark.exists()


def test_an_error_that_would_burst_is_cut(site: Site) -> None:
    bell = site.ring()
    packed = b64encode(zlib.compress(bytes(2**26))).decode()
    site.link.xadd(f"rq:results:{bell.id}", {"type": 2, "exc_string": packed})

    shown = site.ask(f"/rq/0/data/job/{bell.id}.json").get_json()

    assert len(shown["exc_info"]) == ERROR_BYTES


def test_a_result_that_cannot_be_read_is_none(site: Site) -> None:
    site.ring()
    unreadable: list[dict[EncodableT, EncodableT]] = [
        {"type": "x"},
        {"return_value": "e30="},
        {"type": "2", "exc_string": "no base64"},
        {"type": "2", "exc_string": b64encode(b"not packed").decode()},
        {"type": "1", "return_value": b64encode(b"[" * 100000).decode()},
    ]

    for fields in unreadable:
        site.link.xadd(f"rq:results:{BELL}", fields)
        shown = site.ask(f"/rq/0/data/job/{BELL}.json")

        assert (fields, shown.status_code) == (fields, 200)
        assert shown.get_json()["exc_info"] is None
        assert shown.get_json()["result"] is None


def test_every_template_escapes_what_it_shows(site: Site) -> None:
    environment = site.app.jinja_env
    assert environment.loader
    names = environment.list_templates(filter_func=lambda name: name.startswith("rq_dashboard/"))
    assert {"rq_dashboard/job.html", "rq_dashboard/workers.html"} <= set(names)

    sources = {name: environment.loader.get_source(environment, name)[0] for name in names}

    assert not [name for name, source in sources.items() if "<%=" in source]
    assert "<%- d.description %>" in sources["rq_dashboard/jobs.html"]
    assert "'{{" not in "".join(sources.values())


# ---- rq-dashboard as the patches expect it -------------------------------------------------------


def test_every_patched_name_is_still_one_of_the_package() -> None:
    # A patch of a name that is gone would be no patch, and no test of ours would have to notice:
    # with it what stands in Redis might be unpickled again.
    spec = importlib.util.find_spec("rq_dashboard.web")
    assert spec
    assert spec.loader
    fresh = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(fresh)

    assert [name for name in PATCHES if not hasattr(fresh, name)] == []
    assert [name for name in PATCHES if getattr(fresh, name) is PATCHES[name]] == []
    assert Path(str(fresh.__file__)).read_text().count("config.serializer") > 3


def test_every_rewrite_still_finds_something_in_the_templates() -> None:
    folder = Path(str(rq_dashboard.__file__)).parent / "templates"
    text = "".join(path.read_text() for path in sorted(folder.rglob("*")) if path.is_file())

    for pattern, replacement in REWRITES:
        text, count = re.subn(pattern, replacement, text)
        assert (pattern, count > 0) == (pattern, True)


# ---- Redis away ----------------------------------------------------------------------------------


def test_without_redis_the_pages_say_so_and_nothing_breaks(
    open_site: Open, environ: dict[str, str]
) -> None:
    away = {**environ, "REDIS_URL": f"redis://:secret@127.0.0.1:{free_port()}/0"}
    site = open_site(config.load(away))

    assert site.browser().post("/login", data={"key": site.admin}).status_code == 303
    for path in ("/rq/", "/rq/0/view/workers", "/rq/0/data/queues.json", f"/rq/0/view/job/{BELL}"):
        answer = site.ask(path, headers=BROWSER)
        assert (path, answer.status_code) == (path, 503)
        assert answer.mimetype == "application/problem+json"
        assert answer.get_json()["code"] == "bells_unavailable"
        assert "Redis" in answer.get_json()["detail"]
        assert "secret" not in answer.text
        assert answer.headers["Retry-After"]
    assert site.press("/rq/requeue/embeddings").status_code == 503
    assert json.loads(site.ask("/livez").data)["status"] == "ok"
