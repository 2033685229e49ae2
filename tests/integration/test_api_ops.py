"""Limits and health, and the API while Postgres or Redis is away."""

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import orjson
import pytest

from app.core import config
from app.core.store import fleet
from app.web import create_app
from migrations.__main__ import migrate
from tests.api import (  # noqa: F401 - fixtures among them
    DIMENSION,
    LINES,
    MODEL,
    VERSION,
    Door,
    Ground,
    item,
    make_backend,
    make_door,
    make_ground,
    serving,
)
from tests.fakes import Fake, Reply
from tests.processes import StartProcess, open_folder, wait_for
from worker.process import Process
from worker.up import SERVER_SECONDS, Crew

# ---- limits


def test_every_limit_is_told_as_a_number(ground: Ground, door: Door) -> None:
    changes = {"QUEUE_MAX_PER_CLIENT": "7", "QUEUE_MAX_BYTES_PER_CLIENT": "5000"}
    small = ground.reopened(MAX_BODY_BYTES="4096", **changes)

    limits, changed = door.get("/api/limits").json, small.door().get("/api/limits").json

    assert all(type(limit) in (int, float) and limit > 0 for limit in limits.values())
    assert limits["max_body_bytes"] == ground.settings.max_body_bytes
    assert {name: changed[name] for name in limits if changed[name] != limits[name]} == {
        "max_body_bytes": 4096,
        "open_items_per_client": 7,
        "open_bytes_per_client": 5000,
    }
    small.close()


def test_the_limits_that_are_told_are_the_ones_that_hold(ground: Ground, door: Door) -> None:
    limits = door.get("/api/limits").json
    job_id = door.post(ground.new_items("one")).job_id

    def status_of(path: str) -> int:
        return door.get(path).status

    for path, name in (
        (f"/api/job/{job_id}/items?limit=", "items_page"),
        ("/api/jobs?limit=", "jobs_page"),
        (f"/api/job/{job_id}?wait=", "wait_seconds"),
    ):
        assert status_of(f"{path}{limits[name] + 1}") == 422
    assert status_of(f"/api/job/{job_id}/items?limit={limits['items_page']}") == 200
    assert status_of(f"/api/jobs?limit={limits['jobs_page']}") == 200
    [number] = ground.new_rows(1)
    fits = {"custom_id": "x" * limits["custom_id_characters"], "metadata": nested(limits)}
    assert door.post([item(number, "a", **fits)]).status == 202
    key = {"Idempotency-Key": "k" * limits["idempotency_key_characters"]}
    assert door.post([item(number, "b")], "", key).status == 202


def nested(limits: dict[str, int]) -> dict[str, object]:
    """Return the deepest and largest metadata that is allowed."""
    value: dict[str, object] = {}
    for _ in range(limits["metadata_levels"] - 1):
        value = {"a": value}
    value["pad"] = ""
    size = len(orjson.dumps(value))
    value["pad"] = "x" * (limits["metadata_bytes"] - size)
    return value


def test_a_client_whose_open_texts_are_too_many_bytes_is_told_which_limit_and_when(
    ground: Ground,
) -> None:
    small = ground.reopened(QUEUE_MAX_BYTES_PER_CLIENT="4096")
    door, batch = small.door(), ground.new_items("x" * 3000, "y" * 3000, "z" * 1000)
    job_id = door.post(batch[:1]).job_id

    refused = door.post(batch[1:2])
    as_lines = door.post_lines(batch[1:2])

    for answer in (refused, as_lines):
        assert (answer.status, answer.code) == (429, "too_many_queued")
        assert int(answer.headers["retry-after"]) > 0
        assert answer.json["detail"] == (
            "6000 bytes of this client would be open; the limit is open_bytes_per_client = 4096"
        )
    assert door.get("/api/limits").json["open_bytes_per_client"] == 4096
    assert door.post(batch[2:]).status == 202  # a small one fits still
    assert small.door().post(batch[1:2]).status == 202  # another client
    ground.work(job_id)
    assert door.post(batch[1:2]).status == 202  # what is done does not wait
    small.close()


def test_a_client_with_too_many_open_items_is_told_which_limit(ground: Ground) -> None:
    small = ground.reopened(QUEUE_MAX_PER_CLIENT="2")

    answer = small.door().post(ground.new_items("one", "two", "three"))

    assert (answer.status, answer.code) == (429, "too_many_queued")
    assert "the limit is open_items_per_client = 2" in answer.json["detail"]
    small.close()


# ---- outages


@pytest.fixture
def outage(ground: Ground) -> Iterator[None]:
    """Let the backend be away for a test."""
    ground.rows("TRUNCATE holdfast.backends, holdfast.incidents")
    with ground.ctx.database.transaction() as tx:
        fleet.pause(tx, "ollama", MODEL, seconds=3600, error_class="unreachable", message="refused")
    yield
    ground.rows("TRUNCATE holdfast.backends, holdfast.incidents")


@pytest.mark.usefixtures("outage")
def test_an_outage_is_one_line_with_what_of_the_caller_waits(ground: Ground, door: Door) -> None:
    before = ground.door("operator", "admin").get("/api/incidents").json["incidents"][0]
    job_id = door.post(ground.new_items("one", "two", "three")).job_id

    mine, everybodys, strangers = (
        each.get("/api/incidents").json
        for each in (door, ground.door("operator", "admin"), ground.door())
    )

    [shown] = mine["incidents"]
    assert mine["next"] is None
    assert list(shown) == [
        *("backend", "model", "error_class", "reason", "since", "until"),
        *("next_try_at", "items_waiting", "items_lost"),
    ]
    assert (shown["backend"], shown["model"], shown["until"]) == ("ollama", MODEL, None)
    assert (shown["error_class"], shown["reason"]) == ("unreachable", "refused")
    assert shown["since"] < shown["next_try_at"]
    assert (shown["items_waiting"], shown["items_lost"]) == (3, 0)
    assert everybodys["incidents"][0]["items_waiting"] == before["items_waiting"] + 3
    assert strangers["incidents"] == [{**shown, "items_waiting": 0}]
    ground.work(job_id)
    [over] = door.get("/api/incidents").json["incidents"]
    assert over["until"] > over["since"]
    assert (over["next_try_at"], over["items_waiting"], over["items_lost"]) == (None, 0, 0)


@pytest.mark.usefixtures("outage")
def test_outages_are_listed_page_by_page(ground: Ground, door: Door) -> None:
    for model in ("one", "two"):
        with ground.ctx.database.transaction() as tx:
            fleet.pause(tx, "ollama", model, seconds=0, error_class="busy", message="later")
        with ground.ctx.database.transaction() as tx:
            fleet.note_ok(tx, "ollama", model)

    models: list[str] = []
    path: str | None = "/api/incidents?limit=1"
    while path:
        page = door.get(path).json
        models += [each["model"] for each in page["incidents"]]
        path = page["next"] and f"/api/incidents?limit=1&cursor={page['next']}"

    assert models == [MODEL, "two", "one"]


@pytest.mark.parametrize(
    "query",
    [
        *("limit=0", "limit=201", "limit=x", "state=open", "cursor=", "cursor=open"),
        *("cursor=open~x", "cursor=2026-02-31T00:00:00%2B00:00~1", "cursor=open~1&cursor=open~1"),
    ],
)
def test_a_list_of_outages_takes_no_other_arguments(door: Door, query: str) -> None:
    answer = door.get(f"/api/incidents?{query}")

    assert (answer.status, answer.code) == (422, "invalid_request")


# ---- health


def test_a_process_that_answers_lives(ground: Ground) -> None:
    assert ground.door_of(None).get("/livez").json == {"status": "ok"}


def test_readiness_names_what_is_degraded(ground: Ground) -> None:
    nobody = ground.door_of(None)
    ground.rows("TRUNCATE holdfast.processes, holdfast.backends")
    alone = nobody.get("/readyz").json

    with ground.ctx.database.transaction() as tx:
        for kind, queue in (("worker", "embeddings"), ("worker", "trace-events"), ("sweeper", "")):
            process = fleet.Process(f"{kind} {queue}", kind, queue, "here", 1)
            fleet.beat(tx, process, seconds=3600, counters={})
    complete = nobody.get("/readyz").json
    with ground.ctx.database.transaction() as tx:
        fleet.pause(tx, "ollama", MODEL, seconds=3600, error_class="busy", message="later")
    paused = nobody.get("/readyz").json
    ground.rows("TRUNCATE holdfast.processes, holdfast.backends")

    unserved = ["no_worker:embeddings", "no_worker:trace-events"]
    assert alone == {"status": "ok", "degraded": ["no_sweeper", *unserved]}
    assert complete == {"status": "ok", "degraded": []}
    assert paused == {"status": "ok", "degraded": [f"backend_paused:{MODEL}"]}


def test_health_tells_the_state_of_every_part_and_no_names(ground: Ground) -> None:
    health = ground.door_of(None).get("/health")

    assert health.json["postgres"]["state"] == "ok"
    assert health.json["redis"]["state"] == "ok"
    assert health.json["redis"]["policy"] == "noeviction"
    assert health.json["migrations"] == "up to date"
    assert health.json["targets"] == "ok"
    for secret in (b"postgresql://", b"redis://", b"127.0.0.1", b"ai_insights"):
        assert secret not in health.body


def test_health_says_when_a_target_no_longer_fits(ground: Ground) -> None:
    ground.rows("ALTER TABLE conversations RENAME COLUMN embedding TO vector")

    health = ground.door_of(None).get("/health")
    ground.rows("ALTER TABLE conversations RENAME COLUMN vector TO embedding")

    assert health.json["targets"] == "mismatch"


def test_a_database_without_migrations_is_not_ready(
    empty_database_url: str, redis_url: str, ground: Ground
) -> None:
    bare = ground.reopened(DATABASE_URL=empty_database_url, REDIS_URL=redis_url)

    for path in ("/readyz", "/health"):
        answer = bare.door_of(None, may_be_away=True).get(path)
        assert answer.status == 503
        assert "0001_jobs" in answer.json["reason"]
    bare.close()


def test_the_metrics_are_for_prometheus_and_name_nobody(ground: Ground) -> None:
    door = ground.door("acme")
    job_id = door.post(ground.new_items("one")).job_id

    answer = door.get("/metrics")

    assert answer.headers["content-type"].startswith("text/plain")
    assert b"holdfast_postgres_up 1.0" in answer.body
    assert b"holdfast_redis_up 1.0" in answer.body
    for name in (b"acme", job_id.encode(), b"ai_insights"):
        assert name not in answer.body


# ---- errors of the framework


@pytest.mark.parametrize(
    ("method", "path", "status", "code"),
    [
        ("GET", "/", 404, "not_found"),
        ("GET", "/api", 404, "not_found"),
        ("GET", "/api/job/", 404, "not_found"),
        ("GET", "/api/jobs/", 404, "not_found"),
        ("GET", "/<script>alert(1)</script>", 404, "not_found"),
        ("PUT", "/api/embeddings", 405, "method_not_allowed"),
        ("GET", "/api/embeddings", 405, "method_not_allowed"),
        ("DELETE", "/api/jobs", 405, "method_not_allowed"),
        ("GET", "/api/job/emb-1/cancel", 405, "method_not_allowed"),
        ("POST", "/livez", 405, "method_not_allowed"),
    ],
)
def test_what_is_no_route_is_a_problem_too(
    door: Door, method: str, path: str, status: int, code: str
) -> None:
    answer = door.ask(method, path)

    assert (answer.status, answer.code) == (status, code)
    assert (status == 405) == ("allow" in answer.headers)
    assert b"script" not in answer.body


def test_a_fault_of_ours_is_a_problem_without_its_cause(ground: Ground) -> None:
    broken = ground.reopened()

    def fail() -> str:
        raise RuntimeError("secret-cause")

    broken.app.add_url_rule("/broken", "broken", fail)
    answer = broken.app.test_client().get("/broken")

    assert answer.status_code == 500
    assert answer.mimetype == "application/problem+json"
    assert answer.get_json()["code"] == "internal"
    assert "secret-cause" not in answer.text
    assert "Runtime" not in answer.text
    broken.close()


# ---- while a server is away


class Servers:
    """Postgres and Redis that a test may stop, and the application on them."""

    def __init__(self, crew: Crew, ground: Ground) -> None:
        self.crew = crew
        self.ground = ground
        self.postgres, self.redis = crew.processes
        self.door = Door(ground.door().http, ground.key("steady", "submit", "read", "requeue"))
        self.door.may_be_away = True

    @contextmanager
    def without(self, *processes: Process) -> Iterator[None]:
        """Stop servers for the length of a block."""
        for process in processes:
            process.stop()
        try:
            yield
        finally:
            for process in processes:
                process.start()
                self.crew.wait_until_ready(process, SERVER_SECONDS)
            wait_for(lambda: self.door.get("/readyz").status == 200, 30)


@pytest.fixture(scope="module")
def own() -> Iterator[Servers]:
    """Give servers of this file's own."""
    with open_folder() as home, Fake(dimension=DIMENSION) as backend:
        crew = Crew(home / "home")
        crew.take_home()
        environ = {
            "DATABASE_URL": crew.add_postgres(),
            "REDIS_URL": crew.add_redis(),
            "EMBEDDING_DIM": str(DIMENSION),
            "EMBEDDER_URL": backend.url,
        }
        migrate(
            environ["DATABASE_URL"], demo=True, dimension=DIMENSION, model=MODEL, version=VERSION
        )
        ground = Ground(environ, backend, create_app(config.load(environ)))
        yield Servers(crew, ground)
        ground.close()
        crew.stop()


def test_a_batch_is_accepted_and_worked_off_while_redis_is_away(own: Servers) -> None:
    ground, door = own.ground, own.door
    with own.without(own.redis):
        as_json = door.post(ground.new_items("one"))
        as_lines = door.post_lines(ground.new_items("two"))
        assert (as_json.status, as_lines.status) == (202, 202)
        job_id = as_json.job_id
        assert door.job(job_id)["state"] == "queued"
        assert door.get(f"/api/job/{job_id}?wait=1").json["state"] == "queued"
        ground.work(job_id)
        assert door.job(job_id)["state"] == "completed"
        assert [line["outcome"] for line in door.result(job_id)] == ["done"]
        assert [shown["status"] for shown in door.items(job_id)] == ["done"]
        assert door.send(f"/api/job/{as_lines.job_id}/cancel").json["state"] == "cancelled"
        assert door.get("/api/jobs").status == 200

    assert door.job(job_id)["state"] == "completed"
    ground.check_nothing_lost()


def test_failed_items_are_requeued_while_redis_is_away(own: Servers) -> None:
    ground, door = own.ground, own.door
    refusal = Reply(status=400, error="the input length exceeds the context length")
    ground.backend.when(refusal, marker="refused once", times=1)
    first = ground.done(door, ground.new_items("refused once"))
    with own.without(own.redis):
        answer = door.send(f"/api/job/{first}/requeue")
        assert (answer.status, answer.json["requeued"]) == (202, 1)

    ground.work(first)
    assert door.job(first)["state"] == "completed"


def test_health_says_that_redis_is_away_and_work_is_accepted_still(own: Servers) -> None:
    nobody = own.ground.door_of(None)
    with own.without(own.redis):
        ready, health = nobody.get("/readyz"), nobody.get("/health")
        metrics = own.door.get("/metrics")

    assert (ready.status, "redis" in ready.json["degraded"]) == (200, True)
    assert (health.status, health.json["redis"]["state"]) == (200, "away")
    assert health.json["postgres"]["state"] == "ok"
    assert b"holdfast_redis_up 0.0" in metrics.body
    assert b"holdfast_redis_policy_ok" not in metrics.body


def test_a_redis_that_evicts_is_degraded_and_said_at_each_start(
    own: Servers, start_process: StartProcess, tmp_path: Path
) -> None:
    ground, door = own.ground, own.door
    ground.ctx.link.config_set("maxmemory-policy", "allkeys-lru")
    try:
        ready, metrics = door.get("/readyz"), door.get("/metrics")
        worker = start_process("worker", "run", "embeddings", **ground.environ)
        wait_for(lambda: "redis_policy" in worker.said, 30)
        with serving(ground.environ, tmp_path / "api.log") as served:
            api = served.running.said
    finally:
        ground.ctx.link.config_set("maxmemory-policy", "noeviction")

    assert "redis_policy" in ready.json["degraded"]
    assert b"holdfast_redis_policy_ok 0.0" in metrics.body
    for said in (worker.said, api):
        [line] = [line for line in said.splitlines() if '"redis_policy"' in line]
        assert "set maxmemory-policy noeviction, not allkeys-lru" in line
    assert door.post(ground.new_items("one")).status == 202
    assert b"holdfast_redis_policy_ok 1.0" in door.get("/metrics").body


def test_nothing_is_accepted_while_postgres_is_away_and_nothing_stored(own: Servers) -> None:
    ground, door = own.ground, own.door
    final = ground.done(door, ground.new_items("one"))
    before_away, sizes = door.get(f"/api/job/{final}"), ground.sizes()
    batch = ground.new_items("two")
    nobody = ground.door_of(None, may_be_away=True)
    stranger = ground.door_of("hf_unknown_key", may_be_away=True)
    with own.without(own.postgres):
        asked = [
            lambda: door.post(batch),
            lambda: door.post_lines(batch),
            lambda: door.get(f"/api/job/{final}/result"),
            lambda: door.get(f"/api/job/{final}/result", {"Accept": LINES}),
            lambda: door.get(f"/api/job/{final}?wait=1"),
            lambda: door.get("/api/jobs"),
            lambda: door.send(f"/api/job/{final}/requeue"),
            lambda: door.send(f"/api/job/{final}/cancel"),
            lambda: door.get("/api/job/emb-nothing-in-redis"),
            lambda: stranger.get("/api/jobs"),
        ]
        states = [
            lambda: nobody.get("/readyz"),
            lambda: nobody.get("/health"),
            lambda: nobody.get("/livez"),
            lambda: door.get("/metrics"),
            lambda: door.get(f"/api/job/{final}"),
        ]
        # Each waits a moment for Postgres to come back.
        with ThreadPoolExecutor(20) as pool:
            refused = [pool.submit(ask) for ask in asked]
            ready, health, alive, metrics, polled = pool.map(lambda ask: ask(), states)
            refusals = [answer.result() for answer in refused]

    assert [(answer.status, answer.code) for answer in refusals] == [
        (503, "store_unavailable")
    ] * len(asked)
    assert all(int(answer.headers["retry-after"]) > 0 for answer in refusals)
    assert (ready.status, health.status, alive.status, metrics.status) == (503, 503, 200, 200)
    assert ready.json["reason"].startswith("postgres")
    assert b"holdfast_postgres_up 0.0" in metrics.body
    assert polled.body == before_away.body  # Redis knows a final job, and the key was known
    assert ground.sizes() == sizes
    assert door.post(batch).status == 202


def test_nothing_is_known_while_both_are_away_and_the_process_lives(own: Servers) -> None:
    with own.without(own.postgres, own.redis), ThreadPoolExecutor(3) as pool:
        nobody = own.ground.door_of(None, may_be_away=True)
        posting = pool.submit(own.door.post, [item(1, "one")])
        ready = pool.submit(nobody.get, "/readyz")
        assert nobody.get("/livez").status == 200
        assert (posting.result().status, posting.result().code) == (503, "store_unavailable")
        assert ready.result().status == 503


def test_a_batch_that_is_stored_is_accepted_though_postgres_goes_while_it_is_waited_for(
    own: Servers,
) -> None:
    ground, door = own.ground, own.door
    [one] = ground.new_items("one")
    key = {"Prefer": "wait=30", "Idempotency-Key": "stored once"}
    before = ground.sizes()["jobs"]

    with ThreadPoolExecutor(1) as pool:
        posting = pool.submit(door.post, [one], "", key)
        wait_for(lambda: ground.sizes()["jobs"] > before)
        with own.without(own.postgres):
            answer = posting.result()

    assert answer.status == 202
    assert door.job(answer.job_id)["counts"]["total"] == 1
    assert door.post([one], "", {"Idempotency-Key": "stored once"}).body == answer.body
