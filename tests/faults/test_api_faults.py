"""The API under clients that leave, press twice, requeue at once, and read what is deleted."""

import json
import os
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from rq.registry import FailedJobRegistry

from app.core import config
from app.core.bells import BellJob, BellQueue
from app.core.context import open_context
from app.core.link import connect
from tests.api import item
from tests.fakes import Reply
from tests.faults.stage import QUEUE, Stage, numbered, struck
from tests.processes import wait_for
from worker.sweep import cleanup

KEY = "Idempotency-Key"
BUTTON = {"X-Requested-With": "XMLHttpRequest"}


# ---- F22: clients that leave, and clients that press twice


def as_http(path: str, body: bytes, **headers: str) -> bytes:
    """Return a request as it goes over the wire."""
    sent = {"Host": "127.0.0.1", "Content-Type": "application/json", **headers}
    lines = "".join(f"{name.replace('_', '-')}: {text}\r\n" for name, text in sent.items())
    start = f"POST {path} HTTP/1.1\r\n{lines}Content-Length: {len(body)}\r\n\r\n"
    return start.encode() + body


@contextmanager
def line_to(stage: Stage) -> Iterator[socket.socket]:
    """Connect to the API as a client that knows no manners."""
    url = urlsplit(str(stage.door.http.base_url))
    with socket.create_connection((url.hostname or "", url.port or 0)) as line:
        yield line


def jobs(stage: Stage) -> int:
    """Count the jobs."""
    return int(stage.one("SELECT count(*) FROM holdfast.jobs"))


def test_f22_a_client_that_leaves_before_its_202_finds_its_job_by_its_key(
    served_stage: Stage,
) -> None:
    stage = served_stage
    ids = stage.new_rows(*numbered(20))
    body = json.dumps({"items": [item(number, stage.texts[number]) for number in ids]}).encode()
    stage.ledger.note(ids)
    with line_to(stage) as line:
        line.sendall(as_http("/api/embeddings", body, Idempotency_Key="k"))
    wait_for(lambda: jobs(stage) == 1)

    answer = stage.send_until_accepted(ids, "k")
    stage.start_sweeper()
    stage.start_worker()
    stage.wait_until_final()

    assert jobs(stage) == 1
    assert answer.json["accepted"] == 20
    assert stage.statuses == {"done": 20}
    stage.check()


def test_f22_half_a_batch_is_none(served_stage: Stage) -> None:
    stage = served_stage
    ids = stage.new_rows(*numbered(20))
    body = json.dumps({"items": [item(number, stage.texts[number]) for number in ids]}).encode()
    lines = b"".join(json.dumps(item(n, stage.texts[n])).encode() + b"\n" for n in ids)
    stream = as_http("/api/embeddings", lines, Content_Type="application/x-ndjson")
    for request in (as_http("/api/embeddings", body), stream):
        with line_to(stage) as line:
            line.sendall(request[: len(request) - 100])
            line.shutdown(socket.SHUT_WR)
            struck(line.recv(100).startswith(b"HTTP/1.1 400"), "half a batch was not noticed")

    assert jobs(stage) == 0
    assert stage.statuses == {}


def test_f22_a_button_that_is_pressed_twice_embeds_each_text_once(served_stage: Stage) -> None:
    stage = served_stage
    ids = stage.new_rows(*numbered(100))

    with ThreadPoolExecutor(2) as pool:
        one, two = pool.map(lambda _: stage.send(ids), range(2))
    stage.start_sweeper()
    stage.start_workers(2)
    stage.wait_until_final()

    assert one.job_id != two.job_id
    assert one.json["accepted"] + two.json["accepted"] == 100
    assert [stage.door.job(each.job_id)["counts"]["done"] for each in (one, two)] == [100, 100]
    stage.check()


# ---- F25: whoever requeues, and whatever


def failed_job(stage: Stage, *texts: str) -> str:
    """Post a batch in which the texts that hold "bad" are refused, and wait for its end."""
    stage.fake.when(Reply(status=400, error="the input is not allowed"), marker="bad")
    job_id = stage.post(*texts)
    wait_for(lambda: stage.door.job(job_id)["state"] not in ("queued", "running"), 60)
    return job_id


def requeued(stage: Stage, job_id: str) -> list[dict[str, Any]]:
    """Return the audit of a job's requeues."""
    return stage.rows("SELECT * FROM holdfast.requeues WHERE job_id = %s", job_id)


def press(stage: Stage, job_id: str) -> int:
    """Press the dashboard's button for the bell of a job that was rung last."""
    number = stage.one("SELECT rings FROM holdfast.jobs WHERE id = %s", job_id)
    return stage.door.http.post(f"/rq/job/{job_id}-{number}/requeue", headers=BUTTON).status_code


def test_f25_the_button_revives_what_failed_and_nothing_else(served_stage: Stage) -> None:
    stage = served_stage
    waits = stage.post("waits")
    stage.start_sweeper()
    cancelled = stage.post("goes")
    stage.door.send(f"/api/job/{cancelled}/cancel", {})
    assert [press(stage, each) for each in (waits, cancelled)] == [409, 409]
    stage.start_worker()
    failed = failed_job(stage, "good", "bad")
    done = waits
    wait_for(lambda: stage.door.job(done)["state"] == "completed")
    assert press(stage, done) == 409
    stage.fake.rules.clear()

    assert press(stage, failed) == 200
    stage.wait_until_final()

    wait_for(lambda: stage.door.job(failed)["counts"]["done"] == 2)
    assert [len(requeued(stage, each)) for each in (done, cancelled, failed)] == [0, 0, 1]
    stage.sent_again = 2
    stage.check()


def test_f25_of_many_who_requeue_at_once_one_does_it(served_stage: Stage) -> None:
    stage = served_stage
    stage.start_sweeper()
    stage.start_worker()
    failed = failed_job(stage, *(f"bad {number}" for number in range(10)))
    stage.fake.rules.clear()

    def ask(number: int) -> int:
        if number % 2:
            return press(stage, failed)
        return stage.door.send(f"/api/job/{failed}/requeue", {}).status

    with ThreadPoolExecutor(8) as pool:
        answers = list(pool.map(ask, range(8)))
    stage.wait_until_final()
    wait_for(lambda: stage.door.job(failed)["state"] == "completed")

    assert set(answers) <= {200, 202, 409}, answers
    audit = requeued(stage, failed)
    stage.record("answers", sorted(answers))
    assert len([each for each in answers if each != 409]) == len(audit) == 1
    stage.sent_again = 50  # ten texts to blame among ten, and once more each
    stage.check()


def test_f25_rq_s_own_command_runs_no_bell_of_a_job_that_is_over(served_stage: Stage) -> None:
    stage = served_stage
    stage.start_sweeper()
    stage.start_worker()
    failed = failed_job(stage, "bad")
    registry = FailedJobRegistry(
        queue=BellQueue(QUEUE, connection=connect(stage.environ["REDIS_URL"]), job_class=BellJob)
    )
    wait_for(registry.get_job_ids)

    command = [str(Path(sys.executable).parent / "rq"), "requeue", "--queue", QUEUE, "--all"]
    command += ["--url", stage.environ["REDIS_URL"], "--serializer", "json"]
    told = subprocess.run(command, capture_output=True, text=True, check=False, env={**os.environ})  # noqa: TID251 - handed on
    struck(told.returncode == 0 and "0 jobs" not in told.stdout, told.stdout + told.stderr)
    stage.post("behind it")
    stage.wait_until_final()

    assert stage.door.job(failed)["state"] == "failed"
    assert requeued(stage, failed) == []
    assert {row["attempts"] for row in stage.items()} == {1}
    stage.check()


# ---- F27: what is read, requeued and sent again while it is deleted


def make_old(stage: Stage) -> None:
    """Let a year pass for all that is over."""
    for table, column in (
        ("holdfast.jobs", "finished_at"),
        ("holdfast.jobs", "expires_at"),
        ("holdfast.idempotency_keys", "created_at"),
        ("public.embedding_retry_queue", "processed_at"),
    ):
        stage.rows(f"UPDATE {table} SET {column} = {column} - interval '400 days'")  # noqa: S608


@contextmanager
def read_meanwhile(stage: Stage, paths: list[str]) -> Iterator[dict[str, list[int]]]:
    """Read these pages again and again while the block runs, and keep each status in turn."""
    seen: dict[str, list[int]] = {path: [] for path in paths}
    stop = threading.Event()

    def read() -> None:
        while not stop.is_set():
            for path, statuses in seen.items():
                statuses.append(stage.door.get(path).status)

    with ThreadPoolExecutor(1) as pool:
        reading = pool.submit(read)
        yield seen
        wait_for(lambda: all(seen.values()))
        stop.set()
    reading.result()


def test_f27_what_is_deleted_while_it_is_read_is_there_or_gone_and_never_an_error(
    stage: Stage,
) -> None:
    stage.start_worker()
    stage.fake.when(Reply(status=400, error="the input is not allowed"), marker="bad")
    ids = [stage.new_rows(*numbered(9, f"{n}"), f"bad {n}") for n in range(20)]
    accepted = [stage.send(each, f"key {n}") for n, each in enumerate(ids)]
    stage.wait_until_final()
    make_old(stage)
    ctx = open_context(config.load(stage.environ), application="cleaner", most_connections=2)
    paths = [
        f"/api/job/{each.job_id}{page}"
        for each in accepted
        for page in ("", "/items", "/result", "?wait=1")
    ]

    with closing(ctx), read_meanwhile(stage, paths) as seen, ThreadPoolExecutor(2) as pool:
        requeues = pool.map(
            lambda each: stage.door.send(f"/api/job/{each.job_id}/requeue", {}), accepted
        )
        repeats = pool.map(lambda n: stage.send(ids[n], f"key {n}"), range(len(ids)))
        counts = cleanup.run_once(ctx)
        statuses = {each.status for each in (*requeues, *repeats)}

    struck(counts["jobs"], f"nothing was deleted: {counts}")
    stage.record("deleted", dict(counts))
    assert statuses <= {202, 404, 409, 410}
    for path, answers in seen.items():
        assert set(answers) <= {200, 404, 409, 410}, (path, answers)
        first = answers.index(404) if 404 in answers else len(answers)
        assert set(answers[first:]) <= {404}, (path, answers)
