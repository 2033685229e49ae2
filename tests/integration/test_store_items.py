import itertools
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from threading import Event
from typing import Any

import psycopg
import pytest

from app.core.errors import ErrorClass
from app.core.model import LEGAL_CHANGES, Claim, Counts, ItemStatus, Outcome, Retry
from app.core.store import items, jobs
from app.core.store.database import Database, Tx
from app.core.store.items import ClaimTerms
from tests import rows
from tests.processes import wait_for
from tests.rows import (
    DONE,
    FAILED,
    MODEL,
    RELEASED,
    RETRIED,
    SKIPPED,
    TABLE,
    VERSION,
    claim,
    counts,
    end_leases,
    finish,
    line,
    make_due,
    numbered,
    settle,
    statuses,
    submit,
    work,
)


@pytest.fixture(scope="module")
def database(shared_database_url: str) -> Iterator[Database]:
    with rows.open_database(shared_database_url) as database:
        yield database


@pytest.fixture
def tx(database: Database) -> Iterator[Tx]:
    with database.session() as connection:
        rows.empty(connection)
        yield connection


def errors_of(tx: Tx, target_id: str) -> list[tuple[int, str]]:
    """Return the failed attempts of an item: number and class."""
    item_id = rows.row(tx, target_id)["id"]
    found = items.attempts(tx, [item_id]).get(item_id, [])
    return [(each["attempt"], each["error_class"]) for each in found]


def shown(tx: Tx, job_id: str) -> list[str]:
    """Return what each line of a job shows."""
    return [each["status"] for each in items.page(tx, job_id, after=-1, limit=1000)]


def cancel(tx: Tx, job_id: str) -> tuple[int, set[str]]:
    """Cancel a job as the use case does."""
    with tx.transaction():
        jobs.lock(tx, job_id)
        assert jobs.cancel(tx, job_id)
        return items.cancel(tx, job_id)


# ---- enqueue


def test_every_line_of_a_batch_becomes_an_item_and_is_linked_in_its_order(tx: Tx) -> None:
    text = "👍🏽 \u200b漢\\N\t\n\r'"

    accepted = submit(tx, "emb-1", {"1": text, "2": "b", "3": "c"})

    assert accepted == 3
    page = items.page(tx, "emb-1", after=-1, limit=10)
    assert [(each["position"], each["target_id"]) for each in page] == [
        (0, "1"),
        (1, "2"),
        (2, "3"),
    ]
    assert all(each["is_current"] for each in page)
    found = rows.row(tx, "1")
    assert (found["text_content"], found["model"], found["status"]) == (text, MODEL, "pending")
    assert found["job_id"] == "emb-1"
    assert counts(tx, "emb-1") == Counts(pending=3)


def test_an_item_that_is_here_with_the_same_text_is_a_duplicate_whatever_its_state(tx: Tx) -> None:
    batch = numbered(4)
    submit(tx, "emb-1", batch)
    done, failed, processing = claim(tx, "emb-1", limit=3)
    settle(tx, [done])
    settle(tx, [failed], FAILED)
    before = [rows.row(tx, target_id) for target_id in batch]

    accepted = submit(tx, "emb-2", batch)

    assert accepted == 0
    assert [rows.row(tx, target_id) for target_id in batch] == before
    assert settle(tx, [processing]) == 1
    assert counts(tx, "emb-2") == counts(tx, "emb-1") == Counts(pending=1, done=2, failed=1)


@pytest.mark.parametrize("outcome", [None, DONE, FAILED, RETRIED, RELEASED, SKIPPED])
def test_a_changed_text_is_queued_again_with_a_fresh_allowance(
    tx: Tx, outcome: Outcome | None
) -> None:
    submit(tx, "emb-1", {"1": "old"})
    if outcome:
        work(tx, "emb-1", outcome)

    accepted = submit(tx, "emb-2", {"1": "new"})

    assert accepted == 1
    found = rows.row(tx, "1")
    assert (found["status"], found["text_content"], found["job_id"]) == ("pending", "new", "emb-2")
    spent = found["attempts"]
    (claimed,) = claim(tx, "emb-2", allowance=5)
    assert (claimed.text, claimed.max_attempts) == ("new", spent + 5)
    assert claim(tx, "emb-1") == []


def test_a_changed_text_takes_the_lease_of_the_old_one_away(tx: Tx) -> None:
    submit(tx, "emb-1", {"1": "old"})
    old = claim(tx, "emb-1")

    submit(tx, "emb-2", {"1": "new"})

    assert not items.hold(tx, old).ours
    assert settle(tx, old) == 0
    assert statuses(tx) == {"1": "pending"}
    assert counts(tx, "emb-1") == counts(tx, "emb-2") == Counts(pending=1)


def test_what_was_cancelled_or_skipped_is_queued_again_with_the_same_text(tx: Tx) -> None:
    submit(tx, "emb-1", {"1": "a"})
    work(tx, "emb-1", SKIPPED)
    submit(tx, "emb-2", {"2": "b"})
    cancel(tx, "emb-2")

    accepted = submit(tx, "emb-3", {"1": "a", "2": "b"})

    assert accepted == 2
    assert counts(tx, "emb-3") == Counts(pending=2)
    assert rows.row(tx, "1")["skip_reason"] is None


def test_of_two_texts_for_one_key_the_last_one_counts(tx: Tx) -> None:
    batch = [line(0, "1", "first"), line(1, "2", "b"), line(2, "1", "last"), line(3, "2", "b")]

    accepted = submit(tx, "emb-1", batch)

    assert accepted == 2
    assert rows.row(tx, "1")["text_content"] == "last"
    page = items.page(tx, "emb-1", after=-1, limit=10)
    assert [each["is_current"] for each in page] == [False, True, True, True]
    assert counts(tx, "emb-1") == Counts(pending=4)
    assert work(tx, "emb-1") == 2
    assert counts(tx, "emb-1") == Counts(done=4)


def test_a_custom_id_that_stands_twice_is_found_and_can_be_taken_out(tx: Tx) -> None:
    items.begin_batch(tx)
    ids = ["a", "b", None, "a", None, "b", "a"]
    batch = [
        rows.line(position, str(position), "x", custom_id=custom_id)
        for position, custom_id in enumerate(ids)
    ]
    items.copy_in(tx, batch[:3])
    items.copy_in(tx, batch[3:])

    assert items.repeated_custom_ids(tx, limit=10) == [3, 5, 6]
    assert items.repeated_custom_ids(tx, limit=2) == [3, 5]

    items.drop_incoming(tx, [3, 5, 6])
    assert items.repeated_custom_ids(tx, limit=10) == []


def test_a_batch_begins_empty_on_a_connection_that_was_used_before(tx: Tx) -> None:
    items.begin_batch(tx)
    items.copy_in(tx, [line(0, "9", "left over")])

    assert submit(tx, "emb-1", {"1": "a"}) == 1
    assert statuses(tx) == {"1": "pending"}


# ---- claim


def test_a_claim_skips_what_is_leased_and_what_another_is_just_claiming(
    database: Database, tx: Tx
) -> None:
    submit(tx, "emb-1", numbered(6))
    first = claim(tx, "emb-1", limit=2)

    with database.transaction() as other:
        second = claim(other, "emb-1", limit=2)
        third = claim(tx, "emb-1", limit=10)

    taken = [each.item_id for each in first + second + third]
    assert len(taken) == len(set(taken)) == 6
    assert claim(tx, "emb-1") == []


def test_the_attempt_is_spent_at_the_claim(tx: Tx) -> None:
    submit(tx, "emb-1", {"1": "a"})

    (claimed,) = claim(tx, "emb-1", leased_by="bell-7", lease_seconds=60)

    found = rows.row(tx, "1")
    assert (found["status"], found["attempts"], found["deliveries"]) == ("processing", 1, 1)
    assert (claimed.attempts, claimed.max_attempts, found["leased_by"]) == (1, 5, "bell-7")
    left = tx.execute(
        "SELECT lease_until - now() BETWEEN interval '55 s' AND interval '60 s' AS about_a_minute"
        "  FROM public.embedding_retry_queue"
    ).fetchone()
    assert left
    assert left["about_a_minute"]


def test_each_claim_takes_a_higher_token(tx: Tx) -> None:
    submit(tx, "emb-1", {"1": "a", "2": "b"})

    tokens = []
    for _ in range(4):
        claims = claim(tx, "emb-1")
        assert len({each.lease_token for each in claims}) == 1
        tokens.append(claims[0].lease_token)
        settle(tx, claims, RETRIED)

    assert tokens == sorted(set(tokens))


def test_an_item_is_claimed_when_it_is_due_the_longest_waiting_first(tx: Tx) -> None:
    submit(tx, "emb-1", numbered(4))
    for target_id, minutes in (("1", -1), ("2", -3), ("3", -2), ("4", 1)):
        tx.execute(
            "UPDATE public.embedding_retry_queue"
            "   SET next_attempt_at = now() + make_interval(mins => %(minutes)s)"
            " WHERE target_id = %(id)s",
            {"minutes": minutes, "id": target_id},
        )

    order = [claim(tx, "emb-1", limit=1) for _ in range(4)]

    assert [each[0].target_id if each else None for each in order] == ["2", "3", "1", None]


def test_items_of_a_paused_target_are_left(tx: Tx) -> None:
    submit(tx, "emb-1", {"1": "a"})
    terms = ClaimTerms("emb-1", "bell", 45, 5)
    label = f"{TABLE} {VERSION}"

    assert not items.claim(tx, terms, limit=10, paused_models=[], paused_targets=[label])
    assert jobs.due(tx, paused_models=[], paused_targets=[label]) == []
    assert [job.id for job in jobs.due(tx, paused_models=[], paused_targets=["other"])] == ["emb-1"]
    assert items.claim(tx, terms, limit=10, paused_models=[], paused_targets=["other"])


def test_items_of_a_paused_model_are_left(tx: Tx) -> None:
    submit(tx, "emb-1", {"1": "a"})
    terms = ClaimTerms("emb-1", "bell-1", 60, 5)

    assert items.claim(tx, terms, limit=10, paused_models=["other", MODEL]) == []
    assert len(items.claim(tx, terms, limit=10, paused_models=["other"])) == 1


def test_an_item_whose_last_lease_ended_by_a_crash_is_claimed_alone_and_last(tx: Tx) -> None:
    submit(tx, "emb-1", numbered(4))
    claim(tx, "emb-1", limit=2)
    end_leases(tx)
    items.recover_expired(tx)

    order = [[each.target_id for each in claim(tx, "emb-1")] for _ in range(4)]

    assert order == [["3", "4"], ["1"], ["2"], []]


def test_an_item_that_has_been_done_since_its_crash_is_claimed_with_others_again(tx: Tx) -> None:
    submit(tx, "emb-1", numbered(2))
    claim(tx, "emb-1")
    end_leases(tx)
    items.recover_expired(tx)
    settle(tx, claim(tx, "emb-1") + claim(tx, "emb-1"))

    submit(tx, "emb-2", numbered(2, "another text"))

    assert len(claim(tx, "emb-2")) == 2


def test_a_claim_lets_every_job_run_that_waits_for_the_item(tx: Tx) -> None:
    submit(tx, "emb-1", {"1": "a", "2": "b"})
    submit(tx, "emb-2", {"1": "a"})
    submit(tx, "emb-3", {"3": "c"})

    claim(tx, "emb-1", limit=1)

    found = {name: jobs.find(tx, name) for name in ("emb-1", "emb-2", "emb-3")}
    assert {name: job.state for name, job in found.items() if job} == {
        "emb-1": "running",
        "emb-2": "running",
        "emb-3": "queued",
    }
    assert [job.started_at is not None for job in found.values() if job] == [True, True, False]


# ---- leases


def test_a_lease_is_extended_only_while_it_is_held(tx: Tx) -> None:
    submit(tx, "emb-1", numbered(3))
    claims = claim(tx, "emb-1", lease_seconds=60)
    ids, token = [each.item_id for each in claims], claims[0].lease_token
    settle(tx, claims[:1])

    assert items.extend(tx, ids, token, lease_seconds=600) == 2
    assert items.extend(tx, ids, token - 1, lease_seconds=600) == 0

    end_leases(tx)
    assert items.extend(tx, ids, token, lease_seconds=600) == 2, "late, but nobody took them yet"
    end_leases(tx)
    items.recover_expired(tx)
    assert items.extend(tx, ids, token, lease_seconds=600) == 0


def test_what_is_held_cannot_be_taken_until_the_transaction_ends(
    database: Database, tx: Tx
) -> None:
    submit(tx, "emb-1", numbered(2))
    claims = claim(tx, "emb-1")
    end_leases(tx)

    with database.transaction() as worker:
        assert items.hold(worker, claims).ours == {each.item_id for each in claims}
        assert items.recover_expired(tx) == {}
        assert settle(worker, claims) == 2

    assert statuses(tx) == {"1": "done", "2": "done"}
    assert not items.hold(tx, []).ours


def test_a_hold_waits_for_no_row_that_somebody_else_has_locked(database: Database, tx: Tx) -> None:
    submit(tx, "emb-1", numbered(3))
    first, second, third = claims = claim(tx, "emb-1")
    settle(tx, [first])

    with database.transaction() as other:
        submit(other, "emb-2", {"2": "changed"})
        held = items.hold(tx, claims)

    assert held.ours == {third.item_id}
    assert held.busy == {second.item_id}
    later = items.hold(tx, claims)
    assert later.ours == {third.item_id}
    assert not later.busy


@pytest.mark.parametrize("outcome", [DONE, FAILED, RETRIED, RELEASED, SKIPPED])
def test_a_settle_with_a_lost_lease_changes_nothing(tx: Tx, outcome: Outcome) -> None:
    submit(tx, "emb-1", {"1": "a"})
    lost = claim(tx, "emb-1")
    end_leases(tx)
    items.recover_expired(tx)
    waiting = rows.row(tx, "1")

    assert settle(tx, lost, outcome) == 0
    assert rows.row(tx, "1") == waiting

    held = claim(tx, "emb-1", leased_by="bell-2")
    claimed = rows.row(tx, "1")
    assert settle(tx, lost, outcome) == 0
    assert rows.row(tx, "1") == claimed
    assert errors_of(tx, "1") == [(1, "lease_expired")]
    assert settle(tx, held, outcome) == 1


def test_each_outcome_is_written_as_what_it_is(tx: Tx) -> None:
    submit(tx, "emb-1", numbered(5))
    each_once: list[Outcome] = [DONE, SKIPPED, FAILED, RETRIED, RELEASED]
    for claimed, outcome in zip(claim(tx, "emb-1"), each_once, strict=True):
        assert settle(tx, [claimed], outcome) == 1

    facts = ("status", "attempts", "error_class", "skip_reason", "last_error")
    found = [tuple(rows.row(tx, str(number))[fact] for fact in facts) for number in range(1, 6)]
    assert found == [
        ("done", 1, None, None, None),
        ("done", 1, None, "content_not_found", None),
        ("failed", 1, "bad_input", None, "400: too long"),
        ("pending", 1, "unclear", None, "500: it broke"),
        ("pending", 0, "busy", None, "come back later"),
    ]
    assert [errors_of(tx, str(number)) for number in range(1, 6)] == [
        [],
        [],
        [(1, "bad_input")],
        [(1, "unclear")],
        [],
    ]
    assert counts(tx, "emb-1") == Counts(pending=2, done=1, skipped=1, failed=1)


def test_a_release_gives_the_attempt_back_however_often(tx: Tx) -> None:
    submit(tx, "emb-1", {"1": "a"})

    for _ in range(20):
        assert work(tx, "emb-1", RELEASED) == 1
    (claimed,) = claim(tx, "emb-1")

    assert (claimed.attempts, claimed.max_attempts) == (1, 5)
    assert rows.row(tx, "1")["deliveries"] == 21


def test_a_retry_waits_for_its_time(tx: Tx) -> None:
    submit(tx, "emb-1", {"1": "a"})

    work(tx, "emb-1", Retry(rows.UNCLEAR, 60.0))

    assert claim(tx, "emb-1") == []
    is_due, next_at = items.next_due(tx, "emb-1")
    assert not is_due
    assert next_at == rows.row(tx, "1")["next_attempt_at"]
    make_due(tx)
    assert items.next_due(tx, "emb-1")[0]
    assert len(claim(tx, "emb-1")) == 1


# ---- recover


def test_a_lease_that_ran_out_is_recovered_and_its_attempt_stays_spent(tx: Tx) -> None:
    submit(tx, "emb-1", numbered(3))
    claim(tx, "emb-1", limit=2, leased_by="bell-1")
    end_leases(tx)
    claim(tx, "emb-1", limit=1, leased_by="bell-2")

    assert items.recover_expired(tx) == {"bell-1": 2}
    assert items.recover_expired(tx) == {}

    found = rows.row(tx, "1")
    assert (found["status"], found["attempts"], found["kills"]) == ("pending", 1, 1)
    assert found["error_class"] == "lease_expired"
    assert statuses(tx)["3"] == "processing"
    assert errors_of(tx, "1") == [(1, "lease_expired")]


def test_an_item_that_never_comes_back_fails_at_its_last_attempt(tx: Tx) -> None:
    submit(tx, "emb-1", {"1": "a"})

    for _ in range(3):
        assert len(claim(tx, "emb-1", allowance=3)) == 1
        end_leases(tx)
        assert items.recover_expired(tx) == {"bell-1": 1}

    found = rows.row(tx, "1")
    assert (found["status"], found["attempts"], found["kills"]) == ("failed", 3, 3)
    assert [attempt for attempt, _ in errors_of(tx, "1")] == [1, 2, 3]
    assert counts(tx, "emb-1") == Counts(failed=1)


def test_a_death_that_is_known_ends_that_bells_leases_at_once_and_no_others(tx: Tx) -> None:
    submit(tx, "emb-1", numbered(3))
    claim(tx, "emb-1", limit=1, leased_by="bell-2")
    end_leases(tx)
    claim(tx, "emb-1", limit=1, leased_by="bell-1")
    claim(tx, "emb-1", limit=1, leased_by="bell-3")

    recovered = items.recover_dead(
        tx, leased_by="bell-1", error_class=ErrorClass.OOM_KILLED, message="out of memory"
    )

    assert recovered == 1
    assert errors_of(tx, "2") == [(1, "oom_killed")]
    assert statuses(tx) == {"1": "processing", "2": "pending", "3": "processing"}
    assert items.recover_expired(tx) == {"bell-2": 1}
    assert errors_of(tx, "1") == [(1, "lease_expired")]


def test_a_death_names_the_items_that_were_in_hand_by_their_places_in_the_job(tx: Tx) -> None:
    submit(tx, "emb-1", numbered(9))
    for count, said in ((4, "4 items, index 0 to 3"), (1, "1 item, index 4")):
        claim(tx, "emb-1", limit=count, leased_by="bell-1")

        items.recover_dead(
            tx, leased_by="bell-1", error_class=ErrorClass.OOM_KILLED, message="out of memory"
        )

        [last] = tx.execute(
            "SELECT message FROM holdfast.item_attempts ORDER BY at DESC LIMIT 1"
        ).fetchall()
        assert last["message"] == f"out of memory; in hand: {said}"


def test_an_item_that_kills_each_of_its_workers_is_failed_at_its_limit_by_that_name(
    tx: Tx,
) -> None:
    submit(tx, "emb-1", numbered(3))
    sizes: list[int] = []

    while claims := claim(tx, "emb-1", allowance=3):
        sizes.append(len(claims))
        if any(each.target_id == "2" for each in claims):
            items.recover_dead(
                tx, leased_by="bell-1", error_class=ErrorClass.OOM_KILLED, message="out of memory"
            )
        else:
            settle(tx, claims)

    assert sizes == [3, 1, 1, 1, 1]
    assert statuses(tx) == {"1": "done", "2": "failed", "3": "done"}
    assert errors_of(tx, "2") == [(number, "oom_killed") for number in (1, 2, 3)]
    assert rows.row(tx, "2")["last_error"] == "out of memory; in hand: 1 item, index 1"


def test_many_leases_are_recovered_block_by_block(tx: Tx, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(items, "RECOVER_BLOCK", 4)
    submit(tx, "emb-1", numbered(10))
    claim(tx, "emb-1")
    end_leases(tx)

    blocks = [sum(items.recover_expired(tx).values()) for _ in range(4)]

    assert blocks == [4, 4, 2, 0]


# ---- revive


def test_a_failed_item_is_revived_with_another_allowance_and_its_history_stays(tx: Tx) -> None:
    submit(tx, "emb-1", numbered(2))
    settle(tx, claim(tx, "emb-1", limit=1), FAILED)
    work(tx, "emb-1")

    assert items.revive(tx, "emb-1") == 1
    assert items.revive(tx, "emb-1") == 0

    found = rows.row(tx, "1")
    assert (found["status"], found["attempts"], found["max_attempts"]) == ("pending", 1, None)
    (claimed,) = claim(tx, "emb-1", allowance=5)
    assert (claimed.attempts, claimed.max_attempts) == (2, 6)
    assert errors_of(tx, "1") == [(1, "bad_input")]


def test_a_revived_item_is_the_job_s_that_asked_for_it(tx: Tx) -> None:
    submit(tx, "emb-1", {"1": "a"})
    work(tx, "emb-1", FAILED)
    submit(tx, "emb-2", {"1": "a"})
    finish(tx, "emb-1")

    assert items.revive(tx, "emb-2") == 1

    assert claim(tx, "emb-1") == []
    assert len(claim(tx, "emb-2")) == 1


def test_nothing_is_revived_for_a_job_that_is_being_cancelled(tx: Tx) -> None:
    submit(tx, "emb-1", numbered(2))
    settle(tx, claim(tx, "emb-1", limit=1), FAILED)
    in_flight = claim(tx, "emb-1")
    cancel(tx, "emb-1")
    assert not finish(tx, "emb-1")

    assert items.revive(tx, "emb-1") == 0

    settle(tx, in_flight, RETRIED)
    assert finish(tx, "emb-1")
    assert statuses(tx) == {"1": "failed", "2": "cancelled"}


# ---- cancel


def test_a_cancel_stops_what_has_not_begun_and_keeps_what_is_done(tx: Tx) -> None:
    submit(tx, "emb-1", numbered(4))
    settle(tx, claim(tx, "emb-1", limit=1))
    settle(tx, claim(tx, "emb-1", limit=1), FAILED)
    claim(tx, "emb-1", limit=1)

    assert cancel(tx, "emb-1") == (1, set())

    assert statuses(tx) == {"1": "done", "2": "failed", "3": "processing", "4": "cancelled"}


@pytest.mark.parametrize(
    ("outcome", "status"),
    [(DONE, "done"), (FAILED, "failed"), (RETRIED, "cancelled"), (RELEASED, "cancelled")],
)
def test_what_is_under_way_at_a_cancel_ends_by_itself_and_is_not_tried_again(
    tx: Tx, outcome: Outcome, status: str
) -> None:
    submit(tx, "emb-1", {"1": "a"})
    in_flight = claim(tx, "emb-1")
    cancel(tx, "emb-1")
    assert not finish(tx, "emb-1")

    assert settle(tx, in_flight, outcome) == 1

    assert statuses(tx) == {"1": status}
    assert finish(tx, "emb-1")


def test_what_dies_after_a_cancel_is_cancelled(tx: Tx) -> None:
    submit(tx, "emb-1", {"1": "a"})
    claim(tx, "emb-1")
    cancel(tx, "emb-1")
    end_leases(tx)

    items.recover_expired(tx)

    assert statuses(tx) == {"1": "cancelled"}
    assert errors_of(tx, "1") == [(1, "lease_expired")]


def test_an_item_that_another_open_job_waits_for_goes_on_as_that_jobs(tx: Tx) -> None:
    submit(tx, "emb-1", numbered(3))
    submit(tx, "emb-2", {"1": "text 1", "2": "text 2"})
    (running,) = claim(tx, "emb-1", limit=1)

    assert cancel(tx, "emb-1") == (1, {"emb-2"})

    assert statuses(tx) == {"1": "processing", "2": "pending", "3": "cancelled"}
    assert finish(tx, "emb-1")
    assert counts(tx, "emb-1") == Counts(cancelled=3)
    assert settle(tx, [running], RETRIED) == 1
    assert work(tx, "emb-2") == 2
    assert finish(tx, "emb-2")
    assert counts(tx, "emb-2") == Counts(done=2)
    assert counts(tx, "emb-1") == Counts(cancelled=3)


@pytest.mark.parametrize("ending", ["retry", "crash"])
def test_an_item_under_way_at_a_cancel_goes_on_for_a_job_that_came_after_it(
    tx: Tx, ending: str
) -> None:
    submit(tx, "emb-1", {"1": "a"})
    in_flight = claim(tx, "emb-1")
    cancel(tx, "emb-1")
    submit(tx, "emb-2", {"1": "a"})

    if ending == "retry":
        settle(tx, in_flight, RETRIED)
    else:
        end_leases(tx)
        items.recover_expired(tx)

    assert statuses(tx) == {"1": "pending"}
    assert finish(tx, "emb-1")
    assert rows.stranded(tx) == []
    assert work(tx, "emb-2") == 1
    assert counts(tx, "emb-2") == Counts(done=1)


def test_an_item_of_two_cancelled_jobs_is_cancelled(tx: Tx) -> None:
    submit(tx, "emb-1", numbered(2))
    submit(tx, "emb-2", numbered(2))

    assert cancel(tx, "emb-1") == (0, {"emb-2"})
    assert finish(tx, "emb-1")
    assert cancel(tx, "emb-2") == (2, set())

    assert finish(tx, "emb-2")
    assert set(statuses(tx).values()) == {"cancelled"}


def test_a_retry_that_is_just_being_written_is_cancelled_too(database: Database, tx: Tx) -> None:
    submit(tx, "emb-1", numbered(2))
    in_flight = claim(tx, "emb-1")

    with ThreadPoolExecutor(1) as pool, database.session() as other:
        with database.transaction() as worker:
            items.hold(worker, in_flight)
            settle(worker, in_flight, RETRIED)
            cancelling = pool.submit(cancel, other, "emb-1")
            wait_for(lambda: rows.waiting(tx))
        assert cancelling.result(10) == (2, set())

    assert finish(tx, "emb-1")
    assert rows.stranded(tx) == []
    assert set(statuses(tx).values()) == {"cancelled"}


def test_two_jobs_cancelled_at_the_same_time_leave_nothing_behind(
    database: Database, tx: Tx
) -> None:
    submit(tx, "emb-1", numbered(2))
    submit(tx, "emb-2", numbered(2))

    with ThreadPoolExecutor(1) as pool, database.session() as other:
        with database.transaction() as first:
            cancel(first, "emb-1")
            second = pool.submit(cancel, other, "emb-2")
            wait_for(lambda: rows.waiting(tx))
        second.result(10)

    assert finish(tx, "emb-1")
    assert finish(tx, "emb-2")
    assert rows.stranded(tx) == []
    assert set(statuses(tx).values()) == {"cancelled"}


# ---- what a job shows


def test_pages_go_by_position_and_by_status_in_the_words_of_the_api(tx: Tx) -> None:
    submit(tx, "emb-1", numbered(6))
    settle(tx, claim(tx, "emb-1", limit=2))
    settle(tx, claim(tx, "emb-1", limit=1), SKIPPED)
    settle(tx, claim(tx, "emb-1", limit=1), FAILED)

    pages = [items.page(tx, "emb-1", after=after, limit=2) for after in (-1, 1, 3, 5)]
    assert [[each["position"] for each in page] for page in pages] == [[0, 1], [2, 3], [4, 5], []]
    wanted = ("done", "skipped", "failed", "pending", "cancelled")
    by_status = {
        status: [
            each["position"] for each in items.page(tx, "emb-1", after=-1, limit=9, status=status)
        ]
        for status in wanted
    }
    assert by_status == {
        "done": [0, 1],
        "skipped": [2],
        "failed": [3],
        "pending": [4, 5],
        "cancelled": [],
    }


def test_an_offset_finds_its_line_although_positions_have_holes(tx: Tx) -> None:
    submit(tx, "emb-1", [line(position, str(position), "x") for position in (0, 3, 4, 9)])

    before = [items.position_before(tx, "emb-1", offset) for offset in (0, 1, 2, 3, 4, 99)]

    assert before == [-1, 0, 3, 4, 9, 9]


def test_a_job_names_the_models_and_targets_that_it_waits_for(tx: Tx) -> None:
    submit(tx, "emb-1", {"1": "a", "2": "b"})
    assert items.needs(tx, "emb-1") == ({MODEL}, {f"{TABLE} {VERSION}"})

    work(tx, "emb-1")

    assert items.needs(tx, "emb-1") == (set(), set())
    assert items.next_due(tx, "emb-1") == (False, None)


def test_the_model_of_an_item_that_has_crashed_before_is_named_too(tx: Tx) -> None:
    submit(tx, "emb-1", {"1": "a"})
    claim(tx, "emb-1")
    end_leases(tx)
    items.recover_expired(tx)

    assert items.needs(tx, "emb-1") == ({MODEL}, {f"{TABLE} {VERSION}"})
    assert items.next_due(tx, "emb-1")[0]


def test_the_other_jobs_of_some_items_are_known(tx: Tx) -> None:
    submit(tx, "emb-1", numbered(3))
    submit(tx, "emb-2", {"1": "text 1"})
    submit(tx, "emb-3", {"3": "text 3"})
    ids = [rows.row(tx, target_id)["id"] for target_id in ("1", "2")]

    assert items.other_jobs(tx, ids, job_id="emb-1") == {"emb-2"}
    assert items.other_jobs(tx, [], job_id="emb-1") == set()


@pytest.mark.parametrize(
    ("outcome", "frozen"), [(DONE, "done"), (SKIPPED, "skipped"), (FAILED, "failed")]
)
def test_a_final_job_keeps_what_its_items_were_when_they_are_queued_again(
    tx: Tx, outcome: Outcome, frozen: str
) -> None:
    submit(tx, "emb-1", {"1": "a"})
    work(tx, "emb-1", outcome)
    finish(tx, "emb-1")
    before = counts(tx, "emb-1")

    submit(tx, "emb-2", {"1": "changed"})
    work(tx, "emb-2", RETRIED)
    make_due(tx)
    work(tx, "emb-2")

    assert shown(tx, "emb-1") == [frozen]
    assert shown(tx, "emb-2") == ["done"]
    assert counts(tx, "emb-1") == before


def test_an_open_job_shows_its_items_as_they_are(tx: Tx) -> None:
    submit(tx, "emb-1", numbered(2))
    settle(tx, claim(tx, "emb-1", limit=1))

    submit(tx, "emb-2", {"1": "changed"})

    assert shown(tx, "emb-1") == ["pending", "pending"]
    assert counts(tx, "emb-1") == Counts(pending=2)


# ---- prune


def test_an_old_finished_item_goes_with_its_links_and_its_history(tx: Tx) -> None:
    submit(tx, "emb-1", numbered(3))
    work(tx, "emb-1", RETRIED)
    work(tx, "emb-1")
    finish(tx, "emb-1")

    assert items.prune(tx, days=7, limit=100) == 0
    rows.age(tx, days=8)
    assert items.prune(tx, days=7, limit=2) == 2
    assert items.prune(tx, days=7, limit=2) == 1
    assert items.prune(tx, days=7, limit=2) == 0

    assert items.page(tx, "emb-1", after=-1, limit=9) == []
    left = tx.execute("SELECT count(*) AS rows FROM holdfast.item_attempts").fetchone()
    assert left == {"rows": 0}
    assert counts(tx, "emb-1") == Counts(done=3), "the job's summary stays"
    assert submit(tx, "emb-2", numbered(1)) == 1, "the same text is embedded anew"


def test_an_item_stays_as_long_as_a_job_that_can_still_show_it(tx: Tx) -> None:
    submit(tx, "emb-1", numbered(3))
    work(tx, "emb-1")
    finish(tx, "emb-1")
    rows.age(tx, days=8)
    submit(tx, "emb-2", {"1": "text 1"})
    finish(tx, "emb-2")
    submit(tx, "emb-3", {"2": "text 2", "9": "open"})

    assert items.prune(tx, days=7, limit=100) == 1

    assert set(statuses(tx)) == {"1", "2", "9"}
    assert [each["status"] for each in items.page(tx, "emb-2", after=-1, limit=9)] == ["done"]


def test_an_item_stays_as_long_as_a_job_that_would_show_it_after_a_requeue(tx: Tx) -> None:
    submit(tx, "emb-1", numbered(2))
    settle(tx, claim(tx, "emb-1", limit=1), FAILED)
    work(tx, "emb-1")
    finish(tx, "emb-1")
    rows.age(tx, days=8)

    assert items.prune(tx, days=7, limit=100) == 0

    jobs.reopen(tx, "emb-1")
    assert items.revive(tx, "emb-1") == 1
    assert counts(tx, "emb-1") == Counts(pending=1, done=1)
    assert len(items.page(tx, "emb-1", after=-1, limit=9)) == 2


def test_what_failed_or_is_open_is_never_pruned_and_what_was_cancelled_is(tx: Tx) -> None:
    submit(tx, "emb-1", numbered(2))
    settle(tx, claim(tx, "emb-1", limit=1), FAILED)
    submit(tx, "emb-2", {"3": "c"})
    cancel(tx, "emb-2")
    finish(tx, "emb-2")
    rows.age(tx, days=400)

    assert items.prune(tx, days=7, limit=100) == 1

    assert statuses(tx) == {"1": "failed", "2": "pending"}


def test_nothing_is_pruned_that_a_batch_is_just_being_linked_to(database: Database, tx: Tx) -> None:
    submitted = Event()

    def submit_again() -> None:
        with database.session() as connection:
            for number in range(40):
                job_id = f"emb-{number}"
                submit(connection, job_id, numbered(10))
                work(connection, job_id)
                finish(connection, job_id)
                rows.age(connection, days=8)
        submitted.set()

    def prune() -> int:
        pruned = 0
        with database.session() as connection:
            while not submitted.is_set():
                pruned += items.prune(connection, days=7, limit=5)
        return pruned

    with ThreadPoolExecutor(2) as pool:
        pruning = pool.submit(prune)
        pool.submit(submit_again).result(60)
        assert pruning.result(10) > 10

    dangling = tx.execute(
        "SELECT count(*) AS links FROM holdfast.job_items i"
        " WHERE NOT EXISTS (SELECT FROM public.embedding_retry_queue q WHERE q.id = i.item_id)"
    ).fetchone()
    assert dangling == {"links": 0}


# ---- the rules in the schema

COLUMNS: dict[ItemStatus, dict[str, Any]] = {
    ItemStatus.PENDING: {},
    ItemStatus.PROCESSING: {
        "lease_token": 1,
        "lease_until": "2030-01-01",
        "leased_by": "bell-1",
        "max_attempts": 5,
    },
    ItemStatus.DONE: {"processed_at": "2020-01-01"},
    ItemStatus.FAILED: {"error_class": "unclear"},
    ItemStatus.CANCELLED: {},
}
"""What a row of each status must have beside it."""

TIED = ("lease_token", "lease_until", "leased_by", "processed_at", "error_class", "skip_reason")


def put(tx: Tx, status: ItemStatus, **more: object) -> int:
    """Insert a row with a status, past the product's own functions."""
    values = dict.fromkeys(TIED) | {"max_attempts": 5} | COLUMNS[status] | more
    row = tx.execute(
        "INSERT INTO public.embedding_retry_queue (target_table, target_id, text_content, status,"
        " job_id, embedding_version, lease_token, lease_until, leased_by, max_attempts,"
        " processed_at, error_class, skip_reason)"
        " VALUES ('t', '1', 'a', %(status)s, 'emb-1', gen_random_uuid()::text, %(lease_token)s,"
        " %(lease_until)s, %(leased_by)s, %(max_attempts)s, %(processed_at)s, %(error_class)s,"
        " %(skip_reason)s) RETURNING id",
        {"status": status, **values},
    ).fetchone()
    assert row
    return int(row["id"])


def change(tx: Tx, item_id: int, status: ItemStatus, **more: object) -> None:
    """Change a row's status with all that belongs to it."""
    values = {**dict.fromkeys(TIED), "text": "a", **COLUMNS[status], **more}
    tx.execute(
        "UPDATE public.embedding_retry_queue SET status = %(status)s,"
        " lease_token = %(lease_token)s, lease_until = %(lease_until)s, leased_by = %(leased_by)s,"
        " processed_at = %(processed_at)s, error_class = %(error_class)s,"
        " skip_reason = %(skip_reason)s, content_hash = sha256(convert_to(%(text)s, 'UTF8'))"
        " WHERE id = %(id)s",
        {"id": item_id, "status": status, **values},
    )


def is_refused(tx: Tx, item_id: int, status: ItemStatus, **more: object) -> bool:
    """Whether the trigger refuses a change; any other error is one of the test."""
    try:
        change(tx, item_id, status, **more)
    except psycopg.errors.CheckViolation as exc:
        if "Invalid transition" in str(exc):
            return True
        raise
    return False


def test_the_schema_refuses_every_change_that_the_model_does_not_know(tx: Tx) -> None:
    for old, new in itertools.product(ItemStatus, ItemStatus):
        if old is new:
            continue
        item_id = put(tx, old)
        # With a new text: without one, done to pending has a test of its own.
        refused = is_refused(tx, item_id, new, text="another")

        assert refused == ((old, new) not in LEGAL_CHANGES), f"{old} → {new}"


def test_what_is_done_is_queued_again_only_for_another_text_or_where_it_was_skipped(
    tx: Tx,
) -> None:
    assert is_refused(tx, put(tx, ItemStatus.DONE), ItemStatus.PENDING)
    assert not is_refused(tx, put(tx, ItemStatus.DONE), ItemStatus.PENDING, text="another")
    skipped = put(tx, ItemStatus.DONE, skip_reason="content_not_found")
    assert not is_refused(tx, skipped, ItemStatus.PENDING)


@pytest.mark.parametrize(
    ("status", "wrong"),
    [
        *(
            (ItemStatus.PROCESSING, {name: None})
            for name in ("lease_token", "lease_until", "leased_by", "max_attempts")
        ),
        *(
            (status, COLUMNS[ItemStatus.PROCESSING])
            for status in ItemStatus
            if status is not ItemStatus.PROCESSING
        ),
        *(
            (status, {"processed_at": "2020-01-01"})
            for status in ItemStatus
            if status is not ItemStatus.DONE
        ),
        (ItemStatus.DONE, {"processed_at": None}),
        (ItemStatus.PENDING, {"skip_reason": "content_not_found"}),
        (ItemStatus.FAILED, {"error_class": None}),
    ],
)
def test_the_schema_refuses_a_row_whose_columns_contradict_its_status(
    tx: Tx, status: ItemStatus, wrong: dict[str, object]
) -> None:
    with pytest.raises(psycopg.errors.CheckViolation):
        put(tx, status, **wrong)


def test_the_schema_has_one_row_for_each_key(tx: Tx) -> None:
    submit(tx, "emb-1", {"1": "a"})

    with pytest.raises(psycopg.errors.UniqueViolation):
        tx.execute(
            "INSERT INTO public.embedding_retry_queue"
            " (target_table, target_id, text_content, embedding_version)"
            " VALUES (%(table)s, '1', 'b', %(version)s)",
            {"table": TABLE, "version": VERSION},
        )


def test_a_claim_is_never_more_than_it_may_be(tx: Tx) -> None:
    submit(tx, "emb-1", numbered(5))

    claims: list[Claim] = []
    for limit in (1, 2, 1, 5):
        found = claim(tx, "emb-1", limit=limit)
        assert len(found) <= limit
        claims += found

    assert len(claims) == 5
