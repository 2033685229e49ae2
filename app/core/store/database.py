"""How Postgres is reached: the pool, transactions, time limits, and its errors made ours."""

from collections.abc import Generator
from contextlib import contextmanager
from typing import Any, cast

import psycopg
from psycopg import errors as pg
from psycopg.abc import RV, PQGen
from psycopg.conninfo import conninfo_to_dict
from psycopg.pq import TransactionStatus
from psycopg.rows import DictRow, TupleRow, dict_row
from psycopg_pool import ConnectionPool, PoolClosed, PoolTimeout

from app.core.errors import StoreUnavailable

Tx = psycopg.Connection[DictRow]
"""A connection with a transaction open on it. Functions of the store take it first."""

STATEMENT_SECONDS = 30
ANSWER_SECONDS = STATEMENT_SECONDS + 5
"""The server ends a statement before that; one that says nothing for so long hangs."""

LOOK_SECONDS = 3
"""How long a connection that rested may take to say that it lives."""

LONG_SECONDS = 900
LONG_LIMIT = "SET LOCAL statement_timeout = '900s'"
LOCK_SECONDS = 10
IDLE_SECONDS = 60
CONNECT_SECONDS = 5
POOL_SECONDS = 3
WAIT_SECONDS = 0.1

# What says "not now" rather than "never": the caller may send the same again later.
PASSING = (
    psycopg.OperationalError,
    psycopg.InterfaceError,
    pg.QueryCanceled,
    pg.LockNotAvailable,
    pg.DeadlockDetected,
    pg.SerializationFailure,
    pg.InsufficientResources,
    pg.ReadOnlySqlTransaction,
    pg.IdleInTransactionSessionTimeout,
    pg.TransactionTimeout,
    PoolTimeout,
    PoolClosed,
)

UNMIGRATED = (pg.UndefinedTable, pg.UndefinedColumn, pg.UndefinedFunction, pg.InvalidSchemaName)


def _options(url: str, application: str) -> dict[str, Any]:
    limits = {
        "statement_timeout": STATEMENT_SECONDS * 1000,
        "lock_timeout": LOCK_SECONDS * 1000,
        "idle_in_transaction_session_timeout": IDLE_SECONDS * 1000,
        "jit": "off",  # compiling costs more than any statement of ours takes
        # Statements that wait for a row look again at what was committed meanwhile.
        "default_transaction_isolation": r"read\ committed",
        "timezone": "UTC",
    }
    theirs = str(conninfo_to_dict(url).get("options") or "")
    return {
        # Behind those of the URL, such as a search_path, which would be lost otherwise.
        "options": " ".join([theirs, *(f"-c {name}={value}" for name, value in limits.items())]),
        "application_name": application,
        "connect_timeout": CONNECT_SECONDS,
        # A library that talks to Kerberos does not survive a fork.
        "gssencmode": "disable",
        "keepalives_idle": 10,
        "keepalives_interval": 5,
        "keepalives_count": 3,
    }


class Connection(psycopg.Connection[DictRow]):
    """A connection that waits for no answer for ever: a server can hang, and a cable be cut."""

    answer_seconds: float = ANSWER_SECONDS

    def wait(
        self, gen: PQGen[RV], interval: float = WAIT_SECONDS, timeout: float | None = None
    ) -> RV:
        """Wait for what the server says; one that hangs is left, and OperationalError raised."""
        if timeout is not None:  # for a notice, which need not come
            return super().wait(gen, interval, timeout)
        try:
            return super().wait(gen, interval, self.answer_seconds)
        except psycopg.OperationalError as exc:
            if self.pgconn.transaction_status != TransactionStatus.ACTIVE:
                raise
            self.close()
            message = f"no answer within {self.answer_seconds:g} s"
            raise psycopg.OperationalError(message) from exc


def take_time(tx: Tx) -> None:
    """Let the statements of this transaction take longer: what touches every item of a job.

    A million items are merged in one statement of about a minute.
    """
    tx.execute(LONG_LIMIT)
    if isinstance(tx, Connection):
        tx.answer_seconds = LONG_SECONDS + 5


class Database:
    """A pool of connections, opened at the first use and never before a fork."""

    def __init__(self, url: str, *, application: str, most_connections: int = 4) -> None:
        self._url = url
        self._application = application
        self._pool = ConnectionPool[Connection](
            url,
            connection_class=Connection,
            kwargs={"row_factory": dict_row, "autocommit": True, **_options(url, application)},
            min_size=0,
            max_size=most_connections,
            timeout=POOL_SECONDS,
            reconnect_timeout=0,
            num_workers=1,
            check=_check,
            open=False,
        )

    @contextmanager
    def transaction(self, *, answer_seconds: float = ANSWER_SECONDS) -> Generator[Tx]:
        """Open one transaction: commit at the end, roll back on an error.

        Raises StoreUnavailable where Postgres cannot answer now, or not within `answer_seconds`.
        """
        with self.session(answer_seconds=answer_seconds) as connection, connection.transaction():
            yield connection

    @contextmanager
    def session(self, *, answer_seconds: float = ANSWER_SECONDS) -> Generator[Tx]:
        """Lend a connection in autocommit mode, for the few things that span transactions."""
        with translated():
            if self._pool.closed:
                self._pool.open()
            with self._pool.connection() as connection:
                connection.answer_seconds = answer_seconds
                yield connection

    def dedicated(self) -> Tx:
        """Open a connection outside the pool, in autocommit mode; the caller closes it."""
        with translated():
            return Connection.connect(
                self._url,
                row_factory=dict_row,
                autocommit=True,
                **_options(self._url, self._application),
            )

    def close(self) -> None:
        """Close every connection."""
        self._pool.close()


@contextmanager
def translated() -> Generator[None]:
    """Turn what says "not now" into StoreUnavailable; everything else is a fault of ours."""
    try:
        yield
    except UNMIGRATED as exc:
        message = f"the schema is not this version's; run python -m migrations ({_name(exc)})"
        raise StoreUnavailable(message) from exc
    except pg.InsufficientPrivilege as exc:
        message = (
            "the role lacks a right; run python -m migrations as the owner, and see"
            f" python -m worker targets list ({exc.diag.message_primary})"
        )
        raise StoreUnavailable(message) from exc
    except PASSING as exc:
        raise StoreUnavailable(f"Postgres cannot answer now ({_name(exc)})") from exc


def _check(connection: Connection) -> None:
    connection.answer_seconds = LOOK_SECONDS
    # Its signature names rows as tuples; it reads none.
    ConnectionPool.check_connection(cast("psycopg.Connection[TupleRow]", connection))


def _name(exc: Exception) -> str:
    # The text of a connection error may hold the host and the user, so only its kind goes on.
    state = getattr(exc, "sqlstate", None)
    return f"{type(exc).__name__} {state}" if state else type(exc).__name__
