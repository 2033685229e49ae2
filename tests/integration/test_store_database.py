import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from threading import Event
from urllib.parse import quote

import psycopg
import pytest

from app.core.errors import StoreUnavailable
from app.core.store import database as database_module
from app.core.store import fleet
from app.core.store.database import Connection, Database, Tx, take_time
from tests import rows
from tests.conftest import free_port
from tests.faults.proxy import Wire
from tests.processes import wait_for


@pytest.fixture
def database(shared_database_url: str) -> Iterator[Database]:
    with rows.open_database(shared_database_url, most_connections=3) as database:
        yield database


@pytest.fixture
def tx(database: Database) -> Iterator[Tx]:
    with database.session() as connection:
        rows.empty(connection)
        yield connection


def setting(tx: Tx, name: str) -> object:
    row = tx.execute("SELECT current_setting(%(name)s) AS value", {"name": name}).fetchone()
    assert row
    return row["value"]


def connections(tx: Tx, application: str) -> int:
    row = tx.execute(
        "SELECT count(*) AS found FROM pg_stat_activity WHERE application_name = %(name)s",
        {"name": application},
    ).fetchone()
    assert row
    return int(row["found"])


INSERT = "INSERT INTO ai_insights (id, body) VALUES (%(id)s, 'a')"
COUNT = "SELECT count(*) AS found FROM ai_insights"


def fail(tx: Tx) -> None:
    """Change something, and then fail."""
    tx.execute(INSERT, {"id": 2})
    tx.execute("SELECT 1 / 0")


def test_a_transaction_is_kept_at_its_end_and_taken_back_where_it_fails(
    database: Database, tx: Tx
) -> None:
    with database.transaction() as kept:
        kept.execute(INSERT, {"id": 1})
        assert tx.execute(COUNT).fetchone() == {"found": 0}

    with pytest.raises(psycopg.errors.DivisionByZero), database.transaction() as lost:
        fail(lost)

    assert tx.execute(COUNT).fetchone() == {"found": 1}


def test_no_statement_lock_or_idle_transaction_lasts_for_ever(tx: Tx) -> None:
    limits = {
        name: setting(tx, name)
        for name in ("statement_timeout", "lock_timeout", "idle_in_transaction_session_timeout")
    }

    assert limits == {
        "statement_timeout": "30s",
        "lock_timeout": "10s",
        "idle_in_transaction_session_timeout": "1min",
    }
    assert setting(tx, "TimeZone") == "UTC"


def test_options_of_the_url_are_kept_beside_ours(shared_database_url: str) -> None:
    options = quote("-c search_path=holdfast,public -c statement_timeout=1")

    url = f"{shared_database_url}?options={options}"
    with rows.open_database(url) as database, database.session() as tx:
        assert setting(tx, "search_path") == "holdfast,public"
        assert setting(tx, "statement_timeout") == "30s"


def test_nothing_is_connected_before_the_first_use(shared_database_url: str, tx: Tx) -> None:
    unused = Database(shared_database_url, application="unused")

    assert connections(tx, "unused") == 0
    with unused.session():
        assert connections(tx, "unused") == 1
    unused.close()
    wait_for(lambda: connections(tx, "unused") == 0)


def test_a_database_made_before_a_fork_works_after_it(shared_database_url: str) -> None:
    with rows.open_database(shared_database_url) as database:
        child = os.fork()
        if not child:  # pragma: no cover - coverage does not follow os._exit
            with database.session() as tx:
                tx.execute("SELECT 1")
            os._exit(17)
        _, status = os.waitpid(child, 0)
        with database.session() as tx:
            tx.execute("SELECT 1")

    assert os.waitstatus_to_exitcode(status) == 17


@pytest.fixture
def _impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let pools that are made from now on give up soon."""
    monkeypatch.setattr(database_module, "POOL_SECONDS", 0.1)


@pytest.mark.usefixtures("_impatient")
def test_where_nobody_listens_it_says_so_without_the_password() -> None:
    url = f"postgresql://someone:hunter2@127.0.0.1:{free_port()}/db"
    with rows.open_database(url) as database:
        for reach in (database.session, database.transaction, database.dedicated):
            with pytest.raises(StoreUnavailable) as caught, reach():
                pytest.fail("there is nobody")
            assert "hunter2" not in caught.value.message
            assert "someone" not in caught.value.message


@pytest.mark.usefixtures("_impatient")
def test_where_all_connections_are_lent_it_says_so_in_time(shared_database_url: str) -> None:
    with (
        rows.open_database(shared_database_url, most_connections=1) as database,
        database.session(),
        pytest.raises(StoreUnavailable, match="PoolTimeout"),
        database.session(),
    ):
        pytest.fail("there is but one")


def test_a_connection_that_was_cut_is_replaced(database: Database, tx: Tx) -> None:
    def cut(connection: Tx) -> None:
        """End a connection as a server does that is restarted."""
        tx.execute("SELECT pg_terminate_backend(%(pid)s)", {"pid": connection.info.backend_pid})

    with database.session() as idle:
        idle.execute("SELECT 1")
    cut(idle)
    with database.session() as connection:
        connection.execute("SELECT 1")


@pytest.mark.parametrize(
    "statement",
    [
        "SET statement_timeout = 1; SELECT pg_sleep(10)",
        "SELECT * FROM holdfast.nothing",
        "SELECT holdfast.nothing()",
        "SELECT nothing FROM holdfast.jobs",
        "BEGIN READ ONLY; INSERT INTO ai_insights (id, body) VALUES (1, 'a')",
    ],
)
def test_what_may_be_otherwise_later_is_told_as_such(database: Database, statement: str) -> None:
    with pytest.raises(StoreUnavailable), database.session() as connection:
        connection.execute(statement.encode())


def test_a_lock_that_is_not_given_is_told_as_such(database: Database, tx: Tx) -> None:
    with tx.transaction():
        tx.execute("LOCK TABLE ai_insights")
        with pytest.raises(StoreUnavailable), database.session() as other:
            other.execute("SET lock_timeout = 1; LOCK TABLE ai_insights")


def test_of_two_that_wait_in_a_ring_one_is_told_to_come_again(database: Database, tx: Tx) -> None:
    tx.execute("INSERT INTO ai_insights (id, body) VALUES (1, 'a'), (2, 'b')")
    first_holds, second_holds = Event(), Event()

    def was_refused(target_ids: tuple[int, int], holds: Event, other_holds: Event) -> bool:
        try:
            with database.transaction() as connection:
                for target_id in target_ids:
                    connection.execute(CHANGE, {"id": target_id})
                    holds.set()
                    assert other_holds.wait(10)
        except StoreUnavailable:
            return True
        return False

    with ThreadPoolExecutor(2) as pool:
        first = pool.submit(was_refused, (1, 2), first_holds, second_holds)
        second = pool.submit(was_refused, (2, 1), second_holds, first_holds)

        assert sorted([first.result(30), second.result(30)]) == [False, True]


CHANGE = "UPDATE ai_insights SET body = 'c' WHERE id = %(id)s"


@pytest.mark.parametrize(
    ("statement", "error"),
    [
        ("SELECT 1 / 0", psycopg.errors.DivisionByZero),
        ("SELEC", psycopg.errors.SyntaxError),
        ("INSERT INTO ai_insights (id) VALUES (1)", psycopg.errors.NotNullViolation),
    ],
)
def test_a_fault_of_ours_stays_what_it_is(
    database: Database, statement: str, error: type[Exception]
) -> None:
    with pytest.raises(error), database.session() as connection:
        connection.execute(statement.encode())


def test_a_connection_is_clean_again_for_the_next_one(database: Database) -> None:
    with pytest.raises(psycopg.errors.DivisionByZero), database.transaction() as connection:
        connection.execute("SELECT 1 / 0")

    with database.session() as connection:
        assert connection.info.transaction_status == psycopg.pq.TransactionStatus.IDLE


def test_a_postgres_that_hangs_is_left_and_found_again(shared_database_url: str) -> None:
    with (
        Wire(shared_database_url) as wire,
        rows.open_database(wire.url, most_connections=2) as database,
    ):
        with database.session(answer_seconds=0.3) as connection:
            wire.go_dead()
            with pytest.raises(psycopg.OperationalError, match="no answer within"):
                connection.execute("SELECT 1")
            assert connection.closed
        wire.revive()
        with database.transaction() as tx:
            assert setting(tx, "jit") == "off"


def test_a_transaction_on_a_postgres_that_hangs_is_over(shared_database_url: str) -> None:
    with (
        Wire(shared_database_url) as wire,
        rows.open_database(wire.url, most_connections=2) as database,
    ):

        def change() -> None:
            with database.transaction(answer_seconds=0.3) as tx:
                tx.execute(INSERT, {"id": 77})
                wire.go_dead()
                tx.execute(COUNT)

        with pytest.raises(StoreUnavailable, match="cannot answer now"):
            change()
        wire.revive()
        with database.transaction() as again:
            query = "SELECT id FROM ai_insights WHERE id = 77"
            assert again.execute(query).fetchone() is None


def test_a_connection_that_died_while_it_rested_costs_a_look_and_no_request(
    shared_database_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(database_module, "LOOK_SECONDS", 0.2)
    monkeypatch.setattr(database_module, "POOL_SECONDS", 20)
    with (
        Wire(shared_database_url) as wire,
        rows.open_database(wire.url, most_connections=1) as database,
    ):
        with database.transaction() as tx:
            tx.execute("SELECT 1")
        wire.freeze_all()
        with database.transaction() as tx:
            tx.execute("SELECT 1")
        assert wire.taken == 2


def test_what_may_take_time_is_waited_for_as_long(database: Database) -> None:
    with database.session(answer_seconds=0.5) as connection, connection.transaction():
        take_time(connection)
        connection.execute("SELECT pg_sleep(1)")
        assert setting(connection, "statement_timeout") == "15min"
    with database.session() as connection:
        assert setting(connection, "statement_timeout") == "30s"
        assert isinstance(connection, Connection)
        assert connection.answer_seconds == database_module.ANSWER_SECONDS


def test_a_notice_may_be_waited_for_in_vain(tx: Tx) -> None:
    fleet.listen(tx)

    assert not fleet.wait_for_notice(tx, 0.1)
    assert not tx.closed
