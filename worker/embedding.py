"""Drains an embedding job: claim, embed, check, decide, write and settle, one slice at a time."""

import logging
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby

from app.core import rings, status
from app.core.errors import (
    AnswerFault,
    BackendFault,
    BellsUnavailable,
    ErrorClass,
    FailedItemsRemain,
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
    queue_for,
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

PROBE_SECONDS = 30.0
"""How long a backend whose pause is over is left to the one who tries it."""

BYTES_PER_TOKEN = 3

PAUSED_MESSAGE = "the backend was paused while the items were in hand"


@dataclass(frozen=True, slots=True)
class Answer:
    """What became of some claims that went to the backend together."""

    claims: Sequence[Claim]
    vectors: Sequence[Sequence[float]]
    error: WorkError | None = None


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
    with Lease(horse.context.database, lease_seconds=settings.queue_visibility_timeout) as lease:
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
        self.proven: set[str] = set()
        self.control: dict[str, WorkError | None] = {}
        self.halted: set[str] = set()
        self.published_at = self.mark = time.monotonic()

    # ---- the turn ------------------------------------------------------------------------

    def run(self) -> dict[str, int]:
        began = time.monotonic()
        while self._slice():
            self._publish()
            if self.horse.must_stop() or self._turn_is_over(time.monotonic() - began):
                rings.ring(self.ctx, self.job.id, bells=1, by="tail")
                break
        return self._end()

    def _turn_is_over(self, seconds: float) -> bool:
        if seconds >= self.ctx.settings.queue_bell_seconds:
            return True
        if seconds < TURN_SECONDS or self.job.priority > 0:
            return False
        try:
            return self.ctx.bells.others_wait(self._queue(), self.job.id)
        except BellsUnavailable:
            return False

    def _queue(self) -> str:
        project = self.ctx.settings.queue_project
        return queue_for(project, frozenset({f"embeddings-{project}"}))

    def _publish(self) -> None:
        if time.monotonic() - self.published_at >= 1:
            self.published_at = time.monotonic()
            status.publish(self.ctx, self.job.id)

    def _end(self) -> dict[str, int]:
        settings = self.ctx.settings
        finished = None
        for job_id in [self.job.id, *sorted(self.others)]:
            job = status.finish(self.ctx, job_id, ttl_seconds=settings.job_result_ttl_seconds)
            finished = job if job_id == self.job.id else finished
        if finished is None:
            status.publish(self.ctx, self.job.id)
        elif finished.state in (JobState.FAILED, JobState.COMPLETED_WITH_ERRORS):
            raise FailedItemsRemain(finished.counts.failed, finished.counts.total)
        return dict(self.counts)

    # ---- one slice -----------------------------------------------------------------------

    def _slice(self) -> bool:
        """Do one slice; return whether there was anything to do."""
        self.control.clear()
        self.halted.clear()
        self.mark = time.monotonic()
        claims = self._claim()
        if not claims:
            return False
        self.lease.hold(claims)
        left = {claim.item_id: claim for claim in claims}
        try:
            for answer in self._answers(claims):
                self._settle_or_pause(answer)
                for claim in answer.claims:
                    left.pop(claim.item_id)
                self.lease.hold(list(left.values()))
        except Exception as exc:
            # Whatever it was, it goes on upwards (RQ's time limit is one of these); the items
            # are charged by name rather than by a lease that runs out.
            self._abandon(list(left.values()), exc)
            raise
        return True

    def _claim(self) -> list[Claim]:
        limit = self.pace
        with self.ctx.database.transaction() as tx:
            self.backends = fleet.backends(tx, self.horse.backend)
            paused = {model for model, each in self.backends.items() if each.paused_since}
            for model in sorted(paused):
                seconds = PROBE_SECONDS + self._seconds(model)
                if not self.backends[model].is_paused and fleet.take_probe(
                    tx, self.horse.backend, model, seconds=seconds
                ):
                    # Half open: one item tells whether the rest may go on.
                    paused = {target.model for target in self.targets.values()} - {model}
                    limit = 1
                    break
            return items.claim(tx, self.terms, limit=limit, paused_models=sorted(paused))

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
        began = time.monotonic()
        try:
            vectors = self._call(model, [claim.text for claim in claims])
        except BackendFault as fault:
            yield self._whole_backend(model, claims, fault)
        except (RequestFault, AnswerFault) as fault:
            if isinstance(fault, RequestFault) and fault.retry_whole and not again:
                yield from self._embed(model, claims, again=True)
            else:
                yield from self._narrow(model, claims, fault)
        else:
            self._adjust(len(claims), time.monotonic() - began)
            yield Answer(claims, vectors)

    def _call(self, model: str, texts: Sequence[str]) -> list[list[float]]:
        vectors = self.horse.embedder.embed(texts, model=model, seconds=self._seconds(model))
        check_vectors(vectors, count=len(texts), dimension=self._dimension(model))
        return vectors

    def _seconds(self, model: str) -> float:
        settings = self.ctx.settings
        known = self.backends.get(model)
        if model in self.proven or (known and known.is_warm):
            return settings.embedder_timeout_seconds
        return max(settings.embedder_load_seconds, settings.embedder_timeout_seconds)

    def _dimension(self, model: str) -> int:
        return next(each.dimension for each in self.targets.values() if each.model == model)

    def _narrow(
        self, model: str, claims: Sequence[Claim], fault: RequestFault | AnswerFault
    ) -> Iterator[Answer]:
        """Halve what failed until one text stands alone; blame it only if a harmless one passes."""
        is_slow = fault.error_class is ErrorClass.SLOW
        if isinstance(fault, RequestFault) and fault.is_size_limit and len(claims) > 1:
            self._remember_limit(model, len(claims) // 2)
        elif len(claims) == 1 or not (is_slow or fault.error_class is ErrorClass.BAD_INPUT):
            shared = self._control(model)
            if shared is not None:
                message = f"{fault.message} (so does a harmless text)"
                worse = BackendFault(fault.error_class, message)
                yield self._whole_backend(model, claims, worse)
                return
        if len(claims) == 1:
            yield Answer(claims, (), fault)
            return
        if is_slow:
            self.pace = max(1, len(claims) // 2)
        middle = len(claims) // 2
        yield from self._embed(model, claims[:middle], again=True)
        yield from self._embed(model, claims[middle:], again=True)

    def _control(self, model: str) -> WorkError | None:
        if model not in self.control:
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
        self.proven.discard(model)
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
        with self.ctx.database.transaction() as tx:
            held = items.hold(tx, answer.claims)
            outcomes = self._outcomes(tx, answer, held)
            settled = items.settle(tx, outcomes, leased_by=self.horse.leased_by)
            ids = [outcome.claim.item_id for outcome in outcomes]
            self.others |= items.other_jobs(tx, ids, job_id=self.job.id)
            if answer.vectors:
                self._note_success(tx, self._model(answer.claims[0]), settled)
        self._count(outcomes, lost=len(answer.claims) - settled)

    def _outcomes(self, tx: Tx, answer: Answer, held: set[int]) -> list[Settlement]:
        if answer.error is not None:
            mine = [claim for claim in answer.claims if claim.item_id in held]
            return [Settlement(claim, decide(claim, answer.error)) for claim in mine]
        pairs = [
            (claim, vector)
            for claim, vector in zip(answer.claims, answer.vectors, strict=True)
            if claim.item_id in held
        ]
        found: list[Settlement] = []
        by_target = sorted(
            pairs, key=lambda pair: (pair[0].target_table, pair[0].embedding_version)
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

        return [Settlement(claim, outcome(claim)) for claim, _ in pairs]

    def _note_success(self, tx: Tx, model: str, settled: int) -> None:
        # Not at each slice: all workers would wait for each other's update of one row.
        known = self.backends.get(model)
        if model not in self.proven and not (known and known.is_warm):
            fleet.note_ok(tx, self.horse.backend, model)
            if known and known.paused_since:
                facts = {"event": "backend_resumed", "backend": self.horse.backend, "model": model}
                log.info("backend answers again", extra=facts)
        self.proven.add(model)
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
            log.exception(
                "slice failed", extra={"event": "bell_end", "error_class": ErrorClass.INTERNAL}
            )
            error = WorkError(ErrorClass.INTERNAL, type(exc).__name__)
        try:
            self._settle(Answer(claims, (), error))
        except StoreUnavailable:
            log.warning("leases left to run out", extra={"event": "postgres_lost"})
