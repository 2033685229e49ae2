from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from random import Random
from typing import Any

import pytest

from app.core.errors import StoreUnavailable
from app.core.model import Counts, Failed, Job, Outcome, Retry
from app.core.store import items, jobs
from app.core.store.database import Database, Tx
from app.core.store.jobs import IdempotencyKey, JobFilter
from tests import rows
from tests.processes import wait_for
from tests.rows import (
    DONE,
    FAILED,
    MODEL,
    RETRIED,
    SKIPPED,
    TTL_SECONDS,
    claim,
    counts,
    end_leases,
    finish,
    make_due,
    numbered,
    settle,
    submit,
    work,
)


@pytest.fixture(scope="module")
def database(shared_database_url: str) -> Iterator[Database]:
    with rows.open_database(shared_database_url, most_connections=8) as database:
        yield database


@pytest.fixture
def tx(database: Database) -> Iterator[Tx]:
    with database.session() as connection:
        rows.empty(connection)
        yield connection


def job(tx: Tx, job_id: str) -> Job:
    found = jobs.find(tx, job_id)
    assert found is not None
    return found


def cancel(tx: Tx, job_id: str) -> None:
    with tx.transaction():
        jobs.lock(tx, job_id)
        jobs.cancel(tx, job_id)
        items.cancel(tx, job_id)


def requeue(tx: Tx, job_id: str) -> int:
    with tx.transaction():
        jobs.lock(tx, job_id)
        jobs.reopen(tx, job_id)
        return items.revive(tx, job_id)


def lines(tx: Tx, job_id: str) -> list[str]:
    """Return what each line of a final job shows."""
    found = items.page(tx, job_id, after=-1, limit=100)
    return [each["status"] for each in found]


# ---- one job


def test_a_job_is_there_with_its_counts_from_the_commit_on(database: Database, tx: Tx) -> None:
    with database.transaction() as other:
        submit(other, "emb-1", numbered(3), client="alice")
        assert jobs.find(tx, "emb-1") is None

    found = job(tx, "emb-1")
    assert (found.state, found.client, found.kind, found.run) == ("queued", "alice", "embedding", 1)
    assert found.counts == Counts(pending=3)
    assert found.errors == []
    assert found.started_at is found.finished_at is found.expires_at is None
    assert not found.is_expired


def test_a_new_job_can_be_counted_before_its_commit(tx: Tx) -> None:
    submit(tx, "emb-0", {"1": "text 1"})
    work(tx, "emb-0")

    with tx.transaction():
        submit(tx, "emb-1", numbered(3))
        jobs.count_now(tx)
        assert counts(tx, "emb-1") == Counts(pending=2, done=1)

    assert counts(tx, "emb-1") == Counts(pending=2, done=1)


def test_another_clients_job_is_not_there(tx: Tx) -> None:
    submit(tx, "emb-1", numbered(1), client="alice")

    assert jobs.find(tx, "emb-1", client="alice")
    assert jobs.find(tx, "emb-1", client="bob") is None
    assert jobs.find(tx, "emb-2") is None


def test_a_job_is_finished_only_when_nothing_of_it_is_open(tx: Tx) -> None:
    submit(tx, "emb-1", numbered(2))
    assert not finish(tx, "emb-1")
    claims = claim(tx, "emb-1")
    settle(tx, claims[:1])
    assert not finish(tx, "emb-1")
    settle(tx, claims[1:])

    assert finish(tx, "emb-1")

    found = job(tx, "emb-1")
    assert found.state == "completed"
    assert found.started_at
    assert found.finished_at
    assert found.expires_at
    assert found.started_at <= found.finished_at
    assert (found.expires_at - found.finished_at).total_seconds() == TTL_SECONDS
    assert not finish(tx, "emb-1")
    assert not finish(tx, "emb-unknown")


@pytest.mark.parametrize(
    ("outcomes", "state"),
    [
        ((DONE, DONE), "completed"),
        ((DONE, SKIPPED), "completed"),
        ((SKIPPED, FAILED), "completed_with_errors"),
        ((FAILED, FAILED), "failed"),
    ],
)
def test_the_final_state_says_what_became_of_the_items(
    tx: Tx, outcomes: tuple[Any, Any], state: str
) -> None:
    submit(tx, "emb-1", numbered(2))
    for claimed, outcome in zip(claim(tx, "emb-1"), outcomes, strict=True):
        settle(tx, [claimed], outcome)

    finish(tx, "emb-1")

    assert job(tx, "emb-1").state == state


def test_a_job_of_finished_duplicates_is_final_at_once(tx: Tx) -> None:
    submit(tx, "emb-1", numbered(2))
    work(tx, "emb-1")

    with tx.transaction():
        assert submit(tx, "emb-2", numbered(2)) == 0
        jobs.count_now(tx)
        assert finish(tx, "emb-2")

    found = job(tx, "emb-2")
    assert (found.state, found.counts) == ("completed", Counts(done=2))
    assert found.started_at is not None


def test_of_two_who_finish_a_job_one_freezes_it(database: Database, tx: Tx) -> None:
    submit(tx, "emb-1", numbered(2))
    work(tx, "emb-1")

    def finish_it() -> bool:
        with database.session() as connection:
            return finish(connection, "emb-1")

    with ThreadPoolExecutor(2) as pool:
        with database.transaction() as blocker:
            jobs.lock(blocker, "emb-1")
            both = [pool.submit(finish_it) for _ in range(2)]
            wait_for(lambda: rows.waiting(tx) == 2)
        won = [each.result(10) for each in both]

    assert sorted(won) == [False, True]


def test_a_final_job_keeps_its_counts_and_errors_whatever_its_items_do_later(tx: Tx) -> None:
    submit(tx, "emb-1", numbered(3))
    settle(tx, claim(tx, "emb-1", limit=2))
    work(tx, "emb-1", FAILED)
    finish(tx, "emb-1")
    before = job(tx, "emb-1")

    submit(tx, "emb-2", numbered(3, "changed"))
    work(tx, "emb-2")
    submit(tx, "emb-3", numbered(3, "changed"))

    after = job(tx, "emb-1")
    assert after.counts == before.counts == Counts(done=2, failed=1)
    assert after.errors == [{"error_class": "bad_input", "count": 1, "sample": "400: too long"}]
    assert lines(tx, "emb-1") == ["done", "done", "failed"]


def test_errors_are_summed_up_by_class_the_most_frequent_first(tx: Tx) -> None:
    submit(tx, "emb-1", numbered(6))
    claims = claim(tx, "emb-1")
    settle(tx, claims[:3], Failed(rows.UNCLEAR))
    settle(tx, claims[3:4], FAILED)
    settle(tx, claims[4:], RETRIED)

    assert [(each["error_class"], each["count"]) for each in jobs.errors(tx, "emb-1")] == [
        ("unclear", 3),
        ("bad_input", 1),
    ]


def test_a_result_expires(tx: Tx) -> None:
    submit(tx, "emb-1", {"1": "a"})
    work(tx, "emb-1")
    finish(tx, "emb-1")
    assert not job(tx, "emb-1").is_expired

    tx.execute("UPDATE holdfast.jobs SET expires_at = now()")

    assert job(tx, "emb-1").is_expired


# ---- cancel


def test_a_job_can_be_cancelled_once_and_only_while_it_is_open(tx: Tx) -> None:
    submit(tx, "emb-1", numbered(1))
    submit(tx, "emb-2", {"9": "x"})
    work(tx, "emb-2")
    finish(tx, "emb-2")

    assert [jobs.cancel(tx, name) for name in ("emb-1", "emb-1", "emb-2", "emb-3")] == [
        True,
        False,
        False,
        False,
    ]


def test_a_cancelled_job_ends_when_none_of_its_own_items_is_under_way(tx: Tx) -> None:
    submit(tx, "emb-1", numbered(3))
    claims = claim(tx, "emb-1", limit=2)
    cancel(tx, "emb-1")
    settle(tx, claims[:1])
    assert not finish(tx, "emb-1")
    settle(tx, claims[1:])

    assert finish(tx, "emb-1")

    found = job(tx, "emb-1")
    assert (found.state, found.counts) == ("cancelled", Counts(done=2, cancelled=1))


def test_what_goes_on_for_another_job_is_cancelled_as_far_as_this_one_is_concerned(tx: Tx) -> None:
    submit(tx, "emb-1", numbered(2))
    submit(tx, "emb-2", {"1": "text 1"})
    held = claim(tx, "emb-1", limit=1)
    cancel(tx, "emb-1")

    assert finish(tx, "emb-1")
    settle(tx, held)
    assert finish(tx, "emb-2")

    assert job(tx, "emb-1").counts == Counts(cancelled=2)
    assert lines(tx, "emb-1") == ["cancelled", "cancelled"]
    assert (job(tx, "emb-2").state, lines(tx, "emb-2")) == ("completed", ["done"])


def test_a_job_whose_items_were_all_done_before_the_cancel_is_completed(tx: Tx) -> None:
    submit(tx, "emb-1", numbered(1))
    held = claim(tx, "emb-1")
    cancel(tx, "emb-1")
    settle(tx, held)

    finish(tx, "emb-1")

    assert job(tx, "emb-1").state == "completed"


# ---- another run


def test_another_run_begins_open_and_ends_with_lines_that_agree_with_its_counts(tx: Tx) -> None:
    submit(tx, "emb-1", numbered(4))
    outcomes: list[Outcome] = [DONE, SKIPPED, FAILED, FAILED]
    for claimed, outcome in zip(claim(tx, "emb-1"), outcomes, strict=True):
        settle(tx, [claimed], outcome)
    finish(tx, "emb-1")
    submit(tx, "emb-2", {"1": "changed", "2": "text 2"})
    work(tx, "emb-2")
    assert lines(tx, "emb-1") == ["done", "skipped", "failed", "failed"]

    assert requeue(tx, "emb-1") == 2

    found = job(tx, "emb-1")
    assert (found.state, found.run) == ("queued", 2)
    assert found.finished_at is found.expires_at is found.cancelled_at is None
    assert found.counts == Counts(pending=2, done=2)
    assert work(tx, "emb-1") == 2
    assert finish(tx, "emb-1")
    assert job(tx, "emb-1").counts == Counts(done=4)
    assert lines(tx, "emb-1") == ["done"] * 4


def test_an_open_job_is_not_reopened(tx: Tx) -> None:
    submit(tx, "emb-1", numbered(2))
    settle(tx, claim(tx, "emb-1", limit=1), FAILED)

    assert requeue(tx, "emb-1") == 1

    assert job(tx, "emb-1").run == 1


# ---- bells


def test_no_number_of_a_bell_is_given_twice(database: Database, tx: Tx) -> None:
    submit(tx, "emb-1", numbered(1))

    def take(bells: int) -> list[int]:
        with database.transaction() as connection:
            taken = jobs.take_rings(connection, "emb-1", bells)
        assert taken
        assert taken.run == 1
        return list(range(taken.last - taken.bells + 1, taken.last + 1))

    with ThreadPoolExecutor(4) as pool:
        numbers = [number for each in pool.map(take, [1, 3] * 10) for number in each]

    assert sorted(numbers) == list(range(1, 41))


def test_a_final_job_has_no_bells(tx: Tx) -> None:
    submit(tx, "emb-1", numbered(1))
    work(tx, "emb-1", FAILED)
    finish(tx, "emb-1")

    assert jobs.take_rings(tx, "emb-1", 1) is None
    requeue(tx, "emb-1")
    taken = jobs.take_rings(tx, "emb-1", 2)
    assert taken
    assert (taken.last, taken.bells, taken.run) == (2, 2, 2)


def due(tx: Tx, *paused: str) -> list[tuple[str, int, int]]:
    found = jobs.due(tx, paused_models=list(paused))
    return [(each.id, each.pending, each.holders) for each in found]


def test_a_job_is_due_while_an_item_of_it_is(tx: Tx) -> None:
    submit(tx, "emb-1", numbered(3))
    assert due(tx) == [("emb-1", 3, 0)]
    assert due(tx, "other") == [("emb-1", 3, 0)]
    assert due(tx, "other", MODEL) == []

    held = claim(tx, "emb-1", limit=1, leased_by="bell-1")
    claim(tx, "emb-1", limit=1, leased_by="bell-2")
    assert due(tx) == [("emb-1", 1, 2)]
    settle(tx, held, Retry(rows.UNCLEAR, 60.0))
    last = claim(tx, "emb-1")
    assert due(tx) == []
    settle(tx, last)
    make_due(tx)
    assert due(tx) == [("emb-1", 1, 1)]
    end_leases(tx)
    assert due(tx) == [("emb-1", 1, 0)]
    cancel(tx, "emb-1")
    assert due(tx) == []


def test_a_job_whose_only_item_has_crashed_is_due_too(tx: Tx) -> None:
    submit(tx, "emb-1", numbered(1))
    claim(tx, "emb-1")
    end_leases(tx)
    items.recover_expired(tx)

    assert due(tx) == [("emb-1", 1, 0)]


def test_due_jobs_come_by_priority_and_then_by_age(tx: Tx) -> None:
    for name, priority in (("emb-1", 0), ("emb-2", 5), ("emb-3", 0), ("emb-4", -1)):
        submit(tx, name, {name: "x"})
        tx.execute(
            "UPDATE holdfast.jobs SET priority = %(p)s WHERE id = %(id)s",
            {"p": priority, "id": name},
        )

    assert [each[0] for each in due(tx)] == ["emb-2", "emb-1", "emb-3", "emb-4"]


def test_a_job_whose_items_were_done_under_another_is_found_complete(tx: Tx) -> None:
    submit(tx, "emb-1", numbered(2))
    submit(tx, "emb-2", numbered(2))
    submit(tx, "emb-3", {"9": "x"})
    submit(tx, "emb-4", {"8": "x"})
    claim(tx, "emb-4")
    jobs.cancel(tx, "emb-4")
    assert jobs.complete(tx) == ["emb-4"]

    work(tx, "emb-1")

    assert set(jobs.complete(tx)) == {"emb-1", "emb-2", "emb-4"}
    assert finish(tx, "emb-2")
    assert set(jobs.complete(tx)) == {"emb-1", "emb-4"}


def test_the_bytes_that_wait_are_the_share_of_what_a_job_brought(tx: Tx) -> None:
    submit(tx, "emb-1", {"1": "x" * 1000, "2": "é" * 1000, "3": "y" * 5000}, client="alice")
    submit(tx, "emb-2", {"4": "z" * 100}, client="alice")
    assert jobs.open_work(tx, "alice") == jobs.OpenWork(items=4, text_bytes=8100)
    assert jobs.items_of_model(tx, "emb-1", MODEL) == 3
    assert jobs.items_of_model(tx, "emb-1", "another") == 0

    settle(tx, claim(tx, "emb-1", limit=1))
    claim(tx, "emb-1", limit=1)
    assert jobs.open_work(tx, "alice").text_bytes == 8000 * 2 // 3 + 100
    work(tx, "emb-2")
    finish(tx, "emb-2")

    assert jobs.open_work(tx, "alice") == jobs.OpenWork(items=2, text_bytes=8000 * 2 // 3)
    assert jobs.open_work(tx, "nobody") == jobs.OpenWork(items=0, text_bytes=0)


def test_open_items_are_counted_by_client_and_ahead_of_a_job(tx: Tx) -> None:
    submit(tx, "emb-1", numbered(3), client="alice")
    submit(tx, "emb-2", {"7": "x", "8": "x"}, client="alice")
    submit(tx, "emb-3", {"9": "x"}, client="bob")
    settle(tx, claim(tx, "emb-1", limit=1))
    claim(tx, "emb-2", limit=1)

    open_work = [jobs.open_work(tx, name).items for name in ("alice", "bob", "carol")]
    assert open_work == [4, 1, 0]
    assert jobs.ahead(tx, "emb-1") == jobs.Ahead(jobs=2, items=3)
    work(tx, "emb-3")
    finish(tx, "emb-3")
    assert jobs.ahead(tx, "emb-1") == jobs.Ahead(jobs=1, items=2)


# ---- lists


def pages(tx: Tx, limit: int, client: str | None = None, state: str | None = None) -> list[str]:
    """Read a list to its end, page by page."""
    found: list[str] = []
    wanted = JobFilter(client=client, state=state)
    while page := jobs.page(tx, wanted, limit=limit):
        found += [each.id for each in page]
        last = page[-1]
        wanted = JobFilter(client, state, None, last.created_at, last.id)
    return found


def test_pages_are_newest_first_and_never_repeat_or_skip_a_job(tx: Tx) -> None:
    with tx.transaction():
        for number in range(5):
            submit(tx, f"emb-b{number}", {f"b{number}": "x"})
    for number in range(4):
        submit(tx, f"emb-a{number}", {f"a{number}": "x"})

    newest_first = ["emb-a3", "emb-a2", "emb-a1", "emb-a0", *(f"emb-b{n}" for n in (4, 3, 2, 1, 0))]
    for limit in (1, 2, 3, 9, 10):
        assert pages(tx, limit) == newest_first

    first = jobs.page(tx, JobFilter(), limit=3)
    submit(tx, "emb-new", {"new": "x"})
    wanted = JobFilter(before_at=first[-1].created_at, before_id=first[-1].id)
    rest = jobs.page(tx, wanted, limit=99)
    assert [each.id for each in first + rest] == newest_first


def test_a_list_shows_only_what_is_asked_for(tx: Tx) -> None:
    for name, client in (("emb-1", "alice"), ("emb-2", "bob"), ("emb-3", "alice")):
        submit(tx, name, {name: "x"}, client=client)
    work(tx, "emb-3")
    finish(tx, "emb-3")

    assert pages(tx, 9, client="alice") == ["emb-3", "emb-1"]
    assert pages(tx, 9, state="completed") == ["emb-3"]
    assert pages(tx, 9, client="bob", state="completed") == []
    assert [each.id for each in jobs.page(tx, JobFilter(kind="trace"), limit=9)] == []
    listed = {each.id: each for each in jobs.page(tx, JobFilter(), limit=9)}
    assert listed["emb-3"].counts == Counts(done=1)
    assert listed["emb-1"].counts == Counts(pending=1)


# ---- the same request again


def test_an_answer_is_kept_for_its_client_and_key_for_a_week(tx: Tx) -> None:
    key = IdempotencyKey("alice", "k", b"hash")
    jobs.keep_answer(tx, key, job_id="emb-1", answer="first")

    assert jobs.find_answer(tx, "alice", "k") == jobs.Answer(b"hash", "first")
    assert jobs.find_answer(tx, "bob", "k") is None
    assert jobs.find_answer(tx, "alice", "other") is None
    assert jobs.prune_keys(tx, limit=10) == 0

    tx.execute("UPDATE holdfast.idempotency_keys SET created_at = created_at - interval '8 days'")
    assert jobs.find_answer(tx, "alice", "k") is None
    jobs.keep_answer(tx, IdempotencyKey("alice", "k", b"new"), job_id="emb-2", answer="second")
    assert jobs.find_answer(tx, "alice", "k") == jobs.Answer(b"new", "second")
    assert jobs.prune_keys(tx, limit=10) == 0


def test_old_keys_go_block_by_block(tx: Tx) -> None:
    for number in range(5):
        key = IdempotencyKey("alice", str(number), b"hash")
        jobs.keep_answer(tx, key, job_id="emb-1", answer="a")
    tx.execute(
        "UPDATE holdfast.idempotency_keys SET created_at = now() - interval '8 days'"
        " WHERE key <> '0'"
    )

    assert [jobs.prune_keys(tx, limit=3) for _ in range(3)] == [3, 1, 0]
    assert jobs.find_answer(tx, "alice", "0")


def test_a_key_is_held_by_one_request_at_a_time_until_its_end_or_its_death(
    database: Database, tx: Tx
) -> None:
    with database.session() as first:
        assert jobs.try_lock_key(first, "alice", "k")
        assert not jobs.try_lock_key(tx, "alice", "k")
        assert jobs.try_lock_key(tx, "bob", "k")
        assert jobs.try_lock_key(tx, "alicek", "")
        jobs.unlock_key(first, "alice", "k")
    assert jobs.try_lock_key(tx, "alice", "k")
    for client, key in (("alice", "k"), ("bob", "k"), ("alicek", "")):
        jobs.unlock_key(tx, client, key)

    with database.dedicated() as dying:
        assert jobs.try_lock_key(dying, "alice", "k")
    wait_for(lambda: jobs.try_lock_key(tx, "alice", "k"))
    jobs.unlock_key(tx, "alice", "k")


# ---- prune


def test_an_old_final_job_goes_with_its_links_and_counts_and_what_is_shared_stays(tx: Tx) -> None:
    submit(tx, "emb-1", numbered(2))
    work(tx, "emb-1")
    finish(tx, "emb-1")
    submit(tx, "emb-2", numbered(2))
    finish(tx, "emb-2")
    submit(tx, "emb-3", {"9": "open"})
    tx.execute(
        "UPDATE holdfast.jobs SET finished_at = finished_at - interval '31 days',"
        " expires_at = expires_at - interval '31 days' WHERE id IN ('emb-1', 'emb-3')"
    )

    assert jobs.prune(tx, days=30, limit=10) == 1
    assert jobs.prune(tx, days=30, limit=10) == 0

    assert jobs.find(tx, "emb-1") is None
    assert lines(tx, "emb-2") == ["done", "done"]
    assert counts(tx, "emb-2") == Counts(done=2)
    left = tx.execute(
        "SELECT (SELECT count(*) FROM holdfast.job_counts WHERE job_id = 'emb-1')"
        "     + (SELECT count(*) FROM holdfast.job_items WHERE job_id = 'emb-1') AS rows"
    ).fetchone()
    assert left == {"rows": 0}


def test_a_job_whose_result_can_still_be_read_is_kept_however_old(tx: Tx) -> None:
    submit(tx, "emb-1", numbered(1))
    work(tx, "emb-1")
    finish(tx, "emb-1")
    tx.execute("UPDATE holdfast.jobs SET finished_at = finished_at - interval '400 days'")

    assert jobs.prune(tx, days=30, limit=10) == 0


# ---- many at once


def test_concurrent_submits_settles_and_cancels_of_the_same_items_never_wait_in_a_ring(
    database: Database, tx: Tx
) -> None:
    refused: list[str] = []

    def act(seed: int) -> None:
        random = Random(seed)  # noqa: S311 - a seed, so that a failure can be repeated
        for turn in range(25):
            job_id = f"emb-{seed}-{turn}"
            ids = random.sample(range(12), 6)
            batch = {str(number): f"text {random.randrange(3)}" for number in ids}
            outcome = random.choice([DONE, RETRIED, FAILED])
            attempt(submit, job_id, batch)
            attempt(drain, job_id, outcome)
            if turn % 3 == 0:
                attempt(cancel, job_id)
            attempt(finish, job_id)

    def attempt(use_case: Callable[..., object], *arguments: object) -> None:
        try:
            with database.session() as connection:
                use_case(connection, *arguments)
        except StoreUnavailable as exc:
            refused.append(str(exc))

    def drain(tx: Tx, job_id: str, outcome: Outcome) -> None:
        claims = claim(tx, job_id, limit=4, leased_by=job_id)
        with tx.transaction():
            held = items.hold(tx, claims)
            settle(tx, [each for each in claims if each.item_id in held.ours], outcome)

    with ThreadPoolExecutor(4) as pool:
        for each in [pool.submit(act, seed) for seed in range(4)]:
            each.result(60)

    assert refused == []
    assert rows.stranded(tx) == []
    open_jobs = [each for each in jobs.page(tx, JobFilter(), limit=1000) if not each.state.is_final]
    assert all(each.counts == rows.recounted(tx, each.id) for each in open_jobs)
