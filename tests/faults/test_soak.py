"""F31: kills every few seconds with traffic beside them; nothing is lost, and nothing grows."""

import os
import random
import statistics
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import pytest
import redis

from tests.faults.stage import Stage, numbered
from tests.faults.test_main_job import SEED, strike
from tests.processes import Running, wait_for

SOAK_SECONDS = float(os.environ.get("HOLDFAST_SOAK_SECONDS", "1200"))  # noqa: TID251 - of the test alone
BETWEEN_SECONDS = 5.0
BATCH = 500
MOST_OPEN = 5000
GROWTH = 1.15
"""More than the noise of an allocator, less than any leak makes of twenty minutes."""

SPARE = 6
"""Descriptors and connections more: what is under way in one moment and not in another."""

KEPT = (b"rq:queues", b"rq:workers", b"rq:queue:", b"rq:wip:", b"rq:failed:", b"rq:finished:")
"""RQ's own lists, which have no end of life; what stands in them has."""

CLEANED_SECONDS = 300.0
"""Longer than RQ takes to notice what a dead worker left: a heartbeat's limit and a round."""

BARS = "▁▂▃▄▅▆▇█"


def family_of(pid: int) -> Iterator[int]:
    """Yield a process and all that it has forked."""
    yield pid
    for path in Path(f"/proc/{pid}/task").glob("*/children"):
        with suppress(OSError):
            for child in path.read_text("ascii").split():
                yield from family_of(int(child))


def api_processes() -> list[int]:
    """Return the processes of the API that this test has started."""
    return [pid for pid in family_of(os.getpid()) if b"app.web:create_app" in _read(pid, "cmdline")]


def _read(pid: int, name: str) -> bytes:
    with suppress(OSError):
        return Path(f"/proc/{pid}/{name}").read_bytes()
    return b""


def memory_mb(pids: list[int]) -> float:
    """Return what processes hold in memory for themselves."""
    found = 0
    for pid in pids:
        for line in _read(pid, "smaps_rollup").splitlines():
            if line.startswith(b"Private_"):
                found += int(line.split()[1])
    return round(found / 1024, 1)


def descriptors(pids: list[int]) -> int:
    """Return how many files and sockets processes have open."""
    return sum(len(os.listdir(f"/proc/{pid}/fd")) for pid in pids)  # noqa: PTH208 - names only


@pytest.mark.slow
def test_f31_kills_every_five_seconds_with_traffic_lose_nothing_and_nothing_grows(
    served_stage: Stage,
) -> None:
    stage, chance = served_stage, random.Random(SEED)  # noqa: S311 - to be repeated
    stage.fake.seconds_per_item = 0.003
    sweeper, steady = stage.start_sweeper(), stage.start_worker()
    mortal = stage.start_workers(1)
    samples: dict[str, list[float]] = {}
    end = time.monotonic() + SOAK_SECONDS

    with stage.polled():
        while time.monotonic() < end:
            next_kill = time.monotonic() + BETWEEN_SECONDS
            if stage.open_items < MOST_OPEN:
                stage.post(*numbered(BATCH, f"batch {len(stage.job_ids)} text"))
            fault = chance.choice(["horse", "horse", "worker", "redis"])
            strike(stage, [steady, *mortal] if fault == "horse" else mortal, fault, chance)
            sample(stage, samples, {"sweeper": sweeper, "worker": steady})
            threading.Event().wait(next_kill - time.monotonic())
        stage.end_fault()
        stage.wait_until_final()

    stage.record("kills", stage.kills)
    for name, values in samples.items():
        stage.record(name, curve(values))
    stage.check()
    wait_for(lambda: not unbounded_keys(stage), CLEANED_SECONDS)
    for name, values in samples.items():
        assert is_flat(values, GROWTH if name.endswith("mb") else 1, SPARE), (name, values)


def sample(stage: Stage, samples: dict[str, list[float]], processes: dict[str, Running]) -> None:
    """Measure what must not grow."""
    groups = {"api": api_processes(), **{name: [each.pid] for name, each in processes.items()}}
    measures: dict[str, Callable[[list[int]], float]] = {
        "mb": memory_mb,
        "descriptors": descriptors,
    }
    for group, pids in groups.items():
        for name, measure in measures.items():
            samples.setdefault(f"{group}_{name}", []).append(measure(pids))
    connections = "SELECT count(*) FROM pg_stat_activity WHERE datname = current_database()"
    samples.setdefault("connections", []).append(stage.one(connections))


def is_flat(values: list[float], factor: float, spare: float) -> bool:
    """Whether the last third of a measure is no more than the middle one and what it may vary."""
    third = len(values) // 3
    middle, last = values[third : 2 * third], values[2 * third :]
    return statistics.median(last) <= statistics.median(middle) * factor + spare


def curve(values: list[float]) -> str:
    """Draw a measure as a line of bars, between its least and its most."""
    least, most = min(values), max(values)
    step = max(1, len(values) // 40)
    bars = [statistics.median(values[at : at + step]) for at in range(0, len(values), step)]
    height = (most - least) or 1
    drawn = "".join(BARS[round((each - least) / height * (len(BARS) - 1))] for each in bars)
    return f"{drawn} {least:g} to {most:g}"


def unbounded_keys(stage: Stage) -> list[bytes]:
    """Return the keys in Redis that would stay for ever, but for RQ's lists of what is there."""
    with redis.Redis.from_url(stage.environ["REDIS_URL"]) as client:
        found = [bytes(key) for key in client.scan_iter(count=1000) if client.ttl(key) == -1]
    return [key for key in found if not key.startswith(KEPT)]
