from collections.abc import Iterator
from dataclasses import replace

import pytest

from app.core.errors import InvalidRequest
from app.core.model import Target
from app.core.store import targets
from app.core.store.database import Database, Tx
from app.core.store.targets import NewTarget
from tests import rows
from tests.rows import MODEL, TABLE, VERSION

TABLES = """
CREATE SCHEMA "Odd.Schema";
CREATE TABLE public.notes (
    id bigint PRIMARY KEY, slug text UNIQUE, part integer NOT NULL, body text, other vector(8),
    embedding vector(8), half halfvec(8), open_ended vector, json_id json,
    UNIQUE (part, slug)
);
CREATE UNIQUE INDEX ON notes (part) WHERE part > 0;
CREATE TABLE public.numbers (i integer PRIMARY KEY, s smallint UNIQUE, u uuid UNIQUE,
                      v varchar(20) UNIQUE, d date UNIQUE, embedding vector(8));
CREATE VIEW public.seen AS SELECT * FROM notes;
CREATE TABLE "Odd.Schema"."Odd ""Table" ("The Id" text PRIMARY KEY, "Vec""tor" vector(8));
CREATE TABLE public.parted (id bigint PRIMARY KEY, embedding vector(8)) PARTITION BY RANGE (id);
"""
DROP = """
DROP SCHEMA "Odd.Schema" CASCADE;
DROP VIEW seen;
DROP TABLE notes, numbers, parted;
DELETE FROM holdfast.embedding_targets WHERE target_table NOT IN ('ai_insights', 'conversations');
"""

NOTES = NewTarget("notes", "id", "embedding", MODEL, VERSION, 8)


@pytest.fixture(scope="module")
def database(shared_database_url: str) -> Iterator[Database]:
    with rows.open_database(shared_database_url) as database:
        yield database


@pytest.fixture
def tx(database: Database) -> Iterator[Tx]:
    """Give tables as a team may have them, and take them away again."""
    with database.session() as connection:
        connection.execute(TABLES)
        yield connection
        connection.execute(DROP)


def found(tx: Tx, table: str) -> list[Target]:
    return [each for each in targets.registered(tx) if each.target_table == table]


def faults(tx: Tx, new: NewTarget) -> list[str | None]:
    """Return the fields that are wrong with a target; nothing is registered then."""
    before = targets.registered(tx)
    with pytest.raises(InvalidRequest) as caught, tx.transaction():
        targets.register(tx, new)
    assert targets.registered(tx) == before
    return [each.field for each in caught.value.faults]


def test_the_demo_has_two_targets_that_fit(tx: Tx) -> None:
    registered = targets.registered(tx)

    assert [each.target_table for each in registered] == ["ai_insights", "conversations"]
    assert [targets.faults(tx, each) for each in registered] == [[], []]


def test_a_target_is_registered_as_the_database_has_it(tx: Tx) -> None:
    registered = targets.register(tx, NOTES)

    assert found(tx, "notes") == [registered]
    assert registered == Target(
        target_table="notes",
        embedding_version=VERSION,
        table_schema="public",
        table_name="notes",
        id_column="id",
        id_type="bigint",
        vector_column="embedding",
        dimension=8,
        model=MODEL,
    )
    assert targets.faults(tx, registered) == []


def test_a_table_that_stands_in_another_schema_is_named(tx: Tx) -> None:
    elsewhere = NewTarget('Odd "Table', "The Id", 'Vec"tor', MODEL, VERSION, 8)

    with pytest.raises(InvalidRequest) as caught, tx.transaction():
        targets.register(tx, elsewhere)

    [fault] = caught.value.faults
    assert fault.message.endswith('; there is Odd.Schema.Odd "Table')


@pytest.mark.parametrize(
    ("table", "id_column", "vector_column", "id_type"),
    [
        ("notes", "slug", "embedding", "text"),
        ("notes", "id", "half", "bigint"),
        ("notes", "id", "open_ended", "bigint"),
        ("numbers", "i", "embedding", "integer"),
        ("numbers", "s", "embedding", "smallint"),
        ("numbers", "u", "embedding", "uuid"),
        ("numbers", "v", "embedding", "text"),
        ("public.notes", "id", "embedding", "bigint"),
        ('Odd.Schema.Odd "Table', "The Id", 'Vec"tor', "text"),
        ("parted", "id", "embedding", "bigint"),
    ],
)
def test_whatever_can_be_written_can_be_a_target(
    tx: Tx, table: str, id_column: str, vector_column: str, id_type: str
) -> None:
    new = NewTarget(table, id_column, vector_column, MODEL, VERSION, 8)
    if table.startswith("Odd."):
        # The part before the first dot is the schema; one with a dot in it has to be a table's.
        tx.execute('ALTER SCHEMA "Odd.Schema" RENAME TO "Odd Schema"')
        new = replace(new, target_table='Odd Schema.Odd "Table')

    try:
        assert targets.register(tx, new).id_type == id_type
    finally:
        if table.startswith("Odd."):
            tx.execute('ALTER SCHEMA "Odd Schema" RENAME TO "Odd.Schema"')


@pytest.mark.parametrize(
    ("wrong", "fields"),
    [
        ({"target_table": "nowhere"}, ["target_table"]),
        ({"target_table": ""}, ["target_table"]),
        ({"target_table": "."}, ["target_table"]),
        ({"target_table": "notes."}, ["target_table"]),
        ({"target_table": "x" * 200}, ["target_table"]),
        ({"target_table": "NOTES"}, ["target_table"]),
        ({"target_table": "nowhere.notes"}, ["target_table"]),
        ({"target_table": "seen"}, ["target_table"]),
        ({"target_table": "notes_pkey"}, ["target_table"]),
        ({"target_table": "notes; DROP TABLE notes"}, ["target_table"]),
        ({"id_column": "nothing"}, ["id_column"]),
        ({"id_column": "body"}, ["id_column"]),
        ({"id_column": "part"}, ["id_column"]),
        ({"id_column": "ctid"}, ["id_column"]),
        ({"target_table": "numbers", "id_column": "d"}, ["id_column"]),
        ({"vector_column": "nothing"}, ["vector_column"]),
        ({"vector_column": "body"}, ["vector_column"]),
        ({"dimension": 9}, ["dimension"]),
        ({"vector_column": "half", "dimension": 9}, ["dimension"]),
        ({"id_column": "body", "vector_column": "body"}, ["id_column", "vector_column"]),
        ({"id_column": "body", "dimension": 9}, ["id_column", "dimension"]),
        ({"vector_column": "open_ended", "dimension": 0}, ["dimension"]),
        ({"vector_column": "open_ended", "dimension": 16001}, ["dimension"]),
    ],
)
def test_what_does_not_fit_the_database_is_named_field_by_field(
    tx: Tx, wrong: dict[str, object], fields: list[str]
) -> None:
    assert faults(tx, replace(NOTES, **wrong)) == fields  # type: ignore[arg-type]


def test_a_column_belongs_to_one_version_of_one_target(tx: Tx) -> None:
    targets.register(tx, NOTES)

    assert faults(tx, replace(NOTES, embedding_version="v2")) == ["vector_column"]
    assert faults(tx, replace(NOTES, target_table="public.notes")) == ["vector_column"]


def test_a_new_version_with_its_own_column_becomes_the_current_one(tx: Tx) -> None:
    targets.register(tx, NOTES)

    targets.register(tx, replace(NOTES, vector_column="other", embedding_version="v2", model="m2"))

    current = {each.embedding_version: each.is_current for each in found(tx, "notes")}
    assert current == {VERSION: False, "v2": True}

    targets.register(tx, NOTES)
    current = {each.embedding_version: each.is_current for each in found(tx, "notes")}
    assert current == {VERSION: True, "v2": False}


def test_a_version_never_changes_its_columns_its_model_or_its_dimension(tx: Tx) -> None:
    targets.register(tx, replace(NOTES, vector_column="open_ended"))

    same = replace(NOTES, vector_column="open_ended")
    for other in (
        replace(same, vector_column="other"),
        replace(same, id_column="slug"),
        replace(same, model="m2"),
        replace(same, dimension=9),
    ):
        assert faults(tx, other) == ["embedding_version"]


def test_a_target_is_bound_to_a_client_and_set_free_by_registering_it_again(tx: Tx) -> None:
    targets.register(tx, replace(NOTES, client="alice"))
    assert [each.client for each in found(tx, "notes")] == ["alice"]

    targets.register(tx, NOTES)

    assert [each.client for each in found(tx, "notes")] == [None]


def test_what_no_longer_fits_is_named(tx: Tx) -> None:
    registered = targets.register(tx, replace(NOTES, target_table="numbers", id_column="i"))

    tx.execute("ALTER TABLE numbers ALTER COLUMN i TYPE bigint")
    assert [(each.field, each.message) for each in targets.faults(tx, registered)] == [
        ("id_column", "was integer, is bigint")
    ]
    tx.execute("ALTER TABLE numbers ALTER COLUMN embedding TYPE vector(9)")
    assert [each.field for each in targets.faults(tx, registered)] == ["dimension"]
    tx.execute("ALTER TABLE numbers DROP COLUMN embedding")
    assert [each.field for each in targets.faults(tx, registered)] == ["vector_column"]
    tx.execute("ALTER TABLE numbers DROP CONSTRAINT numbers_pkey")
    assert [each.field for each in targets.faults(tx, registered)] == [
        "id_column",
        "vector_column",
    ]


def test_a_changed_type_of_the_id_is_taken_over_by_registering_it_again(tx: Tx) -> None:
    new = replace(NOTES, target_table="numbers", id_column="i")
    targets.register(tx, new)
    tx.execute("ALTER TABLE numbers ALTER COLUMN i TYPE bigint")

    targets.register(tx, new)

    assert [each.id_type for each in found(tx, "numbers")] == ["bigint"]
    assert targets.faults(tx, found(tx, "numbers")[0]) == []


def test_the_name_of_the_demos_table_is_free_of_surprises(tx: Tx) -> None:
    new = NewTarget(TABLE, "id", "embedding", MODEL, VERSION, 8)

    assert targets.register(tx, new) == found(tx, TABLE)[0]
