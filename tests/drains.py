"""Embedding jobs worked on in the test's own process, bell by bell; time is moved, not waited.

What a job needs of the outside is real: Postgres, Redis, a backend that answers over HTTP.
"""

from collections.abc import Callable, Generator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field, replace
from itertools import count
from typing import Any

from app.core import config, submission
from app.core.config import Settings
from app.core.context import Context, open_context
from app.core.errors import FailedItemsRemain, StoreUnavailable
from app.core.model import Caller, Job
from app.core.ports import Embedder
from app.core.requests import BatchOptions
from app.core.store import jobs
from tests.fakes import Fake, float32, vector_of
from worker import embedding
from worker.runtime import Horse, open_horse, prepare
from worker.sweep import leases, rings

CALLER = Caller("tests", frozenset({"submit", "read", "requeue"}))
TARGET = "ai_insights"

# Whatever is to happen at a time comes that much nearer.
ELAPSE = (
    """UPDATE public.embedding_retry_queue
          SET next_attempt_at = next_attempt_at - make_interval(secs => %(seconds)s)
        WHERE status = 'pending'""",
    """UPDATE holdfast.item_sinks
          SET next_attempt_at = next_attempt_at - make_interval(secs => %(seconds)s)
        WHERE status = 'pending'""",
    """UPDATE holdfast.backends
          SET paused_since = paused_since - make_interval(secs => %(seconds)s),
              paused_until = paused_until - make_interval(secs => %(seconds)s),
              probe_until = probe_until - make_interval(secs => %(seconds)s),
              last_ok_at = last_ok_at - make_interval(secs => %(seconds)s)""",
    "UPDATE holdfast.jobs SET rung_at = rung_at - make_interval(secs => %(seconds)s)",
)

EMPTY = """
DELETE FROM public.embedding_retry_queue; DELETE FROM holdfast.job_items;
DELETE FROM holdfast.job_counts; DELETE FROM holdfast.jobs; DELETE FROM holdfast.item_attempts;
DELETE FROM holdfast.backends; DELETE FROM holdfast.slices; DELETE FROM holdfast.processes;
DELETE FROM holdfast.incidents; DELETE FROM holdfast.canaries; DELETE FROM holdfast.vectors;
DELETE FROM holdfast.requeues; DELETE FROM ai_insights; DELETE FROM conversations
"""


def never() -> bool:
    """Say that nobody asks a horse to stop."""
    return False


@dataclass
class Mill:
    """A database, a Redis number and a backend, and the flow of a worker over them."""

    settings: Settings
    fake: Fake
    ctx: Context
    bells: "count[int]" = field(default_factory=count)

    # ---- what there is

    def rows(self, query: str, **values: object) -> list[dict[str, Any]]:
        """Ask Postgres."""
        with self.ctx.database.session() as connection:
            cursor = connection.execute(query, values or None)
            return cursor.fetchall() if cursor.description else []

    def items(self, job_id: str) -> list[dict[str, Any]]:
        """Return the items of a job in input order."""
        query = """SELECT q.*, i.position FROM holdfast.job_items i
                     JOIN public.embedding_retry_queue q ON q.id = i.item_id
                    WHERE i.job_id = %(job_id)s ORDER BY i.position"""
        return self.rows(query, job_id=job_id)

    def column(self, job_id: str, name: str) -> list[Any]:
        """Return one column of the items of a job, in input order."""
        return [item[name] for item in self.items(job_id)]

    def job(self, job_id: str) -> Job:
        """Return a job as Postgres has it."""
        with self.ctx.database.transaction() as tx:
            found = jobs.find(tx, job_id)
        assert found
        return found

    def backend(self, model: str | None = None) -> dict[str, Any]:
        """Return what is known of the backend."""
        query = """SELECT *, paused_since IS NOT NULL AS is_paused,
                          extract(epoch FROM paused_until - now())::float8 AS seconds_left
                     FROM holdfast.backends WHERE model = %(model)s"""
        found = self.rows(query, model=model or self.settings.embedding_model)
        return found[0] if found else {"is_paused": False}

    def label(self, table: str = TARGET) -> str:
        """Return how a target is named where it is paused."""
        return f"{table} {self.settings.version_label}"

    def vectors(self, table: str = TARGET) -> dict[int, list[float] | None]:
        """Return what the target table holds."""
        query = f"SELECT id, embedding::real[] AS vector FROM {table} ORDER BY id"  # noqa: S608
        rows = self.rows(query)
        return {row["id"]: row["vector"] and float32(row["vector"]) for row in rows}

    def right(self, *texts: str) -> list[list[float]]:
        """Return the one right vector of each text."""
        dimension = self.settings.embedding_dim
        return [vector_of(self.settings.embedding_model, text, dimension) for text in texts]

    @property
    def sizes(self) -> list[int]:
        """How many texts each call had so far."""
        return [call.items for call in self.fake.calls]

    # ---- what is done

    def submit(
        self,
        *texts: str,
        first: int = 1,
        table: str = TARGET,
        client: str = CALLER.client,
        **options: Any,  # noqa: ANN401 - of a batch
    ) -> str:
        """Submit texts for rows of a target table, which are made where they are missing."""
        ids = range(first, first + len(texts))
        insert = f"""INSERT INTO {table} (id, body) SELECT unnest(%(ids)s::bigint[]), ''
                         ON CONFLICT DO NOTHING"""
        self.rows(insert, ids=list(ids))
        values = [
            {"target_table": table, "target_id": number, "text": text}
            for number, text in zip(ids, texts, strict=True)
        ]
        incoming = submission.Incoming(BatchOptions(**options), values)
        caller = replace(CALLER, client=client)
        return submission.submit(self.ctx, caller, incoming).job_id

    @contextmanager
    def horse(
        self, *, stop: Callable[[], bool] = never, embedder: Embedder | None = None
    ) -> Generator[Horse]:
        """Open what one bell works with, as a worker does after its fork."""
        recipe = prepare(self.settings)
        horse = open_horse(recipe, leased_by=f"bell-{next(self.bells)}", stop_asked=stop)
        try:
            yield replace(horse, embedder=embedder) if embedder else horse
        finally:
            horse.close()

    def drain(self, job_id: str, *, run: int | None = None, **more: Any) -> dict[str, int]:  # noqa: ANN401 - horse()'s
        """Follow one bell of a job."""
        with self.horse(**more) as horse:
            return embedding.drain(horse, job_id, self.job(job_id).run if run is None else run)

    @contextmanager
    def draining(self, job_id: str, **more: Any) -> "Generator[Future[dict[str, int]]]":  # noqa: ANN401 - horse()'s
        """Follow one bell in a thread while the block runs, and wait for its end."""
        with ThreadPoolExecutor(1) as pool:
            yield pool.submit(self.drain, job_id, **more)

    def empty(self) -> None:
        """Begin anew: no jobs, no rows, nothing known of any backend, no key in Redis."""
        self.rows(EMPTY)
        self.ctx.link.flushdb()

    def sweep(self) -> None:
        """Do what a sweeper does with leases and jobs."""
        leases.run_once(self.ctx)
        rings.run_once(self.ctx)

    def elapse(self, seconds: float) -> None:
        """Let time pass for everything that waits for a moment."""
        with self.ctx.database.transaction() as tx:
            for statement in ELAPSE:
                tx.execute(statement, {"seconds": seconds})

    def work(self, job_id: str, *, rounds: int = 40) -> Job:
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
def open_mill(database_url: str, redis_url: str, fake: Fake, **more: str) -> Generator[Mill]:
    """Open one on servers that are there, with settings of its own."""
    environ = {
        "DATABASE_URL": database_url,
        "REDIS_URL": redis_url,
        "EMBEDDER_URL": fake.url,
        "EMBEDDING_DIM": str(fake.dimension),
    }
    settings = config.load({**environ, **more})
    with ExitStack() as stack:
        ctx = open_context(settings, application="test", most_connections=8)
        stack.callback(ctx.close)
        yield Mill(settings, fake, ctx)
