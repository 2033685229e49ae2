"""Who may ask: keys, scopes, other clients' jobs, AUTH=off; and what is never told."""

import secrets
from collections.abc import Iterator
from itertools import product
from pathlib import Path

import pytest
from flask import Flask
from werkzeug.routing import Rule

from app.web import auth
from tests.api import (  # noqa: F401 - fixtures among them
    JSON,
    LINES,
    PROBLEM,
    REFUSED,
    Answer,
    Door,
    Ground,
    in_redis,
    item,
    make_backend,
    make_door,
    make_ground,
    serving,
)
from tests.processes import StartProcess, wait_for

OPEN = {"/livez", "/readyz", "/health", "/login", "/logout", "/static/<path:filename>"}
SCOPES = ("submit", "read", "requeue")
NO_JOB = "emb-00000000000000000000000000000000"


def routes(app: Flask) -> list[tuple[str, Rule]]:
    """Return every route that is ours, once a method; rq-dashboard's have tests of their own."""
    rules = [rule for rule in app.url_map.iter_rules() if not rule.rule.startswith("/rq")]
    return [
        (method, rule)
        for rule in sorted(rules, key=str)
        for method in sorted((rule.methods or set()) - {"HEAD", "OPTIONS"})
    ]


def path_of(rule: Rule, job_id: str) -> str:
    return rule.rule.replace("<job_id>", job_id)


def job_routes(app: Flask) -> list[tuple[str, Rule]]:
    return [(method, rule) for method, rule in routes(app) if "<job_id>" in rule.rule]


# ---- without a key, or with a wrong one


def test_nobody_gets_in_without_a_key_but_where_the_contract_says_so(ground: Ground) -> None:
    nobody = ground.door_of(None)
    closed = [(method, rule) for method, rule in routes(ground.app) if rule.rule not in OPEN]
    assert len(closed) >= 9

    for method, rule in closed:
        answer = nobody.ask(method, path_of(rule, NO_JOB))
        assert (answer.status, answer.code) == (401, "unauthenticated"), rule
        assert answer.headers["www-authenticate"] == "Bearer"


def test_what_is_open_is_open_to_nobody_and_to_any_key(ground: Ground) -> None:
    for path, door in product(("/livez", "/readyz", "/health"), (None, "nonsense")):
        assert ground.door_of(door).get(path).status == 200


@pytest.mark.parametrize(
    "key", ["", "x", "hf_", "hf__", "hf_k1_x", "hf_\u00e9_x", "hf_" + "a" * 4000 + "_x", "null"]
)
def test_a_key_that_is_none_opens_nothing(ground: Ground, key: str) -> None:
    client = ground.app.test_client()

    for headers in ({"Authorization": f"Bearer {key}"}, {"apikey": key}):
        answer = client.get("/api/jobs", headers=headers)
        assert (answer.status_code, answer.mimetype) == (401, PROBLEM)


def test_a_key_with_one_letter_changed_is_none(ground: Ground, door: Door) -> None:
    assert door.key
    for changed in (door.key[:-1], door.key + "x", door.key.swapcase(), door.key[:-1] + "~"):
        assert ground.door_of(changed).get("/api/jobs").status == 401


def test_a_key_is_taken_from_either_header(ground: Ground, door: Door) -> None:
    nobody = ground.door_of(None)

    for headers in (
        {"Authorization": f"Bearer {door.key}"},
        {"Authorization": f"bearer  {door.key}"},
        {"apikey": str(door.key)},
    ):
        assert nobody.get("/api/jobs", headers).status == 200
    for headers in ({"Authorization": f"Basic {door.key}"}, {"Authorization": str(door.key)}):
        assert nobody.get("/api/jobs", headers).status == 401


@pytest.fixture
def forgetful(monkeypatch: pytest.MonkeyPatch) -> None:
    """Look every key up, however short the time since it was right."""
    monkeypatch.setattr(auth, "KNOWN_SECONDS", 0)


@pytest.mark.usefixtures("forgetful")
@pytest.mark.parametrize("column", ["revoked_at", "expires_at"])
def test_a_key_that_ended_opens_nothing(ground: Ground, column: str) -> None:
    door = ground.door("ending")
    assert door.get("/api/jobs").status == 200

    ground.rows(f"UPDATE holdfast.api_keys SET {column} = now() WHERE client = 'ending'")  # noqa: S608 - ours

    assert door.get("/api/jobs").status == 401
    assert door.post([item(1, "one")]).status == 401


@pytest.mark.usefixtures("forgetful")
def test_a_key_that_ends_later_opens_until_then(ground: Ground) -> None:
    key = ground.key("later", "read", days=1)

    assert ground.door_of(key).get("/api/jobs").status == 200


def test_a_right_key_is_known_for_a_moment_without_postgres(ground: Ground) -> None:
    door = ground.door("known")
    door.get("/api/jobs")

    ground.rows("DELETE FROM holdfast.api_keys WHERE client = 'known'")

    assert door.get("/api/jobs").status == 200


# ---- scopes


def needed(method: str, rule: Rule) -> str:
    """Return the scope that the contract has for a route."""
    if rule.rule == "/api/targets":
        return "admin"
    if method == "GET":
        return "read"
    return "requeue" if rule.rule.endswith("/requeue") else "submit"


def test_every_route_needs_the_scope_of_the_contract_and_no_other(ground: Ground) -> None:
    doors = {scope: ground.door(f"only-{scope}", scope) for scope in (*SCOPES, "admin")}

    for method, rule in routes(ground.app):
        if rule.rule in OPEN:
            continue
        for scope, door in doors.items():
            answer = door.ask(method, path_of(rule, NO_JOB))
            if scope in ("admin", needed(method, rule)):
                assert answer.status not in (401, 403), (scope, rule)
            else:
                assert (answer.status, answer.code) == (403, "scope_missing"), (scope, rule)


# ---- other clients


def test_a_foreign_job_is_byte_for_byte_a_missing_one_on_every_route(
    ground: Ground, door: Door
) -> None:
    stranger = ground.door()
    job_ids = [
        door.post(ground.new_items("one")).job_id,
        ground.done(door, ground.new_items("two")),
    ]
    for job_id in job_ids:  # fresh in Redis too
        door.job(job_id)
    assert len(job_routes(ground.app)) >= 5

    for (method, rule), job_id in product(job_routes(ground.app), job_ids):
        foreign = stranger.ask(method, path_of(rule, job_id))
        missing = stranger.ask(method, path_of(rule, NO_JOB))
        assert (foreign.status, foreign.code) == (404, "job_not_found"), rule
        assert (foreign.body, same(foreign)) == (missing.body, same(missing))


def same(answer: Answer) -> dict[str, str]:
    """Return the headers of an answer without the clock."""
    return {name: value for name, value in answer.headers.items() if name != "date"}


def test_a_stranger_changes_nothing(ground: Ground, door: Door) -> None:
    stranger = ground.door()
    waiting = door.post(ground.new_items("one")).job_id
    failed = ground.done(door, ground.new_items(REFUSED))
    before = [door.job(job_id) for job_id in (waiting, failed)]

    for job_id, act in product((waiting, failed), ("cancel", "requeue")):
        assert stranger.send(f"/api/job/{job_id}/{act}").status == 404

    ground.ctx.link.flushdb()
    after = [door.job(job_id) for job_id in (waiting, failed)]
    assert [job["counts"] for job in after] == [job["counts"] for job in before]
    assert [job["state"] for job in after] == ["queued", "failed"]


@pytest.mark.parametrize(
    "job_id",
    [NO_JOB, "x", "emb-%00", "%00", "emb-\u00e9", "..%2fjobs", "x" * 4000, "%ff%fe", "'--"],
)
def test_an_id_that_no_job_has_is_not_found_on_every_route(
    ground: Ground, door: Door, job_id: str
) -> None:
    client = ground.app.test_client()

    for method, rule in job_routes(ground.app):
        answer = client.open(
            path_of(rule, job_id), method=method, headers={"Authorization": f"Bearer {door.key}"}
        )
        assert (answer.status_code, answer.mimetype) == (404, PROBLEM), (method, rule)
        nobody = client.open(path_of(rule, job_id), method=method)
        assert nobody.status_code in (401, 404)


# ---- AUTH=off


@pytest.fixture
def open_house(ground: Ground) -> Iterator[Ground]:
    """Give the same ground, open to everybody on this machine."""
    opened = ground.reopened(AUTH="off")
    yield opened
    opened.close()


def test_without_keys_everybody_on_this_machine_may_do_everything(open_house: Ground) -> None:
    nobody = open_house.door_of(None)

    job_id = nobody.post(open_house.new_items("one")).job_id

    assert nobody.job(job_id)["state"] == "queued"
    assert nobody.get("/metrics").status == 200


@pytest.mark.parametrize("header", ["X-Forwarded-For", "x-forwarded-for", "Forwarded"])
def test_without_keys_a_request_through_a_proxy_is_refused(open_house: Ground, header: str) -> None:
    nobody, before = open_house.door_of(None), open_house.sizes()

    for method, rule in routes(open_house.app):
        if rule.rule not in OPEN:
            answer = nobody.ask(method, path_of(rule, NO_JOB), {header: "203.0.113.9"})
            assert (answer.status, answer.code) == (403, "forbidden")

    assert open_house.sizes() == before


@pytest.mark.parametrize(
    "host",
    [
        "example.com",
        "127.0.0.1.example.com",
        "10.0.0.1",
        "localhost.example.com",
        "[",
        "[::2]",
        "a b",
    ],
)
def test_without_keys_a_request_for_another_name_is_refused(open_house: Ground, host: str) -> None:
    client = open_house.app.test_client()

    answer = client.get("/api/jobs", headers={"Host": host})

    assert answer.status_code in (400, 403)
    assert answer.mimetype == PROBLEM


@pytest.mark.parametrize("host", ["localhost", "127.0.0.1:8000", "[::1]:8000", "LOCALHOST:1"])
def test_without_keys_this_machine_is_asked_by_any_of_its_names(
    open_house: Ground, host: str
) -> None:
    client = open_house.app.test_client()

    assert client.get("/api/jobs", headers={"Host": host}).status_code == 200


# ---- what must never be told


@pytest.mark.usefixtures("backend")
def test_texts_and_keys_are_in_no_log_no_error_and_not_in_redis(
    ground: Ground, start_process: StartProcess, tmp_path: Path
) -> None:
    text, name, secret = (f"canary-{secrets.token_hex(8)}" for _ in range(3))
    more = {"LOG_LEVEL": "DEBUG", "EMBEDDER_API_KEY": secret, "QUEUE_WAIT_TIME": "1"}
    environ = {**ground.environ, **more}
    ground.ctx.link.flushdb()
    answers: list[Answer] = []
    with serving(environ, tmp_path / "api.log") as served:
        worker = start_process("worker", "run", "embeddings", **environ)
        door = served.door(ground.door().key)
        batch = ground.new_items(f"{text} fine", f"{text} {REFUSED}")
        batch[0] |= {"custom_id": name, "metadata": {"of": name}}

        job_id = door.post(batch).job_id
        wait_for(lambda: door.job(job_id)["finished_at"], 60)
        answers += [
            door.post([{**batch[0], "text": f"{text}\0"}, item("no id", text)]),
            door.post([item(1, text, custom_id=text * 9), item(1, text, metadata={text: "\0"})]),
            door.post_lines([f'{{"text": "{text}"'.encode(), b"\n"]),
            door.post_raw(f'{{"items": [{{"text": "{text}'.encode()),
            door.post(batch, model=text, project=f"{text} !"),
            door.post(batch, "", {"Idempotency-Key": text * 20}),
            door.get(f"/api/job/{text}"),
            door.get(f"/api/jobs?cursor={text}"),
            served.door(f"hf_{secret}_{secret}").get("/api/jobs"),
            door.get(f"/api/job/{job_id}"),
            door.get(f"/api/job/{job_id}/items"),
        ]
        assert worker.stop() == 0
        assert served.running.stop() == 0
        logs = served.running.said + worker.said

    assert door.key
    assert f'"job_id": "{job_id}"' in logs
    assert ground.door_of(door.key).job(job_id)["counts"]["failed"] == 1
    kept = in_redis(ground.ctx.link)
    assert f"{job_id}-1".encode() in kept
    for canary in (text, name, secret, door.key, door.key.split("_", 2)[2]):
        assert canary not in logs
        assert canary.encode() not in kept
    for canary in (text, secret, door.key):
        assert not [answer.body for answer in answers if canary.encode() in answer.body]
