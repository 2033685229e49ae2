"""Coverage: what share of each target the stores really hold; what differs, and its repair.

The ledger says what was stored. It is compared with the rows of the target's own table and with the
documents of each follower. Kinds of difference, of rows: `queued` and `failed` (an item explains
it), `deleted` (wanted so), `missing` (no vector, and nothing on its way), `stale` (its text was
changed behind our back), `unrecorded` (a vector that the ledger does not know), `wrong_dimension`,
`gone` (in the ledger, but its row is not there). Of documents: `queued`, `failed`, `missing`,
`orphan` (nobody's), `stale` (of another text or version), `wrong_dimension`.
"""

import logging
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import islice
from typing import Any

from app.core import submission
from app.core.context import Context
from app.core.model import Caller, Target
from app.core.ports import FollowerSink, PrimarySink, Write
from app.core.requests import BatchOptions
from app.core.store import items, targets, vectors
from app.core.store.database import Tx, take_time

log = logging.getLogger(__name__)

BLOCK = 1000
SAMPLE = 5
EXPLAINED = frozenset({"current", "queued", "failed", "deleted"})
"""Kinds that are no fault of a store: they are as they should be, or an item says why not."""

REPAIRER = Caller("repair", frozenset({"submit"}))
LOWEST_PRIORITY = -10


@dataclass(frozen=True, slots=True)
class Stores:
    """Where vectors are: the primary, and its followers by name."""

    primary_name: str
    primary: PrimarySink
    followers: Mapping[str, FollowerSink]


@dataclass(frozen=True, slots=True)
class Wanted:
    """Which targets and which sinks are looked at; None: all."""

    target_table: str | None = None
    sink: str | None = None


@dataclass(frozen=True, slots=True)
class Survey:
    """What was found of one target and version in one sink."""

    target: Target
    sink: str
    kinds: Mapping[str, int]
    """How many rows or documents are of which kind."""
    samples: Mapping[str, Sequence[str]]
    """The first ids of each kind that is a fault."""
    done: Counter[str] = field(default_factory=Counter)
    """What a repair has done, by what it did."""

    @property
    def faults(self) -> dict[str, int]:
        """What is not as it should be."""
        return {kind: number for kind, number in self.kinds.items() if kind not in EXPLAINED}


def shown(ctx: Context, caller: Caller) -> list[dict[str, Any]]:
    """Return the last survey of each target, version and sink that the caller may write to."""
    with ctx.database.transaction() as tx:
        found = vectors.coverage(tx)
    return [
        {
            **{name: row[name] for name in ("target_table", "embedding_version", "is_current")},
            "sink": row["sink"],
            "measured_at": row["measured_at"],
            "share": share(row["kinds"]),
            "without_vector": row["kinds"].get("missing", 0),
            "kinds": row["kinds"],
        }
        for row in found
        if caller.is_admin or row["client"] in (None, caller.client)
    ]


def share(kinds: Mapping[str, int]) -> float:
    """Return what share holds the current text: of all that should; 1 where nothing should."""
    wanted = sum(
        number for kind, number in kinds.items() if kind not in ("deleted", "gone", "orphan")
    )
    return round(kinds.get("current", 0) / wanted, 6) if wanted else 1.0


def measure(ctx: Context, primary: PrimarySink) -> Counter[str]:
    """Survey the tables of all targets and keep the numbers; return what is wrong, by kind."""
    stores = Stores(ctx.settings.primary_sink, primary, {})
    found: Counter[str] = Counter()
    for survey in verify(ctx, stores, Wanted()):
        found.update(survey.faults)
    return found


def verify(ctx: Context, stores: Stores, wanted: Wanted) -> Iterator[Survey]:
    """Compare each store with the ledger, change nothing, and keep the numbers."""
    with ctx.database.session() as session:
        for target, sink in _places(session, stores, wanted):
            yield _survey(session, stores, target, sink)


def repair(ctx: Context, stores: Stores, wanted: Wanted) -> Iterator[Survey]:
    """Do the same and make good what is wrong; what is kept somewhere is not embedded again.

    Safe to be ended at any time and to be done twice: what is on its way already is `queued`.
    """
    with ctx.database.session() as session:
        for target, sink in _places(session, stores, wanted):
            survey = _survey(session, stores, target, sink)
            _Repair(ctx, session, stores, survey).run()
            if survey.done:
                facts = {"event": "repaired", "sink": sink, "counts": dict(survey.done)}
                log.info("repaired %s", target.label, extra=facts)
            yield survey


def _places(session: Tx, stores: Stores, wanted: Wanted) -> list[tuple[Target, str]]:
    names = [stores.primary_name, *stores.followers]
    return [
        (target, name)
        for target in targets.registered(session)
        for name in names
        if wanted.target_table in (None, target.target_table) and wanted.sink in (None, name)
    ]


def _survey(session: Tx, stores: Stores, target: Target, sink: str) -> Survey:
    began = time.monotonic()
    vectors.begin_survey(session)
    if sink != stores.primary_name:
        vectors.begin_held(session)
        held = stores.followers[sink].held(target)
        while block := list(islice(held, BLOCK)):
            vectors.note_held(session, block)
    with session.transaction():
        take_time(session)
        if sink == stores.primary_name:
            kinds = stores.primary.survey(session, target)
        else:
            kinds = vectors.survey_held(session, target, sink)
    vectors.keep_coverage(session, target, sink, kinds, seconds=time.monotonic() - began)
    samples = {
        kind: vectors.differences(session, kind, after="", limit=SAMPLE)
        for kind in sorted(kinds)
        if kind not in EXPLAINED
    }
    return Survey(target, sink, kinds, samples)


class _Repair:
    """The repair of one target in one sink, from what its survey has named."""

    def __init__(self, ctx: Context, session: Tx, stores: Stores, survey: Survey) -> None:
        self.ctx = ctx
        self.session = session
        self.stores = stores
        self.target = survey.target
        self.sink = survey.sink
        self.done = survey.done

    def run(self) -> None:
        if self.sink == self.stores.primary_name:
            self._each("gone", self._forget)
            self._each("unrecorded", self._write_down)
            self._each("missing", self._restore)
            self._each("stale", self._embed)
            self._each("wrong_dimension", self._embed)
        else:
            self._each("missing", partial(self._resend, is_newer=False))
            self._each("stale", partial(self._resend, is_newer=True))
            self._each("wrong_dimension", partial(self._resend, is_newer=True))
            self._each("orphan", self._condemn)

    def _each(self, kind: str, act: Any) -> None:  # noqa: ANN401 - one of the methods below
        after = ""
        while ids := vectors.differences(self.session, kind, after=after, limit=BLOCK):
            act(ids)
            after = ids[-1]

    # ---- of the primary

    def _forget(self, ids: Sequence[str]) -> None:
        table, version = self.target.target_table, self.target.embedding_version
        with self.session.transaction():
            keys = [(table, each, version) for each in ids]
            self.done["forgotten"] += vectors.remove(self.session, keys)

    def _write_down(self, ids: Sequence[str]) -> None:
        with self.session.transaction():
            written = vectors.write_down(self.session, self.target, ids)
        self.done["written_down"] += written
        self.done["origin_unknown"] += len(ids) - written

    def _restore(self, ids: Sequence[str]) -> None:
        """Write back what a follower has kept of the very same text; embed the rest."""
        left = set(ids)
        for follower in self.stores.followers.values():
            if left:
                left -= self._restore_from(follower, sorted(left))
        if left:
            self._embed(sorted(left))

    def _restore_from(self, follower: FollowerSink, ids: Sequence[str]) -> set[str]:
        kept = follower.read(self.target, ids)
        texts = self.stores.primary.texts(self.session, self.target, ids)
        with self.session.transaction():
            hashes = vectors.kept_hashes(self.session, self.target, ids)
            writes = [
                Write(each, kept[each].vector or ())
                for each in ids
                if each in kept
                and kept[each].content_hash == hashes.get(each)
                and (each not in texts or submission.hash_of(texts[each]) == hashes[each])
            ]
            written = self.stores.primary.write(self.session, self.target, writes)
        bad = written.gone | written.busy | set(written.refused)
        restored = {each.target_id for each in writes} - bad
        self.done["restored"] += len(restored)
        return restored

    def _embed(self, ids: Sequence[str]) -> None:
        with self.session.transaction():
            texts = items.texts(self.session, self.target, ids)
            texts |= self.stores.primary.texts(self.session, self.target, ids)
            items.note_lost(self.session, self.target, ids)
        values = [
            {"target_table": self.target.target_table, "target_id": each, "text": texts[each]}
            for each in ids
            if each in texts
        ]
        self.done["text_unknown"] += len(ids) - len(values)
        if values:
            options = BatchOptions(
                embedding_version=self.target.embedding_version, priority=LOWEST_PRIORITY
            )
            incoming = submission.Incoming(options, values, skip_invalid=True, is_by_operator=True)
            submission.submit(self.ctx, REPAIRER, incoming)
            self.done["embedding_again"] += len(values)

    # ---- of a follower

    def _resend(self, ids: Sequence[str], *, is_newer: bool) -> None:
        with self.session.transaction():
            sent = vectors.resend(self.session, self.target, self.sink, ids, is_newer=is_newer)
        self.done["sent_again"] += sent

    def _condemn(self, ids: Sequence[str]) -> None:
        with self.session.transaction():
            removed = vectors.condemn(self.session, self.target, self.sink, ids)
        self.done["removed"] += removed
