"""V23 and V30: models of many dimensions, and another model of as many."""

from collections import Counter
from collections.abc import Iterator

import httpx
import psycopg
import pytest
from psycopg import errors

from app.web import create_app
from tests.api import Answer, Door, item
from tests.cases.casework import Case, open_case
from tests.drains import open_mill
from tests.fakes import Fake, float32, vector_of
from tests.processes import StartProcess

MODEL, OTHER = "bge-m3:latest", "another:latest"
INDEX = """
CREATE INDEX by_meaning ON ai_insights
 USING hnsw ((embedding::halfvec({dimension})) halfvec_cosine_ops)
"""
SHAPE = """
SELECT format('%s.%s %s %s', c.relname, a.attname, a.atttypid::regtype, a.atttypmod)
  FROM pg_class c JOIN pg_namespace n ON n.oid = c.relnamespace
  JOIN pg_attribute a ON a.attrelid = c.oid
 WHERE n.nspname IN ('public', 'holdfast') ORDER BY 1
"""


def numbered(number: int) -> list[str]:
    return [f"text {position}" for position in range(number)]


# ---- V23


@pytest.mark.parametrize(
    ("dimension", "note"),
    [
        (3072, "3072 dimensions: an HNSW index only as halfvec(3072)"),
        (4096, "4096 dimensions: stored, but no HNSW index is possible"),
    ],
)
def test_v23_models_beyond_2000_dimensions(
    empty_database_url: str,
    redis_url: str,
    start_process: StartProcess,
    dimension: int,
    note: str,
) -> None:
    settings = {"DATABASE_URL": empty_database_url, "EMBEDDING_DIM": str(dimension)}
    first = start_process("migrations", "--demo", **settings)
    assert first.wait() == 0, first.said
    told, _, done = first.said.partition("\n")
    assert told == note, "it is not said before anything changes"
    assert done.startswith("applied: ")
    can_be_indexed = dimension <= 4000
    with psycopg.connect(empty_database_url, autocommit=True) as connection:
        index = INDEX.format(dimension=dimension).encode()
        if can_be_indexed:
            connection.execute(index)
        else:
            with pytest.raises(errors.ProgramLimitExceeded):
                connection.execute(index)
        table = f"CREATE TABLE wide (id bigint PRIMARY KEY, embedding vector({dimension}))"
        connection.execute(table.encode())
        added = start_process("worker", "targets", "add", "wide", **settings)
        assert added.wait() == 0, added.said
        assert note in added.said.splitlines()
        before = connection.execute(SHAPE.encode()).fetchall()

        with (
            Fake(dimension=dimension) as fake,
            open_case(empty_database_url, redis_url, fake) as case,
        ):
            job_id = case.post(*numbered(3))
            case.mill.work(job_id)
            assert case.job(job_id)["counts"]["done"] == 3
            case.close()

        again = start_process("migrations", "--demo", **settings)
        assert again.wait() == 0, again.said
        assert again.said.splitlines() == [note, "up to date"]
        assert connection.execute(SHAPE.encode()).fetchall() == before
        assert connection.execute("SELECT count(embedding) FROM ai_insights").fetchall() == [(3,)]


# ---- V30


@pytest.fixture
def case(database_url: str, redis_url: str) -> Iterator[Case]:
    """Give a case whose slices are of five."""
    with Fake() as fake, open_case(database_url, redis_url, fake, QUEUE_BATCH_SIZE="5") as case:
        yield case


def test_v30_another_model_of_the_same_dimension(
    case: Case, database_url: str, redis_url: str
) -> None:
    first = case.post(*numbered(10))
    case.mill.drain(first, stop=lambda: True)
    assert Counter(case.mill.column(first, "status")) == {"done": 5, "pending": 5}, "void"

    # The workers start again with another model. A target keeps the one it was registered with:
    # what waits for it is embedded by that, and no column ever holds vectors of two.
    changed = {"EMBEDDING_MODEL": OTHER, "AUTH": "off"}
    with open_mill(database_url, redis_url, case.fake, **changed) as mill:
        mill.work(first)
        assert {request.model for request in case.fake.requests} == {MODEL}
        case.close()

        app = create_app(mill.settings)
        transport = httpx.WSGITransport(app=app, raise_app_exceptions=False)
        with httpx.Client(transport=transport, base_url="http://127.0.0.1") as client:
            door = Door(client, None)
            made = use_the_new_model(case, door)
            second = door.post(
                [item(number, text) for number, text in enumerate(numbered(10), start=1)]
            )
        app.extensions["context"].close()
        mill.work(second.job_id)

    assert made.json["model"] == OTHER
    assert (second.json["accepted"], second.json["duplicates"]) == (10, 0)
    for job_id, model, column in (
        (first, MODEL, "embedding"),
        (second.job_id, OTHER, "embedding_two"),
    ):
        shown = {(each["model"], each["status"]) for each in case.door.items(job_id)}
        assert shown == {(model, "done")}
        assert {each["embedding_version"] for each in case.door.items(job_id)} == {
            f"{model.replace(':', '-')}-8"
        }
        stored = case.mill.rows(f"SELECT {column}::real[] AS vector FROM ai_insights ORDER BY id")  # noqa: S608
        assert [float32(row["vector"]) for row in stored] == [
            vector_of(model, text, 8) for text in numbered(10)
        ]
    counted = case.mill.rows(
        """SELECT model, embedding_version, status, count(*) AS n
             FROM public.embedding_retry_queue GROUP BY 1, 2, 3"""
    )
    assert {(row["model"], row["status"], row["n"]) for row in counted} == {
        (MODEL, "done", 10),
        (OTHER, "done", 10),
    }


def use_the_new_model(case: Case, door: Door) -> Answer:
    """Give the target a column for the new model, as an operator would."""
    case.mill.rows("ALTER TABLE ai_insights ADD COLUMN embedding_two vector(8)")
    made = door.send(
        "/api/targets",
        {
            "target_table": "ai_insights",
            "id_column": "id",
            "vector_column": "embedding_two",
            "model": OTHER,
        },
    )
    assert made.status == httpx.codes.OK, made.body
    return made
