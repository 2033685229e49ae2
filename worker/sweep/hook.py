"""The hook: which alerts are on is told to whoever wants to be told, beside the other duties."""

import logging
from threading import Event, Thread
from urllib.parse import urlsplit, urlunsplit

import orjson

from app.adapters.http import Call, Http
from app.core.context import Context
from app.core.errors import StoreUnavailable, WorkError
from app.core.store import fleet

log = logging.getLogger(__name__)

TELL_SECONDS = 10.0


class Hook:
    """Posts the list of alerts that are on whenever it changes, and once at the start.

    The whole list and not what changed: so what a restart or a failed call has swallowed is said by
    the next one, and an empty list says that all is over.
    """

    def __init__(self, ctx: Context, leads: Event) -> None:
        parts = urlsplit(ctx.settings.alert_webhook_url)
        self._ctx = ctx
        self._leads = leads
        self._path = urlunsplit(("", "", parts.path or "/", parts.query, ""))
        self._http = Http(urlunsplit((parts.scheme, parts.netloc, "/", "", "")))
        self._told: list[fleet.Alert] | None = None
        self._is_failing = False
        self._stop = Event()
        self._thread = Thread(target=self._run, name="hook", daemon=True)

    def start(self) -> None:
        """Begin."""
        self._thread.start()

    def stop(self) -> None:
        """End after the call in hand."""
        self._stop.set()
        self._thread.join()
        self._http.close()

    def _run(self) -> None:
        while not self._stop.is_set():
            if self._leads.is_set():
                self.run_once()
            self._stop.wait(self._ctx.settings.sweep_seconds)

    def run_once(self) -> bool:
        """Tell what is on where that has not been told; return whether it was."""
        try:
            with self._ctx.database.transaction() as tx:
                alerts = fleet.alerts(tx)
            if _names(alerts) == _names(self._told):
                return False
            shown = [
                {"name": each.name, "since": each.since, "message": each.message} for each in alerts
            ]
            content = orjson.dumps({"alerts": shown})
            call = Call("POST", self._path, content, wants_answer=False)
            self._http.send(call, seconds=TELL_SECONDS, texts=(self._path,))
        except (StoreUnavailable, WorkError) as exc:
            self._note_failure(exc)
            return False
        self._told, self._is_failing = alerts, False
        return True

    def _note_failure(self, exc: StoreUnavailable | WorkError) -> None:
        if not self._is_failing:
            self._is_failing = True
            message = "ALERT_WEBHOOK_URL was not told; tried again at each sweep: %s"
            log.warning(message, exc.message, extra={"event": "hook_failed"})


def _names(alerts: list[fleet.Alert] | None) -> list[tuple[str, object]] | None:
    # A message holds numbers that grow: those alone are no news.
    return None if alerts is None else [(each.name, each.since) for each in alerts]
