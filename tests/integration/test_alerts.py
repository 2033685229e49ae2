"""Numbers for machines and alerts for people: counted in SQL, said once, over once."""

import argparse
import logging
import re
import struct
from collections.abc import Callable, Generator, Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

import psycopg
import pytest

from app.core import checks
from app.core.errors import FailedItemsRemain
from app.core.store import fleet
from tests.api import (  # noqa: F401 - fixtures among them
    Door,
    Ground,
    item,
    make_backend,
    make_door,
    make_ground,
)
from tests.drains import Mill, open_mill
from tests.fakes import Fake, Reply
from tests.processes import wait_for
from worker import upkeep
from worker.admin import run
from worker.sweep import alerts, cleanup

ROOT = Path(__file__).parent.parent.parent
OpenMill = Callable[..., Mill]


@pytest.fixture
def fake() -> Iterator[Fake]:
    with Fake() as fake:
        yield fake


@pytest.fixture
def open_one(shared_database_url: str, redis_url: str, fake: Fake) -> Generator[OpenMill]:
    with ExitStack() as stack:

        def open_one(**more: str) -> Mill:
            mill = stack.enter_context(open_mill(shared_database_url, redis_url, fake, **more))
            mill.empty()
            mill.rows("DELETE FROM holdfast.alerts")
            return mill

        yield open_one


def said(caplog: pytest.LogCaptureFixture) -> list[str]:
    found = [record.message for record in caplog.records if record.name.endswith("alerts")]
    caplog.clear()
    return found


def totals(mill: Mill) -> dict[str, float]:
    with mill.ctx.database.transaction() as tx:
        return fleet.totals(tx)


def test_every_outcome_is_counted_once_whether_added_up_or_not(
    open_one: OpenMill, fake: Fake
) -> None:
    mill = open_one(QUEUE_MAX_RETRIES="2")
    before = totals(mill)
    fake.when(Reply(status=503, error="busy"), numbers=[1])
    fake.when(Reply(status=400, error="the input length exceeds"), marker="refused")
    fake.when(Reply(status=500, error="broken"), marker="broken", times=2)
    job_id = mill.submit("one", "two", "refused", "broken", "gone")
    mill.rows("DELETE FROM ai_insights WHERE id = 5")
    mill.work(job_id)

    found = {name: number - before[name] for name, number in totals(mill).items()}
    with mill.ctx.database.transaction() as tx:
        assert fleet.add_up(tx) > 0
        assert fleet.add_up(tx) == 0
    again = {name: number - before[name] for name, number in totals(mill).items()}

    assert found == again
    rows = {status: mill.column(job_id, "status").count(status) for status in ("done", "failed")}
    assert found["done"] + found["skipped"] == rows["done"] == 4
    assert (found["skipped"], found["failed"]) == (1, 1)
    assert found["released"] >= 5  # the whole slice, when the backend was busy
    deliveries = sum(mill.column(job_id, "deliveries"))
    ends = ("done", "skipped", "failed", "retried", "released")
    assert found["claimed"] == deliveries == sum(found[name] for name in ends)
    assert found["processing_seconds"] > 0


def test_failed_items_are_said_once_and_their_end_once(
    open_one: OpenMill, fake: Fake, caplog: pytest.LogCaptureFixture
) -> None:
    mill = open_one(ALERT_FAILED_COUNT="2")
    caplog.set_level(logging.INFO)
    fake.when(Reply(status=400, error="the input length exceeds"), marker="refused")
    mill.work(mill.submit("refused 1"))
    alerts.run_once(mill.ctx)
    assert said(caplog) == []

    mill.work(mill.submit("refused 2", "fine", first=2))
    for _ in range(3):
        alerts.run_once(mill.ctx)

    [warning] = said(caplog)
    assert warning.startswith("2 items failed")
    assert "alert:failed_items" in checks.readiness(mill.ctx).shown["degraded"]
    mill.rows("DELETE FROM public.embedding_retry_queue WHERE status = 'failed'")
    for _ in range(3):
        alerts.run_once(mill.ctx)
    assert said(caplog) == ["alert is over: failed_items"]
    assert "alert:failed_items" not in checks.readiness(mill.ctx).shown["degraded"]


def test_work_that_waits_too_long_is_an_alert(
    open_one: OpenMill, caplog: pytest.LogCaptureFixture
) -> None:
    mill = open_one()
    mill.submit("one")
    alerts.run_once(mill.ctx)
    assert said(caplog) == []

    mill.elapse(4000)
    alerts.run_once(mill.ctx)

    [warning] = said(caplog)
    assert re.match(r"Oldest pending item is 40\d\d s old", warning)


@pytest.mark.parametrize("how", ["transaction", "prepared"])
def test_who_keeps_vacuum_from_its_work_is_named(
    open_one: OpenMill, caplog: pytest.LogCaptureFixture, how: str
) -> None:
    mill = open_one(ALERT_SNAPSHOT_SECONDS="1")
    url = f"{mill.settings.database_url}?application_name=report"
    with psycopg.connect(url) as holder:
        holder.execute("SET TRANSACTION ISOLATION LEVEL REPEATABLE READ")
        holder.execute("SELECT count(*) FROM ai_insights")
        name = f"pid {holder.info.backend_pid} (report)"
        if how == "prepared":
            if not int(holder.execute("SHOW max_prepared_transactions").fetchone()[0]):  # type: ignore[index]
                pytest.skip("this Postgres allows no prepared transactions")
            holder.execute("PREPARE TRANSACTION 'report'")
            name = "prepared transaction 'report'"
        mill.rows("SELECT pg_sleep(1.1)")
        alerts.run_once(mill.ctx)
        with mill.ctx.database.transaction() as tx:
            found = fleet.oldest_snapshot(tx)
        assert found
        assert found.holder.startswith(name)
        if how == "prepared":
            holder.execute("ROLLBACK PREPARED 'report'")

    [warning] = said(caplog)
    assert name in warning
    assert "count(*)" not in warning
    wanted = "ROLLBACK PREPARED 'report'" if how == "prepared" else "SELECT pg_terminate_backend("
    assert wanted in warning
    alerts.run_once(mill.ctx)
    with mill.ctx.database.transaction() as tx:
        assert [each for each in fleet.alerts(tx) if each.name == "old_snapshot"] == []


def test_a_standby_that_went_and_left_its_slot_is_named(
    open_one: OpenMill, caplog: pytest.LogCaptureFixture
) -> None:
    mill = open_one(ALERT_SNAPSHOT_SECONDS="1")
    with psycopg.connect(mill.settings.database_url, autocommit=True) as tx:
        tx.execute("SELECT pg_create_physical_replication_slot('gone_standby', true)")
        try:
            with standbys_allowed(tx):
                hold_slot(mill.settings.database_url, "gone_standby")
            wait_for(lambda: slot_xmin(tx) is not None)
            mill.rows("SELECT pg_sleep(1.1)")
            alerts.run_once(mill.ctx)
        finally:
            wait_for(lambda: dropped(tx))

    [warning] = said(caplog)
    assert warning.startswith("replication slot 'gone_standby' has held a snapshot for ")
    assert "SELECT pg_drop_replication_slot('gone_standby')" in warning
    assert alerts.run_once(mill.ctx)["alert_over"] == 1


@contextmanager
def standbys_allowed(tx: "psycopg.Connection[tuple[Any, ...]]") -> Generator[None]:
    """Let standbys connect to this Postgres, which has none."""
    [(path,)] = tx.execute("SHOW hba_file").fetchall()
    access = Path(path)
    before = access.read_text("ascii")
    access.write_text(before + before.replace(" all ", " replication ", 1), "ascii")
    tx.execute("SELECT pg_reload_conf()")
    try:
        yield
    finally:
        access.write_text(before, "ascii")
        tx.execute("SELECT pg_reload_conf()")


def slot_xmin(tx: "psycopg.Connection[tuple[Any, ...]]") -> object:
    row = tx.execute(
        "SELECT xmin FROM pg_replication_slots WHERE slot_name = 'gone_standby' AND NOT active"
    ).fetchone()
    return row and row[0]


def dropped(tx: "psycopg.Connection[tuple[Any, ...]]") -> bool:
    with suppress(psycopg.errors.ObjectInUse):
        tx.execute("SELECT pg_drop_replication_slot('gone_standby')")
        return True
    return False


def connected(url: str) -> "psycopg.pq.abc.PGconn | None":
    found = psycopg.pq.PGconn.connect(url.encode())
    return found if found.status == psycopg.pq.ConnStatus.OK else None


def hold_slot(url: str, slot: str) -> None:
    """Say what a standby with hot_standby_feedback says, and go."""
    with psycopg.connect(url, autocommit=True) as tx:
        row = tx.execute(
            "SELECT pg_current_wal_flush_lsn(), pg_snapshot_xmin(pg_current_snapshot())"
        ).fetchone()
    assert row
    position, oldest = str(row[0]), int(str(row[1]))
    standby = wait_for(lambda: connected(f"{url}?replication=true"))
    assert standby
    started = standby.exec_(f"START_REPLICATION SLOT {slot} PHYSICAL {position}".encode())
    assert started.status == psycopg.pq.ExecStatus.COPY_BOTH, started.error_message
    epoch = oldest >> 32
    standby.put_copy_data(b"h" + struct.pack("!qIIII", 0, oldest & 0xFFFFFFFF, epoch, 0, 0))
    standby.flush()
    with psycopg.connect(url, autocommit=True) as tx:
        wait_for(
            lambda: tx.execute(
                "SELECT xmin FROM pg_replication_slots WHERE slot_name = %s AND xmin IS NOT NULL",
                [slot],
            ).fetchone()
        )
    standby.finish()


def metric_names(text: str) -> set[str]:
    return {line.split("{")[0].split(" ")[0] for line in text.splitlines() if line[0] != "#"}


def test_the_alert_rules_name_metrics_that_there_are(
    ground: Ground, door: Door, backend: Fake
) -> None:
    del backend
    opened = ground.reopened(SINKS="pgvector,tests.shelf:build")
    [one] = opened.new_rows(1)
    opened.done(opened.door(), [item(one, "one")])
    opened.rows(
        """INSERT INTO holdfast.coverage (target_table, embedding_version, sink, seconds, kinds)
           SELECT target_table, embedding_version, 'pgvector', 1, '{"missing": 3, "current": 1}'
             FROM holdfast.embedding_targets ON CONFLICT DO NOTHING"""
    )
    opened.rows("INSERT INTO holdfast.alerts (name, message) VALUES ('failed_items', 'x')")
    opened.rows(
        """INSERT INTO holdfast.backends (name, model, last_ok_at, digest)
           VALUES ('ollama', 'm', now(), 'sha256:aa') ON CONFLICT DO NOTHING"""
    )
    del door
    text = (
        opened.door()
        .http.get("/metrics", headers={"Authorization": f"Bearer {opened.key('m', 'read')}"})
        .text
    )
    opened.rows("DELETE FROM holdfast.coverage")
    opened.rows("DELETE FROM holdfast.alerts")
    opened.close()

    rules = (ROOT / "deploy" / "alerts.yml").read_text("utf-8")
    named = set(re.findall(r"\bholdfast_[a-z_]+", re.sub(r"#.*", "", rules)))
    assert named - metric_names(text) == set()
    assert 'holdfast_model_info{backend="ollama",digest="sha256:aa",model="m"} 1.0' in text
    assert 'holdfast_rows_without_vector{target_table="ai_insights"} 3.0' in text
    assert 'holdfast_coverage_ratio{embedding_version="bge-m3-latest-8",sink="pgvector"' in text


# ---- what is to go


def command(mill: Mill, capsys: pytest.CaptureFixture[str], *words: str) -> tuple[int, str]:
    parser = argparse.ArgumentParser()
    upkeep.add_parsers(parser.add_subparsers())
    status = run(mill.settings, parser.parse_args(["cleanup", *words]))
    captured = capsys.readouterr()
    return status, captured.out + captured.err


def aged(mill: Mill, days: int) -> None:
    """Let all that is there be so old."""
    mill.rows(
        """UPDATE public.embedding_retry_queue
              SET updated_at = now() - make_interval(days => %(days)s)""",
        days=days,
    )
    mill.rows(
        """UPDATE holdfast.jobs
              SET finished_at = now() - make_interval(days => %(days)s),
                  expires_at = now() - make_interval(days => %(days)s)""",
        days=days,
    )
    mill.rows("UPDATE holdfast.slices SET at = at - make_interval(days => %(days)s)", days=days)


def test_a_dry_run_says_what_would_go_and_the_real_one_agrees(
    open_one: OpenMill, capsys: pytest.CaptureFixture[str]
) -> None:
    mill = open_one()
    for number in range(3):
        mill.work(mill.submit("one", "two", first=1 + 2 * number))
    assert command(mill, capsys, "--dry-run") == (0, "nothing is past its time\n")
    aged(mill, 40)

    status, dry = command(mill, capsys, "--dry-run")
    again = command(mill, capsys, "--dry-run")
    _, real = command(mill, capsys)

    assert (status, dry) == again
    assert "6 items would go" in dry
    assert "3 jobs would go" in dry
    assert dry.endswith("about 1 s, beside work that goes on\n")
    assert real == dry.replace("would go", "gone").rpartition("about")[0]
    assert command(mill, capsys) == (0, "nothing is past its time\n")
    assert mill.rows("SELECT count(*) AS n FROM public.embedding_retry_queue")[0]["n"] == 0
    assert mill.rows("SELECT count(*) AS n FROM holdfast.vectors")[0]["n"] == 6


def test_failed_items_go_only_where_somebody_asks(
    open_one: OpenMill, fake: Fake, capsys: pytest.CaptureFixture[str]
) -> None:
    mill = open_one()
    fake.when(Reply(status=400, error="the input length exceeds"), marker="refused")
    with suppress(FailedItemsRemain):
        mill.work(mill.submit("refused", "fine"))
    aged(mill, 40)
    cleanup.run_once(mill.ctx)
    assert mill.rows("SELECT count(*) AS n FROM holdfast.item_attempts")[0]["n"] == 1

    assert "1 failed items would go" in command(mill, capsys, "--failed-days", "30", "--dry-run")[1]
    assert "failed" not in command(mill, capsys, "--failed-days", "90", "--dry-run")[1]
    assert "1 failed items gone" in command(mill, capsys, "--failed-days", "30")[1]

    assert mill.rows("SELECT count(*) AS n FROM holdfast.item_attempts")[0]["n"] == 0
    assert command(mill, capsys, "--failed-days", "0")[0] == 1


def test_a_failed_item_that_an_open_job_counts_on_stays_and_the_dry_run_knows(
    open_one: OpenMill, fake: Fake, capsys: pytest.CaptureFixture[str]
) -> None:
    mill = open_one()
    fake.when(Reply(status=400, error="the input length exceeds"), marker="refused")
    with suppress(FailedItemsRemain):
        mill.work(mill.submit("refused"))
    aged(mill, 40)
    mill.submit("refused", "another")

    assert "failed" not in command(mill, capsys, "--failed-days", "30", "--dry-run")[1]
    command(mill, capsys, "--failed-days", "30")
    found = mill.rows("SELECT count(*) AS n FROM embedding_retry_queue WHERE status = 'failed'")
    assert found[0]["n"] == 1
