"""Leases: a thread that prolongs what this horse holds while a call takes its time."""

import logging
from collections.abc import Sequence
from threading import Event, Lock, Thread
from types import TracebackType
from typing import Self

from app.core.errors import StoreUnavailable
from app.core.model import Claim
from app.core.store import fleet, items, traces
from app.core.store.database import Database

log = logging.getLogger(__name__)


class Pulse:
    """A thread that does something each third of a lease's time, until told to stop."""

    def __init__(self, database: Database, *, lease_seconds: float) -> None:
        self._database = database
        self._lease_seconds = lease_seconds
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

    def _run(self) -> None:
        while not self._stop.wait(self._lease_seconds / 3):
            try:
                self._extend()
            except StoreUnavailable as exc:
                # The fence decides later whether the leases outlived this.
                log.warning("leases not extended: %s", exc, extra={"event": "lease_lost"})

    def _extend(self) -> None:
        raise NotImplementedError


class SegmentLease(Pulse):
    """Extends the lease of one segment while it is read."""

    def __init__(self, database: Database, claim: traces.Claim, *, lease_seconds: float) -> None:
        super().__init__(database, lease_seconds=lease_seconds)
        self._claim = claim

    def _extend(self) -> None:
        with self._database.transaction() as tx:
            traces.extend(tx, self._claim, lease_seconds=self._lease_seconds)


class Lease(Pulse):
    """Extends the leases of the slice in hand each third of their time, until told to stop.

    That one was lost is found, counted and said when its outcome is to be written.
    """

    def __init__(self, database: Database, *, backend: str, lease_seconds: float) -> None:
        super().__init__(database, lease_seconds=lease_seconds)
        self._backend = backend
        self._held: tuple[Claim, ...] = ()
        self._probed: str | None = None
        self._lock = Lock()

    def hold(self, claims: Sequence[Claim], *, probed: str | None = None) -> None:
        """Extend the leases of these items from now on, and no others.

        `probed` is the model that is tried with them: its backend is left to this horse as long.
        """
        with self._lock:
            self._held = tuple(claims)
            self._probed = probed

    def let_go(self, claims: Sequence[Claim]) -> None:
        """Extend the leases of these items no longer: they are settled."""
        gone = {claim.item_id for claim in claims}
        with self._lock:
            self._held = tuple(claim for claim in self._held if claim.item_id not in gone)

    def _extend(self) -> None:
        with self._lock:
            held, probed = self._held, self._probed
        if not held:
            return
        seconds = self._lease_seconds
        ids, token = [claim.item_id for claim in held], held[0].lease_token
        with self._database.transaction() as tx:
            if probed:
                fleet.extend_probe(tx, self._backend, probed, seconds=seconds)
            items.extend(tx, ids, token, lease_seconds=seconds)
