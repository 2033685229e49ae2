"""S10: texts go to the backend of the settings, whoever else would like to have them."""

import socket
from collections.abc import Iterator
from contextlib import ExitStack

import pytest

from tests.api import (  # noqa: F401 - fixtures among them
    Door,
    Ground,
    item,
    make_backend,
    make_door,
    make_ground,
)
from tests.fakes import Reply
from tests.processes import StartProcess, wait_for

PROXIES = ("HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY", "http_proxy", "https_proxy", "all_proxy")
REDIRECTS = (302, 307, 308)


@pytest.fixture
def inside() -> Iterator[socket.socket]:
    """Give a server that nobody has any business with: it notices who comes."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        listener.settimeout(0)
        yield listener


def was_left_alone(listener: socket.socket) -> bool:
    with ExitStack() as stack:
        try:
            stack.enter_context(listener.accept()[0])
        except BlockingIOError:
            return True
    return False


def test_neither_a_redirect_nor_a_proxy_of_the_environment_takes_texts_elsewhere(
    ground: Ground, door: Door, inside: socket.socket, start_process: StartProcess
) -> None:
    elsewhere = f"http://127.0.0.1:{inside.getsockname()[1]}/latest/meta-data"
    for number, status in enumerate(REDIRECTS, 1):
        reply = Reply(status=status, error="over there", headers={"Location": elsewhere})
        ground.backend.when(reply, numbers=[len(ground.backend.calls) + number])
    environ = {**ground.environ, **dict.fromkeys(PROXIES, elsewhere), "QUEUE_WAIT_TIME": "1"}
    environ["SWEEP_SECONDS"] = "0.3"
    start_process("worker", "sweep", **environ)
    start_process("worker", "run", "embeddings", **environ)

    job_id = door.post(ground.new_items("one", "two")).job_id
    wait_for(lambda: door.job(job_id)["finished_at"], 90)

    assert was_left_alone(inside)
    assert door.job(job_id)["state"] == "completed"
    assert [each["attempts"] for each in door.items(job_id)] == [1, 1]
    [outage] = door.get("/api/incidents").json["incidents"]
    assert outage["error_class"] == "bad_config"


@pytest.mark.parametrize(
    "name", ["webhook", "webhook_url", "callback", "callback_url", "url", "embedder_url", "backend"]
)
def test_no_request_can_name_an_address(
    ground: Ground, door: Door, inside: socket.socket, name: str
) -> None:
    url = f"http://127.0.0.1:{inside.getsockname()[1]}/"
    [one] = ground.new_items("one")

    for answer in (
        door.post([one], "", None, **{name: url}),
        door.post([{**one, name: url}]),
        door.post([one], f"?{name}={url}"),
        door.send("/api/trace/events", {"profile": "x", "container_ids": ["a"], name: url}),
        door.post([item(1, "x", metadata={name: url}), {**one, name: url}]),
    ):
        assert answer.status == 422, answer.body
    assert was_left_alone(inside)
