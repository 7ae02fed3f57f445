"""Positions: some of the tokens of a text, of its prompt and of what is generated. Plain data."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from trocar_api.reasons import ErrorReason
from trocar_server.errors import ServiceError

MAX_SPAN_CHARACTERS = 512
MAX_POSITION_SPANS = 256
MAX_TOKEN_IDS = 65_536


def require(is_right: bool, problem: str) -> None:
    """Refuse a declaration that is not right.

    Raises:
        ServiceError: `INVALID_ARGUMENT`.
    """
    if not is_right:
        raise ServiceError(ErrorReason.INVALID_ARGUMENT, problem)


@dataclass(frozen=True)
class TextSpan:
    """A part of a text: characters, every occurrence of a text, or the contents of a chat role; one of them.

    Attributes:
        characters: Start, and the character behind the last.
        text: What is looked for.
        role: Of the messages of a chat.
    """

    characters: tuple[int, int] | None = None
    text: str = ""
    role: str = ""

    def __post_init__(self) -> None:
        kinds = (self.characters is not None, bool(self.text), bool(self.role))
        require(sum(kinds) == 1, "a span has characters, a text or a role, which are not empty")
        longest = max(len(self.text), len(self.role))
        require(longest <= MAX_SPAN_CHARACTERS, f"a span of over {MAX_SPAN_CHARACTERS} characters of text")
        if self.characters is not None:
            start, stop = self.characters
            require(0 <= start < stop, f"{self}; a span starts at 0 or above and ends behind its start")

    def __str__(self) -> str:
        if self.characters is not None:
            return f"characters {self.characters[0]} to {self.characters[1]}"
        return f"the role '{self.role}'" if self.role else f"the text '{self.text}'"


@dataclass(frozen=True)
class PositionSet:
    """Some positions of a prompt or of generated tokens.

    Attributes:
        only: Single positions, negative ones from the end; None for a range.
        start: Of the range, as in a slice.
        stop: Of the range.
        step: Of the range, at least 1.
    """

    only: tuple[int, ...] | None = None
    start: int | None = None
    stop: int | None = None
    step: int = 1

    def of(self, name: str, count: int) -> frozenset[int]:
        """Return the selected ones of so many positions.

        Raises:
            ValueError: A single position is not among them, or none is selected; with this name.
        """
        if self.only is None:
            chosen = range(count)[slice(self.start, self.stop, self.step)]
            if not chosen:
                raise ValueError(f"{name}= selects none of its {count} tokens")
            return frozenset(chosen)
        for position in self.only:
            if not -count <= position < count:
                raise ValueError(f"position {position} of {name}= is outside of its {count} tokens")
        return frozenset(position % count for position in self.only)


class PromptTokens(Protocol):
    """The tokens of one text, without its padding."""

    @property
    def ids(self) -> Sequence[int]:
        """Their ids; empty where they are not known."""
        ...

    @property
    def count(self) -> int:
        """Their number."""
        ...

    def find(self, span: TextSpan, *, must_occur: bool) -> Sequence[int]:
        """Return the positions of the tokens that hold a character of a span.

        Raises:
            ValueError: The text has no such spans.
            ServiceError: The same, or it does not occur.
        """
        ...


@dataclass(frozen=True)
class Positions:
    """Some positions of a text. As a reduction they become `TokenRows` once the texts are tokenized.

    Attributes:
        prompt: Of the prompt; None for none.
        generated: Of the generated tokens; None for none.
        spans: Of the prompt: the tokens that hold characters of any of them, without special tokens.
        token_ids: Of the prompt: the tokens with any of these ids.
        but_not: Left out of all these; its spans and ids need not occur.
    """

    prompt: PositionSet | None = None
    generated: PositionSet | None = None
    spans: tuple[TextSpan, ...] = ()
    token_ids: tuple[int, ...] = ()
    but_not: "Positions | None" = None

    def __str__(self) -> str:
        return "positions of texts"

    @property
    def reads_text(self) -> bool:
        """Whether they depend on the tokens of the prompt, not on their number alone."""
        return bool(self.spans or self.token_ids) or (self.but_not is not None and self.but_not.reads_text)

    @property
    def has_generated(self) -> bool:
        """Whether generated tokens are named."""
        return self.generated is not None or (self.but_not is not None and self.but_not.has_generated)

    def of(self, prompt_count: int, new_count: int) -> frozenset[int]:
        """Return the selected positions of a text, counted from its start; they do not depend on its tokens.

        Args:
            prompt_count: The tokens of the prompt.
            new_count: The most generated tokens.

        Raises:
            ValueError: A clause selects nothing, or a position that is not there.
        """
        chosen = frozenset[int]() if self.prompt is None else self.prompt.of("prompt", prompt_count)
        if self.generated is not None:
            own = self.generated.of("generated", new_count)
            chosen |= {prompt_count + position for position in own}
        if self.but_not is not None:
            chosen -= self.but_not.of(prompt_count, new_count)
            if not chosen:
                raise ValueError("but_not= leaves no token")
        return chosen

    def resolved(self, text: PromptTokens, *, must_occur: bool = True) -> "Positions":
        """Return the same positions of one prompt as numbers.

        Args:
            text: The prompt.
            must_occur: Whether each span and each id must be in it.

        Raises:
            ValueError: A clause selects nothing, or a position that is not there.
            ServiceError: The same, of a span.
        """
        if not self.reads_text:
            return self
        chosen = set() if self.prompt is None else set(self.prompt.of("prompt", text.count))
        for span in self.spans:
            chosen.update(text.find(span, must_occur=must_occur))
        for token_id in self.token_ids:
            places = [place for place, own in enumerate(text.ids) if own == token_id]
            if must_occur and not places:
                raise ValueError(f"none of its tokens has the id {token_id}")
            chosen.update(places)
        but_not = None if self.but_not is None else self.but_not.resolved(text, must_occur=False)
        prompt = PositionSet(tuple(sorted(chosen))) if chosen else None
        return Positions(prompt, self.generated, but_not=but_not)
