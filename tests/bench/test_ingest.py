"""How long POST /memory/ingest takes to answer 202, under gunicorn (`make bench`)."""

import statistics
import time

import httpx
import pytest

from migrations.__main__ import migrate
from tests.processes import StartApi

pytestmark = pytest.mark.slow

DIMENSION = 1024
ROUNDS = 60
SENTENCE = "The wire bonder lost its vacuum at 10:45, and the lot was put on hold by hand. "
SLOWEST_SECONDS = 0.1


@pytest.mark.parametrize(("kilobytes", "floor"), [(20, SLOWEST_SECONDS), (200, None)])
def test_an_ordinary_document_is_accepted_at_once(
    empty_database_url: str,
    environ: dict[str, str],
    start_api: StartApi,
    kilobytes: int,
    floor: float | None,
) -> None:
    migrate(empty_database_url, memory=True, dimension=DIMENSION)
    environ |= {"DATABASE_URL": empty_database_url, "AUTH": "off"}
    text = SENTENCE * (kilobytes * 1000 // len(SENTENCE))
    seconds: list[float] = []
    chunks = 0
    with httpx.Client(base_url=start_api(), trust_env=False, timeout=30) as client:
        for number in range(ROUNDS):
            sent = {
                "project": "fab",
                "source": f"{number}.md",
                "ingest_id": "v1",
                "records": [{"text": f"{number} {text}"}],
            }
            began = time.perf_counter()
            answer = client.post("/memory/ingest", json=sent)
            seconds.append(time.perf_counter() - began)
            assert answer.status_code == httpx.codes.ACCEPTED
            chunks = answer.json()["chunks"]
    middle, worst = statistics.median(seconds), statistics.quantiles(seconds, n=20)[-1]
    print(  # noqa: T201 - what the benchmark is for
        f"\ningest {kilobytes} KB, {chunks} chunks: p50 {middle:.4f} s, p95 {worst:.4f} s"
    )
    assert floor is None or middle < floor
