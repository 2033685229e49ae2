"""The suite's own proof: each promise is broken in a copy, and its scenario has to notice."""

import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from xml.etree import ElementTree as ET

import pytest

from tests.faults.mutants import MUTANTS, Edit, Mutant
from tests.processes import ROOT

SECONDS = 400
DRAIN_SECONDS = "25"
"""Less than the suite's own, as a broken product may never drain; held by the whole one too."""

LEFT_OUT = shutil.ignore_patterns(".git", ".venv", ".*cache", "__pycache__", ".coverage*")
FOREIGN = ("COV", "PYTEST_")
"""Variables of the run around it, which is none of its business."""


@dataclass(frozen=True, slots=True)
class Verdict:
    """What became of one test in a copy."""

    passed: bool
    broken: str
    """What its failed assertion says; empty where it passed, or did not get as far."""
    said: str


def copied(folder: Path) -> Path:
    """Copy the whole tree."""
    return Path(shutil.copytree(ROOT, folder / "copy", ignore=LEFT_OUT))


def changed(text: str, edit: Edit) -> str:
    """Return a file's text with the change."""
    found = text.count(edit.old)
    assert found == 1, f"{edit.file} has this {found} times and not once:\n{edit.old}"
    return text.replace(edit.old, edit.new)


def run(copy: Path, node: str) -> Verdict:
    """Run one test there."""
    report, folder = copy / "report.xml", copy.parent / "tmp"
    options = ["-q", "-p", "no:cacheprovider", "-m", "slow or not slow", f"--junit-xml={report}"]
    options += ["-o", "junit_family=xunit1"]  # the other one has no place for properties
    environ = {
        name: value
        for name, value in os.environ.items()  # noqa: TID251 - handed on
        if not name.startswith(FOREIGN)
    }
    environ["HOLDFAST_DRAIN_SECONDS"] = DRAIN_SECONDS
    done = subprocess.run(
        [sys.executable, "-m", "pytest", *options, f"--basetemp={folder}", node],
        cwd=copy,
        env=environ,
        capture_output=True,
        text=True,
        timeout=SECONDS,
        check=False,
    )
    cases = list(ET.parse(report).iter("testcase"))  # noqa: S314 - made by our own run
    assert len(cases) == 1, done.stdout + done.stderr
    # <failure>: the test's own code failed. <error>: it was not collected, or a fixture failed.
    failures = [each.text or "" for each in cases[0].findall("failure")]
    broken = "".join(failures) if "VOID: " not in "".join(failures) else ""
    return Verdict(done.returncode == 0, broken, done.stdout + done.stderr)


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Verdict]:
    """Give the verdict of a test on the unchanged copy; each runs there once."""

    @cache
    def verdict(node: str) -> Verdict:
        return run(copied(tmp_path_factory.mktemp("whole")), node)

    return verdict


@pytest.mark.slow
@pytest.mark.parametrize("mutant", MUTANTS, ids=[each.name for each in MUTANTS])
def test_a_broken_promise_is_noticed(
    mutant: Mutant,
    whole: Callable[[str], Verdict],
    tmp_path: Path,
    record_property: Callable[[str, object], None],
) -> None:
    name = mutant.caught_by.rpartition("::test_")[2].replace("_", " ")
    record_property("scenario", f"mutant: {mutant.name}")
    copy = copied(tmp_path)
    for edit in mutant.edits:
        file = copy / edit.file
        file.write_text(changed(file.read_text("utf-8"), edit), "utf-8")

    unchanged = whole(mutant.caught_by)
    assert unchanged.passed, f"not even the whole product passes:\n{unchanged.said}"
    verdict = run(copy, mutant.caught_by)

    assert verdict.broken, f"nothing was noticed:\n{verdict.said}"
    assert mutant.shows in verdict.broken, f"it failed for another reason:\n{verdict.broken}"
    record_property("caught_by", name)


def test_each_mutant_is_one_of_its_own() -> None:
    names = [each.name for each in MUTANTS]
    assert len(set(names)) == len(names)
    for mutant in MUTANTS:
        for edit in mutant.edits:
            changed((ROOT / edit.file).read_text("utf-8"), edit)
