"""Operators' commands on what is stored: how much, what differs, its repair; and what is to go."""

import argparse
from collections.abc import Generator
from contextlib import contextmanager
from typing import Any

from app.core import coverage
from app.core.config import Settings
from app.core.context import Context
from app.core.errors import InvalidRequest
from app.core.ports import find
from worker.admin import print_table
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

    clean = commands.add_parser("cleanup", help="delete what is past its time, as the sweeper does")
    clean.add_argument("--dry-run", action="store_true", help="only say how much would go")
    clean.add_argument(
        "--failed-days",
        type=int,
        help="failed items too, that have waited for a person for so many days",
    )
    clean.set_defaults(act=clean_up)


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
    return 0
