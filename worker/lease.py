"""Leases: a thread that prolongs what this horse holds while a call to the backend takes its time."""

import logging
from collections.abc import Sequence
from threading import Event, Lock, Thread
from types import TracebackType
from typing import Self

from app.core.errors import StoreUnavailable
from app.core.model import Claim
from app.core.store import items
from app.core.store.database import Database

log = logging.getLogger(__name__)


class Lease:
    """Extends the leases of the slice in hand each third of their time, until told to stop."""

    def __init__(self, database: Database, *, lease_seconds: float) -> None:
        self._database = database
        self._lease_seconds = lease_seconds
        self._held: tuple[Claim, ...] = ()
        self._lock = Lock()
        self._stop = Event()
        self._thread = Thread(target=self._run, name="lease", daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._stop.set()
        self._thread.join()

    def hold(self, claims: Sequence[Claim]) -> None:
        """Extend the leases of these items from now on, and no others."""
        with self._lock:
            self._held = tuple(claims)

    def _run(self) -> None:
        while not self._stop.wait(self._lease_seconds / 3):
            with self._lock:
                held = self._held
            if held:
                self._extend(held)

    def _extend(self, held: tuple[Claim, ...]) -> None:
        try:
            with self._database.transaction() as tx:
                extended = items.extend(
                    tx,
                    [claim.item_id for claim in held],
                    held[0].lease_token,
                    lease_seconds=self._lease_seconds,
                )
        except StoreUnavailable as exc:
            # The fence decides later whether the leases outlived this.
            log.warning("leases not extended: %s", exc, extra={"event": "lease_lost"})
            return
        if extended < len(held):
            log.info(
                "leases lost or settled",
                extra={"event": "lease_lost", "items": len(held) - extended},
            )
