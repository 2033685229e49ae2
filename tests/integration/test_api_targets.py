"""Targets through the API: listed, registered, changed, and refused by name."""

from typing import Any

import pytest

from tests.api import (  # noqa: F401 - fixtures among them
    DIMENSION,
    Answer,
    Door,
    Ground,
    make_backend,
    make_door,
    make_ground,
)
from tests.processes import StartProcess

NOTES: dict[str, Any] = {
    "target_table": "notes",
    "id_column": "id",
    "vector_column": "embedding",
    "model": "m",
}
BIG = 10**30


@pytest.fixture
def admin(ground: Ground) -> Door:
    ground.rows("DROP TABLE IF EXISTS notes")
    ground.rows("DELETE FROM holdfast.embedding_targets WHERE target_table LIKE 'notes%%'")
    ground.rows(
        """CREATE TABLE notes (id bigint PRIMARY KEY, embedding vector(8), other vector(8),
                                narrow vector(3), body text)"""
    )
    return ground.door("ops", "admin")


def register(admin: Door, **changes: object) -> Answer:
    return admin.send("/api/targets", {**NOTES, **changes})


def names(answer: Answer) -> list[tuple[str, str]]:
    return [(each["target_table"], each["embedding_version"]) for each in answer.json["targets"]]


def test_a_target_is_registered_listed_and_written_to(ground: Ground, admin: Door) -> None:
    made = register(admin, client="acme", prefix="passage: ")

    assert made.status == 200, made.body
    assert made.json == {
        **NOTES,
        "dimension": DIMENSION,
        "embedding_version": f"m-{DIMENSION}",
        "client": "acme",
        "prefix": "passage: ",
        "text_column": None,
        "is_current": True,
        "faults": [],
        "campaign": None,
    }
    assert made.json in admin.get("/api/targets").json["targets"]
    item = {"target_table": "notes", "target_id": 1, "text": "one"}
    assert ground.door("acme", "submit").post([item]).status == 202
    refused = ground.door("bob", "submit").post([item])
    assert refused.status == 422
    assert refused.json["errors"][0]["field"] == "target_table"


def test_a_campaign_that_goes_on_is_shown_with_its_target(ground: Ground, admin: Door) -> None:
    register(admin, embedding_version="v1", text_column="body")
    ground.rows(
        """INSERT INTO holdfast.campaigns (target_table, from_version, to_version, state, said)
           VALUES ('notes', 'v1', 'v2', 'closing', 'not cut over: why')"""
    )

    listed = admin.get("/api/targets").json["targets"]
    ground.rows("DELETE FROM holdfast.campaigns")

    shown = {each["target_table"]: each["campaign"] for each in listed}
    told = {name: shown["notes"][name] for name in ("from_version", "to_version", "state", "said")}
    assert told == {
        "from_version": "v1",
        "to_version": "v2",
        "state": "closing",
        "said": "not cut over: why",
    }
    assert all(told is None for table, told in shown.items() if table != "notes")


def test_a_new_version_is_the_current_one_and_needs_a_column_of_its_own(admin: Door) -> None:
    register(admin, embedding_version="v1")

    shared = register(admin, embedding_version="v2")
    assert (shared.status, shared.json["errors"][0]["field"]) == (422, "vector_column")
    assert register(admin, embedding_version="v2", vector_column="other").status == 200

    found = [
        (each["embedding_version"], each["is_current"])
        for each in admin.get("/api/targets").json["targets"]
        if each["target_table"] == "notes"
    ]
    assert found == [("v1", False), ("v2", True)]


def test_whose_a_target_is_can_be_changed_and_what_its_vectors_are_not(admin: Door) -> None:
    register(admin, embedding_version="v1", client="acme")

    assert register(admin, embedding_version="v1").json["client"] is None
    for change in ({"model": "another"}, {"prefix": "query: "}, {"vector_column": "other"}):
        refused = register(admin, embedding_version="v1", **change)
        assert refused.status == 422, change
        assert refused.json["errors"][0]["field"] == "embedding_version"


def test_what_no_longer_fits_is_shown(ground: Ground, admin: Door) -> None:
    register(admin)
    ground.rows("ALTER TABLE notes DROP COLUMN embedding")

    [notes] = [
        each
        for each in admin.get("/api/targets").json["targets"]
        if each["target_table"] == "notes"
    ]
    assert [fault["field"] for fault in notes["faults"]] == ["vector_column"]


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"target_table": "nowhere"}, "target_table"),
        ({"target_table": 'notes"; DROP TABLE notes; --'}, "target_table"),
        ({"target_table": "pg_catalog.pg_class"}, "target_table"),
        ({"target_table": ""}, "target_table"),
        ({"target_table": "n\x00"}, "target_table"),
        ({"id_column": "nothing"}, "id_column"),
        ({"id_column": "body"}, "id_column"),
        ({"vector_column": "body"}, "vector_column"),
        ({"vector_column": "narrow"}, "dimension"),
        ({"dimension": 9}, "dimension"),
        ({"dimension": 0}, "dimension"),
        ({"dimension": "8"}, "dimension"),
        ({"dimension": BIG}, "dimension"),
        ({"dimension": True}, "dimension"),
        ({"model": ""}, "model"),
        ({"model": None}, "model"),
        ({"prefix": "x" * 1001}, "prefix"),
        ({"prefix": 1}, "prefix"),
        ({"client": ""}, "client"),
        ({"embedding_version": ""}, "embedding_version"),
        ({"schema": "public"}, "schema"),
    ],
)
def test_a_target_that_cannot_be_is_refused_by_the_name_of_its_fault(
    admin: Door, changes: dict[str, object], field: str
) -> None:
    before = admin.get("/api/targets").json

    refused = register(admin, **changes)

    assert refused.status == 422, refused.body
    assert refused.json["errors"][0]["field"] == field
    assert admin.get("/api/targets").json == before


def test_what_is_missing_is_named(admin: Door) -> None:
    refused = admin.send("/api/targets", {"target_table": "notes"})

    assert refused.status == 422
    missing = {each["field"] for each in refused.json["errors"]}
    assert missing == {"id_column", "vector_column", "model"}


@pytest.mark.parametrize("scope", ["submit", "read", "requeue"])
def test_targets_are_for_whoever_is_admin(ground: Ground, admin: Door, scope: str) -> None:
    door = ground.door("acme", scope)

    assert door.get("/api/targets").status == 403
    assert door.send("/api/targets", NOTES).status == 403
    assert ("notes", f"m-{DIMENSION}") not in names(admin.get("/api/targets"))


def test_the_command_does_the_same_with_what_is_left_out_made_of_the_settings(
    ground: Ground, admin: Door, start_process: StartProcess
) -> None:
    command = ["worker", "targets", "add", "notes", "--model", "e5:small"]
    made = start_process(*command, "--prefix", "passage: ", **ground.environ)

    assert made.wait() == 0, made.said
    [notes] = [
        each
        for each in admin.get("/api/targets").json["targets"]
        if each["target_table"] == "notes"
    ]
    assert (notes["model"], notes["embedding_version"]) == ("e5:small", f"e5-small-{DIMENSION}")
    assert notes["prefix"] == "passage: "

    refused = start_process(*command, "--dimension", "9", **ground.environ)
    assert refused.wait() == 1
    assert "dimension" in refused.said
