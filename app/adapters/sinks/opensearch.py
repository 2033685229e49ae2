"""A follower: OpenSearch, or Elasticsearch, by `_bulk`; one index a target and version.

An index is made with its mapping and by nothing else: documents are written through an alias of its
own and with `require_alias`, so that a write into nothing is refused instead of making an index
whose vectors are mapped as plain numbers. Versions are external: a late older one is turned away.
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from hashlib import sha256
from typing import Any, cast

import orjson

from app.adapters.http import Answered, Call, Http
from app.core.errors import (
    ERROR_TEXT_CHARACTERS,
    AnswerFault,
    BackendFault,
    ErrorClass,
    RequestFault,
    SinkFault,
    WorkError,
)
from app.core.model import Target
from app.core.ports import Document, HeldDocument, SinkOptions

BULK_BYTES = 8 * 2**20
"""Of one request; 5 to 15 MB are advised."""

ID_BYTES = 512
PAGE = 1000
SCROLL_TIME = "2m"
TOMBSTONE_TIME = "1h"
"""How long a deletion goes on winning over a write that comes late; 60 s if nobody says so."""

NDJSON = "application/x-ndjson"
CONFLICT, NOT_FOUND, TOO_LARGE, TOO_MANY = 409, 404, 413, 429
PROPERTIES = {
    **{
        name: {"type": "keyword", "ignore_above": 8191}
        for name in (
            *("target_table", "target_id", "embedding_version"),
            *("model", "model_digest", "content_hash"),
        )
    },
    "version": {"type": "long"},
    "text": {"type": "text"},
    "metadata": {"type": "object", "enabled": False},
}


class OpenSearch:
    """Writes documents of registered targets, and reads them back."""

    name = "opensearch"
    most_documents = 500

    def __init__(self, options: SinkOptions) -> None:
        self._http = Http(options.url)
        self._prefix = options.prefix
        self._mapping = options.mapping
        self._seconds = options.seconds
        self._made: set[str] = set()
        """Indexes that were there, with the right mapping, when they were last looked at."""
        self._bulk_bytes = BULK_BYTES

    def write(self, target: Target, documents: Sequence[Document]) -> Mapping[str, WorkError]:
        """Index or delete each document if it is newer than what is there."""
        faults: dict[str, WorkError] = {}
        missing = self._write(target, documents, faults)
        if missing:  # the index was removed under us: make it anew, once
            self._made.discard(self.index_of(target))
            if self._write(target, missing, faults):
                message = f"the index {self.index_of(target)} goes as soon as it is made"
                raise BackendFault(ErrorClass.BAD_CONFIG, message)
        return faults

    def held(self, target: Target) -> Iterator[HeldDocument]:
        """Yield every document, of one moment; those that are nobody's have version 0, no hash."""
        index = self.index_of(target)
        found = self._call("POST", f"/{index}/_refresh", expected=frozenset({NOT_FOUND}))
        if found.status == NOT_FOUND:
            return
        ask: dict[str, Any] = {
            "size": PAGE,
            "query": {"match_all": {}},
            "sort": ["_doc"],
            "version": True,
            "_source": ["target_id", "content_hash"],
        }
        page = self._call("POST", f"/{index}/_search?scroll={SCROLL_TIME}", ask).body
        scroll = page.get("_scroll_id")
        try:
            while hits := _hits(page):
                yield from (_held(hit, target.dimension) for hit in hits)
                again = {"scroll": SCROLL_TIME, "scroll_id": scroll}
                page = self._call("POST", "/_search/scroll", again).body
                scroll = page.get("_scroll_id", scroll)
        finally:
            self._call(
                "DELETE",
                "/_search/scroll",
                {"scroll_id": [scroll]},
                expected=frozenset({NOT_FOUND}),
            )

    def read(self, target: Target, target_ids: Sequence[str]) -> Mapping[str, Document]:
        """Return documents with their vectors."""
        path = f"/{self.index_of(target)}/_mget"
        ids = {id_of(each): each for each in target_ids}
        answer = self._call("POST", path, {"ids": list(ids)}, expected=frozenset({NOT_FOUND}))
        found: dict[str, Document] = {}
        for each in map(_object, answer.body.get("docs", ())):
            if each.get("found") and each.get("_id") in ids:
                target_id = ids[each["_id"]]
                source = _object(each.get("_source"))
                found[target_id] = _document(target_id, each["_version"], source)
        return found

    def make_current(self, target: Target) -> None:
        """Move the target's alias to this version's index, in one step."""
        self._make(target)
        alias = self.alias_of(target)
        held = self._call("GET", f"/_alias/{alias}", expected=frozenset({NOT_FOUND}))
        before = [] if held.status == NOT_FOUND else [*held.body]
        actions: list[dict[str, Any]] = [
            {"remove": {"index": index, "alias": alias}}
            for index in before
            if index != self.index_of(target)
        ]
        actions.append({"add": {"index": self.index_of(target), "alias": alias}})
        self._call("POST", "/_aliases", {"actions": actions})

    def drop(self, target: Target) -> None:
        """Delete the index."""
        index = self.index_of(target)
        self._made.discard(index)
        self._call("DELETE", f"/{index}", expected=frozenset({NOT_FOUND}))

    def close(self) -> None:
        """Close the connections."""
        self._http.close()

    # ---- names

    def index_of(self, target: Target) -> str:
        """Return the index of a target and version; the hash tells apart what is spelt alike."""
        table, version = _slug(target.target_table), _slug(target.embedding_version)
        both = f"{target.target_table}\0{target.embedding_version}"
        return f"{self._prefix}-{table}-{version}-{_hash(both)}"

    def alias_of(self, target: Target) -> str:
        """Return the alias that readers use: it names the current version's index."""
        return f"{self._prefix}-{_slug(target.target_table)}-{_hash(target.target_table)}"

    # ---- the index

    def _make(self, target: Target) -> None:
        """Make the index where it is missing; raise BackendFault where it is another's shape."""
        index = self.index_of(target)
        if index in self._made:
            return
        found = self._call("GET", f"/{index}/_mapping", expected=frozenset({NOT_FOUND}))
        if found.status == NOT_FOUND:
            # 400: somebody else has made it in between, and it is looked at again.
            body = self._shape(target)
            made = self._call("PUT", f"/{index}", body, expected=frozenset({400}))
            if made.status == 400 and "exists" not in str(made.body):  # noqa: PLR2004
                message = (
                    f"the index {index} cannot be made: {_reason(_object(made.body.get('error')))}"
                )
                raise BackendFault(ErrorClass.BAD_CONFIG, message[:ERROR_TEXT_CHARACTERS])
            found = self._call("GET", f"/{index}/_mapping")
        self._check(target, index, found.body)
        self._made.add(index)

    def _shape(self, target: Target) -> dict[str, Any]:
        vector: dict[str, Any] = {"type": "knn_vector", "dimension": target.dimension}
        vector["method"] = {"name": "hnsw", "space_type": "cosinesimil", "engine": "lucene"}
        settings: dict[str, Any] = {"gc_deletes": TOMBSTONE_TIME, "knn": True}
        if self._mapping == "dense_vector":
            vector = {"type": "dense_vector", "dims": target.dimension, "index": True}
            vector["similarity"] = "cosine"
            del settings["knn"]
        return {
            "settings": {"index": settings},
            "mappings": {"dynamic": False, "properties": {**PROPERTIES, "embedding": vector}},
            "aliases": {_writer(self.index_of(target)): {"is_write_index": True}},
        }

    def _check(self, target: Target, index: str, body: Mapping[str, Any]) -> None:
        mappings = _object(_object(body.get(index)).get("mappings"))
        vector = _object(_object(mappings.get("properties")).get("embedding"))
        kind, dimension = vector.get("type"), vector.get("dimension", vector.get("dims"))
        if kind != self._mapping:
            message = f"the index {index} maps embedding as {kind}, not as {self._mapping}"
        elif dimension != target.dimension:
            message = f"the index {index} has {dimension} dimensions, the target {target.dimension}"
        else:
            return
        raise BackendFault(ErrorClass.BAD_CONFIG, f"{message}: remove it, and repair fills it anew")

    # ---- writing

    def _write(
        self, target: Target, documents: Sequence[Document], faults: dict[str, WorkError]
    ) -> list[Document]:
        """Send documents in requests of a bounded size; return those whose index was missing."""
        self._make(target)
        missing: list[Document] = []
        lines: list[tuple[Document, bytes]] = []
        size = 0
        for document in documents:
            line = _lines(self.index_of(target), target, document)
            if lines and size + len(line) > self._bulk_bytes:
                missing += self._bulk(target, lines, faults)
                lines, size = [], 0
            lines.append((document, line))
            size += len(line)
        return missing + (self._bulk(target, lines, faults) if lines else [])

    def _bulk(
        self,
        target: Target,
        lines: Sequence[tuple[Document, bytes]],
        faults: dict[str, WorkError],
    ) -> list[Document]:
        try:
            answer = self._send(lines)
        except RequestFault as fault:
            return self._refused(target, lines, fault, faults)
        items = cast("list[Any]", answer.body.get("items") or [])
        if len(items) != len(lines):
            raise BackendFault(ErrorClass.BAD_ANSWER, "the answer to _bulk is not one item each")
        missing: list[Document] = []
        for (document, _), item in zip(lines, items, strict=True):
            verdict = _verdict(item)
            if verdict is _MISSING:
                missing.append(document)
            elif verdict is not None:
                faults[document.target_id] = verdict
        return missing

    def _send(self, lines: Sequence[tuple[Document, bytes]]) -> Answered:
        content = b"".join(line for _, line in lines)
        texts = [document.text for document, _ in lines if document.text]
        call = Call("POST", "/_bulk?require_alias=true", content, NDJSON)
        try:
            return self._http.send(call, seconds=self._seconds, texts=texts)
        except AnswerFault as fault:
            raise BackendFault(fault.error_class, fault.message) from fault

    def _refused(
        self,
        target: Target,
        lines: Sequence[tuple[Document, bytes]],
        fault: RequestFault,
        faults: dict[str, WorkError],
    ) -> list[Document]:
        """Say what a refusal means: too large is halved, our own fault is not sent again."""
        if fault.is_size_limit and len(lines) > 1:
            middle = len(lines) // 2
            self._bulk_bytes = max(2**16, sum(len(line) for _, line in lines) // 2)
            missing = self._bulk(target, lines[:middle], faults)
            return missing + self._bulk(target, lines[middle:], faults)
        if fault.error_class is not ErrorClass.BAD_INPUT:  # broken, slow, unclear: send it again
            raise BackendFault(fault.error_class, fault.message) from fault
        for document, _ in lines:
            is_ours = not fault.is_size_limit
            error = WorkError(ErrorClass.INTERNAL, fault.message)
            faults[document.target_id] = error if is_ours else SinkFault(fault.message)
        return []

    def _call(
        self,
        method: str,
        path: str,
        body: Mapping[str, Any] | None = None,
        *,
        expected: frozenset[int] = frozenset(),
    ) -> Answered:
        """Ask about anything but documents: whatever goes wrong is the store's fault as a whole."""
        content = b"" if body is None else orjson.dumps(body)
        try:
            return self._http.send(
                Call(method, path, content, expected=expected), seconds=self._seconds
            )
        except (RequestFault, AnswerFault) as fault:
            raise BackendFault(fault.error_class, fault.message) from fault


def build(options: SinkOptions) -> OpenSearch:
    """Make the sink; it connects when it is first used."""
    return OpenSearch(options)


def id_of(target_id: str) -> str:
    """Return the `_id` of a row's document: its own id, or a hash where that is too long."""
    if len(target_id.encode()) <= ID_BYTES:
        return target_id
    return f"sha256:{sha256(target_id.encode()).hexdigest()}"


def _slug(name: str) -> str:
    return re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-")[:64] or "x"


def _hash(text: str) -> str:
    return sha256(text.encode()).hexdigest()[:8]


def _writer(index: str) -> str:
    return f"{index}-writer"


def _lines(index: str, target: Target, document: Document) -> bytes:
    address = {
        "_index": _writer(index),
        "_id": id_of(document.target_id),
        "version": document.version,
        "version_type": "external",
    }
    if document.vector is None:
        return orjson.dumps({"delete": address}) + b"\n"
    source = {
        "target_table": target.target_table,
        "target_id": document.target_id,
        "embedding_version": target.embedding_version,
        "model": document.model,
        "model_digest": document.model_digest,
        "content_hash": document.content_hash,
        "version": document.version,
        "text": document.text,
        "metadata": document.metadata,
        "embedding": list(document.vector),
    }
    kept = {name: value for name, value in source.items() if value is not None}
    return orjson.dumps({"index": address}) + b"\n" + orjson.dumps(kept) + b"\n"


_MISSING = SinkFault("the index is missing")


def _verdict(item: Any) -> WorkError | None:  # noqa: ANN401
    """Read one item of the answer: by its status, as the names of error types differ."""
    told = _object(next(iter(_object(item).values()), None))
    status, error = told.get("status"), _object(told.get("error"))
    if not isinstance(status, int):
        return BackendFault(ErrorClass.BAD_ANSWER, "an item of the answer has no status")
    if status < 300 or status == CONFLICT or (status == NOT_FOUND and not error):  # noqa: PLR2004
        return None  # a newer version is there, or what is to go is not: as it should be
    if status == NOT_FOUND:
        return _MISSING
    message = f"{status} {_reason(error)}"[:ERROR_TEXT_CHARACTERS]
    if status == TOO_MANY or status >= 500:  # noqa: PLR2004
        return BackendFault(ErrorClass.BUSY, message)
    return SinkFault(message)


def _object(value: Any) -> dict[str, Any]:  # noqa: ANN401
    return cast("dict[str, Any]", value) if isinstance(value, dict) else {}


def _reason(error: dict[str, Any]) -> str:
    """Say why, by type: a reason may quote the document, so only dimensions are repeated."""
    told = (error, _object(error.get("caused_by")))
    reasons = (DIMENSIONS.search(str(each.get("reason", ""))) for each in told)
    kinds = [str(each["type"]) for each in told if each.get("type")]
    numbers = [found[0].strip() for found in reasons if found][:1]
    return ": ".join([*kinds, *numbers]) or "without a reason"


DIMENSIONS = re.compile(r"[^.;:\[\]']*\bdimensions?\b[^;\[\]']{0,80}", re.IGNORECASE)


def _hits(page: dict[str, Any]) -> list[dict[str, Any]]:
    hits = _object(page.get("hits")).get("hits")
    if not isinstance(hits, list):
        raise BackendFault(ErrorClass.BAD_ANSWER, "the answer to _search has no hits")
    return cast("list[dict[str, Any]]", hits)


def _held(hit: dict[str, Any], dimension: int) -> HeldDocument:
    source = _object(hit.get("_source"))
    content_hash = str(source.get("content_hash", ""))
    version = int(hit.get("_version", 0)) if content_hash else 0
    target_id = str(source.get("target_id", hit["_id"]))
    return HeldDocument(target_id, version, content_hash, dimension)


def _document(target_id: str, version: int, source: Mapping[str, Any]) -> Document:
    return Document(
        target_id=target_id,
        version=version,
        content_hash=str(source.get("content_hash", "")),
        model=str(source.get("model", "")),
        model_digest=source.get("model_digest"),
        text=source.get("text"),
        metadata=source.get("metadata"),
        vector=source.get("embedding"),
    )
