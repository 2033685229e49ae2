"""Another version of a target: beside daily work, caught up, and cut over in one step."""

import argparse
from collections import deque
from collections.abc import Generator, Iterator
from contextlib import ExitStack, suppress
from dataclasses import replace
from threading import Event
from typing import Any

import psycopg
import pytest

from app.core import versions
from app.core.errors import BackendFault, ErrorClass, FailedItemsRemain, InvalidRequest, SinkFault
from app.core.ports import find
from app.core.store import fleet, targets
from app.core.store.campaigns import Change
from app.core.store.targets import NewTarget
from app.core.versions import Stores
from tests.drains import Mill, open_mill
from tests.fakes import Fake, Reply, vector_of
from tests.processes import wait_for
from tests.shelf import NAME, Shelf
from worker import admin, upkeep
from worker.sweep import Sweeper
from worker.sweep.campaigns import Campaigns
from worker.sweep.followers import Follower

AWAY = BackendFault(ErrorClass.UNREACHABLE, "no connection")
TABLE, OLD, NEW, MODEL = "notes", "v1", "v2", "new-model"
CLOSE = Change("closing", ("running",), seconds=60)


@pytest.fixture
def fake() -> Iterator[Fake]:
    with Fake() as fake:
        yield fake


@pytest.fixture
def mill(database_url: str, redis_url: str, fake: Fake) -> Generator[Mill]:
    """Give the flow over a target with a column for each of two versions."""
    with ExitStack() as stack:
        mill = stack.enter_context(
            open_mill(database_url, redis_url, fake, SINKS=f"pgvector,{NAME}", QUEUE_BATCH_SIZE="8")
        )
        mill.rows(
            f"""CREATE TABLE notes (id bigint PRIMARY KEY, body text,
                    embedding vector({fake.dimension}), other vector({fake.dimension}))"""
        )
        mill.rows("DELETE FROM holdfast.embedding_targets")
        with mill.ctx.database.transaction() as tx:
            targets.register(tx, version(mill))
        yield mill


def version(mill: Mill, name: str = OLD) -> NewTarget:
    is_old = name == OLD
    return NewTarget(
        target_table=TABLE,
        id_column="id",
        vector_column="embedding" if is_old else "other",
        model=mill.settings.embedding_model if is_old else MODEL,
        embedding_version=name,
        dimension=mill.fake.dimension,
        text_column="body",
        is_current=is_old,
    )


@pytest.fixture
def shelf() -> Shelf:
    return Shelf()


@pytest.fixture
def stores(shelf: Shelf) -> Stores:
    return Stores(find("sinks", "pgvector")(), {NAME: shelf})


def follow(mill: Mill, stores: Stores) -> None:
    """Bring the followers up with the primary."""
    for name, sink in stores.followers.items():
        follower = Follower(mill.ctx, stores.primary, name, sink)
        while follower.run_once():
            pass


def write(mill: Mill, texts: dict[int, str]) -> str:
    """Do daily work: rows get these texts, and are submitted."""
    mill.rows(
        """INSERT INTO notes (id, body)
           SELECT * FROM unnest(%(ids)s::bigint[], %(texts)s::text[])
               ON CONFLICT (id) DO UPDATE SET body = excluded.body""",
        ids=list(texts),
        texts=list(texts.values()),
    )
    first = min(texts)
    assert list(texts) == list(range(first, first + len(texts)))
    return mill.submit(*texts.values(), first=first, table=TABLE)


def work(mill: Mill) -> None:
    for row in mill.rows("SELECT id FROM holdfast.jobs WHERE finished_at IS NULL ORDER BY id"):
        with suppress(FailedItemsRemain, AssertionError):
            mill.work(row["id"], rounds=5)


def step(mill: Mill, stores: Stores, times: int = 1) -> None:
    for _ in range(times):
        versions.step(mill.ctx, stores)
        work(mill)


def campaign(mill: Mill) -> Any:  # noqa: ANN401
    [found] = versions.described(mill.ctx, TABLE)
    return found


def column(mill: Mill, name: str) -> dict[int, Any]:
    rows = mill.rows(f"SELECT id, {name}::real[] AS vector FROM notes ORDER BY id")  # noqa: S608
    return {row["id"]: row["vector"] for row in rows}


def check_new(mill: Mill) -> None:
    """Check that each row has the vector of its newest text by the new model."""
    rows = mill.rows("SELECT id, body, other::real[] AS vector FROM notes ORDER BY id")
    for row in rows:
        right = vector_of(MODEL, row["body"], mill.fake.dimension)
        assert row["vector"] == pytest.approx(right), row["id"]


def current(mill: Mill) -> dict[str, Any]:
    [row] = mill.rows("SELECT * FROM holdfast.current_targets WHERE target_table = 'notes'")
    return row


def test_a_campaign_embeds_every_row_and_changes_nothing_else(mill: Mill, stores: Stores) -> None:
    write(mill, {n: f"text {n}" for n in range(1, 31)})
    work(mill)
    before = column(mill, "embedding")
    with mill.ctx.database.transaction() as tx:
        fleet.beat(tx, fleet.Process("w", "worker", "embeddings", "h", 1), seconds=9, counters={})
    plan = versions.plan(mill.ctx, stores.primary, version(mill, NEW))
    assert (plan.rows, plan.has, plan.text_bytes) == (
        30,
        0,
        sum(len(f"text {n}") for n in range(1, 31)),
    )
    assert plan.seconds is not None
    assert len(mill.rows("SELECT 1 FROM holdfast.embedding_targets")) == 1

    versions.start(mill.ctx, version(mill, NEW))
    step(mill, stores, 2)

    check_new(mill)
    assert column(mill, "embedding") == before
    assert current(mill)["embedding_version"] == OLD
    assert (campaign(mill).state, campaign(mill).is_read) == ("running", True)
    assert campaign(mill).submitted == 30


def test_daily_work_reaches_both_versions_and_the_newest_text_wins(
    mill: Mill, stores: Stores
) -> None:
    write(mill, {n: f"text {n}" for n in range(1, 11)})
    work(mill)
    versions.start(mill.ctx, version(mill, NEW))
    step(mill, stores)
    write(mill, {3: "changed", 4: "changed too"})
    write(mill, {11: "a new row"})
    mill.rows("DELETE FROM notes WHERE id = 7")

    step(mill, stores, 3)

    check_new(mill)
    assert len(column(mill, "other")) == 10


def test_the_cut_over_is_one_step_and_waits_for_every_row(mill: Mill, stores: Stores) -> None:
    write(mill, {n: f"text {n}" for n in range(1, 11)})
    work(mill)
    versions.start(mill.ctx, version(mill, NEW))
    versions.step(mill.ctx, stores)  # submitted, not worked on
    versions.change(mill.ctx, TABLE, CLOSE)

    versions.step(mill.ctx, stores)
    assert current(mill)["embedding_version"] == OLD
    late = write(mill, {5: "late"})
    with suppress(FailedItemsRemain):
        mill.drain(late)  # not taken in hand while the campaign closes
    assert mill.column(late, "status") == ["pending"]
    step(mill, stores, 2)

    assert current(mill) | {"embedding_version": NEW, "vector_column": "other"} == current(mill)
    assert campaign(mill).state == "cut_over"
    step(mill, stores, 3)
    check_new(mill)
    assert campaign(mill).finished_at is not None
    write(mill, {6: "after"})
    work(mill)
    check_new(mill)
    assert column(mill, "embedding")[6] != column(mill, "other")[6]


def test_without_the_last_row_there_is_no_cut_over_and_it_says_why(
    mill: Mill, stores: Stores, fake: Fake
) -> None:
    write(mill, {1: "one", 2: "refused by the new model", 3: "three"})
    work(mill)
    fake.rules.append(
        lambda request: (
            Reply(status=400, error="the input length exceeds")
            if request.model == MODEL and request.has("refused")
            else None
        )
    )
    versions.start(mill.ctx, version(mill, NEW))
    step(mill, stores, 2)

    versions.change(mill.ctx, TABLE, CLOSE)
    step(mill, stores)
    mill.rows("UPDATE holdfast.campaigns SET closes_until = now()")
    step(mill, stores)

    found = campaign(mill)
    assert (found.state, current(mill)["embedding_version"]) == ("running", OLD)
    assert "1 rows have no vector of v2" in found.said
    versions.change(
        mill.ctx, TABLE, Change("closing", ("running",), seconds=60, leaves_failed=True)
    )
    step(mill, stores, 2)
    assert current(mill)["embedding_version"] == NEW


def test_a_vector_of_an_older_text_is_no_vector_to_cut_over_to(
    mill: Mill, stores: Stores, fake: Fake
) -> None:
    write(mill, {1: "one", 2: "two"})
    work(mill)
    versions.start(mill.ctx, version(mill, NEW))
    step(mill, stores, 2)
    fake.rules.append(
        lambda request: (
            Reply(status=400, error="the input length exceeds")
            if request.model == MODEL and request.has("refused")
            else None
        )
    )
    write(mill, {2: "refused by the new model"})
    work(mill)

    step(mill, stores, 2)
    versions.change(mill.ctx, TABLE, CLOSE)
    step(mill, stores)
    mill.rows("UPDATE holdfast.campaigns SET closes_until = now()")
    step(mill, stores)

    assert current(mill)["embedding_version"] == OLD
    assert "1 have one of an older text" in campaign(mill).said


def test_a_follower_that_lags_is_waited_for(mill: Mill, stores: Stores, shelf: Shelf) -> None:
    write(mill, {n: f"text {n}" for n in range(1, 11)})
    work(mill)
    follow(mill, stores)
    versions.start(mill.ctx, version(mill, NEW))
    step(mill, stores, 2)
    mill.rows("DELETE FROM notes WHERE id = 3")  # by hand: still in the ledger, in both versions
    versions.change(mill.ctx, TABLE, CLOSE)

    step(mill, stores, 2)
    assert (current(mill)["embedding_version"], shelf.current) == (OLD, {})

    follow(mill, stores)
    step(mill, stores)
    assert (current(mill)["embedding_version"], shelf.current) == (NEW, {TABLE: NEW})


def test_what_a_follower_refuses_is_left_behind_only_when_asked(
    mill: Mill, stores: Stores, shelf: Shelf
) -> None:
    write(mill, {1: "one", 2: "two"})
    work(mill)
    follow(mill, stores)
    versions.start(mill.ctx, version(mill, NEW))
    step(mill, stores, 2)
    shelf.faults["2"] = deque([SinkFault("too odd")])
    follow(mill, stores)

    versions.change(mill.ctx, TABLE, CLOSE)
    step(mill, stores)
    mill.rows("UPDATE holdfast.campaigns SET closes_until = now()")
    step(mill, stores)
    assert current(mill)["embedding_version"] == OLD
    assert f"{NAME} lacks 1" in campaign(mill).said

    versions.change(mill.ctx, TABLE, replace(CLOSE, leaves_failed=True))
    step(mill, stores)
    assert current(mill)["embedding_version"] == NEW


def test_a_follower_that_is_away_at_the_cut_over_is_told_later_and_holds_up_nobody(
    mill: Mill, stores: Stores, shelf: Shelf
) -> None:
    write(mill, {n: f"text {n}" for n in range(1, 4)})
    work(mill)
    other = second_target(mill)
    versions.start(mill.ctx, version(mill, NEW))
    step(mill, stores, 2)
    follow(mill, stores)
    shelf.away = AWAY
    versions.change(mill.ctx, TABLE, CLOSE)
    versions.start(mill.ctx, other)

    step(mill, stores, 3)

    first, second = versions.described(mill.ctx)
    assert (first.state, first.finished_at) == ("cut_over", None)
    assert f"{NAME} does not name {NEW} yet: no connection" in str(first.said)
    assert (second.target_table, second.is_read) == ("others", True)
    shelf.away = None
    step(mill, stores)
    assert shelf.current == {TABLE: NEW}
    assert (campaign(mill).finished_at is None, campaign(mill).said) == (False, None)


def second_target(mill: Mill) -> NewTarget:
    """Register another target with one row; return a new version of it."""
    dimension = mill.fake.dimension
    mill.rows(
        f"""CREATE TABLE others (id bigint PRIMARY KEY, body text,
                embedding vector({dimension}), other vector({dimension}))"""
    )
    mill.rows("INSERT INTO others (id, body) VALUES (1, 'one of the others')")
    with mill.ctx.database.transaction() as tx:
        targets.register(tx, replace(version(mill), target_table="others"))
    return replace(version(mill, NEW), target_table="others")


def test_a_campaign_that_rests_keeps_no_other_from_going_on(
    mill: Mill, stores: Stores, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(versions, "MOST_OPEN", 10)
    write(mill, {n: f"text {n}" for n in range(1, 21)})
    work(mill)
    versions.start(mill.ctx, version(mill, NEW))
    versions.step(mill.ctx, stores)
    versions.change(mill.ctx, TABLE, Change("paused", ("running",)))

    versions.start(mill.ctx, second_target(mill))
    step(mill, stores, 2)

    [row] = mill.rows("SELECT other IS NOT NULL AS is_there FROM others")
    assert row["is_there"]


def test_a_table_that_somebody_locks_holds_up_its_campaign_and_no_duty_of_the_sweeper(
    mill: Mill, stores: Stores
) -> None:
    write(mill, {n: f"text {n}" for n in range(1, 11)})
    work(mill)
    versions.start(mill.ctx, version(mill, NEW))
    second_target(mill)
    job_id = mill.submit("waits for a bell", table="others")
    mill.ctx.link.flushdb()
    leads = Event()
    leads.set()
    campaigns = Campaigns(mill.ctx, stores, leads)
    waits = """SELECT 1 FROM pg_locks
                WHERE relation = 'notes'::regclass AND NOT granted"""

    with psycopg.connect(mill.settings.database_url) as other:
        other.execute("LOCK TABLE notes IN ACCESS EXCLUSIVE MODE")
        campaigns.start()
        try:
            wait_for(lambda: mill.rows(waits))
            Sweeper(mill.ctx).tick()
            assert mill.ctx.bells.waiting("embeddings") == [job_id]
            assert mill.rows(waits)
            other.rollback()
            wait_for(lambda: campaign(mill).is_read)
        finally:
            other.rollback()
            campaigns.stop()

    work(mill)
    check_new(mill)


def test_a_campaign_rests_and_goes_on(mill: Mill, stores: Stores) -> None:
    write(mill, {n: f"text {n}" for n in range(1, 21)})
    work(mill)
    versions.start(mill.ctx, version(mill, NEW))
    versions.step(mill.ctx, stores)
    versions.change(mill.ctx, TABLE, Change("paused", ("running",)))

    step(mill, stores, 2)
    assert set(column(mill, "other").values()) == {None}
    daily = write(mill, {21: "daily work goes on"})
    mill.work(daily)
    assert column(mill, "embedding")[21] is not None

    versions.change(mill.ctx, TABLE, Change("running", ("paused",)))
    step(mill, stores, 3)
    check_new(mill)


def test_a_cancelled_campaign_stops_what_has_not_run(mill: Mill, stores: Stores) -> None:
    write(mill, {n: f"text {n}" for n in range(1, 21)})
    work(mill)
    versions.start(mill.ctx, version(mill, NEW))
    versions.step(mill.ctx, stores)
    [job_id] = [
        row["id"] for row in mill.rows("SELECT id FROM holdfast.jobs WHERE client = 'reembed'")
    ]

    versions.change(mill.ctx, TABLE, Change("cancelled", ("running",)))
    step(mill, stores)

    assert mill.job(job_id).state == "cancelled"
    assert set(column(mill, "other").values()) == {None}
    versions.start(mill.ctx, version(mill, NEW))
    step(mill, stores, 2)
    check_new(mill)


def test_steps_that_are_lost_or_done_twice_change_nothing(mill: Mill, stores: Stores) -> None:
    write(mill, {n: f"text {n}" for n in range(1, 16)})
    work(mill)
    versions.start(mill.ctx, version(mill, NEW))
    versions.step(mill.ctx, stores)
    mill.rows("UPDATE holdfast.campaigns SET cursor = NULL, is_read = false")  # as if it had died

    step(mill, stores, 2)

    check_new(mill)
    sent = sum(call.items for call in mill.fake.calls)
    assert sent == 30


def test_back_to_the_old_version_while_both_live_embeds_only_what_changed(
    mill: Mill, stores: Stores
) -> None:
    write(mill, {n: f"text {n}" for n in range(1, 11)})
    work(mill)
    versions.start(mill.ctx, version(mill, NEW))
    step(mill, stores, 2)
    versions.change(mill.ctx, TABLE, CLOSE)
    step(mill, stores, 3)
    write(mill, {2: "only in the new one"})
    work(mill)
    sent = sum(call.items for call in mill.fake.calls)

    versions.start(mill.ctx, version(mill, OLD))
    step(mill, stores, 2)
    versions.change(mill.ctx, TABLE, CLOSE)
    step(mill, stores, 3)

    assert current(mill)["embedding_version"] == OLD
    assert sum(call.items for call in mill.fake.calls) == sent + 1


def test_rows_without_a_text_are_counted_and_those_deleted_on_purpose_left(
    mill: Mill, stores: Stores
) -> None:
    write(mill, {1: "one", 2: "two"})
    work(mill)
    mill.rows("INSERT INTO notes (id, body) VALUES (8, NULL), (9, '  ')")
    mill.rows("SELECT delete_embedding('notes', '2')")
    versions.start(mill.ctx, version(mill, NEW))

    step(mill, stores, 2)

    assert [number for number, vector in column(mill, "other").items() if vector] == [1]
    assert (campaign(mill).submitted, campaign(mill).skipped) == (1, 2)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ("UPDATE holdfast.embedding_targets SET text_column = NULL", "text_column is not known"),
        ("DELETE FROM holdfast.embedding_targets", "not a registered target"),
        ("ALTER TABLE notes DROP COLUMN other", "does not fit the database"),
        ("ALTER TABLE notes DROP COLUMN other, ADD other vector(3)", "does not fit the database"),
    ],
)
def test_what_is_missing_for_a_campaign_is_named(
    mill: Mill, stores: Stores, change: str, said: str
) -> None:
    mill.rows(change)

    with pytest.raises(InvalidRequest, match=said):
        versions.plan(mill.ctx, stores.primary, version(mill, NEW))


def test_one_campaign_a_target(mill: Mill) -> None:
    versions.start(mill.ctx, version(mill, NEW))

    with pytest.raises(InvalidRequest, match="has a campaign already"):
        versions.start(mill.ctx, version(mill, NEW))
    with pytest.raises(InvalidRequest, match="it cannot become running"):
        versions.change(mill.ctx, TABLE, Change("running", ("paused",)))
    with pytest.raises(InvalidRequest, match="has no campaign"):
        versions.change(mill.ctx, "nowhere", CLOSE)


def test_an_old_version_is_dropped_and_forgotten(mill: Mill, stores: Stores) -> None:
    write(mill, {1: "one"})
    work(mill)
    versions.start(mill.ctx, version(mill, NEW))
    with pytest.raises(InvalidRequest, match="is the current one"):
        versions.drop(mill.ctx, stores.followers, TABLE, OLD)
    step(mill, stores, 2)
    with pytest.raises(InvalidRequest, match="campaign that goes on"):
        versions.drop(mill.ctx, stores.followers, TABLE, NEW)
    versions.change(mill.ctx, TABLE, CLOSE)
    step(mill, stores, 3)

    versions.drop(mill.ctx, stores.followers, TABLE, OLD)

    left = mill.rows("SELECT DISTINCT embedding_version AS v FROM holdfast.vectors")
    assert [row["v"] for row in left] == [NEW]
    assert len(mill.rows("SELECT 1 FROM holdfast.embedding_targets")) == 1


def test_a_version_that_a_job_waits_for_is_not_dropped(mill: Mill, stores: Stores) -> None:
    write(mill, {1: "one"})
    work(mill)
    versions.start(mill.ctx, version(mill, NEW))
    step(mill, stores, 2)
    versions.change(mill.ctx, TABLE, CLOSE)
    step(mill, stores, 3)
    job_id = mill.submit("by its name", table=TABLE, embedding_version=OLD)

    with pytest.raises(InvalidRequest, match="1 items of it are open"):
        versions.drop(mill.ctx, stores.followers, TABLE, OLD)

    work(mill)
    assert mill.job(job_id).state.is_final
    versions.drop(mill.ctx, stores.followers, TABLE, OLD)


def run(capsys: pytest.CaptureFixture[str], mill: Mill, *words: str) -> tuple[int, str]:
    parser = argparse.ArgumentParser()
    upkeep.add_parsers(parser.add_subparsers())
    status = admin.run(mill.settings, parser.parse_args(["reembed", *words]))
    captured = capsys.readouterr()
    return status, captured.out + captured.err


def test_the_command_shows_the_cost_first_and_how_far_it_is(
    mill: Mill, stores: Stores, capsys: pytest.CaptureFixture[str]
) -> None:
    write(mill, {n: f"text {n}" for n in range(1, 21)})
    work(mill)
    new = ("--vector-column", "other", "--model", MODEL, "--version", NEW)

    status, said = run(capsys, mill, "plan", TABLE, *new)
    assert (status, "20 rows, 0 have it already: 20 to be embedded" in said) == (0, True)
    assert "nothing was changed" in said
    assert run(capsys, mill, "status") == (0, "no target has had a campaign\n")
    assert run(capsys, mill, "start", TABLE, *new)[0] == 0
    step(mill, stores, 2)
    mill.rows("DELETE FROM holdfast.campaign_marks")
    versions.step(mill.ctx, stores)
    assert "100.00 %  20 of 20" in run(capsys, mill, "status", TABLE)[1]
    assert run(capsys, mill, "pause", TABLE)[0] == 0
    assert run(capsys, mill, "cutover", TABLE)[0] == 1
    assert run(capsys, mill, "resume", TABLE)[0] == 0
    assert run(capsys, mill, "cutover", TABLE)[0] == 0
    step(mill, stores, 3)
    assert "cut_over" in run(capsys, mill, "status")[1]
    status, said = run(capsys, mill, "drop", TABLE, OLD)
    assert 'DROP COLUMN "embedding"' in said
