"""The demo's trace source: the same on every machine, with causes that can be found again."""

from collections.abc import Iterator
from typing import Any

import pytest

from app.core.store.database import Database
from migrations.__main__ import migrate
from tests.conftest import TRACE_CIDS
from tests.processes import StartProcess
from worker import demo_trace
from worker.demo_trace import BAD_BONDER, BAD_COMPOUND, DemoTraceError

CHECKSUM = "c052ecd44ceacf08"
COUNTS = {
    "container": 5008,
    "lot_wip_history": 63238,
    "lot_materials_history": 17674,
    "lot_reject_history": 15007,
    "hold_release_history": 180,
    "equipment_job": 637,
    "equipment_job_container": 2527,
    "combined_assy_lot": 3607,
    "spec_workcenter": 11,
}
SMALL = 100

# Of lots that met a machine or a material, and of the others: what one lot lost from there on.
LOSSES = """
WITH lost AS (
    SELECT c.container_id,
           coalesce(sum(r.reject_qty + r.standby_qty + r.qty_to_process + r.in_process_qty
                        + r.processed_qty + r.defect_qty), 0) AS qty
      FROM trace_demo.container c
      LEFT JOIN (trace_demo.lot_reject_history r
                 JOIN trace_demo.spec_workcenter s ON s.spec_name = r.spec_name
                  AND s.sequence_group >= %(first)s) USING (container_id)
     WHERE c.split_from_id IS NOT NULL
     GROUP BY c.container_id)
SELECT avg(qty) FILTER (WHERE container_id IN ({met})) AS met,
       avg(qty) FILTER (WHERE container_id NOT IN ({met})) AS others
  FROM lost
"""
MET_BONDER = "SELECT container_id FROM trace_demo.lot_wip_history WHERE equipment_name = %(cause)s"
MET_COMPOUND = """
SELECT container_id FROM trace_demo.lot_materials_history WHERE material_lot_name = %(cause)s
"""


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


@pytest.mark.parametrize(
    ("met", "cause", "first"), [(MET_BONDER, BAD_BONDER, 2), (MET_COMPOUND, BAD_COMPOUND, 5)]
)
def test_the_planted_causes_can_be_found_again(
    source: Database, met: str, cause: str, first: int
) -> None:
    losses = one(source, LOSSES.replace("{met}", met), cause=cause, first=first)

    assert losses["met"] > 3 * losses["others"] > 0


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
    code, said = run("ids", "--count", "30")
    assert code == 0
    assert len(set(said.split())) == 30
    assert run("ids", "--count", "30") == (code, said)
    code, said = run("check")
    assert code == 0
    assert "checksum" in said
    assert BAD_BONDER in said
    assert run("load", "--cids", "none")[0] == 2
    assert run("ids", "--count", "0")[0] == 2
