"""DELETE /api/items, and the same inside the database: vectors go, and nothing brings them back."""

import json
from collections.abc import Iterator

import psycopg
import pytest

from app.adapters.sinks.pgvector import build as build_primary
from tests.api import (  # noqa: F401 - fixtures among them
    TARGET,
    VERSION,
    Answer,
    Door,
    Ground,
    item,
    make_backend,
    make_door,
    make_ground,
)
from tests.fakes import Fake
from tests.shelf import NAME, Shelf
from worker.sweep.followers import Follower


@pytest.fixture
def followed(ground: Ground) -> Iterator[Ground]:
    """Give the same ground with a sink that follows."""
    opened = ground.reopened(SINKS=f"pgvector,{NAME}")
    yield opened
    opened.close()


@pytest.fixture
def shelf() -> Shelf:
    return Shelf()


def follow(ground: Ground, shelf: Shelf) -> None:
    follower = Follower(ground.ctx, build_primary(), NAME, shelf)
    while follower.run_once():
        pass


def delete(door: Door, *ids: object, table: str = TARGET) -> Answer:
    return send(door, {"target_table": table, "target_ids": list(ids)})


def send(door: Door, value: object) -> Answer:
    content = json.dumps(value).encode()
    return door.ask("DELETE", "/api/items", {"Content-Type": "application/json"}, content)


def counts_of(door: Door, job_id: str) -> dict[str, int]:
    found: dict[str, int] = door.job(job_id)["counts"]
    return {name: number for name, number in found.items() if number and name != "total"}


def test_a_vector_goes_from_every_sink_and_the_job_stays_told(
    followed: Ground, door: Door, backend: Fake, shelf: Shelf
) -> None:
    del backend
    door = followed.door()
    one, two = followed.new_rows(2)
    job_id = followed.done(door, [item(one, "one"), item(two, "two")])
    follow(followed, shelf)
    assert set(shelf.texts()) == {str(one), str(two)}

    answer = delete(door, one, str(one), 999_999)
    follow(followed, shelf)

    assert (answer.status, answer.json) == (200, {"deleted": 1, "cancelled": 0, "missing": 1})
    assert followed.vectors(one, two)[one] is None
    assert followed.vectors(one, two)[two] is not None
    assert set(shelf.texts()) == {str(two)}
    assert counts_of(door, job_id) == {"done": 2}
    assert [line["outcome"] for line in door.result(job_id)] == ["done", "done"]


def test_the_same_text_again_is_no_duplicate_and_comes_back_everywhere(
    followed: Ground, backend: Fake, shelf: Shelf
) -> None:
    door = followed.door()
    [one] = followed.new_rows(1)
    followed.done(door, [item(one, "one")])
    follow(followed, shelf)
    delete(door, one)
    follow(followed, shelf)
    assert shelf.texts() == {}

    before = len(backend.arrivals["one"])
    again = door.post([item(one, "one")])
    followed.work(again.job_id)
    follow(followed, shelf)

    assert (again.json["accepted"], again.json["duplicates"]) == (1, 0)
    assert followed.vectors(one)[one] is not None
    assert shelf.texts() == {str(one): "one"}
    assert len(backend.arrivals["one"]) == before + 1


def test_what_waits_is_cancelled_and_what_is_in_hand_writes_nothing(
    ground: Ground, door: Door, backend: Fake
) -> None:
    del backend
    one, two = ground.new_rows(2)
    job_id = door.post([item(one, "one"), item(two, "two")]).job_id
    ground.hold(job_id)  # claimed by a worker
    lease = "SELECT lease_token FROM embedding_retry_queue WHERE target_id = %s"
    assert ground.rows(lease, str(one))[0]["lease_token"] is not None

    answer = delete(door, one)

    assert answer.json == {"deleted": 0, "cancelled": 1, "missing": 0}
    assert ground.rows(lease, str(one))[0]["lease_token"] is None
    ground.let_go(job_id)
    ground.work(job_id)
    assert ground.vectors(one, two)[one] is None
    assert counts_of(door, job_id) == {"done": 1, "cancelled": 1}


def test_a_failed_item_is_left_to_a_person(ground: Ground, door: Door, backend: Fake) -> None:
    del backend
    [one] = ground.new_rows(1)
    job_id = door.post([item(one, "refuse this")]).job_id
    ground.work(job_id)

    assert delete(door, one).json == {"deleted": 0, "cancelled": 0, "missing": 1}
    assert counts_of(door, job_id) == {"failed": 1}


@pytest.mark.parametrize(
    ("sent", "field", "code"),
    [
        ({"target_table": "nowhere", "target_ids": [1]}, "target_table", "target_unknown"),
        ({"target_table": TARGET, "target_ids": []}, "target_ids", "too_short"),
        ({"target_table": TARGET, "target_ids": ["042"]}, "target_ids", "id_invalid"),
        ({"target_table": TARGET, "target_ids": [1, "x"]}, "target_ids", "id_invalid"),
        ({"target_table": TARGET, "target_ids": ["\ud800"]}, "target_ids", None),
        ({"target_table": TARGET, "target_ids": [True]}, "target_ids.0", None),
        ({"target_table": TARGET}, "target_ids", "missing"),
        ({"target_table": TARGET, "target_ids": [1], "more": 1}, "more", "unknown_field"),
    ],
)
def test_bad_input_deletes_nothing_and_is_named(
    ground: Ground, door: Door, backend: Fake, sent: object, field: str, code: str | None
) -> None:
    del backend
    [one] = ground.new_rows(1)
    ground.done(door, [item(one, "one")])

    answer = send(door, sent)

    assert answer.status in (400, 422), answer.body
    if code:
        assert (answer.faults[0]["field"], answer.faults[0]["code"]) == (field, code)
    assert ground.vectors(one)[one] is not None


def test_a_target_that_is_bound_to_another_client_does_not_exist(ground: Ground) -> None:
    ground.rows(
        "UPDATE holdfast.embedding_targets SET client = 'acme' WHERE target_table = %s",
        "conversations",
    )
    try:
        answers = [
            delete(ground.door(client, "submit"), 1, table=table)
            for client, table in (("bob", "conversations"), ("bob", "nowhere"))
        ]
        assert answers[0].status == answers[1].status == 422
        assert answers[0].json["errors"] == answers[1].json["errors"]
        assert delete(ground.door("acme", "submit"), 1, table="conversations").status == 200
    finally:
        ground.rows("UPDATE holdfast.embedding_targets SET client = NULL")
    assert delete(ground.door("reader", "read"), 1).status == 403


def test_the_door_inside_the_database_is_part_of_the_caller_s_transaction(
    followed: Ground, backend: Fake, shelf: Shelf
) -> None:
    del backend
    door = followed.door()
    one, two = followed.new_rows(2)
    followed.done(door, [item(one, "one"), item(two, "two")])
    follow(followed, shelf)
    gone = "DELETE FROM ai_insights WHERE id = %s"
    with psycopg.connect(followed.environ["DATABASE_URL"]) as connection:
        connection.execute(gone, (one,))
        found = connection.execute("SELECT delete_embedding(%s, %s)", (TARGET, str(one)))
        assert found.fetchone() == (True,)
        connection.rollback()
    follow(followed, shelf)
    assert set(shelf.texts()) == {str(one), str(two)}

    with psycopg.connect(followed.environ["DATABASE_URL"]) as connection:
        connection.execute(gone, (one,))
        connection.execute("SELECT delete_embedding(%s, %s)", (TARGET, str(one)))
        found = connection.execute("SELECT delete_embedding(%s, %s)", (TARGET, str(two)))
        assert found.fetchone() == (True,)
    follow(followed, shelf)
    assert shelf.texts() == {}
    assert followed.vectors(two)[two] is None


@pytest.mark.parametrize(
    ("table", "target_id", "said"),
    [
        ("nowhere", "1", "not a registered target"),
        (TARGET, "042", "not an id of type bigint"),
        (TARGET, None, "not an id"),
        (None, "1", "not a registered target"),
    ],
)
def test_the_door_inside_the_database_names_what_is_wrong(
    ground: Ground, table: str | None, target_id: str | None, said: str
) -> None:
    with (
        psycopg.connect(ground.environ["DATABASE_URL"]) as connection,
        pytest.raises(psycopg.Error, match=said),
    ):
        connection.execute("SELECT delete_embedding(%s, %s)", (table, target_id))


def test_nobody_may_use_it_who_was_not_granted(ground: Ground) -> None:
    query = """SELECT has_function_privilege('public', oid, 'EXECUTE') AS may FROM pg_proc
                WHERE proname IN ('delete_embedding', 'withdraw')"""
    assert [row["may"] for row in ground.rows(query)] == [False, False]
    assert VERSION
