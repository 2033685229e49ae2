"""The operators' command line: python -m worker run, sweep, up, demo, drill, keys, targets."""

import argparse
import os
import sys
from collections.abc import Sequence
from importlib import import_module

from app.core import config, logs
from app.core.errors import ConfigError
from app.core.model import EMBEDDINGS
from worker import admin, drill, upkeep

CONFIG_EXIT = 78


def main(arguments: Sequence[str]) -> int:
    """Run one command; 2 for wrong arguments, 78 for wrong settings."""
    options = _parser().parse_args(arguments)
    if options.command in ("up", "demo"):
        # They make their own settings, and need packages that production has not.
        return int(import_module(f"worker.{options.command}").run(os.environ))  # noqa: TID251 - handed on whole
    if options.command == "drill":
        return drill.run(options.name)
    if options.command == "enabled":
        return _enabled()
    try:
        settings = config.load()
    except ConfigError as exc:
        print("\n".join(exc.faults), file=sys.stderr)
        return CONFIG_EXIT
    if options.command in ("run", "sweep"):
        return _serve(settings, options)
    return admin.run(settings, options)


def _enabled() -> int:
    """Say whether workers are wanted: it is asked where secrets cannot be read yet.

    Where settings are wrong the worker itself is to say so, and to end with 78.
    """
    try:
        wanted = config.load(database_url="postgresql://", redis_url="redis://").enable_queue_worker
    except ConfigError:
        return 0
    return 0 if wanted else 1


def _serve(settings: config.Settings, options: argparse.Namespace) -> int:
    logs.set_up(settings.log_level)
    if not settings.enable_queue_worker:
        print("ENABLE_QUEUE_WORKER is off: nothing to do", file=sys.stderr)
        return 0
    try:
        if options.command == "sweep":
            return int(import_module("worker.sweep").run(settings))
        queue = options.queue
        if settings.queue_project and queue == EMBEDDINGS:
            queue = f"{EMBEDDINGS}-{settings.queue_project}"
        return int(import_module("worker.horse").run(settings, queue))
    except ConfigError as exc:
        print("\n".join(exc.faults), file=sys.stderr)
        return CONFIG_EXIT


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m worker", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    run = commands.add_parser("run", help="work on the bells of one queue until SIGTERM")
    run.add_argument("queue", help=f"{EMBEDDINGS}, {EMBEDDINGS}-<project>, or trace-events")
    commands.add_parser("sweep", help="make good what was lost, until SIGTERM")
    commands.add_parser("enabled", help="exit 0 where ENABLE_QUEUE_WORKER is on, else 1")
    commands.add_parser("up", help="everything in the foreground, for development")
    commands.add_parser("demo", help="everything, and one real batch through a real model")
    rehearse = commands.add_parser("drill", help="let a fault happen, on servers of its own")
    rehearse.add_argument("name", choices=drill.DRILLS)
    admin.add_parsers(commands)
    upkeep.add_parsers(commands)
    return parser


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
