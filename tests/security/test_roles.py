"""The roles of deploy/roles.sql do all that Holdfast does; what each may not do is said here."""

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from urllib.parse import urlsplit, urlunsplit

import httpx
import psycopg
import pytest
import redis
from psycopg import errors

from migrations.__main__ import migrate
from tests.api import JSON, Door
from tests.conftest import DIMENSION
from tests.fakes import Fake, Reply
from tests.processes import ROOT, StartApi, StartProcess, wait_for
from tests.security import test_least_rights
from tests.security.test_least_rights import FINAL, admin

__all__ = ["admin"]

ROLES = ROOT / "deploy" / "roles.sql"
PASSWORD = "of-this-test"
API, WORKER, SWEEPER = PROCESSES = ("holdfast_api", "holdfast_worker", "holdfast_sweeper")
OWNER = "holdfast_owner"
TABLE = "team.notes"
VERSION = f"bge-m3-latest-{DIMENSION}"


def url_of(url: str, role: str) -> str:
    """Return the same database as another role."""
    parts = urlsplit(url)
    return urlunsplit(parts._replace(netloc=f"{role}:{PASSWORD}@{parts.hostname}:{parts.port}"))


@pytest.fixture
def team(empty_database_url: str) -> Iterator[psycopg.Connection]:
    """Give a database of somebody's own, in which Holdfast has its roles and its tables."""
    url = empty_database_url
    with psycopg.connect(url, autocommit=True) as connection:
        connection.execute("CREATE EXTENSION vector")
        connection.execute("CREATE SCHEMA team")
        connection.execute(
            "CREATE TABLE team.notes (id bigint PRIMARY KEY, body text, secret text DEFAULT 'x',"
            " embedding vector(8))"
        )
        connection.execute(
            "INSERT INTO team.notes (id, body) SELECT n, 'note ' || n FROM generate_series(1, 9) n"
        )
        for _ in range(2):  # the second time changes nothing
            connection.execute(ROLES.read_bytes())
        for role in (OWNER, *PROCESSES):
            connection.execute(f"ALTER ROLE {role} PASSWORD '{PASSWORD}'".encode())
        for _ in range(2):
            migrate(url_of(url, OWNER), memory=True, dimension=DIMENSION, version=VERSION)
        yield connection


@pytest.fixture
def environ(
    environ: dict[str, str], empty_database_url: str, trace_source_url: str
) -> dict[str, str]:
    """Give the environment of a command that the owner gives."""
    return environ | {
        "DATABASE_URL": url_of(empty_database_url, OWNER),
        "TRACE_SOURCE_URL": trace_source_url,
        "QUEUE_VISIBILITY_TIMEOUT": "2",
        "SWEEP_SECONDS": "0.3",
        "QUEUE_WAIT_TIME": "1",
        "CLEANUP_DONE_DAYS": "1",
    }


Who = Callable[[str], dict[str, str]]


@pytest.fixture
def who(admin: "redis.Redis", redis_url: str, empty_database_url: str) -> Who:
    """Give what each kind of process says who it is, to Postgres and to Redis."""
    del admin
    return lambda name: {
        "DATABASE_URL": url_of(empty_database_url, f"holdfast_{name}"),
        "REDIS_URL": test_least_rights.url_of(redis_url, f"holdfast-{name}"),
    }


@pytest.fixture
def registered(team: psycopg.Connection, start_process: StartProcess) -> psycopg.Connection:
    """Give the same with a target, whose owner has said what he was asked to say."""
    command = ("worker", "targets", "add", TABLE, "--text-column", "body")
    added = start_process(*command)
    assert added.wait() == 0, added.said
    listed = start_process("worker", "targets", "list")
    assert listed.wait() == 1
    assert "not granted yet: GRANT USAGE ON SCHEMA team TO holdfast_worker" in listed.said
    # The schema; SELECT; UPDATE, but not the sweeper's.
    assert run_grants(team, added.said) == 4 + 4 + 3, added.said
    listed = start_process("worker", "targets", "list")
    assert listed.wait() == 0, listed.said
    return team


def test_everything_works_under_the_least_rights(
    registered: psycopg.Connection,
    environ: dict[str, str],
    who: Who,
    start_api: StartApi,
    start_process: StartProcess,
    tmp_path: Path,
) -> None:
    made = start_process("worker", "keys", "create", "--client", "team", "--scopes", "admin")
    assert made.wait() == 0, made.said
    with Fake() as backend:
        backend.when(Reply(status=400, error="the input length exceeds"), marker="refused")
        environ["EMBEDDER_URL"] = backend.url
        worker = start_process("worker", "run", "embeddings", **who("worker"))
        start_process("worker", "run", "trace-events", **who("worker"))
        # Rows of an ADR-009 table, and old ones to clean up.
        registered.execute(
            "INSERT INTO public.embedding_retry_queue (target_table, target_id, text_content)"
            " VALUES (%s, '9', 'nine')",
            [TABLE],
        )
        sweeper = start_process("worker", "sweep", **who("sweeper"))
        with httpx.Client(base_url=start_api(**who("api")), trust_env=False, timeout=60) as client:
            door = Door(client, made.said.strip())
            go_through_it(door, backend, registered)
            shown = {page: door.http.get(page, headers=door_key(door)).status_code for page in RQ}
        wait_for(lambda: has_vector(registered, 9))
        reembed(registered, start_process)
        wait_for(lambda: not registered.execute(OPEN_JOBS).fetchone())
        worker.kill()
        for statement in AGED:
            registered.execute(statement)
        start_process("worker", "sweep", **who("sweeper"))
        assert sweeper.stop() == 0
        wait_for(lambda: not registered.execute("SELECT FROM holdfast.jobs LIMIT 1").fetchall())
        audit = start_process("worker", "audit", **who("sweeper"))

    assert audit.wait() == 0, audit.said
    assert set(shown.values()) <= {200, 308}, shown
    said = "".join(log.read_text() for log in tmp_path.glob("process-*.log"))
    assert "permission denied" not in said, said
    assert "Traceback" not in said, said


OPEN_JOBS = "SELECT id FROM holdfast.jobs WHERE finished_at IS NULL"
AGED = (
    """UPDATE public.embedding_retry_queue SET processed_at = now() - interval '99 days'
        WHERE status = 'done'""",
    """UPDATE holdfast.jobs SET created_at = now() - interval '100 days',
              finished_at = now() - interval '99 days', expires_at = now() - interval '98 days'""",
    "UPDATE holdfast.processes SET alive_until = now() - interval '9 days' WHERE kind = 'worker'",
)


def reembed(team: psycopg.Connection, start_process: StartProcess) -> None:
    """Embed the rows in another version, as the owner asks and the sweeper and the worker do."""
    team.execute("ALTER TABLE team.notes ADD COLUMN newer vector(8)")
    options = ("--vector-column", "newer", "--version", "v2")
    planned = start_process("worker", "reembed", "plan", TABLE, *options)
    assert planned.wait() == 0, planned.said
    # The API, the owner, the sweeper, the worker.
    assert run_grants(team, planned.said) == 2 + 2 + 1 + 1
    started = start_process("worker", "reembed", "start", TABLE, *options)
    assert started.wait() == 0, started.said
    assert run_grants(team, started.said) == 0
    wait_for(lambda: has_vector(team, 9, "newer"), 60)


def run_grants(team: psycopg.Connection, said: str) -> int:
    """Say what a command has asked to be said; return how many statements."""
    statements = [line for line in said.splitlines() if line.startswith("  GRANT ")]
    for statement in statements:
        team.execute(statement.encode())
    return len(statements)


RQ = ("/rq/", "/rq/0/view/queues", "/rq/0/data/queues.json", "/rq/0/data/workers.json")


def door_key(door: Door) -> dict[str, str]:
    return {"Authorization": f"Bearer {door.key}"}


def has_vector(team: psycopg.Connection, row: int, column: str = "embedding") -> bool:
    found = team.execute("SELECT to_jsonb(n) ->> %s FROM team.notes n WHERE id = %s", [column, row])
    return (found.fetchone() or (None,))[0] is not None


def go_through_it(door: Door, backend: Fake, team: psycopg.Connection) -> None:
    """Do what users do."""
    texts = [{"target_table": TABLE, "target_id": n, "text": f"text {n}"} for n in range(1, 6)]
    bad = {"target_table": TABLE, "target_id": 6, "text": "refused"}
    job_id = door.post([*texts, bad]).job_id
    until(door, job_id, "completed_with_errors")
    assert has_vector(team, 5)
    backend.rules.clear()
    assert door.send(f"/api/job/{job_id}/requeue", {}).status == 202
    until(door, job_id, "completed")
    assert [line["outcome"] for line in door.result(job_id)] == ["done"] * 6

    records = [{"text": "A document.\n\nWith two paragraphs."}]
    ask = {"project": "p", "source": "s", "ingest_id": "i", "records": records}
    ingested = door.send("/memory/ingest", ask)
    assert ingested.status == 202, ingested.body
    until(door, ingested.job_id, "completed")
    ask["records"] = [{"text": "Another one."}]
    until(door, door.send("/memory/ingest", ask).job_id, "completed")

    asked = {"target_table": TABLE, "target_ids": [1]}
    deleted = door.ask("DELETE", "/api/items", {"Content-Type": JSON}, json.dumps(asked).encode())
    assert deleted.json["deleted"] == 1
    assert not has_vector(team, 1)
    door.send(f"/api/job/{door.post(texts).job_id}/cancel", {})

    cids = {"profile": "query_tool", "container_ids": ["C00001"], "domains": ["history"]}
    answer = door.send("/api/trace/events", cids, {"Prefer": "respond-async"})
    until(door, answer.job_id, "completed")
    assert door.get(f"/api/job/{answer.job_id}/result?domain=history").status == 200
    for path in ("/health", "/metrics", "/api/targets", "/api/coverage", "/api/incidents"):
        assert door.http.get(path, headers=door_key(door)).status_code == 200, path


def until(door: Door, job_id: str, state: str) -> None:
    wait_for(lambda: door.job(job_id)["state"] in FINAL, 60)
    assert door.job(job_id)["state"] == state, door.job(job_id)


def test_each_table_is_written_by_a_role_or_by_the_owner_alone(team: psycopg.Connection) -> None:
    rows = team.execute(
        """
        SELECT c.relname
          FROM pg_class c
         WHERE c.relnamespace = 'holdfast'::regnamespace AND c.relkind = 'r'
           AND NOT EXISTS (SELECT FROM unnest(%s::text[]) AS role
                            WHERE has_any_column_privilege(role, c.oid, 'INSERT, UPDATE')
                               OR has_table_privilege(role, c.oid, 'DELETE'))
         ORDER BY 1
        """,
        [list(PROCESSES)],
    ).fetchall()

    # A new table that a process writes to needs its line in migrations/grants.sql.
    assert [row[0] for row in rows] == ["api_keys", "job_models", "schema_migrations"]


NEVER = {
    "CREATE TABLE holdfast.x ()": PROCESSES,
    "CREATE TABLE public.x ()": PROCESSES,
    "CREATE SCHEMA x": PROCESSES,
    "ALTER TABLE holdfast.jobs ADD COLUMN x int": PROCESSES,
    "DROP TABLE holdfast.jobs": PROCESSES,
    "TRUNCATE public.embedding_retry_queue": PROCESSES,
    "ALTER TABLE public.embedding_retry_queue DISABLE TRIGGER USER": PROCESSES,
    "CREATE FUNCTION holdfast.x() RETURNS int LANGUAGE sql AS 'SELECT 1'": PROCESSES,
    "CREATE ROLE x": (*PROCESSES, OWNER),
    "ALTER ROLE holdfast_owner SUPERUSER": (*PROCESSES, OWNER),
    "SET SESSION AUTHORIZATION holdfast": (*PROCESSES, OWNER),
    "SET ROLE holdfast_owner": PROCESSES,
    "COPY (SELECT 1) TO PROGRAM 'true'": (*PROCESSES, OWNER),
    "SELECT pg_read_file('PG_VERSION')": (*PROCESSES, OWNER),
    "SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE usename = 'holdfast'": PROCESSES,
    "SELECT key_hash FROM holdfast.api_keys": (WORKER, SWEEPER),
    "INSERT INTO holdfast.api_keys VALUES ('x', 'x', 'x', '{admin}')": PROCESSES,
    "UPDATE holdfast.api_keys SET scopes = '{admin}'": PROCESSES,
    "SELECT answer FROM holdfast.idempotency_keys": (WORKER,),
    "DELETE FROM public.embedding_retry_queue": (API, WORKER),
    "DELETE FROM holdfast.jobs": (API, WORKER),
    "DELETE FROM holdfast.requeues": PROCESSES,
    "UPDATE holdfast.requeues SET client = 'x'": PROCESSES,
    "DELETE FROM holdfast.item_attempts": (API, WORKER),
    "UPDATE holdfast.item_attempts SET message = 'x'": PROCESSES,
    "DELETE FROM holdfast.vectors": (API, WORKER),
    "UPDATE holdfast.job_counts SET done = 9": PROCESSES,
    "INSERT INTO holdfast.jobs (id, kind, client) VALUES ('emb-x', 'embedding', 'x')": (WORKER,),
    "INSERT INTO public.embedding_retry_queue (target_table, target_id, text_content)"
    " VALUES ('x', 'y', 'z')": (WORKER,),
    "UPDATE holdfast.embedding_targets SET vector_column = 'secret'": (WORKER,),
    "INSERT INTO holdfast.schema_migrations VALUES ('x', 'x')": PROCESSES,
    "SELECT nextval('holdfast.lease_tokens')": (SWEEPER,),
    "SELECT public.enqueue_embedding('team.notes', '1', 'x')": PROCESSES,
    "SELECT public.delete_embedding('team.notes', '1')": PROCESSES,
    "SELECT secret FROM team.notes": (*PROCESSES, OWNER),
    "SELECT body FROM team.notes": (API, WORKER),
    "UPDATE team.notes SET body = 'x'": (*PROCESSES, OWNER),
    "UPDATE team.notes SET embedding = NULL": (SWEEPER,),
    "DELETE FROM team.notes": (*PROCESSES, OWNER),
    "INSERT INTO team.notes (id) VALUES (99)": (*PROCESSES, OWNER),
    "UPDATE public.embedding_retry_queue SET status = 'processing', lease_token = 1,"
    " leased_by = 'x', lease_until = now(), max_attempts = 5, attempts = 1, deliveries = 1": (
        API,
        SWEEPER,
    ),
}


def test_what_each_may_not_do(registered: psycopg.Connection, empty_database_url: str) -> None:
    registered.execute(
        "INSERT INTO public.embedding_retry_queue (target_table, target_id, text_content)"
        " VALUES ('team.notes', '1', 'one')"
    )
    done: list[str] = []
    for role in (*PROCESSES, OWNER):
        with psycopg.connect(url_of(empty_database_url, role)) as connection:
            for statement, roles in NEVER.items():
                if role in roles:
                    try:
                        connection.execute(statement.encode())
                        done.append(f"{role}: {statement}")
                    except errors.InsufficientPrivilege:
                        pass
                    connection.rollback()

    assert done == []


def test_only_a_worker_makes_an_item_done(
    registered: psycopg.Connection, empty_database_url: str
) -> None:
    registered.execute(
        """INSERT INTO public.embedding_retry_queue
                  (target_table, target_id, text_content, embedding_version, model, job_id)
           VALUES ('team.notes', '1', 'one', 'v', 'm', 'emb-x')"""
    )
    claim = """UPDATE public.embedding_retry_queue SET status = 'processing', lease_token = 1,
                      leased_by = 'x', lease_until = now(), max_attempts = 5,
                      attempts = 1, deliveries = 1"""

    with psycopg.connect(url_of(empty_database_url, WORKER)) as connection:
        assert connection.execute(claim.encode()).rowcount == 1
    for role in (API, SWEEPER):
        with (
            psycopg.connect(url_of(empty_database_url, role)) as connection,
            pytest.raises(errors.InsufficientPrivilege, match="makes no item done"),
        ):
            connection.execute(
                """UPDATE public.embedding_retry_queue SET status = 'done', lease_token = NULL,
                          leased_by = NULL, lease_until = NULL"""
            )
