"""What the core expects of an adapter, and how it finds one by name."""

from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from datetime import datetime
from importlib import import_module
from importlib.util import find_spec
from typing import Any, Protocol, cast

from app.core.domains import Domain
from app.core.errors import ConfigError, WorkError
from app.core.model import Target


@dataclass(frozen=True, slots=True)
class EmbedderOptions:
    """What an embedder is built from: the EMBEDDER_* settings, the model, its dimension."""

    url: str
    api_key: str
    model: str
    dimension: int


class Embedder(Protocol):
    """A backend that turns texts into vectors."""

    name: str

    def embed(self, texts: Sequence[str], *, model: str, seconds: float) -> list[list[float]]:
        """Return one vector per text, in the order of the texts, within `seconds` in all.

        Raises BackendFault, RequestFault or AnswerFault, nothing else. Checks of the numbers
        are the caller's (model.check_vectors).
        """
        ...

    def digest(self, model: str, *, seconds: float) -> str | None:
        """Return what exactly is behind a model's name now; None where the backend does not tell.

        Raises what `embed` raises.
        """
        ...

    def close(self) -> None:
        """Give back what it holds open."""
        ...


class Transaction(Protocol):
    """An open transaction, as far as the core hands it on."""

    def execute(self, query: Any, params: Any = None) -> Any:  # noqa: ANN401 - the driver's types stay in the store
        """Run one statement."""
        ...


@dataclass(frozen=True, slots=True)
class Write:
    """One vector for one row of a target."""

    target_id: str
    vector: Sequence[float]


@dataclass(frozen=True, slots=True)
class Written:
    """What a sink made of some writes: rows that are gone, that it refused, that are locked."""

    gone: frozenset[str]
    refused: Mapping[str, str]
    busy: frozenset[str] = frozenset()
    """Rows that another transaction holds: nothing was written, nobody was waited for."""


@dataclass(frozen=True, slots=True)
class ReadRow:
    """One row of a target, read for another version."""

    target_id: str
    text: str | None
    is_wanted: bool
    """Whether the other version does not have this text, and nobody wants the row empty."""


class PrimarySink(Protocol):
    """The store that is written in the same transaction that settles the items."""

    def write(self, tx: Transaction, target: Target, writes: Sequence[Write]) -> Written:
        """Store the vectors; name the rows that are gone, refused, or locked by somebody else."""
        ...

    def read(
        self, tx: Transaction, target: Target, target_ids: Sequence[str]
    ) -> dict[str, list[float]]:
        """Return the stored vector of each row that has one."""
        ...

    def clear(self, tx: Transaction, target: Target, target_ids: Sequence[str]) -> list[str]:
        """Remove the vectors of rows; return which had one."""
        ...

    def size(self, tx: Transaction, target: Target) -> tuple[int, int]:
        """Return how many rows a target has, and how many bytes of text."""
        ...

    def progress(self, tx: Transaction, old: Target, new: Target) -> tuple[int, int]:
        """Return how many rows have the new version, and how many have the old one only."""
        ...

    def outdated(self, tx: Transaction, old: Target, new: Target) -> int:
        """Return how many rows have their text in the old version, and an older one in the new."""
        ...

    def read_on(
        self, tx: Transaction, old: Target, new: Target, *, after: str | None, limit: int
    ) -> list[ReadRow]:
        """Return the next rows behind an id, in the order of their ids."""
        ...

    def survey(self, tx: Transaction, target: Target) -> dict[str, int]:
        """Compare the rows with the ledger and the queue; return how many are of which kind.

        All but those that are current are named in the session's temporary table `differences`.
        """
        ...

    def texts(self, tx: Transaction, target: Target, target_ids: Sequence[str]) -> dict[str, str]:
        """Return the present text of each row, where the target says in which column it is."""
        ...


@dataclass(frozen=True, slots=True)
class SinkOptions:
    """What a follower is built from: where it is, and how it names and maps things."""

    url: str
    """With user and password; never shown. Empty for a sink that has none."""
    path: str
    prefix: str
    mapping: str
    seconds: float
    """The longest that one call may take."""


@dataclass(frozen=True, slots=True)
class Document:
    """What a follower is to hold of one key; without a vector: nothing any more."""

    target_id: str
    version: int
    """Grows with each change of the key: an older document never replaces a newer one."""
    content_hash: str
    """SHA-256 of the text that the vector was made of, in hex."""
    model: str
    model_digest: str | None = None
    text: str | None = None
    """None where nobody has kept it."""
    metadata: Mapping[str, Any] | None = None
    vector: Sequence[float] | None = None


@dataclass(frozen=True, slots=True)
class HeldDocument:
    """What a follower says that it holds."""

    target_id: str
    version: int
    content_hash: str
    dimension: int
    """0 where the store cannot say, as its schema allows only the right one."""


class FollowerSink(Protocol):
    """A store that catches up with the primary: one place of its own per target and version.

    Every call raises BackendFault where the store as a whole is away, busy or misconfigured, and
    nothing else. Any call may be repeated, and come late: the greatest version wins.
    """

    name: str
    most_documents: int
    """How many it takes in one call."""

    def write(self, target: Target, documents: Sequence[Document]) -> Mapping[str, WorkError]:
        """Bring documents in, or out; return what went wrong by target_id, nothing where all went.

        Each target_id stands there once. SinkFault: refused for good. BackendFault: this one again
        later. What is there already in a newer version counts as well. The target's place is made
        with its mapping where it is missing, and never by a write.
        """
        ...

    def held(self, target: Target) -> Iterator[HeldDocument]:
        """Yield everything that it holds of a target, in bounded memory."""
        ...

    def read(self, target: Target, target_ids: Sequence[str]) -> Mapping[str, Document]:
        """Return documents with their vectors, by target_id: what is missing is left out."""
        ...

    def make_current(self, target: Target) -> None:
        """Let readers who ask for the target without a version find this one, in one step."""
        ...

    def drop(self, target: Target) -> None:
        """Remove all that it holds of a target's version; nothing where it holds nothing."""
        ...

    def close(self) -> None:
        """Give back what it holds open."""
        ...


@dataclass(frozen=True, slots=True)
class SourceOptions:
    """What a trace source is built from: the TRACE_SOURCE_* settings."""

    url: str
    """Where it is, with user and password; never shown."""
    queries: str
    """A file with one SELECT a domain; empty: those of the demo, where a source has them."""
    statement_seconds: float
    """The longest that one statement may take."""


@dataclass(frozen=True, slots=True)
class Lines:
    """Some rows of a domain in the form of app.core.domains: 1 to 5,000 of them."""

    rows: int
    data: bytes


class TraceReader(Protocol):
    """One connection to a source; used by one thread."""

    def events(
        self, domain: Domain, ids: Sequence[str], *, as_of: datetime, deadline: float
    ) -> Generator[Lines, None, int]:
        """Yield the rows of these ids in the domain's order, and return how many the source sent.

        `ids` are sorted and unique, at most `ids_per_statement` of the source. What is open is
        measured up to `as_of`. `deadline` (of time.monotonic) holds for the whole call. Raises
        SourceFault, nothing else; what ends without one was complete. To close the generator
        early frees the statement at once.
        """
        ...


class TraceSource(Protocol):
    """Where events are read: never written, nothing opened before `open`."""

    name: str
    ids_per_statement: int

    def domains(self) -> frozenset[str]:
        """Return the domains that it can answer."""
        ...

    def open(self) -> AbstractContextManager[TraceReader]:
        """Connect; raises SourceFault."""
        ...

    def close(self) -> None:
        """Give back what it holds open."""
        ...


def find(shelf: str, name: str) -> Callable[..., Any]:
    """Return `build` of the adapter `name` on a shelf, or of a site's own `package.module:build`.

    Raises ConfigError where there is none.
    """
    module_name, _, attribute = name.partition(":")
    if not attribute:
        module_name, attribute = f"app.adapters.{shelf}.{name}", "build"
    if not _exists(module_name):
        raise ConfigError([f"there is no adapter {name!r} on the shelf {shelf!r}"])
    return cast("Callable[..., Any]", getattr(import_module(module_name), attribute))


def _exists(module_name: str) -> bool:
    try:
        return module_name.replace(".", "").isidentifier() and bool(find_spec(module_name))
    except ModuleNotFoundError:
        return False
