"""The sweeper: one leader that makes good what was lost, each tick and when something is due."""

import logging
import math
import os
import secrets
import signal
import socket
import time
from collections import Counter
from collections.abc import Callable, Mapping
from threading import Event
from types import FrameType

from app.core import versions
from app.core.config import Settings
from app.core.context import Context, open_context
from app.core.errors import StoreUnavailable
from app.core.ports import find
from app.core.store import fleet, jobs, schema
from app.core.store.database import Tx, translated
from worker.notice import Notice
from worker.runtime import open_followers
from worker.sweep import alerts, cleanup, leases, rings, unowned
from worker.sweep.campaigns import Campaigns
from worker.sweep.followers import Following
from worker.sweep.hook import Hook
from worker.sweep.surveys import Surveys

log = logging.getLogger(__name__)

Duty = Callable[[Context], Counter[str]]

DUTIES: tuple[tuple[str, Duty], ...] = (
    ("leases", leases.run_once),
    ("unowned", unowned.run_once),
    ("rings", rings.run_once),
    ("alerts", alerts.run_once),
)
NOW_AND_THEN: tuple[tuple[str, Duty, float], ...] = (
    ("turns", rings.give_turns, jobs.LOW_TURN_SECONDS),
    ("cleanup", cleanup.run_once, 3600.0),
)
"""Duties that are done at the first tick after so many seconds."""

LEAST_WAIT_SECONDS = 0.2
"""A floor under the pause between two ticks, so that a due item nobody takes does not spin us."""

STANDBY_SECONDS = 1.0
LEAST_ALIVE_SECONDS = 5.0


def run(settings: Settings) -> int:
    """Sweep until SIGTERM or SIGINT; two sweepers are harmless, one of them waits."""
    sinks = open_followers(settings)
    ctx = open_context(
        settings, application="holdfast sweeper", most_connections=7 + 2 * len(sinks)
    )
    primary = find("sinks", settings.primary_sink)()
    following = Following(ctx, primary, sinks)
    notice = Notice.of_service()
    sweeper = Sweeper(ctx, following.counts, notice)
    beside: list[Following | Surveys | Campaigns | Hook] = [
        following,  # closes the sinks, so it is the last to be stopped
        Surveys(ctx, primary, sweeper.leads),
        Campaigns(ctx, versions.Stores(primary, sinks), sweeper.leads),
    ]
    if settings.alert_webhook_url:
        beside.append(Hook(ctx, sweeper.leads))
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, sweeper.stop)
    log.info("Sweeper starting", extra={"event": "worker_start", "worker": sweeper.name})
    for each in beside:
        each.start()
    try:
        sweeper.run()
    finally:
        for each in reversed(beside):
            each.stop()
        ctx.close()
    log.info("Sweeper stopped", extra={"event": "worker_stop", "worker": sweeper.name})
    return 0


class Sweeper:
    """One sweeper process: leads, or stands by until the leader's connection is gone."""

    def __init__(
        self,
        ctx: Context,
        followed: Mapping[str, int] | None = None,
        notice: Notice | None = None,
    ) -> None:
        self._notice = notice or Notice("")
        self._ctx = ctx
        self._followed = {} if followed is None else followed
        host = socket.gethostname()
        self.name = f"{host}-sweeper-{secrets.token_hex(4)}"
        self._process = fleet.Process(self.name, "sweeper", "", host, os.getpid())
        self._stop = Event()
        self.leads = Event()
        """Set while this is the one that works."""
        self._done_at: dict[str, float] = {}
        self._counts: Counter[str] = Counter()
        self._is_lost = False

    def stop(self, number: int, frame: FrameType | None) -> None:
        """End after the duty in hand."""
        del number, frame
        self._stop.set()

    def run(self) -> None:
        """Lead or stand by until stopped; Postgres may come and go."""
        self._notice.send("READY=1")  # whoever is away now is waited for while working
        while not self._stop.is_set():
            self._notice.send("WATCHDOG=1")
            try:
                with translated(), self._ctx.database.dedicated() as connection:
                    self._with(connection)
            except StoreUnavailable as exc:
                self._note_lost(exc)
                self._stop.wait(STANDBY_SECONDS)
        self._leave()

    def _with(self, connection: Tx) -> None:
        fault = schema.fault(connection)
        if fault:
            raise StoreUnavailable(fault)
        fleet.listen(connection)
        while not self._stop.is_set():
            self._beat(connection)
            if self._is_lost:
                self._is_lost = False
                log.info("Postgres answers again", extra={"event": "postgres_back"})
            if self._is_leader(connection):
                self.leads.set()
                self.tick()
                self._rest(connection)
            else:
                self.leads.clear()
                self._stop.wait(min(STANDBY_SECONDS, self._ctx.settings.sweep_seconds))

    def _is_leader(self, connection: Tx) -> bool:
        # A leader that hangs keeps its lock, but not its heartbeat.
        return fleet.try_lead(connection) or fleet.alive(connection).sweepers < 2  # noqa: PLR2004 - this one

    def tick(self) -> None:
        """Do each duty once. One that fails is named, and does not keep the others from theirs."""
        for name, duty in DUTIES:
            self._do(name, duty)
        now = time.monotonic()
        for name, duty, seconds in NOW_AND_THEN:
            if now - self._done_at.get(name, -math.inf) >= seconds:
                self._done_at[name] = now
                self._do(name, duty)

    def _do(self, name: str, duty: Duty) -> None:
        try:
            counts = duty(self._ctx)
        except StoreUnavailable:
            raise
        except Exception:
            log.exception("duty %s failed", name, extra={"event": "sweep_done", "reason": name})
            return
        self._counts += counts
        if counts:
            facts = {"event": "sweep_done", "reason": name, "counts": dict(counts)}
            log.info("sweep: %s", name, extra=facts)

    def _rest(self, connection: Tx) -> None:
        """Wait for the next tick, for the next thing that comes due, or for the SQL door."""
        with self._ctx.database.transaction() as tx:
            due_in = fleet.next_event_seconds(tx)
        pause = self._ctx.settings.sweep_seconds
        if due_in is not None:
            pause = min(pause, max(LEAST_WAIT_SECONDS, due_in))
        ends = time.monotonic() + pause
        # In short steps, as a signal does not wake the wait for a notice.
        while not self._stop.is_set() and (left := ends - time.monotonic()) > 0:
            if fleet.wait_for_notice(connection, min(left, 0.5)):
                return

    def _beat(self, connection: Tx) -> None:
        self._notice.send("WATCHDOG=1")
        seconds = max(LEAST_ALIVE_SECONDS, 3 * self._ctx.settings.sweep_seconds)
        fleet.beat(connection, self._process, seconds=seconds, counters=self._counters())

    def _counters(self) -> dict[str, int]:
        return {**self._counts, **self._followed}

    def _leave(self) -> None:
        try:
            with self._ctx.database.transaction() as tx:
                fleet.leave(tx, self.name)
        except StoreUnavailable:
            return

    def _note_lost(self, exc: StoreUnavailable) -> None:
        if not self._is_lost:
            self._is_lost = True
            log.error("Queue worker error: %s", exc, extra={"event": "postgres_lost"})
