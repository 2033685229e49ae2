"""Drills: a fault on servers of its own, so that an operator sees what it does before it happens.

The scenarios are those of the fault suite, run by pytest; so this needs a checkout and the packages
of requirements-dev.txt. Nothing of a running installation is touched.
"""

import json
import re
import subprocess
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent
LINE = re.compile(r"^FAULT \S+ (held|broken|void) (\{.*\})$", re.MULTILINE)
SHOWN_LINES = 40


@dataclass(frozen=True, slots=True)
class Drill:
    """What happens, and the scenarios that let it happen."""

    what: str
    scenarios: tuple[str, ...]


SCENARIOS, BACKENDS = "test_scenarios.py::", "test_backend_faults.py::"
POSTGRES = "test_postgres_faults.py::"
DRILLS: Mapping[str, Drill] = {
    "kill-worker": Drill(
        "a worker is killed in the middle of a slice, then the process that works for another",
        (
            f"{SCENARIOS}test_f1_a_horse_without_its_parent_ends_its_slice_and_takes_no_other",
            f"{SCENARIOS}test_f2_the_leases_of_a_killed_horse_end_at_once_and_cost_their_attempt",
        ),
    ),
    "flush-redis": Drill(
        "Redis is emptied while jobs wait and run",
        (f"{SCENARIOS}test_f8_an_emptied_redis_costs_nothing_but_time",),
    ),
    "slow-backend": Drill(
        "five times as much comes as the backend can do",
        (f"{BACKENDS}test_f21_five_times_the_load_is_refused_by_name_and_fills_no_memory",),
    ),
    "429-storm": Drill(
        "the backend admits three calls in a few seconds and answers all others 429",
        (f"{BACKENDS}test_f20_a_storm_of_429_costs_time_and_nothing_else[6-4]",),
    ),
    "poison": Drill(
        "one text among a thousand brings the backend down each time",
        (f"{BACKENDS}test_f20_a_text_that_crashes_the_backend_among_a_thousand",),
    ),
    "oom": Drill(
        "one text makes its process run out of memory each time (needs root, for a memory cgroup)",
        ("test_process_faults.py::test_f6_a_text_that_eats_all_memory_fails_alone_and_by_name",),
    ),
    "pg-restart": Drill(
        "Postgres is stopped at once in the middle of commits, and started again",
        (f"{POSTGRES}test_f14_postgres_stopped_at_once_loses_nothing_and_the_pools_heal",),
    ),
}


def run(name: str) -> int:
    """Run one drill, and tell a person what came of it: 0 passed, 1 failed, 2 cannot be run."""
    drill = DRILLS[name]
    nodes = [f"tests/faults/{scenario}" for scenario in drill.scenarios]
    missing = [node for node in nodes if not (ROOT / node.partition("::")[0]).exists()]
    if missing:
        print(f"a drill needs a checkout: {missing[0]} is not here", file=sys.stderr)
        return 2
    print(f"drill {name}: {drill.what}", flush=True)
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-m", ""]
    done = subprocess.run([*command, *nodes], cwd=ROOT, capture_output=True, text=True, check=False)
    verdicts = LINE.findall(done.stdout)
    for verdict, figures in verdicts:
        print("\n".join(_told(verdict, json.loads(figures))))
    has_passed = done.returncode == 0 and len(verdicts) >= len(nodes)
    if not has_passed:
        print("\n".join((done.stdout + done.stderr).splitlines()[-SHOWN_LINES:]), file=sys.stderr)
    print(f"drill {name}: {'PASSED' if has_passed else 'FAILED'}")
    return 0 if has_passed else 1


def _told(verdict: str, figures: dict[str, Any]) -> Iterator[str]:
    yield f"  {figures.pop('scenario')}: {verdict}"
    for name, value in figures.items():
        yield f"    {name.replace('_', ' '):<20} {value}"
