"""Followers: each further sink is brought up with the primary, by a thread of its own.

A sink that is down delays itself and nothing else: not the settle, not a duty of the sweeper, not
another sink. What it is to hold is read back from the primary, so nothing is embedded again for it.
"""

import logging
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from itertools import groupby
from threading import Event, Thread

from app.core.context import Context
from app.core.errors import BackendFault, ErrorClass, StoreUnavailable, WorkError
from app.core.model import PAUSE_CAP_SECONDS, Target, backoff
from app.core.ports import Document, FollowerSink, PrimarySink
from app.core.store import fleet, targets, vectors
from app.core.store.database import Tx, translated
from app.core.store.vectors import Due, Followed

log = logging.getLogger(__name__)

IDLE_SECONDS = 1.0
"""How long after its last change a key may wait where nothing else is due."""

LEASE_MARGIN_SECONDS = 30.0
BUSY_TRIES = 3
"""One that a sink is too busy for comes again after the pause of a third try."""


class Follower:
    """Brings one sink up with the primary."""

    def __init__(self, ctx: Context, primary: PrimarySink, name: str, sink: FollowerSink) -> None:
        self._ctx = ctx
        self._primary = primary
        self._sink = sink
        self.name = name
        self._terms = vectors.FollowTerms(
            sink=name,
            lease_seconds=2 * ctx.settings.sink_timeout_seconds + LEASE_MARGIN_SECONDS,
            allowance=ctx.settings.queue_max_retries,
        )

    def run_once(self) -> Counter[str]:
        """Write one block of what is due; return how many were written, refused, put off."""
        with self._ctx.database.transaction() as tx:
            known = fleet.backends(tx, self.name)
            registered = {_key(each): each for each in targets.registered(tx)}
            paused = [label for label, each in known.items() if each.is_paused]
            limit = self._limit(known.get(""))
            due = vectors.claim(tx, self._terms, limit=limit, paused=paused) if limit else []
        counts: Counter[str] = Counter()
        for key, group in groupby(sorted(due, key=_key), key=_key):
            counts += self._write(registered.get(key), list(group), known)
        return counts

    def _limit(self, whole: fleet.Backend | None) -> int:
        """Half open: after a pause one row tells whether the rest may go on."""
        if whole and whole.is_paused:
            return 0
        return 1 if whole and whole.paused_since else self._sink.most_documents

    def _write(
        self, target: Target | None, due: Sequence[Due], known: Mapping[str, fleet.Backend]
    ) -> Counter[str]:
        if target is None:
            fault = WorkError(ErrorClass.BAD_CONFIG, "its target is no longer registered")
            return self._settle([Followed(each, "failed", fault) for each in due])
        documents, lost = self._documents(target, due)
        try:
            faults = self._sink.write(target, [document for _, document in documents])
        except BackendFault as fault:
            self._pause(target, fault, known)
            return self._settle([Followed(each, "pending", fault) for each, _ in documents] + lost)
        self._resume(target, known)
        done = [_followed(each, faults.get(each.target_id)) for each, _ in documents]
        return self._settle(done + lost)

    def _documents(
        self, target: Target, due: Sequence[Due]
    ) -> tuple[list[tuple[Due, Document]], list[Followed]]:
        """Read what the primary holds; what has changed since the claim is pending anew."""
        wanted = [each.target_id for each in due if not each.is_deleted]
        with self._ctx.database.transaction() as tx:
            held = self._primary.read(tx, target, wanted) if wanted else {}
            same = vectors.unchanged(tx, due)
        documents: list[tuple[Due, Document]] = []
        lost: list[Followed] = []
        for each in due:
            if each.vector_id not in same:
                lost.append(Followed(each, "pending"))
            elif each.is_deleted or each.target_id in held:
                documents.append((each, _document(each, held.get(each.target_id))))
            else:
                message = "the primary holds no vector of it any more: run repair"
                lost.append(Followed(each, "failed", WorkError(ErrorClass.RESULT_LOST, message)))
        return documents, lost

    def _settle(self, outcomes: Sequence[Followed]) -> Counter[str]:
        with self._ctx.database.transaction() as tx:
            vectors.settle(tx, self.name, outcomes)
        for each in outcomes:
            if each.status == "failed" and each.error:
                facts = {"event": "sink_failed", "sink": self.name}
                facts["error_class"] = each.error.error_class
                log.warning("a sink refused a row: %s", each.error.message, extra=facts)
        return Counter(f"{self.name}_{each.status}" for each in outcomes)

    # ---- pauses --------------------------------------------------------------------------

    def _pause(
        self, target: Target, fault: BackendFault, known: Mapping[str, fleet.Backend]
    ) -> None:
        # What is wrong with one index is not the whole store's.
        name = target.label if fault.error_class is ErrorClass.BAD_CONFIG else ""
        tries = known[name].tries if name in known else 0
        seconds = backoff(tries, cap_seconds=PAUSE_CAP_SECONDS)
        with self._ctx.database.transaction() as tx:
            is_new = fleet.pause(
                tx,
                self.name,
                name,
                seconds=max(seconds, fault.retry_after_seconds or 0),
                error_class=fault.error_class,
                message=fault.message,
            )
        if is_new:
            facts = {"event": "sink_paused", "sink": self.name, "error_class": fault.error_class}
            log.warning("sink paused: %s", fault.message, extra=facts)

    def _resume(self, target: Target, known: Mapping[str, fleet.Backend]) -> None:
        names = [name for name in ("", target.label) if name in known and known[name].paused_since]
        if not names:
            return
        with self._ctx.database.transaction() as tx:
            for name in names:
                fleet.note_ok(tx, self.name, name)
        log.info("sink answers again", extra={"event": "sink_resumed", "sink": self.name})


class Following:
    """The threads that keep all followers up, as long as this process is the one to do it."""

    def __init__(
        self, ctx: Context, primary: PrimarySink, sinks: Mapping[str, FollowerSink]
    ) -> None:
        self._ctx = ctx
        self._sinks = sinks
        self._stop = Event()
        self._threads = [
            Thread(
                target=self._run,
                args=(Follower(ctx, primary, name, sink),),
                name=f"follow {name}",
                daemon=True,
            )
            for name, sink in sinks.items()
        ]
        self.counts: dict[str, int] = {}
        """Rows by follower and outcome since the start; written by each thread for its own."""

    def start(self) -> None:
        """Begin; nothing is to do without followers."""
        for thread in self._threads:
            thread.start()

    def stop(self) -> None:
        """End after the calls in hand."""
        self._stop.set()
        for thread in self._threads:
            thread.join()
        for sink in self._sinks.values():
            sink.close()

    def _run(self, follower: Follower) -> None:
        while not self._stop.is_set():
            try:
                with translated(), self._ctx.database.dedicated() as connection:
                    self._with(connection, follower)
            except StoreUnavailable:  # the sweeper says so
                self._stop.wait(IDLE_SECONDS)
            except Exception:
                log.exception("follower %s failed", follower.name, extra={"event": "sink_failed"})
                self._stop.wait(IDLE_SECONDS)

    def _with(self, connection: Tx, follower: Follower) -> None:
        """Follow as long as this connection holds the sink's lock: it has one writer at a time."""
        began = time.monotonic()
        while not self._stop.is_set():
            is_ours = vectors.try_follow(connection, follower.name)
            counts = follower.run_once() if is_ours else Counter[str]()
            for name, number in counts.items():
                self.counts[name] = self.counts.get(name, 0) + number
            if not counts:
                self._stop.wait(IDLE_SECONDS)
            elif time.monotonic() - began >= 1:
                began = time.monotonic()
                log.info("followed", extra={"event": "sink_followed", "counts": dict(counts)})


def _key(row: Due | Target) -> tuple[str, str]:
    return row.target_table, row.embedding_version


def _document(due: Due, vector: Sequence[float] | None) -> Document:
    return Document(
        target_id=due.target_id,
        version=due.version,
        content_hash=due.content_hash,
        model=due.model,
        model_digest=due.model_digest,
        text=due.text,
        metadata=due.metadata,
        vector=None if due.is_deleted else vector,
    )


def _followed(due: Due, error: WorkError | None) -> Followed:
    if error is None:
        return Followed(due, "done")
    if isinstance(error, BackendFault):
        wait = error.retry_after_seconds or backoff(BUSY_TRIES)
        return Followed(due, "pending", error, wait)
    return Followed(due, "failed", error)
