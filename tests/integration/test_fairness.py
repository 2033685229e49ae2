"""Clients take turns: how much one has waiting is no matter to another. Counted, not timed."""

from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from app.core.bells import job_of
from app.core.context import open_context
from app.core.model import place_in_line
from app.core.store import fleet, items
from app.core.store.jobs import LOW_TURN_SECONDS
from tests.conftest import free_port
from tests.drains import Mill, open_mill
from tests.fakes import Fake
from tests.processes import StartProcess, WaitFor
from worker import embedding
from worker.sweep import rings

QUEUE = "rq:queue:embeddings"
CLIENTS = st.text("abc", max_size=30)


@pytest.fixture
def mill(database_url: str, redis_url: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[Mill]:
    """Give the flow with turns of one slice of four items."""
    monkeypatch.setattr(embedding, "TURN_SECONDS", 0.0)
    with Fake() as fake, open_mill(database_url, redis_url, fake, QUEUE_BATCH_SIZE="4") as mill:
        yield mill


@pytest.fixture
def submit(mill: Mill) -> Callable[..., list[str]]:
    """Submit a client's jobs of so many texts each."""
    rows = iter(range(1, 10**6))

    def submit(client: str, *sizes: int) -> list[str]:
        return [
            mill.submit(*[f"{client} {next(rows)}"] * size, first=next(rows), client=client)
            for size in sizes
        ]

    return submit


def follow_bells(mill: Mill, *, most: int = 1000) -> None:
    """Be the only worker: follow what waits first, until nothing waits."""
    for _ in range(most):
        bell = mill.ctx.link.lpop(QUEUE)
        if not isinstance(bell, bytes):
            return
        mill.drain(job_of(bell.decode()))


def order(mill: Mill) -> str:
    """Return the first letter of the client of each call, in order."""
    return "".join(request.texts[0][0] for request in mill.fake.requests)


Submit = Callable[..., list[str]]


def test_a_small_job_waits_for_one_turn_of_a_large_one_and_not_for_its_end(
    mill: Mill, submit: Submit
) -> None:
    [large] = submit("acme", 40)
    [small] = submit("bob", 3)

    follow_bells(mill)

    assert order(mill) == "ab" + "a" * 9
    assert {mill.job(each).state for each in (large, small)} == {"completed"}


def test_a_client_with_fifty_jobs_delays_another_by_one_turn(mill: Mill, submit: Submit) -> None:
    submit("acme", *[1] * 50)
    submit("bob", 12)

    follow_bells(mill)

    assert order(mill) == "ababab" + "a" * 47


def test_whoever_posts_one_small_job_after_the_other_and_who_posted_many_take_turns(
    mill: Mill, submit: Submit
) -> None:
    submit("acme", *[1] * 9)
    for _ in range(4):
        submit("bob", 1)
        follow_bells(mill, most=2)

    assert order(mill) == "abababab"


def test_three_clients_take_turns(mill: Mill, submit: Submit) -> None:
    submit("acme", *[1] * 4)
    submit("bob", *[1] * 3)
    submit("carol", *[1] * 2)

    follow_bells(mill)

    assert order(mill) == "abcabcaba"


def test_what_is_urgent_goes_before_every_client(mill: Mill, submit: Submit) -> None:
    submit("acme", 1, 1)
    mill.submit("urgent", first=900, client="bob", priority=1)

    follow_bells(mill)

    assert order(mill) == "uaa"


def test_what_has_time_goes_after_everybody_and_gives_way_after_each_slice(
    mill: Mill, submit: Submit, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(embedding, "TURN_SECONDS", 60.0)
    low = [f"later {number}" for number in range(20)]
    later = mill.submit(*low, first=5000, client="reembed", priority=-10)
    mill.submit("later still", first=6000, client="reembed", priority=-10)
    submit("acme", 1, 1)
    follow_bells(mill, most=2)
    assert order(mill) == "aa"

    with mill.draining(later) as bell:
        mill.fake.wait_for(lambda fake: len(fake.calls) >= 3)
        submit("bob", 1)
        bell.result()
    follow_bells(mill)

    assert "b" in order(mill)[2:6]
    assert order(mill).count("l") == 6


@pytest.fixture
def later(mill: Mill) -> Callable[..., str]:
    """Submit a job of eight texts, two slices, that has time."""
    first = iter(range(5000, 10**6, 100))
    return lambda: mill.submit(
        *[f"later {number}" for number in range(8)],
        first=next(first),
        client="reembed",
        priority=-10,
    )


Later = Callable[[], str]


def test_what_has_time_gets_a_slice_when_it_is_overdue_though_others_wait_without_end(
    mill: Mill, submit: Submit, later: Later
) -> None:
    later()
    for _ in range(3):
        submit("acme", 1, 1, 1)
        follow_bells(mill, most=3)
    assert rings.give_turns(mill.ctx) == {}
    submit("acme", 1, 1, 1)
    mill.elapse(LOW_TURN_SECONDS + 1)
    assert rings.give_turns(mill.ctx) == {"turns": 1}
    before = mill.ctx.bells.waiting("embeddings")

    [new] = submit("acme", 1)
    follow_bells(mill, most=4)

    assert order(mill) == "a" * 9 + "l" + "aaa"
    after = mill.ctx.bells.waiting("embeddings")
    assert sorted([*after, *before[1:4]]) == sorted([*before, new])
    assert after[0] == new


def test_what_is_overdue_is_passed_by_nobody_once_it_is_the_first(
    mill: Mill, submit: Submit, later: Later
) -> None:
    later()
    mill.elapse(LOW_TURN_SECONDS + 1)

    submit("acme", 1)
    follow_bells(mill)

    assert order(mill) == "lal"


def test_one_of_several_low_jobs_has_the_turn_and_then_another(
    mill: Mill, submit: Submit, later: Later
) -> None:
    one, other = later(), later()
    submit("acme", *[1] * 9)
    mill.elapse(LOW_TURN_SECONDS + 1)
    firsts = []
    for _ in range(2):
        assert rings.give_turns(mill.ctx) == {"turns": 1}
        assert rings.give_turns(mill.ctx) == {}
        firsts.append(mill.ctx.bells.waiting("embeddings")[0])
        follow_bells(mill, most=2)

    assert firsts == [one, other]
    assert order(mill) == "lala"


def test_no_turn_is_given_while_work_with_time_is_in_hand(
    mill: Mill, submit: Submit, later: Later
) -> None:
    held, _ = later(), later()
    submit("acme", 1)
    mill.elapse(LOW_TURN_SECONDS + 1)
    terms = items.ClaimTerms(held, leased_by="bell", lease_seconds=60, allowance=3)
    with mill.ctx.database.transaction() as tx:
        assert items.claim(tx, terms, limit=4, paused_models=[])

    assert rings.give_turns(mill.ctx) == {}


def test_no_turn_is_given_to_what_is_paused_or_while_redis_is_away(
    mill: Mill, submit: Submit, later: Later
) -> None:
    later()
    submit("acme", 1)
    mill.elapse(LOW_TURN_SECONDS + 1)
    away = replace(mill.settings, redis_url=f"redis://127.0.0.1:{free_port()}/0")
    with closing(open_context(away, application="test", most_connections=2)) as ctx:
        assert rings.give_turns(ctx) == {}
    name, model = mill.settings.embedder, mill.settings.embedding_model
    with mill.ctx.database.transaction() as tx:
        fleet.pause(tx, name, model, seconds=60, error_class="busy", message="503")

    assert rings.give_turns(mill.ctx) == {}


def test_what_is_no_bell_in_the_queue_keeps_nobody_from_submitting(
    mill: Mill, submit: Submit
) -> None:
    mill.ctx.link.rpush(QUEUE, b"\xff\xfe-1", b"a\x00b-1", b"", b"emb-gone0000-1")

    submit("acme", 1, 1)
    [last] = submit("bob", 1)

    assert mill.ctx.bells.waiting("embeddings")[-2] == last


def test_a_real_worker_serves_a_client_after_one_bell_of_another_who_has_fifty_waiting(
    mill: Mill, submit: Submit, start_process: StartProcess, wait_for: WaitFor
) -> None:
    submit("acme", *[1] * 50)
    [job_id] = submit("bob", 1)

    start_process("worker", "run", "embeddings", EMBEDDER_URL=mill.fake.url, QUEUE_WAIT_TIME="1")

    wait_for(lambda: mill.job(job_id).state.is_final, 60)
    assert order(mill)[:2] == "ab"


# ---- the place of one bell


@given(CLIENTS, st.sampled_from("abc"))
def test_a_new_bell_goes_behind_as_many_of_each_client_as_it_is_the_nth_of_its_own(
    waiting: str, mine: str
) -> None:
    line = list(waiting)
    behind = place_in_line(line, mine)
    at = len(line) if behind is None else behind + 1

    nth = line.count(mine) + 1
    for client in set(line):
        is_overtaken = line[at:].count(client)
        assert line[:at].count(client) >= min(nth, line.count(client))
        assert client != mine or not is_overtaken


@given(st.lists(st.sampled_from("abcd"), max_size=40))
def test_bells_that_are_all_placed_so_stand_in_rounds(rung: list[str]) -> None:
    line: list[str] = []
    for client in rung:
        behind = place_in_line(line, client)
        line.insert(len(line) if behind is None else behind + 1, client)

    rounds = [line[: place + 1].count(client) for place, client in enumerate(line)]
    assert rounds == sorted(rounds)
