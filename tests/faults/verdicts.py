"""What a run says of each fault: a line that it held, is broken, or never struck, with figures."""

import json
import re

import pytest
from _pytest.terminal import TerminalReporter

FOLDER = "tests/faults/"
NUMBERED = re.compile(r"f(\d+)_(.+)")
MARK = {"passed": "held", "failed": "broken", "skipped": "void"}


def pytest_terminal_summary(terminalreporter: TerminalReporter) -> None:
    """Say of each fault what became of it, and how many held."""
    lines = [
        _line(report, verdict)
        for outcome in MARK
        for report in terminalreporter.stats.get(outcome, [])
        if isinstance(report, pytest.TestReport) and report.nodeid.startswith(FOLDER)
        for verdict in [_verdict(report)]
    ]
    if not lines:
        return
    terminalreporter.section("faults")
    for _, _, text in sorted(lines):
        terminalreporter.write_line(text)
    counts = [f"{sum(f' {each} ' in text for _, _, text in lines)} {each}" for each in VERDICTS]
    terminalreporter.write_line(", ".join(counts))


VERDICTS = ("held", "broken", "void")


def _verdict(report: pytest.TestReport) -> str:
    return "void" if "VOID: " in report.longreprtext else MARK[report.outcome]


def _line(report: pytest.TestReport, verdict: str) -> tuple[int, str, str]:
    name = report.nodeid.rpartition("::test_")[2]
    found = NUMBERED.fullmatch(name)
    number, title = (int(found[1]), found[2]) if found else (1000, name)
    told = {"scenario": title.replace("_", " ")}
    told |= dict(report.user_properties)
    if report.outcome == "skipped" and isinstance(report.longrepr, tuple):
        told["skipped"] = report.longrepr[2]
    label = f"F{number}" if found else "also"
    figures = json.dumps(told, default=str, ensure_ascii=False)
    return number, title, f"FAULT {label} {verdict} {figures}"
