"""POST /api/embeddings: what is accepted, how it is counted, and the same request once more."""

import socket
import struct
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from random import Random
from threading import Barrier, Event
from typing import Any

import pytest

from app.core.errors import InvalidRequest
from app.web import body
from tests.api import (  # noqa: F401 - fixtures among them
    LINES,
    MODEL,
    REFUSED,
    TARGET,
    VERSION,
    Answer,
    Door,
    Ground,
    Served,
    as_line,
    item,
    make_backend,
    make_door,
    make_ground,
    make_served,
)
from tests.processes import wait_for

SKIP = "?on_invalid=skip"
COUNTED = ("accepted", "duplicates", "rejected")


def counted(answer: Answer) -> tuple[int, ...]:
    assert answer.status == 202, answer.body
    return tuple(answer.json[name] for name in COUNTED)


def queued(ground: Ground, target_id: object) -> dict[str, Any]:
    """Return the one row of the queue for a row of the target."""
    query = "SELECT * FROM public.embedding_retry_queue WHERE target_id = %s"
    [row] = ground.rows(query, str(target_id))
    return row


# ---- the answer


def test_a_batch_is_accepted_with_the_way_to_its_job(ground: Ground, door: Door) -> None:
    answer = door.post(ground.new_items("one", "two"))

    assert answer.status == 202
    link = f"/api/job/{answer.job_id}"
    assert answer.headers["location"] == link
    assert int(answer.headers["retry-after"]) >= 1
    assert answer.job_id.startswith("emb-")
    assert answer.json == {
        "job_id": answer.job_id,
        "kind": "embedding",
        "async": True,
        "state": "queued",
        "status_url": link,
        "result_url": f"{link}/result",
        "accepted": 2,
        "duplicates": 0,
        "rejected": 0,
        "errors": [],
        "estimated_seconds": answer.json["estimated_seconds"],
    }
    assert door.job(answer.job_id)["counts"]["pending"] == 2


def test_nothing_is_estimated_without_history_and_seconds_with_it(ground: Ground) -> None:
    ground.rows("TRUNCATE holdfast.slices")
    without = ground.door().post(ground.new_items("one"))
    ground.done(ground.door(), ground.new_items("two"))
    with_history = ground.door().post(ground.new_items("three"))

    assert without.json["estimated_seconds"] is None
    assert isinstance(with_history.json["estimated_seconds"], int)


def test_accepted_duplicates_and_rejected_add_up_to_what_was_sent(
    ground: Ground, door: Door
) -> None:
    first, second, third = ground.new_items("one", "two", "three")
    door.post([first])

    answer = door.post(
        [first, second, third, second, item("042", "x"), {**third, "text": ""}], SKIP
    )

    assert counted(answer) == (2, 2, 2)
    assert answer.places == [(4, "target_id", "id_invalid"), (5, "text", "text_empty")]
    assert door.job(answer.job_id)["counts"]["total"] == 4


def test_of_two_texts_for_one_key_the_last_one_counts(ground: Ground, door: Door) -> None:
    [number] = ground.new_rows(1)

    answer = door.post([item(number, "first"), item(number, "second"), item(number, "third")])

    assert counted(answer) == (1, 2, 0)
    assert queued(ground, number)["text_content"] == "third"
    ground.work(answer.job_id)
    assert [line["outcome"] for line in door.result(answer.job_id)] == [
        "superseded",
        "superseded",
        "done",
    ]


@pytest.mark.parametrize("status", ["pending", "processing", "done", "failed"])
def test_the_same_text_once_more_is_a_duplicate_and_changes_nothing(
    ground: Ground, door: Door, status: str
) -> None:
    [one] = ground.new_items(REFUSED if status == "failed" else "the same")
    first = door.post([one]).job_id
    if status in ("done", "failed"):
        ground.work(first)
    elif status == "processing":
        ground.hold(first)
    before = queued(ground, one["target_id"])
    assert before["status"] == status

    answer = ground.door().post([one])

    assert counted(answer) == (0, 1, 0)
    assert queued(ground, one["target_id"]) == before


def test_a_duplicate_belongs_to_both_jobs(ground: Ground, door: Door) -> None:
    [one] = ground.new_items("shared")
    first, second = door.post([one]).job_id, door.post([one]).job_id

    ground.work(first)

    assert door.job(second)["state"] == "completed"
    assert door.result(first) == door.result(second)
    assert [shown["status"] for shown in door.items(second)] == ["done"]


def test_a_batch_of_finished_duplicates_is_final_at_once(ground: Ground, door: Door) -> None:
    batch = ground.new_items("one", REFUSED)
    ground.done(door, batch)

    answer = door.post(batch)

    assert counted(answer) == (0, 2, 0)
    assert answer.json["state"] == "completed_with_errors"
    assert door.job(answer.job_id)["finished_at"]
    assert [line["outcome"] for line in door.result(answer.job_id)] == ["done", "failed"]


def test_a_changed_text_is_queued_again_with_a_fresh_allowance(ground: Ground, door: Door) -> None:
    [old] = ground.new_items("old")
    first = ground.done(door, [old])
    new = {**old, "text": "new"}

    answer = door.post([new])

    assert counted(answer) == (1, 0, 0)
    row = queued(ground, old["target_id"])
    assert (row["status"], row["attempts"], row["max_attempts"]) == ("pending", 1, None)
    assert [line["outcome"] for line in door.result(first)] == ["superseded"]
    ground.work(answer.job_id)
    assert [line["outcome"] for line in door.result(answer.job_id)] == ["done"]


def test_a_cancelled_or_skipped_item_is_queued_again(ground: Ground, door: Door) -> None:
    [cancelled] = ground.new_items("cancelled")
    door.send(f"/api/job/{door.post([cancelled]).job_id}/cancel")
    skipped = item(next(ground.target_ids), "its row comes later")
    ground.done(door, [skipped])

    assert counted(door.post([cancelled, skipped])) == (2, 0, 0)


# ---- how items are given


def test_a_text_is_stored_byte_for_byte(ground: Ground, door: Door) -> None:
    text = " \U0001f44d\U0001f3fd e\u0301 \u00e9 \u202e\ufeff\u2028\r\n\t\\ \x01 \U0010ffff "
    batch = ground.new_items(text)

    door.post(batch)

    assert queued(ground, batch[0]["target_id"])["text_content"] == text


def test_an_id_is_a_string_or_an_integer_and_comes_back_as_a_string(
    ground: Ground, door: Door
) -> None:
    one, two = ground.new_rows(2)

    job_id = ground.done(door, [item(one, "a"), item(str(two), "b")])

    assert [shown["target_id"] for shown in door.items(job_id)] == [str(one), str(two)]
    assert [line["target_id"] for line in door.result(job_id)] == [str(one), str(two)]


def test_the_longest_ids_that_a_text_column_takes_are_kept(ground: Ground, door: Door) -> None:
    ground.add_target("codes", "text")
    names = Random(7)  # noqa: S311 - no secret
    ids = ["".join(chr(names.randrange(0x1F300, 0x1F600)) for _ in range(512)) for _ in range(3)]
    ground.rows("INSERT INTO codes (id) SELECT unnest(%s::text[])", ids)
    batch = [{"target_table": "codes", "target_id": each, "text": "a"} for each in ids]

    job_id = ground.done(door, batch)

    assert [line["target_id"] for line in door.result(job_id)] == ids
    assert door.job(job_id)["counts"]["done"] == 3


def test_the_options_of_a_batch_are_stored(ground: Ground, door: Door) -> None:
    [one] = ground.new_items("one")
    answer = door.post(
        [one],
        model=MODEL,
        embedding_version=VERSION,
        project="crm",
        priority=-10,
        return_vectors=True,
    )

    row = queued(ground, one["target_id"])
    assert (row["model"], row["embedding_version"]) == (MODEL, VERSION)
    assert (row["project"], row["priority"]) == ("crm", -10)
    [job] = ground.rows("SELECT * FROM holdfast.jobs WHERE id = %s", answer.job_id)
    assert (job["project"], job["priority"], job["return_vectors"]) == ("crm", -10, True)


def test_a_version_of_a_target_that_is_not_current_is_reached_by_its_name(
    ground: Ground, door: Door
) -> None:
    register_second_version(ground)
    one, two = ground.new_items("one", "two")

    ground.done(door, [one])
    ground.done(door, [two], embedding_version=VERSION)

    assert queued(ground, one["target_id"])["embedding_version"] == "second"
    assert queued(ground, two["target_id"])["embedding_version"] == VERSION
    ground.rows("DELETE FROM holdfast.embedding_targets WHERE embedding_version = 'second'")
    ground.rows("UPDATE holdfast.embedding_targets SET is_current = true")


def register_second_version(ground: Ground) -> None:
    ground.rows(f"ALTER TABLE {TARGET} ADD COLUMN second vector(8)")
    ground.rows(
        "UPDATE holdfast.embedding_targets SET is_current = false WHERE target_table = %s", TARGET
    )
    ground.rows(
        """INSERT INTO holdfast.embedding_targets
                  (target_table, embedding_version, table_schema, table_name, id_column, id_type,
                   vector_column, dimension, model)
           VALUES (%s, 'second', 'public', %s, 'id', 'bigint', 'second', 8, 'another')""",
        TARGET,
        TARGET,
    )


def test_a_target_bound_to_a_client_takes_that_clients_items_only(ground: Ground) -> None:
    ground.rows(
        "UPDATE holdfast.embedding_targets SET client = 'owner'"
        " WHERE target_table = 'conversations'"
    )
    batch = [{"target_table": "conversations", "target_id": 1, "text": "one"}]

    owners, strangers = ground.door("owner").post(batch), ground.door().post(batch)

    assert owners.status == 202
    assert strangers.status == 422
    assert strangers.places == [(0, "target_table", "target_unknown")]


# ---- lines


def test_lines_are_stored_as_the_same_items_in_json_are(ground: Ground) -> None:
    texts = ["one", "zwei \u00fc", "\u4e09 \U0001f44d", "vier"]
    more: list[dict[str, Any]] = [
        {},
        {"custom_id": "second"},
        {"metadata": {"page": 3, "tags": ["a"]}},
        {},
    ]
    as_json, as_lines = (
        [{**each, **extra} for each, extra in zip(ground.new_items(*texts), more, strict=True)]
        for _ in range(2)
    )

    one = ground.door().post(as_json, project="crm", priority=3, return_vectors=True)
    query = "?project=crm&priority=3&return_vectors=true"
    other = ground.door().post_lines(as_lines, query)

    assert counted(one) == counted(other) == (4, 0, 0)
    assert stored(ground, one.job_id) == stored(ground, other.job_id)
    assert one.json.keys() == other.json.keys()


def stored(ground: Ground, job_id: str) -> list[dict[str, Any]]:
    """Return what a batch left in Postgres, without what differs by chance."""
    return ground.rows(
        """SELECT i.position, i.custom_id, i.metadata, i.content_hash, q.text_content, q.model,
                  q.embedding_version, q.status, q.project, q.priority, j.return_vectors
             FROM holdfast.job_items i
             JOIN public.embedding_retry_queue q ON q.id = i.item_id
             JOIN holdfast.jobs j ON j.id = i.job_id
            WHERE i.job_id = %s ORDER BY i.position""",
        job_id,
    )


def test_lines_may_end_by_crlf_and_the_last_one_by_nothing(ground: Ground, door: Door) -> None:
    one, two = ground.new_items("one", "two")

    answer = door.post_lines([as_line(one).replace(b"\n", b"\r\n"), as_line(two).rstrip()])

    assert counted(answer) == (2, 0, 0)


@pytest.mark.parametrize("blank", [b"\n", b"\r\n", b"  \n"])
def test_a_blank_line_is_refused_by_its_number(ground: Ground, door: Door, blank: bytes) -> None:
    lines = [*ground.new_items("one"), blank, *ground.new_items("two")]

    refused, skipped = door.post_lines(lines), door.post_lines(lines, SKIP)

    assert refused.status == 422
    assert [(each["line"], each["code"]) for each in refused.faults] == [(2, "malformed_json")]
    assert counted(skipped) == (2, 0, 1)
    assert skipped.faults == refused.faults


def test_the_bad_lines_are_named_and_the_good_ones_kept_where_that_was_asked_for(
    ground: Ground, door: Door
) -> None:
    good = ground.new_items("one", "two")
    lines = [good[0], b'{"target_id": NaN}\n', b"[1]\n", b"\xff\n", good[1]]

    answer = door.post_lines(lines, SKIP)

    assert counted(answer) == (2, 0, 3)
    assert [(each["line"], each["index"], each["code"]) for each in answer.faults] == [
        (2, 1, "malformed_json"),
        (3, 2, "wrong_type"),
        (4, 3, "malformed_json"),
    ]
    assert [shown["index"] for shown in door.items(answer.job_id)] == [0, 4]


# ---- what is wrong with items


def test_one_bad_item_refuses_the_batch_and_every_bad_one_is_named(
    ground: Ground, door: Door
) -> None:
    good = ground.new_items("one", "two")
    before = ground.sizes()

    answer = door.post([good[0], item(1, ""), good[1], item("x", "\0"), {"text": 3}])

    assert answer.status == 422
    assert answer.code == "invalid_request"
    assert [index for index, _, _ in answer.places] == [1, 3, 3, 4, 4, 4]
    assert ground.sizes() == before


def test_no_more_than_a_thousand_faults_are_named_but_all_are_counted(door: Door) -> None:
    answer = door.post([item(number, "") for number in range(1500)])

    assert answer.status == 422
    assert len(answer.faults) == 1000
    assert "1500 of 1500" in answer.json["detail"]


def test_every_repeated_custom_id_is_rejected_however_many_there_are(
    ground: Ground, door: Door
) -> None:
    numbers = ground.new_rows(2500)
    batch = [item(number, "a", custom_id="same") for number in numbers]

    refused, skipped = door.post(batch), door.post(batch, SKIP)

    assert "2499 of 2500" in refused.json["detail"]
    assert counted(skipped) == (1, 0, 2499)
    assert refused.places[0] == (1, "custom_id", "custom_id_repeated")
    assert ground.rows(
        "SELECT count(*) AS n FROM holdfast.job_items WHERE job_id = %s", skipped.job_id
    ) == [{"n": 1}]


def test_a_batch_without_a_good_item_is_refused_in_both_ways(door: Door) -> None:
    for query in ("", SKIP):
        assert door.post([], query).places == [(None, "items", "no_items")]
        assert door.post_lines([], query).places == [(None, "items", "no_items")]
        assert door.post([item(1, "")], query).places == [(0, "text", "text_empty")]


# ---- limits


def test_a_batch_over_the_limit_on_items_is_refused_and_as_lines_accepted(ground: Ground) -> None:
    small = ground.reopened(MAX_BATCH_ITEMS="2")
    batch = ground.new_items("one", "two", "three")

    answer = small.door().post(batch)

    assert answer.places == [(None, "items", "too_many_items")]
    assert counted(small.door().post(batch[:2])) == (2, 0, 0)
    assert counted(small.door().post_lines(batch)) == (1, 2, 0)
    small.close()


def test_a_text_may_have_as_many_bytes_as_the_limit_says(ground: Ground) -> None:
    small = ground.reopened(MAX_TEXT_BYTES="6")
    fits, is_over = ground.new_items("\u00e4\u00f6\u00fc", "\u00e4\u00f6\u00fc!")

    assert small.door().post([fits]).status == 202
    assert small.door().post([is_over]).places == [(0, "text", "text_too_long")]
    small.close()


def test_a_client_with_too_many_open_items_is_told_when_to_come_back(ground: Ground) -> None:
    small = ground.reopened(QUEUE_MAX_PER_CLIENT="2")
    door, batch = small.door(), ground.new_items("one", "two", "three")
    door.post(batch[:2])

    answer = door.post(batch[2:])

    assert (answer.status, answer.code) == (429, "too_many_queued")
    assert int(answer.headers["retry-after"]) > 0
    assert small.door().post(batch[2:]).status == 202  # another client
    small.close()


def test_more_streams_than_one_process_reads_are_sent_away_for_a_moment(ground: Ground) -> None:
    small = ground.reopened(MAX_STREAMS="1")
    batch = ground.new_items("one")
    assert small.app.extensions["streams"].acquire(blocking=False)

    answer = small.door().post_lines(batch)

    assert (answer.status, answer.code) == (429, "too_many_queued")
    assert int(answer.headers["retry-after"]) > 0
    small.app.extensions["streams"].release()
    assert small.door().post_lines(batch).status == 202
    small.close()


# ---- the same request once more

KEY = {"Idempotency-Key": "a key of the client's own"}


@pytest.mark.parametrize("as_lines", [False, True])
def test_a_repeated_request_gets_the_first_answer_byte_for_byte(
    ground: Ground,
    door: Door,
    as_lines: bool,  # noqa: FBT001 - a parameter of the test
) -> None:
    batch = ground.new_items("one", "two")
    post = door.post_lines if as_lines else door.post
    first = post(batch, "", KEY)
    ground.work(first.job_id)
    before = ground.sizes()

    again = post(batch, "", KEY)

    assert (again.status, again.body) == (202, first.body)
    assert again.headers["location"] == first.headers["location"]
    assert ground.sizes() == before


def test_a_key_is_bound_to_path_query_and_body(ground: Ground, door: Door) -> None:
    one, two = ground.new_items("one", "two")
    first = door.post([one], "", KEY)
    before = ground.sizes()

    others = [
        door.post([two], "", KEY),
        door.post([one], "?on_invalid=refuse", KEY),
        door.post([one], "", KEY, priority=1),
        door.post_lines([one], "", KEY),
        door.post([], "", KEY),
    ]

    assert [(other.status, other.code) for other in others] == [(422, "idempotency_key_reused")] * 5
    assert ground.sizes() == before
    assert door.post([one], "", KEY).body == first.body


def test_a_refused_request_does_not_use_its_key_up(ground: Ground, door: Door) -> None:
    [one] = ground.new_items("one")
    assert door.post([item(1, "")], "", KEY).status == 422

    assert counted(door.post([one], "", KEY)) == (1, 0, 0)


def test_the_same_key_of_another_client_is_another_key(ground: Ground) -> None:
    one, two = ground.new_items("one", "two")

    answers = [ground.door().post([each], "", KEY) for each in (one, two)]

    assert [counted(answer) for answer in answers] == [(1, 0, 0)] * 2


def test_a_key_holds_for_seven_days(ground: Ground, door: Door) -> None:
    one, two = ground.new_items("one", "two")
    first = door.post([one], "", KEY)
    age = "UPDATE holdfast.idempotency_keys SET created_at = now() - %s::interval WHERE job_id = %s"

    ground.rows(age, "6 days 23 hours", first.job_id)
    assert door.post([one], "", KEY).body == first.body
    ground.rows(age, "7 days 1 minute", first.job_id)

    assert counted(door.post([two], "", KEY)) == (1, 0, 0)


@pytest.mark.parametrize("key", ["", "x" * 256, "\u00e9", "tab\there"])
def test_a_key_that_cannot_be_kept_is_refused(ground: Ground, door: Door, key: str) -> None:
    before = ground.sizes()

    answer = ground.app.test_client().post(
        "/api/embeddings",
        json={"items": [item(1, "one")]},
        headers={"Authorization": f"Bearer {door.key}", "Idempotency-Key": key},
    )

    assert answer.status_code == 422
    assert answer.json
    assert [(each["field"], each["code"]) for each in answer.json["errors"]] == [
        ("Idempotency-Key", "wrong_form")
    ]
    assert ground.sizes() == before


def test_fifty_posts_at_once_with_one_key_make_one_job(ground: Ground, served: Served) -> None:
    batch = ground.new_items("one", "two", "three")
    key, start = ground.door().key, Barrier(50)
    before = ground.sizes()

    def accepted(door: Door) -> Answer | None:
        answer = door.post(batch, "", KEY)
        if answer.status == 409:
            assert answer.code == "idempotency_in_progress"
            assert "retry-after" in answer.headers
            return None
        return answer

    def post(_: int) -> Answer:
        door = served.door(
            key
        )  # a client for each: one pool of fifty threads closes the wrong socket
        start.wait()
        found = wait_for(lambda: accepted(door), 60)
        assert found
        return found

    with ThreadPoolExecutor(50) as pool:
        answers = list(pool.map(post, range(50)))

    assert Counter(answer.status for answer in answers) == {202: 50}
    assert len({answer.body for answer in answers}) == 1
    after = ground.sizes()
    assert {name: after[name] - before[name] for name in after} == {
        "jobs": 1,
        "links": 3,
        "counts": 1,
        "keys": 1,
        "items": 3,
    }


def test_a_key_whose_request_is_still_being_stored_is_refused_for_a_moment(
    ground: Ground, served: Served
) -> None:
    one, two = ground.new_items("one", "two")
    door, is_told, may_end = served.door(ground.door().key), Event(), Event()

    def lines() -> Iterator[bytes]:
        yield as_line(one)
        is_told.set()
        assert may_end.wait(30)
        yield as_line(two)

    with ThreadPoolExecutor(1) as pool:
        streaming = pool.submit(door.post_raw, lines(), "", {"Content-Type": LINES, **KEY})
        assert is_told.wait(30)
        wait_for(lambda: holds_key(ground))
        meanwhile = door.post_lines([one, two], "", KEY)
        may_end.set()
        first = streaming.result()

    assert (meanwhile.status, meanwhile.code) == (409, "idempotency_in_progress")
    assert counted(first) == (2, 0, 0)
    again = door.post_raw(as_line(one) + as_line(two), "", {"Content-Type": LINES, **KEY})
    assert again.body == first.body


def holds_key(ground: Ground) -> bool:
    query = """SELECT l.pid FROM pg_locks l JOIN pg_database d ON d.oid = l.database
                WHERE l.locktype = 'advisory' AND d.datname = current_database()"""
    return bool(ground.rows(query))


# ---- Prefer


def test_a_small_batch_that_ends_in_time_is_answered_with_its_result(
    ground: Ground, door: Door
) -> None:
    batch = ground.new_items("one", REFUSED)
    before = {row["id"] for row in ground.rows("SELECT id FROM holdfast.jobs")}

    def new_jobs() -> list[str]:
        rows = ground.rows("SELECT id FROM holdfast.jobs")
        return [row["id"] for row in rows if row["id"] not in before]

    with ThreadPoolExecutor(1) as pool:
        prefer = {"Prefer": "respond-async, wait=30"}
        posting = pool.submit(door.post, batch, "", prefer, return_vectors=True)
        [job_id] = wait_for(new_jobs)
        ground.work(job_id)
        answer = posting.result()

    assert answer.status == 200
    assert answer.headers["preference-applied"] == "wait=30"
    assert answer.headers["location"] == f"/api/job/{job_id}"
    assert answer.json == door.get(f"/api/job/{job_id}/result").json
    assert [line["outcome"] for line in answer.json["items"]] == ["done", "failed"]


def test_a_batch_that_does_not_end_in_time_is_accepted(ground: Ground, door: Door) -> None:
    answer = door.post(ground.new_items("one"), "", {"Prefer": "wait=1"})

    assert counted(answer) == (1, 0, 0)
    assert "preference-applied" not in answer.headers


@pytest.mark.parametrize("prefer", ["wait=0", "WAIT = 5", "foo, wait=999"])
def test_what_is_final_at_once_needs_no_time(ground: Ground, door: Door, prefer: str) -> None:
    batch = ground.new_items("one")
    ground.done(door, batch)

    assert door.post(batch, "", {"Prefer": prefer}).status == 200


@pytest.mark.parametrize(
    "prefer",
    ["respond-async", "wait", "wait=", "wait=-1", "wait=1.5", "wait=x", "wait=" + "9" * 5000],
)
def test_a_preference_that_is_not_understood_is_ignored(
    ground: Ground, door: Door, prefer: str
) -> None:
    batch = ground.new_items("one")
    ground.done(door, batch)

    assert counted(door.post(batch, "", {"Prefer": prefer})) == (0, 1, 0)


# ---- what never reaches its end


def test_half_a_body_stores_nothing(ground: Ground, served: Served) -> None:
    one, two = ground.new_items("one", "two")
    key, before = ground.door().key, ground.sizes()
    whole = as_line(one) + as_line(two)

    cut = [
        (f"Content-Length: {len(whole)}", whole[: len(as_line(one))]),
        (f"Content-Length: {len(whole)}", whole[:-5]),
        ("Transfer-Encoding: chunked", chunk(whole)),
        ("Transfer-Encoding: chunked", chunk(whole)[:-7]),
        ("Transfer-Encoding: chunked", chunk(whole) + b"zz\r\n"),
    ]
    answers = [served.exchange(request_head(key, length) + body) for length, body in cut]

    assert [answer.split()[1] for answer in answers] == [b"400"] * 5, answers
    assert all(b'"code":"bad_request"' in answer for answer in answers)
    assert ground.sizes() == before


def test_a_client_that_leaves_before_its_answer_has_sent_its_batch_once(
    ground: Ground, served: Served
) -> None:
    one, two = ground.new_items("one", "two")
    door, before = served.door(ground.door().key), ground.sizes()["jobs"]
    whole = as_line(one) + as_line(two)
    head = request_head(
        door.key, f"Content-Length: {len(whole)}", *(f"{n}: {v}" for n, v in KEY.items())
    )

    with socket.create_connection(served.address) as link:
        link.sendall(head + whole)
        link.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    wait_for(lambda: ground.sizes()["jobs"] > before)
    again = door.post_raw(whole, SKIP, {"Content-Type": LINES, **KEY})

    assert counted(again) == (2, 0, 0)
    assert ground.sizes()["jobs"] == before + 1


def test_clients_that_send_slowly_hold_nobody_up_and_are_served_at_last(
    ground: Ground, served: Served
) -> None:
    door = served.door(ground.door().key)
    bodies = [as_line(each) for each in ground.new_items("one", "two", "three")]
    links = [socket.create_connection(served.address, timeout=60) for _ in bodies]
    for link, sent in zip(links, bodies, strict=True):
        link.sendall(request_head(door.key, f"Content-Length: {len(sent)}") + sent[:-9])

    assert counted(door.post(ground.new_items("four"))) == (1, 0, 0)
    assert counted(door.post_lines(ground.new_items("five"))) == (1, 0, 0)

    for link, sent in zip(links, bodies, strict=True):
        with link:
            link.sendall(sent[-9:])
            assert link.recv(65536).startswith(b"HTTP/1.1 202 ")


def test_a_stream_that_takes_too_long_is_refused(ground: Ground) -> None:
    with (
        ground.app.test_request_context("/", method="POST", data=b"{}"),
        pytest.raises(InvalidRequest, match="longer than -1 seconds"),
    ):
        list(body.lines(line_bytes=99, limit_bytes=99, seconds=-1, seen=lambda _: None))


def chunk(data: bytes) -> bytes:
    return b"%x\r\n%b\r\n" % (len(data), data)


def request_head(key: str | None, *more: str) -> bytes:
    lines = [
        f"POST /api/embeddings{SKIP} HTTP/1.1",
        "Host: api",
        f"Authorization: Bearer {key}",
        f"Content-Type: {LINES}",
        *more,
    ]
    return "\r\n".join([*lines, "", ""]).encode()
