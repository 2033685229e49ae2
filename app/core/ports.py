"""What the core expects of an adapter, and how it finds one by name."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib import import_module
from importlib.util import find_spec
from typing import Any, Protocol, cast

from app.core.errors import ConfigError
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
