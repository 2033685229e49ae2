"""The composition root of the worker door: what the parent loads, and what each horse opens."""

import os
import sys
from collections.abc import Callable
from dataclasses import dataclass

from app.core.config import Settings
from app.core.context import Context, open_context, sink_options, source_options
from app.core.model import EMBEDDINGS
from app.core.ports import (
    Embedder,
    EmbedderOptions,
    FollowerSink,
    PrimarySink,
    SourceOptions,
    TraceSource,
    find,
)

HORSE_CONNECTIONS = 3


@dataclass(frozen=True, slots=True)
class Recipe:
    """What the parent settles before it forks: settings, adapters loaded, nothing opened."""

    settings: Settings
    queue: str
    build_embedder: Callable[[EmbedderOptions], Embedder]
    build_sink: Callable[[], PrimarySink]
    pid: int
    """The process that prepared this. A horse cannot ask for its parent: it may be gone already."""


@dataclass(frozen=True, slots=True)
class Horse:
    """What one bell works with."""

    context: Context
    embedder: Embedder
    sink: PrimarySink
    backend: str
    queue: str
    """Where its bell came from, and where it rings again."""
    leased_by: str
    """The bell's id: the name under which it holds leases."""
    must_stop: Callable[[], bool]
    """Whether to stop after this slice: the worker is being stopped, or its parent is gone."""

    def close(self) -> None:
        """Close what was opened."""
        self.embedder.close()
        self.context.close()


@dataclass(frozen=True, slots=True)
class TraceRecipe:
    """The same for the bells of trace jobs."""

    settings: Settings
    queue: str
    build_source: Callable[[SourceOptions], TraceSource]
    pid: int


@dataclass(frozen=True, slots=True)
class TraceHorse:
    """What one bell of a trace job works with."""

    context: Context
    source: TraceSource
    leased_by: str
    must_stop: Callable[[], bool]

    def close(self) -> None:
        """Close what was opened."""
        self.source.close()
        self.context.close()


def prepare_trace(settings: Settings) -> TraceRecipe:
    """Load the trace source, so that a fork finds it in memory; open nothing.

    Raises ConfigError where it is unknown or refuses its options.
    """
    build_source = find("sources", settings.trace_source)
    build_source(source_options(settings)).close()
    return TraceRecipe(settings, settings.trace_worker_queue, build_source, os.getpid())


def open_trace_horse(
    recipe: TraceRecipe, *, leased_by: str, stop_asked: Callable[[], bool]
) -> TraceHorse:
    """Open the connections of one bell of a trace job; called after the fork only."""
    settings = recipe.settings
    return TraceHorse(
        context=open_context(
            settings, application=f"holdfast {leased_by}", most_connections=HORSE_CONNECTIONS
        ),
        source=recipe.build_source(source_options(settings)),
        leased_by=leased_by,
        must_stop=_must_stop(recipe.pid, stop_asked),
    )


def _must_stop(parent: int, stop_asked: Callable[[], bool]) -> Callable[[], bool]:
    return lambda: stop_asked() or parent not in (os.getppid(), os.getpid())


def prepare(settings: Settings, queue: str = EMBEDDINGS) -> Recipe:
    """Load the chosen adapters, so that a fork finds them in memory; open nothing.

    Raises ConfigError where an adapter is unknown or refuses its options.
    """
    recipe = Recipe(
        settings=settings,
        queue=queue,
        build_embedder=find("embedders", settings.embedder),
        build_sink=find("sinks", settings.primary_sink),
        pid=os.getpid(),
    )
    recipe.build_embedder(embedder_options(settings)).close()
    for build in (recipe.build_embedder, recipe.build_sink):
        preload = getattr(sys.modules.get(build.__module__), "preload", None)
        if preload is not None:  # an adapter that has more to load than its module
            preload()
    return recipe


def open_horse(recipe: Recipe, *, leased_by: str, stop_asked: Callable[[], bool]) -> Horse:
    """Open the connections of one bell; called after the fork only."""
    settings = recipe.settings
    return Horse(
        context=open_context(
            settings, application=f"holdfast {leased_by}", most_connections=HORSE_CONNECTIONS
        ),
        embedder=recipe.build_embedder(embedder_options(settings)),
        sink=recipe.build_sink(),
        backend=settings.embedder,
        queue=recipe.queue,
        leased_by=leased_by,
        must_stop=_must_stop(recipe.pid, stop_asked),
    )


def open_followers(settings: Settings) -> dict[str, FollowerSink]:
    """Make the sinks that follow, by their names in SINKS; nothing connects before it is used.

    Raises ConfigError where one is unknown or refuses its options.
    """
    return {name: find("sinks", name)(sink_options(settings, name)) for name in settings.followers}


def embedder_options(settings: Settings) -> EmbedderOptions:
    """Return what the chosen embedder is built from."""
    return EmbedderOptions(
        url=settings.embedder_url,
        api_key=settings.embedder_api_key,
        model=settings.embedding_model,
        dimension=settings.embedding_dim,
    )
