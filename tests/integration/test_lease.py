"""Leases: extended while their holder works, and a fence when it does not."""

from collections.abc import Generator, Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from app.core.errors import ErrorClass, WorkError
from app.core.model import Claim, Done, Failed, Release, Retry, Settlement
from app.core.store import items
from tests.drains import Mill, open_mill
from tests.fakes import Fake
from tests.processes import wait_for
from worker.lease import Lease

BROKE = WorkError(ErrorClass.UNCLEAR, "it broke")
LAPSE = """UPDATE public.embedding_retry_queue SET lease_until = now() - interval '1 second'
            WHERE status = 'processing'"""


@pytest.fixture
def mill(shared_database_url: str, redis_url: str) -> Iterator[Mill]:
    with (
        Fake() as fake,
        open_mill(shared_database_url, redis_url, fake, QUEUE_MAX_RETRIES="2") as mill,
    ):
        mill.empty()
        yield mill


def claim(mill: Mill, job_id: str, *, bell: str = "bell", limit: int = 10) -> list[Claim]:
    terms = items.ClaimTerms(job_id, bell, lease_seconds=1, allowance=2)
    with mill.ctx.database.transaction() as tx:
        return items.claim(tx, terms, limit=limit, paused_models=[])


def settle(mill: Mill, *settlements: Settlement) -> int:
    with mill.ctx.database.transaction() as tx:
        return items.settle(tx, settlements, leased_by="bell")


def recover_dead(mill: Mill, bell: str) -> int:
    with mill.ctx.database.transaction() as tx:
        return items.recover_dead(
            tx, leased_by=bell, error_class=ErrorClass.KILLED, message="it was killed"
        )


def leases(mill: Mill) -> list[dict[str, Any]]:
    query = """SELECT lease_until FROM public.embedding_retry_queue
                WHERE status = 'processing' ORDER BY id"""
    return mill.rows(query)


@contextmanager
def open_lease(mill: Mill) -> Generator[Lease]:
    with Lease(mill.ctx.database, backend="ollama", lease_seconds=0.3) as lease:
        yield lease


# ---- extending


def test_what_is_held_is_extended_until_it_is_let_go(mill: Mill) -> None:
    job_id = mill.submit("one", "two")
    first, second = claim(mill, job_id)
    before = leases(mill)

    with open_lease(mill) as lease:
        lease.hold([first, second])
        wait_for(lambda: all(now != then for now, then in zip(leases(mill), before, strict=True)))
        lease.let_go([first])
        wait_for(lambda: len({row["lease_until"] for row in leases(mill)}) == 2)
        kept = leases(mill)[0]
        last = leases(mill)[1]
        wait_for(lambda: leases(mill)[1] != last)

    assert leases(mill)[0] == kept


def test_a_lease_that_is_somebody_elses_by_now_is_left_alone(mill: Mill) -> None:
    job_id = mill.submit("one")
    old = claim(mill, job_id)
    mill.rows(LAPSE)
    mill.sweep()
    [new] = claim(mill, job_id, bell="other")
    mine = leases(mill)

    with mill.ctx.database.transaction() as tx:
        assert items.extend(tx, [old[0].item_id], old[0].lease_token, lease_seconds=60) == 0

    assert leases(mill) == mine
    assert new.lease_token > old[0].lease_token


def test_a_call_longer_than_the_lease_keeps_its_items(
    shared_database_url: str, redis_url: str
) -> None:
    with (
        Fake(seconds_per_item=1.2) as fake,
        open_mill(shared_database_url, redis_url, fake, QUEUE_VISIBILITY_TIMEOUT="1") as mill,
    ):
        mill.empty()
        job_id = mill.submit("one", "two")
        with mill.draining(job_id) as bell:
            while not bell.done():
                mill.sweep()

        assert bell.result() == {"done": 2}
        assert set(mill.column(job_id, "attempts")) == {1}


# ---- the fence


@pytest.mark.parametrize("outcome", [Done(), Retry(BROKE, 0), Release(BROKE, 0), Failed(BROKE)])
def test_settling_under_a_lost_lease_changes_nothing(
    mill: Mill, outcome: Done | Retry | Release | Failed
) -> None:
    job_id = mill.submit("one")
    [old] = claim(mill, job_id)
    mill.rows(LAPSE)
    mill.sweep()
    claim(mill, job_id, bell="other")
    before = mill.items(job_id)

    with mill.ctx.database.transaction() as tx:
        assert not items.hold(tx, [old]).ours
    assert settle(mill, Settlement(old, outcome)) == 0

    assert mill.items(job_id) == before
    noted = mill.rows("SELECT error_class FROM holdfast.item_attempts")
    assert [row["error_class"] for row in noted] == ["lease_expired"]


def test_two_bells_never_claim_the_same_item(mill: Mill) -> None:
    job_id = mill.submit(*[f"text {number}" for number in range(10)])

    with mill.ctx.database.transaction() as one, mill.ctx.database.transaction() as other:
        first = items.claim(one, terms(job_id, "one"), limit=6, paused_models=[])
        second = items.claim(other, terms(job_id, "other"), limit=6, paused_models=[])

    assert (len(first), len(second)) == (6, 4)
    assert not {each.item_id for each in first} & {each.item_id for each in second}
    assert first[0].lease_token != second[0].lease_token


def terms(job_id: str, bell: str) -> items.ClaimTerms:
    return items.ClaimTerms(job_id, bell, lease_seconds=60, allowance=2)


# ---- recovering


def test_a_lease_that_ran_out_costs_its_attempt_and_names_its_holder(mill: Mill) -> None:
    job_id = mill.submit("one")
    claim(mill, job_id, bell="lost")
    mill.rows(LAPSE)

    mill.sweep()

    [item] = mill.items(job_id)
    assert (item["status"], item["attempts"], item["kills"]) == ("pending", 1, 1)
    assert item["error_class"] == "lease_expired"
    [noted] = mill.rows("SELECT attempt, error_class, leased_by FROM holdfast.item_attempts")
    assert noted == {"attempt": 1, "error_class": "lease_expired", "leased_by": "lost"}


def test_a_lease_that_has_not_run_out_is_not_touched(mill: Mill) -> None:
    job_id = mill.submit("one")
    claim(mill, job_id)

    mill.sweep()

    assert mill.column(job_id, "status") == ["processing"]


def test_an_item_that_always_kills_its_holder_ends_as_failed(mill: Mill) -> None:
    job_id = mill.submit("one")
    for _ in range(2):
        claim(mill, job_id, bell="doomed")
        recover_dead(mill, "doomed")

    assert claim(mill, job_id) == []
    [item] = mill.items(job_id)
    assert (item["status"], item["attempts"], item["error_class"]) == ("failed", 2, "killed")
    mill.sweep()
    assert mill.job(job_id).state == "failed"


def test_a_death_ends_the_leases_of_its_own_bell_and_names_no_other(mill: Mill) -> None:
    job_id = mill.submit("one", "two")
    claim(mill, job_id, bell="slow", limit=1)
    mill.rows(LAPSE)
    claim(mill, job_id, bell="dead", limit=1)

    assert recover_dead(mill, "dead") == 1

    assert mill.column(job_id, "status") == ["processing", "pending"]
    assert mill.column(job_id, "error_class") == [None, "killed"]
    mill.sweep()
    assert mill.column(job_id, "error_class") == ["lease_expired", "killed"]


def test_the_items_of_a_cancelled_job_are_not_recovered_to_be_tried_again(mill: Mill) -> None:
    job_id = mill.submit("one")
    claim(mill, job_id, bell="dead")
    with mill.ctx.database.transaction() as tx:
        tx.execute("UPDATE holdfast.jobs SET cancelled_at = now()")

    recover_dead(mill, "dead")

    assert mill.column(job_id, "status") == ["cancelled"]
