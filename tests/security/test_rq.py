"""S1: whoever can write to Redis can ring, and do nothing else."""

import json
import pickle  # noqa: S403
import zlib
from collections.abc import Callable, Iterator
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
BELL = f"{BAD}-1"


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


def packed(func: object, arguments: list[object], **options: object) -> bytes:
    return zlib.compress(json.dumps([func, None, arguments, options]).encode())


def push(link: Link, data: bytes, bell: str | bytes = BELL, **more: Any) -> None:
    """Put a job into the queue as somebody with access to Redis would."""
    fields = {"data": data, "status": "queued", "origin": QUEUE, "timeout": "60", **more}
    name = bell if isinstance(bell, bytes) else bell.encode()
    link.hset(b"rq:job:" + name, mapping={**fields, "created_at": "2026-01-01T00:00:00.000000Z"})
    link.rpush(LIST, name)


class Bomb:
    """What touches the side file when it is unpickled."""

    def __init__(self, command: str) -> None:
        self.command = command

    def __reduce__(self) -> tuple[object, ...]:
        return eval, (f"__import__('os').system({self.command!r})",)


def rq_job(link: Link, func: Any, *arguments: Any, **options: Any) -> None:
    """Enqueue as a program of RQ's own would, which knows nothing of our bells."""
    Queue(QUEUE, connection=link).enqueue(func, *arguments, job_id=BELL, **options)


def pickled(link: Link, command: str) -> None:
    bomb = zlib.compress(pickle.dumps((TASK, None, (Bomb(command), 1), {})))  # noqa: S301
    push(link, bomb, meta=pickle.dumps({"a": Bomb(command)}))  # noqa: S301


def with_callbacks(link: Link, command: str) -> None:
    push(
        link,
        packed(TASK, [BAD, 1]),
        success_callback_name="os.abort",
        failure_callback_name="os.abort",
        stopped_callback_name=f"os.system:{command}",
        meta=pickle.dumps(Bomb(command)),  # noqa: S301
        result=pickle.dumps(Bomb(command)),  # noqa: S301
    )


def with_dependents(link: Link, command: str) -> None:
    push(link, packed(TASK, [BAD, 1]))
    link.sadd(f"rq:job:{BELL}:dependents", f"{BAD}-2")
    data = zlib.compress(pickle.dumps(("os.system", None, (command,), {})))  # noqa: S301
    fields: dict[Any, Any] = {"data": data, "status": "deferred", "origin": "other"}
    link.hset(f"rq:job:{BAD}-2", mapping=fields)


def abandoned(link: Link, command: str) -> None:
    """Leave a job with a callback in the list whose clean-up runs what was abandoned."""
    fields: dict[Any, Any] = {
        "data": packed("os.system", [command]),
        "status": "started",
        "origin": QUEUE,
        "failure_callback_name": "os.abort",
        "retries_left": "3",
    }
    link.hset(f"rq:job:{BELL}", mapping=fields)
    link.zadd(f"rq:wip:{QUEUE}", {f"{BELL}:1": 1})
    link.zadd(f"rq:ready:{QUEUE}", {BELL: 1})


REFUSED: dict[str, Callable[[Link, str], object]] = {
    "pickled": pickled,
    "os.system": lambda link, command: push(link, packed("os.system", [command])),
    "exec": lambda link, command: push(
        link, packed("exec", [f"__import__('os').system({command!r})"])
    ),
    "posix.system": lambda link, command: push(link, packed("posix.system", [command])),
    "rq's own enqueue": lambda link, command: rq_job(link, "os.system", command),
    "a shell in the job id": lambda link, command: push(
        link, packed(TASK, [f"emb-$({command})", 1])
    ),
    "more arguments": lambda link, command: push(link, packed(TASK, [BAD, 1, command])),
    "keyword arguments": lambda link, command: push(link, packed(TASK, [BAD, 1], command=command)),
    "a packed bomb": lambda link, _: push(link, zlib.compress(b" " * 100_000_000)),
    "megabytes": lambda link, _: push(link, b"x" * 5_000_000),
    "an unknown status": lambda link, _: push(link, packed(TASK, [BAD, 1]), status="dreaming"),
    "no data to speak of": lambda link, _: push(link, b""),
    "no time limit": lambda link, _: push(link, packed(TASK, [BAD, 1]), timeout="-1"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_no_bell_is_refused_shown_and_harmless(
    worker: Running, link: Link, side_file: Path, wait_for: WaitFor, name: str
) -> None:
    REFUSED[name](link, f"touch {side_file}")

    ring_and_hear(link, wait_for)

    assert not side_file.exists()
    assert worker.is_alive
    assert worker.said.count('"bell_refused"') == 1
    assert link.zscore(f"rq:failed:{QUEUE}", BELL)
    stored = BellJob.fetch(BELL, link)
    assert (stored.func_name, stored.args) == ("refused", [])
    assert not link.hexists(f"rq:job:{BELL}", "meta")
    assert link.ttl(f"rq:job:{BELL}") > 0
    assert link.llen(f"{LIST}:intermediate") == 0


def ring_and_hear(link: Link, wait_for: WaitFor) -> None:
    """Ring a bell of ours behind all that, and wait until it was followed."""
    rings = Rings(job_id=GOOD, last=1, bells=1, run=1, project="", priority=0)
    Bells(link).ring(rings, queue=QUEUE, timeout_seconds=60)
    wait_for(lambda: BellJob.fetch(f"{GOOD}-1", link).get_status().value == "finished", 30)


HARMLESS: dict[str, Callable[[Link, str], object]] = {
    "callbacks": with_callbacks,
    "dependents": with_dependents,
    "abandoned": abandoned,
    "a bell rung by somebody else": lambda link, _: push(link, packed(TASK, [BAD, 1])),
    "an id without a job": lambda link, _: link.rpush(LIST, BELL),
    "a trace of a job": lambda link, _: (
        link.hset(f"rq:job:{BELL}", "last_heartbeat", "x"),
        link.rpush(LIST, BELL),
    ),
}


@pytest.mark.parametrize("name", HARMLESS)
def test_what_hangs_on_a_bell_is_not_run(
    worker: Running, link: Link, side_file: Path, wait_for: WaitFor, name: str
) -> None:
    HARMLESS[name](link, f"touch {side_file}")

    ring_and_hear(link, wait_for)

    assert not side_file.exists()
    assert worker.is_alive
    assert link.llen("rq:queue:other") == 0


DROPPED: dict[str, Callable[[Link], object]] = {
    "an id that RQ forbids": lambda link: push(link, packed(TASK, [BAD, 1]), "../etc passwd"),
    "an id that is no text": lambda link: push(link, packed(TASK, [BAD, 1]), b"\xff\xfe\x00"),
    "a job that is no hash": lambda link: (
        link.set(f"rq:job:{BELL}", "no hash"),
        link.rpush(LIST, BELL),
    ),
    "an empty id": lambda link: link.rpush(LIST, ""),
}


@pytest.mark.parametrize("name", DROPPED)
def test_what_cannot_be_an_id_is_dropped(
    worker: Running, link: Link, wait_for: WaitFor, name: str
) -> None:
    DROPPED[name](link)

    ring_and_hear(link, wait_for)

    assert worker.is_alive
    assert worker.said.count('"bell_refused"') == 1
    assert link.llen(f"{LIST}:intermediate") == 0


def test_a_webhook_is_not_called(worker: Running, link: Link, wait_for: WaitFor) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        listener.setblocking(False)
        url = f"http://127.0.0.1:{listener.getsockname()[1]}/"
        hooks = [{"url": url, "job_status": status} for status in ("finished", "failed")]
        push(link, packed(TASK, [BAD, 1]), webhooks=json.dumps(hooks))
        push(link, packed("os.getpid", []), f"{BAD}-2", webhooks=json.dumps(hooks))

        ring_and_hear(link, wait_for)

        with pytest.raises(BlockingIOError):
            listener.accept()
    assert worker.is_alive


@pytest.mark.parametrize("kind", ["finished", "failed", "wip", "queue:embeddings:intermediate"])
def test_a_worker_starts_beside_lists_that_are_none(
    start_process: StartProcess, link: Link, wait_for: WaitFor, kind: str
) -> None:
    link.set(f"rq:{kind}" if ":" in kind else f"rq:{kind}:{QUEUE}", "no list")

    worker = start_process("worker", "run", QUEUE, QUEUE_WAIT_TIME="1")

    wait_for(lambda: link.scard(f"rq:workers:{QUEUE}") or not worker.is_alive, 30)
    if ":" not in kind:  # with the last one nothing can be taken from the queue
        ring_and_hear(link, wait_for)
        assert worker.is_alive


def test_a_pickled_bomb_would_have_gone_off(side_file: Path) -> None:
    """The attack is real: plain RQ runs it as soon as it looks at the job."""
    bomb = pickle.dumps(Bomb(f"touch {side_file}"))  # noqa: S301

    RqJob.create("os.getpid", connection=connect("redis://127.0.0.1:1/0")).serializer.loads(bomb)

    assert side_file.exists()
