"""Ollama: `POST /api/embed`, where a text is never cut to fit."""

from collections.abc import Sequence
from typing import cast

from app.adapters.http import Call, Http
from app.core.errors import AnswerFault
from app.core.ports import EmbedderOptions


class Ollama:
    """An Ollama server, or anything that speaks its `/api/embed`."""

    name = "ollama"

    def __init__(self, http: Http) -> None:
        self._http = http

    def embed(self, texts: Sequence[str], *, model: str, seconds: float) -> list[list[float]]:
        """Return one vector per text; how long the model stays loaded is the server's setting."""
        if not texts:
            return []
        body = {"model": model, "input": list(texts), "truncate": False}
        answer = self._http.post_json("/api/embed", body, seconds=seconds, texts=texts)
        vectors = cast("list[list[float]] | None", answer.get("embeddings"))
        if not isinstance(vectors, list):
            raise AnswerFault("the answer has no list of embeddings")
        if len(vectors) != len(texts):
            raise AnswerFault(f"{len(vectors)} vectors for {len(texts)} texts")
        return vectors

    def digest(self, model: str, *, seconds: float) -> str | None:
        """Return the digest that `/api/tags` lists the model with."""
        answer = self._http.send(Call("GET", "/api/tags"), seconds=seconds).body
        for each in cast("list[dict[str, object]]", answer.get("models") or []):
            if each.get("name") in (model, f"{model}:latest"):
                return str(each.get("digest") or "") or None
        return None

    def close(self) -> None:
        """Close the connections."""
        self._http.close()


def build(options: EmbedderOptions) -> Ollama:
    """Make the embedder; nothing is sent yet."""
    return Ollama(Http(options.url, key=options.api_key))
