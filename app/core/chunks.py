"""A record's text into chunks: our sizes, a library's sense for where sentences end."""

import re
from collections.abc import Iterator
from functools import cache

from semantic_text_splitter import TextSplitter

CHUNK_TOKENS, OVERLAP_TOKENS = 512, 51
"""What the smaller models read at once, and a tenth of it said again at the seam."""

LATIN_CHARACTERS = 4
"""To a token, about, in writing with spaces; of Chinese, Japanese and Korean it is one."""

CJK = re.compile(
    "[\u2e80-\u9fff\uac00-\ud7a3\uf900-\ufaff\ufe30-\ufe4f\uff00-\uffef\U00020000-\U0003ffff]"
)


WINDOW_CHARACTERS = 8192
"""What the splitter sees at a time: its work grows with the square of a run without a break."""


def tokens(text: str) -> int:
    """Estimate how many tokens a text has, by its characters."""
    dense = 0 if text.isascii() else len(CJK.findall(text))
    return dense + -(-(len(text) - dense) // LATIN_CHARACTERS)


def split(text: str) -> list[str]:
    """Return the chunks of a text, in order and the same each time; none of them is only space.

    Every character that is not white space stands in one of them, some in two. No chunk has more
    than CHUNK_TOKENS; it ends, where it can, with a paragraph or a sentence, and never within a
    character.
    """
    return [chunk for chunk in _windowed(text) if chunk.strip()]


def _windowed(text: str) -> Iterator[str]:
    # The last chunk of a window was cut by the window's end: it is where the next one begins.
    start = 0
    while len(text) - start > WINDOW_CHARACTERS:
        *whole, (last, _) = _splitter().chunk_indices(text[start : start + WINDOW_CHARACTERS])
        for _, chunk in whole:
            yield chunk
        start += last
    yield from _splitter().chunks(text[start:])


@cache
def _splitter() -> TextSplitter:
    return TextSplitter.from_callback(tokens, CHUNK_TOKENS, overlap=OVERLAP_TOKENS, trim=False)
