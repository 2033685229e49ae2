"""A stand-in for python-oracledb: canned rows, and a refusal of what Oracle would make slow.

It stands in `sys.modules` in the place of the package, and has of it what the adapter uses. What
Oracle refuses comes as its error; what it would only suffer from (another text for the same
question, fetches of a few rows, binds of other sizes, cursors left open) ends the test.
"""

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import datetime
from itertools import islice
from typing import Any, Self

LIST_LIMIT = 1000
FETCH_ROWS = 5000
IN_LIST = re.compile(r"\bIN\s*\(([^)]*)\)", re.IGNORECASE)
BIND = re.compile(r"'[^']*'|:(\w+)")
RECOVERABLE = frozenset({"DPY-4011", "ORA-01033"})
DEAD = frozenset({"DPY-4011", "DPY-4024"})
"""After these a session is of no use; of a timeout that is no rule, but it may be so."""


class Refused(AssertionError):
    """The adapter did what it never should."""


class Error(Exception):
    """What the driver raises, its first argument saying what happened."""


class DatabaseError(Error):
    """The class of nearly all of it."""


@dataclass(frozen=True, slots=True)
class Said:
    """What an error says of itself."""

    full_code: str
    isrecoverable: bool
    message: str


def error(code: str) -> DatabaseError:
    """Make the error of a code; its text holds what must not get out."""
    message = f"{code}: table HR.SECRET on host db.plant.example, user scott, id 'lot-1'"
    return DatabaseError(Said(code, code in RECOVERABLE, message))


@dataclass(frozen=True, slots=True)
class DbType:
    """A type of a column or a bind."""

    name: str


@dataclass(frozen=True, slots=True)
class Var:
    """A bind's type and size."""

    type: DbType
    size: int


@dataclass
class Table:
    """A view with its rows in the order of delivery; the first column is what IN asks for."""

    columns: Sequence[tuple[str, DbType]]
    rows: Sequence[Sequence[Any]]


@dataclass
class OracleStandIn:
    """The module."""

    tables: dict[str, Table] = field(default_factory=dict)
    executed: list[str] = field(default_factory=list)
    bound: list[Mapping[str, Any]] = field(default_factory=list)
    pools: "list[Pool]" = field(default_factory=list)
    sizes: dict[str, Mapping[str, Var | DbType]] = field(default_factory=dict)
    before: Callable[[str], None] | None = None
    """Called before each round trip with its name: acquire, execute or fetch."""

    Error = Error
    DatabaseError = DatabaseError
    POOL_GETMODE_TIMEDWAIT = 3
    DB_TYPE_CHAR = DbType("DB_TYPE_CHAR")
    DB_TYPE_TIMESTAMP = DbType("DB_TYPE_TIMESTAMP")

    def create_pool(self, **options: Any) -> "Pool":  # noqa: ANN401
        """Make a pool; no connection is made yet."""
        assert options["min"] == 1
        assert options["getmode"] == self.POOL_GETMODE_TIMEDWAIT
        assert options["wait_timeout"] > 0
        self.pools.append(Pool(self, options))
        return self.pools[-1]

    @contextmanager
    def failing(self, code: str, *, at: str, after: int = 0) -> Iterator[None]:
        """Let one round trip of a kind fail, behind some that do not."""
        left = after

        def fail(name: str) -> None:
            nonlocal left
            if name != at:
                return
            left -= 1
            if left == -1:
                raise error(code)

        self.before = fail
        yield
        self.before = None

    @property
    def connections(self) -> "list[Connection]":
        """Those that are lent now."""
        return [each for pool in self.pools for each in pool.lent]

    @property
    def is_quiet(self) -> bool:
        """Whether nobody holds a connection or a cursor."""
        return not self.connections

    def trip(self, name: str) -> None:
        """Go to the server and come back, or not."""
        if self.before:
            self.before(name)


@dataclass
class Pool:
    """Connections, a few at most."""

    driver: OracleStandIn
    options: Mapping[str, Any]
    lent: "list[Connection]" = field(default_factory=list)
    idle: "list[Connection]" = field(default_factory=list)
    dropped: int = 0
    is_closed: bool = False

    @property
    def busy(self) -> int:
        """How many connections are lent."""
        return len(self.lent)

    def acquire(self) -> "Connection":
        """Lend a connection."""
        self.driver.trip("acquire")
        if len(self.lent) == self.options["max"]:
            raise error("DPY-4005")
        connection = self.idle.pop() if self.idle else self._connect()
        self.lent.append(connection)
        return connection

    def _connect(self) -> "Connection":
        connection = Connection(self)
        self.options["session_callback"](connection, None)
        return connection

    def drop(self, connection: "Connection") -> None:
        """Throw a connection away."""
        connection.check_cursors()
        self.lent.remove(connection)
        self.dropped += 1

    def close(self, force: bool = False) -> None:  # noqa: FBT001, FBT002 - the driver's own
        """Close all connections."""
        assert force or not self.lent
        self.is_closed = True


@dataclass(eq=False)
class Connection:
    """A session."""

    pool: Pool
    call_timeout: int = 0
    is_dead: bool = False
    cursors: "set[Cursor]" = field(default_factory=set)

    def cursor(self) -> "Cursor":
        """Open a cursor."""
        made = Cursor(self)
        self.cursors.add(made)
        return made

    def close(self) -> None:
        """Give it back to the pool."""
        self.check_cursors()
        self.pool.lent.remove(self)
        if not self.is_dead:
            self.pool.idle.append(self)

    def check_cursors(self) -> None:
        """Refuse to be given back with a cursor open."""
        if self.cursors:
            raise Refused("a cursor was left open")

    def trip(self, name: str) -> None:
        """Go to the server and come back within the call timeout."""
        if not self.call_timeout:
            raise Refused(f"{name} without a call timeout")
        if self.is_dead:
            raise error("DPY-1001")
        try:
            self.pool.driver.trip(name)
        except DatabaseError as exc:
            self.is_dead = exc.args[0].full_code in DEAD
            raise


@dataclass(eq=False)
class Cursor:
    """One statement and its rows."""

    connection: Connection
    arraysize: int = 100
    prefetchrows: int = 2
    rowcount: int = 0
    description: list[tuple[str, DbType]] | None = None
    _rows: Iterator[Sequence[Any]] = field(default_factory=lambda: iter(()))
    _sizes: Mapping[str, Var | DbType] = field(default_factory=dict)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def var(self, typ: DbType, *, size: int) -> Var:
        """Make a bind of a fixed size."""
        return Var(typ, size)

    def setinputsizes(self, **sizes: Var | DbType) -> None:
        """Say what the binds are."""
        self._sizes = sizes

    def execute(
        self,
        statement: str,
        parameters: Mapping[str, Any] | None = None,
        *,
        fetch_lobs: bool = True,
        fetch_decimals: bool = False,
    ) -> None:
        """Carry a statement out."""
        driver, values = self.connection.pool.driver, parameters or {}
        self.connection.trip("execute")
        driver.executed.append(statement)
        if statement.startswith("ALTER SESSION SET NLS"):
            return
        if not statement.startswith("SELECT"):
            raise error("ORA-01031")
        assert not fetch_lobs
        assert fetch_decimals
        self._check(statement, values)
        driver.bound.append(values)
        table = self._table(statement)
        self.description = list(table.columns)
        self._rows = self._found(statement, table, values)

    def fetchmany(self, size: int) -> list[Sequence[Any]]:
        """Return the next rows."""
        if size > self.arraysize:
            raise Refused("more rows in one fetch than in one round trip")
        self.connection.trip("fetch")
        rows = list(islice(self._rows, size))
        self.rowcount += len(rows)
        return rows

    def close(self) -> None:
        """Close it; twice is once."""
        self.connection.cursors.discard(self)

    def _check(self, statement: str, values: Mapping[str, Any]) -> None:
        names = {found[1] for found in BIND.finditer(statement) if found[1]}
        if names != set(values):
            raise error("DPY-4008")
        if any(listed.count(",") >= LIST_LIMIT for listed in IN_LIST.findall(statement)):
            raise error("ORA-01795")
        if self.arraysize != FETCH_ROWS:
            raise Refused(f"arraysize is {self.arraysize} when the statement is executed")
        if set(self._sizes) != names:
            raise Refused("binds whose size was not said")
        known = self.connection.pool.driver.sizes.setdefault(self._view(statement), self._sizes)
        if known != self._sizes:
            raise Refused("other sizes for the same statement")
        for text in self.connection.pool.driver.executed:
            if self._view(text) == self._view(statement) and text != statement:
                raise Refused("another text for the same question")

    def _found(
        self, statement: str, table: Table, values: Mapping[str, Any]
    ) -> Iterator[Sequence[Any]]:
        names = [
            found[1] for listed in IN_LIST.findall(statement) for found in BIND.finditer(listed)
        ]
        wanted = {values[name] for name in names} - {None}
        # CHAR is compared without the blanks at its end; had the binds been VARCHAR, it were not.
        is_padded = table.columns[0][1] is OracleStandIn.DB_TYPE_CHAR
        for row in table.rows:
            if (row[0].rstrip(" ") if is_padded else row[0]) in wanted:
                yield [value(values) if callable(value) else value for value in row]

    def _table(self, statement: str) -> Table:
        try:
            return self.connection.pool.driver.tables[self._view(statement)]
        except KeyError:
            raise error("ORA-00942") from None

    @staticmethod
    def _view(statement: str) -> str:
        found = re.search(r"\bFROM (\w+)", statement)
        return found[1] if found else ""


def naive(value: datetime, zone: Any) -> datetime:  # noqa: ANN401
    """Return a time as a DATE column holds it: on the wall of a plant."""
    return value.astimezone(zone).replace(tzinfo=None)
