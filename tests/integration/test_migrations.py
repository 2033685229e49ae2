import secrets
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import psycopg
import pytest
from psycopg.rows import dict_row

import migrations.__main__ as runner
from app.core.model import Counts
from app.core.store import fleet, items, jobs, schema, targets
from app.core.store.database import Database, Tx
from app.core.store.jobs import NewJob
from app.core.store.targets import NewTarget
from migrations.__main__ import MigrationError, check, migrate
from tests import rows
from tests.conftest import DIMENSION
from tests.processes import WaitFor
from tests.rows import MODEL, RETRIED, TABLE, VERSION
from worker.up import Servers

ADR_009 = """
CREATE TABLE embedding_retry_queue (
    id SERIAL PRIMARY KEY,
    target_table VARCHAR(50) NOT NULL,
    target_id INTEGER NOT NULL,
    text_content TEXT NOT NULL,
    model VARCHAR(50) DEFAULT 'bge-m3:latest',
    status VARCHAR(20) DEFAULT 'pending',
    attempts INTEGER DEFAULT 0,
    last_error TEXT,
    created_at TIMESTAMP,
    updated_at TIMESTAMP,
    processed_at TIMESTAMP
);
"""
ITS_ROWS = """
INSERT INTO embedding_retry_queue (id, target_table, target_id, text_content, model, status,
                                   attempts, last_error, created_at, updated_at, processed_at)
VALUES (1, 'ai_insights', 101, 'done', 'bge-m3:latest', 'done', 1, NULL,
        '2025-01-01', '2025-01-02', '2025-01-02'),
       (2, 'ai_insights', 102, 'done without a time', 'bge-m3:latest', 'done', 1, NULL,
        '2025-01-01', '2025-01-02', NULL),
       (3, 'ai_insights', 103, 'failed', 'bge-m3:latest', 'failed', 5, 'connection refused',
        '2025-01-01', '2025-01-03', NULL),
       (4, 'ai_insights', 104, 'waits', 'bge-m3:latest', 'pending', 0, NULL,
        '2025-01-04', NULL, NULL),
       (5, 'ai_insights', 105, 'has been tried', 'bge-m3:latest', 'pending', 3, 'timed out',
        '2025-01-05', '2025-01-06', NULL),
       (6, 'ai_insights', 106, 'stuck', 'bge-m3:latest', 'processing', 1, NULL,
        '2025-01-06', '2025-01-06', '2025-01-06'),
       (7, 'ai_insights', 107, 'stuck at its last attempt', 'bge-m3:latest', 'processing', 5, 'x',
        '2025-01-06', '2025-01-06', NULL),
       (8, 'conversations', 107, 'nothing known', NULL, NULL, NULL, NULL, NULL, NULL, NULL),
       (9, 'conversations', 9, 'old text', 'bge-m3:latest', 'pending', 0, NULL,
        '2025-01-01', NULL, NULL),
       (10, 'conversations', 9, 'new text', 'bge-m3:latest', 'pending', 0, NULL,
        '2025-01-02', NULL, NULL),
       (11, 'conversations', 11, 'old, still open', 'bge-m3:latest', 'processing', 1, NULL,
        '2025-01-01', NULL, NULL),
       (12, 'conversations', 11, 'new, done', 'bge-m3:latest', 'done', 1, NULL,
        '2025-01-02', '2025-01-02', '2025-01-02'),
       (13, 'nowhere', 13, 'no target', 'bge-m3:latest', 'pending', 0, NULL,
        '2025-01-01', NULL, NULL),
       (2147483646, 'ai_insights', 2147483647, 'the last but one', 'other', 'pending', 0, NULL,
        '2025-01-07', NULL, NULL),
       (2147483647, 'ai_insights', -2147483648, 'the last', 'bge-m3:latest', 'strange', 0, NULL,
        '2025-01-08', NULL, NULL);
SELECT setval('embedding_retry_queue_id_seq', 2147483647);
"""

COLUMNS = """
SELECT table_schema, table_name, column_name, ordinal_position, column_default, is_nullable,
       data_type, is_identity, identity_generation
  FROM information_schema.columns
 WHERE table_schema IN ('public', 'holdfast')
 ORDER BY table_schema, table_name, ordinal_position
"""
CONSTRAINTS = """
SELECT conrelid::regclass::text AS the_table, conname, pg_get_constraintdef(oid) AS definition
  FROM pg_constraint
 WHERE connamespace IN ('public'::regnamespace, 'holdfast'::regnamespace)
 ORDER BY the_table, conname
"""
INDEXES = """
SELECT schemaname, tablename, indexname, indexdef
  FROM pg_indexes WHERE schemaname IN ('public', 'holdfast') ORDER BY 1, 2, 3
"""
FUNCTIONS = """
SELECT p.oid::regprocedure::text AS name, md5(pg_get_functiondef(p.oid)) AS body, p.proacl::text
  FROM pg_proc p
  LEFT JOIN pg_depend d ON d.objid = p.oid AND d.deptype = 'e'
 WHERE p.pronamespace IN ('public'::regnamespace, 'holdfast'::regnamespace) AND d.objid IS NULL
 ORDER BY 1
"""
TRIGGERS = """
SELECT tgrelid::regclass::text AS the_table, tgname, pg_get_triggerdef(oid) AS definition
  FROM pg_trigger WHERE NOT tgisinternal ORDER BY 1, 2
"""
OPTIONS = """
SELECT oid::regclass::text AS name, reloptions FROM pg_class
 WHERE relnamespace IN ('public'::regnamespace, 'holdfast'::regnamespace) ORDER BY 1
"""


def dump(url: str) -> dict[str, list[dict[str, Any]]]:
    """Return everything that the catalog says of our schema, and what was applied when."""
    queries = {
        "columns": COLUMNS,
        "constraints": CONSTRAINTS,
        "indexes": INDEXES,
        "functions": FUNCTIONS,
        "triggers": TRIGGERS,
        "options": OPTIONS,
        "applied": "SELECT * FROM holdfast.schema_migrations ORDER BY name",
        "targets": "SELECT * FROM holdfast.embedding_targets ORDER BY target_table",
    }
    with psycopg.connect(url, row_factory=dict_row) as connection:
        return {name: connection.execute(query).fetchall() for name, query in queries.items()}


def with_demo(url: str, dimension: int = DIMENSION) -> list[str]:
    return migrate(url, demo=True, dimension=dimension, model=MODEL, version=VERSION)


def test_a_second_run_changes_nothing(empty_database_url: str) -> None:
    assert check(empty_database_url) == list(schema.EXPECTED)
    assert with_demo(empty_database_url) == list(schema.EXPECTED)
    before = dump(empty_database_url)

    assert with_demo(empty_database_url) == []

    assert dump(empty_database_url) == before
    assert len(before["columns"]) > 100
    assert check(empty_database_url) == []


def test_without_the_demo_nothing_but_our_own_tables_is_made(empty_database_url: str) -> None:
    migrate(empty_database_url)

    public = {
        each["table_name"]
        for each in dump(empty_database_url)["columns"]
        if each["table_schema"] == "public"
    }
    assert public == {"embedding_retry_queue"}
    with rows.open_database(empty_database_url) as database, database.session() as tx:
        assert targets.registered(tx) == []
        assert schema.missing(tx) == []


def test_a_check_changes_nothing_and_says_what_is_missing(
    empty_database_url: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def run(*arguments: str) -> tuple[int, str]:
        code = runner.main(arguments)
        said = capsys.readouterr()
        return code, (said.out + said.err).strip()

    everything = ", ".join(schema.EXPECTED)
    monkeypatch.setenv("DATABASE_URL", empty_database_url)
    monkeypatch.setenv("REDIS_URL", "redis://localhost")

    assert run("--check") == (1, f"missing: {everything}")
    with rows.open_database(empty_database_url) as database, database.session() as tx:
        assert list(schema.missing(tx)) == list(schema.EXPECTED)
    assert run() == (0, f"applied: {everything}")
    assert run("--check") == (0, "up to date")
    assert run() == (0, "up to date")

    monkeypatch.setenv("EMBEDDING_DIM", "many")
    assert run("--demo") == (78, "EMBEDDING_DIM: 'many' is not a whole number")


def test_a_database_that_cannot_be_reached_is_one_line_without_the_password(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("DATABASE_URL", "postgresql://u:hunter2@127.0.0.1:1/db")
    monkeypatch.setenv("REDIS_URL", "redis://localhost")

    assert runner.main([]) == 1

    said = capsys.readouterr().err
    assert said.startswith("migrations: ")
    assert "hunter2" not in said


@pytest.fixture
def files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Give a copy of the files that may be changed."""
    for path in runner.HERE.glob("*.sql"):
        (tmp_path / path.name).write_bytes(path.read_bytes())
    monkeypatch.setattr(runner, "HERE", tmp_path)
    return tmp_path


def test_a_file_that_was_edited_after_it_had_been_applied_is_refused(
    empty_database_url: str, files: Path
) -> None:
    migrate(empty_database_url)
    before = dump(empty_database_url)
    with (files / "0002_queue.sql").open("a") as file:
        file.write("-- a word\n")
    (files / "9001_new.sql").write_text("CREATE TABLE holdfast.new ();")

    for act in (migrate, check):
        with pytest.raises(MigrationError, match=r"^0002_queue\.sql was edited"):
            act(empty_database_url)

    assert dump(empty_database_url) == before


def test_a_database_of_a_newer_version_is_refused(empty_database_url: str, files: Path) -> None:
    (files / "9001_new.sql").write_text("CREATE TABLE holdfast.new (id integer);")
    migrate(empty_database_url)
    before = dump(empty_database_url)
    (files / "9001_new.sql").unlink()

    for act in (migrate, check):
        with pytest.raises(MigrationError, match="the database has 9001_new"):
            act(empty_database_url)

    assert dump(empty_database_url) == before


def test_a_file_that_fails_leaves_those_before_it_and_nothing_of_itself(
    empty_database_url: str, files: Path
) -> None:
    broken = files / "9001_new.sql"
    broken.write_text("CREATE TABLE holdfast.half (id integer); SELECT 1 / 0;")
    with pytest.raises(psycopg.errors.DivisionByZero):
        migrate(empty_database_url)
    assert check(empty_database_url) == ["9001_new"]

    broken.write_text("CREATE TABLE holdfast.half (id integer);")

    assert migrate(empty_database_url) == ["9001_new"]


def test_a_file_that_waits_in_a_circle_with_a_program_is_applied_again(
    empty_database_url: str, files: Path, wait_for: WaitFor
) -> None:
    migrate(empty_database_url)
    (files / "9001_new.sql").write_text(
        "LOCK TABLE public.embedding_retry_queue; LOCK TABLE holdfast.jobs;"
        " CREATE TABLE holdfast.new (id integer);"
    )
    waits = "SELECT 1 FROM pg_locks WHERE relation = 'holdfast.jobs'::regclass AND NOT granted"
    url = f"{empty_database_url}?options=-c%20deadlock_timeout%3D3s"  # it is the one to be ended
    with ThreadPoolExecutor(1) as pool, psycopg.connect(empty_database_url) as program:
        program.execute("SET deadlock_timeout = '10min'")
        program.execute("LOCK TABLE holdfast.jobs")
        migration = pool.submit(migrate, url)
        wait_for(lambda: program.execute(waits).fetchone())
        program.execute("LOCK TABLE public.embedding_retry_queue")
        program.commit()
        assert migration.result(30) == ["9001_new"]


def test_of_many_at_once_one_works_and_the_others_say_so(empty_database_url: str) -> None:
    def run() -> list[str] | str:
        try:
            return migrate(empty_database_url)
        except MigrationError as exc:
            return exc.message

    with ThreadPoolExecutor(4) as pool:
        found = list(pool.map(lambda _: run(), range(4)))

    everything = list(schema.EXPECTED)
    busy = "another migration is running on this database; wait for its end"
    assert found.count(everything) == 1
    assert all(each in (everything, [], busy) for each in found)
    assert check(empty_database_url) == []


def test_another_dimension_than_the_columns_have_is_refused_with_both_numbers(
    empty_database_url: str,
) -> None:
    with_demo(empty_database_url, dimension=8)
    before = dump(empty_database_url)

    with pytest.raises(psycopg.errors.RaiseException) as caught:
        with_demo(empty_database_url, dimension=384)

    assert caught.value.diag.message_primary == (
        "EMBEDDING_DIM is 384, but the column ai_insights.embedding has 8 dimensions"
    )
    assert dump(empty_database_url) == before


def test_a_database_that_cannot_hold_every_text_is_refused(empty_database_url: str) -> None:
    with psycopg.connect(empty_database_url, autocommit=True) as connection:
        connection.execute("CREATE DATABASE narrow TEMPLATE template0 ENCODING 'LATIN1' LOCALE 'C'")
        try:
            narrow = empty_database_url.rpartition("/")[0] + "/narrow"
            with pytest.raises(MigrationError, match="LATIN1"):
                migrate(narrow)
        finally:
            connection.execute("DROP DATABASE narrow")


def test_open_jobs_and_pauses_of_the_version_before_are_counted_and_listed(
    empty_database_url: str, files: Path
) -> None:
    later = files / "0007_incidents.sql"
    statements = later.read_bytes()
    later.unlink()
    with_demo(empty_database_url)
    with rows.open_database(empty_database_url) as database, database.session() as tx:
        rows.submit(tx, "emb-1", {"1": "one", "2": "two, a long one"})
        rows.submit(tx, "emb-2", {"3": "three"})
        rows.work(tx, "emb-2")
        rows.finish(tx, "emb-2")
        tx.execute(
            "INSERT INTO holdfast.backends (name, model, paused_since, paused_until, message)"
            " VALUES ('ollama', %(model)s, now(), now(), 'refused')"
            ", ('ollama', 'well', NULL, NULL, NULL)",
            {"model": MODEL},
        )
        later.write_bytes(statements)
        assert migrate(empty_database_url) == ["0007_incidents"]

        assert jobs.open_work(tx, "alice") == jobs.OpenWork(items=2, text_bytes=18)
        [found] = fleet.incidents(tx, fleet.IncidentFilter("ollama"), limit=9)
        assert (found.model, found.reason, found.items_waiting) == (MODEL, "refused", 2)
        rows.submit(tx, "emb-3", {"4": "four"})
        assert jobs.open_work(tx, "alice") == jobs.OpenWork(items=3, text_bytes=22)


# ---- ADR-009's own table


@pytest.fixture(scope="module")
def database(servers: Servers) -> Iterator[Database]:
    """Give ADR-009's table, made by its own words, with rows in every state, after the upgrade."""
    url = servers.database_url.rpartition("/")[0] + "/adr_009"
    with psycopg.connect(servers.database_url, autocommit=True) as connection:
        connection.execute("CREATE DATABASE adr_009")
        with psycopg.connect(url) as old:
            old.execute(ADR_009)
            old.execute(ITS_ROWS)
        assert migrate(url) == list(schema.EXPECTED)
        assert migrate(url) == []
        with rows.open_database(url) as database:
            yield database
        connection.execute("DROP DATABASE adr_009 WITH (FORCE)")


@pytest.fixture
def tx(database: Database) -> Iterator[Tx]:
    """Give the table as the upgrade left it: what a test does is taken back."""
    with database.session() as connection, connection.transaction(force_rollback=True):
        yield connection


@pytest.fixture
def _registered(tx: Tx) -> None:
    """Register the two targets that the rows are for, as an operator does."""
    tx.execute("CREATE EXTENSION vector")
    for table in ("ai_insights", "conversations"):
        create = "CREATE TABLE public.{} (id bigint PRIMARY KEY, embedding vector(8))"
        tx.execute(psycopg.sql.SQL(create).format(psycopg.sql.Identifier(table)))
        targets.register(tx, NewTarget(table, "id", "embedding", MODEL, VERSION, 8))


def take_up(tx: Tx) -> int:
    """Take up what has no job, as the sweeper does (worker.sweep.unowned)."""
    job_id = f"emb-{secrets.token_hex(8)}"
    if not items.has_unowned(tx) or not (adopted := items.adopt(tx, job_id)):
        return 0
    jobs.insert(tx, NewJob(job_id, "sql"))
    jobs.count_now(tx)
    return adopted


def by_id(tx: Tx, *names: str) -> dict[int, tuple[Any, ...]]:
    found = tx.execute("SELECT * FROM public.embedding_retry_queue ORDER BY id")
    return {row["id"]: tuple(row[name] for name in names) for row in found}


def only_job(tx: Tx) -> str:
    (job,) = jobs.page(tx, jobs.JobFilter(), limit=10)
    assert (job.client, job.kind) == ("sql", "embedding")
    return job.id


def test_an_old_table_has_in_the_end_the_columns_and_rules_of_a_new_one(
    tx: Tx, shared_database_url: str
) -> None:
    def facts(connection: Tx) -> list[set[tuple[object, ...]]]:
        names = ("column_name", "data_type", "is_nullable", "is_identity")
        return [
            {
                tuple(each[name] for name in wanted)
                for each in connection.execute(query)
                if each[table] == "embedding_retry_queue"
            }
            for query, table, wanted in (
                (COLUMNS, "table_name", names),
                (CONSTRAINTS, "the_table", ("conname", "definition")),
                (TRIGGERS, "the_table", ("tgname", "definition")),
                (INDEXES, "tablename", ("indexdef",)),
            )
        ]

    with rows.open_database(shared_database_url) as new, new.session() as other:
        assert facts(tx) == facts(other)


def test_an_upgrade_keeps_every_row_and_lets_none_be_stuck(tx: Tx) -> None:
    assert by_id(tx, "target_id", "status", "attempts", "max_attempts") == {
        1: ("101", "done", 1, 5),
        2: ("102", "done", 1, 5),
        3: ("103", "failed", 5, 6),
        4: ("104", "pending", 0, 5),
        5: ("105", "pending", 3, 5),
        6: ("106", "pending", 1, 5),
        7: ("107", "pending", 5, 6),
        8: ("107", "pending", 0, 5),
        9: ("9", "pending", 0, 5),
        10: ("9", "pending", 0, 5),
        11: ("11", "pending", 1, 5),
        12: ("11", "done", 1, 5),
        13: ("13", "pending", 0, 5),
        2147483646: ("2147483647", "pending", 0, 5),
        2147483647: ("-2147483648", "pending", 0, 5),
    }
    errors = by_id(tx, "error_class", "last_error", "model")
    assert errors[3] == ("unclear", "connection refused", "bge-m3:latest")
    assert errors[8] == (None, None, "bge-m3:latest")
    times = by_id(tx, "created_at", "updated_at", "processed_at")
    assert [number for number, each in times.items() if each[2]] == [1, 2, 12]
    assert all(each[0] and each[1] for each in times.values())
    hashed = tx.execute(
        "SELECT bool_and(content_hash = sha256(convert_to(text_content, 'UTF8'))) AS right"
        "  FROM public.embedding_retry_queue"
    ).fetchone()
    assert hashed == {"right": True}


def test_ids_go_on_beyond_32_bits(tx: Tx) -> None:
    row = tx.execute(
        "INSERT INTO embedding_retry_queue (target_table, target_id, text_content)"
        " VALUES ('ai_insights', 3000000000, 'a') RETURNING id"
    ).fetchone()

    assert row == {"id": 2**31}


def test_until_its_target_is_registered_a_row_is_left_alone(tx: Tx) -> None:
    before = by_id(tx, "status", "job_id", "embedding_version")

    assert take_up(tx) == 0

    assert by_id(tx, "status", "job_id", "embedding_version") == before
    assert jobs.page(tx, jobs.JobFilter(), limit=10) == []


@pytest.mark.usefixtures("_registered")
def test_registered_rows_are_taken_up_as_one_job_and_reach_their_end(tx: Tx) -> None:
    assert take_up(tx) == 12
    assert take_up(tx) == 0

    job_id = only_job(tx)
    assert rows.counts(tx, job_id) == Counts(pending=8, done=3, failed=1)
    assert rows.counts(tx, job_id) == rows.recounted(tx, job_id)
    replaced = by_id(tx, "status", "job_id", "last_error")
    for old in (9, 11):
        assert replaced[old] == ("cancelled", None, "replaced by a newer row for the same target")
    assert replaced[13][:2] == ("pending", None)
    assert {each for (each,) in by_id(tx, "model").values()} == {MODEL}

    claims = rows.claim(tx, job_id)
    assert {each.item_id: (each.attempts, each.max_attempts) for each in claims} == {
        4: (1, 5),
        5: (4, 5),
        6: (2, 5),
        7: (6, 6),
        8: (1, 5),
        10: (1, 5),
        2147483646: (1, 5),
        2147483647: (1, 5),
    }
    assert {each.text for each in claims if each.target_table == "conversations"} == {
        "nothing known",
        "new text",
    }
    rows.settle(tx, claims)
    assert rows.finish(tx, job_id)
    assert rows.counts(tx, job_id) == Counts(done=11, failed=1)


@pytest.mark.usefixtures("_registered")
def test_code_that_goes_on_inserting_as_before_is_served_too(tx: Tx) -> None:
    take_up(tx)
    first = only_job(tx)
    rows.work(tx, first)
    rows.finish(tx, first)

    def insert(target_id: int, text: str) -> None:
        tx.execute(
            "INSERT INTO embedding_retry_queue (target_table, target_id, text_content, model,"
            " created_at) VALUES ('ai_insights', %(id)s, %(text)s, 'bge-m3:latest', NOW())",
            {"id": target_id, "text": text},
        )

    insert(500, "new")
    insert(104, "a newer text")
    insert(105, "has been tried")
    assert take_up(tx) == 2
    assert take_up(tx) == 0

    (second,) = {each.id for each in jobs.page(tx, jobs.JobFilter(), limit=9)} - {first}
    claims = rows.claim(tx, second)
    assert {each.target_id: each.text for each in claims} == {"500": "new", "104": "a newer text"}
    rows.settle(tx, claims)
    assert rows.finish(tx, second)
    assert rows.stranded(tx) == []


@pytest.mark.usefixtures("_registered")
def test_a_row_that_brings_nothing_new_makes_no_job(tx: Tx) -> None:
    take_up(tx)

    tx.execute(
        "INSERT INTO embedding_retry_queue (target_table, target_id, text_content)"
        " VALUES ('ai_insights', 104, 'waits')"
    )

    assert take_up(tx) == 0
    only_job(tx)
    left = tx.execute("SELECT count(*) AS jobs FROM holdfast.job_counts").fetchone()
    assert left == {"jobs": 1}


@pytest.mark.usefixtures("_registered")
def test_a_row_for_what_was_cancelled_or_skipped_is_taken_up_with_the_same_text(tx: Tx) -> None:
    rows.submit(tx, "emb-1", {"700": "a"})
    rows.work(tx, "emb-1", rows.SKIPPED)
    rows.submit(tx, "emb-2", {"701": "a"})
    jobs.cancel(tx, "emb-2")
    items.cancel(tx, "emb-2")
    take_up(tx)
    before = {each.id for each in jobs.page(tx, jobs.JobFilter(), limit=9)}

    for target_id in (700, 701):
        tx.execute(
            "INSERT INTO embedding_retry_queue (target_table, target_id, text_content)"
            " VALUES ('ai_insights', %(id)s, 'a')",
            {"id": target_id},
        )
    assert take_up(tx) == 2

    (job_id,) = {each.id for each in jobs.page(tx, jobs.JobFilter(), limit=9)} - before
    assert rows.counts(tx, job_id) == Counts(pending=2)


@pytest.mark.usefixtures("_registered")
def test_a_row_that_was_replaced_once_is_not_taken_up_after_its_successor_is_gone(tx: Tx) -> None:
    take_up(tx)
    first = only_job(tx)
    rows.work(tx, first)
    tx.execute("DELETE FROM embedding_retry_queue WHERE id IN (10, 12)")
    tx.execute(
        "INSERT INTO embedding_retry_queue (target_table, target_id, text_content)"
        " VALUES ('conversations', 500, 'a')"
    )

    assert take_up(tx) == 1

    (job_id,) = {each.id for each in jobs.page(tx, jobs.JobFilter(), limit=9)} - {first}
    assert rows.counts(tx, job_id) == Counts(pending=1)


def test_the_old_worker_is_stopped_by_the_schema(tx: Tx) -> None:
    with pytest.raises(psycopg.errors.CheckViolation):
        tx.execute("UPDATE embedding_retry_queue SET status = 'processing' WHERE id = 4")


@pytest.mark.usefixtures("_registered")
def test_an_adopted_item_goes_through_the_same_states_as_any_other(tx: Tx) -> None:
    take_up(tx)
    job_id = only_job(tx)

    for _ in range(5):
        rows.make_due(tx)
        claims = rows.claim(tx, job_id, limit=1)
        last = [each for each in claims if each.attempts >= each.max_attempts]
        rows.settle(tx, claims, rows.FAILED if last else RETRIED)

    assert rows.counts(tx, job_id) == rows.recounted(tx, job_id)
    with tx.transaction():
        items.revive(tx, job_id)
    assert rows.row(tx, "103", table=TABLE)["status"] == "pending"
