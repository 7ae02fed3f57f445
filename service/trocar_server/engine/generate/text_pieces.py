"""Text pieces: what each token adds to the text, and where a stop string ends it.

# Note: [Texts of tokens]
A token may be a part of a character, and what a token adds depends on those before it: SentencePiece writes
the first word of a text without its space. So a few tokens before are decoded with it, and text whose last
character is incomplete is held back. So is text that may begin a stop string.
"""

from collections.abc import Awaitable, Callable, Sequence
from itertools import islice

Decode = Callable[[Sequence[Sequence[int]]], Awaitable[Sequence[str]]]
"""Returns the text of each list of token ids."""

_BEFORE = 5
"""Tokens of the prompt that are decoded with the first generated one."""
_INCOMPLETE = "\N{REPLACEMENT CHARACTER}"
MOST_PROMPT_TOKENS = 4096
"""Tokens of the prompts of a run whose texts are decoded: a caller waits for them."""


async def prompt_pieces(decode: Decode, prompts: Sequence[Sequence[int]]) -> list[list[str]]:
    """Return what each token of each prompt adds to its text; nothing for very long prompts.

    A token that ends within a character adds nothing, and the one that completes it all of it.

    Args:
        decode: Decodes token ids.
        prompts: The ids of each prompt.
    """
    if sum(map(len, prompts)) > MOST_PROMPT_TOKENS:
        return []
    windows = [ids[max(end - _BEFORE, 0) : end] for ids in prompts for end in range(len(ids))]
    tokens = [token_id for ids in prompts for token_id in ids]
    whole = [[*window, token_id] for window, token_id in zip(windows, tokens, strict=True)]
    texts = iter(await decode([*windows, *whole]))
    before = list(islice(texts, len(windows)))
    pieces = map(_added, before, texts)
    result = [list(islice(pieces, len(ids))) for ids in prompts]
    return result if any(map(any, result)) else []  # without a tokenizer all are empty


def _added(before: str, after: str) -> str:
    """Return what a text has more, without characters that its first and last tokens cut."""
    return after.strip(_INCOMPLETE)[len(before.strip(_INCOMPLETE)) :]


class TextPieces:
    """The text of one run, as it grows.

        pieces = TextPieces(decode, prompt_ids, stop=["END"])
        text, likely = await pieces.add(token_id, others)

    Args:
        decode: Decodes token ids.
        prompt: The ids of the prompt.
        stop: The texts that end the run.

    Attributes:
        has_stopped: Whether one of them was generated.
    """

    def __init__(self, decode: Decode, prompt: Sequence[int], stop: Sequence[str] = ()) -> None:
        self._decode = decode
        self._ids = list(prompt)
        self._first, self._shown = max(len(self._ids) - _BEFORE, 0), len(self._ids)
        self._stop = stop
        self._held = ""
        self.has_stopped = False

    async def add(self, token_id: int, others: Sequence[int] = ()) -> tuple[str, list[str]]:
        """Add a token; return what it shows of the text, and the texts of other tokens, each alone."""
        return (await self.add_all([(token_id, others)]))[0]

    async def add_all(self, added: Sequence[tuple[int, Sequence[int]]]) -> list[tuple[str, list[str]]]:
        """Add tokens one after the other, each with others; as `add`, with as few decodings as possible."""
        first, shown, ids = self._first, self._shown, list(self._ids)
        parts: list[Sequence[int]] = []
        for token_id, others in added:  # as if each of them ended a character
            ids.append(token_id)
            parts += [ids[first:shown], ids[first:], *([other] for other in others)]
            first, shown = shown, len(ids)
        texts = iter(await self._decode(parts))
        result: list[tuple[str, list[str]]] = []
        for token_id, others in added:
            self._ids.append(token_id)
            before, after, *likely = islice(texts, 2 + len(others))
            if after.endswith(_INCOMPLETE) or len(after) <= len(before):
                rest = added[len(result) + 1 :]
                return [*result, ("", likely), *(await self.add_all(rest) if rest else [])]
            self._first, self._shown = self._shown, len(self._ids)
            result.append((self._shown_of(after[len(before) :]), likely))
        return result

    async def alone(self, others: Sequence[int]) -> list[str]:
        """Return the text of each of some tokens, each alone."""
        return list(await self._decode([[other] for other in others])) if others else []

    async def rest(self) -> str:
        """Return the text that was held back, at the end of the run; with incomplete characters.

        It may hold a stop string, behind which an incomplete character came.
        """
        if self.has_stopped:
            return ""
        before, after = await self._decode([self._ids[self._first : self._shown], self._ids[self._first :]])
        return self._shown_of(after[len(before) :]) + self._held

    def _shown_of(self, piece: str) -> str:
        text = self._held + piece
        result = [place for stop in self._stop if (place := text.find(stop)) >= 0]
        if result:
            self.has_stopped, self._held = True, ""
            return text[: min(result)]
        kept = max((_begun(text, stop) for stop in self._stop), default=0)
        self._held = text[len(text) - kept :]
        return text[: len(text) - kept]


def _begun(text: str, stop: str) -> int:
    """Return how many characters at the end of a text may begin a stop string."""
    most = min(len(text), len(stop) - 1)
    return next((count for count in range(most, 0, -1) if stop.startswith(text[-count:])), 0)
