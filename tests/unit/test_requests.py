import hashlib
import json
from dataclasses import asdict, replace
from uuid import UUID

import pytest
from hypothesis import given
from hypothesis import strategies as st

from app.core.errors import Fault, InvalidRequest
from app.core.model import NewItem, Target
from app.core.requests import (
    BatchOptions,
    EmbeddingBatch,
    Requeue,
    Rules,
    check_item,
    is_id,
    parse,
    targets_by_name,
)

CANARY = "canary-7f3a"
HALF = "\ud835"


def target(
    table: str, *, id_type: str = "bigint", client: str | None = None, is_current: bool = True
) -> Target:
    version = "2" if is_current else "1"
    return Target(
        target_table=table,
        embedding_version=f"v{version}",
        table_schema="public",
        table_name=table,
        id_column="id",
        id_type=id_type,
        vector_column="embedding",
        dimension=8,
        model=f"m{version}",
        client=client,
        is_current=is_current,
    )


TARGETS = targets_by_name(
    [
        target("numbers"),
        target("numbers", is_current=False),
        target("words", id_type="text"),
        target("mine", client="alice"),
        target("theirs", client="bob"),
    ]
)


RULES = Rules(TARGETS, BatchOptions(), client="alice", max_text_bytes=100)


def item(**changes: object) -> dict[str, object]:
    return {"target_table": "numbers", "target_id": 7, "text": "a text", **changes}


def accepted(value: object, rules: Rules = RULES) -> NewItem:
    found = check_item(rules, 3, value)
    assert isinstance(found, NewItem), found
    return found


def refused(value: object, rules: Rules = RULES) -> list[Fault]:
    found = check_item(rules, 3, value)
    assert isinstance(found, list)
    assert found, "refused without a reason"
    return found


def without(name: str) -> dict[str, object]:
    return {key: value for key, value in item().items() if key != name}


# ---- items


def test_a_good_item_is_taken_as_it_was_sent() -> None:
    text = "👍🏽 ok\n漢 \u200b"
    found = accepted(item(text=text, custom_id="c", metadata={"a": [1, None, "b"]}))

    assert found == NewItem(
        position=3,
        target_table="numbers",
        target_id="7",
        embedding_version="v2",
        model="m2",
        text=text,
        content_hash=hashlib.sha256(text.encode()).digest(),
        custom_id="c",
        metadata={"a": [1, None, "b"]},
    )


@pytest.mark.parametrize(
    ("target_table", "target_id", "kept"),
    [
        ("numbers", 3_000_000_000, "3000000000"),
        ("numbers", -1, "-1"),
        ("numbers", "42", "42"),
        ("words", "A101750", "A101750"),
        ("words", "要約-1", "要約-1"),
        ("words", 5, "5"),
    ],
)
def test_an_id_is_kept_as_it_was_sent(target_table: str, target_id: object, kept: str) -> None:
    assert accepted(item(target_table=target_table, target_id=target_id)).target_id == kept


SHAPE_FAULTS: dict[str, tuple[object, str, str | None]] = {
    "no object": ([CANARY], "wrong_type", None),
    "nothing": (None, "wrong_type", None),
    "no table": (without("target_table"), "missing", "target_table"),
    "no id": (without("target_id"), "missing", "target_id"),
    "no text": (without("text"), "missing", "text"),
    "text null": (item(text=None), "wrong_type", "text"),
    "text a number": (item(text=5), "wrong_type", "text"),
    "table empty": (item(target_table=""), "too_short", "target_table"),
    "table long": (item(target_table=CANARY * 20), "too_long", "target_table"),
    "id empty": (item(target_id=""), "too_short", "target_id"),
    "id long": (item(target_id=CANARY * 100), "too_long", "target_id"),
    "id a truth": (item(target_id=True), "wrong_type", "target_id"),
    "id a fraction": (item(target_id=1.5), "wrong_type", "target_id"),
    "id null": (item(target_id=None), "missing", "target_id"),
    "custom_id empty": (item(custom_id=""), "too_short", "custom_id"),
    "custom_id long": (item(custom_id=CANARY * 20), "too_long", "custom_id"),
    "custom_id a number": (item(custom_id=5), "wrong_type", "custom_id"),
    "metadata a list": (item(metadata=[CANARY]), "wrong_type", "metadata"),
    "unknown field": (item(colour=CANARY), "unknown_field", "colour"),
    "unknown field, named like a type": (item(str=CANARY), "unknown_field", "str"),
    "unknown field, half a character": (item(**{HALF: CANARY}), "unknown_field", None),
}

MEANING_FAULTS: dict[str, tuple[object, str, str]] = {
    "text empty": (item(text=""), "text_empty", "text"),
    "text blank": (item(text=" \t\n\u3000\u2003"), "text_empty", "text"),
    "text with NUL": (item(text=f"{CANARY}\0"), "text_nul", "text"),
    "text with half a character": (item(text=f"{CANARY}{HALF}"), "text_surrogate", "text"),
    "text long": (item(text=CANARY + "漢" * 40), "text_too_long", "text"),
    "unknown target": (item(target_table=CANARY), "target_unknown", "target_table"),
    "another client's target": (item(target_table="theirs"), "target_unknown", "target_table"),
    "id no number": (item(target_id=CANARY), "id_invalid", "target_id"),
    "id padded": (item(target_id="042"), "id_invalid", "target_id"),
    "id beyond 64 bits": (item(target_id=2**63), "id_invalid", "target_id"),
    "id with NUL": (
        item(target_table="words", target_id=f"{CANARY}\0"),
        "id_invalid",
        "target_id",
    ),
    "id with half a character": (
        item(target_table="words", target_id=f"{CANARY}{HALF}"),
        "wrong_form",
        "target_id",
    ),
    "custom_id with NUL": (item(custom_id=f"{CANARY}\0"), "id_invalid", "custom_id"),
    "custom_id with half a character": (
        item(custom_id=f"{CANARY}{HALF}"),
        "wrong_form",
        "custom_id",
    ),
    "metadata not finite": (item(metadata={"a": [1e999]}), "metadata_invalid", "metadata"),
    "metadata with NUL": (item(metadata={"a": f"{CANARY}\0"}), "metadata_invalid", "metadata"),
    "metadata with a key of NUL": (item(metadata={"\0": CANARY}), "metadata_invalid", "metadata"),
    "metadata with half a character": (
        item(metadata={"a": {"b": HALF}}),
        "metadata_invalid",
        "metadata",
    ),
    "metadata beyond 64 bits": (item(metadata={"a": 10**30}), "metadata_invalid", "metadata"),
    "metadata large": (item(metadata={"a": CANARY * 2000}), "metadata_too_large", "metadata"),
}


@pytest.mark.parametrize(
    ("value", "code", "field"),
    [*SHAPE_FAULTS.values(), *MEANING_FAULTS.values()],
    ids=[*SHAPE_FAULTS, *MEANING_FAULTS],
)
def test_a_fault_is_named_by_its_place_and_never_quotes_what_was_sent(
    value: object, code: str, field: str | None
) -> None:
    in_json = refused(value)
    in_lines = refused(value, replace(RULES, is_stream=True))

    assert [(each.code, each.field, each.index, each.line) for each in in_json] == [
        (code, field, 3, None)
    ]
    assert [(each.code, each.field, each.index, each.line) for each in in_lines] == [
        (code, field, 3, 4)
    ]
    shown = json.dumps([asdict(each) for each in in_json])
    assert CANARY not in shown


def test_everything_wrong_with_an_item_is_named_at_once() -> None:
    value = item(text="", target_id="x", custom_id="\0", metadata={"a": 10**30})

    assert {each.field for each in refused(value)} == {
        *("text", "target_id", "custom_id", "metadata")
    }


def test_a_text_may_be_as_long_as_the_limit_and_no_byte_longer() -> None:
    fits = "漢" * 33 + "x"

    assert len(accepted(item(text=fits)).text.encode()) == 100
    assert refused(item(text=fits + "x"))[0].message == "has 101 bytes, the limit is 100"


def test_metadata_may_be_as_deep_as_the_limit_and_no_deeper() -> None:
    nested: object = "x"
    for _ in range(3000):
        nested = [nested]

    assert refused(item(metadata={"a": nested}))[0].code == "metadata_invalid"
    assert accepted(item(metadata={"a": [[[["x"]]]]})).metadata == {"a": [[[["x"]]]]}


# ---- what holds for a batch


def test_a_target_bound_to_a_client_takes_that_clients_items_only() -> None:
    assert accepted(item(target_table="mine")).target_table == "mine"
    assert (
        refused(item(target_table="mine"), replace(RULES, client="bob"))[0].code == "target_unknown"
    )


def test_the_current_version_is_taken_unless_another_is_named() -> None:
    older = replace(RULES, options=BatchOptions(embedding_version="v1"))

    assert accepted(item()).embedding_version == "v2"
    found = accepted(item(), older)
    assert (found.embedding_version, found.model) == ("v1", "m1")


def test_a_version_or_a_model_that_the_target_does_not_serve_is_refused() -> None:
    unknown = refused(item(), replace(RULES, options=BatchOptions(embedding_version="v9")))
    other = refused(item(), replace(RULES, options=BatchOptions(model="m1")))

    assert [(each.code, each.field) for each in unknown] == [
        ("version_unknown", "embedding_version")
    ]
    assert [(each.code, each.field) for each in other] == [("model_mismatch", "model")]
    assert accepted(item(), replace(RULES, options=BatchOptions(model="m2"))).model == "m2"


@pytest.mark.parametrize(
    ("body", "code", "field"),
    [
        ([], "wrong_type", None),
        ({}, "missing", "items"),
        ({"items": {}}, "wrong_type", "items"),
        ({"items": [], "colour": 1}, "unknown_field", "colour"),
        ({"items": [], "priority": 11}, "out_of_range", "priority"),
        ({"items": [], "priority": -11}, "out_of_range", "priority"),
        ({"items": [], "priority": "1"}, "wrong_type", "priority"),
        ({"items": [], "priority": True}, "wrong_type", "priority"),
        ({"items": [], "project": "a b"}, "wrong_form", "project"),
        ({"items": [], "project": "a\n"}, "wrong_form", "project"),
        ({"items": [], "project": "x" * 65}, "wrong_form", "project"),
        ({"items": [], "model": ""}, "too_short", "model"),
        ({"items": [], "embedding_version": "x" * 257}, "too_long", "embedding_version"),
        ({"items": [], "return_vectors": 1}, "wrong_type", "return_vectors"),
    ],
)
def test_a_fault_of_the_batch_itself_is_named(body: object, code: str, field: str | None) -> None:
    with pytest.raises(InvalidRequest) as caught:
        parse(EmbeddingBatch, body)

    assert [(each.code, each.field) for each in caught.value.faults] == [(code, field)]
    assert caught.value.faults[0].index is None


def test_all_faults_of_a_batch_are_named_at_once() -> None:
    with pytest.raises(InvalidRequest, match=r"and 2 more faults") as caught:
        parse(EmbeddingBatch, {"priority": 99, "colour": CANARY})

    assert len(caught.value.faults) == 3
    assert CANARY not in caught.value.message


@pytest.mark.parametrize("reason", ["\0", HALF, "x" * 501, 5])
def test_a_reason_that_could_not_be_stored_is_refused(reason: object) -> None:
    with pytest.raises(InvalidRequest) as caught:
        parse(Requeue, {"reason": reason})

    assert caught.value.faults[0].field == "reason"


def test_a_reason_is_free_text() -> None:
    assert parse(Requeue, {"reason": "le modèle\nest revenu"}).reason
    assert parse(Requeue, {}).reason is None


# ---- ids


@given(st.integers(-(2**70), 2**70))
def test_a_number_is_an_id_of_each_kind_that_can_hold_it(number: int) -> None:
    for id_type, bits in (("bigint", 63), ("integer", 31), ("smallint", 15)):
        assert is_id(str(number), id_type) == (-(2**bits) <= number < 2**bits)


@pytest.mark.parametrize(
    "text",
    ["", "-", "-0", "00", "042", "+1", " 1", "1 ", "1\n", "1.0", "1e3", "0x1", "\uff11", "1_0"],
)
def test_a_number_in_any_other_than_its_plain_form_is_no_id(text: str) -> None:
    for id_type in ("bigint", "integer", "smallint"):
        assert not is_id(text, id_type)


@given(st.uuids())
def test_a_uuid_is_an_id_in_its_plain_form_only(value: UUID) -> None:
    plain = str(value)

    assert is_id(plain, "uuid")
    for other in (plain.replace("-", ""), f"{{{plain}}}", f"urn:uuid:{plain}", f"{plain}\n"):
        assert not is_id(other, "uuid")
    if plain.upper() != plain:
        assert not is_id(plain.upper(), "uuid")


def test_any_short_text_is_an_id_of_a_text_column() -> None:
    assert is_id("x" * 512, "text")
    assert not is_id("x" * 513, "text")
    assert not is_id("", "text")
