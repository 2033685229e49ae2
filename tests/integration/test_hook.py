"""The hook: who wants to be told of alerts is told each change once, whatever became of a call."""

import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from typing import Any

import pytest

from app.core import config
from app.core.context import Context, open_context
from app.core.errors import ConfigError
from app.core.store import fleet
from tests.processes import StartProcess, WaitFor
from worker.sweep.hook import Hook

SECRET = "/hooks/T0k3n?room=7"


class Listener:
    """Somebody's server that is told of alerts; it answers as it is asked to."""

    def __init__(self) -> None:
        self.told: list[dict[str, Any]] = []
        self.paths: list[str] = []
        self.status = 200
        listener = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["Content-Length"]))
                listener.paths.append(self.path)
                listener.told.append(json.loads(body))
                self.send_response(listener.status)
                self.send_header("Location", "/elsewhere")
                self.end_headers()
                self.wfile.write(b"ok")

            def log_message(self, *arguments: object) -> None:
                """Say nothing."""

        self._server = HTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self._server.server_port}{SECRET}"
        threading.Thread(target=self._server.serve_forever, daemon=True).start()

    def close(self) -> None:
        """Stop."""
        self._server.shutdown()
        self._server.server_close()

    @property
    def names(self) -> list[list[str]]:
        """Return the names of the alerts of each call."""
        return [[each["name"] for each in told["alerts"]] for told in self.told]


@pytest.fixture
def listener() -> Iterator[Listener]:
    listener = Listener()
    yield listener
    listener.close()


@pytest.fixture
def ctx(environ: dict[str, str], listener: Listener) -> Iterator[Context]:
    environ["ALERT_WEBHOOK_URL"] = listener.url
    ctx = open_context(config.load(environ), application="test", most_connections=2)
    yield ctx
    ctx.close()


@pytest.fixture
def hook(ctx: Context) -> Hook:
    return Hook(ctx, threading.Event())


def begin(ctx: Context, name: str, message: str) -> None:
    with ctx.database.transaction() as tx:
        fleet.raise_alert(tx, name, message)


def end(ctx: Context, name: str) -> None:
    with ctx.database.transaction() as tx:
        fleet.end_alert(tx, name)


def test_each_change_is_told_once_and_numbers_that_grow_are_none(
    ctx: Context, hook: Hook, listener: Listener
) -> None:
    begin(ctx, "failed_items", "12 items failed")
    assert hook.run_once()
    begin(ctx, "failed_items", "13 items failed")
    assert not hook.run_once()
    begin(ctx, "oldest_item", "Oldest pending item is 3601 s old")
    assert hook.run_once()
    end(ctx, "failed_items")
    end(ctx, "oldest_item")
    assert hook.run_once()
    assert not hook.run_once()

    assert listener.names == [["failed_items"], ["failed_items", "oldest_item"], []]
    assert listener.told[0]["alerts"][0]["message"] == "12 items failed"
    assert set(listener.paths) == {SECRET}


@pytest.mark.parametrize("status", [500, 404, 307])
def test_what_could_not_be_told_is_told_again_and_no_redirect_is_followed(
    ctx: Context,
    hook: Hook,
    listener: Listener,
    caplog: pytest.LogCaptureFixture,
    status: int,
) -> None:
    listener.status = status
    begin(ctx, "failed_items", "12 items failed")
    assert not hook.run_once()
    assert not hook.run_once()
    listener.status = 204
    assert hook.run_once()

    assert listener.names == [["failed_items"]] * 3
    assert set(listener.paths) == {SECRET}
    [warning] = [each for each in caplog.records if each.name == "worker.sweep.hook"]
    assert str(status) in warning.message
    assert "T0k3n" not in warning.message


def test_a_sweeper_tells_its_first_list_and_ends_with_nobody_listening(
    start_process: StartProcess, ctx: Context, listener: Listener, wait_for: WaitFor
) -> None:
    begin(ctx, "failed_items", "12 items failed")
    sweeper = start_process("worker", "sweep", SWEEP_SECONDS="0.1", ALERT_FAILED_COUNT="1000")
    wait_for(lambda: listener.names and listener.names[-1] == [])
    listener.close()
    begin(ctx, "elsewhere", "told to nobody")
    wait_for(lambda: "hook_failed" in sweeper.said)

    assert sweeper.stop() == 0


def test_an_address_that_is_no_url_is_refused_at_the_start(environ: dict[str, str]) -> None:
    with pytest.raises(ConfigError, match="ALERT_WEBHOOK_URL: must begin with http"):
        config.load({**environ, "ALERT_WEBHOOK_URL": "mailto:ops@example.com"})
