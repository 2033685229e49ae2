from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from typing import cast

import orjson
import pytest

from app.core import config
from app.core.config import Settings
from app.core.context import Context, open_context
from app.core.errors import StoreUnavailable
from app.core.model import Counts, Job, Retry
from app.core.store import fleet, items, jobs
from app.core.store.database import Database, Tx
from app.core.store.fleet import Process
from app.core.store.jobs import IdempotencyKey
from tests import rows
from tests.conftest import DIMENSION, free_port
from tests.processes import wait_for
from tests.rows import (
    DONE,
    FAILED,
    MODEL,
    claim,
    end_leases,
    make_due,
    numbered,
    settle,
    statuses,
    submit,
    work,
)
from worker import sweep
from worker.sweep import Sweeper, cleanup, leases, rings, unowned

QUEUE = "embeddings"


@pytest.fixture(scope="module")
def database(shared_database_url: str) -> Iterator[Database]:
    with rows.open_database(shared_database_url) as database:
        yield database


@pytest.fixture
def tx(database: Database) -> Iterator[Tx]:
    with database.session() as connection:
        rows.empty(connection)
        yield connection


@pytest.fixture
def settings(shared_database_url: str, redis_url: str) -> Settings:
    return config.load(
        {
            "DATABASE_URL": shared_database_url,
            "REDIS_URL": redis_url,
            "EMBEDDING_DIM": str(DIMENSION),
            "QUEUE_BATCH_SIZE": "10",
            "SWEEP_SECONDS": "0.05",
        }
    )


@contextmanager
def opened(settings: Settings) -> Iterator[Context]:
    context = open_context(settings, application="test", most_connections=3)
    try:
        yield context
    finally:
        context.close()


@pytest.fixture
def ctx(settings: Settings, tx: Tx) -> Iterator[Context]:
    """Give the context of a sweeper, over an empty queue."""
    rows.empty(tx)
    with opened(settings) as context:
        yield context


def hire(tx: Tx, workers: int, queue: str = QUEUE) -> None:
    """Let so many workers be alive."""
    for number in range(workers):
        process = Process(f"{queue}-{number}", "worker", queue, "host", number)
        fleet.beat(tx, process, seconds=600, counters={})


def bells(ctx: Context, queue: str = QUEUE) -> list[str]:
    """Return the RQ ids that wait in a queue, first one first."""
    found = cast("list[bytes]", ctx.link.lrange(f"rq:queue:{queue}", 0, -1))
    return [each.decode() for each in found]


def job(tx: Tx, job_id: str) -> Job:
    found = jobs.find(tx, job_id)
    assert found is not None
    return found


# ---- leases that ran out


def test_every_lease_that_ran_out_is_ended_block_by_block(
    ctx: Context, tx: Tx, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(items, "RECOVER_BLOCK", 4)
    submit(tx, "emb-1", numbered(11))
    claim(tx, "emb-1", limit=10)
    end_leases(tx)
    claim(tx, "emb-1")

    assert leases.run_once(ctx) == {"recovered": 10}
    assert leases.run_once(ctx) == {}

    assert Counter(statuses(tx).values()) == {"pending": 10, "processing": 1}


# ---- rows without a job


def insert(tx: Tx, target_id: int, text: str) -> None:
    tx.execute(
        "INSERT INTO embedding_retry_queue (target_table, target_id, text_content)"
        " VALUES ('ai_insights', %(id)s, %(text)s)",
        {"id": target_id, "text": text},
    )


def test_rows_without_a_job_become_one_job_once(ctx: Context, tx: Tx) -> None:
    for number in range(5):
        insert(tx, number, "a")
    insert(tx, 0, "a newer text")

    assert unowned.run_once(ctx) == {"adopted": 5}
    assert unowned.run_once(ctx) == {}

    (found,) = jobs.page(tx, jobs.JobFilter(), limit=9)
    assert (found.client, found.counts) == ("sql", Counts(pending=5))
    assert work(tx, found.id) == 5


def test_two_who_take_up_rows_at_once_make_one_job_of_them(ctx: Context, tx: Tx) -> None:
    for number in range(50):
        insert(tx, number, "a")

    with ThreadPoolExecutor(2) as pool:
        adopted = [
            each.result(30)["adopted"]
            for each in [pool.submit(unowned.run_once, ctx) for _ in "ab"]
        ]

    assert sorted(adopted) == [0, 50]
    (found,) = jobs.page(tx, jobs.JobFilter(), limit=9)
    assert found.counts == rows.recounted(tx, found.id) == Counts(pending=50)


def test_a_row_that_comes_while_others_are_taken_up_waits_for_the_next_sweep(
    database: Database, tx: Tx, ctx: Context
) -> None:
    submit(tx, "emb-1", {"1": "a"})
    insert(tx, 1, "b")

    with ThreadPoolExecutor(1) as pool:
        with database.transaction() as other:
            # Holds the item, so that the sweep has looked at the rows already when it waits here.
            submit(other, "emb-2", {"1": "c"})
            sweeping = pool.submit(unowned.run_once, ctx)
            wait_for(lambda: rows.waiting(tx))
            insert(tx, 1, "the last one")
        sweeping.result(10)
    unowned.run_once(ctx)

    assert {each["text_content"] for each in tx.execute(OPEN_TEXTS)} == {"the last one"}


OPEN_TEXTS = "SELECT text_content FROM embedding_retry_queue WHERE status = 'pending'"


# ---- ringing


def test_a_due_job_without_a_bell_is_rung_for_once(ctx: Context, tx: Tx) -> None:
    submit(tx, "emb-00000001", numbered(3))

    assert rings.run_once(ctx) == {"rung": 1}
    assert rings.run_once(ctx) == {}

    assert bells(ctx) == ["emb-00000001-1"]


def test_a_job_whose_items_are_leased_has_its_bell(ctx: Context, tx: Tx) -> None:
    submit(tx, "emb-00000001", numbered(3))
    held = claim(tx, "emb-00000001", limit=1)

    assert rings.run_once(ctx) == {}

    settle(tx, held)
    assert rings.run_once(ctx) == {"rung": 1}


def test_a_dead_worker_is_no_bell(ctx: Context, tx: Tx) -> None:
    submit(tx, "emb-00000001", numbered(3))
    claim(tx, "emb-00000001", limit=1)
    end_leases(tx)

    assert rings.run_once(ctx) == {"rung": 1}


def test_a_bell_that_is_not_in_the_list_is_rung_again_whatever_rq_says_of_it(
    ctx: Context, tx: Tx
) -> None:
    submit(tx, "emb-00000001", numbered(3))
    rings.run_once(ctx)
    ctx.link.delete(f"rq:queue:{QUEUE}")
    assert ctx.link.exists("rq:job:emb-00000001-1")

    assert rings.run_once(ctx) == {"rung": 1}

    assert bells(ctx) == ["emb-00000001-2"]


def test_after_redis_was_emptied_every_due_job_is_rung_for_again(ctx: Context, tx: Tx) -> None:
    for number in range(1, 4):
        submit(tx, f"emb-0000000{number}", {str(number): "a"})
    assert rings.run_once(ctx) == {"rung": 3}
    ctx.link.flushdb()

    assert rings.run_once(ctx) == {"rung": 3}

    assert bells(ctx) == [f"emb-0000000{number}-2" for number in range(1, 4)]


def test_a_large_job_has_a_bell_for_each_worker_that_could_hear_one(ctx: Context, tx: Tx) -> None:
    hire(tx, 4)
    submit(tx, "emb-00000001", numbered(45))
    claim(tx, "emb-00000001", limit=10, leased_by="bell-1")
    jobs.take_rings(tx, "emb-00000001", 1)
    taken = jobs.take_rings(tx, "emb-00000001", 1)
    assert taken
    ctx.bells.ring(taken, queue=QUEUE, timeout_seconds=60)

    assert rings.run_once(ctx) == {"rung": 2}, "four less the one that works and the one that waits"

    claim(tx, "emb-00000001", limit=34, leased_by="bell-2")
    ctx.link.flushdb()
    assert rings.run_once(ctx) == {}, "one item is due, and two are at it"


def test_no_more_bells_are_rung_than_a_job_may_have(
    settings: Settings, ctx: Context, tx: Tx
) -> None:
    hire(tx, 20)
    submit(tx, "emb-00000001", numbered(200))

    with opened(replace(settings, queue_bells_per_job=3)) as few:
        assert rings.run_once(few) == {"rung": 3}
    assert rings.run_once(ctx) == {"rung": 5}


def test_what_is_not_due_is_not_rung_for(ctx: Context, tx: Tx) -> None:
    submit(tx, "emb-00000001", {"1": "a"})
    work(tx, "emb-00000001", Retry(rows.UNCLEAR, 60.0))
    submit(tx, "emb-00000002", {"2": "a"})
    jobs.cancel(tx, "emb-00000002")
    items.cancel(tx, "emb-00000002")

    assert rings.run_once(ctx) == {"finished": 1}
    make_due(tx)
    assert rings.run_once(ctx) == {"rung": 1}
    assert bells(ctx) == ["emb-00000001-1"]


def test_a_paused_backend_is_rung_for_when_its_pause_is_over(ctx: Context, tx: Tx) -> None:
    submit(tx, "emb-00000001", {"1": "a"})
    fleet.pause(tx, ctx.settings.embedder, MODEL, seconds=60, error_class="busy", message="503")
    assert rings.run_once(ctx) == {}

    tx.execute("UPDATE holdfast.backends SET paused_until = now()")

    assert rings.run_once(ctx) == {"rung": 1}


def test_a_project_is_rung_for_where_its_workers_listen(ctx: Context, tx: Tx) -> None:
    for number, project in (("1", "mes"), ("2", "nobody"), ("3", "")):
        submit(tx, f"emb-0000000{number}", {number: "a"})
        tx.execute(
            "UPDATE holdfast.jobs SET project = %(project)s WHERE id = %(id)s",
            {"project": project, "id": f"emb-0000000{number}"},
        )
    hire(tx, 1, "embeddings-mes")

    assert rings.run_once(ctx) == {"rung": 3}
    assert rings.run_once(ctx) == {}

    assert bells(ctx, "embeddings-mes") == ["emb-00000001-1"]
    assert bells(ctx) == ["emb-00000002-1", "emb-00000003-1"]


def test_what_is_urgent_is_rung_for_at_the_head_of_the_queue(ctx: Context, tx: Tx) -> None:
    submit(tx, "emb-00000001", {"1": "a"})
    rings.run_once(ctx)
    submit(tx, "emb-00000002", {"2": "a"})
    tx.execute("UPDATE holdfast.jobs SET priority = 5 WHERE id = 'emb-00000002'")

    rings.run_once(ctx)

    assert bells(ctx) == ["emb-00000002-1", "emb-00000001-1"]


def test_two_sweeps_at_once_may_ring_twice_and_do_no_harm(ctx: Context, tx: Tx) -> None:
    submit(tx, "emb-00000001", numbered(3))

    with ThreadPoolExecutor(2) as pool:
        for each in [pool.submit(rings.run_once, ctx) for _ in "ab"]:
            each.result(30)

    found = bells(ctx)
    assert 1 <= len(found) <= 2
    assert len(set(found)) == len(found)
    assert rings.run_once(ctx) == {}


# ---- finishing


def test_a_job_whose_items_were_done_under_another_is_made_final_and_told_of(
    ctx: Context, tx: Tx
) -> None:
    submit(tx, "emb-00000001", numbered(2))
    submit(tx, "emb-00000002", numbered(2), client="bob")
    work(tx, "emb-00000001")

    assert rings.run_once(ctx) == {"finished": 2}
    assert rings.run_once(ctx) == {}

    assert job(tx, "emb-00000002").state == "completed"
    body = ctx.live.find("emb-00000002", client="bob")
    assert body
    assert orjson.loads(body)["state"] == "completed"


def test_while_redis_is_away_jobs_are_made_final_and_the_ring_is_made_up_for(
    settings: Settings, ctx: Context, tx: Tx
) -> None:
    submit(tx, "emb-00000001", {"1": "a"})
    work(tx, "emb-00000001", FAILED)
    submit(tx, "emb-00000002", {"2": "a"})

    with opened(replace(settings, redis_url=f"redis://127.0.0.1:{free_port()}/0")) as cut_off:
        assert rings.run_once(cut_off) == {"finished": 1, "redis_away": 1}
        assert rings.run_once(cut_off) == {"redis_away": 1}

    assert job(tx, "emb-00000001").state == "failed"
    assert rings.run_once(ctx) == {"rung": 1}


# ---- cleanup


def test_what_is_past_its_time_goes_block_by_block_and_the_rest_stays(
    ctx: Context, tx: Tx, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cleanup, "BLOCK", 10)
    for number in range(1, 4):
        submit(tx, f"emb-{number}", numbered(12, f"text of {number}"))
        work(tx, f"emb-{number}")
        rows.finish(tx, f"emb-{number}")
        key = IdempotencyKey("alice", str(number), b"hash")
        jobs.keep_answer(tx, key, job_id=f"emb-{number}", answer="a")
        fleet.note_slice(tx, job_id=f"emb-{number}", backend="b", items=1, seconds=1)
    rows.age(tx, days=400)
    tx.execute("UPDATE holdfast.idempotency_keys SET created_at = now() - interval '8 days'")
    tx.execute("UPDATE holdfast.slices SET at = now() - interval '2 hours'")
    submit(tx, "emb-4", {"1": "new", "99": "new"})
    settle(tx, claim(tx, "emb-4", limit=1))

    assert cleanup.run_once(ctx) == {"items": 11, "jobs": 3, "keys": 3, "slices": 3}
    assert cleanup.run_once(ctx) == {}

    assert [each.id for each in jobs.page(tx, jobs.JobFilter(), limit=9)] == ["emb-4"]
    assert set(statuses(tx)) == {"1", "99"}


# ---- the loop


class Watched(Sweeper):
    """A sweeper that counts its ticks."""

    ticks = 0

    def tick(self) -> None:
        """Count, and do the duties."""
        super().tick()
        self.ticks += 1

    def end(self) -> None:
        """Stop, as by a signal."""
        self.stop(15, None)


Start = Callable[..., Watched]


@pytest.fixture
def start(settings: Settings) -> Iterator[Start]:
    """Start sweepers in threads, and stop them whatever comes."""
    with ExitStack() as stack, ThreadPoolExecutor(3) as pool:
        running = []

        def start_one(**changes: float) -> Watched:
            context = stack.enter_context(opened(replace(settings, **changes)))  # type: ignore[arg-type]
            sweeper = Watched(context)
            running.append((sweeper, pool.submit(sweeper.run)))
            return sweeper

        yield start_one
        for sweeper, _ in running:
            sweeper.end()
        for _, thread in running:
            thread.result(30)


def beats(tx: Tx, sweeper: Sweeper) -> str | None:
    """Return when a sweeper last said that it lives."""
    row = tx.execute(
        "SELECT heartbeat_at::text AS at FROM holdfast.processes"
        " WHERE name = %(name)s AND alive_until > now()",
        {"name": sweeper.name},
    ).fetchone()
    return row["at"] if row else None


def wait_for_beats(tx: Tx, sweeper: Sweeper, number: int) -> None:
    """Wait until a sweeper has said so often that it lives."""
    seen: set[str | None] = set()

    def has_said_so() -> bool:
        seen.add(beats(tx, sweeper))
        return len(seen - {None}) >= number

    wait_for(has_said_so)


def test_of_two_sweepers_one_leads_and_the_other_takes_over(start: Start, tx: Tx) -> None:
    first = start()
    wait_for(lambda: first.ticks)
    second = start()

    wait_for_beats(tx, second, 5)
    assert second.ticks == 0
    assert fleet.alive(tx).sweepers == 2

    first.end()
    wait_for(lambda: second.ticks)
    wait_for(lambda: beats(tx, first) is None)
    assert fleet.alive(tx).sweepers == 1


def test_it_goes_on_after_postgres_has_thrown_it_out(start: Start, tx: Tx) -> None:
    sweeper = start()
    wait_for(lambda: sweeper.ticks)

    tx.execute(
        "SELECT pg_terminate_backend(pid) FROM pg_stat_activity"
        " WHERE datname = current_database() AND pid <> pg_backend_pid()"
    )
    before = sweeper.ticks

    wait_for(lambda: sweeper.ticks > before)


def test_it_hears_the_door_inside_the_database_long_before_its_next_tick(
    start: Start, ctx: Context, tx: Tx
) -> None:
    sweeper = start(sweep_seconds=3600)
    wait_for(lambda: sweeper.ticks)

    tx.execute("SELECT enqueue_embedding('ai_insights', '1', 'a')")

    wait_for(lambda: bells(ctx))


def test_it_wakes_when_something_comes_due_long_before_its_next_tick(
    start: Start, ctx: Context, tx: Tx
) -> None:
    submit(tx, "emb-00000001", {"1": "a"})
    work(tx, "emb-00000001", Retry(rows.UNCLEAR, 0.5))
    start(sweep_seconds=3600)

    wait_for(lambda: bells(ctx))


def test_a_lease_that_runs_out_is_made_good_long_before_the_next_tick(
    start: Start, ctx: Context, tx: Tx
) -> None:
    submit(tx, "emb-00000001", {"1": "a"})
    claim(tx, "emb-00000001", lease_seconds=0.5)
    start(sweep_seconds=3600)

    wait_for(lambda: bells(ctx))
    assert statuses(tx) == {"1": "pending"}


def test_a_duty_that_fails_keeps_no_other_from_its_work(
    ctx: Context, tx: Tx, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def broken(ctx: Context) -> Counter[str]:
        raise KeyError(ctx)

    monkeypatch.setattr(sweep, "DUTIES", (("broken", broken), *sweep.DUTIES))
    submit(tx, "emb-00000001", {"1": "a"})

    Sweeper(ctx).tick()

    assert bells(ctx) == ["emb-00000001-1"]
    assert [record.message for record in caplog.records if record.exc_info] == [
        "duty broken failed"
    ]


def test_without_postgres_a_tick_ends_at_once(
    ctx: Context, monkeypatch: pytest.MonkeyPatch
) -> None:
    done: list[str] = []

    def away(ctx: Context) -> Counter[str]:
        raise StoreUnavailable(str(ctx.settings.auth))

    def other(ctx: Context) -> Counter[str]:
        done.append(str(ctx.settings.auth))
        return Counter()

    monkeypatch.setattr(sweep, "DUTIES", (("away", away), ("other", other)))

    with pytest.raises(StoreUnavailable):
        Sweeper(ctx).tick()

    assert done == []


def test_the_duties_done_by_hand_end_what_workers_left_behind(ctx: Context, tx: Tx) -> None:
    submit(tx, "emb-00000001", numbered(3))
    claims = claim(tx, "emb-00000001")
    settle(tx, claims[:2], DONE)
    end_leases(tx)

    Sweeper(ctx).tick()

    assert bells(ctx) == ["emb-00000001-1"]
    work(tx, "emb-00000001")
    Sweeper(ctx).tick()
    assert job(tx, "emb-00000001").counts == Counts(done=3)
    assert job(tx, "emb-00000001").state.is_final
