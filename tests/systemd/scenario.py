"""What is done to an installed Holdfast under a real systemd; run in that machine's network.

python -m tests.systemd.scenario FOLDER PID: the machine's own folder, and its PID 1 from outside.
It follows deploy/README.md to the letter, then breaks what was installed. Prints one JSON object.
"""

import json
import re
import shutil
import ssl
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit, urlunsplit

import httpx
import psycopg
from psycopg import sql

from migrations.__main__ import migrate
from tests.fakes import Fake
from tests.processes import ROOT
from worker.demo_trace import load
from worker.servers import find_place
from worker.up import start_servers

POISON = "eats all memory"
FINAL = ("completed", "completed_with_errors", "failed", "cancelled")
HUNGRY = f"""
import mmap

from app.adapters.embedders.ollama import Ollama
from app.adapters.http import Http


class Hungry(Ollama):
    name = "hungry"

    def embed(self, texts, *, model, seconds):
        if {POISON!r} in texts:
            hoard = mmap.mmap(-1, 2**30)
            for page in range(0, 2**30, 4096):
                hoard[page] = 1
        return super().embed(texts, model=model, seconds=seconds)


def build(options):
    return Hungry(Http(options.url, key=options.api_key))
"""
UNHURRIED = """
import time

from app.adapters.sources import postgres


class Reader:
    def __init__(self, reader):
        self.reader = reader

    def events(self, domain, ids, *, as_of, deadline):
        time.sleep(0.2)
        return (yield from self.reader.events(domain, ids, as_of=as_of, deadline=deadline))


class Opened:
    def __init__(self, opened):
        self.opened = opened

    def __enter__(self):
        return Reader(self.opened.__enter__())

    def __exit__(self, *reason):
        return self.opened.__exit__(*reason)


class Unhurried(postgres.Postgres):
    def open(self):
        return Opened(super().open())


def build(options):
    made = postgres.build(options)
    made.__class__ = Unhurried
    return made
"""
WORKER = "holdfast-worker@embeddings.service"
TRACER = "holdfast-worker@trace-events.service"
DROP_INS = "/etc/systemd/system"
HOST = "127.0.0.1"
SECONDS = 90.0
TRACED = 1200
"""Container ids: twelve segments."""
TIMES = 10


class Machine:
    """Commands in the machine, and an API at its socket."""

    def __init__(self, pid: int) -> None:
        self._pid = pid
        self.key = ""

    def run(self, *command: str, check: bool = True) -> str:
        """Run a command inside and return what it says."""
        inside = ["/usr/bin/nsenter", "-t", str(self._pid), "-m", "-p", "-C", "-u", "-i", "-n"]
        done = subprocess.run(
            [*inside, "-r", "-w", *command], capture_output=True, text=True, check=False
        )
        if check and done.returncode:
            raise RuntimeError(f"{command}: {done.returncode}\n{done.stdout}\n{done.stderr}")
        return done.stdout

    def shell(self, script: str) -> str:
        """Run a script inside."""
        return self.run("/bin/sh", "-ec", script)

    def show(self, unit: str, name: str) -> str:
        """Return a property of a unit."""
        return self.run("systemctl", "show", "--value", "-p", name, unit).strip()

    def ask(
        self,
        method: str,
        path: str,
        value: object = None,
        *,
        proxy: Path | None = None,
        **more: str,
    ) -> httpx.Response:
        """Send one request to the API; through nginx where its certificate's folder is given."""
        headers = {"Authorization": f"Bearer {self.key}", **more}
        url, trusted = f"http://{HOST}:8000", ssl.create_default_context()
        if proxy:
            url = f"https://{HOST}"
            trusted.load_verify_locations(proxy / "holdfast.pem")
        with httpx.Client(base_url=url, verify=trusted, trust_env=False, timeout=90) as client:
            return client.request(method, path, json=value, headers=headers)

    def trace(self, ids: Sequence[str]) -> str:
        """Post a trace job; return it."""
        asked = {"profile": "query_tool", "domains": ["history", "materials"], "container_ids": ids}
        answer = self.ask("POST", "/api/trace/events", asked, Prefer="respond-async")
        assert answer.status_code == httpx.codes.ACCEPTED, answer.text
        return str(answer.json()["job_id"])

    def post(self, *texts: str) -> str:
        """Post a batch; return its job."""
        items = [{"custom_id": str(number), "text": text} for number, text in enumerate(texts)]
        answer = self.ask("POST", "/api/embeddings", {"items": items})
        assert answer.status_code == httpx.codes.ACCEPTED, answer.text
        return str(answer.json()["job_id"])

    def final(self, job_id: str) -> dict[str, Any]:
        """Wait for a job's end and return it."""
        ends = time.monotonic() + SECONDS
        job: dict[str, Any] = {}
        while time.monotonic() < ends:
            job = self.ask("GET", f"/api/job/{job_id}?wait=20").json()
            if job.get("state") in FINAL:
                return job
        raise RuntimeError(f"{job_id} does not end: {job}")


def until(fact: Any, what: str, seconds: float = SECONDS) -> None:  # noqa: ANN401
    """Wait for a fact."""
    ends = time.monotonic() + seconds
    stop = threading.Event()
    while not fact():
        if time.monotonic() > ends:
            raise RuntimeError(f"not in {seconds} s: {what}")
        stop.wait(0.1)


PAGE = ROOT / "deploy" / "README.md"
PORT = "PGPORT=5432"
"""What of the page is another on each machine."""


def blocks() -> str:
    """Return the commands of the page, all of them, in their order."""
    lines = [line[4:] for line in PAGE.read_text("utf-8").splitlines() if line[:4] == "    "]
    assert sum(line.startswith("deploy/install.sh") for line in lines) == 2
    return "\n".join(lines)


def follow(machine: Machine, folder: Path, database_url: str) -> str:
    """Do what deploy/README.md says, and return what was said."""
    parts = urlsplit(database_url)
    commands = blocks()
    assert PORT in commands
    mine = f"PGPORT={parts.port} PGPASSWORD={parts.password}"
    (folder / "share" / "page").write_text(commands.replace(PORT, mine), "utf-8")
    return machine.shell(
        "cp /run/share/debs/*.deb /var/cache/apt/archives/\n"
        f"openssl req -x509 -newkey rsa:2048 -nodes -days 2 -subj /CN={HOST} -addext"
        f" subjectAltName=IP:{HOST} -keyout /etc/ssl/holdfast.key -out /etc/ssl/holdfast.pem\n"
        "cp /etc/ssl/holdfast.pem /run/share/\n"
        "export PATH=/usr/sbin:/usr/bin:/sbin:/bin DEBIAN_FRONTEND=noninteractive"
        " PIP_NO_INDEX=1 PIP_FIND_LINKS=/run/share/wheels\n"
        "cd /run/share/checkout && exec /bin/bash -eu -o pipefail /run/share/page"
    )


def installed(machine: Machine, folder: Path, database_url: str) -> dict[str, Any]:
    """Follow the page; then settings for what is to come, and a key that may all."""
    began = time.monotonic()
    said = follow(machine, folder, database_url)
    assert "not started yet" in said, said
    found: dict[str, Any] = {"seconds": round(time.monotonic() - began, 1)}
    found["states"] = re.findall(r'"job_id":"emb-[^"]+","state":"(\w+)"', said)
    machine.key = machine.shell("cut -d' ' -f3 /root/holdfast.key").strip()
    found["through_nginx"] = machine.ask("GET", "/api/jobs", proxy=folder / "share").status_code
    settings = ["EMBEDDER=hungry:build", "QUEUE_VISIBILITY_TIMEOUT=5", "SWEEP_SECONDS=1"]
    settings += ["QUEUE_MAX_RETRIES=3", "TRACE_SOURCE=unhurried:build", "TRACE_SEGMENT_CIDS=100"]
    (folder / "share" / "env").write_text("\n".join(settings) + "\n", "utf-8")
    (folder / "share" / "hungry.py").write_text(HUNGRY, "utf-8")
    (folder / "share" / "unhurried.py").write_text(UNHURRIED, "utf-8")
    source = "/etc/holdfast/credentials/worker/trace_source_url"
    (folder / "share" / "trace_source_url").write_text(
        urlunsplit(urlsplit(database_url)._replace(path="/traces")), "utf-8"
    )
    machine.shell(
        "cat /run/share/env >> /etc/holdfast/holdfast.env\n"
        "cp /run/share/hungry.py /run/share/unhurried.py /opt/holdfast/\n"
        f"install -m 0600 /run/share/trace_source_url {source}\n"
        "for unit in holdfast-api.service holdfast-worker@trace-events.service; do\n"
        f"mkdir -p {DROP_INS}/$unit.d; printf '[Service]\\nLoadCredential=trace_source_url:{source}"
        f"\\nEnvironment=TRACE_SOURCE_URL_FILE=%%d/trace_source_url\\n'"
        f" > {DROP_INS}/$unit.d/source.conf; done\n"
        "cd /run/share/checkout && PIP_NO_INDEX=1 PIP_FIND_LINKS=/run/share/wheels"
        " deploy/install.sh"  # what an operator does after a change, and for an upgrade
    )
    until(lambda: answers(machine), "the API answers")
    key = (
        "cd /opt/holdfast && set -a && . /etc/holdfast/holdfast.env &&"
        " DATABASE_URL_FILE=/etc/holdfast/credentials/owner/database_url"
        " REDIS_URL_FILE=/etc/holdfast/credentials/worker/redis_url"
        " venv/bin/python -m worker keys create --client test --scopes admin"
    )
    machine.key = machine.shell(key).strip()
    return found


def answers(machine: Machine) -> bool:
    """Whether the API says that it is ready."""
    try:
        answer = machine.ask("GET", "/readyz")
    except httpx.TransportError:
        return False
    return answer.status_code == httpx.codes.OK


def memory(machine: Machine) -> dict[str, Any]:
    """Let a child of one job be killed by MemoryMax; its worker must live."""
    machine.shell(
        f"mkdir -p /etc/systemd/system/{WORKER}.d && printf '[Service]\\nMemoryMax=160M\\n'"
        f" > /etc/systemd/system/{WORKER}.d/memory.conf && systemctl daemon-reload"
        f" && systemctl restart {WORKER}"
    )
    before = machine.show(WORKER, "MainPID"), machine.show(WORKER, "NRestarts")
    job_id = machine.post("fine", POISON, "fine too")
    job = machine.final(job_id)
    failed = machine.ask("GET", f"/api/job/{job_id}/items?status=failed").json()["items"]
    after = machine.show(WORKER, "MainPID"), machine.show(WORKER, "NRestarts")
    next_job = machine.final(machine.post("the next job"))
    return {
        "state": job["state"],
        "counts": job["counts"],
        "error": failed[0]["errors"][-1],
        "worker_lived": before == after,
        "next_job": next_job["state"],
    }


def stopped_trace(machine: Machine, ids: Sequence[str]) -> dict[str, Any]:
    """Stop the worker in the middle of a trace job, and start it again."""
    undisturbed = machine.final(machine.trace(ids))
    job_id = machine.trace(ids)

    def job() -> dict[str, Any]:
        return dict(machine.ask("GET", f"/api/job/{job_id}").json())

    until(lambda: job()["counts"]["done"] >= 2, "two segments are read")
    machine.run("systemctl", "stop", TRACER)
    stopped = job()
    machine.run("systemctl", "start", TRACER)
    final = machine.final(job_id)
    return {
        "when_stopped": [stopped["state"], stopped["counts"]["done"], stopped["counts"]["failed"]],
        "state": final["state"],
        "segments": final["counts"],
        "rows": final["trace"]["rows"],
        "same_rows": final["trace"]["rows"] == undisturbed["trace"]["rows"],
    }


def restarts(machine: Machine, times: int) -> dict[str, Any]:
    """Restart everything again and again under load."""
    jobs = [machine.post(*(f"load {turn} {n}" for n in range(100))) for turn in range(3)]
    for turn in range(times):
        jobs.append(machine.post(*(f"restart {turn} {n}" for n in range(50))))
        machine.run(
            "systemctl", "restart", WORKER, "holdfast-sweeper.service", "holdfast-api.service"
        )
    found = [machine.final(job_id) for job_id in jobs]
    return {
        "restarts": times,
        "items": sum(job["counts"]["total"] for job in found),
        "done": sum(job["counts"]["done"] for job in found),
        "failed": sum(job["counts"]["failed"] for job in found),
    }


def refused_requests(machine: Machine, times: int) -> dict[str, int]:
    """Ask all the while as the API is restarted."""
    stop, counts = threading.Event(), {"asked": 0, "refused": 0}

    def asking() -> None:
        while not stop.is_set():
            counts["asked"] += 1
            try:
                is_well = machine.ask("GET", "/livez").status_code == httpx.codes.OK
            except httpx.TransportError:
                is_well = False
            counts["refused"] += not is_well

    thread = threading.Thread(target=asking)
    thread.start()
    for _ in range(times):
        before = counts["asked"]
        machine.run("systemctl", "restart", "holdfast-api.service")
        until(lambda before=before: counts["asked"] >= before + 3, "answers after a restart")
    stop.set()
    thread.join()
    return counts


def kills(machine: Machine) -> dict[str, Any]:
    """Kill the main process of each unit in turn, with a job under way."""
    jobs = []
    for unit in (WORKER, "holdfast-sweeper.service", "holdfast-api.service"):
        jobs.append(machine.post(*(f"kill {unit} {n}" for n in range(60))))
        before = machine.show(unit, "MainPID")
        machine.run("systemctl", "kill", "--kill-who=main", "-s", "SIGKILL", unit)
        until(
            lambda unit=unit, before=before: (
                machine.show(unit, "ActiveState") == "active"
                and machine.show(unit, "MainPID") not in ("0", before)
            ),
            f"{unit} comes back",
        )
    until(lambda: answers(machine), "the API answers")
    found = [machine.final(job_id) for job_id in jobs]
    return {
        "units": 3,
        "done": sum(job["counts"]["done"] for job in found),
        "failed": sum(job["counts"]["failed"] for job in found),
    }


def secrets_seen(machine: Machine) -> list[str]:
    """Return which passwords stand in an environment or an argument of a process."""
    passwords = machine.shell(
        "cd /etc/holdfast/credentials && sed -E 's|.*:([^:@]+)@.*|\\1|' */*_url"
    ).split()
    assert len(set(passwords)) == 8, "four of Postgres, three of Redis, and the source's"
    units = (WORKER, TRACER, "holdfast-sweeper.service", "holdfast-api.service")
    seen = machine.shell(
        "for p in " + " ".join(machine.show(unit, "MainPID") for unit in units) + "; do"
        " tr '\\0' '\\n' < /proc/$p/environ; tr '\\0' '\\n' < /proc/$p/cmdline; done;"
        " journalctl --no-pager -o cat -u 'holdfast-*'"
    )
    assert "DATABASE_URL_FILE=" in seen
    return [password for password in passwords if password in seen]


def stranger_reads(machine: Machine) -> str:
    """Let one unit's user try to read another's credential."""
    pid = machine.show(WORKER, "MainPID")
    assert pid != "0"
    return machine.run(
        "/usr/sbin/runuser",
        "-u",
        "holdfast-api",
        "--",
        "/bin/cat",
        f"/run/credentials/{WORKER}/database_url",
        check=False,
    )


@contextmanager
def postgres(folder: Path) -> Iterator[tuple[str, list[str]]]:
    """Start Postgres in the machine's network, with an empty database and one of trace events."""
    running = start_servers(folder / "servers")
    try:
        with psycopg.connect(running.database_url, autocommit=True) as connection:
            # The embedded one's superuser is named as our schema, where its tables would go.
            password = urlsplit(running.database_url).password
            create = sql.SQL("CREATE ROLE postgres SUPERUSER LOGIN PASSWORD {}")
            connection.execute(create.format(sql.Literal(password)))
            connection.execute("CREATE DATABASE app")
            connection.execute("CREATE DATABASE traces")
        traces = urlunsplit(urlsplit(running.database_url)._replace(path="/traces"))
        migrate(traces, demo=True)
        load(traces, cids=2 * TRACED)
        with psycopg.connect(traces) as connection:
            found = connection.execute("SELECT container_id FROM trace_demo.container ORDER BY 1")
            yield running.database_url, [str(row[0]) for row in found.fetchmany(TRACED)]
    finally:
        running.stop()
        shutil.rmtree(find_place(folder / "servers").folder, ignore_errors=True)


def main(folder: Path, pid: int) -> dict[str, Any]:
    """Go through it."""
    machine = Machine(pid)
    found: dict[str, Any] = {}
    with postgres(folder) as (database_url, ids), Fake(dimension=1024, port=11434):
        found["install"] = installed(machine, folder, database_url)
        job = machine.final(machine.post(*(f"text {number}" for number in range(200))))
        found["first_job"] = {"state": job["state"], "done": job["counts"]["done"]}
        found["secrets_seen"] = secrets_seen(machine)
        found["stranger_reads"] = stranger_reads(machine)
        found["trace"] = stopped_trace(machine, ids)
        found["memory"] = memory(machine)
        found["api_restarts"] = refused_requests(machine, TIMES)
        found["restarts"] = restarts(machine, TIMES)
        found["kills"] = kills(machine)
        found["audit"] = machine.run("systemctl", "start", "holdfast-audit.service") or "well"
        failed = machine.run("systemctl", "--failed", "--plain", "--no-legend")
        found["failed_units"] = re.findall(r"holdfast\S+", failed)
        machine.shell("cd /run/share/checkout && deploy/install.sh uninstall")
        places = "/etc/holdfast /opt /usr/local/lib/systemd/system /usr/local/lib/sysusers.d"
        left = machine.shell(f"ls {places} | grep -v '^/'").split()
        found["left"] = [name for name in left if name == "credentials" or "holdfast" in name]
    return found


if __name__ == "__main__":
    try:
        seen = main(Path(sys.argv[1]), int(sys.argv[2]))
    except Exception:
        last = ("journalctl", "--no-pager", "-o", "cat", "-n", "40", "-u", "holdfast-*")
        print(Machine(int(sys.argv[2])).run(*last, check=False), file=sys.stderr)  # noqa: T201
        raise
    print(json.dumps(seen))  # noqa: T201
