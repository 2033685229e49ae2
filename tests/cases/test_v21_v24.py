"""Stores: the cases V21 and V24, each through the API and a real worker."""

from collections.abc import Iterator

import pytest

from tests.api import (  # noqa: F401 - fixtures among them
    DIMENSION,
    MODEL,
    Door,
    Ground,
    item,
    make_door,
    make_ground,
    working,
)
from tests.fakes import Fake, float32, vector_of
from tests.processes import wait_for

SKIP = "?on_invalid=skip"
LONG_MODEL = "hf.co/example-org/a-long-name-for-an-embedding-model-GGUF:Q4_K_M"


@pytest.fixture(scope="module", autouse=True)
def _worker(ground: Ground, tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Let a worker work all the time."""
    ground.add_target("long_names", "bigint", LONG_MODEL)
    with working(ground.environ, tmp_path_factory.mktemp("worker") / "worker.log"):
        yield


@pytest.fixture(name="backend", autouse=True)
def _backend(ground: Ground) -> Iterator[Fake]:
    """Give the backend; check after every case what must hold after every case."""
    ground.backend.requests.clear()
    yield ground.backend
    query = "SELECT id FROM holdfast.jobs WHERE finished_at IS NULL"
    wait_for(lambda: not ground.rows(query), 30)
    ground.check_nothing_lost()


def wait_until_completed(door: Door, job_id: str) -> None:
    wait_for(lambda: door.job(job_id)["finished_at"], 60)
    assert door.job(job_id)["state"] == "completed"


@pytest.mark.parametrize("query", ["", SKIP])
def test_v21_the_same_key_twice_in_one_batch(
    ground: Ground, door: Door, backend: Fake, query: str
) -> None:
    [number] = ground.new_rows(1)

    answer = door.post([item(number, "a"), item(number, "b"), item(number, "a")], query)

    assert answer.status == 202
    told = answer.json
    assert (told["accepted"], told["duplicates"], told["rejected"]) == (1, 2, 0)
    wait_until_completed(door, answer.job_id)
    stored = ground.vectors(number)[number]
    assert stored
    assert float32(stored) == vector_of(MODEL, "a", DIMENSION)
    assert [request.texts for request in backend.requests] == [("a",)]
    outcomes = [line["outcome"] for line in door.result(answer.job_id)]
    assert outcomes == ["done", "superseded", "done"]


def test_v24_an_id_of_the_queue_beyond_32_bits(ground: Ground, door: Door) -> None:
    ground.rows(
        "SELECT setval(pg_get_serial_sequence('public.embedding_retry_queue', 'id'), 2147483647)"
    )
    batch = ground.new_items("a", "b")

    answer = door.post(batch)

    wait_until_completed(door, answer.job_id)
    ids = ground.rows(
        """SELECT q.id FROM public.embedding_retry_queue q
             JOIN holdfast.job_items i ON i.item_id = q.id WHERE i.job_id = %s""",
        answer.job_id,
    )
    assert all(row["id"] > 2**31 - 1 for row in ids)
    assert [line["outcome"] for line in door.result(answer.job_id)] == ["done", "done"]


def test_v24_a_model_with_a_long_name(ground: Ground, door: Door, backend: Fake) -> None:
    ground.rows("INSERT INTO long_names (id) VALUES (1)")
    one = {"target_table": "long_names", "target_id": 1, "text": "a"}

    answer = door.post([one], model=LONG_MODEL)

    wait_until_completed(door, answer.job_id)
    assert [shown["model"] for shown in door.items(answer.job_id)] == [LONG_MODEL]
    stored = ground.rows(
        "SELECT model FROM public.embedding_retry_queue WHERE target_table = 'long_names'"
    )
    assert stored == [{"model": LONG_MODEL}]
    assert [request.model for request in backend.requests] == [LONG_MODEL]
