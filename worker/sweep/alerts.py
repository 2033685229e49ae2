"""Alerts: what somebody should look at is said once when it begins, and once when it is over."""

import logging
from collections import Counter

from app.core.context import Context
from app.core.store import fleet
from app.core.store.database import Tx

log = logging.getLogger(__name__)


def run_once(ctx: Context) -> Counter[str]:
    """Add up the tallies, look at each threshold, and say what has changed."""
    with ctx.database.transaction() as tx:
        fleet.add_up(tx)
        said = {name: _changed(tx, name, message) for name, message in _looked_at(ctx, tx).items()}
    for name, (what, message) in said.items():
        facts = {"event": what, "alert": name}
        if what == "alert":
            log.warning("%s", message, extra=facts)
        elif what == "alert_over":
            log.info("alert is over: %s", name, extra=facts)
    return Counter(what for what, _ in said.values() if what)


def _changed(tx: Tx, name: str, message: str | None) -> tuple[str, str]:
    if message is None:
        return ("alert_over" if fleet.end_alert(tx, name) else ""), ""
    return ("alert" if fleet.raise_alert(tx, name, message) else ""), message


def _looked_at(ctx: Context, tx: Tx) -> dict[str, str | None]:
    """Return what is to be said of each threshold; None where it is not reached."""
    settings = ctx.settings
    gauges = fleet.gauges(tx)
    failed, oldest = int(gauges.items["failed"]), gauges.oldest_due_seconds
    snapshot = fleet.oldest_snapshot(tx)
    found: dict[str, str | None] = dict.fromkeys(("failed_items", "oldest_item", "old_snapshot"))
    if failed >= settings.alert_failed_count:
        found["failed_items"] = (
            f"{failed} items failed: see GET /api/jobs?state=failed, mend the cause, then requeue"
        )
    if oldest >= settings.alert_oldest_seconds:
        found["oldest_item"] = (
            f"Oldest pending item is {oldest:.0f} s old: see /readyz and GET /api/incidents"
        )
    if snapshot and snapshot.seconds >= settings.alert_snapshot_seconds:
        found["old_snapshot"] = (
            f"{snapshot.holder} has held a snapshot for {snapshot.seconds:.0f} s: no dead row of"
            f" the queue can be cleaned away. If it is wanted no more: {snapshot.remedy}"
        )
    return found
