"""Oracle, by python-oracledb in thin mode: the operator's SELECTs, a thousand ids at a time."""

import math
import re
import time
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import UTC, datetime, tzinfo
from decimal import Decimal
from pathlib import Path
from threading import Lock, Thread
from typing import Any
from urllib.parse import unquote, urlsplit
from zoneinfo import ZoneInfo

from app.adapters.queries import SETTING, mismatch, read_queries
from app.core.domains import Column, Domain, Kind, rows_of
from app.core.errors import ConfigError, ErrorClass, SourceFault
from app.core.ports import Lines, SourceOptions

# What looks like one in quotes and comments is none, such as the minutes of 'HH24:MI'.
PLACEHOLDER = re.compile(r"'[^']*'|\"[^\"]*\"|--[^\n]*|/\*.*?\*/|:(\w+)", re.DOTALL)
IDS = 1000
"""So many at most go into an IN. It always gets as many: one text has one plan and one cursor."""
NAMES = tuple(f"i{number}" for number in range(IDS))
ID_CHARACTERS = 64
ROWS = 5000
BYTES = 4 * 2**20
"""What one Lines holds at most, but for a row that alone is larger."""
MOST_CONNECTIONS = 4
POOL_SECONDS = 5
PING_SECONDS = 1
LEAST_CONNECT_SECONDS = POOL_SECONDS + PING_SECONDS
CLOSE_SECONDS = 2
KEEPALIVE_MINUTES = 1
RETRY_SECONDS = 10
PORT = 1521

TYPES: Mapping[Kind, tuple[str, ...]] = {
    Kind.TEXT: (
        *("DB_TYPE_VARCHAR", "DB_TYPE_NVARCHAR", "DB_TYPE_CHAR", "DB_TYPE_NCHAR"),
        *("DB_TYPE_CLOB", "DB_TYPE_NCLOB", "DB_TYPE_LONG"),
    ),
    Kind.INTEGER: ("DB_TYPE_NUMBER",),
    Kind.NUMBER: ("DB_TYPE_NUMBER", "DB_TYPE_BINARY_DOUBLE", "DB_TYPE_BINARY_FLOAT"),
    # The driver drops the zone of those that have one, so that nobody could tell what they mean.
    Kind.TIMESTAMP: ("DB_TYPE_DATE", "DB_TYPE_TIMESTAMP"),
}
PADDED = frozenset({"DB_TYPE_CHAR", "DB_TYPE_NCHAR"})
NONE_FREE = "DPY-4005"
TIMED_OUT = frozenset(
    {
        "DPY-4024",  # the call timeout
        "ORA-01013",  # cancelled, as a person does to whom it is too slow
        "ORA-00040",  # ended by a limit of the resource manager
        "ORA-01555",  # older than what the server keeps: it read too long
    }
)
PASSING = frozenset(
    {
        *(NONE_FREE, "DPY-1001", "DPY-4011", "DPY-6000", "DPY-6001", "DPY-6005"),
        *("ORA-00018", "ORA-00020", "ORA-02391", "ORA-12516", "ORA-12519", "ORA-12520"),
        *("ORA-01033", "ORA-01034", "ORA-01035", "ORA-01090", "ORA-12514", "ORA-12528"),
    }
)
"""What says "not now": away, starting, stopping, no session free; and all that is recoverable."""

Convert = Callable[[Any], Any]


@dataclass(frozen=True, slots=True)
class _Place:
    user: str
    password: str
    host: str
    port: int
    service: str


@dataclass(frozen=True, slots=True)
class _Statement:
    text: str
    asks_as_of: bool


@dataclass(frozen=True, slots=True)
class _Setup:
    driver: Any
    place: _Place
    statements: Mapping[str, _Statement]
    zone: tzinfo
    statement_seconds: float


class Oracle:
    """An Oracle that is only read: its account may do no more, and the file holds only SELECTs."""

    name = "oracle"
    ids_per_statement = IDS

    def __init__(self, setup: _Setup) -> None:
        self._setup = setup
        self._pool: Any = None
        self._lock = Lock()

    def domains(self) -> frozenset[str]:
        """Return the domains that have a SELECT."""
        return frozenset(self._setup.statements)

    @contextmanager
    def open(self) -> Generator["_Reader"]:
        """Lend a connection of the pool; raises SourceFault."""
        reader = _Reader(self._setup, self._acquire)
        try:
            reader.connect(math.inf)
            yield reader
        finally:
            reader.release()

    def close(self) -> None:
        """Close the pool."""
        with self._lock:
            pool, self._pool = self._pool, None
        if pool is not None:
            _close_pool(self._setup.driver, pool, CLOSE_SECONDS)

    def _acquire(self) -> "_Lent":
        pool = self._opened_pool()
        try:
            return _Lent(pool, pool.acquire())
        except self._setup.driver.Error as exc:
            if _code(exc) == NONE_FREE and not pool.busy:
                self._forget(pool)
            raise

    def _opened_pool(self) -> Any:  # noqa: ANN401 - the driver is optional, and so are its types
        with self._lock:
            if self._pool is None:  # not before: its thread would not survive a fork
                self._pool = _make_pool(self._setup.driver, self._setup.place)
            return self._pool

    def _forget(self, pool: Any) -> None:  # noqa: ANN401
        """Give up a pool whose one thread waits for a server that has fallen silent, maybe ever."""
        with self._lock:
            if self._pool is pool:
                self._pool = None
        _close_pool(self._setup.driver, pool, 0)


@dataclass(frozen=True, slots=True)
class _Lent:
    pool: Any
    connection: Any


class _Reader:
    """One connection of the pool, another one after a statement that did not come to its end."""

    def __init__(self, setup: _Setup, acquire: Callable[[], _Lent]) -> None:
        self._setup = setup
        self._acquire = acquire
        self._lent: _Lent | None = None

    def connect(self, deadline: float) -> Any:  # noqa: ANN401
        """Return the connection."""
        with _translated(self._setup.driver, deadline):
            if self._lent is None:
                if deadline - time.monotonic() < LEAST_CONNECT_SECONDS:
                    message = "no time was left to connect to the source"
                    raise SourceFault(ErrorClass.SOURCE_TIMEOUT, message)
                self._lent = self._acquire()
            return self._lent.connection

    def release(self) -> None:
        """Give the connection back to the pool."""
        lent, self._lent = self._lent, None
        if lent is not None:
            with suppress(self._setup.driver.Error):
                lent.connection.close()

    def events(
        self, domain: Domain, ids: Sequence[str], *, as_of: datetime, deadline: float
    ) -> Generator[Lines, None, int]:
        """Yield the rows as they are fetched, and return the driver's count of them."""
        if domain.name not in self._setup.statements:
            message = f"the source has no SELECT for the domain {domain.name}"
            raise SourceFault(ErrorClass.SOURCE_FAILED, message)
        if not ids:
            return 0
        until = min(deadline, time.monotonic() + self._setup.statement_seconds)
        is_complete = False
        try:
            with _translated(self._setup.driver, until):
                call = _Call(self._setup, self.connect(until), domain, until)
                sent = yield from call.rows(ids, as_of)
            is_complete = True
        finally:
            if not is_complete:
                self._give_up()
        return sent

    def _give_up(self) -> None:
        """Throw the connection away: nothing else ends at once what the server does for it."""
        lent, self._lent = self._lent, None
        if lent is not None:
            with suppress(self._setup.driver.Error):
                lent.pool.drop(lent.connection)


class _Call:
    """A statement on a connection until its deadline."""

    def __init__(self, setup: _Setup, connection: Any, domain: Domain, deadline: float) -> None:  # noqa: ANN401
        self._driver = setup.driver
        self._zone = setup.zone
        self._statement = setup.statements[domain.name]
        self._connection = connection
        self._domain = domain
        self._deadline = deadline

    def rows(self, ids: Sequence[str], as_of: datetime) -> Generator[Lines, None, int]:
        """Yield the rows of these ids; return how many came, as the driver has counted them."""
        cursor = self._connection.cursor()
        try:
            self._execute(cursor, self._binds(ids, as_of))
            found = [(item[0].lower(), item[1].name) for item in cursor.description]
            if wrong := mismatch(self._domain, found, TYPES):
                message = f"the SELECT for {self._domain.name}: {wrong}"
                raise SourceFault(ErrorClass.SOURCE_FAILED, message)
            pairs = zip(self._domain.columns, found, strict=True)
            converts = [_converter(column, kind, self._zone) for column, (_, kind) in pairs]
            while blocks := self._fetch(cursor, converts):
                for block in blocks:
                    self._limit()
                    yield block
            return int(cursor.rowcount)
        finally:
            with suppress(self._driver.Error):
                cursor.close()

    def _binds(self, ids: Sequence[str], as_of: datetime) -> dict[str, Any]:
        padded = [*ids, *[None] * (IDS - len(ids))]
        binds: dict[str, Any] = dict(zip(NAMES, padded, strict=True))
        if self._statement.asks_as_of:
            # Without its zone: what it is compared with has none either.
            binds["as_of"] = as_of.astimezone(self._zone).replace(tzinfo=None)
        return binds

    def _execute(self, cursor: Any, binds: Mapping[str, Any]) -> None:  # noqa: ANN401
        # Before the statement is executed: behind it a fetch would be many round trips.
        cursor.arraysize = cursor.prefetchrows = ROWS
        # As CHAR an id is the same in a padded column and in another. All of one size: the server
        # has a cursor for each combination of sizes that it meets.
        id_type = self._driver.DB_TYPE_CHAR
        sizes = {name: cursor.var(id_type, size=ID_CHARACTERS) for name in NAMES}
        if "as_of" in binds:
            sizes["as_of"] = self._driver.DB_TYPE_TIMESTAMP
        cursor.setinputsizes(**sizes)
        self._limit()
        cursor.execute(self._statement.text, binds, fetch_lobs=False, fetch_decimals=True)

    def _fetch(self, cursor: Any, converts: Sequence[Convert]) -> list[Lines]:  # noqa: ANN401
        self._limit()
        try:
            rows = [
                [
                    None if value is None else convert(value)
                    for convert, value in zip(converts, row, strict=True)
                ]
                for row in cursor.fetchmany(ROWS)
            ]
            return list(_lines(self._domain, rows)) if rows else []
        except (TypeError, ValueError, ArithmeticError) as exc:
            # Not as the cause: its text may quote the value.
            message = f"a value is not of the kind of its column ({type(exc).__name__})"
            raise SourceFault(ErrorClass.SOURCE_FAILED, message) from None

    def _limit(self) -> None:
        """Let the next round trip end by the deadline: the driver limits one, not a statement."""
        seconds = self._deadline - time.monotonic()
        if seconds <= 0:
            raise SourceFault(ErrorClass.SOURCE_TIMEOUT, "the source took too long")
        self._connection.call_timeout = max(1, int(seconds * 1000))


def build(options: SourceOptions) -> Oracle:
    """Make the source; nothing is opened yet. Raises ConfigError."""
    faults = list[str]()
    driver = _driver(faults)
    place = _place(options.url, faults)
    statements, zone = _read(options.queries, faults)
    if faults or place is None:
        raise ConfigError(faults)
    return Oracle(_Setup(driver, place, statements, zone, options.statement_seconds))


def _driver(faults: list[str]) -> Any:  # noqa: ANN401
    try:
        import oracledb
    except ImportError:
        faults.append("TRACE_SOURCE=oracle needs the package oracledb")
        return None
    return oracledb


def _place(url: str, faults: list[str]) -> _Place | None:
    try:
        parts = urlsplit(url)
        port = parts.port or PORT
    except ValueError:
        parts, port = urlsplit(""), PORT
    names = (parts.username, parts.password, parts.hostname, parts.path[1:])
    user, password, host, service = (unquote(name or "") for name in names)
    if parts.scheme != "oracle" or not all((user, password, host, service)):
        faults.append("TRACE_SOURCE_URL: must be oracle://user:password@host:port/service")
        return None
    return _Place(user, password, host, port, service)


def _read(queries: str, faults: list[str]) -> tuple[dict[str, _Statement], tzinfo]:
    zone: tzinfo = UTC
    if not queries:
        faults.append(f"{SETTING}: TRACE_SOURCE=oracle needs a file of SELECTs")
        return {}, zone
    try:
        found = read_queries(Path(queries), PLACEHOLDER, settings=("timezone",))
    except ConfigError as exc:
        faults += exc.faults
        return {}, zone
    if name := found.settings.get("timezone"):
        try:
            zone = ZoneInfo(name)
        except (KeyError, ValueError, OSError):
            faults.append(f"{SETTING}: there is no time zone {name!r}")
    return {domain: _expanded(select) for domain, select in found.selects.items()}, zone


def _expanded(select: str) -> _Statement:
    lists = {"ids": ", ".join(f":{name}" for name in NAMES)}
    names = {found[1] for found in PLACEHOLDER.finditer(select)}
    text = PLACEHOLDER.sub(lambda found: lists.get(found[1], found[0]), select)
    return _Statement(text, "as_of" in names)


def _make_pool(driver: Any, place: _Place) -> Any:  # noqa: ANN401
    return driver.create_pool(
        user=place.user,
        password=place.password,
        host=place.host,
        port=place.port,
        service_name=place.service,
        min=1,
        max=MOST_CONNECTIONS,
        increment=1,
        getmode=driver.POOL_GETMODE_TIMEDWAIT,
        wait_timeout=POOL_SECONDS * 1000,
        tcp_connect_timeout=POOL_SECONDS,
        ping_timeout=PING_SECONDS * 1000,
        expire_time=KEEPALIVE_MINUTES,
        session_callback=_prepare,
    )


def _close_pool(driver: Any, pool: Any, seconds: float) -> None:  # noqa: ANN401
    # Aside, as it waits for the pool's thread, and that for its server, without any limit.
    def close() -> None:
        with suppress(driver.Error):
            pool.close(force=True)

    closing = Thread(target=close, daemon=True)
    closing.start()
    closing.join(seconds)


def _prepare(connection: Any, _: str) -> None:  # noqa: ANN401
    """Let a new connection compare and sort by bytes, whatever language its server speaks."""
    connection.call_timeout = POOL_SECONDS * 1000
    with connection.cursor() as cursor:
        cursor.execute("ALTER SESSION SET NLS_COMP = BINARY NLS_SORT = BINARY")


# ---- values -------------------------------------------------------------------------------------


def _converter(column: Column, kind: str, zone: tzinfo) -> Convert:
    if kind in PADDED:
        return _unpadded
    if column.kind is Kind.INTEGER:
        return _whole
    if column.kind is Kind.TIMESTAMP:
        return lambda value: value.replace(tzinfo=zone)
    return lambda value: value


def _unpadded(value: str) -> str:
    return value.rstrip(" ")


def _whole(value: Decimal) -> int:
    number = int(value)
    if number != value:
        raise ValueError
    return number


def _lines(domain: Domain, rows: Sequence[Sequence[Any]]) -> Generator[Lines]:
    data = rows_of(domain, rows)
    if len(data) <= BYTES or len(rows) == 1:
        yield Lines(len(rows), data)
        return
    middle = len(rows) // 2
    yield from _lines(domain, rows[:middle])
    yield from _lines(domain, rows[middle:])


# ---- errors -------------------------------------------------------------------------------------


@contextmanager
def _translated(driver: Any, deadline: float) -> Generator[None]:  # noqa: ANN401
    try:
        yield
    except driver.Error as exc:
        # Not as the cause: its text may name the host, the account, a value.
        raise _fault(exc, is_late=time.monotonic() >= deadline) from None


def _fault(exc: Exception, *, is_late: bool) -> SourceFault:
    code = _code(exc)
    if is_late or code in TIMED_OUT:
        return SourceFault(ErrorClass.SOURCE_TIMEOUT, f"the source took too long ({code})")
    if code in PASSING or getattr(exc.args[0] if exc.args else None, "isrecoverable", False):
        message = f"the source cannot answer now ({code})"
        return SourceFault(
            ErrorClass.SOURCE_UNAVAILABLE, message, retry_after_seconds=RETRY_SECONDS
        )
    return SourceFault(ErrorClass.SOURCE_FAILED, f"the source refuses the query ({code})")


def _code(exc: Exception) -> str:
    error = exc.args[0] if exc.args else None
    return str(getattr(error, "full_code", "")) or type(exc).__name__
