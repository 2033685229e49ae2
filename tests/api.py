"""The API as the tests use it: doors for clients, answers checked, work done in process."""

import json
import socket
import zlib
from base64 import b64decode
from collections.abc import Generator, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass, field, fields
from itertools import count
from pathlib import Path
from typing import Any, LiteralString, NoReturn, Self, cast
from urllib.parse import urlsplit, urlunsplit

import httpx
import psycopg
import pytest
from flask import Flask
from psycopg import sql

from app.adapters.sinks.pgvector import build as build_sink
from app.core import config
from app.core.config import Settings
from app.core.context import Context
from app.core.errors import FailedItemsRemain
from app.core.keys import hash_of, new_key
from app.core.model import Counts, ItemStatus, Target
from app.core.store import clients, jobs, targets
from app.core.store.database import Tx
from app.core.store.targets import NewTarget
from app.web import create_app
from tests import processes
from tests.conftest import free_port
from tests.fakes import Fake, Reply, float32, vector_of
from tests.processes import Running, wait_for
from worker import embedding
from worker.runtime import open_horse, prepare
from worker.up import Servers

DIMENSION = 8
MODEL = "bge-m3:latest"
TARGET = "ai_insights"
VERSION = "bge-m3-latest-8"
REFUSED = "refuse this"
"""A text with this in it is refused by the backend, alone and for good."""

GUNICORN = "deploy/systemd/gunicorn.conf.py"
JSON = "application/json"
LINES = "application/x-ndjson"
PROBLEM = "application/problem+json"
PERMANENT = ("bad_input", "store_reject")

Item = dict[str, Any]

_numbers = count(1)


# ---- answers ---------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Answer:
    """An answer that was found to be as all answers must be."""

    status: int
    headers: Mapping[str, str]
    body: bytes

    @property
    def json(self) -> dict[str, Any]:
        """Its body decoded."""
        return cast("dict[str, Any]", strictly(self.body))

    @property
    def lines(self) -> list[dict[str, Any]]:
        """Its body as NDJSON."""
        assert self.headers["content-type"] == LINES
        return [cast("dict[str, Any]", strictly(line)) for line in self.body.splitlines()]

    @property
    def code(self) -> str:
        """The stable code of the problem that it is."""
        assert self.headers["content-type"] == PROBLEM, self.body
        return str(self.json["code"])

    @property
    def faults(self) -> list[dict[str, Any]]:
        """What it names as wrong."""
        return cast("list[dict[str, Any]]", self.json.get("errors", []))

    @property
    def places(self) -> list[tuple[int | None, str | None, str]]:
        """Where and what: index, field and code of each fault."""
        return [(each.get("index"), each.get("field"), each["code"]) for each in self.faults]

    @property
    def job_id(self) -> str:
        """The job that was made."""
        return str(self.json["job_id"])


def strictly(body: bytes) -> object:
    """Decode JSON as RFC 8259 has it: no bare NaN, no Infinity."""
    return json.loads(body, parse_constant=_refuse)


def _refuse(name: str) -> NoReturn:
    raise AssertionError(name)


def checked(response: httpx.Response, *, may_be_away: bool = False) -> Answer:
    """Return an answer that is JSON, no page, no traceback, and no fault of ours."""
    answer = Answer(response.status_code, response.headers, response.content)
    kind = answer.headers.get("content-type", "")
    assert b"<html" not in answer.body.lower(), answer.body
    assert b"Traceback" not in answer.body
    assert answer.status < 500 or (may_be_away and answer.status == 503), answer.body
    if answer.status >= 400 and not response.request.url.path.endswith(("z", "health")):
        assert kind == PROBLEM, (kind, answer.body)
        assert {"type", "title", "status", "detail", "code"} <= answer.json.keys()
        assert answer.json["status"] == answer.status
        assert answer.json["type"] == f"urn:holdfast:{answer.json['code']}"
    elif kind == JSON:
        strictly(answer.body)
    return answer


# ---- a client's door -------------------------------------------------------------------------


class Door:
    """The API as one client of it sees it, in this process or over a socket."""

    def __init__(self, http: httpx.Client, key: str | None, *, may_be_away: bool = False) -> None:
        self.http = http
        self.key = key
        self.may_be_away = may_be_away

    def ask(
        self,
        method: str,
        path: str,
        headers: Mapping[str, str] | None = None,
        body: bytes | Iterator[bytes] | None = None,
    ) -> Answer:
        """Send one request with the key."""
        named = {} if self.key is None else {"Authorization": f"Bearer {self.key}"}
        named |= headers or {}
        response = self.http.request(method, path, content=body, headers=named)
        return checked(response, may_be_away=self.may_be_away)

    def get(self, path: str, headers: Mapping[str, str] | None = None) -> Answer:
        """Read."""
        return self.ask("GET", path, headers)

    def send(
        self, path: str, value: object = None, headers: Mapping[str, str] | None = None
    ) -> Answer:
        """Post a value as JSON, or nothing."""
        if value is None:
            return self.ask("POST", path, headers)
        body = json.dumps(value).encode()
        return self.ask("POST", path, {"Content-Type": JSON, **(headers or {})}, body)

    def post(
        self,
        items: object,
        query: str = "",
        headers: Mapping[str, str] | None = None,
        **options: object,
    ) -> Answer:
        """Post a batch."""
        return self.send(f"/api/embeddings{query}", {"items": items, **options}, headers)

    def post_raw(
        self,
        body: bytes | Iterator[bytes],
        query: str = "",
        headers: Mapping[str, str] | None = None,
    ) -> Answer:
        """Post bytes as they are, by default said to be JSON."""
        named = {"Content-Type": JSON, **(headers or {})}
        return self.ask("POST", f"/api/embeddings{query}", named, body)

    def post_lines(
        self, lines: Sequence[object], query: str = "", headers: Mapping[str, str] | None = None
    ) -> Answer:
        """Post a batch as NDJSON; a line that is bytes is sent as it is."""
        sent = b"".join(as_line(line) for line in lines)
        return self.post_raw(sent, query, {"Content-Type": LINES, **(headers or {})})

    def job(self, job_id: str) -> dict[str, Any]:
        """Return the body of a job."""
        answer = self.get(f"/api/job/{job_id}")
        assert answer.status == 200, answer.body
        return answer.json

    def items(self, job_id: str, query: str = "") -> list[dict[str, Any]]:
        """Return a page of a job's items."""
        page = self.get(f"/api/job/{job_id}/items{query}").json
        return cast("list[dict[str, Any]]", page["items"])

    def result(self, job_id: str, query: str = "") -> list[dict[str, Any]]:
        """Return a page of a job's result."""
        answer = self.get(f"/api/job/{job_id}/result{query}")
        assert answer.status == 200, answer.body
        return cast("list[dict[str, Any]]", answer.json["items"])


def as_line(value: object) -> bytes:
    """Return a value as a line of NDJSON."""
    return value if isinstance(value, bytes) else json.dumps(value).encode() + b"\n"


def item(target_id: object, text: object, **more: object) -> Item:
    """Return one item as a caller sends it."""
    return {"target_table": TARGET, "target_id": target_id, "text": text, **more}


# ---- the ground under it ---------------------------------------------------------------------


@dataclass
class Ground:
    """A database, a Redis number and a backend, and the application on them."""

    environ: dict[str, str]
    backend: Fake
    app: Flask
    target_ids: Iterator[int] = field(default_factory=lambda: count(1))

    @property
    def ctx(self) -> Context:
        """The application's own connections."""
        return cast("Context", self.app.extensions["context"])

    @property
    def settings(self) -> Settings:
        """The application's settings."""
        return self.ctx.settings

    def reopened(self, **environ: str) -> Self:
        """Return another application on the same servers, with other settings."""
        changed = {**self.environ, **environ}
        app = create_app(config.load(changed))
        return type(self)(changed, self.backend, app, self.target_ids)

    def close(self) -> None:
        """Close the application's connections."""
        self.ctx.close()

    # ---- clients

    def key(self, client: str, *scopes: str, days: int | None = None) -> str:
        """Make a key."""
        prefix = f"k{next(_numbers)}"
        key = new_key(prefix)
        with self.ctx.database.transaction() as tx:
            clients.insert(
                tx, prefix=prefix, key_hash=hash_of(key), client=client, scopes=scopes, days=days
            )
        return key

    def door(self, client: str | None = None, *scopes: str) -> Door:
        """Open a door for a client, by default a new one with every scope but admin."""
        client = client or f"client-{next(_numbers)}"
        return self.door_of(self.key(client, *(scopes or ("submit", "read", "requeue"))))

    def door_of(self, key: str | None, *, may_be_away: bool = False) -> Door:
        """Open a door for a key, or for nobody."""
        transport = httpx.WSGITransport(app=self.app, raise_app_exceptions=False)
        http = httpx.Client(transport=transport, base_url="http://localhost")
        return Door(http, key, may_be_away=may_be_away)

    # ---- Postgres

    def rows(self, query: str, *values: object) -> list[dict[str, Any]]:
        """Ask Postgres."""
        with self.ctx.database.session() as connection:
            cursor = connection.execute(query, values or None)
            return cursor.fetchall() if cursor.description else []

    def new_rows(self, number: int) -> list[int]:
        """Make rows of the target table, and return their ids."""
        ids = [next(self.target_ids) for _ in range(number)]
        query = "INSERT INTO ai_insights (id, body) SELECT unnest(%s::bigint[]), ''"
        self.rows(query, ids)
        return ids

    def add_target(self, name: str, id_type: LiteralString, model: str = MODEL) -> None:
        """Make a table with ids of a type, and register it as a target."""
        names = {"table": sql.Identifier(name), "id_type": sql.SQL(id_type)}
        create = "CREATE TABLE {table} (id {id_type} PRIMARY KEY, embedding vector(8))"
        new = NewTarget(name, "id", "embedding", model, "v1", DIMENSION)
        with self.ctx.database.transaction() as tx:
            tx.execute(sql.SQL(create).format(**names))
            targets.register(tx, new)

    def new_items(self, *texts: str) -> list[Item]:
        """Return an item for each text, each for a new row of the target table."""
        ids = self.new_rows(len(texts))
        return [item(number, text) for number, text in zip(ids, texts, strict=True)]

    def sizes(self) -> dict[str, int]:
        """Count what a POST could have left behind."""
        query = """SELECT (SELECT count(*) FROM holdfast.jobs) AS jobs,
                          (SELECT count(*) FROM holdfast.job_items) AS links,
                          (SELECT count(*) FROM holdfast.job_counts) AS counts,
                          (SELECT count(*) FROM holdfast.idempotency_keys) AS keys,
                          (SELECT count(*) FROM public.embedding_retry_queue) AS items"""
        return self.rows(query)[0]

    def vectors(self, *ids: int) -> dict[int, list[float] | None]:
        """Return what the target table holds."""
        query = "SELECT id, embedding::real[] AS vector FROM ai_insights WHERE id = ANY(%s)"
        return {row["id"]: row["vector"] for row in self.rows(query, list(ids))}

    # ---- work

    def work(self, job_id: str) -> None:
        """Do in this process what a worker does, until the job is final; retries come at once."""
        for _ in range(self.settings.queue_max_retries * 4):
            if not self._drain(job_id):
                return
        raise AssertionError("the job does not end")

    def work_all(self) -> None:
        """Do all there is to do; jobs may wait for items of each other."""
        query = "SELECT id FROM holdfast.jobs WHERE finished_at IS NULL ORDER BY id"
        for _ in range(self.settings.queue_max_retries * 4):
            open_ids = [row["id"] for row in self.rows(query)]
            if not open_ids:
                return
            for job_id in open_ids:
                self._drain(job_id)
        raise AssertionError("some jobs do not end")

    def _drain(self, job_id: str) -> bool:
        """Let one bell of a job ring; False where it is final."""
        self.rows(
            "UPDATE public.embedding_retry_queue SET next_attempt_at = now()"
            " WHERE status = 'pending' AND next_attempt_at > now()"
        )
        self.rows("DELETE FROM holdfast.backends WHERE paused_since IS NOT NULL")
        [job] = self.rows("SELECT run, finished_at FROM holdfast.jobs WHERE id = %s", job_id)
        if job["finished_at"]:
            return False
        recipe = prepare(self.settings)
        horse = open_horse(recipe, leased_by=f"{job_id}-0", stop_asked=lambda: False)
        with closing(horse), suppress(FailedItemsRemain):
            embedding.drain(horse, job_id, job["run"])
        return True

    def done(self, door: Door, items: Sequence[Item], **options: object) -> str:
        """Post a batch, work it off, and return its job's id."""
        answer = door.post(items, "", None, **options)
        assert answer.status in (200, 202), answer.body
        self.work(answer.job_id)
        return answer.job_id

    def hold(self, job_id: str) -> None:
        """Make a job look as if a worker were at it."""
        self.rows(
            """UPDATE public.embedding_retry_queue
                  SET status = 'processing', attempts = attempts + 1, lease_token = 1,
                      max_attempts = attempts + 5, leased_by = 'somebody',
                      lease_until = now() + interval '1 hour'
                WHERE status = 'pending' AND job_id = %s""",
            job_id,
        )

    def let_go(self, job_id: str) -> None:
        """Give back what `hold` took."""
        self.rows(
            """UPDATE public.embedding_retry_queue
                  SET status = 'pending', lease_token = NULL, lease_until = NULL, leased_by = NULL
                WHERE status = 'processing' AND job_id = %s""",
            job_id,
        )

    # ---- what holds after every case

    def check_nothing_lost(self) -> None:
        """Check the whole database: states, vectors, attempts, and that counts add up."""
        with self.ctx.database.transaction() as tx:
            for row in self.rows("SELECT id FROM holdfast.jobs"):
                job = jobs.find(tx, row["id"])
                assert job
                assert all(getattr(job.counts, each.name) >= 0 for each in fields(Counts))
                query = "SELECT count(*) AS n FROM holdfast.job_items WHERE job_id = %s"
                assert self.rows(query, job.id) == [{"n": job.counts.total}]
            registered = targets.registered(tx)
            for target in registered:
                self._check_target(tx, target)
        [all_items] = self.rows("SELECT count(*) AS n FROM public.embedding_retry_queue")
        known = [target.target_table for target in registered]
        query = (
            "SELECT count(*) AS n FROM public.embedding_retry_queue WHERE target_table = ANY(%s)"
        )
        assert [all_items] == self.rows(query, known)

    def _check_target(self, tx: Tx, target: Target) -> None:
        query = """SELECT * FROM public.embedding_retry_queue
                    WHERE target_table = %s AND embedding_version = %s"""
        rows = self.rows(query, target.target_table, target.embedding_version)
        ids = [row["target_id"] for row in rows]
        assert len(ids) == len(set(ids))
        vectors = build_sink().read(tx, target, ids)
        for row in rows:
            _check_item(row, vectors.get(row["target_id"]))


def _check_item(row: Mapping[str, Any], vector: list[float] | None) -> None:
    status = ItemStatus(row["status"])
    assert status in (ItemStatus.DONE, ItemStatus.FAILED, ItemStatus.CANCELLED), row
    assert row["max_attempts"] is None or row["attempts"] <= row["max_attempts"]
    if status is ItemStatus.FAILED:
        is_last = row["attempts"] == row["max_attempts"]
        assert is_last or row["error_class"] in PERMANENT, row
    if status is ItemStatus.DONE and not row["skip_reason"]:
        assert vector
        assert float32(vector) == vector_of(row["model"], row["text_content"], DIMENSION)
    else:
        assert vector is None


# ---- what Redis holds -------------------------------------------------------------------------


def in_redis(link: Any) -> bytes:  # noqa: ANN401 - typed for text, and ours speaks bytes
    """Return all that Redis holds, with what RQ has packed unpacked."""
    found: list[bytes] = []
    for key in link.scan_iter():
        found.append(key)
        match link.type(key):
            case b"string":
                found.append(link.get(key))
            case b"hash":
                found += [part for pair in link.hgetall(key).items() for part in pair]
            case b"list":
                found += link.lrange(key, 0, -1)
            case b"set":
                found += link.smembers(key)
            case b"zset":
                found += link.zrange(key, 0, -1)
            case b"stream":
                entries = link.xrange(key)
                found += [part for _, entry in entries for pair in entry.items() for part in pair]
            case kind:
                raise AssertionError(kind)
    return b"\n".join([*found, *map(_unpacked, found)])


def _unpacked(value: bytes) -> bytes:
    for unpack in (zlib.decompress, lambda packed: zlib.decompress(b64decode(packed))):
        with suppress(zlib.error, ValueError):
            return unpack(value)
    return b""


# ---- fixtures: a file of tests imports those that it wants --------------------------------------


@pytest.fixture(name="ground", scope="module")
def make_ground(servers: Servers, template: str) -> Iterator[Ground]:
    """Give one ground to the tests of a file, which keep apart by their clients and rows."""
    name = f"ground_{next(_numbers)}"
    names = {"name": sql.Identifier(name), "template": sql.Identifier(template)}
    create = "CREATE DATABASE {name} TEMPLATE {template} STRATEGY file_copy"
    with psycopg.connect(servers.database_url, autocommit=True) as connection:
        connection.execute(sql.SQL(create).format(**names))
        with Fake(dimension=DIMENSION) as backend:
            opened = _open(backend, _at(servers.database_url, name), _at(servers.redis_url, "0"))
            yield opened
            opened.close()
        connection.execute(sql.SQL("DROP DATABASE {name} WITH (FORCE)").format(**names))


def _open(backend: Fake, database_url: str, redis_url: str) -> Ground:
    environ = {
        "DATABASE_URL": database_url,
        "REDIS_URL": redis_url,
        "EMBEDDING_DIM": str(DIMENSION),
        "EMBEDDER_URL": backend.url,
        "AUTH": "on",
    }
    opened = Ground(environ, backend, create_app(config.load(environ)))
    opened.ctx.link.flushdb()
    return opened


def _at(url: str, path: str) -> str:
    return urlunsplit(urlsplit(url)._replace(path=path))


@dataclass(frozen=True, slots=True)
class Served:
    """The API under gunicorn, with the settings of production."""

    url: str
    running: Running

    @property
    def address(self) -> tuple[str, int]:
        """Where a socket connects to."""
        parts = urlsplit(self.url)
        return str(parts.hostname), int(parts.port or 0)

    def door(self, key: str | None) -> Door:
        """Open a door over sockets, one a request."""
        once = httpx.Limits(max_keepalive_connections=0)
        http = httpx.Client(base_url=self.url, timeout=60, trust_env=False, limits=once)
        return Door(http, key)

    def exchange(self, sent: bytes) -> bytes:
        """Send bytes, say that no more come, and return all that comes back."""
        with socket.create_connection(self.address, timeout=60) as link:
            link.sendall(sent)
            link.shutdown(socket.SHUT_WR)
            with link.makefile("rb") as answer:
                return answer.read()


@contextmanager
def serving(
    environ: Mapping[str, str], log: Path, config_file: str = GUNICORN
) -> Generator[Served]:
    """Start the API under gunicorn, wait until it answers, and stop it at the end."""
    port = free_port()
    gunicorn = ("gunicorn", "app.web:create_app()", "--config", config_file)
    running = processes.start(gunicorn, {**environ, "PORT": str(port)}, log)
    served = Served(f"http://127.0.0.1:{port}", running)
    try:
        wait_for(lambda: _answers(served), 60)
        yield served
    finally:
        running.end()


@contextmanager
def working(environ: Mapping[str, str], log: Path) -> Generator[Running]:
    """Start a worker, wait until it hears bells, and stop it at the end."""
    running = processes.start(
        ("worker", "run", "embeddings"), {"QUEUE_WAIT_TIME": "1", **environ}, log
    )
    query = "SELECT name FROM holdfast.processes WHERE pid = %s"
    try:
        with psycopg.connect(environ["DATABASE_URL"], autocommit=True) as connection:
            wait_for(
                lambda: _lives(running) and connection.execute(query, [running.pid]).fetchone(), 60
            )
        yield running
    finally:
        running.end()


def _lives(running: Running) -> bool:
    assert running.is_alive, running.said
    return True


def _answers(served: Served) -> bool:
    assert served.running.is_alive, served.running.said
    with suppress(httpx.TransportError):
        return httpx.get(f"{served.url}/livez", trust_env=False).is_success
    return False


@pytest.fixture(name="served", scope="module")
def make_served(ground: Ground, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """Serve the ground of the file under gunicorn."""
    with serving(ground.environ, tmp_path_factory.mktemp("served") / "api.log") as served:
        yield served


@pytest.fixture(name="backend")
def make_backend(ground: Ground) -> Iterator[Fake]:
    """Give the backend, which refuses some texts and forgets afterwards what a test told it."""
    refusal = Reply(status=400, error="the input length exceeds the context length")
    ground.backend.rules.clear()
    ground.backend.when(refusal, marker=REFUSED)
    yield ground.backend
    ground.backend.rules.clear()


@pytest.fixture(name="door")
def make_door(ground: Ground, backend: Fake) -> Door:
    """Give the door of a new client."""
    assert backend.url == ground.settings.embedder_url
    return ground.door()
