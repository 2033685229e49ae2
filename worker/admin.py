"""Operators' commands on keys, targets and jobs; they need Postgres, not the API."""

import argparse
import secrets
import sys
from collections.abc import Sequence
from typing import Any

from app.core import requeue
from app.core.config import Settings
from app.core.context import Context, open_context
from app.core.errors import HoldfastError, RequestError
from app.core.keys import SCOPES, hash_of, new_key
from app.core.model import Caller, index_note, is_trace
from app.core.requests import TargetRequest, parse
from app.core.store import clients, fleet, targets

OPERATOR = Caller("operator", frozenset({"admin"}))


def add_parsers(commands: Any) -> None:  # noqa: ANN401 - argparse has no public name for it
    """Add the commands of this module to the command line."""
    keys = commands.add_parser("keys", help="API keys").add_subparsers(dest="what", required=True)
    create = keys.add_parser("create", help="make a key; it is shown once")
    create.add_argument("--client", required=True, help="whose jobs this key's are")
    create.add_argument("--scopes", default="submit,read,requeue", help=", ".join(SCOPES))
    create.add_argument("--days", type=int, help="days until it expires; never without")
    create.set_defaults(act=create_key)
    keys.add_parser("list", help="every key, without its secret").set_defaults(act=list_keys)
    revoke = keys.add_parser("revoke", help="end a key; it stops working within a minute")
    revoke.add_argument("prefix", help="the part between the first two underscores")
    revoke.set_defaults(act=revoke_key)

    _add_target_parsers(commands)
    _add_backend_parsers(commands)

    again = commands.add_parser("requeue", help="give a job's failed items another try")
    again.add_argument("job_id")
    again.add_argument("--reason")
    again.set_defaults(act=requeue_job)


def _add_target_parsers(commands: Any) -> None:  # noqa: ANN401
    group = commands.add_parser("targets", help="tables that vectors are for")
    target = group.add_subparsers(dest="what", required=True)
    add = target.add_parser("add", help="register a target, or a new version of one")
    add.add_argument("target_table")
    add.add_argument("--id-column", default="id")
    add.add_argument("--vector-column", default="embedding")
    add.add_argument("--model", help="default: EMBEDDING_MODEL")
    add.add_argument("--dimension", type=int, help="default: EMBEDDING_DIM")
    add.add_argument("--version", help="default: EMBEDDING_VERSION, or made of model and dimension")
    add.add_argument("--client", help="only this client may write to it")
    add.add_argument("--prefix", default="", help="sent before each text, such as 'passage: '")
    add.add_argument("--text-column", help="where the text of a row can be read again")
    add.set_defaults(act=add_target)
    target.add_parser("list", help="every target, and what no longer fits").set_defaults(
        act=list_targets
    )


def _add_backend_parsers(commands: Any) -> None:  # noqa: ANN401
    backends = commands.add_parser("backends", help="embedders and their models")
    backend = backends.add_subparsers(dest="what", required=True)
    accept = backend.add_parser("accept", help="a model that changed behind its name is wanted so")
    accept.add_argument("model")
    accept.set_defaults(act=accept_model)


def run(settings: Settings, arguments: argparse.Namespace) -> int:
    """Run one command; 1 with a sentence where it could not be done."""
    ctx = open_context(settings, application="holdfast admin", most_connections=2)
    try:
        status: int = arguments.act(ctx, arguments)
    except RequestError as exc:
        print(exc.message, file=sys.stderr)
        for fault in exc.faults:
            print(f"  {fault.field}: {fault.message}", file=sys.stderr)
        return 1
    except HoldfastError as exc:
        print(exc.message, file=sys.stderr)
        return 1
    finally:
        ctx.close()
    return status


def create_key(ctx: Context, arguments: argparse.Namespace) -> int:
    """Make a key and print it, once."""
    scopes = [scope.strip() for scope in arguments.scopes.split(",") if scope.strip()]
    strangers = sorted(set(scopes) - set(SCOPES))
    if strangers or not scopes:
        print(f"scopes are {', '.join(SCOPES)}; not {', '.join(strangers)}", file=sys.stderr)
        return 2
    prefix = secrets.token_hex(6)
    key = new_key(prefix)
    with ctx.database.transaction() as tx:
        clients.insert(
            tx,
            prefix=prefix,
            key_hash=hash_of(key),
            client=arguments.client,
            scopes=scopes,
            days=arguments.days,
        )
    print(key)
    return 0


def list_keys(ctx: Context, arguments: argparse.Namespace) -> int:
    """Print every key without its secret."""
    del arguments
    with ctx.database.transaction() as tx:
        rows = clients.listed(tx)
    lines = [("PREFIX", "CLIENT", "SCOPES", "CREATED", "ENDS")]
    for row in rows:
        ends = "revoked" if row["revoked_at"] else _day(row["expires_at"]) or "never"
        scopes = ",".join(row["scopes"])
        lines.append((row["prefix"], row["client"], scopes, _day(row["created_at"]), ends))
    print_table(lines)
    return 0


def revoke_key(ctx: Context, arguments: argparse.Namespace) -> int:
    """End a key."""
    with ctx.database.transaction() as tx:
        was_live = clients.revoke(tx, arguments.prefix)
    if not was_live:
        print("there is no live key with this prefix; see: keys list", file=sys.stderr)
        return 1
    print("revoked")
    return 0


def add_target(ctx: Context, arguments: argparse.Namespace) -> int:
    """Register a target after looking at its table."""
    settings = ctx.settings
    asked = {
        "target_table": arguments.target_table,
        "id_column": arguments.id_column,
        "vector_column": arguments.vector_column,
        "model": arguments.model or settings.embedding_model,
        "embedding_version": arguments.version,
        "dimension": arguments.dimension,
        "client": arguments.client,
        "prefix": arguments.prefix,
        "text_column": arguments.text_column,
    }
    new = targets.asked(parse(TargetRequest, asked), settings)
    with ctx.database.transaction() as tx:
        target = targets.register(tx, new)
        grants = targets.missing_grants(tx, target)
    print(f"{target.target_table} {target.embedding_version}: registered, current")
    print_grants(grants)
    note = index_note(target.dimension)
    if note:
        print(note)
    return 0


def list_targets(ctx: Context, arguments: argparse.Namespace) -> int:
    """Print every target and what no longer fits the database; 1 where something does not."""
    del arguments
    is_well = True
    lines = [("TARGET", "VERSION", "MODEL", "COLUMN", "DIM", "CURRENT", "STATE")]
    with ctx.database.transaction() as tx:
        for each in targets.registered(tx):
            wrong = [f"{fault.field} {fault.message}" for fault in targets.faults(tx, each)]
            wrong += [f"not granted yet: {grant}" for grant in targets.missing_grants(tx, each)]
            is_well = is_well and not wrong
            lines.append(
                (
                    each.target_table,
                    each.embedding_version,
                    each.model,
                    each.vector_column,
                    str(each.dimension),
                    "yes" if each.is_current else "no",
                    "; ".join(wrong) or "ok",
                )
            )
    print_table(lines)
    return 0 if is_well else 1


def accept_model(ctx: Context, arguments: argparse.Namespace) -> int:
    """Forget how a model answered the canary: its next answer is the one to compare with."""
    with ctx.database.transaction() as tx:
        forgotten = fleet.forget_canary(tx, arguments.model)
    if not forgotten:
        print("no canary of this model was kept; see EMBEDDER_CANARY", file=sys.stderr)
        return 1
    print(f"{arguments.model}: accepted; a pause ends with its next try")
    return 0


def requeue_job(ctx: Context, arguments: argparse.Namespace) -> int:
    """Give a job's failed items another allowance of attempts."""
    why = requeue.Why("cli", arguments.reason)
    done = requeue.requeue(ctx, OPERATOR, arguments.job_id, why)
    what = "segments" if is_trace(arguments.job_id) else "items"
    print(f"{done['job_id']}: {done['requeued']} {what} requeued")
    return 0


def _day(moment: Any) -> str:  # noqa: ANN401
    return moment.strftime("%Y-%m-%d") if moment else ""


def print_grants(statements: Sequence[str]) -> None:
    """Print what is still to be granted before a target can be used, if anything."""
    if statements:
        print("the owner of the table has yet to say:")
        print("\n".join(f"  {each};" for each in statements))


def print_table(lines: Sequence[Sequence[str]]) -> None:
    """Print rows of one length with their columns below each other."""
    widths = [max(len(line[column]) for line in lines) for column in range(len(lines[0]))]
    for line in lines:
        cells = [cell.ljust(width) for cell, width in zip(line, widths, strict=True)]
        print("  ".join(cells).rstrip())
