"""Campaigns: targets embedded in another version, a step at a time, beside the other duties."""

import logging
from threading import Event, Thread

from app.core import versions
from app.core.context import Context
from app.core.errors import StoreUnavailable

log = logging.getLogger(__name__)

HASTY_SECONDS = 1.0
"""Between two steps while rows are read, or while daily work stands still for a cut-over."""


class Campaigns:
    """A thread that moves campaigns on: they read whole tables, and wait for whoever locks one."""

    def __init__(self, ctx: Context, stores: versions.Stores, leads: Event) -> None:
        self._ctx = ctx
        self._stores = stores
        self._leads = leads
        self._stop = Event()
        self._thread = Thread(target=self._run, name="campaigns", daemon=True)

    def start(self) -> None:
        """Begin."""
        self._thread.start()

    def stop(self) -> None:
        """End after the step in hand."""
        self._stop.set()
        self._thread.join()

    def _run(self) -> None:
        while not self._stop.is_set():
            is_urgent = self._leads.is_set() and self._step()
            seconds = self._ctx.settings.sweep_seconds
            self._stop.wait(min(seconds, HASTY_SECONDS) if is_urgent else seconds)

    def _step(self) -> bool:
        """Take a step; return whether the next one is to follow soon."""
        try:
            counts = versions.step(self._ctx, self._stores)
            is_urgent = versions.is_urgent(self._ctx)
        except StoreUnavailable as exc:  # or a lock on a target's table: then it waits for that
            log.warning("campaigns wait: %s", exc, extra={"event": "campaign"})
            return False
        except Exception:
            log.exception("campaigns failed", extra={"event": "campaign"})
            return False
        if counts:
            facts = {"event": "sweep_done", "reason": "campaigns", "counts": dict(counts)}
            log.info("sweep: campaigns", extra=facts)
        return is_urgent
