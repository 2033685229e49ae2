"""Items without a target: their vectors are the job's result, in Redis until its TTL ends."""

from collections.abc import Iterator
from typing import Any

import pytest
import redis

from tests.api import (  # noqa: F401 - fixtures among them
    DIMENSION,
    LINES,
    MODEL,
    Door,
    Ground,
    item,
    make_backend,
    make_door,
    make_ground,
)
from tests.fakes import Fake, vector_of

KEYS = "embedding:job:*:vectors:*"


def texts(*named: str) -> list[dict[str, Any]]:
    return [{"custom_id": f"id of {text}", "text": text} for text in named]


def result(door: Door, job_id: str, query: str = "") -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = door.get(f"/api/job/{job_id}/result{query}").json["items"]
    return found


@pytest.fixture
def link(ground: Ground) -> Iterator["redis.Redis"]:
    with redis.Redis.from_url(ground.environ["REDIS_URL"]) as link:
        link.flushdb()
        yield link


def test_the_vectors_are_the_result_in_input_order(
    ground: Ground, door: Door, backend: Fake, link: "redis.Redis"
) -> None:
    del backend
    job_id = ground.done(door, texts("one", "two", "three"))

    lines = result(door, job_id)

    assert [line["custom_id"] for line in lines] == ["id of one", "id of two", "id of three"]
    assert {(line["target_table"], line["target_id"]) for line in lines} == {(None, None)}
    for line, text in zip(lines, ("one", "two", "three"), strict=True):
        assert line["vector"] == vector_of(MODEL, text, DIMENSION)
    streamed = door.get(f"/api/job/{job_id}/result", {"Accept": LINES}).lines
    assert [line["vector"] for line in streamed] == [line["vector"] for line in lines]
    assert result(door, job_id, "?offset=1&limit=1") == lines[1:2]
    ends = {round(link.pttl(key), -3) for key in link.keys(KEYS)}
    assert len(ends) == 1
    assert max(ends) <= ground.settings.job_result_ttl_seconds * 1000
    [first, *_] = door.items(job_id)
    assert (first["target_table"], first["sinks"], first["status"]) == (None, {}, "done")
    assert ground.rows("SELECT count(*) AS n FROM holdfast.vectors WHERE target_table = ''") == [
        {"n": 0}
    ]


def test_both_kinds_may_stand_in_one_batch_and_in_lines(
    ground: Ground, door: Door, backend: Fake
) -> None:
    del backend
    [row] = ground.new_rows(1)
    sent = [*texts("free"), item(row, "bound"), *texts("free too")]
    answer = door.post_lines(sent)
    assert answer.status == 202, answer.body
    ground.work(answer.job_id)

    lines = result(door, answer.job_id)

    assert ["vector" in line for line in lines] == [True, False, True]
    assert ground.vectors(row)[row] is not None


def test_the_same_custom_id_in_two_jobs_is_two_items(
    ground: Ground, door: Door, backend: Fake
) -> None:
    del backend
    jobs = [ground.done(door, [{"custom_id": "a", "text": text}]) for text in ("one", "two")]

    vectors = [result(door, job_id)[0]["vector"] for job_id in jobs]

    assert vectors == [vector_of(MODEL, text, DIMENSION) for text in ("one", "two")]


def test_what_is_gone_from_redis_is_410_and_a_requeue_embeds_it_again(
    ground: Ground, door: Door, backend: Fake, link: "redis.Redis"
) -> None:
    job_id = ground.done(door, texts(*(f"text {number}" for number in range(5))))
    assert door.send(f"/api/job/{job_id}/requeue", {}).status == 409
    [key] = link.keys(KEYS)
    link.hdel(key, "3")
    sent = sum(call.items for call in backend.calls)

    for asked in ("", "?offset=3&limit=1"):
        assert door.get(f"/api/job/{job_id}/result{asked}").code == "result_expired"
    assert door.get(f"/api/job/{job_id}/result?offset=0&limit=3").status == 200
    again = door.send(f"/api/job/{job_id}/requeue", {})
    assert (again.status, again.json["requeued"]) == (202, 1)
    ground.work(job_id)

    assert sum(call.items for call in backend.calls) == sent + 1
    assert result(door, job_id)[3]["vector"] == vector_of(MODEL, "text 3", DIMENSION)
    assert door.job(job_id)["counts"]["done"] == 5


def test_an_emptied_redis_costs_the_result_and_nothing_else(
    ground: Ground, door: Door, backend: Fake, link: "redis.Redis"
) -> None:
    del backend
    job_id = ground.done(door, texts("one", "two"))
    link.flushdb()

    assert door.get(f"/api/job/{job_id}/result").code == "result_expired"
    assert door.job(job_id)["state"] == "completed"
    assert door.send(f"/api/job/{job_id}/requeue", {}).json["requeued"] == 2
    ground.work(job_id)
    assert len(result(door, job_id)) == 2


def test_while_redis_takes_nothing_the_items_wait_uncharged(
    ground: Ground, door: Door, backend: Fake, link: "redis.Redis"
) -> None:
    del backend
    [row] = ground.new_rows(1)
    answer = door.post([*texts("one"), item(row, "bound")])
    link.config_set("maxmemory", "1")
    try:
        ground._drain(answer.job_id)  # noqa: SLF001
        stands = "SELECT status FROM embedding_retry_queue WHERE job_id = %s ORDER BY target_table"
        assert [row["status"] for row in ground.rows(stands, answer.job_id)] == ["pending", "done"]
        [waiting] = ground.rows(
            """SELECT attempts, last_error FROM embedding_retry_queue
                WHERE status = 'pending' AND job_id = %s""",
            answer.job_id,
        )
        assert waiting["attempts"] == 0
        assert "the result cannot be kept" in waiting["last_error"]
    finally:
        link.config_set("maxmemory", "0")
    ground.work(answer.job_id)
    assert "vector" in result(door, answer.job_id)[0]


def test_no_key_is_ever_without_an_end(
    ground: Ground, door: Door, backend: Fake, link: "redis.Redis"
) -> None:
    del backend
    job_id = door.post(texts("one", "two")).job_id
    ground.work(job_id)

    assert all(link.pttl(key) > 0 for key in link.keys("embedding:*"))


@pytest.mark.parametrize(
    ("sent", "options", "place"),
    [
        ({"text": "a"}, {}, (0, "target_table", "missing")),
        ({"text": "a", "target_id": 1}, {}, (0, "target_table", "missing")),
        ({"text": "a", "target_table": "ai_insights"}, {}, (0, "target_id", "missing")),
        ({"text": "a", "custom_id": "c", "target_id": 1}, {}, (0, "target_table", "missing")),
        ({"text": " ", "custom_id": "c"}, {}, (0, "text", "text_empty")),
        ({"text": "a", "custom_id": "a\0"}, {}, (0, "custom_id", "id_invalid")),
        ({"text": "a", "custom_id": "c"}, {"model": "never seen"}, (0, "model", "model_unknown")),
        (
            {"text": "a", "custom_id": "c"},
            {"embedding_version": "v9"},
            (0, "embedding_version", "version_unknown"),
        ),
    ],
)
def test_bad_input_is_named(
    door: Door, sent: dict[str, Any], options: dict[str, Any], place: tuple[int, str, str]
) -> None:
    answer = door.post([sent], **options)

    assert answer.status == 422, answer.body
    assert place in answer.places


def test_a_repeated_custom_id_is_refused(door: Door) -> None:
    answer = door.post([*texts("one"), *texts("one")])

    assert answer.places == [(1, "custom_id", "custom_id_repeated")]


def test_a_result_that_would_be_too_large_is_refused_by_name(ground: Ground) -> None:
    opened = ground.reopened(EMBEDDING_RESULT_BYTES="1024")
    most = 1024 // (4 * DIMENSION)
    door = opened.door()
    assert door.post(texts(*map(str, range(most)))).status == 202

    answer = door.post(texts(*map(str, range(most + 1))))

    assert (answer.status, answer.code) == (413, "too_large")
    assert "embedding_result_bytes" in answer.json["detail"]
    assert door.get("/api/limits").json["embedding_result_bytes"] == 1024
    opened.close()


def test_what_somebody_else_has_is_not_there(ground: Ground, backend: Fake) -> None:
    del backend
    mine, other = ground.door("mine", "submit", "read"), ground.door("other", "submit", "read")
    job_id = mine.post(texts("secret")).job_id
    ground.work(job_id)

    assert other.get(f"/api/job/{job_id}/result").code == "job_not_found"
    stolen = [{"target_table": "", "target_id": f"{job_id}/0", "text": "mine"}]
    assert other.post(stolen).status == 422
