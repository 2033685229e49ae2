"""Trace jobs worked on in the test's own process, bell by bell, on the demo's events."""

from collections.abc import Callable, Generator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field, replace
from datetime import datetime
from itertools import count
from typing import Any

import orjson
import psycopg
from psycopg.rows import dict_row

from app.core import config, status, submission, trace_result
from app.core.config import Settings
from app.core.context import Context, open_context
from app.core.domains import Domain
from app.core.errors import FailedItemsRemain, StoreUnavailable
from app.core.model import Caller, Job
from app.core.ports import Lines, TraceReader, TraceSource
from app.core.requests import TraceRequest, check_trace
from app.core.store import jobs, traces
from app.core.store.traces import Segment
from worker import tracejob
from worker.runtime import TraceHorse, open_trace_horse, prepare_trace
from worker.sweep import leases, rings

CALLER = Caller("tests", frozenset({"submit", "read", "requeue"}))
LOOKUP = ("history", "materials")

ELAPSE = """
UPDATE holdfast.trace_jobs
   SET next_attempt_at = next_attempt_at - make_interval(secs => %(seconds)s),
       lease_until = lease_until - make_interval(secs => %(seconds)s)
"""
IDS = """
SELECT container_id FROM trace_demo.container ORDER BY md5(container_id), 1 LIMIT %(count)s
"""


def never() -> bool:
    """Say that nobody asks a horse to stop."""
    return False


def _nothing(domain: str, ids: Sequence[str]) -> None:
    """Let the source be."""


@dataclass
class TraceMill:
    """A database, a Redis number and a source, and the flow of a trace worker over them."""

    settings: Settings
    ctx: Context
    bells: "count[int]" = field(default_factory=count)

    # ---- what there is

    def rows(self, query: str, **values: object) -> list[dict[str, Any]]:
        """Ask our Postgres."""
        with self.ctx.database.session() as connection:
            cursor = connection.execute(query, values or None)
            return cursor.fetchall() if cursor.description else []

    def source_rows(self, query: str, **values: object) -> list[dict[str, Any]]:
        """Ask the source."""
        url = self.settings.trace_source_url
        with psycopg.connect(url, row_factory=dict_row) as connection:
            cursor = connection.execute(query.encode(), values or None)
            return cursor.fetchall() if cursor.description else []

    def ids(self, number: int) -> list[str]:
        """Return a fixed choice of container ids."""
        return [row["container_id"] for row in self.source_rows(IDS, count=number)]

    def job(self, job_id: str) -> Job:
        """Return a job as Postgres has it."""
        with self.ctx.database.transaction() as tx:
            found = jobs.find(tx, job_id)
        assert found
        return found

    def body(self, job_id: str) -> dict[str, Any]:
        """Return a job as the API shows it."""
        found: dict[str, Any] = orjson.loads(status.read(self.ctx, CALLER, job_id).body)
        return found

    def segments(self, job_id: str) -> list[Segment]:
        """Return the segments of a job."""
        with self.ctx.database.transaction() as tx:
            return traces.segments(tx, job_id)

    def statuses(self, job_id: str) -> list[str]:
        """Return how the segments of a job stand."""
        return [each.status for each in self.segments(job_id)]

    def page_keys(self) -> list[bytes]:
        """Return the keys of all pages in Redis."""
        return sorted(self.ctx.link.scan_iter("trace:job:*:result:*"))

    def manifest(self, job_id: str) -> dict[str, Any]:
        """Return what the result of a job consists of."""
        return trace_result.manifest(self.ctx, CALLER, job_id)

    def result(self, job_id: str, domain: str) -> list[dict[str, Any]]:
        """Return all rows of a domain, page by page."""
        found: list[dict[str, Any]] = []
        offset: int | None = 0
        while offset is not None:
            page = self.page(job_id, domain, offset=offset)
            found += page["data"]
            offset = page["next"]
        return found

    def page(
        self, job_id: str, domain: str, *, offset: int = 0, limit: int = 5000
    ) -> dict[str, Any]:
        """Return a page of rows."""
        answer = trace_result.rows(self.ctx, CALLER, job_id, domain, offset=offset, limit=limit)
        found: dict[str, Any] = orjson.loads(answer)
        return found

    # ---- what is done

    def submit(
        self,
        ids: Sequence[str] | int = 300,
        *,
        domains: Sequence[str] = LOOKUP,
        profile: str = "query_tool",
        params: Mapping[str, Any] | None = None,
    ) -> str:
        """Submit a request as a job, whatever its size."""
        chosen = self.ids(ids) if isinstance(ids, int) else list(ids)
        asked = {"profile": profile, "container_ids": chosen, "domains": list(domains)}
        request = TraceRequest.model_validate({**asked, "params": dict(params or {})})
        traced = check_trace(request, frozenset(domains), most_ids=10**6)
        return submission.submit_trace(self.ctx, CALLER, traced).job_id

    @contextmanager
    def horse(
        self, *, stop: Callable[[], bool] = never, hook: "Hook | None" = None, lost_rows: int = 0
    ) -> Generator[TraceHorse]:
        """Open what one bell works with, as a worker does after its fork."""
        recipe = prepare_trace(self.settings)
        horse = open_trace_horse(recipe, leased_by=f"bell-{next(self.bells)}", stop_asked=stop)
        source = HookedSource(horse.source, hook or _nothing, lost_rows)
        try:
            yield replace(horse, source=source)
        finally:
            horse.close()

    def drain(self, job_id: str, *, run: int | None = None, **more: Any) -> dict[str, int]:  # noqa: ANN401 - horse()'s
        """Follow one bell of a job."""
        with self.horse(**more) as horse:
            return tracejob.drain(horse, job_id, self.job(job_id).run if run is None else run)

    @contextmanager
    def draining(self, job_id: str, **more: Any) -> "Generator[Future[dict[str, int]]]":  # noqa: ANN401 - horse()'s
        """Follow one bell in a thread while the block runs, and wait for its end."""
        with ThreadPoolExecutor(1) as pool:
            yield pool.submit(self.drain, job_id, **more)

    def sweep(self) -> None:
        """Do what a sweeper does with leases and jobs."""
        leases.run_once(self.ctx)
        rings.run_once(self.ctx)

    def elapse(self, seconds: float) -> None:
        """Let time pass for everything that waits for a moment."""
        self.rows(ELAPSE, seconds=seconds)

    def work(self, job_id: str, *, rounds: int = 10) -> Job:
        """Sweep and follow bells until a job is final, with a long time between two of them."""
        for _ in range(rounds):
            with suppress(FailedItemsRemain, StoreUnavailable):
                self.drain(job_id)
            self.sweep()
            job = self.job(job_id)
            if job.state.is_final:
                return job
            self.elapse(400)
        raise AssertionError(f"{job_id} is not final: {self.job(job_id).counts}")


@contextmanager
def open_trace_mill(
    database_url: str, redis_url: str, source_url: str, **more: str
) -> Generator[TraceMill]:
    """Open one on servers that are there, with settings of its own."""
    environ = {
        "DATABASE_URL": database_url,
        "REDIS_URL": redis_url,
        "TRACE_SOURCE_URL": source_url,
        "TRACE_SEGMENT_CIDS": "100",
    }
    settings = config.load({**environ, **more})
    with ExitStack() as stack:
        ctx = open_context(settings, application="test", most_connections=8)
        stack.callback(ctx.close)
        yield TraceMill(settings, ctx)


# ---- a source that is interfered with -----------------------------------------------------------

Hook = Callable[[str, Sequence[str]], None]


@dataclass(frozen=True, slots=True)
class _HookedReader:
    reader: TraceReader
    hook: Hook
    lost_rows: int

    def events(
        self, domain: Domain, ids: Sequence[str], *, as_of: datetime, deadline: float
    ) -> Generator[Lines, None, int]:
        """Read what the real source has, after the hook was called."""
        self.hook(domain.name, ids)
        sent = yield from self.reader.events(domain, ids, as_of=as_of, deadline=deadline)
        return sent + self.lost_rows


@dataclass
class HookedSource:
    """The real source, with something that happens before each of its statements."""

    source: TraceSource
    hook: Hook
    lost_rows: int = 0
    """How many rows it says it sent beyond those that come."""
    name: str = "hooked"
    ids_per_statement: int = 100_000

    def domains(self) -> frozenset[str]:
        """Return the domains of the real one."""
        return self.source.domains()

    @contextmanager
    def open(self) -> Generator[TraceReader]:
        """Open the real one."""
        with self.source.open() as reader:
            yield _HookedReader(reader, self.hook, self.lost_rows)

    def close(self) -> None:
        """Close the real one."""
        self.source.close()
