"""Drills, as an operator runs them."""

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.processes import ROOT
from worker import drill


def rehearse(name: str, root: Path = ROOT) -> "subprocess.CompletedProcess[str]":
    command = [sys.executable, "-m", "worker", "drill", name]
    return subprocess.run(command, cwd=root, capture_output=True, text=True, check=False)


@pytest.mark.parametrize("name", drill.DRILLS)
def test_each_scenario_of_a_drill_is_there(name: str) -> None:
    for node in drill.DRILLS[name].scenarios:
        path, _, function = node.partition("::")
        text = (ROOT / "tests" / "faults" / path).read_text("utf-8")
        assert f"def {function.partition('[')[0]}(" in text


@pytest.mark.slow
def test_a_drill_says_what_happened_in_figures_and_that_it_passed() -> None:
    done = rehearse("flush-redis")

    assert done.returncode == 0, done.stdout + done.stderr
    first, scenario, *figures, last = done.stdout.splitlines()
    assert first == "drill flush-redis: Redis is emptied while jobs wait and run"
    assert scenario == "  an emptied redis costs nothing but time: held"
    assert {tuple(line.split()) for line in figures} >= {("lost", "0"), ("failed", "0")}
    assert last == "drill flush-redis: PASSED"


@pytest.mark.slow
def test_a_drill_whose_scenario_fails_has_failed(tmp_path: Path) -> None:
    for name in ("app", "worker", "migrations", "tests", "pyproject.toml"):
        copy = shutil.copytree if (ROOT / name).is_dir() else shutil.copy
        copy(ROOT / name, tmp_path / name)
    scenarios = tmp_path / "tests" / "faults" / "test_scenarios.py"
    scenarios.write_text(
        "def test_f8_an_emptied_redis_costs_nothing_but_time() -> None:\n    assert 0, 'lost'\n"
    )

    done = rehearse("flush-redis", tmp_path)

    assert done.returncode == 1
    assert "costs nothing but time: broken" in done.stdout
    assert done.stdout.splitlines()[-1] == "drill flush-redis: FAILED"
    assert "AssertionError: lost" in done.stderr


def test_a_drill_without_the_tests_says_so(tmp_path: Path) -> None:
    for name in ("app", "worker"):
        shutil.copytree(ROOT / name, tmp_path / name)

    done = rehearse("flush-redis", tmp_path)

    assert done.returncode == 2
    assert "needs a checkout" in done.stderr


def test_only_the_drills_that_there_are_can_be_run() -> None:
    done = rehearse("earthquake")

    assert done.returncode == 2
    assert "kill-worker" in done.stderr
