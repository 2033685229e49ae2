"""The stage of the fault suite: short leases, a quick sweeper, and an audit in the database."""

from collections.abc import Iterator

import httpx
import pytest

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
def stage(
    environ: dict[str, str], fake: Fake, start_process: StartProcess, start_api: StartApi
) -> Iterator[Stage]:
    """Give a stage with the API on it; the rest is the scenario's to start."""
    environ |= {**QUICK, "EMBEDDER_URL": fake.url}
    invariants.install(environ["DATABASE_URL"])
    with httpx.Client(base_url=start_api(), trust_env=False, timeout=30) as client:
        yield Stage(environ, fake, start_process, Door(client, None))
