"""Drains an embedding job: claim, embed, check, decide, write and settle, one slice at a time."""

import logging
import time
from collections import Counter
from collections.abc import Generator, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import groupby
from threading import Event

from app.core import rings, status
from app.core.errors import (
    AnswerFault,
    BackendFault,
    BellsUnavailable,
    ErrorClass,
    FailedItemsRemain,
    HoldfastError,
    RequestFault,
    SinkFault,
    StoreUnavailable,
    WorkError,
)
from app.core.model import (
    PAUSE_CAP_SECONDS,
    Claim,
    Failed,
    Job,
    JobState,
    Outcome,
    Retry,
    Settlement,
    Skipped,
    Target,
    backoff,
    check_vectors,
    decide,
)
from app.core.ports import Write
from app.core.store import fleet, items, jobs, targets
from app.core.store.database import Tx
from worker.lease import Lease
from worker.runtime import Horse

log = logging.getLogger(__name__)

CONTROL_TEXT = "ok"
"""A harmless text: what fails for it too is the backend's fault, never a text's."""

SLICE_SECONDS = 2.5
"""How long a slice should take: long enough to be cheap, short enough to take turns and to stop."""

TURN_SECONDS = 2.0
"""How long a bell works before it makes room for other jobs whose bells wait."""

BYTES_PER_TOKEN = 3

SETTLE_SECONDS = 20.0
"""What a bell keeps of its time limit for settling: no call may reach into it."""

BUSY_SECONDS = 10.0
"""How long a settle comes back for rows that somebody else has locked."""

BUSY_PAUSE_SECONDS = 0.05
BUSY_MESSAGE = "another transaction held the item or its row all the time"

PAUSED_MESSAGE = "the backend was paused while the items were in hand"


@dataclass(frozen=True, slots=True)
class Answer:
    """What became of some claims that went to the backend together."""

    claims: Sequence[Claim]
    vectors: Sequence[Sequence[float]]
    error: WorkError | None = None

    def only(self, ids: frozenset[int]) -> "Answer":
        """Return the same for some of the claims."""
        kept = [place for place, claim in enumerate(self.claims) if claim.item_id in ids]
        vectors = [self.vectors[place] for place in kept] if self.vectors else ()
        return Answer([self.claims[place] for place in kept], vectors, self.error)


def drain(horse: Horse, job_id: str, run: int) -> dict[str, int]:
    """Work on what is due of a job until its turn is over or nothing is due; return counts.

    Any bell of a job does the same thing, so a lost, doubled or late one changes nothing. Raises
    FailedItemsRemain where this bell made the job final and items of it failed, and
    StoreUnavailable where Postgres went away: leases then run out by themselves.
    """
    with horse.context.database.transaction() as tx:
        job = jobs.find(tx, job_id)
        registered = targets.registered(tx)
        pace = _first_pace(horse, tx)
    if job is None or job.state.is_final or run < job.run:
        return {"done": 0}
    settings = horse.context.settings
    with Lease(
        horse.context.database,
        backend=horse.backend,
        lease_seconds=settings.queue_visibility_timeout,
    ) as lease:
        return _Drain(horse, job, registered, lease, pace).run()


def _first_pace(horse: Horse, tx: Tx) -> int:
    most = horse.context.settings.queue_batch_size
    cost = fleet.cost(tx)
    return most if cost is None else max(1, min(most, int(SLICE_SECONDS / max(cost.p50, 1e-6))))


def _by_key(registered: Sequence[Target]) -> dict[tuple[str, str], Target]:
    return {(each.target_table, each.embedding_version): each for each in registered}


class _Drain:
    """One bell at work on one job."""

    def __init__(
        self, horse: Horse, job: Job, registered: Sequence[Target], lease: Lease, pace: int
    ) -> None:
        self.horse = horse
        self.ctx = horse.context
        self.job = job
        self.targets = _by_key(registered)
        self.lease = lease
        self.pace = pace
        self.counts: Counter[str] = Counter()
        self.others: set[str] = set()
        self.terms = items.ClaimTerms(
            job_id=job.id,
            leased_by=horse.leased_by,
            lease_seconds=self.ctx.settings.queue_visibility_timeout,
            allowance=self.ctx.settings.queue_max_retries,
        )
        self.backends: dict[str, fleet.Backend] = {}
        self.loaded: set[str] = set()
        self.noted: set[str] = set()
        self.control: dict[str, WorkError | None] = {}
        self.halted: set[str] = set()
        self.call_seconds = 0.0
        self.is_spent = False
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
        if self.is_spent or seconds >= self.ctx.settings.queue_bell_seconds:
            return True
        if seconds < TURN_SECONDS or self.job.priority > 0:
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
        self.control.clear()
        self.halted.clear()
        self.mark = time.monotonic()
        claims = self._claim()
        if not claims:
            return False
        left = {claim.item_id: claim for claim in claims}
        try:
            for answer in self._answers(claims):
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
            self.backends = fleet.backends(tx, self.horse.backend)
            paused = {model for model, each in self.backends.items() if each.paused_since}
            self.loaded -= paused
            claims = self._claim_due(tx, self.pace, paused)
            if not claims:
                probed, claims = self._claim_probe(tx, paused)
        self.lease.hold(claims, probed=probed)
        return claims

    def _claim_due(self, tx: Tx, limit: int, paused: set[str]) -> list[Claim]:
        return items.claim(tx, self.terms, limit=limit, paused_models=sorted(paused))

    def _claim_probe(self, tx: Tx, paused: set[str]) -> tuple[str | None, list[Claim]]:
        """Half open: one item tells whether the rest may go on, and one bell tries it."""
        seconds = self.ctx.settings.queue_visibility_timeout
        for model in sorted(paused):
            if self.backends[model].is_paused:
                continue
            if fleet.take_probe(tx, self.horse.backend, model, seconds=seconds):
                claims = self._claim_due(tx, 1, paused - {model})
                if claims:
                    return model, claims
                fleet.leave_probe(tx, self.horse.backend, model)
        return None, []

    def _answers(self, claims: Sequence[Claim]) -> Iterator[Answer]:
        by_model = sorted(claims, key=self._model)
        for model, group in groupby(by_model, key=self._model):
            for call in self._calls(model, list(group)):
                yield from self._embed(model, call)

    def _model(self, claim: Claim) -> str:
        return self._target(claim).model

    def _target(self, claim: Claim) -> Target:
        key = (claim.target_table, claim.embedding_version)
        if key not in self.targets:  # registered since this bell began
            with self.ctx.database.transaction() as tx:
                self.targets = _by_key(targets.registered(tx))
        return self.targets[key]

    def _calls(self, model: str, claims: Sequence[Claim]) -> Iterator[list[Claim]]:
        """Cut claims into calls that respect the limits on items and on estimated tokens."""
        settings = self.ctx.settings
        known = self.backends.get(model)
        most = min(settings.embedder_max_items, (known and known.max_items) or len(claims))
        call: list[Claim] = []
        tokens = 0
        for claim in claims:
            cost = len(claim.text.encode()) // BYTES_PER_TOKEN + 1
            if call and (len(call) >= most or tokens + cost > settings.embedder_max_tokens):
                yield call
                call, tokens = [], 0
            call.append(claim)
            tokens += cost
        if call:
            yield call

    # ---- whose fault is it ---------------------------------------------------------------

    def _embed(
        self, model: str, claims: Sequence[Claim], *, again: bool = False
    ) -> Iterator[Answer]:
        if model in self.halted:
            yield Answer(claims, (), BackendFault(ErrorClass.UNREACHABLE, PAUSED_MESSAGE))
            return
        try:
            vectors = self._call(model, [claim.text for claim in claims])
        except _NoTimeLeft:
            yield _released(claims)
        except BackendFault as fault:
            yield self._whole_backend(model, claims, fault)
        except (RequestFault, AnswerFault) as fault:
            if isinstance(fault, RequestFault) and fault.retry_whole and not again:
                yield from self._embed(model, claims, again=True)
            else:
                yield from self._narrow(model, claims, fault)
        else:
            self._adjust(len(claims), self.call_seconds)
            yield Answer(claims, vectors)

    def _call(self, model: str, texts: Sequence[str]) -> list[list[float]]:
        """Call the backend when it is this bell's turn, and check what it answers.

        Raises _NoTimeLeft where the call could outlive the bell.
        """
        seconds = self._seconds(model)
        with self._turn_to_call(self._seconds_left() - seconds):
            began = time.monotonic()
            vectors = self.horse.embedder.embed(texts, model=model, seconds=seconds)
            self.call_seconds = time.monotonic() - began
        check_vectors(vectors, count=len(texts), dimension=self._dimension(model))
        self.loaded.add(model)
        return vectors

    @contextmanager
    def _turn_to_call(self, seconds: float) -> Generator[None]:
        """Wait until fewer calls than allowed are under way, over all workers."""
        most = self.ctx.settings.embedder_max_calls
        with self.ctx.database.session() as connection:
            slot = fleet.take_call(connection, self.horse.backend, most=most, seconds=seconds)
            if slot is None:
                self.is_spent = True
                raise _NoTimeLeft
            try:
                yield
            finally:
                fleet.leave_call(connection, self.horse.backend, slot)

    def _seconds(self, model: str) -> float:
        settings = self.ctx.settings
        known = self.backends.get(model)
        if model in self.loaded or (known and known.is_warm):
            return settings.embedder_timeout_seconds
        return max(settings.embedder_load_seconds, settings.embedder_timeout_seconds)

    def _seconds_left(self) -> float:
        return self.began + self.ctx.bell_seconds - SETTLE_SECONDS - time.monotonic()

    def _dimension(self, model: str) -> int:
        return next(each.dimension for each in self.targets.values() if each.model == model)

    def _narrow(
        self, model: str, claims: Sequence[Claim], fault: RequestFault | AnswerFault
    ) -> Iterator[Answer]:
        """Halve what failed until one text stands alone; blame it only if a harmless one passes."""
        is_slow = fault.error_class is ErrorClass.SLOW
        is_size_limit = isinstance(fault, RequestFault) and fault.is_size_limit
        middle = len(claims) // 2
        if middle and (is_slow or is_size_limit):
            self._remember_limit(model, middle)
        is_plain = fault.error_class is ErrorClass.BAD_INPUT
        if not middle or not (is_plain or is_size_limit):
            try:
                shared = self._control(model, afresh=not middle and not is_plain)
            except _NoTimeLeft:
                yield _released(claims)
                return
            if shared is not None:
                message = f"{fault.message} (so does a harmless text)"
                worse = BackendFault(fault.error_class, message)
                yield self._whole_backend(model, claims, worse)
                return
        if not middle:
            yield Answer(claims, (), fault)
            return
        yield from self._embed(model, claims[:middle], again=True)
        yield from self._embed(model, claims[middle:], again=True)

    def _control(self, model: str, *, afresh: bool) -> WorkError | None:
        """Return what is wrong with the backend for a harmless text, or None.

        Asked once a slice, and `afresh` where the verdict on a text hangs on how it is now.
        """
        if afresh or model not in self.control:
            try:
                self._call(model, [CONTROL_TEXT])
            except WorkError as exc:
                self.control[model] = exc
            else:
                self.control[model] = None
        return self.control[model]

    def _whole_backend(self, model: str, claims: Sequence[Claim], fault: BackendFault) -> Answer:
        """Pause the backend, so that nobody pays for its fault and nobody hammers it."""
        self.halted.add(model)
        self.loaded.discard(model)
        self.noted.discard(model)
        known = self.backends.get(model)
        seconds = backoff(known.tries if known else 0, cap_seconds=PAUSE_CAP_SECONDS)
        seconds = max(seconds, fault.retry_after_seconds or 0)
        with self.ctx.database.transaction() as tx:
            is_new = fleet.pause(
                tx,
                self.horse.backend,
                model,
                seconds=seconds,
                error_class=fault.error_class,
                message=fault.message,
            )
        if is_new:
            log.warning(
                "backend paused: %s",
                fault.message,
                extra={
                    "event": "backend_paused",
                    "backend": self.horse.backend,
                    "model": model,
                    "error_class": fault.error_class,
                },
            )
        return Answer(claims, (), BackendFault(fault.error_class, fault.message))

    def _remember_limit(self, model: str, most: int) -> None:
        with self.ctx.database.transaction() as tx:
            fleet.remember_limit(tx, self.horse.backend, model, most)
            self.backends = fleet.backends(tx, self.horse.backend)
        self.pace = min(self.pace, most)

    def _adjust(self, sent: int, seconds: float) -> None:
        most = self.ctx.settings.queue_batch_size
        if seconds > 2 * SLICE_SECONDS:
            self.pace = max(1, sent // 2)
        elif seconds < SLICE_SECONDS / 2 and sent >= self.pace:
            self.pace = min(most, self.pace * 2)

    # ---- settling ------------------------------------------------------------------------

    def _settle_or_pause(self, answer: Answer) -> None:
        try:
            self._settle(answer)
        except BackendFault as fault:
            # The sink's fault as a whole, not a row's: nobody is charged until it is mended.
            self._settle(self._whole_backend(self._model(answer.claims[0]), answer.claims, fault))

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
                self._note_answer(tx, self._model(answer.claims[0]))
            settled = items.settle(tx, outcomes, leased_by=self.horse.leased_by)
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
        for _, group in groupby(by_target, key=lambda pair: self._target(pair[0])):
            found += self._write(tx, list(group))
        return found

    def _write(self, tx: Tx, pairs: Sequence[tuple[Claim, Sequence[float]]]) -> list[Settlement]:
        target = self._target(pairs[0][0])
        writes = [Write(claim.target_id, vector) for claim, vector in pairs]
        written = self.horse.sink.write(tx, target, writes)

        def outcome(claim: Claim) -> Outcome:
            if claim.target_id in written.gone:
                return Skipped("content_not_found")
            refusal = written.refused.get(claim.target_id)
            return decide(claim, None if refusal is None else SinkFault(refusal))

        free = [claim for claim, _ in pairs if claim.target_id not in written.busy]
        return [Settlement(claim, outcome(claim)) for claim in free]

    def _note_answer(self, tx: Tx, model: str) -> None:
        known = self.backends.get(model)
        is_paused = bool(known and known.paused_since)
        # Not at each slice: all workers would wait for each other's update of one row.
        if is_paused or not (model in self.noted or (known and known.is_warm)):
            fleet.note_ok(tx, self.horse.backend, model)
        if is_paused:
            facts = {"event": "backend_resumed", "backend": self.horse.backend, "model": model}
            log.info("backend answers again", extra=facts)
        self.noted.add(model)

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


class _NoTimeLeft(HoldfastError):
    """No time was left in this turn for another call."""


def _released(claims: Sequence[Claim]) -> Answer:
    return Answer(claims, (), BackendFault(ErrorClass.SLOW, _NoTimeLeft().message))
