"""Texts and ids: the cases V01 to V07, each through the API and a real worker."""

import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.api import (  # noqa: F401 - fixtures among them
    MODEL,
    TARGET,
    Answer,
    Door,
    Ground,
    Item,
    as_line,
    item,
    make_door,
    make_ground,
    working,
)
from tests.fakes import Fake, Reply, Request
from tests.processes import wait_for

SKIP = "?on_invalid=skip"


@pytest.fixture(scope="module", autouse=True)
def _worker(ground: Ground, tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Let a worker work all the time."""
    with working(ground.environ, tmp_path_factory.mktemp("worker") / "worker.log"):
        yield


@pytest.fixture(name="backend")
def _backend(ground: Ground) -> Fake:
    """Give the backend as if nobody had called it yet."""
    fake = ground.backend
    fake.rules.clear()
    fake.requests.clear()
    fake.limits.max_items = fake.limits.max_tokens = None
    return fake


@pytest.fixture(autouse=True)
def _nothing_is_lost(ground: Ground, backend: Fake) -> Iterator[None]:
    """Check after every case what must hold after every case."""
    yield
    backend.rules.clear()
    query = "SELECT id FROM holdfast.jobs WHERE finished_at IS NULL"
    wait_for(lambda: not ground.rows(query), 30)
    ground.check_nothing_lost()


def finished(door: Door, answer: Answer) -> dict[str, Any]:
    """Wait for the end of an accepted batch and return its job."""
    assert answer.status == 202, answer.body
    wait_for(lambda: door.job(answer.job_id)["finished_at"], 60)
    return door.job(answer.job_id)


def outcomes(door: Door, answer: Answer) -> dict[int, str]:
    finished(door, answer)
    return {line["index"]: line["outcome"] for line in door.result(answer.job_id)}


def attempts(door: Door, answer: Answer) -> list[int]:
    return [shown["attempts"] for shown in door.items(answer.job_id)]


def counted(answer: Answer) -> tuple[int, int, int]:
    return answer.json["accepted"], answer.json["duplicates"], answer.json["rejected"]


def sent(backend: Fake) -> list[tuple[str, ...]]:
    """Return the texts of each call that the backend has got."""
    return [request.texts for request in backend.requests]


def refused_alone(ground: Ground, door: Door, batch: list[Item], index: int, code: str) -> None:
    """Check that the batch is refused for one entry, and that nothing came of it."""
    before, calls = ground.sizes(), len(ground.backend.requests)
    answer = door.post(batch)
    assert answer.status == 422
    assert answer.places == [(index, "text", code)]
    assert ground.sizes() == before
    assert len(ground.backend.requests) == calls


def test_v01_nul_in_a_text(ground: Ground, door: Door, backend: Fake) -> None:
    batch = ground.new_items("ok", "our c\0er", "ok2")
    refused_alone(ground, door, batch, 1, "text_nul")

    answer = door.post(batch, SKIP)

    assert counted(answer) == (2, 0, 1)
    assert answer.places == [(1, "text", "text_nul")]
    assert outcomes(door, answer) == {0: "done", 2: "done"}
    assert attempts(door, answer) == [1, 1]
    assert sent(backend) == [("ok", "ok2")]


def test_v02_lone_surrogate_in_a_text(ground: Ground, door: Door, backend: Fake) -> None:
    thumb = "\U0001f44d\U0001f3fd ok"
    batch = ground.new_items("ok", "x\ud835y", thumb)
    refused_alone(ground, door, batch, 1, "text_surrogate")

    answer = door.post(batch, SKIP)

    assert counted(answer) == (2, 0, 1)
    assert answer.places == [(1, "text", "text_surrogate")]
    assert outcomes(door, answer) == {0: "done", 2: "done"}
    assert sent(backend) == [("ok", thumb)]
    stored = ground.rows(
        "SELECT text_content FROM public.embedding_retry_queue WHERE target_id = %s",
        str(batch[2]["target_id"]),
    )
    assert stored == [{"text_content": thumb}]


def test_v03_empty_string_among_texts(ground: Ground, door: Door, backend: Fake) -> None:
    def refuses_empty(request: Request) -> Reply | None:
        return Reply(status=400, error="an input is empty") if "" in request.texts else None

    backend.rules.append(refuses_empty)
    batch = ground.new_items("a", "", "b")
    refused_alone(ground, door, batch, 1, "text_empty")

    answer = door.post(batch, SKIP)

    assert counted(answer) == (2, 0, 1)
    assert outcomes(door, answer) == {0: "done", 2: "done"}
    assert sent(backend) == [("a", "b")]


def test_v04_short_enough_in_characters_too_long_in_tokens(
    ground: Ground, door: Door, backend: Fake
) -> None:
    def refuses_long(request: Request) -> Reply | None:
        if any(text.count("\u6f22") > 4000 for text in request.texts):
            return Reply(status=400, error="the input length exceeds the context length")
        return None

    backend.rules.append(refuses_long)
    texts = [f"text {number}" for number in range(20)]
    texts.insert(10, "\u6f22" * 5000)

    answer = door.post(ground.new_items(*texts))

    assert outcomes(door, answer) == {n: "failed" if n == 10 else "done" for n in range(21)}
    assert len(sent(backend)) <= 2 * math.ceil(math.log2(21)) + 4
    assert attempts(door, answer) == [1] * 21
    [failed] = door.items(answer.job_id, "?status=failed")
    assert failed["error_class"] == "bad_input"
    assert "context length" in failed["errors"][0]["message"]
    assert finished(door, answer)["state"] == "completed_with_errors"


def test_v05_more_items_than_the_backend_takes_in_one_request(
    ground: Ground, door: Door, backend: Fake
) -> None:
    backend.limits.max_items = 32

    first = door.post(ground.new_items(*(f"text {number}" for number in range(100))))

    assert set(outcomes(door, first).values()) == {"done"}
    assert attempts(door, first) == [1] * 100
    assert [shown["errors"] for shown in door.items(first.job_id)] == [[]] * 100
    calls = len(backend.requests)
    second = door.post(ground.new_items(*(f"more {number}" for number in range(100))))
    assert set(outcomes(door, second).values()) == {"done"}
    assert all(len(request.texts) <= 32 for request in backend.requests[calls:])


def test_v05_more_tokens_than_the_backend_takes_in_one_request(
    ground: Ground, door: Door, backend: Fake, tmp_path: Path
) -> None:
    backend.limits.max_tokens = 300
    environ = {**ground.environ, "EMBEDDER": "openai", "QUEUE_PROJECT": "openai"}
    texts = [f"text {number} {'x' * 40}" for number in range(100)]

    with working(environ, tmp_path / "openai.log"):
        answer = door.post(ground.new_items(*texts), project="openai")
        ended = outcomes(door, answer)

    assert set(ended.values()) == {"done"}
    assert attempts(door, answer) == [1] * 100
    assert [shown["errors"] for shown in door.items(answer.job_id)] == [[]] * 100
    assert {request.route for request in backend.requests} == {"/v1/embeddings"}


@pytest.fixture(scope="module")
def _tables(ground: Ground) -> None:
    """Have targets with ids of other types."""
    ground.add_target("things", "uuid")
    ground.add_target("codes", "text")


IDS = [3000000000, "8f14e45f-ceea-467f-a0b5-1c2d3e4f5a6b", "A101750", "\u8981\u7d04-1"]


@pytest.mark.usefixtures("_tables")
def test_v06_an_id_is_stored_and_given_back_as_it_was_sent(ground: Ground, door: Door) -> None:
    tables = [TARGET, "things", "codes", "codes"]
    batch = [
        {"target_table": table, "target_id": target_id, "text": f"text of {target_id}"}
        for table, target_id in zip(tables, IDS, strict=True)
    ]
    ground.rows("INSERT INTO ai_insights (id, body) VALUES (3000000000, '')")
    ground.rows("INSERT INTO things (id) VALUES (%s)", IDS[1])
    ground.rows("INSERT INTO codes (id) VALUES (%s), (%s)", *IDS[2:])

    answer = door.post(batch)

    assert counted(answer) == (4, 0, 0)
    assert outcomes(door, answer) == dict.fromkeys(range(4), "done")
    for shown in (door.items(answer.job_id), door.result(answer.job_id)):
        assert [each["target_id"] for each in shown] == [str(target_id) for target_id in IDS]


@pytest.mark.usefixtures("_tables")
def test_v06_a_kind_of_id_that_the_target_excludes_is_refused_by_index(
    ground: Ground, door: Door
) -> None:
    ground.rows("INSERT INTO ai_insights (id, body) VALUES (3000000001, '')")
    batch = [item(3000000001, "a"), *(item(target_id, "b") for target_id in IDS[1:])]
    before = ground.sizes()

    refused = door.post(batch)
    assert refused.status == 422
    assert refused.places == [(index, "target_id", "id_invalid") for index in (1, 2, 3)]
    assert ground.sizes() == before

    skipped = door.post(batch, SKIP)
    assert counted(skipped) == (1, 0, 3)
    assert outcomes(door, skipped) == {0: "done"}
    not_plain = [
        {"target_table": "things", "target_id": each, "text": "a"}
        for each in (str(IDS[1]).upper(), f"{{{IDS[1]}}}", "x", 7)
    ]
    assert [index for index, _, _ in door.post(not_plain).places] == [0, 1, 2, 3]


@pytest.mark.parametrize("word", ["NaN", "Infinity", "-Infinity"])
def test_v07_a_bare_word_in_json(ground: Ground, door: Door, word: str) -> None:
    batch = [*ground.new_items("a", "b", "c")]
    lines = [as_line(each) for each in batch]
    lines[1] = with_score(batch[1], word)
    body = b'{"items": [' + b",".join(lines) + b"]}"
    before = ground.sizes()

    for query in ("", SKIP):
        answer = door.post_raw(body, query)
        assert (answer.status, answer.code) == (400, "malformed_json")
        assert f"{word} is not JSON (at line 2 column " in answer.json["detail"]
    assert door.post_lines(lines).status == 422
    assert ground.sizes() == before

    skipped = door.post_lines(lines, SKIP)
    assert counted(skipped) == (2, 0, 1)
    assert [(each["line"], each["code"]) for each in skipped.faults] == [(2, "malformed_json")]
    assert outcomes(door, skipped) == {0: "done", 2: "done"}


@pytest.mark.parametrize("number", ["1e999", "-1e999"])
def test_v07_a_number_that_no_float_holds(ground: Ground, door: Door, number: str) -> None:
    batch = [*ground.new_items("a", "b", "c")]
    lines = [as_line(each) for each in batch]
    lines[1] = with_score(batch[1], number)
    body = b'{"items": [' + b",".join(lines) + b"]}"
    before = ground.sizes()

    refused = door.post_raw(body)
    assert (refused.status, refused.places) == (422, [(1, "metadata", "metadata_invalid")])
    assert ground.sizes() == before

    for skipped in (door.post_raw(body, SKIP), door.post_lines(lines, SKIP)):
        assert skipped.places == [(1, "metadata", "metadata_invalid")]
        assert outcomes(door, skipped) == {0: "done", 2: "done"}


def with_score(sent_item: Item, word: str) -> bytes:
    whole = json.dumps({**sent_item, "metadata": {"score": "?"}})
    return whole.replace('"?"', word).encode() + b"\n"


def test_the_worker_works_with_the_model_of_the_target(
    ground: Ground, door: Door, backend: Fake
) -> None:
    answer = door.post(ground.new_items("one"))

    finished(door, answer)

    assert [request.model for request in backend.requests] == [MODEL]
