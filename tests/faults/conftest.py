"""The stage of the fault suite: short leases, a quick sweeper, and an audit in the database."""

import json
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path

import httpx
import pytest

from app.core import config
from app.web import create_app
from tests.api import Door
from tests.fakes import Fake
from tests.faults import invariants
from tests.faults.proxy import Wire
from tests.faults.stage import Ledger, Stage
from tests.processes import StartApi, StartProcess

QUICK = {
    "QUEUE_VISIBILITY_TIMEOUT": "2",
    "SWEEP_SECONDS": "0.3",
    "QUEUE_WAIT_TIME": "1",
    "LOG_LEVEL": "DEBUG",
    "AUTH": "off",
}

OpenStage = Callable[[httpx.Client], Stage]


@pytest.fixture
def fake() -> Iterator[Fake]:
    """Give the backend."""
    with Fake() as fake:
        yield fake


@pytest.fixture
def quick_environ(environ: dict[str, str], fake: Fake) -> dict[str, str]:
    """Give the environment of all processes, and begin the audit."""
    environ |= {**QUICK, "EMBEDDER_URL": fake.url}
    invariants.install(environ["DATABASE_URL"])
    return environ


@pytest.fixture
def open_stage(
    quick_environ: dict[str, str],
    fake: Fake,
    start_process: StartProcess,
    tmp_path: Path,
    record_property: Callable[[str, object], None],
) -> Iterator[OpenStage]:
    """Set a stage behind a door to the API."""
    opened: list[Stage] = []

    def open_stage(client: httpx.Client) -> Stage:
        door, ledger = Door(client, None), Ledger(tmp_path / "ledger.jsonl")
        opened.append(Stage(quick_environ, fake, start_process, door, ledger, record))
        return opened[-1]

    def record(name: str, value: object) -> None:  # in plain types: it may go to another process
        record_property(name, json.loads(json.dumps(value, default=str)))

    yield open_stage
    for each in opened:
        each.close()


@pytest.fixture
def stage(quick_environ: dict[str, str], open_stage: OpenStage) -> Iterator[Stage]:
    """Give a stage with the API in this process; the rest is the scenario's to start."""
    app = create_app(config.load(quick_environ))
    transport = httpx.WSGITransport(app=app, raise_app_exceptions=False)
    with (
        closing(app.extensions["context"]),
        httpx.Client(transport=transport, base_url="http://127.0.0.1") as client,
    ):
        yield open_stage(client)


@pytest.fixture
def served_stage(start_api: StartApi, open_stage: OpenStage) -> Iterator[Stage]:
    """Give the same with the API under gunicorn, as in production."""
    with httpx.Client(base_url=start_api(), trust_env=False, timeout=30) as client:
        yield open_stage(client)


@pytest.fixture
def wire(database_url: str) -> Iterator[Wire]:
    """Give a wire to an audited database; what goes through it is the scenario's matter."""
    invariants.install(database_url)
    with Wire(database_url) as wire:
        yield wire


@pytest.fixture
def wired_door(wire: Wire, environ: dict[str, str]) -> Iterator[Door]:
    """Give a door to an API in this process that reaches Postgres through the wire."""
    app = create_app(config.load({**environ, "DATABASE_URL": wire.url, "AUTH": "off"}))
    transport = httpx.WSGITransport(app=app, raise_app_exceptions=False)
    with (
        closing(app.extensions["context"]),
        httpx.Client(transport=transport, base_url="http://127.0.0.1") as client,
    ):
        yield Door(client, None, may_be_away=True)
