"""The users of deploy/redis.acl do all that Holdfast does, and nothing else."""

from collections.abc import Iterator
from typing import Any
from urllib.parse import urlsplit, urlunsplit

import httpx
import pytest
import redis
from redis.exceptions import NoPermissionError

from tests.api import Door
from tests.fakes import Fake, Reply
from tests.processes import ROOT, StartApi, StartProcess, wait_for

ACL = ROOT / "deploy" / "redis.acl"
PASSWORD = "of-this-test"
WHO = ("holdfast-api", "holdfast-sweeper", "holdfast-worker")
FINAL = ("completed", "completed_with_errors", "failed", "cancelled")


def rules() -> dict[str, list[str]]:
    """Return what the file says of each user."""
    lines = [line.split() for line in ACL.read_text("utf-8").splitlines()]
    return {words[1]: words[2:] for words in lines if words and words[0] == "user"}


def url_of(url: str, user: str) -> str:
    """Return the same address under another name."""
    parts = urlsplit(url)
    return urlunsplit(parts._replace(netloc=f"{user}:{PASSWORD}@{parts.hostname}:{parts.port}"))


@pytest.fixture
def admin(redis_url: str) -> Iterator["redis.Redis"]:
    """Give the server with the users of the file."""
    with redis.Redis.from_url(redis_url, decode_responses=True) as admin:
        for user in WHO:
            words = [word.replace(">CHANGE-ME", f">{PASSWORD}") for word in rules()[user]]
            admin.execute_command("ACL", "SETUSER", user, "reset", *words)
        admin.execute_command("ACL", "LOG", "RESET")
        yield admin
        for user in WHO:
            admin.execute_command("ACL", "DELUSER", user)


def denied(admin: "redis.Redis") -> set[tuple[str, str, str]]:
    """Return what was refused: who, why, and which command or key."""
    found: list[Any] = admin.acl_log()
    return {(each["username"], each["reason"], each["object"]) for each in found}


def test_everything_works_under_the_least_rights(
    admin: "redis.Redis",
    environ: dict[str, str],
    redis_url: str,
    trace_source_url: str,
    start_api: StartApi,
    start_process: StartProcess,
) -> None:
    with Fake() as backend:
        environ |= {
            "EMBEDDER_URL": backend.url,
            "AUTH": "off",
            "QUEUE_VISIBILITY_TIMEOUT": "2",
            "SWEEP_SECONDS": "0.3",
            "QUEUE_WAIT_TIME": "1",
            "TRACE_SOURCE_URL": trace_source_url,
            "REDIS_URL": url_of(redis_url, "holdfast-worker"),
        }
        backend.when(Reply(status=400, error="the input length exceeds"), marker="refused")
        start_process("worker", "run", "embeddings")
        start_process("worker", "run", "trace-events")
        start_process("worker", "sweep", REDIS_URL=url_of(redis_url, "holdfast-sweeper"))
        environ["REDIS_URL"] = url_of(redis_url, "holdfast-api")
        with httpx.Client(base_url=start_api(), trust_env=False, timeout=60) as client:
            go_through_it(Door(client, None), backend)
            pages = (
                "/rq/",
                "/rq/0/view/queues",
                "/rq/0/data/queues.json",
                "/rq/0/view/jobs",
                "/rq/0/data/workers.json",
                "/rq/0/data/jobs/embeddings/failed/8/asc/1.json",
            )
            shown = {page: client.get(page).status_code for page in pages}

    # CLIENT SETINFO and MAINT_NOTIFICATIONS of the handshake, which Redis 6.2 does not know and
    # the library does without.
    assert {each for each in denied(admin) if each[1:] != ("command", "client")} == set()
    assert set(shown.values()) <= {200, 308}, shown


def go_through_it(door: Door, backend: Fake) -> None:
    """Do what users do."""
    free = [{"custom_id": str(number), "text": f"text {number}"} for number in range(20)]
    job_id = door.post([*free, {"custom_id": "bad", "text": "refused"}]).job_id
    until_final(door, job_id)
    backend.rules.clear()
    assert door.send(f"/api/job/{job_id}/requeue", {}).status == 202
    until_final(door, job_id)
    assert all("vector" in line for line in door.result(job_id))
    door.send(f"/api/job/{door.post(free).job_id}/cancel", {})
    ask = {"profile": "query_tool", "container_ids": ["C00001", "C00002"], "domains": ["history"]}
    answer = door.send("/api/trace/events", ask, {"Prefer": "respond-async"})
    until_final(door, answer.job_id)
    assert door.get(f"/api/job/{answer.job_id}/result?domain=history").status == 200
    assert door.get("/health").json["redis"]["state"] == "ok"


def until_final(door: Door, job_id: str) -> None:
    wait_for(lambda: door.job(job_id)["state"] in FINAL, 60)


@pytest.mark.parametrize("user", WHO)
@pytest.mark.parametrize(
    "command",
    [
        ("FLUSHALL",),
        ("FLUSHDB",),
        ("KEYS", "*"),
        ("SCAN", "0"),
        ("CONFIG", "GET", "maxmemory"),
        ("EVAL", "return 1", "0"),
        ("SCRIPT", "FLUSH"),
        ("ACL", "LIST"),
        ("PUBLISH", "rq:pubsub:x", "{}"),
        ("GET", "somebody:else"),
        ("SET", "somebody:else", "x"),
        ("SHUTDOWN",),
        ("DEBUG", "SLEEP", "0"),
        ("MONITOR",),
        ("REPLICAOF", "NO", "ONE"),
    ],
    ids=" ".join,
)
def test_what_none_of_them_may_do(
    admin: "redis.Redis", redis_url: str, user: str, command: tuple[str, ...]
) -> None:
    del admin
    with (
        redis.Redis.from_url(url_of(redis_url, user)) as client,
        pytest.raises(NoPermissionError),
    ):
        client.execute_command(*command)


def test_only_a_worker_takes_bells(admin: "redis.Redis", redis_url: str) -> None:
    del admin
    for user in ("holdfast-api", "holdfast-sweeper"):
        with (
            redis.Redis.from_url(url_of(redis_url, user)) as client,
            pytest.raises(NoPermissionError),
        ):
            client.execute_command("LMOVE", "rq:a", "rq:b", "LEFT", "RIGHT")


def test_the_file_has_no_password_and_no_default_user() -> None:
    assert rules()["default"] == ["off"]
    for user in WHO:
        assert ">CHANGE-ME" in rules()[user]
        assert "-@all" in rules()[user]
