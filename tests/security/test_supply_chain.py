"""S16: what is installed is what is pinned, nothing else is imported, nothing is known to be bad.

Without a network: what a version is known for stands in advisories.json, which grows old and says
so.
"""

import ast
import json
import re
import sys
import tomllib
import warnings
from collections.abc import Iterator
from datetime import date
from importlib.metadata import distribution, packages_distributions
from pathlib import Path
from typing import Any

import pytest
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.utils import canonicalize_name

from tests.processes import ROOT

OURS = ("app", "worker", "migrations")
LIST: dict[str, Any] = json.loads((ROOT / "tests/security/advisories.json").read_text("utf-8"))


def pins() -> list[Requirement]:
    """Return the lines of requirements.txt."""
    lines = (ROOT / "requirements.txt").read_text("utf-8").splitlines()
    return [Requirement(line) for line in lines if line and not line.startswith("#")]


def brought() -> dict[str, str]:
    """Return the version of everything that requirements.txt brings, what those need included."""
    found: dict[str, str] = {}
    seen: set[tuple[str, frozenset[str]]] = set()
    wanted = [(pin.name, frozenset(pin.extras)) for pin in pins()]
    while wanted:
        name, extras = wanted.pop()
        if (name, extras) in seen:
            continue
        seen.add((name, extras))
        installed = distribution(name)
        found[canonicalize_name(name)] = installed.version
        needs = map(Requirement, installed.requires or [])
        wanted += [(need.name, frozenset(need.extras)) for need in needs if _applies(need, extras)]
    return found


def _applies(need: Requirement, extras: frozenset[str]) -> bool:
    marker = need.marker
    return marker is None or any(marker.evaluate({"extra": each}) for each in {"", *extras})


def test_what_is_installed_is_what_is_pinned() -> None:
    for pin in pins():
        assert [each.operator for each in pin.specifier] == ["=="], pin
        assert pin.specifier.contains(distribution(pin.name).version), pin


# ---- which packages are used


def imported(path: Path) -> Iterator[tuple[str, bool]]:
    """Yield the top of each module that a file imports, and whether at once or when it is used."""
    tree = ast.parse(path.read_text("utf-8"))
    late = {
        id(node)
        for function in ast.walk(tree)
        if isinstance(function, ast.FunctionDef | ast.AsyncFunctionDef)
        for node in ast.walk(function)
    }
    for node in ast.walk(tree):
        names: list[str] = []
        if isinstance(node, ast.Import):
            names = [each.name for each in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            names = [node.module]
        for name in names:
            yield name.partition(".")[0], id(node) not in late


def optional() -> set[str]:
    """Return the packages that one module each may import when it is chosen."""
    contracts = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["tool"]["importlinter"]
    [contract] = [
        each for each in contracts["contracts"] if each["name"].startswith("Optional packages")
    ]
    return set(contract["forbidden_modules"])


def test_nothing_is_imported_that_requirements_txt_does_not_bring() -> None:
    known = {*sys.stdlib_module_names, *OURS}
    ours = brought()
    installed = packages_distributions()
    files = [path for name in OURS for path in sorted((ROOT / name).rglob("*.py"))]
    assert len(files) > 50

    for path in files:
        for name, is_at_once in imported(path):
            if name in known or (name in optional() and not is_at_once):
                continue
            owners = {canonicalize_name(owner) for owner in installed.get(name, ())}
            assert owners & ours.keys(), f"{path.relative_to(ROOT)} imports {name}"


# ---- what is known to be bad


def is_affected(entry: dict[str, Any], version: str) -> bool:
    ranges = [SpecifierSet(each) for each in entry["affected"]]
    return any(each.contains(version, prereleases=True) for each in ranges)


def test_no_version_that_is_installed_is_on_the_list() -> None:
    versions = brought()

    bad = [
        f"{entry['package']} {versions[entry['package']]}: {entry['id']}, {entry['what']}"
        for entry in LIST["advisories"]
        if is_affected(entry, versions[entry["package"]])
    ]
    assert bad == []


def test_the_list_would_catch_a_version_that_is_on_it() -> None:
    first_bad = {"gunicorn": "21.2.0", "flask": "3.1.0", "redis": "4.5.3", "h11": "0.14.0"}

    for package, version in first_bad.items():
        entries = [entry for entry in LIST["advisories"] if entry["package"] == package]
        assert any(is_affected(entry, version) for entry in entries), package


def test_each_entry_of_the_list_says_what_where_and_since_when() -> None:
    packages = brought().keys()

    for entry in LIST["advisories"]:
        assert entry.keys() == {"id", "ghsa", "package", "affected", "published", "what"}
        assert re.fullmatch(r"CVE-20\d\d-\d{4,7}", entry["id"]), entry
        assert re.fullmatch(r"GHSA(-[23456789cfghjmpqrvwx]{4}){3}", entry["ghsa"]), entry
        assert re.fullmatch(r"20\d\d-(0[1-9]|1[0-2])", entry["published"]), entry
        assert entry["package"] in packages, entry
        assert all(SpecifierSet(each) for each in entry["affected"]), entry
    ids = [entry["id"] for entry in LIST["advisories"]]
    assert len(ids) == len(set(ids))


@pytest.mark.filterwarnings("default")  # said in the summary of the run, and no failure
def test_a_list_that_has_grown_old_says_so() -> None:
    good_until = date.fromisoformat(LIST["good_until"])
    assert date.fromisoformat(LIST["checked"]) < good_until

    if date.today() > good_until:  # noqa: DTZ011 - a day more or less is no matter
        warnings.warn(
            f"tests/security/advisories.json was good until {good_until}: look at what is new",
            stacklevel=1,
        )
