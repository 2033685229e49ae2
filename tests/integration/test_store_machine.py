"""The queue under any order of events: what must hold after each, and that all of it ends."""

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from typing import TypeVar

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    invariant,
    rule,
    run_state_machine_as_test,
)

from app.core.errors import ErrorClass
from app.core.model import Claim, Counts, Outcome
from app.core.store import items, jobs
from app.core.store.database import Database, Tx
from app.core.store.jobs import JobFilter, NewJob
from tests import rows
from tests.rows import DONE, FAILED, RELEASED, RETRIED, SKIPPED, TABLE

ALLOWANCE = 2
WHICH = st.integers(0, 2)
"""Which of the latest jobs, or claims: few jobs, items and texts meet more often than many.

A number, and not one of what there is: what is drawn must not hang on ids that Postgres makes up.
"""

TEXTS = st.sampled_from(["a", "a", "a", "b"])
BATCHES = st.dictionaries(st.sampled_from(["1", "2", "3"]), TEXTS, min_size=1, max_size=3)
OUTCOMES = st.sampled_from([DONE, DONE, RETRIED, RETRIED, RELEASED, FAILED, SKIPPED])
Thing = TypeVar("Thing")
FINAL_WORDS = {"done", "skipped", "failed", "cancelled"}

ITEMS = """
SELECT id, target_id, status, attempts, max_attempts, lease_token, leased_by, error_class
  FROM public.embedding_retry_queue
"""
RECOUNT = """
SELECT i.job_id, count(*) FILTER (WHERE q.status = 'pending') AS pending,
       count(*) FILTER (WHERE q.status = 'processing') AS processing,
       count(*) FILTER (WHERE q.status = 'done' AND q.skip_reason IS NULL) AS done,
       count(*) FILTER (WHERE q.skip_reason IS NOT NULL) AS skipped,
       count(*) FILTER (WHERE q.status = 'failed') AS failed,
       count(*) FILTER (WHERE q.status = 'cancelled') AS cancelled
  FROM holdfast.job_items i
  JOIN public.embedding_retry_queue q ON q.id = i.item_id
 GROUP BY i.job_id
"""


@pytest.fixture(scope="module")
def database(shared_database_url: str) -> Iterator[Database]:
    with rows.open_database(shared_database_url) as database:
        yield database


def chosen(found: Sequence[Thing], which: int) -> Thing | None:
    """Return one of the latest things that there are."""
    return found[-1 - which % len(found)] if found else None


class Queue(RuleBasedStateMachine):
    """Clients, workers, the sweeper and people, one step at a time."""

    def __init__(self, tx: Tx) -> None:
        super().__init__()
        self.tx = tx
        rows.empty(tx)
        self.jobs: list[str] = []
        self.bells = 0
        self.held: list[list[Claim]] = []
        self.tokens: dict[int, int] = {}
        """The lease that stands on each item that has one."""
        self.attempts: Counter[int] = Counter()
        """Claims of each item that were charged."""
        self.frozen: dict[str, Counts] = {}
        """The counts of each final job when it became so."""

    # ---- clients

    def new_job(self) -> str:
        self.jobs.append(f"emb-{len(self.jobs)}")
        return self.jobs[-1]

    def lose_changed(self) -> None:
        """Forget the leases that a changed text has taken away."""
        held = {each["id"] for each in self.rows() if each["status"] == "processing"}
        self.tokens = {item: token for item, token in self.tokens.items() if item in held}

    def rows(self) -> list[dict[str, object]]:
        return self.tx.execute(ITEMS).fetchall()

    @rule(batch=BATCHES)
    def submit(self, batch: dict[str, str]) -> None:
        before = {each["target_id"]: each["lease_token"] for each in self.rows()}
        accepted = rows.submit(self.tx, self.new_job(), batch)
        assert accepted <= len(batch)
        kept = {each["target_id"]: each["lease_token"] for each in self.rows()}
        assert all(kept[name] in (token, None) for name, token in before.items())
        self.lose_changed()

    @rule(batch=BATCHES)
    def use_the_door(self, batch: dict[str, str]) -> None:
        with self.tx.transaction():
            found = [
                self.tx.execute(
                    "SELECT enqueue_embedding(%(table)s, %(id)s, %(text)s) AS job_id",
                    {"table": TABLE, "id": target_id, "text": text},
                ).fetchone()
                for target_id, text in batch.items()
            ]
        assert found[0]
        self.jobs.append(str(found[0]["job_id"]))
        self.lose_changed()

    @rule(batch=BATCHES)
    def insert_as_adr_009_did(self, batch: dict[str, str]) -> None:
        for target_id, text in batch.items():
            self.tx.execute(
                "INSERT INTO embedding_retry_queue (target_table, target_id, text_content)"
                " VALUES (%(table)s, %(id)s, %(text)s)",
                {"table": TABLE, "id": target_id, "text": text},
            )
        with self.tx.transaction():
            job_id = self.new_job()
            if items.adopt(self.tx, job_id):
                jobs.insert(self.tx, NewJob(job_id, "sql"))
            else:
                self.jobs.pop()
        self.lose_changed()

    @rule(which=WHICH)
    def cancel(self, which: int) -> None:
        job_id = chosen(self.jobs, which)
        if job_id is None:
            return
        with self.tx.transaction():
            jobs.lock(self.tx, job_id)
            if jobs.cancel(self.tx, job_id):
                items.cancel(self.tx, job_id)

    @rule(which=WHICH)
    def requeue(self, which: int) -> None:
        job_id = chosen(self.jobs, which)
        if job_id is None:
            return
        with self.tx.transaction() as undo:
            jobs.lock(self.tx, job_id)
            jobs.reopen(self.tx, job_id)
            if not items.revive(self.tx, job_id):
                undo.force_rollback = True
                return
        self.frozen.pop(job_id, None)

    # ---- workers

    @rule(which=WHICH, limit=st.integers(1, 3))
    def claim(self, which: int, limit: int) -> None:
        job_id = chosen(self.jobs, which)
        if job_id is None:
            return
        self.bells += 1
        claims = rows.claim(
            self.tx, job_id, limit=limit, leased_by=f"bell-{self.bells}", allowance=ALLOWANCE
        )
        for each in claims:
            assert each.item_id not in self.tokens, "claimed while another lease stands"
            assert each.lease_token > max(self.tokens.values(), default=0)
            self.attempts[each.item_id] += 1
            assert each.attempts == self.attempts[each.item_id] <= each.max_attempts
        self.tokens |= {each.item_id: each.lease_token for each in claims}
        if claims:
            self.held.append(claims)

    def still_held(self, claims: list[Claim]) -> list[Claim]:
        return [each for each in claims if self.tokens.get(each.item_id) == each.lease_token]

    @rule(which=WHICH, outcome=OUTCOMES, is_again=st.booleans())
    def settle(self, which: int, outcome: Outcome, is_again: bool) -> None:  # noqa: FBT001
        claims = chosen(self.held, which)
        if claims is None:
            return
        if outcome is RETRIED and any(each.attempts >= each.max_attempts for each in claims):
            outcome = FAILED
        ours = self.still_held(claims)

        assert items.hold(self.tx, claims).ours == {each.item_id for each in ours}
        assert rows.settle(self.tx, claims, outcome) == len(ours)

        for each in ours:
            del self.tokens[each.item_id]
            self.attempts[each.item_id] -= outcome is RELEASED
        if is_again:
            assert rows.settle(self.tx, claims, outcome) == 0

    @rule(which=WHICH)
    def die(self, which: int) -> None:
        claims = chosen(self.held, which)
        if claims is None:
            return
        bell = {row["id"]: row["leased_by"] for row in self.rows()}.get(claims[0].item_id)
        ours = self.still_held(claims)
        if not ours or bell is None:
            return
        recovered = items.recover_dead(
            self.tx, leased_by=str(bell), error_class=ErrorClass.KILLED, message="SIGKILL"
        )
        assert recovered >= 1
        self.lose_changed()

    # ---- time, and the sweeper

    @rule()
    def wait(self) -> None:
        rows.make_due(self.tx)

    @rule()
    def let_leases_run_out_and_recover_them(self) -> None:
        rows.end_leases(self.tx)
        recovered = items.recover_expired(self.tx)
        assert sum(recovered.values()) == len(self.tokens)
        self.tokens.clear()

    @rule()
    def finish(self) -> None:
        for job_id in self.jobs:
            if rows.finish(self.tx, job_id):
                job = jobs.find(self.tx, job_id)
                assert job
                self.frozen[job_id] = job.counts

    @rule()
    def prune_after_some_days(self) -> None:
        rows.age(self.tx, days=8)
        items.prune(self.tx, days=7, limit=100)

    # ---- what holds at any time

    @invariant()
    def every_open_item_is_its_jobs_to_work_on(self) -> None:
        assert rows.stranded(self.tx) == []

    @invariant()
    def a_lease_stands_exactly_where_one_was_taken_and_not_lost(self) -> None:
        found = {each["id"]: each["lease_token"] for each in self.rows() if each["lease_token"]}
        assert found == self.tokens

    @invariant()
    def attempts_are_the_claims_that_were_charged_and_within_the_allowance(self) -> None:
        for each in self.rows():
            assert each["attempts"] == self.attempts[int(str(each["id"]))]
            if each["max_attempts"] is not None:
                assert int(str(each["attempts"])) <= int(str(each["max_attempts"]))
            if each["status"] == "failed" and each["error_class"] != "bad_input":
                assert each["attempts"] == each["max_attempts"], "dead before its last attempt"

    @invariant()
    def a_jobs_counts_are_the_sum_of_its_items_and_those_of_a_final_one_stay(self) -> None:
        recounted = {each.pop("job_id"): Counts(**each) for each in self.tx.execute(RECOUNT)}
        for job in jobs.page(self.tx, JobFilter(), limit=1000):
            wanted = self.frozen[job.id] if job.state.is_final else recounted[job.id]
            assert job.counts == wanted

    @invariant()
    def the_lines_of_the_latest_final_job_agree_with_its_counts(self) -> None:
        for job_id in list(self.frozen)[-1:]:
            counts = self.frozen[job_id]
            page = items.page(self.tx, job_id, after=-1, limit=100)
            shown = [each["status"] for each in page if each["is_current"]]
            assert set(shown) <= FINAL_WORDS
            if len(shown) == counts.total:
                assert Counter(shown) == +Counter(asdict(counts))

    def teardown(self) -> None:
        """Let everything go well from now on: then all that was accepted reaches its end."""
        for _ in range(100):
            rows.make_due(self.tx)
            rows.end_leases(self.tx)
            items.recover_expired(self.tx)
            due = jobs.due(self.tx, paused_models=[])
            for job in due:
                rows.settle(self.tx, rows.claim(self.tx, job.id))
            if not due:
                break
        self.finish()
        found = jobs.page(self.tx, JobFilter(), limit=1000)
        assert [job.id for job in found if not job.state.is_final] == []
        assert {str(each["status"]) for each in self.rows()} <= FINAL_WORDS
        super().teardown()


def walk(database: Database, *, examples: int, steps: int) -> None:
    with database.session() as tx:
        run_state_machine_as_test(
            lambda: Queue(tx),  # type: ignore[arg-type]
            settings=settings(
                max_examples=examples,
                stateful_step_count=steps,
                deadline=None,
                suppress_health_check=list(HealthCheck),
            ),
        )


def test_whatever_the_order_of_events_nothing_is_lost_and_all_of_it_ends(
    database: Database,
) -> None:
    walk(database, examples=40, steps=30)


@pytest.mark.slow
def test_the_same_for_much_longer(database: Database) -> None:
    walk(database, examples=1000, steps=50)
