"""The HTTP door: `create_app` is its composition root."""

from threading import BoundedSemaphore, Event

from flask import Flask

from app.core import config, logs
from app.core.config import Settings
from app.core.context import open_context, source_options
from app.core.ports import find
from app.web import jobs, metrics, ops, pages, problems, submit, targets
from app.web.auth import Keys

EXTRA_CONNECTIONS = 4


def create_app(settings: Settings | None = None) -> Flask:
    """Make the application; raises ConfigError naming every fault of the settings.

    Nothing is connected before the first request, so it may be made before a fork.
    """
    settings = settings or config.load()
    logs.set_up(settings.log_level)
    app = Flask(__name__, static_folder="static", static_url_path="/static")
    ctx = open_context(
        settings,
        application="holdfast api",
        most_connections=settings.web_threads + EXTRA_CONNECTIONS,
    )
    app.extensions.update(
        context=ctx,
        keys=Keys(ctx),
        sink=find("sinks", settings.primary_sink)(),
        source=find("sources", settings.trace_source)(source_options(settings)),
        streams=BoundedSemaphore(settings.max_streams),
        traces=BoundedSemaphore(settings.trace_max_sync),
        # Set when this process is asked to stop: whoever waits for a job is answered at once.
        stopping=Event(),
    )
    for views in (submit, jobs, ops, targets):
        app.register_blueprint(views.blueprint)
    app.register_blueprint(jobs.traces)
    metrics.register(app)
    pages.register(app)
    problems.register(app)
    return app
