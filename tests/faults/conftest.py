"""The stage of the fault suite: short leases, a quick sweeper, and an audit in the database."""

from collections.abc import Iterator
from contextlib import closing

import httpx
import pytest

from app.core import config
from app.web import create_app
from tests.api import Door
from tests.fakes import Fake
from tests.faults import invariants
from tests.faults.stage import Stage
from tests.processes import StartApi, StartProcess

QUICK = {
    "QUEUE_VISIBILITY_TIMEOUT": "2",
    "SWEEP_SECONDS": "0.3",
    "QUEUE_WAIT_TIME": "1",
    "LOG_LEVEL": "DEBUG",
    "AUTH": "off",
}


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
def stage(
    quick_environ: dict[str, str], fake: Fake, start_process: StartProcess
) -> Iterator[Stage]:
    """Give a stage with the API in this process; the rest is the scenario's to start."""
    app = create_app(config.load(quick_environ))
    transport = httpx.WSGITransport(app=app, raise_app_exceptions=False)
    with (
        closing(app.extensions["context"]),
        httpx.Client(transport=transport, base_url="http://127.0.0.1") as client,
        closing(Stage(quick_environ, fake, start_process, Door(client, None))) as stage,
    ):
        yield stage


@pytest.fixture
def served_stage(
    quick_environ: dict[str, str], fake: Fake, start_process: StartProcess, start_api: StartApi
) -> Iterator[Stage]:
    """Give the same with the API under gunicorn, as in production."""
    with (
        httpx.Client(base_url=start_api(), trust_env=False, timeout=30) as client,
        closing(Stage(quick_environ, fake, start_process, Door(client, None))) as stage,
    ):
        yield stage
