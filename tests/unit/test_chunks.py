"""Chunks: the same each time, small enough, and nothing of the text is lost."""

import unicodedata

import pytest
from hypothesis import given
from hypothesis import strategies as st
from semantic_text_splitter import TextSplitter

from app.core.chunks import CHUNK_TOKENS, OVERLAP_TOKENS, WINDOW_CHARACTERS, split, tokens

LATIN = "The wire bonder lost its vacuum at 10:45, and the lot was put on hold. " * 200
CHINESE = "焊线机在上午失去真空。操作员手动重启了它，批次继续进行。" * 100  # noqa: RUF001
PIECES = st.sampled_from(
    [
        "a",
        "word ",
        "Satz. ",
        "\n",
        "\n\n",
        "  ",
        "焊",
        "真空。",
        "한국어 ",
        "e\u0301",
        "👩‍🔧",
        "🇩🇪",
        "\u200b",
        "x" * 300,
    ]
)


def uncovered(text: str, chunks: list[str]) -> str:
    """Return what of the text stands in no chunk, walking both in order."""
    left, place = "", 0
    for chunk in chunks:
        start = text.find(chunk, max(0, place - len(chunk)))
        assert start >= 0
        left += text[place:start]
        place = max(place, start + len(chunk))
    return left + text[place:]


@given(st.lists(PIECES, max_size=400).map("".join))
def test_nothing_but_space_is_lost_and_no_chunk_is_too_large(text: str) -> None:
    chunks = split(text)

    assert uncovered(text, chunks).strip() == ""
    assert all(tokens(chunk) <= CHUNK_TOKENS for chunk in chunks)
    assert all(chunk.strip() for chunk in chunks)
    assert split(text) == chunks


@pytest.mark.parametrize(("text", "most"), [(LATIN, 2048), (CHINESE, 512)])
def test_a_chunk_is_as_long_as_its_writing_allows(text: str, most: int) -> None:
    chunks = split(text)

    assert most / 2 < max(map(len, chunks)) <= most
    assert all(chunk.rstrip()[-1] in ".。" for chunk in chunks)


def test_each_half_of_a_mixed_document_has_its_own_size() -> None:
    sizes = [len(chunk) for chunk in split(LATIN + "\n\n" + CHINESE)]

    assert max(sizes) > 3 * min(sizes[1:-1])


def test_neighbours_share_a_little() -> None:
    numbered = " ".join(f"This is sentence number {number}." for number in range(300))
    first, second, *_ = split(numbered)

    shared = max(n for n in range(len(first)) if second.startswith(first[len(first) - n :]))
    assert 0 < shared < len(first) / 5


def test_no_character_is_cut() -> None:
    marked = "e\u0301" * 3000

    assert not any(unicodedata.combining(chunk[0]) for chunk in split(marked))


@pytest.mark.parametrize("text", ["", " ", "\n\t \u3000", "\u00a0"])
def test_only_space_has_no_chunks(text: str) -> None:
    assert split(text) == []


@pytest.mark.parametrize(
    "text",
    [
        pytest.param(" ".join(f"Lot {n} is on hold." for n in range(140_000)), id="sentences"),
        pytest.param("".join(f"{n:x}g" for n in range(500_000)), id="one word"),
        pytest.param("".join(chr(0x4E00 + n * n % 20011) for n in range(200_000)), id="CJK"),
    ],
)
def test_a_long_document_is_split(text: str) -> None:
    chunks = split(text)

    assert uncovered(text, chunks).strip() == ""
    assert all(tokens(chunk) <= CHUNK_TOKENS for chunk in chunks)
    assert len(chunks) < 1.3 * tokens(text) / (CHUNK_TOKENS - OVERLAP_TOKENS)


def test_chunks_do_not_show_where_the_splitter_looked_up() -> None:
    whole = TextSplitter.from_callback(tokens, CHUNK_TOKENS, overlap=OVERLAP_TOKENS, trim=False)
    document = "\n\n".join(f"{number}. {LATIN[: 700 + number]}" for number in range(60))

    assert len(document) > 4 * WINDOW_CHARACTERS
    assert split(document) == whole.chunks(document)


def test_no_character_is_cut_where_the_splitter_looks_up() -> None:
    for shift in range(9):
        chunks = split("x" * shift + "👩\u200d🔧" * 9000)

        assert all(chunk[0] in "x👩" and chunk[-1] in "x🔧" for chunk in chunks)
