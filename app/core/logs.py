"""One JSON line an event, to standard output; nothing but the fields listed here."""

import json
import logging
import sys
from datetime import UTC, datetime

FIELDS = (
    "event",
    "job_id",
    "item_id",
    "bell",
    "queue",
    "worker",
    "client",
    "backend",
    "model",
    "error_class",
    "reason",
    "items",
    "segment",
    "state",
    "counts",
    "duration_seconds",
    "method",
    "route",
    "status",
)


class JsonFormatter(logging.Formatter):
    """Writes a record as one line: time, level, event, message, then the known fields."""

    def format(self, record: logging.LogRecord) -> str:
        """Return the record as JSON."""
        line: dict[str, object] = {
            "ts": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname,
            "message": record.getMessage(),
        }
        for name in FIELDS:
            value = getattr(record, name, None)
            if value is not None:
                line[name] = value
        if record.exc_info and record.exc_info[0]:
            # Frames only: the text of an exception may quote what was being worked on.
            line["exception"] = record.exc_info[0].__name__
            line["traceback"] = _frames(record)
        return json.dumps(line, ensure_ascii=False, default=str)


def _frames(record: logging.LogRecord) -> list[str]:
    frames: list[str] = []
    step = record.exc_info[2] if record.exc_info else None
    while step is not None:
        code = step.tb_frame.f_code
        frames.append(f"{code.co_filename.rpartition('/')[2]}:{step.tb_lineno} {code.co_name}")
        step = step.tb_next
    return frames[-12:]


def set_up(level: str) -> None:
    """Send every record of this process to standard output as JSON."""
    handler = logging.StreamHandler(sys.stdout)
    handler.setFormatter(JsonFormatter())
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(level)
    for name in ("httpx", "httpcore", "rq", "psycopg.pool"):
        logging.getLogger(name).setLevel(logging.WARNING)
