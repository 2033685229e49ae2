"""The units: without a word from systemd's own checks, hardened, and in step with the settings."""

import re
import shutil
import subprocess
from pathlib import Path

import pytest

from app.core.config import Settings
from tests.processes import ROOT

UNITS = ROOT / "deploy" / "systemd"
SERVICES = ("holdfast-api", "holdfast-sweeper", "holdfast-audit", "holdfast-worker@")
MOST_EXPOSED = "15"
"""Tenths: 1.5 of systemd's score of exposure."""

ANALYZE = shutil.which("systemd-analyze") or ""
needs_systemd = pytest.mark.skipif(not ANALYZE, reason="systemd-analyze is not installed")


@pytest.fixture
def checked(tmp_path: Path) -> Path:
    """Give a copy of the units whose programs exist on this machine."""
    copy = tmp_path / "units"
    shutil.copytree(UNITS, copy, ignore=shutil.ignore_patterns("__pycache__", "*.py", "*.example"))
    for unit in copy.glob("*.service"):
        text = unit.read_text("utf-8")
        text = re.sub(r"^(Exec\w+)=\S+", r"\1=/usr/bin/true", text, flags=re.MULTILINE)
        unit.write_text(text, "utf-8")
    return copy


@needs_systemd
def test_systemd_has_nothing_to_say_of_any_unit(checked: Path) -> None:
    names = [each.name for each in checked.glob("holdfast*") if each.is_file()]
    names.remove("holdfast-worker@.service")
    names += ["holdfast-worker@embeddings.service", "holdfast-worker@trace-events.service"]

    done = subprocess.run(
        [ANALYZE, "verify", "--man=no", "--recursive-errors=yes", *names],
        cwd=checked,
        capture_output=True,
        text=True,
        check=False,
    )

    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


@needs_systemd
@pytest.mark.parametrize("service", SERVICES)
def test_each_service_is_exposed_as_little_as_may_be(checked: Path, service: str) -> None:
    done = subprocess.run(
        [
            ANALYZE,
            "security",
            "--offline=true",
            f"--threshold={MOST_EXPOSED}",
            f"{service}.service",
        ],
        cwd=checked,
        capture_output=True,
        text=True,
        check=False,
    )

    assert done.returncode == 0, done.stdout.splitlines()[-1:]


def setting(unit: str, name: str) -> str:
    text = (UNITS / unit).read_text("utf-8")
    found = re.findall(rf"^{name}=(.*)$", text, flags=re.MULTILINE)
    assert found, f"{unit} has no {name}"
    return str(found[-1])


def test_a_stop_leaves_a_worker_the_time_of_its_longest_slice() -> None:
    settings = Settings()
    call = settings.embedder_timeout_seconds
    longest = settings.queue_bell_seconds + max(settings.embedder_load_seconds, call) + call
    stop = float(setting("holdfast-worker@.service", "TimeoutStopSec"))

    assert stop > longest
    assert stop > settings.queue_bell_seconds + settings.trace_segment_seconds


def test_what_a_unit_must_not_have_is_not_there() -> None:
    for path in UNITS.glob("*.service"):
        text = path.read_text("utf-8")
        assert "ExecStop=" not in text, path
        assert "%I" not in text, path
        assert not re.search(r"Environment=.*(PASSWORD|_URL=|_KEY=)", text), path
        assert "conda" not in text
        if "oneshot" not in text:
            assert "Restart=always" in text
            assert "RestartPreventExitStatus=78" in text
            assert "Requires=postgres" not in text
            assert setting(path.name, "MemorySwapMax") == "0"


def test_a_worker_s_own_memory_limit_ends_its_horse_and_not_itself() -> None:
    worker = "holdfast-worker@.service"

    assert setting(worker, "OOMPolicy") == "continue"
    assert setting(worker, "KillMode") == "mixed"
    assert setting(worker, "MemoryMax") == "1G"
    assert setting("holdfast-worker@trace-events.service.d/10-trace.conf", "MemoryMax") == "4G"


# ---- the installer


def install(destination: Path, *words: str) -> str:
    done = subprocess.run(
        ["/bin/sh", str(ROOT / "deploy" / "install.sh"), *words],
        env={"DESTDIR": str(destination), "PATH": "/usr/sbin:/usr/bin:/sbin:/bin"},
        capture_output=True,
        text=True,
        check=True,
    )
    return done.stdout


def laid(destination: Path) -> dict[str, bytes]:
    return {
        str(path.relative_to(destination)): path.read_bytes()
        for path in sorted(destination.rglob("*"))
        if path.is_file()
    }


def test_the_installer_lays_everything_and_a_second_run_changes_nothing(tmp_path: Path) -> None:
    install(tmp_path)
    first = laid(tmp_path)

    for name in (
        "opt/holdfast/worker/__main__.py",
        "opt/holdfast/migrations/0001_jobs.sql",
        "opt/holdfast/deploy/systemd/gunicorn.conf.py",
        "opt/holdfast/requirements.txt",
        "etc/holdfast/holdfast.env",
        "usr/local/lib/systemd/system/holdfast-worker@.service",
        "usr/local/lib/systemd/system/holdfast-.service.d/10-hardening.conf",
        "usr/local/lib/sysusers.d/holdfast.conf",
    ):
        assert name in first, name
    assert not any("__pycache__" in name or "/tests/" in name for name in first)
    assert (tmp_path / "etc/holdfast/credentials/api").stat().st_mode & 0o777 == 0o700
    install(tmp_path)
    assert laid(tmp_path) == first


def test_an_upgrade_keeps_the_settings_and_leaves_no_old_file(tmp_path: Path) -> None:
    install(tmp_path)
    mine = tmp_path / "etc/holdfast/holdfast.env"
    mine.write_text("EMBEDDING_DIM=384\n", "utf-8")
    old = tmp_path / "opt/holdfast/app/old_module.py"
    old.write_text("", "utf-8")

    install(tmp_path)

    assert mine.read_text("utf-8") == "EMBEDDING_DIM=384\n"
    assert not old.exists()


def test_uninstalling_leaves_settings_and_credentials(tmp_path: Path) -> None:
    install(tmp_path)
    secret = tmp_path / "etc/holdfast/credentials/api/database_url"
    secret.write_text("postgresql://…", "utf-8")

    said = install(tmp_path, "uninstall")

    assert "are as they were" in said
    assert [*laid(tmp_path)] == [
        "etc/holdfast/credentials/api/database_url",
        "etc/holdfast/holdfast.env",
    ]
