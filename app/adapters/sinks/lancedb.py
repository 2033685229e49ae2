"""A follower: LanceDB in a folder, an optional package; one table a target and version.

Lance lets two writers that insert the same new key at once both succeed, so there is one: the
caller holds the sink's lock in Postgres, and a file in the folder is locked for each write here.
A deletion leaves a row without a vector, so that an older write that comes late changes nothing.
"""

# pyright: basic

import fcntl
import json
import re
from collections.abc import Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import timedelta
from hashlib import sha256
from pathlib import Path
from typing import Any

import orjson

from app.core.errors import BackendFault, ConfigError, ErrorClass, SinkFault, WorkError
from app.core.model import Target
from app.core.ports import Document, HeldDocument, SinkOptions

PAGE = 1000
WRITES_BETWEEN_CARES = 50
"""Each write makes a version and a file: they are joined, and old ones removed, that often."""
KEPT = timedelta(minutes=10)
"""How long a reader may go on with a version that a newer one has replaced."""

NEWER = "target.version < source.version"
HELD = "vector IS NOT NULL"


class LanceDB:
    """Writes documents of registered targets into a folder, and reads them back."""

    name = "lancedb"
    most_documents = 500

    def __init__(self, options: SinkOptions, lance: Any, arrow: Any) -> None:  # noqa: ANN401
        self._lance = lance
        self._arrow = arrow
        self._folder = Path(options.path)
        self._prefix = options.prefix
        self._open: Any = None
        self._writes = 0

    def write(self, target: Target, documents: Sequence[Document]) -> Mapping[str, WorkError]:
        """Merge the documents in: what is there in a newer version stays."""
        faults: dict[str, WorkError] = {}
        rows: dict[str, dict[str, Any]] = {}
        for each in documents:
            given = None if each.vector is None else len(each.vector)
            if given not in (None, target.dimension):
                message = f"{given} dimensions where the target has {target.dimension}"
                faults[each.target_id] = SinkFault(message)
            else:
                rows[each.target_id] = _row(each)
        with self._writing():
            table = self._table(target)
            if rows:
                data = self._arrow.Table.from_pylist([*rows.values()], schema=table.schema)
                merge = table.merge_insert("target_id").when_matched_update_all(where=NEWER)
                merge.when_not_matched_insert_all().execute(data, on_bad_vectors="null")
                self._care_for(table)
        return faults

    def held(self, target: Target) -> Iterator[HeldDocument]:
        """Yield every document of one moment."""
        with _translated():
            table = self._table(target, is_made=False)
        if table is None:
            return
        names = ["target_id", "version", "content_hash"]
        with _translated():
            batches = table.search().where(HELD).select(names).to_batches(PAGE)
            for batch in batches:
                for row in batch.to_pylist():
                    yield HeldDocument(**row, dimension=target.dimension)

    def read(self, target: Target, target_ids: Sequence[str]) -> Mapping[str, Document]:
        """Return documents with their vectors."""
        with _translated():
            table = self._table(target, is_made=False)
            if table is None:
                return {}
            found: dict[str, Document] = {}
            for start in range(0, len(target_ids), PAGE):
                wanted = ", ".join(map(_quoted, target_ids[start : start + PAGE]))
                rows = table.search().where(f"target_id IN ({wanted}) AND {HELD}").limit(PAGE)
                found |= {row["target_id"]: _document(row) for row in rows.to_list()}
        return found

    def make_current(self, target: Target) -> None:
        """Name this version's table in `<prefix>-current.json`, by the target's name."""
        with self._writing():
            self._table(target)
            path = self._folder / f"{self._prefix}-current.json"
            current = json.loads(path.read_text("utf-8")) if path.exists() else {}
            current[target.target_table] = self.table_of(target)
            beside = path.with_suffix(".new")
            beside.write_text(json.dumps(current, indent=2), "utf-8")
            beside.replace(path)

    def drop(self, target: Target) -> None:
        """Remove the table."""
        with self._writing():
            self._database().drop_table(self.table_of(target), ignore_missing=True)

    def close(self) -> None:
        """Let go of the folder."""
        self._open = None

    def table_of(self, target: Target) -> str:
        """Return the table of a target and version; the hash tells apart what is spelt alike."""
        both = f"{target.target_table}\0{target.embedding_version}"
        names = f"{_slug(target.target_table)}-{_slug(target.embedding_version)}"
        return f"{self._prefix}-{names}-{sha256(both.encode()).hexdigest()[:8]}"

    @contextmanager
    def _writing(self) -> Generator[None]:
        with _translated():
            self._folder.mkdir(parents=True, exist_ok=True)
            with (self._folder / f"{self._prefix}.lock").open("w") as lock:
                fcntl.flock(lock, fcntl.LOCK_EX)
                yield

    def _database(self) -> Any:  # noqa: ANN401
        if self._open is None:
            self._open = self._lance.connect(str(self._folder))
        return self._open

    def _table(self, target: Target, *, is_made: bool = True) -> Any:  # noqa: ANN401
        """Open the table, which is made where it is missing; None where it is not to be made."""
        name = self.table_of(target)
        try:
            table = self._database().open_table(name)
        except (ValueError, FileNotFoundError):
            if not is_made:
                return None
            return self._database().create_table(name, schema=self._schema(target.dimension))
        has = table.schema.field("vector").type.list_size
        if has != target.dimension:
            message = f"the table {name} has {has} dimensions, the target {target.dimension}"
            raise BackendFault(ErrorClass.BAD_CONFIG, f"{message}: remove it, and repair fills it")
        return table

    def _schema(self, dimension: int) -> Any:  # noqa: ANN401
        arrow = self._arrow
        texts = ("content_hash", "model", "model_digest", "text", "metadata")
        return arrow.schema(
            [
                arrow.field("target_id", arrow.string(), nullable=False),
                arrow.field("version", arrow.int64(), nullable=False),
                *(arrow.field(name, arrow.string()) for name in texts),
                arrow.field("vector", arrow.list_(arrow.float32(), dimension)),
            ]
        )

    def _care_for(self, table: Any) -> None:  # noqa: ANN401
        self._writes += 1
        if self._writes % WRITES_BETWEEN_CARES == 0:
            table.optimize(cleanup_older_than=KEPT)


def build(options: SinkOptions) -> LanceDB:
    """Make the sink; raises ConfigError where the package is not installed."""
    try:
        import lancedb
        import pyarrow as pa
    except ImportError:
        raise ConfigError(
            ["SINKS has lancedb, but its package is missing: pip install lancedb"]
        ) from None
    return LanceDB(options, lancedb, pa)


@contextmanager
def _translated() -> Generator[None]:
    """Turn what the library raises into the store's fault as a whole; it has no errors of a row."""
    try:
        yield
    except OSError as exc:
        message = f"the folder of LanceDB: {exc.strerror or type(exc).__name__}"
        raise BackendFault(ErrorClass.UNREACHABLE, message) from exc
    except (RuntimeError, ValueError, TypeError, ArithmeticError) as exc:
        message = f"LanceDB: {type(exc).__name__}"  # its own text may quote a row
        raise BackendFault(ErrorClass.UNCLEAR, message) from exc


def _row(document: Document) -> dict[str, Any]:
    metadata = document.metadata
    return {
        "target_id": document.target_id,
        "version": document.version,
        "content_hash": document.content_hash,
        "model": document.model,
        "model_digest": document.model_digest,
        "text": document.text,
        "metadata": None if metadata is None else orjson.dumps(metadata).decode(),
        "vector": None if document.vector is None else list(document.vector),
    }


def _document(row: Mapping[str, Any]) -> Document:
    return Document(
        target_id=row["target_id"],
        version=row["version"],
        content_hash=row["content_hash"],
        model=row["model"],
        model_digest=row["model_digest"],
        text=row["text"],
        metadata=orjson.loads(row["metadata"]) if row["metadata"] else None,
        vector=list(row["vector"]),
    )


def _quoted(text: str) -> str:
    return "'" + text.replace("'", "''") + "'"


def _slug(name: str) -> str:
    return re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-")[:64] or "x"
