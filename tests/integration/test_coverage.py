"""What the stores really hold: measured, compared, and made good without embedding twice."""

import argparse
import json
from collections.abc import Generator, Iterator
from contextlib import ExitStack

import pytest

from app.core import coverage
from app.core.coverage import Stores, Survey, Wanted
from app.core.model import Caller
from app.core.ports import Document, find
from app.core.store import targets
from app.core.store.targets import NewTarget
from tests.drains import Mill, open_mill
from tests.fakes import Fake, float32
from tests.shelf import NAME, Shelf
from worker import admin, upkeep
from worker.sweep.followers import Follower

ADMIN = Caller("ops", frozenset({"admin"}))
PRIMARY = "pgvector"
TABLE = "notes"


@pytest.fixture
def fake() -> Iterator[Fake]:
    with Fake() as fake:
        yield fake


@pytest.fixture
def mill(database_url: str, redis_url: str, fake: Fake) -> Generator[Mill]:
    """Give the flow over a target whose texts are in its table, with a sink that follows."""
    with ExitStack() as stack:
        more = {"SINKS": f"pgvector,{NAME}"}
        mill = stack.enter_context(open_mill(database_url, redis_url, fake, **more))
        mill.rows(
            f"""CREATE TABLE notes (id bigint PRIMARY KEY, body text,
                                    embedding vector({fake.dimension}))"""
        )
        mill.rows("DELETE FROM holdfast.embedding_targets")
        with mill.ctx.database.transaction() as tx:
            targets.register(tx, new_target(mill))
        yield mill


def new_target(mill: Mill) -> NewTarget:
    return NewTarget(
        target_table=TABLE,
        id_column="id",
        vector_column="embedding",
        model=mill.settings.embedding_model,
        embedding_version=mill.settings.version_label,
        dimension=mill.fake.dimension,
        text_column="body",
    )


@pytest.fixture
def shelf() -> Shelf:
    return Shelf()


@pytest.fixture
def stores(shelf: Shelf) -> Stores:
    return Stores(PRIMARY, find("sinks", PRIMARY)(), {NAME: shelf})


def fill(mill: Mill, *texts: str) -> None:
    """Have rows with these texts, embedded."""
    insert = """INSERT INTO notes (id, body)
                SELECT n, body FROM unnest(%(texts)s::text[]) WITH ORDINALITY AS t(body, n)"""
    mill.rows(insert, texts=list(texts))
    mill.work(mill.submit(*texts, table=TABLE))


def settled(mill: Mill, stores: Stores) -> None:
    """Do all that is on its way, in every store."""
    for row in mill.rows("SELECT id FROM holdfast.jobs WHERE finished_at IS NULL"):
        mill.work(row["id"])
    follow(mill, stores)


def follow(mill: Mill, stores: Stores) -> None:
    for name, sink in stores.followers.items():
        follower = Follower(mill.ctx, stores.primary, name, sink)
        for _ in range(50):
            if not follower.run_once():
                break


def kinds(surveys: Iterator[Survey]) -> dict[str, dict[str, int]]:
    return {each.sink: dict(each.kinds) for each in surveys}


def verified(mill: Mill, stores: Stores) -> dict[str, dict[str, int]]:
    return kinds(coverage.verify(mill.ctx, stores, Wanted()))


def repaired(mill: Mill, stores: Stores) -> dict[str, dict[str, int]]:
    found = coverage.repair(mill.ctx, stores, Wanted())
    return {each.sink: {k: n for k, n in each.done.items() if n} for each in found}


def test_what_is_as_it_should_be_is_current_everywhere(mill: Mill, stores: Stores) -> None:
    fill(mill, "one", "two", "three")
    assert verified(mill, stores) == {PRIMARY: {"current": 3}, NAME: {"queued": 3}}

    follow(mill, stores)

    assert verified(mill, stores) == {PRIMARY: {"current": 3}, NAME: {"current": 3}}
    assert repaired(mill, stores) == {PRIMARY: {}, NAME: {}}


def test_fifty_rows_and_documents_gone_twenty_orphans_and_thirty_texts_changed(
    mill: Mill, stores: Stores, shelf: Shelf, fake: Fake
) -> None:
    fill(mill, *(f"text {number}" for number in range(1, 601)))
    follow(mill, stores)
    place = shelf.places[TABLE, mill.settings.version_label]
    mill.rows("DELETE FROM notes WHERE id <= 50")
    for number in range(101, 151):
        del place[str(number)]
    for number in range(9001, 9021):
        place[str(number)] = Document(str(number), 1, "0" * 64, "m", vector=[1.0] * fake.dimension)
    mill.rows("UPDATE notes SET body = 'changed ' || body WHERE id BETWEEN 201 AND 230")
    sent = sum(call.items for call in fake.calls)

    assert verified(mill, stores) == {
        PRIMARY: {"current": 520, "gone": 50, "stale": 30},
        NAME: {"current": 550, "missing": 50, "orphan": 20},
    }
    assert repaired(mill, stores) == {
        PRIMARY: {"forgotten": 50, "embedding_again": 30},
        NAME: {"sent_again": 50, "removed": 20},
    }
    settled(mill, stores)

    assert sum(call.items for call in fake.calls) == sent + 30
    assert verified(mill, stores) == {PRIMARY: {"current": 550}, NAME: {"current": 550}}
    assert len(shelf.texts()) == 550
    assert shelf.texts()["201"] == "changed text 201"
    assert repaired(mill, stores) == {PRIMARY: {}, NAME: {}}


def test_a_vector_that_a_follower_kept_is_written_back_and_not_embedded_again(
    mill: Mill, stores: Stores, fake: Fake
) -> None:
    fill(mill, "one", "two", "three")
    follow(mill, stores)
    mill.rows("UPDATE notes SET embedding = NULL WHERE id IN (1, 2)")
    mill.rows("UPDATE notes SET body = 'zwei' WHERE id = 2")
    sent = sum(call.items for call in fake.calls)

    assert verified(mill, stores)[PRIMARY] == {"current": 1, "missing": 2}
    assert repaired(mill, stores)[PRIMARY] == {"restored": 1, "embedding_again": 1}
    settled(mill, stores)

    assert sum(call.items for call in fake.calls) == sent + 1
    assert list(mill.vectors(TABLE).values()) == mill.right("one", "zwei", "three")
    assert verified(mill, stores) == {PRIMARY: {"current": 3}, NAME: {"current": 3}}


def test_without_a_kept_vector_the_text_is_embedded_again(
    mill: Mill, stores: Stores, shelf: Shelf
) -> None:
    fill(mill, "one", "two")
    follow(mill, stores)
    shelf.places.clear()
    mill.rows("UPDATE notes SET embedding = NULL")

    repaired(mill, stores)
    settled(mill, stores)

    assert list(mill.vectors(TABLE).values()) == mill.right("one", "two")
    assert verified(mill, stores) == {PRIMARY: {"current": 2}, NAME: {"current": 2}}


def test_a_row_that_was_never_submitted_is_found_and_embedded(mill: Mill, stores: Stores) -> None:
    mill.rows("INSERT INTO notes (id, body) VALUES (7, 'never submitted'), (8, NULL), (9, ' ')")

    assert verified(mill, stores)[PRIMARY] == {"missing": 3}
    assert coverage.measure(mill.ctx, stores.primary)["missing"] == 3
    assert repaired(mill, stores)[PRIMARY] == {"embedding_again": 2, "text_unknown": 1}
    settled(mill, stores)

    assert mill.vectors(TABLE)[7] == mill.right("never submitted")[0]
    assert verified(mill, stores)[PRIMARY] == {"current": 1, "missing": 2}


def test_work_that_is_open_or_failed_explains_what_is_not_there(
    mill: Mill, stores: Stores, fake: Fake
) -> None:
    del fake
    fill(mill, "one", "two")
    follow(mill, stores)
    mill.submit("eins", table=TABLE)
    mill.rows("UPDATE notes SET body = 'eins' WHERE id = 1")

    assert verified(mill, stores) == {
        PRIMARY: {"queued": 1, "current": 1},
        NAME: {"current": 2},
    }
    assert repaired(mill, stores) == {PRIMARY: {}, NAME: {}}


def test_a_vector_that_nobody_wrote_down_is_recorded_where_its_text_is_known(
    mill: Mill, stores: Stores
) -> None:
    fill(mill, "one", "two")
    mill.rows("DELETE FROM holdfast.vectors")
    mill.rows("INSERT INTO notes SELECT 3, 'three', embedding FROM notes WHERE id = 1")

    assert verified(mill, stores)[PRIMARY] == {"unrecorded": 3}
    assert repaired(mill, stores) == {
        PRIMARY: {"written_down": 2, "origin_unknown": 1},
        NAME: {"sent_again": 2},
    }

    assert verified(mill, stores)[PRIMARY] == {"current": 2, "unrecorded": 1}
    assert verified(mill, stores)[NAME] == {"queued": 2}  # it has been told of them
    follow(mill, stores)
    assert verified(mill, stores)[NAME] == {"current": 2}


def test_documents_of_another_text_or_of_a_version_from_nowhere_are_replaced(
    mill: Mill, stores: Stores, shelf: Shelf
) -> None:
    fill(mill, "one", "two", "three")
    follow(mill, stores)
    place = shelf.places[TABLE, mill.settings.version_label]
    wrong = [9.0] * mill.fake.dimension
    place["1"] = Document("1", 10**12, place["1"].content_hash, "m", vector=wrong)
    place["2"] = Document("2", 1, "f" * 64, "m", vector=wrong)

    assert verified(mill, stores)[NAME] == {"stale": 2, "current": 1}
    assert repaired(mill, stores)[NAME] == {"sent_again": 2}
    follow(mill, stores)

    assert verified(mill, stores)[NAME] == {"current": 3}
    assert float32(place["1"].vector or ()) == mill.right("one")[0]
    mill.rows("UPDATE notes SET body = 'neu' WHERE id = 1")
    repaired(mill, stores)
    settled(mill, stores)
    assert shelf.texts()["1"] == "neu"


def test_a_sink_that_comes_later_is_filled_from_the_primary(
    mill: Mill, stores: Stores, fake: Fake
) -> None:
    fill(mill, "one", "two")
    mill.rows("DELETE FROM holdfast.item_sinks")  # it was not yet one of SINKS
    sent = len(fake.calls)

    assert verified(mill, stores)[NAME] == {"missing": 2}
    assert repaired(mill, stores)[NAME] == {"sent_again": 2}
    follow(mill, stores)

    assert verified(mill, stores)[NAME] == {"current": 2}
    assert len(fake.calls) == sent


def test_only_the_store_and_target_that_are_asked_for_are_looked_at(
    mill: Mill, stores: Stores
) -> None:
    fill(mill, "one")

    assert list(kinds(coverage.verify(mill.ctx, stores, Wanted(sink=NAME)))) == [NAME]
    assert kinds(coverage.verify(mill.ctx, stores, Wanted(target_table="other"))) == {}


def test_the_last_survey_is_shown_with_its_share(mill: Mill, stores: Stores) -> None:
    fill(mill, "one", "two", "three")
    mill.rows("UPDATE notes SET embedding = NULL WHERE id = 1")
    verified(mill, stores)

    shown = coverage.shown(mill.ctx, ADMIN)

    [primary, follower] = shown
    assert (primary["sink"], primary["share"], primary["without_vector"]) == (
        PRIMARY,
        0.666667,
        1,
    )
    assert (follower["sink"], follower["share"]) == (NAME, 0.0)
    mill.rows("UPDATE holdfast.embedding_targets SET client = 'acme'")
    assert coverage.shown(mill.ctx, Caller("bob", frozenset({"read"}))) == []
    assert len(coverage.shown(mill.ctx, Caller("acme", frozenset({"read"})))) == 2


def run(capsys: pytest.CaptureFixture[str], mill: Mill, *words: str) -> tuple[int, str]:
    parser = argparse.ArgumentParser()
    upkeep.add_parsers(parser.add_subparsers())
    status = admin.run(mill.settings, parser.parse_args(words))
    captured = capsys.readouterr()
    return status, captured.out + captured.err


def test_the_commands_say_what_is_there_what_differs_and_what_was_done(
    mill: Mill, capsys: pytest.CaptureFixture[str]
) -> None:
    fill(mill, "one", "two", "three")
    mill.rows("DELETE FROM holdfast.item_sinks")
    mill.rows("UPDATE notes SET body = 'neu' WHERE id = 2")

    status, said = run(capsys, mill, "coverage")
    assert status == 0
    assert "66.67 %" in said
    status, said = run(capsys, mill, "verify", "--sink", "pgvector")
    assert status == 1
    assert "1 stale: 2" in said
    assert run(capsys, mill, "repair", "--dry-run") == run(capsys, mill, "verify")
    status, said = run(capsys, mill, "repair", "--sink", "pgvector", TABLE)
    assert status == 0
    assert "1 embedding again" in said
    status, said = run(capsys, mill, "verify", "--sink", "nowhere")
    assert status == 1
    assert "SINKS has no nowhere" in said
    assert json.dumps(said)
