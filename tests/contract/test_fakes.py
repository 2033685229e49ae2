"""The scripted backend keeps what its docstrings say: a fake that lies proves nothing."""

import math
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import httpx
import pytest

from tests.fakes import NEVER, Fake, Reply, float32, vector_of


@pytest.fixture
def fake() -> Iterator[Fake]:
    with Fake() as made:
        yield made


@pytest.fixture
def client() -> Iterator[httpx.Client]:
    with httpx.Client(trust_env=False, timeout=20) as made:
        yield made


def test_a_vector_is_of_its_model_and_text_alone() -> None:
    vector = vector_of("m", "a text", 1024)

    assert vector == vector_of("m", "a text", 1024) == float32(vector)
    assert math.hypot(*vector) == pytest.approx(1)
    assert vector[:8] != vector_of("n", "a text", 8)
    assert vector[:8] != vector_of("m", "another", 8)


def test_each_route_answers_in_its_own_shape(fake: Fake, client: httpx.Client) -> None:
    vectors = [vector_of("m", "a", 8), vector_of("m", "b", 8)]
    body = {"model": "m", "input": ["a", "b"], "inputs": ["a", "b"]}

    ollama, openai, tei = (
        client.post(fake.url + route, json=body).json()
        for route in ("/api/embed", "/v1/embeddings", "/embed")
    )

    assert ollama["embeddings"] == tei == vectors
    assert [(entry["index"], entry["embedding"]) for entry in openai["data"]] == [
        (0, vectors[0]),
        (1, vectors[1]),
    ]


def test_the_log_tells_each_request_and_when_each_text_came(
    fake: Fake, client: httpx.Client
) -> None:
    for texts in (["a", "b"], ["a"]):
        client.post(f"{fake.url}/api/embed", json={"model": "m", "input": texts})

    log = client.get(f"{fake.url}/log").json()

    assert (log["requests"], log["items"], log["at_once"]) == (2, 3, 0)
    assert [call["status"] for call in log["calls"]] == [200, 200]
    assert {text: len(times) for text, times in log["arrivals"].items()} == {"a": 2, "b": 1}
    assert log["arrivals"]["a"] == sorted(log["arrivals"]["a"])


def test_rules_go_by_number_and_by_marker(fake: Fake, client: httpx.Client) -> None:
    fake.when(Reply(status=503), numbers=[2])
    fake.when(Reply(status=400), marker="MARK", times=1)

    def status(text: str) -> int:
        return client.post(f"{fake.url}/api/embed", json={"input": [text]}).status_code

    assert [status(text) for text in ("a", "a MARK", "a MARK", "a MARK", "a")] == [
        200,
        503,
        400,
        200,
        200,
    ]


def test_a_rate_limit_counts_what_was_let_through(fake: Fake, client: httpx.Client) -> None:
    fake.limits.calls_per_window = 2
    fake.limits.window_seconds = NEVER

    answers = [client.post(f"{fake.url}/api/embed", json={"input": ["a"]}) for _ in range(3)]

    assert [answer.status_code for answer in answers] == [200, 200, 429]
    assert answers[2].headers["retry-after"] == "4"


def test_a_lane_works_on_what_its_client_gave_up(client: httpx.Client) -> None:
    with Fake(lanes=1, seconds_per_item=0.3) as fake:
        with pytest.raises(httpx.ReadTimeout):
            client.post(f"{fake.url}/api/embed", json={"input": ["a"]}, timeout=0.05)
        client.post(f"{fake.url}/api/embed", json={"input": ["b"]})

        log = fake.log()

    assert (log["given_up"], log["worked_items"]) == (1, 2)


def test_one_lane_takes_one_request_at_a_time(client: httpx.Client) -> None:
    def send(text: str) -> None:
        client.post(f"{slow.url}/api/embed", json={"input": [text]})

    with Fake(lanes=1, seconds_per_item=0.05) as slow, ThreadPoolExecutor(4) as pool:
        list(pool.map(send, "abcd"))

    assert (slow.most_working, slow.worked_items) == (1, 4)
    assert slow.most_at_once > 1


def test_close_ends_what_waits(client: httpx.Client) -> None:
    fake = Fake()
    fake.when(Reply(delay_seconds=NEVER))

    with ThreadPoolExecutor(1) as pool:
        answer = pool.submit(client.post, f"{fake.url}/api/embed", json={"input": ["a"]})
        fake.wait_for(lambda it: it.at_once == 1)
        fake.close()

        assert isinstance(answer.exception(), httpx.HTTPError)


def test_refused_connections_are_taken_again_on_the_same_port(
    fake: Fake, client: httpx.Client
) -> None:
    client.get(f"{fake.url}/log")

    with fake.refused(), pytest.raises(httpx.ConnectError):
        client.get(f"{fake.url}/log")
    assert client.get(f"{fake.url}/log").status_code == 200


def test_a_constant_fake_answers_any_number_of_texts_and_keeps_none(client: httpx.Client) -> None:
    with Fake(constant=True, dimension=4) as fake:
        for count in (3, 1, 3):
            texts = [f"text {number}" for number in range(count)]
            answer = client.post(f"{fake.url}/api/embed", json={"input": texts}).json()

            assert float32(answer["embeddings"][-1]) == vector_of("", str(count - 1), 4)
            assert len(answer["embeddings"]) == count
        assert (fake.log()["items"], fake.log()["arrivals"]) == (7, {})
