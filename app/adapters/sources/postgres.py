"""Postgres: one COPY a domain, its rows passed on as the server writes them."""

import math
import re
import select
import time
from collections import deque
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager, suppress
from datetime import datetime
from pathlib import Path
from typing import Any, TypeVar

import psycopg
from psycopg import errors, generators, pq
from psycopg.abc import PQGen
from psycopg.conninfo import conninfo_to_dict
from psycopg.rows import TupleRow
from psycopg.waiting import Wait

from app.adapters.queries import mismatch, read_queries
from app.core.domains import Domain, Kind
from app.core.errors import ConfigError, ErrorClass, SourceFault
from app.core.ports import Lines, SourceOptions

DEMO = Path(__file__).with_name("demo_queries.toml")
PLACEHOLDER = re.compile(r"%%|%\((\w+)\)s|%")
APPLICATION = "holdfast trace"
ROWS = 5000
BYTES = 4 * 2**20
"""What one Lines holds at most, but for a row that alone is larger."""
MOST_IDLE = 2
CONNECT_SECONDS = 5
LEAST_CONNECT_SECONDS = 2
"""libpq does not wait less."""
CANCEL_SECONDS = 1
ORPHAN_MILLISECONDS = 1000
"""How soon the server notices that nobody waits for a statement any more."""
RETRY_SECONDS = 10

TYPES: Mapping[Kind, frozenset[str]] = {
    Kind.TEXT: frozenset({"text", "varchar", "bpchar", "name"}),
    Kind.INTEGER: frozenset({"int2", "int4", "int8"}),
    Kind.NUMBER: frozenset({"numeric", "float4", "float8", "int2", "int4", "int8"}),
    Kind.TIMESTAMP: frozenset({"timestamptz"}),
}
CANCELLED = "57014"  # by statement_timeout, or by a person to whom it was too slow
PASSING = ("08", "40", "53", "55P03", "57P")
"""What says "not now": connections, conflicts with a standby's recovery, resources, restarts."""

Connection = psycopg.Connection[TupleRow]
Result = TypeVar("Result")


class Postgres:
    """A Postgres that is only read. A connection that came to no harm is kept for the next."""

    name = "postgres"
    ids_per_statement = 100_000

    def __init__(self, url: str, selects: Mapping[str, str], *, statement_seconds: float) -> None:
        self._url = url
        self._selects = selects
        self._options = _options(url, statement_seconds)
        self._idle = deque[Connection]()

    def domains(self) -> frozenset[str]:
        """Return the domains that have a SELECT."""
        return frozenset(self._selects)

    @contextmanager
    def open(self) -> Generator["_Reader"]:
        """Lend a connection; raises SourceFault."""
        reader = _Reader(self._selects, self._connect)
        try:
            reader.connect(math.inf)
            yield reader
        finally:
            self._keep(reader.release())

    def close(self) -> None:
        """Close the connections that nobody uses."""
        while self._idle:
            self._idle.pop().close()

    def _connect(self, deadline: float) -> Connection:
        while self._idle:
            connection = self._idle.pop()
            if _is_alive(connection):
                return connection
            connection.close()
        seconds = min(CONNECT_SECONDS, _seconds_until(deadline))
        if seconds < LEAST_CONNECT_SECONDS:
            raise SourceFault(
                ErrorClass.SOURCE_TIMEOUT, "no time was left to connect to the source"
            )
        return Connection.connect(
            self._url, autocommit=True, connect_timeout=int(seconds), **self._options
        )

    def _keep(self, connection: Connection | None) -> None:
        if connection is None:
            return
        if len(self._idle) < MOST_IDLE:
            self._idle.append(connection)
        else:
            connection.close()


class _Reader:
    """One connection, made anew after a statement on it did not come to its end."""

    def __init__(self, selects: Mapping[str, str], connect: Callable[[float], Connection]) -> None:
        self._selects = selects
        self._connect = connect
        self._connection: Connection | None = None
        self._described = set[str]()

    def connect(self, deadline: float) -> Connection:
        """Return a connection that is alive as far as can be seen without asking."""
        with _translated(deadline):
            if self._connection is None or not _is_alive(self._connection):
                self._give_up(deadline)
                self._connection = self._connect(deadline)
            return self._connection

    def release(self) -> Connection | None:
        """Hand the connection back; None where there is none that could be used again."""
        connection, self._connection = self._connection, None
        return connection

    def events(
        self, domain: Domain, ids: Sequence[str], *, as_of: datetime, deadline: float
    ) -> Generator[Lines, None, int]:
        """Yield the rows as they come, and return the count of the server's own."""
        if domain.name not in self._selects:
            message = f"the source has no SELECT for the domain {domain.name}"
            raise SourceFault(ErrorClass.SOURCE_FAILED, message)
        if not ids:
            return 0
        is_complete = False
        try:
            with _translated(deadline):
                call = _Call(self.connect(deadline), self._selects[domain.name], as_of, deadline)
                if domain.name not in self._described:
                    call.check(domain)
                    self._described.add(domain.name)
                sent = yield from call.copy(ids)
            is_complete = True
        finally:
            if not is_complete:
                self._give_up(deadline)
        return sent

    def _give_up(self, deadline: float) -> None:
        """End the statement where it runs, and throw the connection away."""
        connection = self.release()
        if connection is None:
            return
        seconds = min(CANCEL_SECONDS, _seconds_until(deadline))
        if seconds > 0:  # else the server finds out by itself, within ORPHAN_MILLISECONDS
            with suppress(psycopg.Error):
                connection.cancel_safe(timeout=seconds)
        connection.close()


class _Call:
    """A SELECT on a connection until its deadline.

    Below the cursors of psycopg, for two reasons: each wait can have an end, and a row costs a
    third of what it costs above.
    """

    def __init__(
        self, connection: Connection, select: str, as_of: datetime, deadline: float
    ) -> None:
        self._connection = connection
        self._select = select
        self._as_of = as_of
        self._deadline = deadline

    def check(self, domain: Domain) -> None:
        """Ask for no rows; raises SourceFault where the columns are not those of the domain."""
        query = self._merged([])
        described = self._ask(f"SELECT * FROM (\n{query}\n) AS described LIMIT 0")  # noqa: S608 - the operator's own
        types = self._connection.adapters.types
        found: list[tuple[str, str]] = []
        for position in range(described.nfields):
            info = types.get(described.ftype(position))
            name = (described.fname(position) or b"").decode()
            found.append((name, info.name if info else "of another type"))
        if wrong := mismatch(domain, found, TYPES):
            raise SourceFault(ErrorClass.SOURCE_FAILED, f"the SELECT for {domain.name}: {wrong}")

    def copy(self, ids: Sequence[str]) -> Generator[Lines, None, int]:
        """Yield the rows of these ids; return how many the server says it has sent."""
        self._ask(f"COPY (\n{self._merged(ids)}\n) TO STDOUT")
        receive = self._connection.pgconn.get_copy_data
        block, rows = bytearray(), 0
        while True:
            size, row = receive(1)
            if size > 0:
                if rows == ROWS or (rows and len(block) + size > BYTES):
                    yield Lines(rows, bytes(block))
                    self._seconds_left()
                    block, rows = bytearray(), 0
                # Not into a list: thousands of buffers would keep the garbage collector busy.
                block += row
                rows += 1
            elif size == 0:
                self._wait(_readable(self._connection.pgconn))
            else:
                break
        sent = self._results()[0].command_tuples or 0
        if rows:
            yield Lines(rows, bytes(block))
        return sent

    def _ask(self, statement: str) -> pq.abc.PGresult:
        self._seconds_left()
        # The one protocol that takes a single statement only, whatever the file may hold.
        self._connection.pgconn.send_query_params(statement.encode(), None)
        return self._results()[0]

    def _results(self) -> list[pq.abc.PGresult]:
        results: list[pq.abc.PGresult]
        results = self._wait(generators.execute(self._connection.pgconn))
        for result in results:
            if result.status == pq.ExecStatus.FATAL_ERROR:
                raise errors.error_from_result(result)
        return results

    def _wait(self, generator: PQGen[Result]) -> Result:
        return self._connection.wait(generator, timeout=self._seconds_left())

    def _seconds_left(self) -> float:
        seconds = _seconds_until(self._deadline)
        if seconds <= 0:
            raise SourceFault(ErrorClass.SOURCE_TIMEOUT, "the source took too long")
        return seconds

    def _merged(self, ids: Sequence[str]) -> str:
        escape = pq.Escaping(self._connection.pgconn).escape_literal
        values = {
            "ids": bytes(escape(_array(ids).encode())).decode() + "::text[]",
            "as_of": bytes(escape(self._as_of.isoformat().encode())).decode() + "::timestamptz",
        }
        return PLACEHOLDER.sub(lambda found: values[found[1]] if found[1] else "%", self._select)


def build(options: SourceOptions) -> Postgres:
    """Make the source; nothing is opened yet. Raises ConfigError."""
    faults = list[str]()
    if not _is_conninfo(options.url):
        faults.append("TRACE_SOURCE_URL: must be the URL of a Postgres")
    selects: Mapping[str, str] = {}
    try:
        selects = read_queries(Path(options.queries or DEMO), PLACEHOLDER).selects
    except ConfigError as exc:
        faults += exc.faults
    if faults:
        raise ConfigError(faults)
    return Postgres(options.url, selects, statement_seconds=options.statement_seconds)


def _is_conninfo(url: str) -> bool:
    try:
        return bool(conninfo_to_dict(url))
    except psycopg.ProgrammingError:
        return False


def _options(url: str, statement_seconds: float) -> dict[str, Any]:
    settings = {
        "default_transaction_read_only": "on",
        "statement_timeout": max(1, round(statement_seconds * 1000)),
        "client_connection_check_interval": ORPHAN_MILLISECONDS,
        "timezone": "UTC",
        "datestyle": "ISO",
        "jit": "off",  # compiling costs more than the statement does
    }
    theirs = str(conninfo_to_dict(url).get("options") or "")
    return {
        # Behind those of the URL, such as a search_path, which would be lost otherwise.
        "options": " ".join([theirs, *(f"-c {name}={value}" for name, value in settings.items())]),
        "client_encoding": "UTF8",
        "application_name": APPLICATION,
        # A library that talks to Kerberos does not survive a fork.
        "gssencmode": "disable",
        "keepalives_idle": 10,
        "keepalives_interval": 5,
        "keepalives_count": 3,
    }


def _array(ids: Sequence[str]) -> str:
    escaped = (each.replace("\\", "\\\\").replace('"', '\\"') for each in ids)
    return "{" + ",".join(f'"{each}"' for each in escaped) + "}"


def _readable(pgconn: pq.abc.PGconn) -> PQGen[None]:
    while not (yield Wait.R):
        pass
    pgconn.consume_input()


def _is_alive(connection: Connection) -> bool:
    """Whether nothing came while nothing was asked: the last words of a server do."""
    try:
        poll = select.poll()
        poll.register(connection.pgconn.socket, select.POLLIN)
        return not poll.poll(0)
    except psycopg.OperationalError:
        return False


def _seconds_until(deadline: float) -> float:
    return deadline - time.monotonic()


# ---- errors -------------------------------------------------------------------------------------


@contextmanager
def _translated(deadline: float) -> Generator[None]:
    try:
        yield
    except psycopg.Error as exc:
        # Not as the cause: its text quotes the statement, with the ids in it, or names the host.
        raise _fault(exc, is_late=_seconds_until(deadline) <= 0) from None


def _fault(exc: psycopg.Error, *, is_late: bool) -> SourceFault:
    name = f"{exc.sqlstate or ''} {type(exc).__name__}".strip()
    if is_late or exc.sqlstate == CANCELLED:
        return SourceFault(ErrorClass.SOURCE_TIMEOUT, f"the source took too long ({name})")
    if _is_passing(exc):
        message = f"the source cannot answer now ({name})"
        return SourceFault(
            ErrorClass.SOURCE_UNAVAILABLE, message, retry_after_seconds=RETRY_SECONDS
        )
    return SourceFault(ErrorClass.SOURCE_FAILED, f"the source refuses the query ({name})")


def _is_passing(exc: psycopg.Error) -> bool:
    # Without a state it is no word of the server, but of the connection to it.
    return not exc.sqlstate or exc.sqlstate.startswith(PASSING)
