"""Surveys: how much of each target has its vector, measured beside the other duties."""

import logging
from threading import Event, Thread

from app.core import coverage
from app.core.context import Context
from app.core.errors import StoreUnavailable
from app.core.ports import PrimarySink

log = logging.getLogger(__name__)


class Surveys:
    """A thread that measures, so that a large table keeps no duty of the sweeper waiting."""

    def __init__(self, ctx: Context, primary: PrimarySink, leads: Event) -> None:
        self._ctx = ctx
        self._primary = primary
        self._leads = leads
        self._stop = Event()
        self._thread = Thread(target=self._run, name="surveys", daemon=True)

    def start(self) -> None:
        """Begin."""
        self._thread.start()

    def stop(self) -> None:
        """End after the survey in hand."""
        self._stop.set()
        self._thread.join()

    def _run(self) -> None:
        while not self._stop.is_set():
            if self._leads.is_set():
                self._measure()
                self._stop.wait(self._ctx.settings.coverage_seconds)
            else:
                self._stop.wait(1)

    def _measure(self) -> None:
        try:
            found = coverage.measure(self._ctx, self._primary)
        except StoreUnavailable as exc:
            log.warning("coverage not measured: %s", exc, extra={"event": "coverage"})
        except Exception:
            log.exception("coverage not measured", extra={"event": "coverage"})
        else:
            missing = found["missing"]
            level = logging.WARNING if missing else logging.INFO
            facts = {"event": "coverage", "counts": dict(found)}
            log.log(level, "%d rows have no vector and none on its way", missing, extra=facts)
