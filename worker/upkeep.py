"""Operators' commands on what is stored: how much, what differs, its repair; and what is to go."""

import argparse
import logging
from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

from app.core import coverage, versions
from app.core.config import Settings
from app.core.context import Context
from app.core.errors import InvalidRequest
from app.core.model import index_note
from app.core.ports import find
from app.core.requests import TargetRequest, parse
from app.core.store import audit, targets
from app.core.store.campaigns import Change
from app.core.store.database import take_time
from worker.admin import print_grants, print_table
from worker.runtime import open_followers
from worker.sweep import cleanup


def add_parsers(commands: Any) -> None:  # noqa: ANN401 - argparse has no public name for it
    """Add the commands of this module to the command line."""
    for name, act, what in (
        ("coverage", show_coverage, "how much of each target each store holds, measured now"),
        (
            "verify",
            verify_stores,
            "what differs between the ledger and the stores; 1 where it does",
        ),
        ("repair", repair_stores, "make good what differs; what is kept is not embedded again"),
    ):
        parser = commands.add_parser(name, help=what)
        parser.add_argument("target_table", nargs="?", help="this target only")
        parser.add_argument("--sink", help="this store only, by its name in SINKS")
        if act is repair_stores:
            parser.add_argument("--dry-run", action="store_true", help="the same as verify")
        parser.set_defaults(act=act)

    _add_reembed_parsers(commands)
    clean = commands.add_parser("cleanup", help="delete what is past its time, as the sweeper does")
    clean.add_argument("--dry-run", action="store_true", help="only say how much would go")
    clean.add_argument(
        "--failed-days",
        type=int,
        help="failed items too, that have waited for a person for so many days",
    )
    clean.set_defaults(act=clean_up)
    commands.add_parser(
        "audit", help="what must always hold, looked at now; 1 where it does not"
    ).set_defaults(act=audit_now)


def _add_reembed_parsers(commands: Any) -> None:  # noqa: ANN401
    group = commands.add_parser("reembed", help="embed a target's rows in another version")
    what = group.add_subparsers(dest="what", required=True)
    for name, text in (
        ("plan", "what it would cost; nothing is changed"),
        ("start", "begin, beside daily work"),
    ):
        parser = what.add_parser(name, help=text)
        parser.add_argument("target_table")
        parser.add_argument("--vector-column", required=True, help="the new version's own column")
        parser.add_argument("--model", help="default: EMBEDDING_MODEL")
        parser.add_argument("--dimension", type=int, help="default: EMBEDDING_DIM")
        parser.add_argument("--version", help="default: made of model and dimension")
        parser.add_argument("--prefix", default="", help="sent before each text")
        parser.set_defaults(act=reembed, is_start=name == "start")
    status = what.add_parser("status", help="how far it is, over time")
    status.add_argument("target_table", nargs="?")
    status.set_defaults(act=show_campaigns)
    for name, change in CHANGES.items():
        parser = what.add_parser(name)
        parser.add_argument("target_table")
        if change.state == "closing":
            parser.add_argument("--leave-failed", action="store_true", help="leave those behind")
        parser.set_defaults(act=change_campaign, change=change)
    drop = what.add_parser("drop", help="forget a version that is no longer current")
    drop.add_argument("target_table")
    drop.add_argument("version")
    drop.set_defaults(act=drop_version)


def show_coverage(ctx: Context, arguments: argparse.Namespace) -> int:
    """Measure now, and print what share of each target each store holds."""
    with _opened_stores(ctx.settings) as stores:
        found = list(coverage.verify(ctx, stores, _wanted(stores, arguments)))
    lines = [("TARGET", "VERSION", "CURRENT", "SINK", "SHARE", "WHAT IS THERE")]
    for each in found:
        kinds = ", ".join(f"{number:,} {kind}" for kind, number in sorted(each.kinds.items()))
        is_current = "yes" if each.target.is_current else "no"
        share = f"{100 * coverage.share(each.kinds):.2f} %"
        names = (each.target.target_table, each.target.embedding_version, is_current, each.sink)
        lines.append((*names, share, kinds or "nothing"))
    print_table(lines)
    return 0


def verify_stores(ctx: Context, arguments: argparse.Namespace) -> int:
    """Print what differs between the ledger and each store, with some ids; 1 where any does."""
    is_well = True
    with _opened_stores(ctx.settings) as stores:
        for each in coverage.verify(ctx, stores, _wanted(stores, arguments)):
            is_well = is_well and not each.faults
            _print_survey(each)
    return 0 if is_well else 1


def repair_stores(ctx: Context, arguments: argparse.Namespace) -> int:
    """Make good what differs, and print what was done; the sweeper writes to the followers then."""
    if arguments.dry_run:
        return verify_stores(ctx, arguments)
    with _opened_stores(ctx.settings) as stores:
        for each in coverage.repair(ctx, stores, _wanted(stores, arguments)):
            _print_survey(each)
            for what, number in sorted(each.done.items()):
                if number:
                    print(f"    {number:,} {what.replace('_', ' ')}")
    return 0


def _print_survey(survey: coverage.Survey) -> None:
    place = f"{survey.target.label} in {survey.sink}"
    print(f"{place}: {survey.kinds.get('current', 0):,} current", flush=True)
    for kind, number in sorted(survey.kinds.items()):
        if kind != "current":
            sample = ", ".join(survey.samples.get(kind, ()))
            print(f"  {number:,} {kind}{f': {sample}' if sample else ''}")


@contextmanager
def _opened_stores(settings: Settings) -> Generator[coverage.Stores]:
    followers = open_followers(settings)
    try:
        primary = find("sinks", settings.primary_sink)()
        yield coverage.Stores(settings.primary_sink, primary, followers)
    finally:
        for each in followers.values():
            each.close()


def _wanted(stores: coverage.Stores, arguments: argparse.Namespace) -> coverage.Wanted:
    names = (stores.primary_name, *stores.followers)
    if arguments.sink not in (None, *names):
        raise InvalidRequest(f"SINKS has no {arguments.sink}; it has {', '.join(names)}")
    return coverage.Wanted(arguments.target_table, arguments.sink)


log = logging.getLogger(__name__)

CHANGES = {
    "pause": Change("paused", ("running",)),
    "resume": Change("running", ("paused",)),
    "cancel": Change("cancelled", ("running", "paused", "closing")),
    "cutover": Change("closing", ("running",), seconds=versions.CLOSE_SECONDS),
}
BAR_CHARACTERS = 40
CLEANED_PER_SECOND = 5000
"""Rows, beside two workers on the same two cores (`tests/bench/test_table.py`): a rough guide."""


def reembed(ctx: Context, arguments: argparse.Namespace) -> int:
    """Say what it would cost to embed a target in another version; or begin."""
    settings = ctx.settings
    with ctx.database.transaction() as tx:
        current = [
            each
            for each in targets.registered(tx)
            if each.target_table == arguments.target_table and each.is_current
        ]
    if not current:
        raise InvalidRequest(f"{arguments.target_table} is not a registered target")
    asked = {
        "target_table": arguments.target_table,
        "id_column": current[0].id_column,
        "vector_column": arguments.vector_column,
        "model": arguments.model or settings.embedding_model,
        "embedding_version": arguments.version,
        "dimension": arguments.dimension,
        "client": current[0].client,
        "prefix": arguments.prefix,
        "text_column": current[0].text_column,
    }
    new = replace(targets.asked(parse(TargetRequest, asked), settings), is_current=False)
    plan = versions.plan(ctx, find("sinks", settings.primary_sink)(), new)
    left = plan.rows - plan.has
    print(f"{plan.old.label} ({plan.old.model}) -> {plan.new.embedding_version} ({plan.new.model})")
    print(f"  {plan.rows:,} rows, {plan.has:,} have it already: {left:,} to be embedded")
    print(f"  {plan.text_bytes:,} bytes of text, about {plan.text_bytes // 4:,} tokens in all")
    hours = "unknown, nothing was embedded of late" if plan.seconds is None else _span(plan.seconds)
    print(f"  time at the rate of late: {hours}; daily work goes before it")
    note = index_note(plan.new.dimension)
    if note:
        print(f"  {note}")
    with ctx.database.transaction() as tx:
        print_grants(targets.missing_grants(tx, plan.new))
    if not arguments.is_start:
        print("  nothing was changed; the same with start begins it")
        return 0
    versions.start(ctx, new)
    print("  begun; see: python -m worker reembed status")
    return 0


def _span(seconds: float) -> str:
    return f"{seconds / 3600:.1f} hours" if seconds >= 3600 else f"{seconds / 60:.1f} minutes"  # noqa: PLR2004


def show_campaigns(ctx: Context, arguments: argparse.Namespace) -> int:
    """Print how far each campaign is, and how it got there."""
    found = versions.described(ctx, arguments.target_table)
    if not found:
        print("no target has had a campaign")
    for each in found:
        marks = versions.history(ctx, each)
        print(f"{each.target_table}: {each.from_version} -> {each.to_version}, {each.state}")
        print(f"  {each.submitted:,} submitted, {each.skipped:,} rows have no text to embed")
        for mark in marks[-20:]:
            share = mark.has / mark.wants if mark.wants else 1.0
            bar = "█" * int(BAR_CHARACTERS * share)
            print(
                f"  {mark.seconds:>9,.0f} s  {bar:<{BAR_CHARACTERS}} {100 * share:6.2f} %"
                f"  {mark.has:,} of {mark.wants:,}"
            )
        if each.said:
            print(f"  {each.said}")
    return 0


def change_campaign(ctx: Context, arguments: argparse.Namespace) -> int:
    """Pause, resume, cancel or cut over a campaign."""
    leaves_failed = bool(getattr(arguments, "leave_failed", False))
    wanted = replace(arguments.change, leaves_failed=leaves_failed)
    versions.change(ctx, arguments.target_table, wanted)
    if wanted.state == "closing":
        print("the sweeper cuts over as soon as every row has the new version; see: reembed status")
    else:
        print(f"{arguments.target_table}: {wanted.state}")
    return 0


def drop_version(ctx: Context, arguments: argparse.Namespace) -> int:
    """Forget a version of a target that is no longer current, in every store but its table."""
    with _opened_stores(ctx.settings) as stores:
        old = versions.drop(ctx, stores.followers, arguments.target_table, arguments.version)
    print(f"{old.label}: forgotten. Its column is yours to drop:")
    print(
        f'  ALTER TABLE "{old.table_schema}"."{old.table_name}" DROP COLUMN "{old.vector_column}"'
    )
    return 0


def audit_now(ctx: Context, arguments: argparse.Namespace) -> int:
    """Look at what must always hold, and print what does not; 1 where anything does not."""
    del arguments
    with ctx.database.transaction() as tx:
        take_time(tx)
        found = audit.audit(tx)
    for each in found:
        log.error("audit: %s", each.what, extra={"event": "audit_violation"})
        print(f"{each.what}:")
        for row in each.rows:
            print("  " + ", ".join(f"{name} {value}" for name, value in row.items()))
    if not found:
        print(f"{len(audit.AUDIT)} things that must always hold do")
    return 1 if found else 0


def clean_up(ctx: Context, arguments: argparse.Namespace) -> int:
    """Delete what is past its time, or say how much would go."""
    days = arguments.failed_days
    if days is not None and days < 1:
        raise InvalidRequest("--failed-days: must be 1 or more")
    if arguments.dry_run:
        found = cleanup.would_go(ctx, failed_days=days)
    else:
        found = cleanup.run_once(ctx)
        if days is not None:
            found["failed_items"] = cleanup.forget_failed(ctx, days=days)
    verb = "would go" if arguments.dry_run else "gone"
    for what, number in sorted(found.items()):
        print(f"{number:,} {what.replace('_', ' ')} {verb}")
    if not found:
        print("nothing is past its time")
    elif arguments.dry_run:
        seconds = max(1, round(found.total() / CLEANED_PER_SECOND))
        print(f"about {seconds:,} s, beside work that goes on")
    return 0
