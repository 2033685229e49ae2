import io
import json
import logging
import sys
from collections.abc import Callable, Mapping
from typing import Any

import pytest

from app.core.logs import FIELDS, JsonFormatter, set_up

SECRET = "canary-7f3a"


def logged(
    message: str = "it happened",
    *,
    level: int = logging.INFO,
    extra: Mapping[str, object] | None = None,
    exc_info: bool = False,
) -> dict[str, Any]:
    """Log once as our processes do, and return the line that was written."""
    output = io.StringIO()
    handler = logging.StreamHandler(output)
    handler.setFormatter(JsonFormatter())
    logger = logging.getLogger("of the test")
    logger.setLevel(logging.DEBUG)
    logger.propagate = False
    logger.handlers[:] = [handler]
    logger.log(level, message, extra=extra, exc_info=exc_info)
    line = output.getvalue()
    assert line.count("\n") == 1
    found: dict[str, Any] = json.loads(line)
    return found


def work_on(text: str) -> None:
    """Fail as a library does: with what was worked on in the text of the exception."""
    raise ValueError(f"cannot embed {text!r}")


def test_a_line_says_when_how_bad_and_what() -> None:
    line = logged(level=logging.WARNING)

    assert list(line) == ["ts", "level", "message"]
    assert line["level"] == "WARNING"
    assert line["message"] == "it happened"
    assert line["ts"].endswith("+00:00")


def test_every_listed_field_is_written_and_no_other() -> None:
    facts = {name: f"{name} of it" for name in FIELDS}

    line = logged(extra={**facts, "text": SECRET, "vector": [SECRET], "key": SECRET})

    assert {name: line[name] for name in FIELDS} == facts
    assert set(line) == {"ts", "level", "message", *FIELDS}
    assert SECRET not in json.dumps(line)


def test_a_field_without_a_value_is_left_out_and_zero_is_a_value() -> None:
    line = logged(extra={"items": 0, "job_id": None})

    assert line["items"] == 0
    assert "job_id" not in line


def logged_failure(fail: Callable[[], object]) -> dict[str, Any]:
    """Return the line that is written where something fails."""
    try:
        fail()
    except Exception:  # noqa: BLE001 - as the callers of logging.exception do
        return logged("slice failed", exc_info=True)
    pytest.fail("nothing failed")


def test_a_traceback_names_the_places_and_not_what_the_exception_says() -> None:
    def fail() -> None:
        try:
            work_on(SECRET)
        except ValueError as exc:
            raise RuntimeError(SECRET) from exc

    line = logged_failure(fail)

    assert line["exception"] == "RuntimeError"
    assert line["traceback"][-1].startswith("test_logs.py:")
    assert SECRET not in json.dumps(line)


def test_a_deep_traceback_is_cut_to_its_end() -> None:
    def descend(depth: int = 200) -> None:
        if not depth:
            work_on(SECRET)
        descend(depth - 1)

    line = logged_failure(descend)

    assert len(line["traceback"]) == 12
    assert line["traceback"][-1].endswith("work_on")


def test_a_line_stays_one_line_whatever_is_in_it() -> None:
    assert logged("a\nb\u2028c\x85", extra={"reason": "d\r\ne"})["message"] == "a\nb\u2028c\x85"


def test_the_whole_process_writes_such_lines_and_nothing_twice(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    root = logging.getLogger()
    output = io.StringIO()
    with monkeypatch.context() as patch:
        patch.setattr(root, "handlers", [])
        patch.setattr(root, "level", root.level)
        patch.setattr(sys, "stdout", output)
        levels = {name: logging.getLogger(name).level for name in ("httpx", "httpcore", "rq")}

        set_up("INFO")
        set_up("INFO")
        logging.getLogger("somewhere").info("once")
        logging.getLogger("somewhere").debug("too quiet")
        logging.getLogger("httpx").info("GET http://h/?key=%s", SECRET)

    for name, level in levels.items():
        logging.getLogger(name).setLevel(level)
    assert [json.loads(line)["message"] for line in output.getvalue().splitlines()] == ["once"]
