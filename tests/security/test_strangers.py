"""S4 and S7: without a key there is nothing, and another client's jobs are as if not there."""

import json
import re
from collections.abc import Iterator, Mapping
from contextlib import closing, suppress
from dataclasses import dataclass
from typing import Any

import psycopg
import pytest
from flask import Flask
from werkzeug.test import TestResponse

from app.core.errors import FailedItemsRemain
from tests.api import (  # noqa: F401 - fixtures among them
    JSON,
    LINES,
    REFUSED,
    Door,
    Ground,
    make_backend,
    make_ground,
)
from tests.traces import IDS
from worker import tracejob
from worker.runtime import open_trace_horse, prepare_trace

OPEN = {"/livez", "/readyz", "/health", "/login", "/logout", "/static/<path:filename>"}
ARGUMENT = re.compile(r"<(?:([a-z]+)(?:\([^)]*\))?:)?([a-z_]+)>")
EMBEDDING, TRACE = "emb-", "trace-evt-"
SECRET = "canary-of-alice"
ASYNC = {"Prefer": "respond-async"}


def routes(app: Flask) -> list[tuple[str, str]]:
    """Return each rule of the URL map with each of its methods, those that Flask adds too."""
    rules = sorted(app.url_map.iter_rules(), key=str)
    return [(method, rule.rule) for rule in rules for method in sorted(rule.methods or ())]


def job_routes(app: Flask) -> list[tuple[str, str]]:
    return [(method, rule) for method, rule in routes(app) if "<job_id>" in rule and is_ours(rule)]


def is_ours(rule: str) -> bool:
    return not rule.startswith("/rq")


def path_of(rule: str, job_id: str = "emb-x") -> str:
    """Return a path of a rule: the id where one is meant, anything that fits elsewhere."""
    values = {"job_id": job_id, "filename": "login.css"}
    return ARGUMENT.sub(lambda found: values.get(found[2], "1" if found[1] == "int" else "x"), rule)


# ---- S4: without a key


def test_without_a_key_every_rule_is_closed_but_those_of_the_contract(ground: Ground) -> None:
    client = ground.app.test_client()
    seen = set()

    for method, rule in routes(ground.app):
        if rule in OPEN:
            seen.add(rule)
            continue
        for accept in ("*/*", "text/html", LINES):
            answer = client.open(path_of(rule), method=method, headers={"Accept": accept})
            if method == "OPTIONS" and is_ours(
                rule
            ):  # Flask's own: which methods there are, and nothing else
                assert (answer.get_data(), "Allow" in answer.headers) == (b"", True), rule
            else:
                assert answer.status_code == 401, (method, rule, answer.status)
    assert seen == OPEN


def test_what_is_open_tells_nothing_of_anybody(house: "House") -> None:
    client = house.ground.app.test_client()

    for method, rule in routes(house.ground.app):
        if rule in OPEN:
            house.check_says_nothing(client.open(path_of(rule), method=method))


# ---- S7: another client's jobs


@dataclass
class House:
    """Alice's jobs in every state, and who is not Alice."""

    ground: Ground
    alice: Door
    mallory: Door
    job_ids: list[str]

    def check_says_nothing(self, answer: TestResponse) -> None:
        """Check that an answer names nothing of Alice's."""
        said = answer.get_data() + str(answer.headers).encode()
        answer.close()  # of a file
        for word in (SECRET, "alice", *self.job_ids):
            assert word.encode() not in said, (answer.request.path, word)

    def ask(self, method: str, path: str, **more: Any) -> TestResponse:  # noqa: ANN401 - Flask's
        """Send one request as Mallory."""
        key = {"Authorization": f"Bearer {self.mallory.key}"}
        headers = {**key, **more.pop("headers", {})}
        return self.ground.app.test_client().open(path, method=method, headers=headers, **more)

    def told(
        self, job_id: str, method: str, rule: str, query: str, more: Mapping[str, Any]
    ) -> tuple[int, str, str, list[tuple[str, str]], bytes]:
        """Return all that a stranger is told who asks for a job, but the time."""
        answer = self.ask(method, path_of(rule, job_id) + query, **more)
        self.check_says_nothing(answer)
        headers = sorted((name, value) for name, value in answer.headers.items() if name != "Date")
        return answer.status_code, method, rule, headers, answer.get_data()

    @property
    def rows(self) -> list[dict[str, Any]]:
        """Everything of Alice's in Postgres that somebody could change."""
        return self.ground.rows(
            """SELECT j.id, j.state, j.run, j.rings, j.cancelled_at, j.finished_at, q.id AS item,
                      q.status, q.attempts, q.text_content
                 FROM holdfast.jobs j LEFT JOIN holdfast.job_items i ON i.job_id = j.id
                 LEFT JOIN public.embedding_retry_queue q ON q.id = i.item_id
                WHERE j.client = 'alice' ORDER BY j.id, q.id"""
        )


@pytest.fixture(scope="module", name="house")
def make_house(ground: Ground, trace_source_url: str) -> Iterator[House]:
    ground.backend.limits.max_characters = 1000
    own = ground.reopened(TRACE_SOURCE_URL=trace_source_url)
    with psycopg.connect(trace_source_url) as source:
        ids = [row[0] for row in source.execute(IDS.encode(), {"count": 3})]
    alice, mallory = own.door("alice"), own.door("mallory")
    yield House(own, alice, mallory, [*embedding_jobs(own, alice), *trace_jobs(own, alice, ids)])
    own.app.extensions["source"].close()
    own.close()


def embedding_jobs(ground: Ground, alice: Door) -> Iterator[str]:
    """Make one that is done, one that failed, one cancelled, one running, and one that waits."""
    options: dict[str, Any] = {"project": SECRET, "return_vectors": True}
    yield ground.done(alice, named(ground, "one"), **options)
    yield ground.done(alice, named(ground, "x" * 2000), **options)
    cancelled = alice.post(named(ground, "three"), **options).job_id
    alice.send(f"/api/job/{cancelled}/cancel")
    yield cancelled
    running = alice.post(named(ground, "four"), **options).job_id
    ground.hold(running)
    yield running
    yield alice.post(named(ground, "five"), "", {"Idempotency-Key": "k"}, **options).job_id


def named(ground: Ground, text: str) -> list[dict[str, Any]]:
    [one] = ground.new_items(f"{SECRET} {text}")
    return [{**one, "custom_id": SECRET, "metadata": {"of": SECRET}}]


def trace_jobs(ground: Ground, alice: Door, ids: list[str]) -> Iterator[str]:
    """Make one that is done, one cancelled, and one that waits."""
    ask = {"profile": "query_tool", "domains": ["history"], "container_ids": ids}
    done, cancelled, waiting = (
        alice.send("/api/trace/events", ask, ASYNC).job_id for _ in range(3)
    )
    horse = open_trace_horse(
        prepare_trace(ground.settings), leased_by=f"{done}-0", stop_asked=lambda: False
    )
    with closing(horse), suppress(FailedItemsRemain):
        tracejob.drain(horse, done, 1000)
    alice.send(f"/api/job/{cancelled}/cancel")
    yield from (done, cancelled, waiting)


QUERIES = (
    *("?wait=1", "?status=done", "?cursor=0&limit=1", "?offset=0&limit=1", "?domain=history"),
    *("?domain=history&offset=0&limit=1", "?x=1"),
)
BODIES: tuple[Mapping[str, Any], ...] = (
    {"json": {"reason": "mine"}},
    {"data": b"{", "content_type": JSON},
    {"headers": {"Accept": LINES}},
    {"headers": {"Prefer": "wait=1"}},
)


def asks(app: Flask) -> Iterator[tuple[str, str, str, Mapping[str, Any]]]:
    """Return every way to ask for a job: method, rule, query, and what else is sent."""
    for method, rule in job_routes(app):
        yield method, rule, "", {}
        if method in ("GET", "POST"):
            for query in QUERIES:
                yield method, rule, query, {}
            for more in BODIES:
                yield method, rule, "", more


def test_what_is_another_client_s_is_to_a_stranger_as_if_it_were_not_there(house: House) -> None:
    before = house.rows
    asked = list(asks(house.ground.app))
    assert {rule.split("/")[-1] for _, rule, *_ in asked} >= {"items", "result", "requeue"}
    seen = set()

    for prefix in (EMBEDDING, TRACE):
        missing = [house.told(prefix + "0" * 32, *each) for each in asked]
        for job_id in [each for each in house.job_ids if each.startswith(prefix)]:
            house.alice.job(job_id)  # fresh in Redis too
            assert [house.told(job_id, *each) for each in asked] == missing
            house.ground.ctx.live.forget(job_id)
            assert [house.told(job_id, *each) for each in asked[:10]] == missing[:10]
        seen |= {status for status, *_ in missing}

    assert 404 in seen
    assert seen <= {200, 400, 404, 422}  # 200: what OPTIONS allows
    assert house.rows == before


def test_what_names_no_job_names_none_of_another_client_s(house: House) -> None:
    cursors = [
        f"?{name}"
        for page in ("/api/jobs?limit=1", "/api/jobs?limit=3")
        for name in (f"cursor={house.alice.get(page).json['next']}".replace("+", "%2B"),)
    ]

    for method, rule in routes(house.ground.app):
        if "<job_id>" in rule and is_ours(rule):
            continue
        for query in ("", *cursors):
            answer = house.ask(method, path_of(rule) + query)
            house.check_says_nothing(answer)
            if not is_ours(rule):
                assert answer.status_code == 403, (method, rule)


def test_another_client_s_key_of_a_request_is_not_this_client_s(house: House) -> None:
    batch = named(house.ground, "mallory's own")

    answer = house.mallory.post(batch, "", {"Idempotency-Key": "k"})

    assert answer.status == 202
    assert answer.job_id not in house.job_ids


@pytest.mark.usefixtures("backend")
def test_who_shares_an_item_sees_the_item_and_nothing_of_the_other_s_job(house: House) -> None:
    [failing] = house.ground.new_items(REFUSED)
    hers = {**failing, "custom_id": SECRET, "metadata": {"of": SECRET}}
    job_id = house.ground.done(house.alice, [hers], project=SECRET)
    own = house.mallory.post([failing])
    assert own.json["duplicates"] == 1

    for rest in ("", "/items", "/result"):
        answer = house.ask("GET", f"/api/job/{own.job_id}{rest}")
        assert answer.status_code == 200
        assert SECRET not in json.dumps(answer.json)
        assert job_id not in json.dumps(answer.json)
