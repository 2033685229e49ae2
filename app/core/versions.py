"""Another version of a target: its rows embedded anew beside daily work, then cut over in one step.

Both versions live side by side, each in a column of its own, until a person drops the old one. The
sweeper moves a campaign on, a step at a time; every step may be lost or done twice.
"""

import logging
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from app.core import requeue, submission
from app.core.context import Context
from app.core.errors import BackendFault, Fault, InvalidRequest, StoreUnavailable
from app.core.model import Caller, Target
from app.core.ports import FollowerSink, PrimarySink
from app.core.requests import BatchOptions
from app.core.store import campaigns, fleet, targets, vectors
from app.core.store.campaigns import Campaign, Change
from app.core.store.database import Tx, take_time
from app.core.store.targets import NewTarget

log = logging.getLogger(__name__)

REEMBEDDER = Caller("reembed", frozenset({"submit"}))
LOWEST_PRIORITY = -10
BLOCK, MOST_OPEN = 1000, 10_000
READ_SECONDS = 5.0
"""How long a step reads on, so that it soon hears of a pause and comes to the next campaign."""

MARK_SECONDS = 10.0
CLOSE_SECONDS = 120.0
"""How long daily work on a target may stand still for the last of a campaign to catch up."""

RESTING = ("running", "paused")


@dataclass(frozen=True, slots=True)
class Plan:
    """What a campaign would have to do."""

    old: Target
    new: Target
    rows: int
    has: int
    """Rows that have the new version already."""
    text_bytes: int
    seconds: float | None
    """At the rate of late, with the workers alive; None without history."""


def plan(ctx: Context, primary: PrimarySink, asked: NewTarget) -> Plan:
    """Say what it would cost to embed a target in another version; change nothing.

    Raises InvalidRequest where something is missing for it.
    """
    with ctx.database.transaction() as tx:
        take_time(tx)
        old, new = _pair(tx, asked)
        rows, text_bytes = primary.size(tx, old)
        has, _ = primary.progress(tx, old, new) if _is_registered(tx, new) else (0, 0)
        cost = fleet.cost(tx)
        workers = sum(fleet.alive(tx).workers.values()) or 1
    seconds = None if cost is None else (rows - has) * cost.p50 / workers
    return Plan(old, new, rows, has, text_bytes, seconds)


def _pair(tx: Tx, asked: NewTarget) -> tuple[Target, Target]:
    registered = [
        each for each in targets.registered(tx) if each.target_table == asked.target_table
    ]
    old = next((each for each in registered if each.is_current), None)
    if old is None:
        raise _refusal("target_table", "is not a registered target")
    if old.text_column is None:
        message = "is not known: python -m worker targets add … --text-column names it"
        raise _refusal("text_column", message)
    known = {each.embedding_version: each for each in registered}.get(asked.embedding_version)
    new = known or targets.looked_up(tx, asked)
    if new.embedding_version == old.embedding_version:
        raise _refusal("embedding_version", "is the current one already")
    return old, new


def _is_registered(tx: Tx, target: Target) -> bool:
    return any(each.label == target.label for each in targets.registered(tx))


def _refusal(field: str, message: str) -> InvalidRequest:
    return InvalidRequest(f"{field} {message}", faults=[Fault("invalid", message, field)])


def start(ctx: Context, asked: NewTarget) -> Target:
    """Register the new version beside the current one and begin; the sweeper does the rest."""
    with ctx.database.transaction() as tx:
        old, new = _pair(tx, asked)
        if not _is_registered(tx, new):
            targets.register(tx, asked)
        if not campaigns.start(tx, old.target_table, old.embedding_version, new.embedding_version):
            raise _refusal("target_table", "has a campaign already: see reembed status")
    facts = {"event": "campaign", "reason": "started"}
    log.info("campaign %s -> %s", old.label, new.embedding_version, extra=facts)
    return new


def change(ctx: Context, target_table: str, wanted: Change) -> None:
    """Pause, resume, cancel or close a campaign; raises InvalidRequest where it cannot be."""
    with ctx.database.transaction() as tx:
        found = [each for each in campaigns.latest(tx, target_table) if not each.finished_at]
        is_changed = campaigns.change(tx, target_table, wanted)
        stopped = campaigns.open_jobs(tx, found[0], REEMBEDDER.client) if found else []
    if is_changed:
        for job_id in stopped if wanted.state == "cancelled" else ():
            requeue.cancel(ctx, REEMBEDDER, job_id)
        return
    state = f"is {found[0].state}" if found else "has no campaign"
    raise _refusal("target_table", f"{state}: it cannot become {wanted.state}")


def drop(
    ctx: Context, followers: Mapping[str, FollowerSink], target_table: str, version: str
) -> Target:
    """Forget a version that is no longer current: in every follower, in the ledger, as a target."""
    with ctx.database.transaction() as tx:
        registered = {
            each.embedding_version: each
            for each in targets.registered(tx)
            if each.target_table == target_table
        }
        target = registered.get(version)
        if target is None:
            raise _refusal("embedding_version", "is not one of this target")
        if target.is_current:
            raise _refusal("embedding_version", "is the current one; cut over to another first")
        if any(
            version in (each.from_version, each.to_version) and not each.finished_at
            for each in campaigns.latest(tx, target_table)
        ):
            raise _refusal("embedding_version", "belongs to a campaign that goes on")
        left = vectors.open_items(tx, target)
        if left:
            message = f"cannot go: {left} items of it are open; let them end, or cancel their jobs"
            raise _refusal("embedding_version", message)
    for sink in followers.values():
        sink.drop(target)
    with ctx.database.transaction() as tx:
        take_time(tx)
        vectors.forget_version(tx, target)
        targets.remove(tx, target)
    return target


# ---- step by step --------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Stores:
    """Where vectors are."""

    primary: PrimarySink
    followers: Mapping[str, FollowerSink]


def step(ctx: Context, stores: Stores) -> Counter[str]:
    """Move every campaign on by one step; return what was done."""
    counts: Counter[str] = Counter()
    with ctx.database.transaction() as tx:
        found = campaigns.unfinished(tx)
        registered = {each.label: each for each in targets.registered(tx)}
    for each in found:
        old = registered.get(f"{each.target_table} {each.from_version}")
        new = registered.get(f"{each.target_table} {each.to_version}")
        if old is None or new is None:
            change(ctx, each.target_table, Change("cancelled", (each.state,), "a version is gone"))
        else:
            counts += _safely(_Step(ctx, stores, each, old, new))
    return counts


def is_urgent(ctx: Context) -> bool:
    """Whether the next step is to follow soon: rows are being read, or daily work waits for it."""
    with ctx.database.transaction() as tx:
        return any(
            each.state == "closing" or (each.state == "running" and not each.is_read)
            for each in campaigns.unfinished(tx)
        )


def _safely(one: "_Step") -> Counter[str]:
    """Take a step; one that fails is named, and does not keep other campaigns from theirs."""
    try:
        return one.run()
    except StoreUnavailable:
        raise
    except Exception:
        log.exception("campaign for %s failed", one.new.label, extra={"event": "campaign"})
        return Counter()


class _Step:
    """One step of one campaign."""

    def __init__(
        self, ctx: Context, stores: Stores, campaign: Campaign, old: Target, new: Target
    ) -> None:
        self.ctx = ctx
        self.stores = stores
        self.campaign = campaign
        self.old = old
        self.new = new
        self.counts: Counter[str] = Counter()

    def run(self) -> Counter[str]:
        if self.campaign.state == "paused":
            return self.counts
        # What daily work changes while the rows are read is caught up after that.
        caught_up = self._catch_up() if self.campaign.is_read else False
        if self.campaign.state == "running":
            self._mark()
            self._read_on()
        elif self.campaign.state == "closing":
            self._close(caught_up=caught_up)
        elif caught_up:
            self._end()
        return self.counts

    # ---- reading the rows

    def _read_on(self) -> None:
        """Submit blocks of rows until enough are open, for a time."""
        cursor = self.campaign.cursor
        is_read = self.campaign.is_read
        ends = time.monotonic() + READ_SECONDS
        while not is_read and time.monotonic() < ends:
            with self.ctx.database.transaction() as tx:
                if campaigns.open_work(tx, self.campaign, REEMBEDDER.client) >= MOST_OPEN:
                    return
            cursor = self._read_block(cursor)
            is_read = cursor is None
            self._mark()

    def _read_block(self, after: str | None) -> str | None:
        """Submit the next block of rows; return the id of its last one, None at the end."""
        with self.ctx.database.transaction() as tx:
            rows = self.stores.primary.read_on(tx, self.old, self.new, after=after, limit=BLOCK)
        texts = {row.target_id: row.text for row in rows if row.is_wanted}
        submitted = self._submit(texts)
        cursor = rows[-1].target_id if len(rows) == BLOCK else None
        with self.ctx.database.transaction() as tx:
            campaigns.advance(
                tx, self.campaign.id, cursor, submitted=submitted, skipped=len(texts) - submitted
            )
        return cursor

    def _submit(self, texts: Mapping[str, str | None]) -> int:
        """Submit texts for the new version; return how many could be."""
        values = [
            {"target_table": self.new.target_table, "target_id": target_id, "text": text}
            for target_id, text in texts.items()
            if text and text.strip() and len(text.encode()) <= self.ctx.settings.max_text_bytes
        ]
        if values:
            options = BatchOptions(
                embedding_version=self.new.embedding_version, priority=LOWEST_PRIORITY
            )
            incoming = submission.Incoming(options, values, is_by_operator=True)
            submission.submit(self.ctx, REEMBEDDER, incoming)
            self.counts["reembedding"] += len(values)
        return len(values)

    def _catch_up(self) -> bool:
        """Submit what the new version lacks of the newest texts; return whether that was nothing.

        The row itself tells which text is the newest: an old item may end after a new one.
        """
        with self.ctx.database.transaction() as tx:
            at = campaigns.before(tx)
        after, submitted = 0, 0
        while True:
            with self.ctx.database.transaction() as tx:
                found = campaigns.behind(tx, self.campaign, after=after, limit=BLOCK)
                ids = [each.target_id for each in found]
                texts = self.stores.primary.texts(tx, self.old, ids)
            if not found:
                break
            after = found[-1].id
            submitted += self._submit(
                {
                    each.target_id: texts[each.target_id]
                    for each in found
                    if each.target_id in texts
                    and submission.hash_of(texts[each.target_id])
                    not in (each.held, each.on_its_way)
                }
            )
        if not submitted:
            with self.ctx.database.transaction() as tx:
                campaigns.caught_up(tx, self.campaign, at)
        return not submitted

    # ---- the end

    def _close(self, *, caught_up: bool) -> None:
        """Cut over when every row that has the old version has the new one, of the same text."""
        reason = None if caught_up else "rows are being caught up"
        with self.ctx.database.transaction() as tx:
            take_time(tx)
            reason = reason or self._reason_to_wait(tx)
            done = reason is None and campaigns.cut_over(tx, self.campaign)
            if done:
                has, missing = self.stores.primary.progress(tx, self.old, self.new)
                campaigns.mark(tx, self.campaign.id, has, has + missing)
        if done:
            self._point_followers()
            self.counts["cut_over"] += 1
            facts = {"event": "campaign", "reason": "cut_over"}
            log.info("%s is current now", self.new.label, extra=facts)
        elif self.campaign.is_overdue:
            said = f"not cut over: {reason}"
            change(self.ctx, self.old.target_table, Change("running", ("closing",), said))
            log.warning("%s: %s", self.new.label, said, extra={"event": "campaign"})

    def _reason_to_wait(self, tx: Tx) -> str | None:
        left = campaigns.unsettled(tx, self.campaign)
        if not self.campaign.is_read:
            return "not all rows have been read"
        if left.held_old or left.open_new:
            return f"{left.held_old + left.open_new} items are in hand"
        _, missing = self.stores.primary.progress(tx, self.old, self.new)
        outdated = self.stores.primary.outdated(tx, self.old, self.new)
        if missing + outdated and not self.campaign.leaves_failed:
            return (
                f"{missing} rows have no vector of {self.new.embedding_version},"
                f" {outdated} have one of an older text, and {left.failed_new} items failed:"
                " requeue them, or cut over with --leave-failed"
            )
        return self._followers_lack(tx)

    def _followers_lack(self, tx: Tx) -> str | None:
        """Say which followers lack documents: their readers move on at the cut-over, too."""
        lacking = campaigns.lacking(tx, self.campaign, [*self.stores.followers])
        if not lacking:
            return None
        said = ", ".join(f"{name} lacks {number}" for name, number in lacking.items())
        version = self.new.embedding_version
        return f"{said} documents of {version} that it has in {self.old.embedding_version}"

    def _point_followers(self) -> bool:
        """Let readers of the followers find the new version; return whether all of them do."""
        failed: list[str] = []
        for name, sink in self.stores.followers.items():
            try:
                sink.make_current(self.new)
            except BackendFault as fault:
                failed.append(f"{name} does not name {self.new.embedding_version} yet: {fault}")
        if failed:
            said = "; ".join(failed)
            with self.ctx.database.transaction() as tx:
                campaigns.say(tx, self.campaign, said)
            if said != self.campaign.said:
                log.warning("%s: %s", self.new.label, said, extra={"event": "campaign"})
        return not failed

    def _end(self) -> None:
        """Finish when nothing of the old version is on its way any more."""
        if not self._point_followers():  # once more: whoever was to do it may have died
            return
        with self.ctx.database.transaction() as tx:
            if not campaigns.unsettled(tx, self.campaign).open_old:
                campaigns.finish(tx, self.campaign)

    def _mark(self) -> None:
        """Keep how far it is, now and then: the whole table is counted for it."""
        with self.ctx.database.transaction() as tx:
            if not campaigns.is_mark_due(tx, self.campaign.id, seconds=MARK_SECONDS):
                return
            take_time(tx)
            has, missing = self.stores.primary.progress(tx, self.old, self.new)
            campaigns.mark(tx, self.campaign.id, has, has + missing)


def described(ctx: Context, target_table: str | None = None) -> Sequence[Campaign]:
    """Return the last campaign of each target, or of one."""
    with ctx.database.transaction() as tx:
        return campaigns.latest(tx, target_table)


def history(ctx: Context, campaign: Campaign) -> Sequence[campaigns.Mark]:
    """Return how far a campaign was, over its time."""
    with ctx.database.transaction() as tx:
        return campaigns.marks(tx, campaign.id)
