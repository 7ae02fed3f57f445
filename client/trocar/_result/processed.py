"""Processed inputs: what the model's tokenizer or feature extractor made of texts and sound."""

from dataclasses import dataclass

import numpy as np

from trocar._base.names import few
from trocar._base.tables import html_table
from trocar._base.tensors import Array

_MOST_TOKENS = 24
"""Tokens of one sample in a table."""


@dataclass(frozen=True)
class ProcessedSample:
    """One sample after the processor."""

    length: int
    """Number of tokens, or of sound samples, without padding."""
    ids: tuple[int, ...] = ()
    """Of each token; empty for sound, as are the next three."""
    tokens: tuple[str, ...] = ()
    """As the vocabulary spells them."""
    spans: tuple[tuple[int, int], ...] = ()
    """Where each token begins and ends in its text, in characters; of a chat, in `rendered`. In a pair each
    text begins at 0. Empty where the tokenizer does not tell."""
    is_special: tuple[bool, ...] = ()
    """Whether each token is a special one."""
    rendered: str = ""
    """Of a chat: what its template made of it."""

    def __repr__(self) -> str:
        return f"<ProcessedSample of {self.length:,}: {few(self.tokens)}>"


@dataclass(frozen=True)
class ProcessedInput:
    """One input after the processor.

    maps = client.extract("mini", ["a sentence", "another one"], ["encoder.layer.3"])
    maps.tokens.lengths                      # (4, 4)
    maps.tokens.samples[0].tokens            # ("[CLS]", "a", "sentence", "[SEP]")
    """

    samples: tuple[ProcessedSample, ...]
    """One for each sample, in order."""
    padded_length: int
    """Tokens of each sample with its padding; 0 for sound."""
    pads_left: bool
    """Whether padding comes before the tokens."""
    arguments: tuple[str, ...]
    """The names of the arguments that it became, for example "input_ids"."""
    processor_digest: str
    """SHA-256 over the processor's files, as hexadecimal digits."""
    name: str = ""
    """The name of the input."""

    def __repr__(self) -> str:
        unit = "tokens" if self.padded_length else "values"
        return f"<ProcessedInput: {len(self.samples)} samples of {few(self.lengths)} {unit}>"

    def _repr_html_(self) -> str:
        """Show a row for each sample in a notebook."""
        rows = [
            (str(place), f"{one.length:,}", few(one.tokens, _MOST_TOKENS))
            for place, one in enumerate(self.samples)
        ]
        return html_table(("sample", "length", "tokens"), rows)

    @property
    def lengths(self) -> tuple[int, ...]:
        """Tokens of each sample, without padding."""
        return tuple(sample.length for sample in self.samples)

    @property
    def mask(self) -> Array:
        """An array (batch, padded length) that is True for tokens and False for padding."""
        places = np.arange(self.padded_length)
        lengths = np.array(self.lengths)[:, None]
        return places >= self.padded_length - lengths if self.pads_left else places < lengths

    def token_axis(self, shape: tuple[int, ...]) -> int:
        """Return the first dimension behind the batch that has the padded length.

        Raises:
            ValueError: There is none.
        """
        for axis, size in enumerate(shape):
            if axis and size == self.padded_length and shape[0] == len(self.samples):
                return axis
        raise ValueError(
            f"a value of shape {shape} has no dimension for {len(self.samples)} samples of "
            f"{self.padded_length} tokens"
        )
