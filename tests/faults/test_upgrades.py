"""F28: two builds at work side by side, and a schema that is newer or older than the programs."""

import io
import json
import shutil
import subprocess
import tarfile
import zlib
from collections.abc import Sequence
from pathlib import Path
from threading import Event

import httpx
import pytest
import redis
from rq import Queue

from app.core.bells import TASK
from migrations import __main__ as runner
from migrations.__main__ import Step, steps
from tests.api import Door
from tests.fakes import Fake, Reply
from tests.faults.conftest import OpenStage
from tests.faults.stage import QUEUE, Stage, events, numbered, wait_until_struck
from tests.processes import ROOT, Running, StartApi, StartProcess, wait_for

GROW = b"""
DO $$
DECLARE name text;
BEGIN
    FOR name IN SELECT oid::regclass FROM pg_class
                 WHERE relkind = 'r' AND (relnamespace = 'holdfast'::regnamespace
                                          OR oid = 'public.embedding_retry_queue'::regclass)
    LOOP
        EXECUTE format('ALTER TABLE %s ADD COLUMN newer jsonb NOT NULL DEFAULT ''{}''', name);
    END LOOP;
END $$
"""
"""A migration of a version to come: it only adds, and wherever it can."""
NO_TRACES = "no_worker:trace-events"
SAY = f"{steps()[-1].name} missing; run python -m migrations"


def client_of(url: str) -> httpx.Client:
    """Return a client of an API."""
    return httpx.Client(base_url=url, trust_env=False, timeout=30)


@pytest.fixture
def gate(fake: Fake) -> Event:
    """Hold back the answer to a call with a given text until this is set."""
    event = Event()
    fake.when(Reply(until=event), marker="in hand", times=1)
    return event


# ---- programs of this version, and a schema of the next


@pytest.mark.usefixtures("quick_environ")
def test_f28_programs_at_work_go_on_when_the_schema_becomes_a_newer_one(
    start_api: StartApi, open_stage: OpenStage, gate: Event
) -> None:
    with client_of(start_api()) as client:
        stage = open_stage(client)
        worker, sweeper = stage.start_worker(), stage.start_sweeper()
        for turn in range(8):  # statements are prepared only when they were used for a while
            stage.post(*numbered(3, f"before {turn}"))
        stage.wait_until_final()
        stage.post("in hand", *numbered(70, "under way"))
        stage.fake.wait_for(lambda fake: "in hand" in fake.arrivals)

        grow(stage)
        gate.set()
        stage.wait_until_final()
        for turn in range(3):
            stage.post(*numbered(3, f"after {turn}"))
        stage.wait_until_final()
        late = stage.start_worker()
        stage.post(*numbered(70, "by one that was started after it"))
        stage.wait_until_final()

        assert stage.statuses == {"done": 24 + 71 + 9 + 70}
        ready = stage.door.get("/readyz")
        assert (ready.status, ready.json["degraded"]) == (httpx.codes.OK, [NO_TRACES])
        for each in (worker, late, sweeper):
            assert faults(each) == []
            assert each.stop() == 0
    stage.check()


def grow(stage: Stage) -> None:
    """Bring the schema to the version to come."""
    with pytest.MonkeyPatch.context() as patch:
        newer = Step("9999_newer", "", GROW)
        patch.setattr(runner, "steps", lambda: [*steps(), newer])
        assert runner.migrate(stage.environ["DATABASE_URL"]) == [newer.name]


def faults(process: Running) -> list[str]:
    """Return what a process warned of: not of rows that are yet to be posted, nor of a deadlock.

    A migration locks tables in its own order, and Postgres ends one of two that wait in a circle.
    """
    lines = [line for line in events(process.log) if line["level"] in ("WARNING", "ERROR")]
    told = [line["message"] for line in lines if line.get("event") != "coverage"]
    return [message for message in told if "DeadlockDetected" not in message]


# ---- a bell of a version to come


def test_f28_a_bell_of_a_newer_version_costs_its_items_nothing(stage: Stage) -> None:
    job_id = stage.post("one")
    with redis.Redis.from_url(stage.environ["REDIS_URL"]) as client:
        queue = Queue(QUEUE, connection=client, serializer="json")
        [bell] = queue.job_ids
        told: list[object] = [
            TASK,
            None,
            [job_id, 0, {"slice": 3}],
            {},
        ]  # more than its job and a run
        client.hset(f"rq:job:{bell}", "data", zlib.compress(json.dumps(told).encode()))
        worker = stage.start_worker()
        wait_until_struck(queue.failed_job_registry.get_job_ids, "nobody refused it")
    assert "its arguments are not its job and a run" in worker.said
    [row] = stage.items()
    assert (row["status"], row["attempts"]) == ("pending", 0)
    assert stage.door.get(f"/api/job/{job_id}").json["state"] == "queued"

    stage.start_sweeper()
    stage.wait_until_final()
    assert stage.statuses == {"done": 1}
    assert worker.stop() == 0
    stage.check()


# ---- the build before the newest migration, and this one


def git(*arguments: str) -> bytes:
    """Ask git about this checkout."""
    git = shutil.which("git") or "git"
    return subprocess.run([git, *arguments], cwd=ROOT, capture_output=True, check=True).stdout


@pytest.fixture(scope="module")
def earlier(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Give a folder with the programs as they were before the newest migration came."""
    newest = f"migrations/{steps()[-1].name}.sql"
    folder = tmp_path_factory.mktemp("earlier")
    try:
        added = git("log", "--diff-filter=A", "--format=%H", "-1", "--", newest).decode().strip()
        packed = git("archive", f"{added}^", "app", "worker", "migrations")
    except (OSError, subprocess.CalledProcessError):
        pytest.skip("the history of this checkout does not reach the version before")
    with tarfile.open(fileobj=io.BytesIO(packed)) as archive:
        archive.extractall(folder, filter="data")
    return folder


@pytest.fixture
def before(
    earlier: Path, empty_database_url: str, environ: dict[str, str], start_process: StartProcess
) -> Sequence[str]:
    """Make a database as the version before left it, and say how its programs are started."""
    environ |= {"DATABASE_URL": empty_database_url}
    launcher = ("tests.earlier", str(earlier))
    migration = start_process(*launcher, "migrations", "--demo")
    assert migration.wait(60) == 0, migration.said
    return launcher


def migrate(stage: Stage) -> None:
    """Do what an upgrade begins with."""
    migration = stage.start_process("migrations")
    assert migration.wait(60) == 0, migration.said
    assert steps()[-1].name in migration.said


@pytest.mark.usefixtures("before", "quick_environ")
def test_f28_two_builds_work_side_by_side_while_one_takes_the_place_of_the_other(
    before: Sequence[str],
    start_api: StartApi,
    open_stage: OpenStage,
    gate: Event,
) -> None:
    with client_of(start_api(*before)) as old_api:
        stage = open_stage(old_api)
        old_worker, old_sweeper = stage.start_worker(*before), stage.start_sweeper(*before)
        stage.post("in hand", *numbered(99, "under way"))
        stage.fake.wait_for(lambda fake: "in hand" in fake.arrivals)

        migrate(stage)
        gate.set()
        stage.post(*numbered(50, "from old to old"))
        stage.wait_until_final()
        with client_of(start_api()) as new_api:
            stage.door = Door(new_api, None)
            stage.post(*numbered(50, "from new to old"))
            stage.wait_until_final()
            new_worker, new_sweeper = stage.start_worker(), stage.start_sweeper()
            assert [each.stop() for each in (old_worker, old_sweeper)] == [0, 0]
            stage.door = Door(old_api, None)
            stage.post(*numbered(50, "from old to new"))
            stage.wait_until_final()
            stage.door = Door(new_api, None)
            stage.post(*numbered(50, "from new to new"))
            stage.wait_until_final()
            ready = stage.door.get("/readyz")
        assert (ready.status, ready.json["degraded"]) == (httpx.codes.OK, [NO_TRACES])
        assert stage.statuses == {"done": 300}
        for each in (old_worker, old_sweeper, new_worker, new_sweeper):
            assert faults(each) == []
    stage.check()


@pytest.mark.usefixtures("before", "quick_environ")
def test_f28_programs_that_came_before_their_migration_lose_nothing_and_say_so(
    before: Sequence[str],
    start_api: StartApi,
    open_stage: OpenStage,
) -> None:
    with client_of(start_api(*before)) as api:
        stage = open_stage(api)
        stage.post(*numbered(50, "accepted by the version before"))
    with client_of(start_api()) as api:
        stage.door = Door(api, None, may_be_away=True)
        worker, sweeper = (
            stage.start_process("worker", *each) for each in (("run", QUEUE), ("sweep",))
        )
        assert SAY in stage.door.get("/readyz").json["reason"]
        wait_for(lambda: "run python -m migrations" in worker.said)
        wait_for(lambda: SAY in sweeper.said)
        assert stage.statuses == {"pending": 50}

        migrate(stage)
        wait_for(lambda: stage.door.get("/readyz").status == httpx.codes.OK)
        stage.post(*numbered(50, "after it"))
        stage.wait_until_final()
        assert stage.statuses == {"done": 100}
        assert len(faults(sweeper)) == 1, "it is said once, not each second"
        assert (worker.stop(), sweeper.stop()) == (0, 0)
    stage.check()
