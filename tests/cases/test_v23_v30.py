"""V23 (but for indexes: none are made) and V30: large dimensions, and a model that changes."""

from collections import Counter
from dataclasses import replace

import psycopg
import pytest

from app.core.store import targets
from app.core.store.targets import NewTarget
from migrations.__main__ import migrate
from tests.cases.casework import open_case
from tests.fakes import Fake, float32, vector_of

SHAPE = """
SELECT table_name, column_name, udt_name, format_type(a.atttypid, a.atttypmod) AS type
  FROM information_schema.columns c
  JOIN pg_attribute a ON a.attrelid = format('%I.%I', table_schema, table_name)::regclass
                     AND a.attname = column_name
 WHERE table_schema IN ('public', 'holdfast') ORDER BY 1, 2
"""


def migrated(url: str, dimension: int) -> list[tuple[str, ...]]:
    """Migrate, and return the shape of every table."""
    migrate(url, demo=True, dimension=dimension)
    with psycopg.connect(url) as connection:
        return connection.execute(SHAPE).fetchall()


@pytest.mark.parametrize("dimension", [3072, 4096])
def test_v23_models_beyond_2000_dimensions(
    empty_database_url: str, redis_url: str, dimension: int
) -> None:
    shapes = [migrated(empty_database_url, dimension) for _ in range(2)]
    assert shapes[0] == shapes[1]
    assert ("ai_insights", "embedding", "vector", f"vector({dimension})") in shapes[0]
    with psycopg.connect(empty_database_url) as connection:
        connection.execute(
            f"CREATE TABLE halves (id int PRIMARY KEY, body text, embedding halfvec({dimension}))"
        )

    with (
        Fake(dimension=dimension) as fake,
        open_case(empty_database_url, redis_url, fake, EMBEDDING_DIM=str(dimension)) as case,
    ):
        with case.mill.ctx.database.transaction() as tx:
            targets.register(tx, NewTarget("halves", "id", "embedding", "m", "half", dimension))
        job_id = case.post("one", "two", "three")
        halves = case.mill.submit("one", "two", "three", table="halves")
        assert case.mill.work(job_id).counts.done == 3
        assert case.mill.work(halves).counts.done == 3
        query = "SELECT vector_dims(embedding) AS size FROM halves"
        assert [row["size"] for row in case.mill.rows(query)] == [dimension] * 3
        case.mill.rows("DELETE FROM public.embedding_retry_queue WHERE target_table = 'halves'")
        case.close()


def test_v30_another_model_of_the_same_dimension(database_url: str, redis_url: str) -> None:
    """The rule: an item is for the model of the target when it was posted, whatever comes later."""
    with Fake() as fake, open_case(database_url, redis_url, fake) as case:
        m1 = case.mill.settings.embedding_model
        first = case.post(*(f"text {number}" for number in range(5)))
        case.mill.work(first)
        waiting = case.post(*(f"text {number}" for number in range(5, 10)), first=6)

        # The model becomes another: its vectors get a version and a column of their own.
        case.mill.rows("ALTER TABLE ai_insights ADD COLUMN embedding_two vector(8)")
        two = NewTarget("ai_insights", "id", "embedding_two", "m2", "m2-8", 8)
        with case.mill.ctx.database.transaction() as tx:
            targets.register(tx, two)
        settings = replace(case.mill.settings, embedding_model="m2")
        restarted = replace(case.mill, settings=settings)

        assert restarted.work(waiting).counts.done == 5
        again = case.post(*(f"text {number}" for number in range(10)))
        assert case.door.job(again)["counts"]["total"] == 10
        assert restarted.work(again).counts.done == 10

        assert {request.model for request in fake.requests} == {m1, "m2"}
        shown = [*case.door.items(first), *case.door.items(waiting), *case.door.items(again)]
        found = Counter((each["model"], each["embedding_version"]) for each in shown)
        assert found == {(m1, f"{m1.replace(':', '-')}-8"): 10, ("m2", "m2-8"): 10}
        query = """SELECT id, embedding::real[] AS one, embedding_two::real[] AS two
                         FROM ai_insights ORDER BY id"""
        for number, row in enumerate(case.mill.rows(query)):
            text = f"text {number}"
            assert float32(row["one"]) == vector_of(m1, text, 8)
            assert float32(row["two"]) == vector_of("m2", text, 8)
