"""Any server with OpenAI's `POST /v1/embeddings`: OpenAI, TEI, vLLM, Infinity, Ollama."""

from collections.abc import Sequence
from typing import Any, cast

from app.adapters.http import Http
from app.core.errors import AnswerFault
from app.core.ports import EmbedderOptions


class OpenAI:
    """A server that answers with one entry a text, which names the text by its `index`."""

    name = "openai"

    def __init__(self, http: Http, path: str) -> None:
        self._http = http
        self._path = path

    def embed(self, texts: Sequence[str], *, model: str, seconds: float) -> list[list[float]]:
        """Return one vector per text, placed by index.

        Entries that do not name their text are believed for a single text only: asked one by one,
        a server that never sends an index is served too, and no vector lands on a neighbour's row.
        """
        if not texts:
            return []
        body = {"model": model, "input": list(texts), "encoding_format": "float"}
        answer = self._http.post_json(self._path, body, seconds=seconds, texts=texts)
        entries = cast("list[Any] | None", answer.get("data"))
        if not isinstance(entries, list):
            raise AnswerFault("the answer has no list of data")
        if len(entries) != len(texts):
            raise AnswerFault(f"{len(entries)} vectors for {len(texts)} texts")
        return _placed(entries)

    def digest(self, model: str, *, seconds: float) -> str | None:
        """Return None: it does not tell."""
        del model, seconds
        return None

    def close(self) -> None:
        """Close the connections."""
        self._http.close()


def _placed(entries: list[Any]) -> list[list[float]]:
    count = len(entries)
    vectors: dict[int, list[float]] = {}
    for entry in entries:
        match entry:
            case {"embedding": list(), "index": int(index)} if 0 <= index < count:
                vectors[index] = entry["embedding"]
            case {"embedding": list()} if count == 1 and "index" not in entry:
                vectors[0] = entry["embedding"]
            case {"embedding": list()}:
                raise AnswerFault(f"an entry does not say which of {count} texts it is for")
            case _:
                raise AnswerFault("an entry has no embedding that is a list")
    if len(vectors) != count:
        raise AnswerFault(f"{count} entries are for {len(vectors)} of {count} texts")
    return [vectors[index] for index in range(count)]


def build(options: EmbedderOptions) -> OpenAI:
    """Make the embedder; the URL may end with /v1 or not. Nothing is sent yet."""
    has_version = options.url.rstrip("/").endswith("/v1")
    path = "/embeddings" if has_version else "/v1/embeddings"
    return OpenAI(Http(options.url, key=options.api_key), path)
