from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pytest

from app.core.model import Retry
from app.core.store import fleet, items
from app.core.store.database import Database, Tx
from app.core.store.fleet import Backend, Process
from tests import rows
from tests.processes import wait_for
from tests.rows import MODEL, RETRIED, claim, end_leases, numbered, settle, submit, work

WORKER = Process("worker-1", "worker", "embeddings", "host", 1)
NAME = "ollama"


@pytest.fixture(scope="module")
def database(shared_database_url: str) -> Iterator[Database]:
    with rows.open_database(shared_database_url) as database:
        yield database


@pytest.fixture
def tx(database: Database) -> Iterator[Tx]:
    with database.session() as connection:
        rows.empty(connection)
        yield connection


# ---- processes


def test_who_lives_is_who_has_said_so_lately(tx: Tx) -> None:
    for process, seconds in (
        (WORKER, 30),
        (replace(WORKER, name="worker-2"), 30),
        (replace(WORKER, name="worker-3", queue="embeddings-mes"), 30),
        (replace(WORKER, name="worker-4"), -1),
        (replace(WORKER, name="sweeper-1", kind="sweeper", queue=""), 30),
    ):
        fleet.beat(tx, process, seconds=seconds, counters={})

    alive = fleet.alive(tx)

    assert alive == fleet.Alive({"embeddings": 2, "embeddings-mes": 1}, sweepers=1)


def test_a_process_that_leaves_is_gone_at_once_and_back_with_its_next_beat(tx: Tx) -> None:
    fleet.beat(tx, WORKER, seconds=30, counters={"done": 1})
    fleet.leave(tx, WORKER.name)
    assert fleet.alive(tx).workers == {}

    fleet.beat(tx, WORKER, seconds=30, counters={"done": 2})

    assert fleet.alive(tx).workers == {"embeddings": 1}
    row = tx.execute("SELECT counters FROM holdfast.processes").fetchone()
    assert row == {"counters": {"done": 2}}


# ---- backends


def pause(tx: Tx, seconds: float = 60, model: str = MODEL) -> bool:
    return fleet.pause(tx, NAME, model, seconds=seconds, error_class="busy", message="503")


def end_pauses(tx: Tx) -> None:
    """Let every pause and every try have ended."""
    tx.execute(
        "UPDATE holdfast.backends SET paused_until = now() - interval '1 second',"
        " probe_until = CASE WHEN probe_until IS NOT NULL THEN now() - interval '1 second' END"
        " WHERE paused_since IS NOT NULL"
    )


def backend(tx: Tx) -> Backend:
    return fleet.backends(tx, NAME)[MODEL]


def test_a_backend_that_nobody_has_spoken_of_is_not_known(tx: Tx) -> None:
    assert fleet.backends(tx, NAME) == {}


def test_a_pause_is_new_once_and_names_its_cause(tx: Tx) -> None:
    assert pause(tx)
    assert not pause(tx)

    found = backend(tx)
    assert found.is_paused
    assert (found.error_class, found.message, found.tries) == ("busy", "503", 1)
    assert fleet.backends(tx, "openai") == {}
    assert not fleet.take_probe(tx, NAME, MODEL, seconds=5)


def test_a_shorter_pause_does_not_cut_a_longer_one_short(tx: Tx) -> None:
    pause(tx, 600)
    until = backend(tx).paused_until

    pause(tx, 1)

    assert backend(tx).paused_until == until


def test_when_a_pause_is_over_one_may_try_and_the_others_wait_for_it(
    database: Database, tx: Tx
) -> None:
    pause(tx)
    end_pauses(tx)
    assert not backend(tx).is_paused
    assert backend(tx).paused_since

    def take() -> bool:
        with database.session() as connection:
            return fleet.take_probe(connection, NAME, MODEL, seconds=60)

    with ThreadPoolExecutor(4) as pool:
        won = list(pool.map(lambda _: take(), range(8)))

    assert sum(won) == 1
    assert backend(tx).is_paused


def test_a_try_that_fails_pauses_again_and_counts(tx: Tx) -> None:
    pause(tx)
    for tries in (2, 3, 4):
        end_pauses(tx)
        assert fleet.take_probe(tx, NAME, MODEL, seconds=60)
        assert not pause(tx)
        assert backend(tx).tries == tries
        assert not fleet.take_probe(tx, NAME, MODEL, seconds=60)


def test_a_try_can_be_prolonged_given_back_and_taken_over_from_the_dead(tx: Tx) -> None:
    pause(tx)
    end_pauses(tx)
    assert fleet.take_probe(tx, NAME, MODEL, seconds=-1)
    fleet.extend_probe(tx, NAME, MODEL, seconds=60)
    assert not fleet.take_probe(tx, NAME, MODEL, seconds=60)

    fleet.leave_probe(tx, NAME, MODEL)
    assert fleet.take_probe(tx, NAME, MODEL, seconds=60)

    end_pauses(tx)
    assert fleet.take_probe(tx, NAME, MODEL, seconds=60)


def test_a_right_answer_ends_the_pause(tx: Tx) -> None:
    pause(tx)
    end_pauses(tx)
    fleet.take_probe(tx, NAME, MODEL, seconds=60)

    fleet.note_ok(tx, NAME, MODEL)

    found = backend(tx)
    assert found == replace(
        found,
        paused_since=None,
        paused_until=None,
        is_paused=False,
        tries=0,
        error_class=None,
        message=None,
        is_warm=True,
    )
    assert pause(tx), "the next pause is a new one"


def test_a_model_that_has_not_answered_for_a_while_may_have_to_be_loaded(tx: Tx) -> None:
    fleet.note_ok(tx, NAME, MODEL)
    assert backend(tx).is_warm

    tx.execute("UPDATE holdfast.backends SET last_ok_at = now() - interval '6 minutes'")

    assert not backend(tx).is_warm


def test_a_limit_is_remembered_without_a_pause(tx: Tx) -> None:
    fleet.remember_limit(tx, NAME, MODEL, 32)

    found = backend(tx)
    assert (found.max_items, found.is_paused, found.tries) == (32, False, 0)
    assert pause(tx), "a limit is no pause"
    fleet.note_ok(tx, NAME, MODEL)
    assert backend(tx).max_items == 32


def test_only_so_many_calls_go_out_at_a_time(database: Database, tx: Tx) -> None:
    with database.dedicated() as first:
        assert fleet.take_call(first, NAME, most=1, seconds=5) == 0
        assert fleet.take_call(tx, "another", most=1, seconds=5) == 0
        with ThreadPoolExecutor(1) as pool, database.session() as second:
            waiting = pool.submit(fleet.take_call, second, NAME, most=1, seconds=30)
            wait_for(lambda: rows.waiting(tx) == 1)
            fleet.leave_call(first, NAME, 0)
            assert waiting.result(10) == 0
            fleet.leave_call(second, NAME, 0)
    fleet.leave_call(tx, "another", 0)


def test_who_gets_no_turn_in_time_is_told_so(tx: Tx) -> None:
    assert fleet.take_call(tx, NAME, most=1, seconds=0) is None


# ---- outages


def incidents(
    tx: Tx, client: str | None = None, *, limit: int = 50, after: fleet.Incident | None = None
) -> list[fleet.Incident]:
    before = (after.until, after.id) if after else (None, None)
    return fleet.incidents(tx, fleet.IncidentFilter(NAME, (), client, *before), limit=limit)


def end_outage(tx: Tx, model: str = MODEL) -> None:
    end_pauses(tx)
    fleet.note_ok(tx, NAME, model)


def test_an_outage_is_one_incident_from_its_first_pause_to_the_next_right_answer(
    database: Database, tx: Tx
) -> None:
    def pause_anew(_: int) -> bool:
        with database.session() as connection:
            return pause(connection)

    with ThreadPoolExecutor(4) as pool:
        assert sum(pool.map(pause_anew, range(12))) == 1
    end_pauses(tx)
    fleet.take_probe(tx, NAME, MODEL, seconds=60)
    fleet.pause(tx, NAME, MODEL, seconds=60, error_class="unreachable", message="refused")

    [found] = incidents(tx)
    assert (found.backend, found.model, found.until) == (NAME, MODEL, None)
    assert (found.error_class, found.reason) == ("unreachable", "refused")
    assert found.since == backend(tx).paused_since
    assert found.next_try_at == backend(tx).paused_until

    end_outage(tx)
    [ended] = incidents(tx)
    assert ended.until is not None
    assert (ended.id, ended.since, ended.next_try_at) == (found.id, found.since, None)
    fleet.note_ok(tx, NAME, MODEL)
    assert incidents(tx) == [ended]

    pause(tx)
    assert [each.until is None for each in incidents(tx)] == [True, False]


def test_an_answer_from_before_a_pause_ends_no_incident(tx: Tx) -> None:
    pause(tx)

    fleet.note_ok(tx, NAME, MODEL)

    assert incidents(tx)[0].until is None


def test_an_outage_that_an_older_worker_ended_is_not_taken_for_the_next_one(tx: Tx) -> None:
    pause(tx)
    tx.execute("DELETE FROM holdfast.backends")
    tx.execute("UPDATE holdfast.incidents SET since = since - interval '1 hour'")

    pause(tx)

    [found] = incidents(tx)
    assert found.since == backend(tx).paused_since


def test_the_items_that_wait_are_those_of_the_paused_model_and_of_whoever_asks(tx: Tx) -> None:
    submit(tx, "emb-1", numbered(5), client="alice")
    submit(tx, "emb-2", {"6": "x", "7": "x"}, client="bob")
    other = replace(rows.line(0, "8", "x"), model="another")
    submit(tx, "emb-3", [other, rows.line(1, "9", "x")], client="bob")
    submit(tx, "emb-4", [replace(other, target_id="10")], client="bob")
    work(tx, "emb-2")
    rows.finish(tx, "emb-2")
    settle(tx, claim(tx, "emb-1", limit=1))

    pause(tx)
    pause(tx, model="another")

    waiting = {
        client: {each.model: each.items_waiting for each in incidents(tx, client)}
        for client in (None, "alice", "bob", "carol")
    }
    assert waiting == {
        None: {MODEL: 5, "another": 2},
        "alice": {MODEL: 4, "another": 0},
        "bob": {MODEL: 1, "another": 2},
        "carol": {MODEL: 0, "another": 0},
    }
    end_outage(tx)
    assert [each.items_waiting for each in incidents(tx) if each.model == MODEL] == [0]


def test_open_incidents_come_first_and_pages_neither_repeat_nor_skip_any(tx: Tx) -> None:
    for model in ("one", "two", "three"):
        pause(tx, model=model)
        end_outage(tx, model)
    for model in ("four", "five"):
        pause(tx, model=model)
    fleet.pause(tx, "openai", MODEL, seconds=60, error_class="busy", message="503")
    tx.execute(
        "UPDATE holdfast.incidents SET until = now() - interval '1 hour' WHERE until < now()"
    )

    whole = [each.model for each in incidents(tx)]
    paged: list[str] = []
    last = None
    while page := incidents(tx, limit=2, after=last):
        paged += [each.model for each in page]
        last = page[-1]

    assert whole == paged == ["five", "four", "three", "two", "one"]


def test_an_outage_that_is_over_for_a_week_is_neither_listed_nor_kept(tx: Tx) -> None:
    for model in ("old", "new", "open"):
        pause(tx, model=model)
        if model != "open":
            end_outage(tx, model)
    tx.execute(
        "UPDATE holdfast.incidents SET since = since - interval '8 days',"
        " until = CASE WHEN model = 'old' THEN until - interval '8 days' ELSE until END"
    )

    assert [each.model for each in incidents(tx)] == ["open", "new"]

    assert fleet.prune(tx, limit=10) == 1
    assert tx.execute("SELECT count(*) AS n FROM holdfast.incidents").fetchone() == {"n": 2}


def test_the_first_canary_of_a_model_is_kept_until_it_is_forgotten(tx: Tx) -> None:
    assert fleet.canary(tx, MODEL, b"text", [1.0, 2.0]) == [1.0, 2.0]
    assert fleet.canary(tx, MODEL, b"text", [3.0, 4.0]) == [1.0, 2.0]
    assert fleet.canary(tx, MODEL, b"other text", [5.0]) == [5.0]
    assert fleet.canary(tx, "another", b"text", [6.0]) == [6.0]

    assert fleet.forget_canary(tx, MODEL) == 2

    assert fleet.canary(tx, MODEL, b"text", [3.0, 4.0]) == [3.0, 4.0]
    assert fleet.forget_canary(tx, "nobody") == 0


# ---- rates


def note(tx: Tx, seconds_each: float, *, job_id: str = "emb-1", items: int = 10) -> None:
    fleet.note_slice(tx, job_id=job_id, backend=NAME, items=items, seconds=seconds_each * items)


def test_without_history_nothing_is_estimated(tx: Tx) -> None:
    assert fleet.cost(tx) is None
    assert fleet.rate(tx, "emb-1") == 0.0
    note(tx, 1.0, items=0)
    assert fleet.cost(tx) is None


def test_the_cost_of_an_item_is_a_median_and_a_ninth_decile(tx: Tx) -> None:
    for seconds in range(1, 12):
        note(tx, float(seconds))

    cost = fleet.cost(tx)

    assert cost
    assert cost.p50 == pytest.approx(6.0)
    assert cost.p90 == pytest.approx(10.0)


def test_the_rate_of_a_job_is_that_of_its_last_seconds(tx: Tx) -> None:
    note(tx, 0.01, items=100)
    note(tx, 0.01, items=900, job_id="emb-2")
    tx.execute("UPDATE holdfast.slices SET at = now() - interval '9 seconds'")
    note(tx, 0.01, items=100)

    assert fleet.rate(tx, "emb-1") == pytest.approx(20.0, rel=0.2)

    tx.execute("UPDATE holdfast.slices SET at = now() - interval '40 seconds'")
    assert fleet.rate(tx, "emb-1") == 0.0


# ---- when something happens by itself


def seconds_until_next(tx: Tx) -> float:
    found = fleet.next_event_seconds(tx)
    assert found is not None
    return found


def test_the_next_event_is_the_first_retry_pause_or_lease(tx: Tx) -> None:
    assert fleet.next_event_seconds(tx) is None
    submit(tx, "emb-1", numbered(3))
    assert fleet.next_event_seconds(tx) is None, "what is due already is no event to come"

    claim(tx, "emb-1", limit=1, lease_seconds=500)
    assert 400 < seconds_until_next(tx) <= 500
    settle(tx, claim(tx, "emb-1", limit=1), Retry(rows.UNCLEAR, 300.0))
    assert 200 < seconds_until_next(tx) <= 300
    pause(tx, 100)
    assert 50 < seconds_until_next(tx) <= 100
    end_pauses(tx)
    fleet.take_probe(tx, NAME, MODEL, seconds=40)
    assert 20 < seconds_until_next(tx) <= 40
    end_leases(tx)
    assert seconds_until_next(tx) < 0


def test_a_retry_of_an_item_that_has_crashed_before_is_an_event_too(tx: Tx) -> None:
    submit(tx, "emb-1", numbered(1))
    claim(tx, "emb-1")
    end_leases(tx)
    items.recover_expired(tx)

    work(tx, "emb-1", Retry(rows.UNCLEAR, 300.0))

    assert 200 < seconds_until_next(tx) <= 300


def test_a_retry_of_a_final_or_of_no_job_is_none(tx: Tx) -> None:
    tx.execute(
        "INSERT INTO embedding_retry_queue (target_table, target_id, text_content,"
        " next_attempt_at) VALUES ('unknown', '1', 'a', now() + interval '1 minute')"
    )

    assert fleet.next_event_seconds(tx) is None


# ---- the sweepers


def test_one_sweeper_leads_until_its_connection_ends(database: Database, tx: Tx) -> None:
    with database.dedicated() as first:
        assert fleet.try_lead(first)
        assert not fleet.try_lead(tx)
    wait_for(lambda: fleet.try_lead(tx))
    tx.execute("SELECT pg_advisory_unlock_all()")


# ---- what is told of it all


def test_gauges_count_what_is_open_and_what_failed(tx: Tx) -> None:
    empty = fleet.gauges(tx)
    assert (empty.open_jobs, empty.oldest_due_seconds) == (0, 0.0)
    submit(tx, "emb-1", numbered(5))
    settle(tx, claim(tx, "emb-1", limit=1), rows.FAILED)
    settle(tx, claim(tx, "emb-1", limit=1), RETRIED)
    claim(tx, "emb-1", limit=1)
    tx.execute(
        "UPDATE embedding_retry_queue SET next_attempt_at = now() - interval '100 seconds'"
        " WHERE status = 'pending'"
    )

    found = fleet.gauges(tx)

    assert found.items == {"pending": 3, "processing": 1, "failed": 1}
    assert found.open_jobs == 1
    assert 100 <= found.oldest_due_seconds < 200


def test_the_oldest_due_item_may_be_one_that_has_crashed_before(tx: Tx) -> None:
    submit(tx, "emb-1", numbered(1))
    claim(tx, "emb-1")
    end_leases(tx)
    items.recover_expired(tx)
    tx.execute("UPDATE embedding_retry_queue SET next_attempt_at = now() - interval '100 seconds'")

    assert 100 <= fleet.gauges(tx).oldest_due_seconds < 200


def test_the_server_says_what_it_is(tx: Tx) -> None:
    facts = fleet.facts(tx)

    assert facts["version"]
    assert facts["is_replica"] is False
    assert list(fleet.models(tx)) == [MODEL]


# ---- cleanup


def test_old_slices_and_long_dead_processes_are_forgotten(tx: Tx) -> None:
    for _ in range(5):
        note(tx, 1.0)
    tx.execute("UPDATE holdfast.slices SET at = now() - interval '2 hours'")
    note(tx, 1.0)
    fleet.beat(tx, WORKER, seconds=-1, counters={})
    fleet.beat(tx, replace(WORKER, name="old"), seconds=-100_000, counters={})

    assert [fleet.prune(tx, limit=3) for _ in range(3)] == [4, 2, 0]

    left = tx.execute(
        "SELECT (SELECT count(*) FROM holdfast.slices) AS slices,"
        "       (SELECT count(*) FROM holdfast.processes) AS processes"
    ).fetchone()
    assert left == {"slices": 1, "processes": 1}
