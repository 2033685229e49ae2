"""The demo's trace source: the same on every machine, with causes that can be found again."""

import hashlib
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from app.adapters.queries import read_queries
from app.adapters.sources.postgres import DEMO, PLACEHOLDER
from app.core.store.database import Database
from migrations.__main__ import migrate
from tests.conftest import TRACE_CIDS
from tests.processes import ROOT, StartProcess, wait_for
from worker import demo_trace
from worker.demo_trace import BAD_BONDER, BAD_COMPOUND, DemoTraceError

CHECKSUM = "2b52523bfa318376"
COUNTS = {
    "container": 5017,
    "lot_wip_history": 46761,
    "lot_materials_history": 19759,
    "lot_reject_history": 13954,
    "hold_release_history": 180,
    "equipment_job": 679,
    "equipment_job_container": 2029,
    "combined_assy_lot": 3606,
    "spec_workcenter": 11,
}
SMALL = 100

# What each suspect's containers lost afterwards, against what those of the others of its kind did:
# other machines of its work centre, other lots of its material. Nothing but delivered columns.
SUSPECTS = """
WITH losses AS ({downstream_rejects}),
     met AS (
    SELECT container_id, workcenter_name AS kind, equipment_name AS name, min(track_in_at) AS since
      FROM ({upstream_history}) AS h GROUP BY 1, 2, 3
     UNION ALL
    SELECT container_id, material_part_name, material_lot_name, min(txn_at)
      FROM ({materials}) AS m GROUP BY 1, 2, 3),
     lost AS (
    SELECT met.container_id, kind, name, coalesce(sum(loss_total_qty), 0) AS qty
      FROM met
      LEFT JOIN losses ON losses.container_id = met.container_id AND txn_at >= since
     GROUP BY 1, 2, 3),
     suspects AS (SELECT kind, name, count(*) AS met, sum(qty) AS qty FROM lost GROUP BY 1, 2)
SELECT kind, name, qty / met / ((sum(qty) OVER kinds - qty) / (sum(met) OVER kinds - met)) AS rate
  FROM suspects
 WINDOW kinds AS (PARTITION BY kind)
 ORDER BY rate DESC NULLS LAST
"""
CONTAINERS = "SELECT array_agg(container_id ORDER BY container_id) AS ids FROM trace_demo.container"


@pytest.fixture
def source(trace_source_url: str) -> Iterator[Database]:
    database = Database(trace_source_url, application="test")
    yield database
    database.close()


@pytest.fixture
def demo_url(empty_database_url: str) -> str:
    migrate(empty_database_url, demo=True, dimension=8)
    return empty_database_url


def checked(url: str) -> tuple[dict[str, int], str]:
    database = Database(url, application="test")
    with database.transaction() as tx:
        found = demo_trace.check(tx)
    database.close()
    return found


def one(source: Database, query: str, **values: object) -> dict[str, Any]:
    with source.transaction() as tx:
        [row] = tx.execute(query.encode(), values or None).fetchall()
    return row


def test_the_same_seed_gives_the_same_data_on_every_machine(trace_source_url: str) -> None:
    assert checked(trace_source_url) == (COUNTS, CHECKSUM)
    assert COUNTS["container"] >= TRACE_CIDS


def test_another_seed_gives_other_data_and_the_first_one_comes_back(demo_url: str) -> None:
    assert demo_trace.load(demo_url, SMALL)
    first = checked(demo_url)
    assert not demo_trace.load(demo_url, SMALL)
    with pytest.raises(DemoTraceError, match="--replace"):
        demo_trace.load(demo_url, SMALL, seed=8)
    assert checked(demo_url) == first

    assert demo_trace.load(demo_url, SMALL, seed=8, replace=True)
    assert checked(demo_url)[1] != first[1]
    assert demo_trace.load(demo_url, SMALL, replace=True)
    assert checked(demo_url) == first


def test_a_load_that_is_killed_has_changed_nothing(demo_url: str) -> None:
    demo_trace.load(demo_url, SMALL)
    before = checked(demo_url)

    def die(done: int, total: int) -> None:
        raise KeyboardInterrupt(done, total)

    with pytest.raises(KeyboardInterrupt):
        demo_trace.load(demo_url, 2 * SMALL, replace=True, progress=die)

    assert checked(demo_url) == before
    assert not demo_trace.load(demo_url, SMALL)


def test_the_planted_causes_are_found_from_what_is_delivered(source: Database) -> None:
    selects = read_queries(Path(DEMO), PLACEHOLDER).selects
    query = SUSPECTS
    for domain in ("upstream_history", "materials", "downstream_rejects"):
        query = query.replace(f"{{{domain}}}", selects[domain])
    with source.transaction() as tx:
        suspects = tx.execute(query.encode(), one(source, CONTAINERS)).fetchall()

    first, second, third = suspects[:3]
    assert {first["name"], second["name"]} == {BAD_BONDER, BAD_COMPOUND}
    assert {first["kind"], second["kind"]} == {"DIE BOND", "COMPOUND-5"}
    assert min(first["rate"], second["rate"]) >= 3
    assert third["rate"] < 2.5


def test_values_that_are_awkward_are_there(source: Database) -> None:
    odd = one(
        source,
        """SELECT count(*) FILTER (WHERE position(E'\\\\' IN reject_comment) > 0) AS backslash,
                  count(*) FILTER (WHERE position('"' IN reject_comment) > 0) AS quote,
                  count(*) FILTER (WHERE position(E'\\n' IN reject_comment) > 0) AS line_end,
                  count(*) FILTER (WHERE position(E'\\t' IN reject_comment) > 0) AS tab,
                  count(*) FILTER (WHERE reject_comment ~ '[一-龥]') AS cjk,
                  count(*) FILTER (WHERE reject_comment LIKE '%%🧵%%') AS emoji
             FROM trace_demo.lot_reject_history""".replace("%%", "%"),
    )
    assert all(odd.values()), odd
    quantities = one(
        source,
        """SELECT count(*) FILTER (WHERE qty_consumed = 'NaN') AS nan,
                  count(*) FILTER (WHERE qty_consumed IS NULL) AS nothing
             FROM trace_demo.lot_materials_history""",
    )
    assert all(quantities.values()), quantities
    left_out = one(
        source,
        """SELECT count(*) FILTER (WHERE c.container_id IS NULL) AS ghosts,
                  count(*) FILTER (WHERE h.release_at IS NULL) AS open
             FROM trace_demo.hold_release_history h
             LEFT JOIN trace_demo.container c USING (container_id)""",
    )
    assert all(left_out.values()), left_out
    lonely = one(
        source,
        """SELECT count(*) AS containers
             FROM trace_demo.container c
             LEFT JOIN trace_demo.lot_wip_history h USING (container_id)
             LEFT JOIN trace_demo.lot_reject_history r USING (container_id)
            WHERE h.container_id IS NULL AND r.container_id IS NULL""",
    )
    assert lonely["containers"] > 0


def test_the_ids_are_distinct_and_the_same_choice_each_time(source: Database) -> None:
    every = one(source, CONTAINERS)["ids"]
    with source.transaction() as tx:
        first, second = demo_trace.ids(tx, 300), demo_trace.ids(tx, 300)

    assert first == second
    assert len(set(first)) == 300
    assert first == sorted(every, key=lambda each: hashlib.md5(each.encode()).hexdigest())[:300]  # noqa: S324 - no secret


def test_one_load_at_a_time(demo_url: str) -> None:
    refused: list[str] = []

    def load_again(done: int, total: int) -> None:
        with pytest.raises(DemoTraceError) as caught:
            demo_trace.load(demo_url, done, replace=True, seed=total)
        refused.append(caught.value.message)

    assert demo_trace.load(demo_url, SMALL, progress=load_again)
    assert refused == ["another load is running; wait for its end"]


def test_after_a_killed_first_load_nothing_is_loaded(
    start_process: StartProcess, demo_url: str
) -> None:
    loading = start_process("worker.demo_trace", "load", "--cids", "60000", DATABASE_URL=demo_url)
    wait_for(lambda: "/60,000 containers" in loading.said, 60)
    loading.kill()
    assert loading.wait() == -signal.SIGKILL, "it ended before it was killed: the test is void"

    for command in (["check"], ["ids", "--count", "1"]):
        looking = start_process("worker.demo_trace", *command, DATABASE_URL=demo_url)
        assert looking.wait() == 1
        assert "nothing is loaded" in looking.said


def test_without_the_tables_it_says_what_makes_them(
    start_process: StartProcess, empty_database_url: str
) -> None:
    for command in (["check"], ["load", "--cids", "1"]):
        running = start_process("worker.demo_trace", *command, DATABASE_URL=empty_database_url)
        assert running.wait() == 1
        assert "run python -m migrations --demo" in running.said


def test_a_reader_that_has_seen_enough_is_no_error(trace_source_url: str, redis_url: str) -> None:
    ids = [sys.executable, "-m", "worker.demo_trace", "ids", "--count", str(TRACE_CIDS)]
    environ = {"DATABASE_URL": trace_source_url, "REDIS_URL": redis_url}
    pipe = subprocess.PIPE
    with subprocess.Popen(ids, cwd=ROOT, env=environ, stdout=pipe, stderr=pipe) as running:
        assert running.stdout
        running.stdout.close()
        assert running.stderr
        said = running.stderr.read()
    assert (running.returncode, said) == (0, b"")


def test_the_command_loads_checks_and_names_ids(start_process: StartProcess, demo_url: str) -> None:
    def run(*arguments: str) -> tuple[int, str]:
        process = start_process("worker.demo_trace", *arguments, DATABASE_URL=demo_url)
        return process.wait(), process.said

    code, said = run("load", "--cids", str(SMALL))
    assert code == 0
    assert "containers" in said
    assert said.endswith("loaded\n")
    assert run("load", "--cids", str(SMALL)) == (0, "loaded already\n")
    code, said = run("load", "--cids", "50")
    assert code == 1
    assert "--replace" in said
    assert run("load", "--cids", "50", "--keep") == (0, "loaded already\n")
    code, said = run("ids", "--count", "30")
    assert code == 0
    assert len(set(said.split())) == 30
    assert run("ids", "--count", "30") == (code, said)
    code, said = run("check")
    assert code == 0
    assert "checksum" in said
    assert BAD_BONDER in said
    code, said = run("ids", "--count", "3000")
    assert code == 1
    assert "3000 were asked for" in said


@pytest.mark.parametrize(
    "arguments",
    [
        *([], ["fill"], ["load"], ["load", "--cids", "none"], ["load", "--cids", "0"]),
        *(["load", "--cids", "-5"], ["load", "--cids", "99999999999"], ["load", "--cids", "5k"]),
        *(["load", "--cids", "5", "--seed", "-7"], ["load", "--cids", "5", "--seed", str(2**63)]),
        *(["load", "--cids", "5", "--keep", "--replace"], ["ids"], ["ids", "--count", "0"]),
    ],
)
def test_wrong_arguments_are_refused_before_anything_is_opened(arguments: list[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        demo_trace.main(arguments)
    assert ended.value.code == 2
