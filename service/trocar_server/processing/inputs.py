"""Processor inputs: texts and sound as requested, and what the processor made of them. Plain data."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, TypeAlias

from trocar_api.reasons import ErrorReason
from trocar_server.config import Limits
from trocar_server.errors import ServiceError

ChatMessage: TypeAlias = tuple[str, str | tuple[tuple[str, str], ...]]
"""Role and content of a message; the content is a text, or parts."""


@dataclass(frozen=True)
class TextEntry:
    """One sample of a batch of texts.

    Attributes:
        kind: Type of `content`.
        content: The text; two texts; (role, content) of each chat message, whose content is a text, or parts:
            ("text", the text) and ("image", ""); token ids; or words.
    """

    kind: Literal["text", "pair", "chat", "ids", "words"]
    content: str | tuple[str, ...] | tuple[ChatMessage, ...] | tuple[int, ...]

    @property
    def character_count(self) -> int:
        """Characters of all its texts."""
        return _characters(self.content)


def _characters(content: object) -> int:
    """Return the characters of nested texts; a token id counts as one."""
    if isinstance(content, tuple):
        return sum(map(_characters, content))
    return len(content) if isinstance(content, str) else 1


@dataclass(frozen=True)
class TextOptions:
    """Options of the tokenization of a batch; see `TextBatch` of the wire."""

    max_tokens: int | None = None
    truncate: bool = False
    add_special_tokens: bool = True
    template: str = ""
    add_generation_prompt: bool = False


@dataclass(frozen=True)
class TextInput:
    """A batch of texts. No payloads."""

    name: str
    entries: tuple[TextEntry, ...]
    options: TextOptions = TextOptions()

    @property
    def row_count(self) -> int:
        """Number of samples."""
        return len(self.entries)


@dataclass(frozen=True)
class AudioSpec:
    """One clip: encoded when `sample_rate` is 0, otherwise float32 samples. One payload."""

    byte_count: int
    sample_rate: int = 0


@dataclass(frozen=True)
class AudioInput:
    """A batch of clips of sound: one payload each."""

    name: str
    clips: tuple[AudioSpec, ...]
    first_payload: int
    """The position of its first payload among those of all inputs."""

    @property
    def row_count(self) -> int:
        """Number of samples."""
        return len(self.clips)


ProcessorInput: TypeAlias = TextInput | AudioInput


@dataclass(frozen=True)
class ImageTextInput:
    """Texts with images, for a processor that takes both together.

    Attributes:
        texts: The texts; None for images alone.
        sizes: Height and width of each image.
    """

    texts: TextInput | None
    sizes: tuple[tuple[int, int], ...]


def check_characters(inputs: Sequence[ProcessorInput], limits: Limits) -> None:
    """Refuse texts that are too long together.

    Raises:
        ServiceError: `REQUEST_TOO_LARGE`.
    """
    given = [entry for entry in inputs if isinstance(entry, TextInput)]
    count = sum(entry.character_count for one in given for entry in one.entries)
    if count > limits.max_text_characters:
        raise ServiceError(
            ErrorReason.REQUEST_TOO_LARGE,
            f"the texts have {count:,} characters, the limit is {limits.max_text_characters:,}; send fewer",
            limit=str(limits.max_text_characters),
        )


@dataclass(frozen=True)
class ProcessedSample:
    """What the processor made of one sample; see `ProcessedSample` of the wire."""

    length: int
    token_ids: tuple[int, ...] = ()
    tokens: tuple[str, ...] = ()
    starts: tuple[int, ...] = ()
    ends: tuple[int, ...] = ()
    is_special: tuple[bool, ...] = ()
    rendered: str = ""
    texts: tuple[int, ...] = ()
    """Of a pair: in which of its texts each token is, 0 or 1; -1 for special tokens."""
    words: tuple[int, ...] = ()
    """The word of each token, from 0, of a pair in each of its texts; -1 for special tokens. Empty where the
    tokenizer does not tell."""
    contents: tuple[tuple[str, int, int], ...] | None = None
    """Of a chat: role, start and stop of each text of a message in `rendered`; None where it is not found."""


@dataclass(frozen=True)
class ProcessedInput:
    """What the processor made of one input; see `ProcessedInput` of the wire."""

    name: str
    samples: tuple[ProcessedSample, ...]
    arguments: tuple[str, ...]
    digest: bytes
    padded_length: int = 0
    pads_left: bool = False
