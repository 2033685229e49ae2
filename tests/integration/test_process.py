"""One process of the development mode: started, watched, stopped, and nothing of it left."""

import signal
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.processes import wait_for
from worker import process
from worker.process import Process, StartError, read_proc

Make = Callable[..., Process]
READY = "import signal, sys; print('ready', flush=True); "


@pytest.fixture
def make(tmp_path: Path) -> Iterator[Make]:
    """Make processes that run some Python, and stop them whatever comes."""
    made: list[Process] = []

    def make_one(code: str, **more: str) -> Process:
        argv = [sys.executable, "-c", code]
        made.append(Process(name="it", argv=argv, log=tmp_path / "it.log", environ={}, **more))  # type: ignore[arg-type]
        return made[-1]

    yield make_one
    for each in made:
        each.stop()


def _wait_until_ready(started: Process) -> None:
    wait_for(lambda: "ready" in started.log.read_text())


def test_what_it_writes_goes_to_its_log_and_its_input_is_read_once(make: Make) -> None:
    echo = make("print(input())", stdin="hello")

    echo.start()

    wait_for(lambda: echo.death)
    assert echo.death == "exit code 0"
    assert echo.tail.endswith("hello")


def test_a_death_by_signal_is_named(make: Make) -> None:
    killed = make(READY + "signal.pause()")
    killed.start()
    _wait_until_ready(killed)

    assert killed.running
    killed.running.send_signal(signal.SIGKILL)

    wait_for(lambda: killed.death)
    assert killed.death == "SIGKILL"


def test_one_that_dies_is_started_again_after_a_pause_that_grows(
    make: Make, capfd: pytest.CaptureFixture[str]
) -> None:
    dying = make("raise SystemExit(3)")
    dying.pause_seconds = 0.01
    dying.start()

    def has_died_three_times() -> bool:
        dying.look_after()
        return dying.pause_seconds > 0.05

    wait_for(has_died_three_times)

    assert capfd.readouterr().err.count("it died (exit code 3)") == 3
    assert dying.pause_seconds == pytest.approx(0.08)


def test_one_that_does_not_stop_is_killed(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(process, "STOP_SECONDS", 0.1)
    deaf = make("import signal; signal.signal(15, signal.SIG_IGN); " + READY + "signal.pause()")
    deaf.start()
    _wait_until_ready(deaf)

    deaf.stop()

    assert deaf.running is None


def test_nothing_that_it_has_started_outlives_its_stop(make: Make) -> None:
    fork = "import os; child = os.fork() or (os.setpgid(0, 0), signal.pause()); "
    parent = make("import signal; " + fork + "print(child, 'ready', flush=True); signal.pause()")
    parent.start()
    _wait_until_ready(parent)
    child = int(parent.log.read_text().split()[0])
    assert read_proc(child, "stat")

    parent.stop()

    wait_for(lambda: read_proc(child, "stat") == "" or ") Z " in read_proc(child, "stat"))


def test_what_cannot_be_started_says_so(tmp_path: Path) -> None:
    nothing = Process(
        name="it", argv=["x"], log=tmp_path / "log", environ={}, folder=tmp_path / "no"
    )

    with pytest.raises(StartError, match="it cannot be started"):
        nothing.start()
