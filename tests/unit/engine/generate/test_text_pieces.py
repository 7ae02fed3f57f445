"""What each token adds to a text, and where stop strings end it."""

import asyncio
from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trocar_server.engine.generate.text_pieces import MOST_PROMPT_TOKENS, TextPieces, prompt_pieces


async def bytes_of(lists: Sequence[Sequence[int]]) -> list[str]:
    """Decode tokens that are bytes."""
    return [bytes(ids).decode(errors="replace") for ids in lists]


async def said(text: str, stop: Sequence[str] = (), prompt: str = "Hallo: ") -> tuple[str, bool, list[str]]:
    pieces = TextPieces(bytes_of, list(prompt.encode()), stop)
    shown: list[str] = []
    for token in text.encode():
        shown.append((await pieces.add(token))[0])
        if pieces.has_stopped:
            break
    return "".join(shown) + await pieces.rest(), pieces.has_stopped, shown


@pytest.mark.parametrize("text", ["plain", "naïve", "日本語", "🙂 and 🙃"])
def test_characters_come_whole(text: str) -> None:
    whole, _, shown = asyncio.run(said(text))
    assert whole == text
    assert all("\ufffd" not in piece for piece in shown)


def test_an_incomplete_character_comes_at_the_end() -> None:
    async def run() -> str:
        pieces = TextPieces(bytes_of, [])
        for token in "é".encode()[:1]:
            assert (await pieces.add(token))[0] == ""
        return await pieces.rest()

    assert asyncio.run(run()) == "\ufffd"


@given(st.text("abé\n", max_size=20), st.lists(st.text("abé\n", min_size=1, max_size=4), max_size=3))
def test_a_text_ends_before_the_first_stop_string(text: str, stop: list[str]) -> None:
    whole, has_stopped, _ = asyncio.run(said(text, stop))
    ends = [text.find(one) + len(one) for one in stop if one in text]
    if not ends:
        assert (whole, has_stopped) == (text, False)
        return
    seen = text[: min(ends)]  # what was said when one was complete
    assert has_stopped
    assert whole == seen[: min(place for one in stop if (place := seen.find(one)) >= 0)]


@given(st.text("abé日🙂", max_size=12), st.lists(st.integers(1, 5), min_size=1, max_size=12))
def test_tokens_that_are_added_together_show_what_they_show_one_by_one(text: str, sizes: list[int]) -> None:
    async def run() -> None:
        one, several = (TextPieces(bytes_of, list(b"Hallo: ")) for _ in range(2))
        tokens = [(token, [token, 65]) for token in text.encode()]
        expected = [await one.add(*each) for each in tokens]
        shown: list[tuple[str, list[str]]] = []
        for size in [*sizes, len(tokens)]:
            taken, tokens = tokens[:size], tokens[size:]
            shown += await several.add_all(taken) if taken else []
        assert shown == expected
        assert await several.rest() == await one.rest()

    asyncio.run(run())


def test_a_stop_string_before_an_incomplete_character_ends_the_text() -> None:
    async def run() -> tuple[str, bool]:
        tokens = {1: b"a", 2: b"END\xc3"}

        async def decode(lists: Sequence[Sequence[int]]) -> list[str]:
            return [b"".join(tokens[each] for each in ids).decode(errors="replace") for ids in lists]

        pieces = TextPieces(decode, [], ["END"])
        shown = [(await pieces.add(token))[0] for token in (1, 2)]
        return "".join(shown) + await pieces.rest(), pieces.has_stopped

    assert asyncio.run(run()) == ("a", True)


def test_others_are_spelled_alone() -> None:
    async def run() -> list[str]:
        return (await TextPieces(bytes_of, []).add(65, [66, 67]))[1]

    assert asyncio.run(run()) == ["B", "C"]


def prompt_texts(*texts: str) -> list[list[str]]:
    return asyncio.run(prompt_pieces(bytes_of, [list(text.encode()) for text in texts]))


@given(st.lists(st.text("abé日🙂\n", max_size=12).filter(bool), min_size=1, max_size=3))
def test_the_texts_of_prompt_tokens_are_the_prompts(texts: list[str]) -> None:
    pieces = prompt_texts(*texts)
    assert ["".join(each) for each in pieces] == texts
    assert [len(each) for each in pieces] == [len(text.encode()) for text in texts]


def test_a_character_belongs_to_the_token_that_completes_it() -> None:
    assert prompt_texts("aé") == [["a", "", "é"]]


def test_prompts_without_texts_have_none() -> None:
    async def nothing(lists: Sequence[Sequence[int]]) -> list[str]:
        return [""] * len(lists)

    assert asyncio.run(prompt_pieces(nothing, [[1, 2], [3]])) == []
    assert prompt_texts("a" * MOST_PROMPT_TOKENS) == [["a"] * MOST_PROMPT_TOKENS]
    assert prompt_texts("a" * MOST_PROMPT_TOKENS, "b") == []
