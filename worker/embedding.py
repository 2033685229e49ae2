"""Drains an embedding job: claim, embed, decide, write and settle, one slice at a time."""

import logging
import time
from collections import Counter
from collections.abc import Sequence
from itertools import groupby
from threading import Event

from app.core import rings, status
from app.core.errors import (
    BackendFault,
    BellsUnavailable,
    ErrorClass,
    FailedItemsRemain,
    HoldfastError,
    SinkFault,
    StoreUnavailable,
    WorkError,
)
from app.core.model import (
    NO_TARGET,
    PAUSE_CAP_SECONDS,
    Claim,
    Done,
    Failed,
    Job,
    JobState,
    Outcome,
    Retry,
    Settlement,
    Skipped,
    Target,
    backoff,
    decide,
    place_of,
)
from app.core.ports import Write
from app.core.store import campaigns, fleet, items, jobs, targets, vectors
from app.core.store.database import Tx
from worker.calls import Answer, Calls, first_pace
from worker.lease import Lease
from worker.runtime import Horse

log = logging.getLogger(__name__)

TURN_SECONDS = 2.0
"""How long a bell works before it makes room for other jobs whose bells wait."""

BUSY_SECONDS = 10.0
"""How long a settle comes back for rows that somebody else has locked."""

OPEN_RESULT_SECONDS = 7 * 86400.0
"""How long vectors of an open job stay in Redis; when it is final they get their end."""

REDIS_SECONDS = 30.0
BUSY_PAUSE_SECONDS = 0.05
BUSY_MESSAGE = "another transaction held the item or its row all the time"


def drain(horse: Horse, job_id: str, run: int) -> dict[str, int]:
    """Work on what is due of a job until its turn is over or nothing is due; return counts.

    Any bell of a job does the same thing, so a lost, doubled or late one changes nothing. Raises
    FailedItemsRemain where this bell made the job final and items of it failed, and
    StoreUnavailable where Postgres went away: leases then run out by themselves.
    """
    with horse.context.database.transaction() as tx:
        job = jobs.find(tx, job_id)
        registered = targets.registered(tx)
        pace = first_pace(horse, tx)
    if job is None or job.kind != "embedding" or job.state.is_final or run < job.run:
        return {"done": 0}
    settings = horse.context.settings
    with Lease(
        horse.context.database,
        backend=horse.backend,
        lease_seconds=settings.queue_visibility_timeout,
    ) as lease:
        return _Drain(horse, job, registered, lease, pace).run()


class _TargetFault(HoldfastError):
    """The table of a target is not as it was registered."""

    def __init__(self, target: Target, fault: BackendFault) -> None:
        super().__init__(fault.message)
        self.target = target
        self.fault = fault


class _Drain:
    """One bell at work on one job."""

    def __init__(
        self, horse: Horse, job: Job, registered: Sequence[Target], lease: Lease, pace: int
    ) -> None:
        self.horse = horse
        self.ctx = horse.context
        self.job = job
        self.calls = Calls(horse, registered, pace)
        self.lease = lease
        self.counts: Counter[str] = Counter()
        self.others: set[str] = set()
        self.closed: list[str] = []
        self.terms = items.ClaimTerms(
            job_id=job.id,
            leased_by=horse.leased_by,
            lease_seconds=self.ctx.settings.queue_visibility_timeout,
            allowance=self.ctx.settings.queue_max_retries,
        )
        self.began = self.published_at = self.mark = time.monotonic()

    # ---- the turn ------------------------------------------------------------------------

    def run(self) -> dict[str, int]:
        is_over = False
        while not is_over and self._slice():
            self._publish()
            is_over = self.horse.must_stop() or self._turn_is_over()
        finished = self._finished()
        if finished is None:
            if is_over:
                rings.ring(self.ctx, self.job.id, bells=1, by="tail")
            status.publish(self.ctx, self.job.id)
        elif finished.state in (JobState.FAILED, JobState.COMPLETED_WITH_ERRORS):
            raise FailedItemsRemain(finished.counts.failed, finished.counts.total)
        return dict(self.counts)

    def _turn_is_over(self) -> bool:
        seconds = time.monotonic() - self.began
        if self.calls.is_spent or seconds >= self.ctx.settings.queue_bell_seconds:
            return True
        is_low = self.job.priority < 0  # gives way after each slice
        if (seconds < TURN_SECONDS and not is_low) or self.job.priority > 0:
            return False
        try:
            return self.ctx.bells.others_wait(self.horse.queue, self.job.id)
        except BellsUnavailable:
            return False

    def _publish(self) -> None:
        if time.monotonic() - self.published_at >= 1:
            self.published_at = time.monotonic()
            status.publish(self.ctx, self.job.id)

    def _finished(self) -> Job | None:
        """Make final what is complete; return this bell's job where it was the one to do so."""
        ttl_seconds = self.ctx.settings.job_result_ttl_seconds
        for job_id in sorted(self.others):
            status.finish(self.ctx, job_id, ttl_seconds=ttl_seconds)
        return status.finish(self.ctx, self.job.id, ttl_seconds=ttl_seconds)

    # ---- one slice -----------------------------------------------------------------------

    def _slice(self) -> bool:
        """Do one slice; return whether there was anything to do."""
        self.mark = time.monotonic()
        claims = self._claim()
        if not claims:
            return False
        left = {claim.item_id: claim for claim in claims}
        try:
            for answer in self.calls.answers(claims):
                self._settle_or_pause(answer)
                for claim in answer.claims:
                    left.pop(claim.item_id)
                self.lease.let_go(answer.claims)
        except Exception as exc:
            # Whatever it was, it goes on upwards (RQ's time limit is one of these); the items
            # are charged by name rather than by a lease that runs out.
            self._abandon(list(left.values()), exc)
            raise
        return True

    def _claim(self) -> list[Claim]:
        probed = None
        with self.ctx.database.transaction() as tx:
            paused = self.calls.begin_slice(tx)
            self.closed = [*self._closed_targets(tx), *campaigns.held_back(tx)]
            claims = self._claim_due(tx, self.calls.pace, paused)
            if not claims:
                probed, claims = self._claim_probe(tx, paused)
        self.lease.hold(claims, probed=probed)
        return claims

    def _claim_due(self, tx: Tx, limit: int, paused: set[str]) -> list[Claim]:
        return items.claim(
            tx, self.terms, limit=limit, paused_models=sorted(paused), paused_targets=self.closed
        )

    def _closed_targets(self, tx: Tx) -> list[str]:
        """Return the targets that cannot be written to; where a pause is over, look at the table.

        So no text is embedded for a table that is still not as it was registered.
        """
        name = self.ctx.settings.primary_sink
        known = fleet.backends(tx, name)
        closed: list[str] = []
        for target in self.calls.targets.values():
            state = known.get(target.label)
            if state is None or not state.paused_since:
                continue
            faults = [] if state.is_paused else targets.faults(tx, target)
            if faults:
                message = "; ".join(f"{fault.field} {fault.message}" for fault in faults)
                self._close(tx, target, BackendFault(ErrorClass.BAD_CONFIG, message))
            if faults or state.is_paused:
                closed.append(target.label)
            else:
                fleet.note_ok(tx, name, target.label)
        return closed

    def _close(self, tx: Tx, target: Target, fault: BackendFault) -> None:
        """Leave a target alone for a time: its table is at fault, no text and no backend."""
        name = self.ctx.settings.primary_sink
        state = fleet.backends(tx, name).get(target.label)
        is_new = fleet.pause(
            tx,
            name,
            target.label,
            seconds=backoff(state.tries if state else 0, cap_seconds=PAUSE_CAP_SECONDS),
            error_class=fault.error_class,
            message=fault.message,
        )
        if is_new:
            facts = {"event": "sink_paused", "sink": name, "error_class": fault.error_class}
            log.warning("target paused: %s", fault.message, extra=facts)

    def _claim_probe(self, tx: Tx, paused: set[str]) -> tuple[str | None, list[Claim]]:
        """Half open: one item tells whether the rest may go on, and one bell tries it."""
        seconds = self.ctx.settings.queue_visibility_timeout
        for model in sorted(paused):
            if self.calls.backends[model].is_paused:
                continue
            if fleet.take_probe(tx, self.horse.backend, model, seconds=seconds):
                claims = self._claim_due(tx, 1, paused - {model})
                if claims:
                    return model, claims
                fleet.leave_probe(tx, self.horse.backend, model)
        return None, []

    # ---- settling ------------------------------------------------------------------------

    def _settle_or_pause(self, answer: Answer) -> None:
        if answer.vectors:
            answer = self._keep_results(answer)
        try:
            self._settle(answer)
        except _TargetFault as exc:
            # A table's fault as a whole, not a row's: nobody is charged until it is mended, and
            # what goes to other tables is stored.
            with self.ctx.database.transaction() as tx:
                self._close(tx, exc.target, exc.fault)
            theirs = [each for each in answer.claims if self.calls.target(each) == exc.target]
            self._settle(Answer(theirs, (), exc.fault))
            others = frozenset(each.item_id for each in answer.claims if each not in theirs)
            if others:
                self._settle_or_pause(answer.only(others))

    def _keep_results(self, answer: Answer) -> Answer:
        """Store in Redis what goes to the job's result alone, before it is said to be done.

        Where Redis has no room, or is away, these items wait, uncharged; returns the others.
        """
        kept: dict[str, dict[int, Sequence[float]]] = {}
        ours: set[int] = set()
        for claim, vector in zip(answer.claims, answer.vectors, strict=True):
            if claim.target_table == NO_TARGET:
                job_id, position = place_of(claim.target_id)
                kept.setdefault(job_id, {})[position] = vector
                ours.add(claim.item_id)
        try:
            for job_id, vectors_of_job in kept.items():
                self.ctx.live.keep_vectors(job_id, vectors_of_job, ttl_seconds=OPEN_RESULT_SECONDS)
        except BellsUnavailable as exc:
            message = f"the result cannot be kept: {exc.message}"
            fault = BackendFault(ErrorClass.BUSY, message, retry_after_seconds=REDIS_SECONDS)
            self._settle(Answer(answer.only(frozenset(ours)).claims, (), fault))
            others = frozenset(each.item_id for each in answer.claims) - ours
            return answer.only(others)
        return answer

    def _settle(self, answer: Answer) -> None:
        """Write the outcomes; come back for rows that others hold, and hold none meanwhile."""
        ends = time.monotonic() + BUSY_SECONDS
        busy = self._settle_once(answer)
        while busy and time.monotonic() < ends:
            Event().wait(BUSY_PAUSE_SECONDS)
            answer = answer.only(busy)
            busy = self._settle_once(answer)
        if busy:
            fault = BackendFault(ErrorClass.BUSY, BUSY_MESSAGE, retry_after_seconds=BUSY_SECONDS)
            self._settle_once(Answer(answer.only(busy).claims, (), fault))

    def _settle_once(self, answer: Answer) -> frozenset[int]:
        """Write the outcomes in one transaction; return the items that somebody else has locked."""
        with self.ctx.database.transaction() as tx:
            held = items.hold(tx, answer.claims)
            outcomes = self._outcomes(tx, answer.only(held.ours))
            if answer.vectors:
                # Before the settle: who tries a paused backend locks its row before any counts.
                self.calls.note_answer(tx, self.calls.model(answer.claims[0]))
            settled = items.settle(tx, outcomes, leased_by=self.horse.leased_by)
            followers = self.ctx.settings.followers
            digest = self.calls.digest(self.calls.model(answer.claims[0]))
            vectors.record(tx, outcomes, followers=followers, digest=digest)
            ids = [outcome.claim.item_id for outcome in outcomes]
            self.others |= items.other_jobs(tx, ids, job_id=self.job.id)
            if answer.vectors:
                self._note_slice(tx, settled)
        written = {outcome.claim.item_id for outcome in outcomes}
        busy = held.busy | (held.ours - written)
        self._count(outcomes, lost=len(answer.claims) - len(busy) - settled)
        return busy

    def _outcomes(self, tx: Tx, answer: Answer) -> list[Settlement]:
        if answer.error is not None:
            return [Settlement(claim, decide(claim, answer.error)) for claim in answer.claims]
        found: list[Settlement] = []
        by_target = sorted(
            zip(answer.claims, answer.vectors, strict=True),
            key=lambda pair: (pair[0].target_table, pair[0].embedding_version),
        )
        for _, group in groupby(by_target, key=lambda pair: self.calls.target(pair[0])):
            found += self._write(tx, list(group))
        return found

    def _write(self, tx: Tx, pairs: Sequence[tuple[Claim, Sequence[float]]]) -> list[Settlement]:
        target = self.calls.target(pairs[0][0])
        if target.target_table == NO_TARGET:  # kept already
            return [Settlement(claim, Done()) for claim, _ in pairs]
        writes = [Write(claim.target_id, vector) for claim, vector in pairs]
        try:
            written = self.horse.sink.write(tx, target, writes)
        except BackendFault as fault:
            raise _TargetFault(target, fault) from fault

        def outcome(claim: Claim) -> Outcome:
            if claim.target_id in written.gone:
                return Skipped("content_not_found")
            refusal = written.refused.get(claim.target_id)
            return decide(claim, None if refusal is None else SinkFault(refusal))

        free = [claim for claim, _ in pairs if claim.target_id not in written.busy]
        return [Settlement(claim, outcome(claim)) for claim in free]

    def _note_slice(self, tx: Tx, settled: int) -> None:
        seconds, self.mark = time.monotonic() - self.mark, time.monotonic()
        fleet.note_slice(
            tx, job_id=self.job.id, backend=self.horse.backend, items=settled, seconds=seconds
        )

    def _count(self, outcomes: Sequence[Settlement], *, lost: int) -> None:
        for settlement in outcomes:
            self.counts[type(settlement.outcome).__name__.lower()] += 1
            if isinstance(settlement.outcome, Failed | Retry):
                self._log_attempt(settlement)
        if lost:
            self.counts["lease_lost"] += lost
            facts = {"event": "lease_lost", "items": lost, "bell": self.horse.leased_by}
            log.warning("outcomes dropped: the leases were lost", extra=facts)

    def _log_attempt(self, settlement: Settlement) -> None:
        outcome = settlement.outcome
        if not isinstance(outcome, Failed | Retry):
            return
        is_last = isinstance(outcome, Failed)
        log.log(
            logging.WARNING if is_last else logging.INFO,
            "item failed: %s" if is_last else "item to be tried again: %s",
            outcome.error.message,
            extra={
                "event": "item_failed" if is_last else "item_retry",
                "job_id": self.job.id,
                "item_id": settlement.claim.item_id,
                "error_class": outcome.error.error_class,
            },
        )

    def _abandon(self, claims: Sequence[Claim], exc: Exception) -> None:
        """Settle what is left in hand after something unforeseen: an outage charges nobody."""
        error: WorkError
        if isinstance(exc, StoreUnavailable):
            error = BackendFault(ErrorClass.UNREACHABLE, exc.message)
        else:
            facts = {"event": "bell_end", "error_class": ErrorClass.INTERNAL}
            log.error("slice failed", exc_info=exc, extra=facts)
            error = WorkError(ErrorClass.INTERNAL, type(exc).__name__)
        try:
            self._settle(Answer(claims, (), error))
        except StoreUnavailable:
            log.warning("leases left to run out", extra={"event": "postgres_lost"})
