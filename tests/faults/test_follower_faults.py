"""F30: a second store that is down, refuses, is written late, or whose writer dies."""

import os
import signal
from collections import deque
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.fakes import float32, vector_of
from tests.faults.stage import DRAIN_SECONDS, MODEL, Stage, numbered, struck, wait_until_struck
from tests.processes import wait_for
from tests.search import Scripted, Search

FOLLOWING = "SELECT count(*) FROM holdfast.item_sinks WHERE status <> 'done'"


@pytest.fixture
def search(environ: dict[str, str]) -> Iterator[Search]:
    """Give the second store, and tell the processes of it."""
    with Search() as search:
        environ |= {
            "SINKS": "pgvector,opensearch",
            "OPENSEARCH_URL": search.url,
            "SINK_TIMEOUT_SECONDS": "1",
        }
        yield search


@pytest.fixture
def followed_stage(search: Search, request: pytest.FixtureRequest) -> Stage:
    """Give the stage; the second store is known before anything is set up."""
    del search
    stage: Stage = request.getfixturevalue("stage")
    return stage


def wait_until_followed(stage: Stage) -> None:
    """Wait until nothing is open at any follower."""
    wait_for(lambda: stage.are_final and not stage.one(FOLLOWING), DRAIN_SECONDS)


def check_both(stage: Stage, search: Search) -> None:
    """Check that both stores hold the right vector of each row's newest text, and nothing more."""
    stage.check()
    documents = search.documents()
    done = {row["target_id"]: row for row in stage.items() if row["status"] == "done"}
    assert documents.keys() == done.keys()
    for number, source in documents.items():
        text = stage.texts[int(number)]
        right = vector_of(MODEL, text, stage.fake.dimension)
        assert float32(source["embedding"]) == right, number
        assert source["text"] == text


def test_f30_a_store_that_is_down_for_half_of_it_costs_no_second_embedding(
    followed_stage: Stage, search: Search
) -> None:
    drive_through_an_outage(followed_stage, search, batches=2, size=300)


@pytest.mark.slow
def test_f30_five_thousand_chunks_with_the_search_store_down_for_half_of_them(
    followed_stage: Stage, search: Search
) -> None:
    drive_through_an_outage(followed_stage, search, batches=10, size=500)


def drive_through_an_outage(stage: Stage, search: Search, *, batches: int, size: int) -> None:
    stage.start_sweeper()
    stage.start_workers(2)
    half = batches // 2
    for batch in range(half):
        stage.post(*numbered(size, f"before {batch} text"))
    wait_for(search.documents, DRAIN_SECONDS)
    with search.refused():
        for batch in range(half):
            stage.post(*numbered(size, f"during {batch} text"))
        stage.wait_until_final()
        waiting = stage.one(FOLLOWING)
        struck(waiting >= size * half / 2, f"only {waiting} rows wait for the store")
        incident = wait_for(lambda: open_incident(stage), DRAIN_SECONDS)
        assert incident
        assert incident["backend"] == "opensearch"
        assert incident["items_waiting"] == waiting
        assert "sink_paused:opensearch" in stage.door.get("/readyz").json["degraded"]
        stage.end_fault()
    wait_until_followed(stage)

    stage.record("waited_for_the_store", waiting)
    stage.record("documents", len(search.documents()))
    stage.record("bulk_requests", len(search.bulks))
    stage.record("texts_embedded_twice", stage.calls - len(stage.texts))
    assert stage.calls == len(stage.texts)
    assert stage.one("SELECT max(attempts) FROM holdfast.item_sinks") == 1
    check_both(stage, search)


def open_incident(stage: Stage) -> dict[str, Any] | None:
    """Return the outage that goes on."""
    shown = stage.door.get("/api/incidents").json["incidents"]
    return next((each for each in shown if each["until"] is None), None)


def test_f30_a_text_that_changes_while_the_old_one_is_on_its_way_is_the_last_in_both(
    followed_stage: Stage, search: Search
) -> None:
    stage = followed_stage
    old = stage.start_sweeper()
    stage.start_worker()
    held = search.hold()
    stage.post("the old text", "another")
    wait_until_struck(lambda: held.is_waiting, "nobody was about to write the old text")
    os.kill(old.pid, signal.SIGSTOP)  # with the old document on its way
    taken = "SELECT count(*) FROM holdfast.item_sinks WHERE attempts = 1"
    struck(stage.one(taken) == 2, "the old rows were not in hand")
    [first] = [number for number, text in stage.texts.items() if text == "the old text"]
    stage.texts[first] = "the new text"
    stage.send([first])
    stage.start_sweeper()
    stage.rows("UPDATE holdfast.item_sinks SET next_attempt_at = now()")
    hung = "SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE pid IN (SELECT pid FROM"
    stage.rows(f"{hung} pg_locks WHERE locktype = 'advisory' AND classid = {0x666F6C6C})")
    wait_until_followed(stage)
    written = search.documents()[str(first)]
    struck(written["text"] == "the new text", "the new text was not there first")

    held.release()
    os.kill(old.pid, signal.SIGCONT)
    assert old.stop() == 0
    wait_until_followed(stage)

    stage.sent_again = 1
    check_both(stage, search)


def test_f30_a_sweeper_killed_in_the_middle_of_a_write_leaves_it_to_the_next(
    followed_stage: Stage, search: Search
) -> None:
    stage = followed_stage
    sweeper = stage.start_sweeper()
    stage.start_worker()
    search.once(Scripted(applied=True, is_silent=True))
    stage.post(*numbered(120))
    wait_until_struck(lambda: search.bulks, "nothing was written")
    sweeper.kill()
    stage.end_fault()
    stage.start_sweeper()
    stage.wait_until_final()
    stage.rows("UPDATE holdfast.item_sinks SET next_attempt_at = now() WHERE status = 'pending'")
    wait_until_followed(stage)

    assert set(search.writes.values()) == {1}
    check_both(stage, search)


def test_v26_to_v28_one_is_refused_two_are_busy_and_the_index_vanishes(
    followed_stage: Stage, search: Search
) -> None:
    stage = followed_stage
    stage.start_worker()
    search.item_faults["3"] = deque([(400, "mapper_parsing_exception", "failed to parse")])
    for busy in ("5", "6"):
        search.item_faults[busy] = deque([(429, "es_rejected_execution_exception", "full")])
    job_id = stage.post(*numbered(10))
    stage.wait_until_final()
    stage.start_sweeper()
    wait_for(lambda: len(search.documents()) == 9, DRAIN_SECONDS)

    assert sorted(search.bulks[0], key=int) == [str(number) for number in range(1, 11)]
    again = [each for bulk in search.bulks[1:] for each in bulk]
    assert sorted(again) == ["5", "6"]  # alone, and nothing else again
    shown: list[dict[str, Any]] = stage.door.items(job_id)
    states = [each["sinks"]["opensearch"]["status"] for each in shown]
    assert states == ["done", "done", "failed", *["done"] * 7]
    assert [each["sinks"]["pgvector"]["status"] for each in shown] == ["done"] * 10
    assert "store_reject: 400 mapper_parsing_exception" in shown[2]["sinks"]["opensearch"]["error"]

    search.indexes.clear()
    answer = stage.door.send(f"/api/job/{job_id}/requeue", {})
    assert (answer.status, answer.json["requeued"]) == (202, 1)
    stage.post(*numbered(5, "more"))
    wait_until_followed(stage)
    [index] = search.indexes.values()
    assert index.vector["type"] == "knn_vector"
    assert sorted(index.documents) == sorted(["3", "11", "12", "13", "14", "15"])
    stage.check()


def command(stage: Stage, *words: str) -> tuple[int, str]:
    """Run an operator's command to its end."""
    running = stage.start_process("worker", *words)
    return running.wait(), running.said


@pytest.mark.slow
def test_what_was_done_behind_its_back_is_found_and_repaired_by_the_operator_s_commands(
    followed_stage: Stage, search: Search
) -> None:
    stage = followed_stage
    stage.rows("UPDATE holdfast.embedding_targets SET text_column = 'body'")
    stage.start_sweeper()
    stage.start_worker()
    stage.post(*numbered(600))
    body = "UPDATE ai_insights SET body = q.text_content FROM embedding_retry_queue q"
    stage.rows(f"{body} WHERE q.target_id = ai_insights.id::text")
    stage.wait_until_final()
    wait_until_followed(stage)
    [index] = search.indexes.values()
    stage.rows("DELETE FROM ai_insights WHERE id <= 50")
    for number in range(101, 151):
        del index.documents[str(number)]
    for number in range(9001, 9021):
        index.documents[str(number)] = (1, {"target_id": str(number), "content_hash": "0"})
    stage.rows("UPDATE ai_insights SET body = 'changed ' || body WHERE id BETWEEN 201 AND 230")
    sent = sum(call.items for call in stage.fake.calls)

    status, verified = command(stage, "verify", "ai_insights")
    assert status == 1, verified
    for line in ("520 current", "50 gone", "30 stale", "550 current", "50 missing", "20 orphan"):
        assert line in verified, verified
    status, repaired = command(stage, "repair", "ai_insights")
    assert status == 0, repaired
    changed = "SELECT count(*) FROM holdfast.jobs WHERE client = 'repair' AND finished_at IS NULL"
    wait_for(lambda: not stage.one(changed) and not stage.one(FOLLOWING), DRAIN_SECONDS)
    status, after = command(stage, "verify", "ai_insights")

    embedded = sum(call.items for call in stage.fake.calls) - sent
    for name, value in (("verify", verified), ("repair", repaired), ("after", after)):
        stage.record(name, value.splitlines())
    stage.record("texts_embedded", embedded)
    assert (status, embedded) == (0, 30), after
    assert after.count("550 current") == 2
    assert len(search.documents()) == 550
    assert search.documents()["201"]["text"] == "changed text 200"


def test_lancedb_follows_in_a_real_sweeper(
    environ: dict[str, str], tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    lancedb = pytest.importorskip("lancedb")
    environ |= {"SINKS": "pgvector,lancedb", "LANCEDB_PATH": str(tmp_path / "lance")}
    stage: Stage = request.getfixturevalue("stage")
    stage.start_sweeper()
    stage.start_worker()
    stage.post(*numbered(100))
    stage.wait_until_final()
    wait_until_followed(stage)

    database = lancedb.connect(str(tmp_path / "lance"))
    [name] = database.list_tables().tables
    rows = database.open_table(name).to_arrow().to_pylist()
    assert len(rows) == 100
    for row in rows:
        right = vector_of(MODEL, stage.texts[int(row["target_id"])], stage.fake.dimension)
        assert float32(row["vector"]) == right
    stage.check()
