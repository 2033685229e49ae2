"""How gunicorn serves the API; `make up` uses it too.

The settings of the application decide, so that there is one place to set anything. Whatever this
file binds to a name that gunicorn knows is a setting of gunicorn's.
"""

import json
import signal
import time

from gunicorn import util
from gunicorn.http.parser import Parser
from gunicorn.http.unreader import SocketUnreader

from app.core.checks import warn_of_eviction
from app.core.config import load

_settings = load()
_host = f"[{_settings.host}]" if ":" in _settings.host else _settings.host

bind = f"{_host}:{_settings.port}"
worker_class = "gthread"
# One process by default: it is the threads that wait for Postgres; more processes with
# `--workers`, each with its own pool.
workers = 1
threads = _settings.web_threads
timeout = 120
# Longer than the longest database statement of a request that is under way.
graceful_timeout = 60
keepalive = 15
limit_request_line = 8190
limit_request_fields = 100
control_socket_disable = True
accesslog = None
errorlog = "-"
# At "warning" it writes down the line of a request that it could not read, a key in it too.
loglevel = "error"


def _write_problem(sock, status_int, reason, mesg):  # noqa: ANN001, ANN202 - gunicorn's own shape
    """Refuse what is no HTTP as every error is refused; gunicorn's page would quote it."""
    del mesg
    body = {
        "type": "urn:holdfast:bad_request",
        "title": reason,
        "status": status_int,
        "detail": "the request could not be read as HTTP",
        "code": "bad_request",
    }
    encoded = json.dumps(body).encode()
    head = (
        f"HTTP/1.1 {status_int} {reason}\r\nConnection: close\r\n"
        f"Content-Type: application/problem+json\r\nContent-Length: {len(encoded)}\r\n\r\n"
    )
    util.write_nonblock(sock, head.encode() + encoded)


util.write_error = _write_problem

HEAD_SECONDS = 10
"""How long the head of a request may take: whoever sends it slowly holds a thread, with no key."""

LOGIN = "/login"
"""Its body too may take no longer: it is the only one that is read before a key is known."""

_next_request, _next_chunk = Parser.__next__, SocketUnreader.chunk


def _read_head(parser):  # noqa: ANN001, ANN202 - gunicorn's own shape
    """Read the head of the next request before its time is over."""
    reader = parser.unreader
    reader.ends = time.monotonic() + HEAD_SECONDS
    message = _next_request(parser)
    if message.path != LOGIN:
        reader.ends = None
    return message


def _read_chunk(reader, size_hint=None):  # noqa: ANN001, ANN202 - gunicorn's own shape
    """Read what comes; of what takes too long, the end."""
    if getattr(reader, "ends", None) is None:
        return _next_chunk(reader, size_hint)
    reader.sock.settimeout(max(0.001, reader.ends - time.monotonic()))
    try:
        return _next_chunk(reader, size_hint)
    except TimeoutError:
        return b""
    finally:
        reader.sock.settimeout(None)


Parser.__next__, SocketUnreader.chunk = _read_head, _read_chunk


def post_worker_init(worker):  # noqa: ANN001, ANN201 - gunicorn's own shape
    """Tell the application as soon as a stop is asked for, so that long polls end."""
    extensions = worker.app.callable.extensions
    warn_of_eviction(extensions["context"].bells)
    stopping = extensions["stopping"]
    graceful = signal.getsignal(signal.SIGTERM)

    def stop(number, frame):  # noqa: ANN001, ANN202
        stopping.set()
        graceful(number, frame)

    signal.signal(signal.SIGTERM, stop)
