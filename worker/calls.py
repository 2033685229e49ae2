"""Calls to the backend: what goes together, when it may go, and whose fault it is if it fails."""

import hashlib
import logging
import time
from collections.abc import Generator, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import groupby

from app.core.errors import (
    AnswerFault,
    BackendFault,
    ErrorClass,
    HoldfastError,
    RequestFault,
    SuspectFault,
    WorkError,
)
from app.core.model import (
    PAUSE_CAP_SECONDS,
    Claim,
    Target,
    are_alike,
    backoff,
    check_vectors,
    cosine,
)
from app.core.store import fleet, targets
from app.core.store.database import Tx
from worker.runtime import Horse

log = logging.getLogger(__name__)

CONTROL_TEXT = "ok"
"""A harmless text: what fails for it too is the backend's fault, never a text's."""

CONTRAST_TEXTS = ("The oven is cold.", "17 + 4 = 21")
"""Harmless texts that no model gives one vector; no more than any call that was found alike."""

CANARY_COSINE = 0.98
"""Less than this is another model: what another machine or precision changes stays above 0.99."""

DIGEST_SECONDS = 5.0

SLICE_SECONDS = 2.5
"""How long a slice should take: long enough to be cheap, short enough to take turns and to stop."""

BYTES_PER_TOKEN = 3

SETTLE_SECONDS = 20.0
"""What a bell keeps of its time limit for settling: no call may reach into it."""

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


def first_pace(horse: Horse, tx: Tx) -> int:
    """Return how many items the first slice should have, by what items cost lately."""
    most = horse.context.settings.queue_batch_size
    cost = fleet.cost(tx)
    return most if cost is None else max(1, min(most, int(SLICE_SECONDS / max(cost.p50, 1e-6))))


class Calls:
    """The backend as one bell uses it, slice by slice."""

    def __init__(self, horse: Horse, registered: Sequence[Target], pace: int) -> None:
        self.horse = horse
        self.ctx = horse.context
        self.targets = self._by_key(registered)
        self.pace = pace
        """How many items the next slice should have."""
        self.is_spent = False
        """Whether no time is left in this bell for another call."""
        self.backends: dict[str, fleet.Backend] = {}
        self.digests: dict[str, str] = {}
        self.loaded: set[str] = set()
        self.noted: set[str] = set()
        self.control: dict[str, WorkError | None] = {}
        self.tells_apart: set[str] = set()
        self.halted: set[str] = set()
        self.well: set[str] = set()
        """Models whose last call was answered."""
        self.call_seconds = 0.0
        self.ends = time.monotonic() + self.ctx.bell_seconds - SETTLE_SECONDS

    def begin_slice(self, tx: Tx) -> set[str]:
        """Look at the backends anew; return the models that are paused, tried again or not."""
        self.control.clear()
        self.tells_apart.clear()
        self.halted.clear()
        self.backends = fleet.backends(tx, self.horse.backend)
        paused = {model for model, each in self.backends.items() if each.paused_since}
        self.loaded -= paused
        return paused

    def answers(self, claims: Sequence[Claim]) -> Iterator[Answer]:
        """Send the claims' texts, and say what became of each: halves, alone, or not at all."""
        by_model = sorted(claims, key=self.model)
        for model, group in groupby(by_model, key=self.model):
            for call in self._calls(model, list(group)):
                yield from self._embed(model, call)

    def model(self, claim: Claim) -> str:
        """Return the model that an item is for."""
        return self.target(claim).model

    def target(self, claim: Claim) -> Target:
        """Return where the vector of an item goes."""
        key = (claim.target_table, claim.embedding_version)
        if key not in self.targets:  # registered since this bell began
            with self.ctx.database.transaction() as tx:
                self.targets = self._by_key(targets.registered(tx))
        return self.targets[key]

    def _by_key(self, registered: Sequence[Target]) -> dict[tuple[str, str], Target]:
        known = [*targets.untargeted(registered, self.ctx.settings), *registered]
        return {(each.target_table, each.embedding_version): each for each in known}

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
        self, model: str, claims: Sequence[Claim], *, failed: WorkError | None = None
    ) -> Iterator[Answer]:
        """Say what became of claims; `failed` is how a call with these texts has failed before."""
        if model in self.halted:
            halted = BackendFault(ErrorClass.UNREACHABLE, PAUSED_MESSAGE)
            yield self._away(claims, halted, failed)
            return
        try:
            if failed is None and claims[0].kills:
                self._see_that_it_is_well(model)
            vectors = self._call(model, [self.target(each).prefix + each.text for each in claims])
        except _NoTimeLeft:
            yield _released(claims)
        except BackendFault as fault:
            yield self._away(claims, self.pause(model, fault), failed)
        except (RequestFault, AnswerFault) as fault:
            if isinstance(fault, RequestFault) and fault.retry_whole and not failed:
                yield from self._embed(model, claims, failed=fault)
            else:
                yield from self._narrow(model, claims, fault)
        else:
            self._adjust(len(claims), self.call_seconds)
            yield Answer(claims, vectors)

    def _call(self, model: str, texts: Sequence[str]) -> list[list[float]]:
        """Call the backend when it is this bell's turn, and check what it answers.

        Raises _NoTimeLeft where the call could outlive the bell.
        """
        self._look_at_digest(model)
        self._check_canary(model)
        self.well.discard(model)
        known = self.backends.get(model)
        if known and known.paused_since and known.error_class == ErrorClass.BAD_ANSWER:
            self._check_contrast(model)  # one text, with which a backend is tried, tells too little
        vectors = self._ask(model, texts)
        if are_alike(texts, vectors):
            self._check_contrast(model)
            raise AnswerFault(f"the same vector for {len(set(texts))} different texts")
        self.well.add(model)
        return vectors

    def _ask(self, model: str, texts: Sequence[str]) -> list[list[float]]:
        seconds = self._seconds(model)
        with self._turn_to_call(self._seconds_left() - seconds):
            began = time.monotonic()
            vectors = self.horse.embedder.embed(texts, model=model, seconds=seconds)
            self.call_seconds = time.monotonic() - began
        check_vectors(vectors, count=len(texts), dimension=self._dimension(model))
        self.loaded.add(model)
        return vectors

    def _check_contrast(self, model: str) -> None:
        """Raise BackendFault where the backend gives one vector to texts with nothing in common.

        Asked once a slice. Else the texts are alike to the model, or the backend mixes up large
        calls: halving tells.
        """
        if model in self.tells_apart:
            return
        if are_alike(CONTRAST_TEXTS, self._ask_harmless(model, CONTRAST_TEXTS)):
            raise BackendFault(ErrorClass.BAD_ANSWER, "it gives every text the same vector")
        self.tells_apart.add(model)

    def _look_at_digest(self, model: str) -> None:
        """Ask what exactly is behind a model's name, where it may have changed since it was asked.

        That it does not tell is no fault of a text and none of the backend.
        """
        ask = getattr(self.horse.embedder, "digest", None)  # a site's own need not have it
        if ask is None or self._is_loaded(model):
            return
        try:
            digest = ask(model, seconds=DIGEST_SECONDS)
        except WorkError:
            return
        if digest is None:
            return
        with self.ctx.database.transaction() as tx:
            before = fleet.note_digest(tx, self.horse.backend, model, digest)
        self.digests[model] = digest
        if before not in (None, digest):
            facts = {"event": "model_changed", "backend": self.horse.backend, "model": model}
            log.warning("what is behind the model's name has changed: %.19s", digest, extra=facts)

    def digest(self, model: str) -> str | None:
        """Return what exactly is behind a model's name, as far as it was told."""
        known = self.backends.get(model)
        return self.digests.get(model) or (known.digest if known else None)

    def _check_canary(self, model: str) -> None:
        """Raise BackendFault where the model is no longer the one that first answered to its name.

        Asked at the first call after a start, a pause, or some minutes.
        """
        text = self.ctx.settings.embedder_canary
        if not text or self._is_loaded(model):
            return
        [vector] = self._ask_harmless(model, [text])
        text_hash = hashlib.sha256(text.encode()).digest()
        with self.ctx.database.transaction() as tx:
            kept = fleet.canary(tx, model, text_hash, vector)
        found = cosine(vector, kept)
        if found < CANARY_COSINE:
            message = (
                f"the model behind this name has changed: the canary's cosine is {found:.3f};"
                f" if that is wanted: python -m worker backends accept {model}"
            )
            raise BackendFault(ErrorClass.BAD_CONFIG, message)

    def _ask_harmless(self, model: str, texts: Sequence[str]) -> list[list[float]]:
        """Ask for vectors of harmless texts: what fails for them is the backend's fault."""
        try:
            return self._ask(model, texts)
        except (RequestFault, AnswerFault) as fault:
            message = f"{fault.message} (for a harmless text)"
            raise BackendFault(fault.error_class, message) from fault

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
        if self._is_loaded(model):
            return settings.embedder_timeout_seconds
        return max(settings.embedder_load_seconds, settings.embedder_timeout_seconds)

    def _is_loaded(self, model: str) -> bool:
        known = self.backends.get(model)
        return model in self.loaded or bool(known and known.is_warm)

    def _seconds_left(self) -> float:
        return self.ends - time.monotonic()

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
                yield self._away(claims, self.pause(model, worse), fault)
                return
        if not middle:
            yield Answer(claims, (), fault)
            return
        yield from self._embed(model, claims[:middle], failed=fault)
        yield from self._embed(model, claims[middle:], failed=fault)

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

    def _see_that_it_is_well(self, model: str) -> None:
        """Raise BackendFault where the backend is not well before it has a text under suspicion."""
        if model in self.well:
            return
        error = self._control(model, afresh=True)
        if error is not None:
            raise BackendFault(error.error_class, f"{error.message} (for a harmless text)")

    def _away(
        self, claims: Sequence[Claim], fault: BackendFault, failed: WorkError | None
    ) -> Answer:
        """Say what an outage is to claims whose call has `failed` right before it, or has not.

        One of several texts may have brought the backend down: the next time each is alone. A text
        that was alone, and sent when the backend was well, is charged.
        """
        if not isinstance(failed, RequestFault) or failed.error_class is ErrorClass.BAD_INPUT:
            return Answer(claims, (), fault)
        if len(claims) == 1 and claims[0].kills:
            message = f"{failed.message}, and the backend was away afterwards: {fault.message}"
            return Answer(claims, (), RequestFault(failed.error_class, message))
        return Answer(claims, (), SuspectFault(fault.error_class, fault.message))

    def pause(self, model: str, fault: BackendFault) -> BackendFault:
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
        return BackendFault(fault.error_class, fault.message)

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

    def note_answer(self, tx: Tx, model: str) -> None:
        """Record that a backend answered rightly: its pause is over, its model is loaded."""
        known = self.backends.get(model)
        is_paused = bool(known and known.paused_since)
        # Not at each slice: all workers would wait for each other's update of one row.
        if is_paused or not (model in self.noted or (known and known.is_warm)):
            fleet.note_ok(tx, self.horse.backend, model)
        if is_paused:
            facts = {"event": "backend_resumed", "backend": self.horse.backend, "model": model}
            log.info("backend answers again", extra=facts)
        self.noted.add(model)


class _NoTimeLeft(HoldfastError):
    """No time was left in this turn for another call."""


def _released(claims: Sequence[Claim]) -> Answer:
    return Answer(claims, (), BackendFault(ErrorClass.SLOW, _NoTimeLeft().message))
