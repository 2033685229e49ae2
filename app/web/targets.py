"""GET and POST /api/targets: which tables vectors may be written to, for whoever is admin."""

from collections.abc import Mapping
from typing import Any, cast

from flask import Blueprint, Response, current_app

from app.core.context import Context
from app.core.model import Target
from app.core.requests import TargetRequest, parse
from app.core.store import campaigns, targets
from app.core.store.campaigns import Campaign
from app.core.store.database import Tx
from app.web import body
from app.web.auth import needs

blueprint = Blueprint("targets", __name__)

SHOWN = (
    *("target_table", "id_column", "vector_column", "dimension", "model", "embedding_version"),
    *("client", "prefix", "text_column", "is_current"),
)
CAMPAIGN = ("from_version", "to_version", "state", "submitted", "skipped", "said", "started_at")


@blueprint.get("/api/targets")
@needs("admin")
def listed() -> Response:
    """Answer every target, with what no longer fits the database, and a campaign that goes on."""
    body.only_arguments()
    ctx = cast("Context", current_app.extensions["context"])
    with ctx.database.transaction() as tx:
        going = {each.target_table: each for each in campaigns.unfinished(tx)}
        found = [_shown(tx, each, going) for each in targets.registered(tx)]
    return body.answer({"targets": found})


@blueprint.post("/api/targets")
@needs("admin")
def register() -> Response:
    """Register a target, or a new current version of one, after looking at its table."""
    ctx = cast("Context", current_app.extensions["context"])
    body.only_arguments()
    body.require_type("application/json")
    asked = parse(TargetRequest, body.parse(body.read(body.SMALL_BODY_BYTES, "small_body_bytes")))
    with ctx.database.transaction() as tx:
        target = targets.register(tx, targets.asked(asked, ctx.settings))
        going = {each.target_table: each for each in campaigns.unfinished(tx)}
        shown = _shown(tx, target, going)
    return body.answer(shown)


def _shown(tx: Tx, target: Target, going: Mapping[str, Campaign]) -> dict[str, Any]:
    faults = [{"field": each.field, "message": each.message} for each in targets.faults(tx, target)]
    campaign = going.get(target.target_table)
    told = campaign and {name: getattr(campaign, name) for name in CAMPAIGN}
    return {
        **{name: getattr(target, name) for name in SHOWN},
        "faults": faults,
        "campaign": told,
    }
