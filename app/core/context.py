"""The context that every use case gets first: settings and connections, opened in one place."""

from dataclasses import dataclass

from app.core.bells import Bells
from app.core.config import Settings
from app.core.link import Link, connect
from app.core.live import Live
from app.core.model import is_trace, queue_for
from app.core.ports import SinkOptions, SourceOptions
from app.core.store.database import Database

BELL_MARGIN_SECONDS = 40.0


@dataclass(frozen=True, slots=True)
class Context:
    """Settings, Postgres, bells and live facts of one process."""

    settings: Settings
    database: Database
    link: Link
    bells: Bells
    live: Live

    @property
    def bell_seconds(self) -> float:
        """How long RQ lets the bell of an embedding job run: its turn, the longest slice, a margin.

        A slice may wait for a model to be loaded, and then try whether a harmless text passes.
        """
        settings = self.settings
        call = settings.embedder_timeout_seconds
        longest = max(settings.embedder_load_seconds, call) + call
        return settings.queue_bell_seconds + longest + BELL_MARGIN_SECONDS

    @property
    def trace_bell_seconds(self) -> float:
        """The same for a trace job, whose slices are segments."""
        settings = self.settings
        return settings.queue_bell_seconds + settings.trace_segment_seconds + BELL_MARGIN_SECONDS

    def queue(self, job_id: str, project: str, served: frozenset[str]) -> str:
        """Return the queue of a job's bells; `served` are those that workers listen on."""
        if is_trace(job_id):
            return self.settings.trace_worker_queue
        return queue_for(project, served)

    def close(self) -> None:
        """Close what is open."""
        self.database.close()
        self.link.close()


def open_context(settings: Settings, *, application: str, most_connections: int) -> Context:
    """Make a context; nothing connects before it is used, so this may be called before a fork."""
    link = connect(settings.redis_url)
    return Context(
        settings=settings,
        database=Database(
            settings.database_url, application=application, most_connections=most_connections
        ),
        link=link,
        bells=Bells(link),
        live=Live(link),
    )


def sink_options(settings: Settings, name: str) -> SinkOptions:
    """Return what a follower is built from; a site's own gets the URL and the folder too."""
    return SinkOptions(
        url="" if name == "lancedb" else settings.opensearch_url,
        path=settings.lancedb_path,
        prefix=settings.sink_prefix,
        mapping=settings.opensearch_mapping,
        seconds=settings.sink_timeout_seconds,
    )


def source_options(settings: Settings) -> SourceOptions:
    """Return what the trace source is built from."""
    return SourceOptions(
        url=settings.trace_source_url or settings.database_url,
        queries=settings.trace_source_queries,
        statement_seconds=settings.trace_source_timeout_seconds,
    )
