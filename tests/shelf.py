"""A site's own sink, as `SINKS=pgvector,tests.shelf:build` would load it: a shelf in memory.

It keeps the contract of a follower, the order of versions too, and fails as it is told.
"""

from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence

from app.core.errors import WorkError
from app.core.model import Target
from app.core.ports import Document, HeldDocument, SinkOptions

NAME = "tests.shelf:build"


class Shelf:
    """Documents by target, version of the target, and id."""

    name = "shelf"

    def __init__(self, most_documents: int = 100) -> None:
        self.most_documents = most_documents
        self.places: dict[tuple[str, str], dict[str, Document]] = {}
        self.away: WorkError | None = None
        """Raised by every call."""
        self.faults: dict[str, deque[WorkError]] = {}
        """What goes wrong with a target_id, once each."""
        self.before_write: Callable[[], None] | None = None
        self.sent: list[list[Document]] = []
        self.current: dict[str, str] = {}
        """Which version of a target readers find, by target_table."""

    def write(self, target: Target, documents: Sequence[Document]) -> Mapping[str, WorkError]:
        self.sent.append(list(documents))
        if self.away:
            raise self.away
        if self.before_write:
            before, self.before_write = self.before_write, None
            before()
        place = self.places.setdefault(_key(target), {})
        found: dict[str, WorkError] = {}
        for document in documents:
            if self.faults.get(document.target_id):
                found[document.target_id] = self.faults[document.target_id].popleft()
                continue
            kept = place.get(document.target_id)
            if kept is None or kept.version < document.version:
                place[document.target_id] = document
        return found

    def held(self, target: Target) -> Iterator[HeldDocument]:
        for each in list(self.places.get(_key(target), {}).values()):
            if each.vector is not None:
                yield HeldDocument(
                    each.target_id, each.version, each.content_hash, len(each.vector)
                )

    def read(self, target: Target, target_ids: Sequence[str]) -> Mapping[str, Document]:
        place = self.places.get(_key(target), {})
        return {each: place[each] for each in target_ids if each in place and place[each].vector}

    def make_current(self, target: Target) -> None:
        if self.away:
            raise self.away
        self.current[target.target_table] = target.embedding_version

    def drop(self, target: Target) -> None:
        self.places.pop(_key(target), None)

    def close(self) -> None:
        self.away = None

    def texts(self) -> dict[str, str | None]:
        """Return the text of each document that is there."""
        return {
            each.target_id: each.text
            for place in self.places.values()
            for each in place.values()
            if each.vector is not None
        }


def _key(target: Target) -> tuple[str, str]:
    return target.target_table, target.embedding_version


def build(options: SinkOptions) -> Shelf:
    """Make an empty one."""
    del options
    return Shelf()
