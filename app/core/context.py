"""The context that every use case gets first: settings and connections, opened in one place."""

from dataclasses import dataclass

from app.core.bells import Bells
from app.core.config import Settings
from app.core.link import Link, connect
from app.core.live import Live
from app.core.store.database import Database


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
        """How long RQ lets one bell run: its budget, the longest slice, and a margin.

        A slice may wait for a model to be loaded, and then try whether a harmless text passes.
        """
        settings = self.settings
        call = settings.embedder_timeout_seconds
        return settings.queue_bell_seconds + max(settings.embedder_load_seconds, call) + call + 40

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
