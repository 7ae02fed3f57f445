"""Text positions: the tokens of each text at the positions of a tap or an edit.

    texts = TokenizedTexts.of_arrays(inputs, payloads)
    rows = texts.rows(Positions(prompt=PositionSet((-1,))))     # the last token of each text

Positions count in each text, from its own first token: padding has none, on the left or on the right.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Self

import torch

from trocar_api.reasons import ErrorReason
from trocar_server.engine.execute.arguments import tensor_of
from trocar_server.engine.request.plan import ArgumentInput, Payload, TensorInput
from trocar_server.engine.resolve.sample_text import SampleText
from trocar_server.errors import ServiceError
from trocar_server.processing.inputs import ProcessedInput, TextInput
from trocar_server.tensors.reductions import Positions, PromptTokens, TextSpan, TokenRows

_IDS, _MASK = "input_ids", "attention_mask"
_RANK = 2
"""(batch, tokens)."""


@dataclass(frozen=True)
class _ArrayText:
    """One text that was sent as an array of token ids."""

    ids: Sequence[int]
    """Empty in a dry run."""
    count: int

    def find(self, span: TextSpan, *, must_occur: bool) -> Sequence[int]:
        raise ValueError(f"{span}: it was sent as token ids, which have no characters")


@dataclass(frozen=True)
class TokenizedTexts:
    """The tokens of a batch of texts.

    Attributes:
        texts: The texts.
        own: For each text, where its own tokens are in the padded batch, in order.
        padded_length: The tokens of the padded batch.
    """

    texts: tuple[PromptTokens, ...]
    own: tuple[Sequence[int], ...]
    padded_length: int

    @classmethod
    def of_processed(cls, given: TextInput, made: ProcessedInput) -> Self:
        """Return the tokens of texts that the server tokenized."""
        length = made.padded_length
        firsts = [length - each.length if made.pads_left else 0 for each in made.samples]
        pairs = zip(given.entries, made.samples, strict=True)
        texts = tuple(SampleText(index, *pair) for index, pair in enumerate(pairs))
        own = [range(first, first + text.count) for first, text in zip(firsts, texts, strict=True)]
        return cls(texts, tuple(own), length)

    @classmethod
    def of_arrays(
        cls, inputs: Sequence[ArgumentInput], payloads: Mapping[str, Sequence[Payload]]
    ) -> Self | None:
        """Return the tokens of texts that were sent as arrays of token ids; None where none were.

        Args:
            inputs: The arguments, by name.
            payloads: Those of each argument; none in a dry run, where no token is padding.
        """
        tensors = {entry.name: entry for entry in inputs if isinstance(entry, TensorInput)}
        given = tensors.get(_IDS)
        if given is None or len(given.shape) != _RANK:
            return None
        count, length = given.shape
        ids, mask = (_tensor(tensors.get(name), payloads) for name in (_IDS, _MASK))
        is_known = mask is not None and mask.shape == given.shape
        is_own = mask != 0 if is_known and mask is not None else torch.ones(count, length, dtype=torch.bool)
        own = tuple(tuple(torch.nonzero(row)[:, 0].tolist()) for row in is_own)
        numbers = (
            [()] * count
            if ids is None
            else [row[kept].tolist() for row, kept in zip(ids, is_own, strict=True)]
        )
        texts = tuple(_ArrayText(row, len(places)) for row, places in zip(numbers, own, strict=True))
        return cls(texts, own, length)

    def rows(self, positions: Positions) -> TokenRows:
        """Return the rows of a padded value at positions of each text.

        Raises:
            ServiceError: `INVALID_ARGUMENT`, naming the text: a position is outside of it, or a clause
                selects nothing.
        """
        rows = []
        for index, own in enumerate(self.own):
            with _named(index):
                chosen = sorted(positions.resolved(self.texts[index]).of(len(own), 0))
            rows.append(tuple(own[position] for position in chosen))
        return TokenRows(tuple(rows), self.padded_length, tuple(own[0] for own in self.own))

    def of_prompt(self, positions: Positions) -> Positions:
        """Return positions of the only text, a prompt, as numbers.

        Raises:
            ServiceError: As `rows`.
        """
        with _named(0):
            return positions.resolved(self.texts[0])


def _tensor(entry: TensorInput | None, payloads: Mapping[str, Sequence[Payload]]) -> torch.Tensor | None:
    if entry is None or not payloads[entry.name]:
        return None
    return tensor_of(entry.dtype, entry.shape, payloads[entry.name][0])


@contextmanager
def _named(index: int) -> Iterator[None]:
    """Name the text in errors of the body."""
    try:
        yield
    except (ValueError, ServiceError) as error:
        message = error.message if isinstance(error, ServiceError) else f"text {index}: {error}"
        raise ServiceError(ErrorReason.INVALID_ARGUMENT, message, sample=str(index)) from None
