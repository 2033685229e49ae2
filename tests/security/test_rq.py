"""S1: whoever can write to Redis can ring, and do nothing else."""

import json
import pickle  # noqa: TID251 - the attack
import re
import socket
import zlib
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
from rq import Queue
from rq.job import Job as RqJob

from app.core.bells import TASK, BellJob, Bells
from app.core.link import Link, connect
from app.core.model import Rings
from tests.processes import Running, StartProcess, WaitFor

QUEUE = "embeddings"
LIST = f"rq:queue:{QUEUE}"
GOOD = "emb-0000000000000000"
BAD = "emb-ffffffffffffffff"


@pytest.fixture
def link(redis_url: str) -> Iterator[Link]:
    link = connect(redis_url)
    yield link
    link.close()


@pytest.fixture
def worker(start_process: StartProcess, link: Link, wait_for: WaitFor) -> Running:
    """Give a worker that listens."""
    started = start_process("worker", "run", QUEUE, QUEUE_WAIT_TIME="1")
    wait_for(lambda: link.scard(f"rq:workers:{QUEUE}") or not started.is_alive, 30)
    return started


@pytest.fixture
def side_file(tmp_path: Path) -> Path:
    """Give the file that exists as soon as foreign code has run."""
    return tmp_path / "side-file"


def call(func: object, *arguments: object, **options: object) -> bytes:
    """Return a call as RQ packs it."""
    return zlib.compress(json.dumps([func, None, arguments, options]).encode())


def push(link: Link, bell: str | bytes, data: bytes, more: Mapping[str, Any] | None = None) -> None:
    """Put a job into the queue as somebody with access to Redis would."""
    name = bell if isinstance(bell, bytes) else bell.encode()
    fields: dict[Any, Any] = {"data": data, "status": "queued", "origin": QUEUE, "timeout": "60"}
    fields |= {"created_at": "2026-01-01T00:00:00.000000Z"} | dict(more or {})
    link.hset(b"rq:job:" + name, mapping=fields)
    link.rpush(LIST, name)


def ring_and_hear(link: Link, wait_for: WaitFor) -> None:
    """Ring a bell of ours behind all that, and wait until it was followed."""
    rings = Rings(job_id=GOOD, last=1, bells=1, run=1, project="", priority=0)
    Bells(link).ring(rings, queue=QUEUE, timeout_seconds=60)
    wait_for(lambda: BellJob.fetch(f"{GOOD}-1", link).get_status().value == "finished", 30)


class Bomb:
    """What touches the side file when it is unpickled."""

    def __init__(self, command: str) -> None:
        self.command = command

    def __reduce__(self) -> tuple[object, ...]:
        return eval, (f"__import__('os').system({self.command!r})",)


Attack = Callable[[Link, str, str], object]
"""What somebody does to Redis, given the id of a bell and a command to get run."""


def pickled(link: Link, bell: str, command: str) -> None:
    bomb = zlib.compress(pickle.dumps((TASK, None, (Bomb(command), 1), {})))
    push(link, bell, bomb, {"meta": pickle.dumps({"a": Bomb(command)})})


def by_rq(link: Link, bell: str, command: str) -> None:
    Queue(QUEUE, connection=link).enqueue("os.system", command, job_id=bell)


REFUSED: dict[str, Attack] = {
    "pickle": pickled,
    "pickle, by RQ itself": by_rq,
    "os.system": lambda link, bell, command: push(link, bell, call("os.system", command)),
    "posix.system": lambda link, bell, command: push(link, bell, call("posix.system", command)),
    "exec": lambda link, bell, command: push(
        link, bell, call("exec", f"__import__('os').system({command!r})")
    ),
    "a command as job": lambda link, bell, command: push(
        link, bell, call(TASK, f"$({command})", 1)
    ),
    "another job": lambda link, bell, _: push(link, bell, call(TASK, GOOD, 1)),
    "one argument more": lambda link, bell, command: push(link, bell, call(TASK, BAD, 1, command)),
    "options": lambda link, bell, command: push(link, bell, call(TASK, BAD, 1, run=command)),
    "a packed bomb": lambda link, bell, _: push(link, bell, zlib.compress(b" " * 100_000_000)),
    "megabytes": lambda link, bell, _: push(link, bell, b"x" * 5_000_000),
    "an unknown status": lambda link, bell, _: push(
        link, bell, call(TASK, BAD, 1), {"status": "dreaming"}
    ),
    "no time limit": lambda link, bell, _: push(link, bell, call(TASK, BAD, 1), {"timeout": "-1"}),
    "no data to speak of": lambda link, bell, _: push(link, bell, b""),
}


def test_what_is_no_bell_is_refused_shown_and_run_by_nobody(
    worker: Running, link: Link, side_file: Path, wait_for: WaitFor
) -> None:
    bells = {f"{BAD}-{number}": name for number, name in enumerate(REFUSED)}
    for bell, name in bells.items():
        REFUSED[name](link, bell, f"touch {side_file}")

    ring_and_hear(link, wait_for)

    assert not side_file.exists()
    assert worker.is_alive
    assert peak_mib(worker.pid) < 130, "the bomb of 100 MB was unpacked"
    said = [json.loads(line) for line in worker.said.splitlines()]
    refused = [line["bell"] for line in said if line.get("event") == "bell_refused"]
    assert [bells[bell] for bell in refused] == list(REFUSED)
    for bell, name in bells.items():
        stored = BellJob.fetch(bell, link)
        assert link.zscore(f"rq:failed:{QUEUE}", bell), name
        assert (stored.func_name, stored.args, stored.meta) == ("refused", [], {}), name
        assert link.hlen(f"rq:job:{bell}") < 20, name
        assert link.ttl(f"rq:job:{bell}") > 0, name
    assert link.llen(f"{LIST}:intermediate") == 0


def peak_mib(pid: int) -> int:
    found = re.search(r"VmHWM:\s+(\d+) kB", Path(f"/proc/{pid}/status").read_text())
    assert found
    return int(found[1]) // 1024


def with_callbacks(link: Link, bell: str, command: str) -> None:
    callbacks = ("success_callback_name", "failure_callback_name", "stopped_callback_name")
    bombs = dict.fromkeys(("meta", "result"), pickle.dumps(Bomb(command)))
    more = {**dict.fromkeys(callbacks, "os.abort"), **bombs, "retries_left": "3"}
    push(link, bell, call(TASK, BAD, 1), more)


def with_dependents(link: Link, bell: str, command: str) -> None:
    push(link, bell, call(TASK, BAD, 1))
    link.sadd(f"rq:job:{bell}:dependents", f"{BAD}-1000")
    data = zlib.compress(pickle.dumps(("os.system", None, (command,), {})))
    fields: dict[Any, Any] = {"data": data, "status": "deferred", "origin": "other"}
    link.hset(f"rq:job:{BAD}-1000", mapping=fields)


def abandoned(link: Link, bell: str, command: str) -> None:
    """Stand in the lists whose cleaning, in RQ, runs callbacks and puts jobs into queues."""
    fields: dict[Any, Any] = {
        "data": call("os.system", command),
        "status": "started",
        "origin": QUEUE,
        "failure_callback_name": "os.abort",
        "retries_left": "3",
    }
    link.hset(f"rq:job:{bell}", mapping=fields)
    link.zadd(f"rq:wip:{QUEUE}", {f"{bell}:1": 1})
    link.zadd(f"rq:ready:{QUEUE}", {bell: 1})


def no_hash(link: Link, bell: str, _: str) -> None:
    link.set(f"rq:job:{bell}", "no hash")
    link.rpush(LIST, bell)


def a_trace(link: Link, bell: str, _: str) -> None:
    link.hset(f"rq:job:{bell}", "last_heartbeat", "2026-01-01T00:00:00.000000Z")
    link.rpush(LIST, bell)


HARMLESS: dict[str, Attack] = {
    "a bell that somebody else rang": lambda link, bell, _: push(link, bell, call(TASK, BAD, 1)),
    "callbacks": with_callbacks,
    "dependents": with_dependents,
    "what seems abandoned": abandoned,
    "an id without a job": lambda link, bell, _: link.rpush(LIST, bell),
    "an id with a trace of a job": a_trace,
    "an id with something else than a job": no_hash,
    "an empty id": lambda link, _, __: link.rpush(LIST, ""),
    "an id that RQ forbids": lambda link, _, __: push(link, "../etc passwd", call(TASK, BAD, 1)),
    "an id that is no text": lambda link, _, __: push(link, b"\xff\x00", call(TASK, BAD, 1)),
}


def test_what_hangs_on_a_bell_is_not_run_and_what_is_no_id_ends_no_worker(
    worker: Running, link: Link, side_file: Path, wait_for: WaitFor
) -> None:
    for number, attack in enumerate(HARMLESS.values()):
        attack(link, f"{BAD}-{number}", f"touch {side_file}")

    ring_and_hear(link, wait_for)

    assert not side_file.exists()
    assert worker.is_alive
    assert worker.said.count('"bell_refused"') == 3
    assert link.llen("rq:queue:other") == 0


def test_what_is_abandoned_is_cleaned_away_and_not_run(
    start_process: StartProcess, link: Link, side_file: Path, wait_for: WaitFor
) -> None:
    abandoned(link, f"{BAD}-1", f"touch {side_file}")

    worker = start_process("worker", "run", QUEUE, QUEUE_WAIT_TIME="1")

    wait_for(lambda: not link.exists(f"rq:wip:{QUEUE}"), 30)
    ring_and_hear(link, wait_for)
    assert not side_file.exists()
    assert worker.is_alive


def test_a_webhook_is_not_called(worker: Running, link: Link, wait_for: WaitFor) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        listener.settimeout(0)
        url = f"http://127.0.0.1:{listener.getsockname()[1]}/"
        hooks = [{"url": url, "job_status": status} for status in ("finished", "failed")]
        push(link, f"{BAD}-1", call(TASK, BAD, 1), {"webhooks": json.dumps(hooks)})
        push(link, f"{BAD}-2", call("os.getpid"), {"webhooks": json.dumps(hooks)})

        ring_and_hear(link, wait_for)

        with pytest.raises(BlockingIOError):
            listener.accept()
    assert worker.is_alive


def test_lists_that_are_none_do_not_keep_a_worker_from_working(
    start_process: StartProcess, link: Link, wait_for: WaitFor
) -> None:
    link.set(f"rq:wip:{QUEUE}", "no list")

    worker = start_process("worker", "run", QUEUE, QUEUE_WAIT_TIME="1")

    wait_for(lambda: "lists not cleaned" in worker.said, 30)
    link.delete(f"rq:wip:{QUEUE}")
    ring_and_hear(link, wait_for)
    assert worker.is_alive


def test_plain_rq_would_have_run_the_bomb(side_file: Path) -> None:
    bomb = pickle.dumps(Bomb(f"touch {side_file}"))

    plain = RqJob.create("os.getpid", connection=connect("redis://127.0.0.1:1/0"))
    plain.serializer.loads(bomb)

    assert side_file.exists()
