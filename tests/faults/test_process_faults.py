"""Memory that runs out, a Postgres that one process cannot reach, clocks apart, logs unheard."""

import os
import re
import shutil
import signal
import subprocess
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from threading import Event

import httpx
import pytest
import redis

from app.core.errors import ErrorClass
from tests.fakes import Fake, Reply
from tests.faults.conftest import OpenStage
from tests.faults.proxy import Wire
from tests.faults.stage import (
    DRAIN_SECONDS,
    QUEUE,
    Stage,
    bell_of,
    events,
    numbered,
    struck,
    wait_until_struck,
)
from tests.limited import MemoryGroup, open_group
from tests.processes import Running, StartApi, wait_for


@pytest.fixture
def gate(fake: Fake) -> Event:
    """Hold back the answer to the first call until this is set."""
    event = Event()
    fake.when(Reply(until=event), times=1)
    return event


# ---- F5: one horse cannot reach Postgres


@pytest.mark.slow
def test_f5_a_horse_that_lost_postgres_writes_nothing_when_it_finds_it_again(
    stage: Stage, gate: Event
) -> None:
    with Wire(stage.environ["DATABASE_URL"]) as wire:
        lonely = stage.start_worker(DATABASE_URL=wire.url)
        stage.post(*numbered(100))
        stage.fake.wait_for(lambda fake: fake.calls)
        held = "SELECT count(*) FROM public.embedding_retry_queue WHERE lease_until > now()"
        items = struck(stage.one(held), "no live lease")

        wire.go_dead()
        stage.strikes += 1
        stage.start_sweeper()
        other = stage.start_worker()
        wait_until_struck(lambda: is_not_extended(lonely), "its leases were extended")
        stage.wait_until_final()
        before = stage.items()
        gate.set()
        wait_for(lambda: len(stage.fake.calls) > 1)
        wire.revive()
        stage.end_fault()
        wait_for(lambda: ends(lonely), DRAIN_SECONDS)

        assert "done" not in ends(lonely)[0], ends(lonely)
        assert stage.items() == before
        assert sorted(row["attempts"] for row in before) == [*[1] * (100 - items), *[2] * items]
        assert other.stop() == 0
        stage.post(*numbered(20, "by the one that was cut off"))
        stage.wait_until_final()
        assert lonely.stop() == 0
    stage.check()


def is_not_extended(worker: Running) -> bool:
    """Whether a horse could not extend its leases."""
    return any(line["message"].startswith("leases not extended") for line in events(worker.log))


def ends(worker: Running) -> list[dict[str, int]]:
    """Return what came of each bell of a worker."""
    lines = events(worker.log)
    return [line["counts"] for line in lines if line.get("event") == "bell_end"]


# ---- F6: a text that eats the memory of whoever works on it

POISON = "eats all memory"
LIMIT_BYTES = 256 * 2**20
HUNGRY = f"""
import mmap

from app.adapters.embedders.ollama import Ollama
from app.adapters.http import Http


class Hungry(Ollama):
    name = "hungry"

    def embed(self, texts, *, model, seconds):
        if {POISON!r} in texts:
            hoard = mmap.mmap(-1, 2**30)
            for page in range(0, 2**30, 4096):
                hoard[page] = 1
        return super().embed(texts, model=model, seconds=seconds)


def build(options):
    return Hungry(Http(options.url, key=options.api_key))
"""


@pytest.fixture
def hungry(environ: dict[str, str], tmp_path: Path) -> None:
    """Make the embedder one that a certain text costs all memory."""
    (tmp_path / "hungry.py").write_text(HUNGRY)
    environ |= {"EMBEDDER": "hungry:build", "PYTHONPATH": str(tmp_path)}
    environ["QUEUE_MAX_RETRIES"] = "3"


@pytest.fixture
def group() -> Iterator[MemoryGroup]:
    """Make a memory cgroup that outlives who is in it."""
    with open_group(LIMIT_BYTES) as group:
        yield group


@pytest.mark.usefixtures("hungry")
def test_f6_a_text_that_eats_all_memory_fails_alone_and_by_name(
    group: MemoryGroup, stage: Stage, gate: Event
) -> None:
    stage.start_sweeper()
    worker = stage.start_worker("tests.limited", str(group.path))
    stage.post("looked at")
    stage.fake.wait_for(lambda fake: fake.calls)
    scores = [score(pid) for pid in (worker.pid, *worker.children)]
    gate.set()
    stage.wait_until_final()

    job_id = stage.post(*numbered(10, "before"), POISON, *numbered(10, "behind"))
    stage.wait_until_final()

    struck(group.kills, "nobody was killed")
    assert scores == [0, 900]
    poison = next(row for row in stage.items() if row["status"] == "failed")
    assert poison["target_id"] == "12"
    assert poison["attempts"] == poison["max_attempts"] == group.kills
    assert poison["error_class"] == ErrorClass.OOM_KILLED
    assert stage.statuses == {"done": 21, "failed": 1}
    assert {row["attempts"] for row in stage.items() if row["status"] == "done"} == {1, 2}
    assert re.fullmatch(r"\d+ items, index \d+ to \d+", said(stage, 1))
    assert said(stage, poison["attempts"]) == "1 item, index 10"
    assert worker.is_alive
    [error] = stage.door.job(job_id)["errors"]
    assert (error["error_class"], error["count"]) == ("oom_killed", 1)
    stage.record("memory_kills", group.kills)
    stage.check()


def score(pid: int) -> int:
    """Return how readily the kernel kills a process for memory."""
    return int(Path(f"/proc/{pid}/oom_score_adj").read_text("ascii"))


def said(stage: Stage, attempt: int) -> str:
    """Return what the poison's attempt says was in hand, behind the right words on memory."""
    query = """SELECT a.message FROM holdfast.item_attempts a
                 JOIN public.embedding_retry_queue q ON q.id = a.item_id
                WHERE q.status = 'failed' AND a.attempt = %s"""
    limit_and_peak = r"memory ran out: limit 256 MiB, peak of its process \d+ MiB; in hand: (.+)"
    found = re.fullmatch(limit_and_peak, stage.one(query, attempt))
    assert found
    return found[1]


# ---- F23: clocks that are hours apart

LEASE_SECONDS = 30
FAKETIME = Path("/usr/lib/x86_64-linux-gnu/faketime/libfaketime.so.1")


@pytest.fixture
def faketime() -> str:
    """Give the library that moves the clock of one process."""
    if not FAKETIME.exists():
        pytest.skip("libfaketime is not installed: apt-get install faketime")
    return str(FAKETIME)


@pytest.mark.slow
def test_f23_workers_whose_clocks_are_hours_apart_move_no_lease_and_no_pause(
    stage: Stage, gate: Event, faketime: str
) -> None:
    stage.fake.seconds_per_item = 0.002
    stage.fake.when(Reply(status=503, error="busy"), numbers=[5])
    moved = {
        "LD_PRELOAD": faketime,
        "FAKETIME_DONT_FAKE_MONOTONIC": "1",
        "QUEUE_VISIBILITY_TIMEOUT": str(LEASE_SECONDS),
    }
    stage.start_sweeper()
    behind = stage.start_worker(FAKETIME="-2h", **moved)
    for batch in range(4):
        stage.post(*numbered(200, f"batch {batch} text"))
    stage.fake.wait_for(lambda fake: fake.calls)
    ahead = stage.start_worker(FAKETIME="+2h", **moved)
    with redis.Redis.from_url(stage.environ["REDIS_URL"]) as client:
        took = "it did not take the other's bell for dead"
        wait_until_struck(lambda: bell_of(behind) in failed(client), took)
    gate.set()
    stage.end_fault()
    left: set[float] = set()

    def are_final() -> bool:
        query = """SELECT extract(epoch FROM lease_until - now())::float8 AS seconds
                     FROM public.embedding_retry_queue WHERE status = 'processing'"""
        left.update(row["seconds"] for row in stage.rows(query))
        return stage.are_final

    wait_for(are_final, DRAIN_SECONDS)
    stage.wait_until_final()

    hours = [hours_off(stage, worker) for worker in (behind, ahead)]
    struck(hours == [-2, 2], f"the clocks were off by {hours} hours")
    struck(ends(behind) and ends(ahead), "one of them did nothing")
    assert min(left) > 0
    assert max(left) <= LEASE_SECONDS
    assert {row["attempts"] for row in stage.items()} == {1}
    stage.sent_again = stage.batch_size
    stage.check()


def failed(client: "redis.Redis") -> list[str]:
    """Return the bells that RQ shows as failed."""
    found = client.zrange(f"rq:failed:{QUEUE}", 0, -1)
    return [bell.decode() for bell in found if isinstance(bell, bytes)]


def hours_off(stage: Stage, worker: Running) -> int:
    """Return by how many hours a worker's clock is off, as its own log has it."""
    query = "SELECT extract(epoch FROM %s::timestamptz - now())::float8 / 3600"
    return round(float(stage.one(query, events(worker.log)[-1]["ts"])))


# ---- F29: nobody hears what is said


@pytest.mark.slow
@pytest.mark.parametrize("how", ["closed", "broken"])
def test_f29_work_goes_on_where_nobody_hears_what_is_logged(
    how: str, start_api: StartApi, open_stage: OpenStage
) -> None:
    run_unheard(how, start_api, open_stage)


@pytest.fixture
def full_disk(tmp_path: Path) -> Iterator[Path]:
    """Give a file to log to on a disk of 1 MB, where nothing more can be written."""
    disk = tmp_path / "disk"
    disk.mkdir()
    mount = shutil.which("mount")
    options = ["-t", "tmpfs", "-o", "size=1m", "none", str(disk)]
    if mount is None or subprocess.run([mount, *options], check=False).returncode:
        pytest.skip("no small disk can be mounted here: needs root")
    log = disk / "log"
    log.touch()
    with (disk / "filler").open("wb", buffering=0) as filler, suppress(OSError):
        while filler.write(bytes(4096)):
            pass
    yield log
    subprocess.run([shutil.which("umount") or "umount", str(disk)], check=True)


@pytest.mark.slow
def test_f29_work_goes_on_where_the_disk_of_the_log_is_full(
    full_disk: Path, start_api: StartApi, open_stage: OpenStage
) -> None:
    run_unheard(str(full_disk), start_api, open_stage)

    struck(full_disk.stat().st_size == 0, "there was room to log")
    struck(os.statvfs(full_disk).f_bavail == 0, "the disk was not full")


def run_unheard(how: str, start_api: StartApi, open_stage: OpenStage) -> None:
    """Let every process of ours do its work, and die, where nobody hears it."""
    launcher, gate = ("tests.unheard", how), Event()
    with httpx.Client(base_url=start_api(*launcher), trust_env=False, timeout=30) as client:
        stage = open_stage(client)
        stage.fake.when(Reply(until=gate), times=1)
        sweeper, worker = stage.start_sweeper(*launcher), stage.start_worker(*launcher)
        for batch in range(3):
            stage.post(*numbered(100, f"batch {batch} text"))
        hold_and_kill(stage, worker)
        gate.set()
        stage.wait_until_final()

        struck(not (sweeper.said or worker.said), "somebody heard them")
        stage.check()
        assert [worker.stop(), sweeper.stop()] == [0, 0]


def hold_and_kill(stage: Stage, worker: Running) -> None:
    """Kill the horse that waits for the backend."""
    stage.fake.wait_for(lambda fake: fake.calls)
    [horse] = worker.children
    os.kill(horse, signal.SIGKILL)
    stage.strikes += 1
