"""Workers on two hosts: one whose cable is cut for longer than its lease, and put back."""

import time
from collections.abc import Iterator
from threading import Event
from urllib.parse import urlsplit, urlunsplit

import pytest
import redis

from tests.conftest import free_port
from tests.fakes import Fake, Reply
from tests.faults.postgres_alone import PostgresAlone, open_postgres
from tests.faults.redis_alone import RedisAlone, open_redis
from tests.faults.stage import Stage, events, numbered, struck, wait_until_struck
from tests.hosts import Host, open_host
from tests.processes import Running

LEASED = "SELECT count(*) FROM public.embedding_retry_queue WHERE lease_until > now()"
CUT_SECONDS = 120.0
BEATS = "SELECT 1 FROM holdfast.processes WHERE pid = %s AND alive_until > now()"


@pytest.fixture
def host() -> Iterator[Host]:
    """Give the other host."""
    with open_host() as host:
        yield host


@pytest.fixture
def postgres(host: Host) -> Iterator[PostgresAlone]:
    """Give a Postgres here that the other host may reach."""
    with open_postgres("-c", f"listen_addresses=127.0.0.1,{host.our_address}") as alone:
        with (alone.data / "pg_hba.conf").open("a") as access:
            access.write(f"host all all {host.net}0/30 scram-sha-256\n")
        alone.execute("SELECT pg_reload_conf()")
        yield alone


@pytest.fixture
def redis_alone(host: Host) -> Iterator[RedisAlone]:
    """Give a Redis in the same way."""
    with open_redis(free_port()) as alone:
        with redis.Redis.from_url(alone.url) as client:
            client.config_set("bind", f"127.0.0.1 {host.our_address}")
        yield alone


@pytest.fixture
def environ(
    environ: dict[str, str], postgres: PostgresAlone, redis_alone: RedisAlone
) -> dict[str, str]:
    """Have everything of the stage on them."""
    return environ | {"DATABASE_URL": postgres.url, "REDIS_URL": redis_alone.url}


@pytest.fixture
def far_fake(host: Host) -> Iterator[Fake]:
    """Give the other host a backend of its own: its cable has no part in that."""
    fake = host.make(Fake)
    with fake:
        yield fake


def seen_from(host: Host, url: str) -> str:
    """Return one of our addresses as the other host knows it."""
    parts = urlsplit(url)
    return urlunsplit(parts._replace(netloc=parts.netloc.replace("127.0.0.1", host.our_address)))


@pytest.fixture
def far(stage: Stage, host: Host, far_fake: Fake) -> dict[str, str]:
    """Give the settings of a worker over there."""
    return {
        "DATABASE_URL": seen_from(host, stage.environ["DATABASE_URL"]),
        "REDIS_URL": seen_from(host, stage.environ["REDIS_URL"]),
        "EMBEDDER_URL": far_fake.url,
    }


def test_a_host_cut_off_for_longer_than_its_lease_changes_nothing_and_comes_back(
    stage: Stage, host: Host, far: dict[str, str], far_fake: Fake
) -> None:
    gate = Event()
    far_fake.when(Reply(until=gate), times=1)
    stage.start_sweeper()
    over_there = stage.start_worker("tests.hosts", host.name, **far)
    stage.post(*numbered(300))
    far_fake.wait_for(lambda fake: fake.calls)
    held = struck(stage.one(LEASED), "no live lease over there")

    host.cut()
    began = time.monotonic()
    here = stage.start_worker()
    stage.wait_until_final()
    before = stage.items()
    assert sum(row["attempts"] == 2 for row in before) == held
    gate.set()  # over there it is embedded only now, and cannot be written down
    far_fake.wait_for(lambda fake: fake.calls[0].ended_seconds)
    assert over_there.is_alive
    stage.record("cut_seconds", round(time.monotonic() - began, 1))
    host.mend()
    stage.end_fault()

    lost = wait_until_struck(lambda: lost_by(over_there), "nothing was written late")
    assert lost == held
    assert stage.items() == before
    assert here.stop() == 0
    stage.post(*numbered(100, "after the cut"))
    stage.wait_until_final()
    assert over_there.is_alive
    assert far_fake.worked_items == held + 100
    stage.strikes += 1
    stage.check()


def lost_by(worker: Running) -> int:
    """Return how many outcomes a worker came to write for leases that it had lost."""
    ends = [line for line in events(worker.log) if line.get("event") == "bell_end"]
    return sum(line["counts"].get("lease_lost", 0) for line in ends)


@pytest.mark.slow
def test_a_host_cut_off_while_it_rests_comes_back_by_itself(
    stage: Stage, host: Host, far: dict[str, str], far_fake: Fake
) -> None:
    stage.start_sweeper()
    over_there = stage.start_worker("tests.hosts", host.name, **far)
    stage.post(*numbered(50))
    stage.wait_until_final()

    host.cut()
    began = time.monotonic()
    gone = "it is still held for alive"
    wait_until_struck(lambda: not stage.rows(BEATS, over_there.pid), gone, CUT_SECONDS)
    stage.post(*numbered(50, "while it is away"))
    assert "no_worker:embeddings" in stage.door.get("/readyz").json["degraded"]
    stage.record("cut_seconds", round(time.monotonic() - began, 1))
    host.mend()
    stage.end_fault()

    stage.wait_until_final()
    assert over_there.is_alive
    assert far_fake.worked_items == 100
    assert "no_worker:embeddings" not in stage.door.get("/readyz").json["degraded"]
    stage.check()
