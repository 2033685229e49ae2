"""The primary sink: what it is given is what the column holds, whatever the table is called."""

from collections.abc import Iterator, Sequence
from uuid import UUID

import pytest
from psycopg import sql

from app.core.errors import BackendFault, ErrorClass
from app.core.model import Target
from app.core.ports import Write, Written, find
from app.core.store import targets
from app.core.store.database import Database
from app.core.store.targets import NewTarget
from tests.fakes import float32, vector_of

SINK = find("sinks", "pgvector")()
IDS: dict[str, Sequence[str]] = {
    "bigint": ["-9223372036854775808", "0", "3000000000", "9223372036854775807"],
    "integer": ["-1", "0", "2147483647"],
    "smallint": ["-32768", "7"],
    "uuid": [str(UUID(int=1)), "8f14e45f-ceea-467f-a0b5-1c2d3e4f5a6b"],
    "text": ["A101750", "要約-1", "'; DROP TABLE t; --", "{1,2}", 'a"b\\c', " "],
    "varchar(80)": ["x", "NULL"],
}


@pytest.fixture(scope="module")
def database(shared_database_url: str) -> Iterator[Database]:
    database = Database(shared_database_url, application="test", most_connections=2)
    yield database
    database.close()


def make(
    database: Database,
    *,
    table: str = "places",
    id_type: str = "bigint",
    id_column: str = "id",
    columns: Sequence[tuple[str, str]] = (("embedding", "vector(8)"),),
    ids: Sequence[str] = (),
) -> list[Target]:
    """Make a table anew, with rows, and register each of its vector columns as a version."""
    names: dict[str, sql.Composable] = {
        "table": sql.Identifier(table),
        "id": sql.Identifier(id_column),
        "type": sql.SQL(id_type),
        "ids": sql.Literal(list(ids)),
    }
    fill = "INSERT INTO {table} ({id}) SELECT unnest({ids}::text[])::{type}"
    made = []
    with database.transaction() as tx:
        tx.execute("DELETE FROM holdfast.embedding_targets WHERE target_table = %s", (table,))
        tx.execute(sql.SQL("DROP TABLE IF EXISTS {table}").format(**names))
        create = "CREATE TABLE {table} ({id} {type} PRIMARY KEY)"
        tx.execute(sql.SQL(create).format(**names))
        for column, column_type in columns:
            more = {"column": sql.Identifier(column), "kind": sql.SQL(column_type)}
            tx.execute(sql.SQL("ALTER TABLE {table} ADD {column} {kind}").format(**names, **more))
            new = NewTarget(table, id_column, column, "m", f"version of {column}", 8)
            made.append(targets.register(tx, new))
        tx.execute(sql.SQL(fill).format(**names))
    return made


def write(database: Database, target: Target, vectors: dict[str, list[float]]) -> Written:
    with database.transaction() as tx:
        written: Written = SINK.write(tx, target, [Write(*pair) for pair in vectors.items()])
    return written


def read(database: Database, target: Target, ids: Sequence[str]) -> dict[str, list[float]]:
    with database.transaction() as tx:
        found: dict[str, list[float]] = SINK.read(tx, target, ids)
    return {key: float32(vector) for key, vector in found.items()}


def vectors_of(ids: Sequence[str]) -> dict[str, list[float]]:
    return {each: vector_of("m", each, 8) for each in ids}


# ---- what is stored


@pytest.mark.parametrize("id_type", IDS)
def test_each_kind_of_id_gets_its_own_vector_to_the_last_bit(
    database: Database, id_type: str
) -> None:
    ids = IDS[id_type]
    [target] = make(database, id_type=id_type, ids=ids)

    written = write(database, target, vectors_of(ids))

    assert written == Written(gone=frozenset(), refused={})
    assert read(database, target, ids) == vectors_of(ids)


def test_numbers_at_the_edges_of_32_bits_are_kept(database: Database) -> None:
    [target] = make(database, ids=["1", "2"])
    edges = [3.4028234e38, -3.4028234e38, 1.1754944e-38, -0.0, 0.0, 1.0, 1 / 3, 16777217.0]

    write(database, target, {"1": edges, "2": [1, 2, 3, 4, 5, 6, 7, 8]})

    assert read(database, target, ["1", "2"]) == {
        "1": float32(edges),
        "2": [1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0, 8.0],
    }


def test_a_vector_is_the_same_as_its_text_form(database: Database) -> None:
    [target] = make(database, ids=["1"])
    vector = vector_of("m", "text", 8)
    write(database, target, {"1": vector})

    with database.transaction() as tx:
        row = tx.execute(
            "SELECT embedding = %s::vector AS same FROM places", (str(vector),)
        ).fetchone()

    assert row == {"same": True}


def test_a_column_of_half_floats_is_written_and_read(database: Database) -> None:
    [target] = make(database, columns=[("embedding", "halfvec(8)")], ids=["1"])
    halves = [0.5, -0.25, 1.0, 2.0, 0.125, 65504.0, 0.0, -1.5]

    write(database, target, {"1": halves})

    assert read(database, target, ["1"]) == {"1": halves}


def test_a_column_without_a_dimension_takes_what_its_target_says(database: Database) -> None:
    [target] = make(database, columns=[("embedding", "vector")], ids=["1"])

    write(database, target, vectors_of(["1"]))

    assert read(database, target, ["1"]) == vectors_of(["1"])


def test_the_last_write_stands(database: Database) -> None:
    [target] = make(database, ids=["1"])

    write(database, target, {"1": vector_of("m", "old", 8)})
    write(database, target, {"1": vector_of("m", "new", 8)})

    assert read(database, target, ["1"]) == {"1": vector_of("m", "new", 8)}


def test_versions_of_one_table_are_kept_apart(database: Database) -> None:
    columns = [("embedding", "vector(8)"), ("embedding_two", "halfvec(8)")]
    one, two = make(database, columns=columns, ids=["1", "2"])

    write(database, one, vectors_of(["1", "2"]))
    write(database, two, {"2": [1.0] * 8})

    assert read(database, one, ["1", "2"]) == vectors_of(["1", "2"])
    assert read(database, two, ["1", "2"]) == {"2": [1.0] * 8}


ODD = ['or"der', "select", "Großes Ü", "semi;colon", "dot", "%s", "{id}", "' OR 1=1 --"]


@pytest.mark.parametrize("name", ODD)
def test_an_odd_name_is_only_a_name(database: Database, name: str) -> None:
    [target] = make(
        database, table=name, id_column=f"the {name}", columns=[(name, "vector(8)")], ids=["1"]
    )

    write(database, target, vectors_of(["1"]))

    assert read(database, target, ["1"]) == vectors_of(["1"])


def test_a_table_in_a_schema_of_its_own_is_found(database: Database) -> None:
    with database.transaction() as tx:
        tx.execute("CREATE SCHEMA team; CREATE TABLE team.notes (id bigint PRIMARY KEY)")
        tx.execute("ALTER TABLE team.notes ADD COLUMN embedding vector(8)")
        tx.execute("INSERT INTO team.notes VALUES (1)")
        target = targets.register(tx, NewTarget("team.notes", "id", "embedding", "m", "version", 8))

    write(database, target, vectors_of(["1"]))

    assert read(database, target, ["1"]) == vectors_of(["1"])


# ---- what is not


def test_rows_that_are_gone_are_named_and_the_others_written(database: Database) -> None:
    [target] = make(database, ids=["1", "3"])

    written = write(database, target, vectors_of(["1", "2", "3", "4"]))

    assert written.gone == {"2", "4"}
    assert read(database, target, ["1", "2", "3", "4"]) == vectors_of(["1", "3"])


def test_rows_that_are_refused_are_named_with_a_reason_and_without_their_content(
    database: Database,
) -> None:
    [target] = make(database, ids=[str(number) for number in range(20)])
    with database.transaction() as tx:
        tx.execute("ALTER TABLE places ADD note text NOT NULL DEFAULT 'secret'")
        tx.execute("ALTER TABLE places ADD CHECK (id NOT IN (3, 17) OR embedding IS NULL)")

    written = write(database, target, vectors_of([str(number) for number in range(21)]))

    assert set(written.refused) == {"3", "17"}
    assert written.gone == {"20"}
    assert written.refused["3"].startswith("23514 ")
    assert "secret" not in written.refused["3"]
    assert len(read(database, target, [str(number) for number in range(20)])) == 18


def test_a_number_too_large_for_half_a_float_is_refused_for_its_row_alone(
    database: Database,
) -> None:
    [target] = make(database, columns=[("embedding", "halfvec(8)")], ids=["1", "2"])

    written = write(database, target, {"1": [1e6] * 8, "2": [1.0] * 8})

    assert written.refused["1"].startswith("22003 ")
    assert read(database, target, ["1", "2"]) == {"2": [1.0] * 8}


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ("ALTER TABLE places DROP COLUMN embedding, ADD embedding vector(4)", "has 4 dimensions"),
        ("ALTER TABLE places RENAME COLUMN embedding TO other", "42703"),
        ("ALTER TABLE places RENAME COLUMN id TO other", "42703"),
        ("ALTER TABLE places DROP COLUMN embedding, ADD embedding bytea", "42804"),
        ("ALTER TABLE places RENAME TO elsewhere", "42P01"),
    ],
)
def test_a_table_that_is_not_as_it_was_registered_is_everybodys_fault(
    database: Database, change: str, said: str
) -> None:
    [target] = make(database, ids=["1", "2", "3"])
    with database.transaction() as tx:
        tx.execute("DROP TABLE IF EXISTS elsewhere")
        tx.execute(change)

    with pytest.raises(BackendFault, match=said) as caught:
        write(database, target, vectors_of(["1", "2", "3"]))

    assert caught.value.error_class is ErrorClass.BAD_CONFIG
    assert "target places" in caught.value.message


def test_what_was_written_is_taken_back_with_its_transaction(database: Database) -> None:
    [target] = make(database, ids=["1"])

    with database.transaction() as tx:
        SINK.write(tx, target, [Write("1", vector_of("m", "1", 8))])
        tx.execute("ROLLBACK")
        tx.execute("BEGIN")

    assert read(database, target, ["1"]) == {}
