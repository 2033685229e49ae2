"""The main promise: 10,000 items through kills and an emptied Redis, and every one of them done."""

import os
import random
from random import SystemRandom

import pytest
import redis

from tests.faults.stage import Stage, numbered
from tests.processes import Running, wait_for

ITEMS = 10_000
BATCHES = 4
USUAL_SEED = 20260801
SEED = int(os.environ.get("HOLDFAST_SEED", USUAL_SEED))  # noqa: TID251 - of the test alone
BETWEEN = 400
"""How many more items are done before the next thing happens."""


def test_ten_thousand_items_survive_kills_and_an_emptied_redis(
    served_stage: Stage,
) -> None:
    stage = served_stage
    chance = random.Random(SEED)  # noqa: S311 - to be repeated
    stage.fake.seconds_per_item = 0.0004
    stage.start_sweeper()
    workers = stage.start_workers(2)
    for batch in range(BATCHES):
        stage.post(*numbered(ITEMS // BATCHES, f"batch {batch} text"))
    faults = ["horse"] * 4 + ["worker"] * 2 + ["redis"]
    chance.shuffle(faults)

    with stage.polled():
        for number, fault in enumerate(faults, start=1):
            stage.wait_until_done(number * BETWEEN)
            strike(stage, workers, fault, chance)
        assert not stage.are_final, "void: there was nothing left to lose"
        stage.wait_until_final()

    stage.record("seed", SEED)
    stage.record("faults", faults)
    assert stage.kills == 6
    assert stage.statuses == {"done": ITEMS}
    stage.check()


@pytest.mark.slow
@pytest.mark.parametrize("run", [1, 2, 3])
def test_f3_twenty_kills_at_random_times_lose_nothing(stage: Stage, run: int) -> None:
    seed = SystemRandom().randrange(10**6) if SEED == USUAL_SEED else SEED + run
    stage.record("seed", seed)
    chance = random.Random(seed)  # noqa: S311 - to be repeated
    stage.fake.seconds_per_item = 0.002
    stage.start_sweeper()
    workers = stage.start_workers(2)
    for batch in range(BATCHES):
        stage.post(*numbered(ITEMS // BATCHES, f"batch {batch} text"))

    with stage.polled():
        for number in range(20):
            stage.wait_until_done(number * 200 + chance.randrange(200))
            strike(stage, workers, chance.choice(["horse", "worker", "redis"]), chance)
        stage.wait_until_final()

    assert stage.statuses == {"done": ITEMS}
    stage.check()


def strike(stage: Stage, workers: list[Running], fault: str, chance: random.Random) -> None:
    """Let one thing happen while work is under way; who is killed is replaced in the list."""
    chance.shuffle(workers)
    match fault:
        case "horse":
            stage.kill_horse(*workers)
        case "worker":
            killed = stage.kill_worker(*workers)
            workers[workers.index(killed)] = stage.start_worker()
        case _:
            with redis.Redis.from_url(stage.environ["REDIS_URL"]) as client:
                wait_for(client.dbsize)  # void where there never was anything to lose
                client.flushall()
