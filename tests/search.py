"""A scripted search store: a real HTTP server that speaks as much of OpenSearch as a sink uses.

External versions are enforced, deletions leave tombstones, and a write into no index makes one with
vectors as plain numbers unless `require_alias` forbids it, as the real one does.
"""

import re
import socket
import threading
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from itertools import islice
from typing import Any, Self
from urllib.parse import parse_qs, urlsplit

import orjson

Json = dict[str, Any]
Answer = tuple[int, Json]


@dataclass(frozen=True, slots=True)
class Asked:
    """One request as it arrived."""

    method: str
    path: str
    body: bytes


@dataclass
class Index:
    """What an index is made of, and the documents in it, with those that were deleted."""

    mapping: Json
    settings: Json = field(default_factory=dict)
    aliases: set[str] = field(default_factory=set)
    documents: dict[str, tuple[int, Json]] = field(default_factory=dict)
    tombstones: dict[str, int] = field(default_factory=dict)

    @property
    def vector(self) -> Json:
        found: Json = self.mapping.get("properties", {}).get("embedding", {})
        return found


@dataclass(frozen=True, slots=True)
class Scripted:
    """What is answered in place of the right thing; `applied`: after it was done all the same."""

    status: int = 500
    body: Json = field(default_factory=dict)
    headers: Mapping[str, str] = field(default_factory=dict)
    applied: bool = False
    is_silent: bool = False
    """Nothing is answered until the server is closed."""


class Held:
    """A request that is kept back."""

    def __init__(self) -> None:
        self._is_here, self._may_go = threading.Event(), threading.Event()

    @property
    def is_waiting(self) -> bool:
        """Whether it has come."""
        return self._is_here.is_set()

    def wait(self) -> None:
        self._is_here.set()
        self._may_go.wait(60)

    def release(self) -> None:
        """Let it go on."""
        self._may_go.set()


Rule = Callable[[Asked], Scripted | None]


class Search:
    """The store, listening as long as the block lasts."""

    def __init__(self) -> None:
        self.indexes: dict[str, Index] = {}
        self.rules: list[Rule] = []
        self.item_faults: dict[str, deque[tuple[int, str, str]]] = defaultdict(deque)
        """What becomes of a document instead, once each: status, type, reason."""
        self.held: list[Held] = []
        self.max_bytes = 100 * 2**20
        self.bulks: list[list[str]] = []
        """The ids of each _bulk, in order."""
        self.writes: Counter[str] = Counter()
        """How often each document was really written or deleted."""
        self._scrolls: dict[str, Iterator[Json]] = {}
        self._lock = threading.Lock()
        self._closing = threading.Event()
        self._server: _Server | None = None
        self._port = 0
        self.accept()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._closing.set()
        self.refuse()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._port}"

    def accept(self) -> None:
        """Listen, on the same port again."""
        handler = type("Bound", (_Handler,), {"search": self})
        self._server = _Server(("127.0.0.1", self._port), handler)
        self._server.daemon_threads = True
        self._port = self._server.server_address[1]
        threading.Thread(target=self._server.serve_forever, args=(0.05,), daemon=True).start()

    def refuse(self) -> None:
        """Listen no longer, so that nobody gets a connection."""
        if self._server:
            self._server.shutdown()
            self._server.server_close()
            self._server.cut()
            self._server = None

    @contextmanager
    def refused(self) -> Iterator[None]:
        """Be away while the block lasts."""
        self.refuse()
        try:
            yield
        finally:
            self.accept()

    def documents(self) -> dict[str, Json]:
        """Return every document by its `_id`, of all indexes."""
        with self._lock:
            return {
                name: source
                for index in self.indexes.values()
                for name, (_, source) in index.documents.items()
            }

    def hold(self) -> "Held":
        """Keep back the next _bulk: it is neither applied nor answered until it is released."""
        held = Held()
        self.held.append(held)
        return held

    def once(self, scripted: Scripted, *, path: str = "/_bulk", times: int = 1) -> None:
        """Answer so the next times that a path has this in it."""
        left = [times]

        def rule(asked: Asked) -> Scripted | None:
            if path not in asked.path or not left[0]:
                return None
            left[0] -= 1
            return scripted

        self.rules.append(rule)

    # ---- answering

    def answer(self, asked: Asked) -> tuple[Scripted | None, Answer]:
        if self.held and "_bulk" in asked.path:
            self.held.pop(0).wait()
        with self._lock:
            ruled = next((found for rule in self.rules if (found := rule(asked))), None)
            if ruled and not ruled.applied:
                return ruled, (ruled.status, ruled.body)
            return ruled, self._right(asked)

    def wait_until_closed(self) -> None:
        self._closing.wait(60)

    def _right(self, asked: Asked) -> Answer:
        if len(asked.body) > self.max_bytes:
            return 413, {"error": "request entity too large"}
        where = urlsplit(asked.path)
        for method, pattern, act in _ROUTES:
            found = re.fullmatch(pattern, where.path)
            if method == asked.method and found:
                return act(self, [*found.groups()], parse_qs(where.query), asked.body)
        return 404, {"error": f"no handler found for {asked.path}"}

    def _named(self, name: str) -> Index | None:
        if name in self.indexes:
            return self.indexes[name]
        return next((each for each in self.indexes.values() if name in each.aliases), None)

    def mapping(self, names: list[str], *_: object) -> Answer:
        index = self.indexes.get(names[0])
        if index is None:
            return _no_index(names[0])
        return 200, {names[0]: {"mappings": index.mapping}}

    def create(self, names: list[str], _: object, body: bytes) -> Answer:
        if names[0] in self.indexes:
            return 400, {"error": {"type": "resource_already_exists_exception"}, "status": 400}
        asked = orjson.loads(body)
        aliases = set(asked.get("aliases", {}))
        self.indexes[names[0]] = Index(asked["mappings"], asked["settings"]["index"], aliases)
        return 200, {"acknowledged": True, "index": names[0]}

    def delete(self, names: list[str], *_: object) -> Answer:
        if self.indexes.pop(names[0], None) is None:
            return _no_index(names[0])
        return 200, {"acknowledged": True}

    def refresh(self, names: list[str], *_: object) -> Answer:
        if self._named(names[0]) is None:
            return _no_index(names[0])
        return 200, {"_shards": {"failed": 0}}

    def alias(self, names: list[str], *_: object) -> Answer:
        found: Json = {n: {} for n, each in self.indexes.items() if names[0] in each.aliases}
        if not found:
            return 404, {"error": f"alias [{names[0]}] missing", "status": 404}
        return 200, found

    def move(self, _: object, __: object, body: bytes) -> Answer:
        for action in orjson.loads(body)["actions"]:
            [(kind, told)] = action.items()
            aliases = self.indexes[told["index"]].aliases
            (aliases.add if kind == "add" else aliases.remove)(told["alias"])
        return 200, {"acknowledged": True}

    def mget(self, names: list[str], _: object, body: bytes) -> Answer:
        index = self._named(names[0])
        if index is None:
            return _no_index(names[0])
        docs: list[Json] = []
        for each in orjson.loads(body)["ids"]:
            found = index.documents.get(each)
            told = {"found": True, "_version": found[0], "_source": found[1]} if found else {}
            docs.append({"_id": each, "found": False, **told})
        return 200, {"docs": docs}

    def search(self, names: list[str], query: dict[str, list[str]], body: bytes) -> Answer:
        index = self._named(names[0])
        if index is None:
            return _no_index(names[0])
        asked = orjson.loads(body)
        hits = [
            {"_id": name, "_version": version, "_source": source}
            for name, (version, source) in index.documents.items()
        ]
        if "scroll" not in query:
            return 200, {"hits": {"hits": hits[: asked["size"]]}}
        starts = range(0, len(hits) + asked["size"], asked["size"])
        scroll = f"scroll-{len(self._scrolls)}"
        self._scrolls[scroll] = (
            {"hits": {"hits": hits[start : start + asked["size"]]}} for start in starts
        )
        return self._page(scroll)

    def scroll(self, _: object, __: object, body: bytes) -> Answer:
        return self._page(orjson.loads(body)["scroll_id"])

    def _page(self, scroll: str) -> Answer:
        page: Json = next(self._scrolls[scroll], {"hits": {"hits": []}})
        return 200, {"_scroll_id": scroll, **page}

    def end_scroll(self, *_: object) -> Answer:
        return 200, {"succeeded": True}

    def bulk(self, names: list[str], query: dict[str, list[str]], body: bytes) -> Answer:
        if not body.endswith(b"\n"):
            return 400, {"error": {"type": "illegal_argument_exception"}, "status": 400}
        lines = iter(body.split(b"\n")[:-1])
        items: list[Json] = []
        for line in lines:
            [(action, address)] = orjson.loads(line).items()
            source = orjson.loads(next(islice(lines, 1))) if action == "index" else None
            name = address.get("_index") or names[0]
            told = self._one(name, query, address, source)
            items.append({action: {"_id": address["_id"], **told}})
        self.bulks.append([next(iter(each.values()))["_id"] for each in items])
        errors = any("error" in next(iter(each.values())) for each in items)
        return 200, {"took": 1, "errors": errors, "items": items}

    def _one(
        self, name: str, query: dict[str, list[str]], address: Json, source: Json | None
    ) -> Json:
        index = self._named(name)
        if query.get("require_alias") == ["true"] and (index is None or name in self.indexes):
            return {"status": 404, "error": {"type": "index_not_found_exception"}}
        if index is None:  # made by the write itself
            properties = {"embedding": {"type": "float"}}
            index = self.indexes.setdefault(name, Index({"properties": properties}))
        if self.item_faults[address["_id"]]:
            status, kind, reason = self.item_faults[address["_id"]].popleft()
            return {"status": status, "error": {"type": kind, "reason": reason}}
        return self._apply(index, address, source)

    def _apply(self, index: Index, address: Json, source: Json | None) -> Json:
        name, version = address["_id"], address["version"]
        known = index.documents.get(name, (index.tombstones.get(name, -1), {}))[0]
        if version <= known:
            reason = f"[{name}]: version conflict, current version [{known}] is higher or equal"
            error = {"type": "version_conflict_engine_exception", "reason": reason}
            return {"status": 409, "error": error}
        wanted = index.vector.get("dimension", index.vector.get("dims"))
        if source is not None and wanted and len(source["embedding"]) != wanted:
            given = len(source["embedding"])
            cause = f"Vector dimension mismatch. Expected: {wanted}, Given: {given}"
            caused_by = {"type": "illegal_argument_exception", "reason": cause}
            error = {"type": "mapper_parsing_exception", "reason": "failed to parse field"}
            return {"status": 400, "error": {**error, "caused_by": caused_by}}
        self.writes[name] += 1
        was_there = index.documents.pop(name, None)
        if source is None:
            index.tombstones[name] = version
            return {
                "status": 200 if was_there else 404,
                "result": "deleted" if was_there else "not_found",
            }
        index.documents[name] = (version, source)
        return {"status": 200 if was_there else 201, "result": "created"}


def _no_index(name: str) -> Answer:
    error = {"type": "index_not_found_exception", "reason": f"no such index [{name}]"}
    return 404, {"error": error, "status": 404}


_ROUTES: tuple[tuple[str, str, Callable[..., Answer]], ...] = (
    ("POST", r"/_search/scroll", Search.scroll),
    ("DELETE", r"/_search/scroll", Search.end_scroll),
    ("POST", r"/_aliases", Search.move),
    ("GET", r"/_alias/([^/]+)", Search.alias),
    ("GET", r"/([^/_][^/]*)/_mapping", Search.mapping),
    ("POST", r"/([^/_][^/]*)/_refresh", Search.refresh),
    ("POST", r"/([^/_][^/]*)/_search", Search.search),
    ("POST", r"/([^/_][^/]*)/_mget", Search.mget),
    ("POST", r"/_bulk", Search.bulk),
    ("POST", r"/([^/_][^/]*)/_bulk", Search.bulk),
    ("PUT", r"/([^/_][^/]*)", Search.create),
    ("DELETE", r"/([^/_][^/]*)", Search.delete),
)


class _Server(ThreadingHTTPServer):
    """One that can end the connections which its clients keep."""

    def __init__(self, address: tuple[str, int], handler: type[BaseHTTPRequestHandler]) -> None:
        self._open: list[socket.socket] = []
        super().__init__(address, handler)

    def process_request(self, request: Any, client_address: Any) -> None:  # noqa: ANN401
        self._open.append(request)
        super().process_request(request, client_address)

    def cut(self) -> None:
        for each in self._open:
            with suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)


class _Handler(BaseHTTPRequestHandler):
    search: Search
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True

    def _serve(self) -> None:
        size = int(self.headers.get("content-length", "0"))
        asked = Asked(self.command, self.path, self.rfile.read(size))
        ruled, (status, body) = self.search.answer(asked)
        if ruled and ruled.is_silent:
            self.search.wait_until_closed()
            self.close_connection = True
            return
        if ruled:
            status = ruled.status
        content = orjson.dumps(ruled.body if ruled and not ruled.applied else body)
        self.send_response(status)
        for name, value in (ruled.headers if ruled else {}).items():
            self.send_header(name, value)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    do_GET = do_POST = do_PUT = do_DELETE = _serve  # noqa: N815 - the names of the base

    def log_message(self, format: str, *args: object) -> None:  # noqa: A002 - the name of the base
        del format, args
