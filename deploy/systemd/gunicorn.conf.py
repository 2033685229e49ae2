"""How gunicorn serves the API; `make up` uses it too.

The settings of the application decide, so that there is one place to set anything.
"""

from app.core import config

_settings = config.load()

_host = f"[{_settings.host}]" if ":" in _settings.host else _settings.host
bind = f"{_host}:{_settings.port}"
worker_class = "gthread"
# One process by default: it is the threads that wait for Postgres; more processes with
# `--workers`, each with its own pool.
workers = 1
threads = _settings.web_threads
# Streams may take as long as STREAM_SECONDS; a thread that hangs does not stop the heartbeat.
timeout = 120
# Longer than the longest database statement of a request that is under way.
graceful_timeout = 60
keepalive = 15
# Query and headers never hold texts; these are gunicorn's own bounds, made explicit.
limit_request_line = 8190
limit_request_fields = 100
accesslog = None
errorlog = "-"
loglevel = "warning"
control_socket_disable = True


def post_worker_init(worker):  # noqa: ANN001, ANN201 - gunicorn's own shape
    """Tell the application as soon as a stop is asked for, so that long polls end."""
    import signal  # noqa: PLC0415

    stopping = worker.app.callable.extensions["stopping"]
    graceful = signal.getsignal(signal.SIGTERM)

    def stop(number, frame):  # noqa: ANN001, ANN202
        stopping.set()
        graceful(number, frame)

    signal.signal(signal.SIGTERM, stop)
