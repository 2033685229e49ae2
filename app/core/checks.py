"""Preflight: whether work is accepted, whether it gets done, and what stands in the way."""

import logging
import re
from contextlib import suppress
from dataclasses import asdict, dataclass
from datetime import datetime
from typing import Any

from app.core.bells import Bells
from app.core.context import Context
from app.core.errors import BellsUnavailable, Fault, InvalidRequest, StoreUnavailable
from app.core.model import EMBEDDINGS, Caller
from app.core.store import fleet, schema, targets
from app.core.store.database import Tx

log = logging.getLogger(__name__)

OLDEST_REDIS = (6, 2)
READY_SECONDS = 3.0
"""A Postgres that is slower to answer than this takes no work now."""

CURSOR = re.compile(r"(open|[0-9T:.-]{10,26}\+00:00)~([0-9]{1,18})", re.ASCII)


@dataclass(frozen=True, slots=True)
class Seen:
    """What a check saw, and whether a POST would be accepted."""

    is_ready: bool
    shown: dict[str, Any]


def readiness(ctx: Context) -> Seen:
    """Say whether a POST would be accepted, and what is degraded though it would."""
    try:
        with ctx.database.transaction(answer_seconds=READY_SECONDS) as tx:
            fault = schema.fault(tx)
            if fault:  # and perhaps the tables that are asked for below
                return _unavailable(fault)
            alive = fleet.alive(tx)
            paused = _paused(fleet.backends(tx, ctx.settings.embedder))
            sinks = (ctx.settings.primary_sink, *ctx.settings.followers)
            paused += [f"sink_paused:{name}" for name in sinks if _is_away(tx, name)]
            paused += [f"alert:{each.name}" for each in fleet.alerts(tx)]
    except StoreUnavailable as exc:
        return _unavailable(f"postgres: {exc.message}")
    degraded = [*redis_faults(ctx), *paused]
    if not alive.sweepers:
        degraded.append("no_sweeper")
    degraded += [f"no_worker:{queue}" for queue in _unserved(ctx, alive)]
    return Seen(is_ready=True, shown={"status": "ok", "degraded": degraded})


def expected_queues(ctx: Context) -> list[str]:
    """Return the queues that should have a worker: traces where trace workers are expected."""
    settings = ctx.settings
    return [EMBEDDINGS, *([settings.trace_worker_queue] if settings.trace_worker_count else [])]


def _unserved(ctx: Context, alive: fleet.Alive) -> list[str]:
    """Return the expected queues that nobody serves; a project's worker stands for embeddings."""
    traces = ctx.settings.trace_worker_queue
    served = {queue if queue == traces else EMBEDDINGS for queue in alive.workers}
    return [queue for queue in expected_queues(ctx) if queue not in served]


def _unavailable(reason: str) -> Seen:
    return Seen(is_ready=False, shown={"status": "unavailable", "reason": reason})


def _is_away(tx: Tx, sink: str) -> bool:
    return any(each.paused_since for each in fleet.backends(tx, sink).values())


def _paused(backends: dict[str, fleet.Backend]) -> list[str]:
    return [f"backend_paused:{model}" for model, each in backends.items() if each.paused_since]


def redis_faults(ctx: Context) -> list[str]:
    """Name what is wrong with Redis: away, too old, or allowed to throw bells away."""
    try:
        facts = ctx.bells.facts()
    except BellsUnavailable:
        return ["redis"]
    faults: list[str] = []
    version = tuple(int(part) for part in re.findall(r"\d+", facts["version"])[:2])
    if version < OLDEST_REDIS:
        faults.append("redis_version")
    if facts["evicts"]:
        faults.append("redis_policy")
    return faults


def warn_of_eviction(bells: Bells) -> None:
    """Say in the log, at the start of a process, where Redis may throw keys away."""
    with suppress(BellsUnavailable):  # whoever needs it says so
        facts = bells.facts()
        if facts["evicts"]:
            log.warning(
                "Redis may throw away bells and results: set maxmemory-policy noeviction, not %s",
                facts["policy"],
                extra={"event": "redis_policy"},
            )


def warn_of_targets(tx: Tx) -> None:
    """Say in the log, at the start of a worker, which targets no longer fit the database."""
    for target in targets.registered(tx):
        for fault in targets.faults(tx, target):
            facts = {"event": "target_mismatch", "reason": fault.field}
            log.error("target %s: %s %s", target.label, fault.field, fault.message, extra=facts)


def health(ctx: Context) -> Seen:
    """Return the state of every part, for a person to read."""
    ready = readiness(ctx)
    if not ready.is_ready:
        return ready
    with ctx.database.transaction() as tx:
        alive = fleet.alive(tx)
        backends = fleet.backends(tx, ctx.settings.embedder)
        parts = {
            "postgres": {"state": "ok", "version": fleet.facts(tx)["version"]},
            "migrations": "up to date",
            "redis": _redis(ctx),
            "workers": alive.workers,
            "sweepers": alive.sweepers,
            "backends": [
                {
                    "backend": ctx.settings.embedder,
                    "model": each.model,
                    "state": "paused" if each.paused_since else "ok",
                    "error_class": each.error_class,
                    "paused_until": each.paused_until,
                }
                for each in backends.values()
            ],
            "targets": "mismatch" if _mismatches(tx) else "ok",
            "alerts": [asdict(each) for each in fleet.alerts(tx)],
        }
    return Seen(is_ready=True, shown={**ready.shown, **parts})


def _mismatches(tx: Tx) -> bool:
    return any(targets.faults(tx, target) for target in targets.registered(tx))


def _redis(ctx: Context) -> dict[str, Any]:
    try:
        facts = ctx.bells.facts()
    except BellsUnavailable as exc:
        return {"state": "away", "detail": exc.message}
    return {
        "state": "ok",
        "version": facts["version"],
        "policy": facts["policy"],
        "persistent": facts["persistent"],
    }


# ---- outages ------------------------------------------------------------------------------------


def incidents(ctx: Context, caller: Caller, *, cursor: str | None, limit: int) -> dict[str, Any]:
    """Return the outages of the backend, one line each; whoever is no admin, of their own items.

    Raises InvalidRequest where the cursor is none that a list gave.
    """
    before_at, before_id = _cursor(cursor)
    # What waits for a sink is not told by client, so only an admin sees it.
    settings = ctx.settings
    sinks = (settings.primary_sink, *settings.followers) if caller.is_admin else ()
    client = None if caller.is_admin else caller.client
    wanted = fleet.IncidentFilter(settings.embedder, sinks, client, before_at, before_id)
    with ctx.database.transaction() as tx:
        found = fleet.incidents(tx, wanted, limit=limit)
    last = found[-1] if len(found) == limit else None
    next_cursor = f"{last.until.isoformat() if last.until else 'open'}~{last.id}" if last else None
    return {"incidents": [_incident(each) for each in found], "next": next_cursor}


def _incident(found: fleet.Incident) -> dict[str, Any]:
    # An outage gives items back as they were; what is not final waits, so none is ever lost by it.
    shown = {**asdict(found), "items_lost": 0}
    del shown["id"]
    return shown


def _cursor(text: str | None) -> tuple[datetime | None, int | None]:
    if text is None:
        return None, None
    found = CURSOR.fullmatch(text.replace(" ", "+"))  # what a URL makes of a bare +
    try:
        if found:
            at = None if found[1] == "open" else datetime.fromisoformat(found[1])
            return at, int(found[2])
    except ValueError:  # the 31st of February
        pass
    message = "must be one that a list gave"
    raise InvalidRequest(f"cursor: {message}", faults=[Fault("wrong_form", message, "cursor")])
