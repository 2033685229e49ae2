"""POST /memory/ingest: documents in, chunks out, and the newest document holds entirely."""

import random
import threading
from collections.abc import Iterator
from typing import Any

import psycopg
import pytest

from app.adapters.sinks.pgvector import build as build_primary
from app.core.model import MEMORY_TARGET
from app.core.store import fleet
from migrations.__main__ import migrate
from tests.api import (  # noqa: F401 - fixtures among them
    DIMENSION,
    MODEL,
    VERSION,
    Answer,
    Door,
    Ground,
    make_backend,
    make_door,
    make_ground,
)
from tests.fakes import Fake, float32, vector_of
from tests.shelf import NAME, Shelf
from worker.sweep.followers import Follower

LONG = "The wire bonder lost its vacuum at 10:45, and the lot was put on hold. " * 100
SPACES = [" ", "\n\t \u3000\n"]


@pytest.fixture
def memory(ground: Ground) -> Iterator[Ground]:
    """Give a ground with memory, and a sink that follows."""
    url = ground.environ["DATABASE_URL"]
    migrate(url, memory=True, dimension=DIMENSION, model=MODEL, version=VERSION)
    ground.rows("DELETE FROM holdfast.memory_chunks")
    ground.rows("DELETE FROM holdfast.vectors WHERE target_table = %s", MEMORY_TARGET)
    opened = ground.reopened(SINKS=f"pgvector,{NAME}")
    yield opened
    opened.close()


def ingest(
    door: Door, *texts: object, headers: dict[str, str] | None = None, **more: object
) -> Answer:
    records = [text if isinstance(text, dict) else {"text": text} for text in texts]
    sent = {"project": "fab", "source": "a.md", "ingest_id": "v1", "records": records, **more}
    return door.send("/memory/ingest", sent, headers)


def chunks(ground: Ground, **named: str) -> list[dict[str, Any]]:
    query = """SELECT id::text, client, record, chunk, text, metadata,
                      embedding::real[] AS vector FROM holdfast.memory_chunks
                WHERE ingest_id = %s ORDER BY client, record, chunk"""
    return ground.rows(query, named.get("ingest_id", "v1"))


def follow(ground: Ground, shelf: Shelf) -> None:
    follower = Follower(ground.ctx, build_primary(), NAME, shelf)
    while follower.run_once():
        pass


def test_a_document_is_split_embedded_and_found_in_both_stores(
    memory: Ground, backend: Fake
) -> None:
    door, shelf = memory.door(), Shelf()
    answer = ingest(door, LONG, {"text": "short", "metadata": {"page": 2}})

    assert answer.status == 202
    found = chunks(memory)
    assert len(found) > 2
    assert answer.json["chunks"] == answer.json["accepted"] == len(found)
    assert (answer.json["removed"], answer.json["duplicates"]) == (0, 0)
    assert [row["vector"] for row in found] == [None] * len(found)
    memory.work(answer.job_id)
    follow(memory, shelf)

    for row in chunks(memory):
        assert float32(row["vector"]) == vector_of(MODEL, row["text"], backend.dimension)
    assert shelf.texts() == {row["id"]: row["text"] for row in found}
    assert found[-1]["metadata"] == {"page": 2}
    lines = door.result(answer.job_id)
    assert lines[-1]["custom_id"] == "1/0"
    assert lines[-1]["metadata"] == {"page": 2}
    assert {line["target_table"] for line in lines} == {MEMORY_TARGET}


def test_the_same_document_again_embeds_nothing(memory: Ground, backend: Fake) -> None:
    door = memory.door()
    memory.work(ingest(door, LONG, "short").job_id)
    calls, before = len(backend.calls), chunks(memory)

    again = ingest(door, LONG, "short")

    assert again.json["accepted"] == 0
    assert again.json["duplicates"] == again.json["chunks"] == len(before)
    assert door.job(again.job_id)["state"] == "completed"
    assert (len(backend.calls), chunks(memory)) == (calls, before)


def test_other_records_replace_what_changed_and_remove_what_is_gone(
    memory: Ground, backend: Fake
) -> None:
    door, shelf = memory.door(), Shelf()
    memory.work(ingest(door, "one", "two", "three").job_id)
    memory.work(ingest(door, "one", ingest_id="v2").job_id)
    follow(memory, shelf)
    before = len(backend.arrivals["one"]) + len(backend.arrivals["two"])

    answer = ingest(door, "one", "zwei")
    memory.work(answer.job_id)
    follow(memory, shelf)

    told = {name: answer.json[name] for name in ("chunks", "accepted", "duplicates", "removed")}
    assert told == {"chunks": 2, "accepted": 1, "duplicates": 1, "removed": 1}
    assert [row["text"] for row in chunks(memory)] == ["one", "zwei"]
    assert sorted(filter(None, shelf.texts().values())) == ["one", "one", "zwei"]
    assert len(backend.arrivals["one"]) + len(backend.arrivals["two"]) == before
    [other] = chunks(memory, ingest_id="v2")
    assert other["vector"] is not None


def test_no_records_remove_the_document(memory: Ground, backend: Fake) -> None:
    del backend
    door, shelf = memory.door(), Shelf()
    memory.work(ingest(door, "one", "two").job_id)
    ingest(door, "still to be embedded", ingest_id="v2")
    follow(memory, shelf)

    answers = [ingest(door, ingest_id=name) for name in ("v1", "v2", "never")]
    follow(memory, shelf)

    assert [each.status for each in answers] == [202] * 3
    assert [each.json["removed"] for each in answers] == [2, 1, 0]
    assert {door.job(each.job_id)["state"] for each in answers} == {"completed"}
    assert chunks(memory) == chunks(memory, ingest_id="v2") == []
    assert shelf.texts() == {}


def test_what_comes_back_after_it_was_removed_is_embedded_again(
    memory: Ground, backend: Fake
) -> None:
    door, shelf = memory.door(), Shelf()
    memory.work(ingest(door, "here and gone").job_id)
    ingest(door)
    follow(memory, shelf)
    before = len(backend.arrivals["here and gone"])

    memory.work(ingest(door, "here and gone").job_id)
    follow(memory, shelf)

    [row] = chunks(memory)
    assert row["vector"] is not None
    assert shelf.texts() == {row["id"]: "here and gone"}
    assert len(backend.arrivals["here and gone"]) == before + 1


def test_two_clients_never_share_a_document(memory: Ground) -> None:
    one, two = memory.door("one", "submit", "read"), memory.door("two", "submit", "read")
    first, second = ingest(one, "of one"), ingest(two, "of two")

    assert (first.json["removed"], second.json["removed"]) == (0, 0)
    assert [(row["client"], row["text"]) for row in chunks(memory)] == [
        ("one", "of one"),
        ("two", "of two"),
    ]
    [theirs, _] = chunks(memory)
    stolen = two.post([{"target_table": MEMORY_TARGET, "target_id": theirs["id"], "text": "mine"}])
    assert (stolen.status, stolen.faults[0]["code"]) == (422, "target_unknown")
    assert ingest(two).json["removed"] == 1
    assert [row["client"] for row in chunks(memory)] == ["one"]


def test_ids_that_differ_by_case_or_spaces_only_are_different(memory: Ground) -> None:
    door = memory.door()
    names = ["a", "A", " a", "a ", "a\nb", "a b", "ä"]
    for name in names:
        assert ingest(door, "text", ingest_id=name).json["removed"] == 0
        assert ingest(door, "text", source=name).json["removed"] == 0

    counted = memory.rows("SELECT count(DISTINCT id) AS n FROM holdfast.memory_chunks")
    assert counted[0]["n"] == 2 * len(names)


def test_the_longest_names_that_are_allowed_are_stored(memory: Ground) -> None:
    limits = memory.door("one", "read").get("/api/limits").json
    draw = random.Random(1)  # noqa: S311 - no secret

    def name(size: int) -> str:
        # Of four bytes each and in no order, so that an index cannot compress them.
        return "".join(chr(draw.randrange(0x20000, 0x2A000)) for _ in range(size // 4))

    names = {
        "project": "p" * 64,
        "source": name(limits["source_bytes"]),
        "ingest_id": name(limits["ingest_id_bytes"]),
    }

    answer = memory.door("c" * 128, "submit").send(
        "/memory/ingest", {**names, "records": [{"text": "text"}]}
    )
    assert answer.status == 202
    assert len(chunks(memory, ingest_id=names["ingest_id"])) == 1


def test_rows_that_were_deleted_by_hand_get_their_vectors_back(
    memory: Ground, backend: Fake
) -> None:
    door, shelf = memory.door(), Shelf()
    memory.work(ingest(door, "one", "two").job_id)
    follow(memory, shelf)
    memory.rows("DELETE FROM holdfast.memory_chunks WHERE text = 'one'")
    before = len(backend.arrivals["two"])

    again = ingest(door, "one", "two")
    memory.work(again.job_id)
    follow(memory, shelf)

    assert (again.json["accepted"], again.json["duplicates"]) == (1, 1)
    assert all(row["vector"] for row in chunks(memory))
    assert sorted(filter(None, shelf.texts().values())) == ["one", "two"]
    assert len(backend.arrivals["two"]) == before


def test_other_metadata_reaches_every_store_and_embeds_nothing(
    memory: Ground, backend: Fake
) -> None:
    door, shelf = memory.door(), Shelf()
    memory.work(ingest(door, {"text": "same", "metadata": {"page": 1}}, "other").job_id)
    follow(memory, shelf)
    before, sent = len(backend.arrivals["same"]), len(shelf.sent)

    answer = ingest(door, {"text": "same", "metadata": {"page": 2}}, "other")
    follow(memory, shelf)

    assert (answer.json["accepted"], answer.json["duplicates"]) == (0, 2)
    assert [row["metadata"] for row in chunks(memory)] == [{"page": 2}, None]
    [written] = [each for block in shelf.sent[sent:] for each in block]
    assert (written.text, written.metadata) == ("same", {"page": 2})
    assert written.vector is not None
    assert len(backend.arrivals["same"]) == before


def test_of_two_at_the_same_time_one_holds_entirely(memory: Ground) -> None:
    door = memory.door("acme", "submit", "read")
    texts = [[f"{who} {number}" for number in range(300)] for who in ("first", "second")]
    answers: list[Answer] = []
    threads = [
        threading.Thread(target=lambda sent=sent: answers.append(ingest(door, *sent)))
        for sent in texts
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()

    assert [each.status for each in answers] == [202, 202]
    assert [row["text"] for row in chunks(memory)] in texts
    memory.work_all()
    assert all(row["vector"] for row in chunks(memory))
    assert {door.job(each.job_id)["state"] for each in answers} == {"completed"}


def test_a_document_of_three_megabytes_is_taken(memory: Ground) -> None:
    answer = ingest(memory.door(), LONG * 430)

    assert answer.status == 202
    assert answer.json["chunks"] == len(chunks(memory)) > 1000


def test_a_key_repeats_the_answer_and_refuses_another_body(memory: Ground) -> None:
    door, key = memory.door(), {"Idempotency-Key": "ingest-1"}

    first = ingest(door, "one", headers=key)

    assert ingest(door, "one", headers=key).body == first.body
    assert ingest(door, "two", headers=key).code == "idempotency_key_reused"
    assert [row["text"] for row in chunks(memory)] == ["one"]


@pytest.mark.parametrize(
    ("changes", "index", "field", "code"),
    [
        *(({"records": [{"text": "ok"}, {"text": s}]}, 1, "text", "text_empty") for s in SPACES),
        ({"records": [{"text": "a\0b"}]}, 0, "text", "text_nul"),
        ({"records": [{"text": 1}]}, 0, "text", "wrong_type"),
        ({"records": [{}]}, 0, "text", "missing"),
        ({"records": ["text"]}, 0, None, "wrong_type"),
        ({"records": [{"text": "a", "more": 1}]}, 0, "more", "unknown_field"),
        ({"records": [{"text": "a", "metadata": []}]}, 0, "metadata", "wrong_type"),
        (
            {"records": [{"text": "a", "metadata": {"k": "x" * 17000}}]},
            0,
            "metadata",
            "metadata_too_large",
        ),
        ({"records": "text"}, None, "records", "wrong_type"),
        ({"project": ""}, None, "project", "too_short"),
        ({"project": "a b"}, None, "project", "wrong_form"),
        ({"source": ""}, None, "source", "too_short"),
        ({"ingest_id": "a\0"}, None, "ingest_id", "wrong_form"),
        ({"source": "s" * 1537}, None, "source", "too_long"),
        ({"source": "\U0001f525" * 385}, None, "source", "too_long"),
        ({"ingest_id": "i" * 769}, None, "ingest_id", "too_long"),
        ({"ingest_id": 1}, None, "ingest_id", "wrong_type"),
        ({"priority": 1}, None, "priority", "unknown_field"),
    ],
)
def test_bad_input_is_named_and_nothing_is_stored(
    memory: Ground, changes: dict[str, Any], index: int | None, field: str | None, code: str
) -> None:
    answer = ingest(memory.door(), "good", **changes)

    assert answer.status == 422, answer.body
    assert (index, field, code) in answer.places
    assert chunks(memory) == []


def test_lone_surrogates_are_refused(memory: Ground) -> None:
    answer = ingest(memory.door(), "half \ud800")

    assert answer.status in (400, 422)
    assert chunks(memory) == []


def test_without_memory_it_says_what_to_run(ground: Ground) -> None:
    ground.rows("DELETE FROM holdfast.embedding_targets WHERE target_table = %s", MEMORY_TARGET)

    answer = ingest(ground.door(), "text")

    assert answer.status == 422
    assert "python -m migrations --memory" in answer.json["detail"]


def test_memory_of_another_dimension_is_refused_with_both_numbers(memory: Ground) -> None:
    with pytest.raises(Exception, match=r"EMBEDDING_DIM is 12.* 8 dimensions"):
        migrate(memory.environ["DATABASE_URL"], memory=True, dimension=12)


@pytest.mark.parametrize(
    ("dimension", "kind", "is_indexed"),
    [(2000, "vector", True), (2001, "halfvec", True), (4001, "halfvec", False)],
)
def test_memory_is_indexed_as_far_as_pgvector_can(
    empty_database_url: str, dimension: int, kind: str, is_indexed: object
) -> None:
    migrate(empty_database_url, memory=True, dimension=dimension)

    with psycopg.connect(empty_database_url) as connection:
        found = connection.execute(
            """SELECT format_type(atttypid, NULL), to_regclass('holdfast.memory_chunks_embedding')
                 FROM pg_attribute
                WHERE attrelid = 'holdfast.memory_chunks'::regclass AND attname = 'embedding'"""
        ).fetchone()
    assert found
    assert (found[0], found[1] is not None) == (kind, is_indexed)


def test_an_ingest_of_a_project_rings_for_the_worker_of_that_project(memory: Ground) -> None:
    with memory.ctx.database.transaction() as tx:
        own = fleet.Process("w", "worker", "embeddings-fab", "here", 1)
        fleet.beat(tx, own, seconds=60, counters={})
    answer = ingest(memory.door(), "of the project")
    assert any(answer.job_id in bell for bell in memory.ctx.bells.waiting("embeddings-fab"))
    with memory.ctx.database.transaction() as tx:
        fleet.leave(tx, "w")

    answer = ingest(memory.door(), "without one", ingest_id="v2")
    assert any(answer.job_id in bell for bell in memory.ctx.bells.waiting("embeddings"))
