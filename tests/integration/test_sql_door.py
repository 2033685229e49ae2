from collections.abc import Iterator

import psycopg
import pytest
from hypothesis import HealthCheck, example, given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st
from psycopg import sql

from app.core import requests
from app.core.model import Counts, NewItem, Target
from app.core.requests import BatchOptions, Rules, check_item, targets_by_name
from app.core.store import fleet, items, jobs, targets
from app.core.store.database import Database, Tx
from tests import rows
from tests.rows import DONE, FAILED, MODEL, SKIPPED, TABLE, VERSION, counts, statuses, submit, work

TEXTS = st.text(st.characters(codec="utf-8", exclude_characters="\0"), max_size=40)
SPACES = "".join(filter(str.isspace, map(chr, range(0x3001))))
MOST_BYTES = 262144


@pytest.fixture(scope="module")
def database(shared_database_url: str) -> Iterator[Database]:
    with rows.open_database(shared_database_url) as database:
        yield database


@pytest.fixture
def tx(database: Database) -> Iterator[Tx]:
    with database.session() as connection:
        rows.empty(connection)
        yield connection


def enqueue(tx: Tx, target_id: str | None, text: str | None, *, table: str | None = TABLE) -> str:
    """Use the door as a caller does; return the job's id."""
    row = tx.execute(
        "SELECT enqueue_embedding(%(table)s, %(id)s, %(text)s) AS job_id",
        {"table": table, "id": target_id, "text": text},
    ).fetchone()
    assert row
    return str(row["job_id"])


def all_jobs(tx: Tx) -> list[str]:
    return [job.id for job in jobs.page(tx, jobs.JobFilter(), limit=100)]


# ---- one transaction is one job


def test_an_item_is_committed_with_its_caller_and_can_be_worked_on(tx: Tx) -> None:
    with tx.transaction():
        tx.execute("INSERT INTO ai_insights (id, body) VALUES (42, 'a')")
        job_id = enqueue(tx, "42", "a")
        tx.execute("INSERT INTO ai_insights (id, body) VALUES (43, 'b')")
        assert enqueue(tx, "43", "b") == job_id
        assert enqueue(tx, "9", "c", table="conversations") == job_id

    job = jobs.find(tx, job_id)
    assert job
    assert (job.client, job.kind, job.state) == ("sql", "embedding", "queued")
    assert job.counts == Counts(pending=3)
    page = items.page(tx, job_id, after=-1, limit=9)
    assert [(each["position"], each["target_id"]) for each in page] == [
        (0, "42"),
        (1, "43"),
        (2, "9"),
    ]
    assert all(each["is_current"] for each in page)
    assert [each.id for each in jobs.due(tx, paused_models=[])] == [job_id]
    assert work(tx, job_id) == 3
    assert rows.finish(tx, job_id)
    assert counts(tx, job_id) == Counts(done=3)


def test_after_a_rollback_nothing_exists(tx: Tx) -> None:
    with tx.transaction(force_rollback=True):
        enqueue(tx, "42", "a")

    assert statuses(tx) == {}
    assert all_jobs(tx) == []


def test_another_transaction_is_another_job(tx: Tx) -> None:
    first, second = enqueue(tx, "1", "a"), enqueue(tx, "2", "b")

    assert first != second
    assert counts(tx, first) == counts(tx, second) == Counts(pending=1)


def test_a_savepoint_takes_back_what_came_after_it_and_nothing_else(tx: Tx) -> None:
    with tx.transaction():
        with tx.transaction(force_rollback=True):
            enqueue(tx, "1", "taken back with its job")
        job_id = enqueue(tx, "2", "b")
        with tx.transaction(force_rollback=True):
            assert enqueue(tx, "3", "taken back") == job_id
        with pytest.raises(psycopg.errors.InvalidParameterValue), tx.transaction():
            enqueue(tx, "x", "refused")
        assert enqueue(tx, "4", "d") == job_id

    assert all_jobs(tx) == [job_id]
    assert statuses(tx) == {"2": "pending", "4": "pending"}
    page = items.page(tx, job_id, after=-1, limit=9)
    assert [each["position"] for each in page] == [0, 1]
    assert counts(tx, job_id) == Counts(pending=2)


def test_one_statement_may_enqueue_many_rows(tx: Tx) -> None:
    tx.execute(
        "SELECT enqueue_embedding('ai_insights', n::text, 'text ' || n)"
        "  FROM generate_series(1, 500) AS n"
    )

    (job_id,) = all_jobs(tx)
    assert counts(tx, job_id) == Counts(pending=500)


@pytest.mark.parametrize("first", ["before", "between"])
def test_nothing_is_lost_where_the_caller_sets_its_constraints_immediate(
    tx: Tx, first: str
) -> None:
    with tx.transaction():
        if first == "between":
            enqueue(tx, "1", "a")
        tx.execute("SET CONSTRAINTS ALL IMMEDIATE")
        enqueue(tx, "2", "b")
        enqueue(tx, "3", "c")

    for job_id in all_jobs(tx):
        assert counts(tx, job_id) == rows.recounted(tx, job_id)
        assert counts(tx, job_id).pending
    assert sum(counts(tx, job_id).total for job_id in all_jobs(tx)) == len(statuses(tx))


def test_no_other_job_can_be_named_as_the_transactions_own(tx: Tx) -> None:
    submit(tx, "emb-of-alice", {"1": "a"})
    earlier = enqueue(tx, "2", "b")

    for stolen in ("emb-of-alice", earlier, "emb-unknown"):
        with tx.transaction():
            tx.execute(
                "SELECT set_config('holdfast.sql_job', %(mark)s, true)", {"mark": f"{stolen} 7"}
            )
            assert enqueue(tx, "3", f"for {stolen}") != stolen

    assert counts(tx, "emb-of-alice") == counts(tx, earlier) == Counts(pending=1)
    assert rows.stranded(tx) == []


# ---- the same as the API


def test_it_makes_the_same_rows_as_a_post(tx: Tx) -> None:
    columns = (
        *("target_table", "embedding_version", "model", "text_content", "content_hash", "status"),
        *("attempts", "max_attempts", "project", "priority", "kills", "deliveries"),
    )
    enqueue(tx, "1", "ein Text")
    submit(tx, "emb-1", {"2": "ein Text"})

    by_door, by_post = rows.row(tx, "1"), rows.row(tx, "2")

    assert {name: by_door[name] for name in columns} == {name: by_post[name] for name in columns}
    assert (by_door["model"], by_door["embedding_version"]) == (MODEL, VERSION)


def test_a_changed_text_is_queued_again_and_the_same_one_is_a_duplicate(tx: Tx) -> None:
    submit(tx, "emb-1", {"1": "old", "2": "same", "3": "same"})
    held = rows.claim(tx, "emb-1", limit=2)
    before = rows.row(tx, "3")

    with tx.transaction():
        job_id = enqueue(tx, "1", "new")
        enqueue(tx, "2", "same")
        enqueue(tx, "3", "same")

    assert rows.row(tx, "3") == before
    assert rows.settle(tx, held) == 1, "the claim of the old text has lost its lease"
    found = rows.row(tx, "1")
    assert (found["status"], found["job_id"], found["max_attempts"]) == ("pending", job_id, None)
    assert counts(tx, job_id) == counts(tx, "emb-1") == Counts(pending=2, done=1)


def test_what_was_skipped_or_cancelled_is_queued_again_and_what_failed_is_not(tx: Tx) -> None:
    for job_id, target_id, outcome in (("emb-1", "1", SKIPPED), ("emb-2", "2", FAILED)):
        submit(tx, job_id, {target_id: "a"})
        work(tx, job_id, outcome)
    submit(tx, "emb-3", {"3": "a"})
    with tx.transaction():
        jobs.cancel(tx, "emb-3")
        items.cancel(tx, "emb-3")

    with tx.transaction():
        job_id, *_ = [enqueue(tx, target_id, "a") for target_id in ("1", "2", "3")]

    assert statuses(tx) == {"1": "pending", "2": "failed", "3": "pending"}
    assert counts(tx, job_id) == Counts(pending=2, failed=1)


def test_the_last_text_of_a_transaction_counts(tx: Tx) -> None:
    with tx.transaction():
        job_id = enqueue(tx, "1", "first")
        enqueue(tx, "1", "last")

    assert rows.row(tx, "1")["text_content"] == "last"
    page = items.page(tx, job_id, after=-1, limit=9)
    assert [each["is_current"] for each in page] == [False, True]
    assert counts(tx, job_id) == Counts(pending=2)


def test_a_batch_of_duplicates_that_are_done_can_be_finished_at_once(tx: Tx) -> None:
    submit(tx, "emb-1", {"1": "a"})
    work(tx, "emb-1", DONE)

    job_id = enqueue(tx, "1", "a")

    assert set(jobs.complete(tx)) == {"emb-1", job_id}
    assert rows.finish(tx, job_id)
    assert counts(tx, job_id) == Counts(done=1)


FUZZ = hypothesis_settings(
    max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
ALPHABET = st.sampled_from(["0", "1", "9", "-", "+", " ", "a", "f", "A", "\n", "\uff11", "é"])
IDS = (
    st.integers(-(2**66), 2**66).map(str)
    | st.uuids().map(str)
    | st.text(ALPHABET, max_size=40)
    | TEXTS
)


@FUZZ
@given(text=IDS, id_type=st.sampled_from(["bigint", "integer", "smallint", "uuid", "text"]))
@example(text="0", id_type="bigint")
@example(text="-0", id_type="bigint")
@example(text="9" * 5000, id_type="bigint")
@example(text="1\n", id_type="integer")
@example(text="x" * 512, id_type="text")
@example(text="漢" * 513, id_type="text")
@example(text="00000000-0000-0000-0000-000000000000\n", id_type="uuid")
def test_both_doors_agree_on_what_an_id_is(tx: Tx, text: str, id_type: str) -> None:
    row = tx.execute(
        "SELECT holdfast.is_id(%(text)s, %(type)s) AS answer", {"text": text, "type": id_type}
    ).fetchone()

    assert row == {"answer": requests.is_id(text, id_type)}


@FUZZ
@given(text=TEXTS | st.text(st.sampled_from(SPACES), max_size=5))
@example(text=SPACES)
@example(text="\u200b")
@example(text="x" * MOST_BYTES)
@example(text="x" * (MOST_BYTES + 1))
@example(text="漢" * (MOST_BYTES // 3))
def test_both_doors_agree_on_what_a_text_is_and_on_its_hash(tx: Tx, text: str) -> None:
    by_name = targets_by_name(targets.registered(tx))
    rules = Rules(by_name, BatchOptions(), client="alice", max_text_bytes=MOST_BYTES)
    by_post = check_item(rules, 0, {"target_table": TABLE, "target_id": 7, "text": text})

    with tx.transaction(force_rollback=True):
        if isinstance(by_post, NewItem):
            enqueue(tx, "7", text)
            assert bytes(rows.row(tx, "7")["content_hash"]) == by_post.content_hash
        else:
            with pytest.raises(psycopg.errors.InvalidParameterValue), tx.transaction():
                enqueue(tx, "7", text)


# ---- refused


@pytest.mark.parametrize(
    ("table", "target_id", "text", "message"),
    [
        ("unknown", "1", "a", "target_table: 'unknown' is not a registered target"),
        (None, "1", "a", "target_table: NULL is not a registered target"),
        (TABLE, "042", "a", "target_id: '042' is not an id of type bigint"),
        (TABLE, "", "a", "target_id: '' is not an id of type bigint"),
        (TABLE, None, "a", "target_id: NULL is not an id of type bigint"),
        (TABLE, "1", None, "text_content: is empty"),
        (TABLE, "1", " \t\n", "text_content: is empty"),
        (TABLE, "1", "x" * 262145, "text_content: is longer than 262144 bytes"),
    ],
)
def test_what_cannot_be_embedded_is_refused_by_name(
    tx: Tx, table: str | None, target_id: str | None, text: str | None, message: str
) -> None:
    with pytest.raises(psycopg.errors.InvalidParameterValue) as caught:
        enqueue(tx, target_id, text, table=table)

    assert caught.value.diag.message_primary == message
    assert all_jobs(tx) == []


def test_the_text_is_never_part_of_an_error(tx: Tx) -> None:
    with pytest.raises(psycopg.errors.InvalidParameterValue) as caught:
        enqueue(tx, "x", "canary-7f3a")

    assert "canary-7f3a" not in str(caught.value)


@pytest.fixture
def bound_target(tx: Tx) -> Iterator[Target]:
    """Register a target that is bound to a client, and take it away again."""
    tx.execute("CREATE TABLE bound (id text PRIMARY KEY, embedding vector(8))")
    new = targets.NewTarget("bound", "id", "embedding", MODEL, VERSION, 8, client="bob")
    yield targets.register(tx, new)
    tx.execute("DELETE FROM holdfast.embedding_targets WHERE target_table = 'bound'")
    tx.execute("DROP TABLE bound")


def test_a_target_of_a_client_is_not_for_this_door(tx: Tx, bound_target: Target) -> None:
    with pytest.raises(psycopg.errors.InsufficientPrivilege):
        enqueue(tx, "1", "a", table=bound_target.target_table)


@pytest.fixture
def role(tx: Tx) -> Iterator[str]:
    """Make a role as a team's application has it: it may write its own table, nothing of ours."""
    tx.execute("CREATE ROLE team NOLOGIN")
    tx.execute("GRANT INSERT, SELECT ON ai_insights TO team")
    yield "team"
    tx.execute("RESET ROLE")
    tx.execute("DROP OWNED BY team")
    tx.execute("DROP ROLE team")


def test_it_is_granted_to_nobody_and_once_granted_needs_no_other_right(tx: Tx, role: str) -> None:
    tx.execute(sql.SQL("SET ROLE {}").format(sql.Identifier(role)))
    with pytest.raises(psycopg.errors.InsufficientPrivilege):
        enqueue(tx, "1", "a")

    tx.execute("RESET ROLE")
    tx.execute("GRANT EXECUTE ON FUNCTION enqueue_embedding(text, text, text) TO team")
    tx.execute(sql.SQL("SET ROLE {}").format(sql.Identifier(role)))
    with tx.transaction():
        tx.execute("INSERT INTO ai_insights (id, body) VALUES (1, 'a')")
        job_id = enqueue(tx, "1", "a")
    tx.execute("RESET ROLE")

    assert counts(tx, job_id) == Counts(pending=1)


def test_whatever_search_path_a_caller_has_it_finds_our_tables(tx: Tx) -> None:
    with tx.transaction():
        tx.execute("SET LOCAL search_path = pg_temp")
        tx.execute("CREATE TEMPORARY TABLE embedding_retry_queue (id integer) ON COMMIT DROP")
        tx.execute("SELECT public.enqueue_embedding('ai_insights', '1', 'a')")

    assert len(all_jobs(tx)) == 1
    assert rows.row(tx, "1")["status"] == "pending"


# ---- the sweeper hears it


def test_a_commit_is_heard_and_a_rollback_is_not(database: Database, tx: Tx) -> None:
    with database.dedicated() as listener:
        fleet.listen(listener)

        with tx.transaction(force_rollback=True):
            enqueue(tx, "1", "a")
        assert not fleet.wait_for_notice(listener, 0.05)

        with tx.transaction():
            enqueue(tx, "1", "a")
            enqueue(tx, "2", "b")
            assert not fleet.wait_for_notice(listener, 0.05)
        assert fleet.wait_for_notice(listener, 10)
        assert not fleet.wait_for_notice(listener, 0.05), "once a transaction"


def test_a_notice_that_came_while_the_sweeper_was_busy_is_not_lost(
    database: Database, tx: Tx
) -> None:
    with database.dedicated() as listener:
        fleet.listen(listener)
        enqueue(tx, "1", "a")
        assert fleet.try_lead(listener)
        listener.execute("SELECT 1")

        assert fleet.wait_for_notice(listener, 10)
