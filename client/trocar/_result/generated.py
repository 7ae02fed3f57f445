"""Generated tokens, and what was done while they were generated."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Literal, TypeAlias

import numpy as np
from safetensors.numpy import save_file

from trocar._base.names import unknown_name
from trocar._base.replacement import replacement
from trocar._result.generated_view import LOGPROB, sequences_view
from trocar._result.likely_tokens import IDS, LikelyToken, lens_name, likely_tokens, own_names

if TYPE_CHECKING:
    import os
    from collections.abc import Mapping, Sequence

    from trocar._base.tensors import Array
    from trocar._result.generated_view import ColourBy
    from trocar._result.token_view import TokenView

FinishReason: TypeAlias = Literal["length", "stop_token", "stop_string", "gate"]
"""Why a text ended: the most tokens were generated; a token that ends it; a stop string; `stop_when`."""


@dataclass(frozen=True)
class GeneratedToken:
    """One generated token."""

    position: int
    """Its position in the text, the prompt included; from 0."""
    token_id: int
    """Its id."""
    text: str
    """What it adds to the text; empty while a character is incomplete, and for a token that ends the text."""
    logprob: float
    """The logarithm of its probability, before temperature, penalties and bias."""
    likely: tuple[LikelyToken, ...] = ()
    """The most likely tokens, most likely first, for `logprobs=`."""
    prompt: int = 0
    """The index of its prompt in the call."""
    sample: int = 0
    """The index of its sample, see `sample_index=`."""

    def __str__(self) -> str:
        return self.text


@dataclass(frozen=True)
class EditCount:
    """Where an edit was applied."""

    prompt: int
    """Number of positions of the prompt."""
    generated: int
    """Number of positions of generated tokens."""
    gated_out: int = 0
    """Selected positions where its gate kept the value as it was."""


@dataclass
class SequenceParts:
    """What was received of a sequence; `GeneratedSequence` reads it."""

    prompt: int
    sample: int
    prompt_ids: tuple[int, ...]
    expansions: Mapping[str, tuple[str, ...]]
    prompt_texts: tuple[str, ...] = ()
    """What each token of the prompt adds to its text; empty where the server does not tell."""
    tokens: list[GeneratedToken] = field(default_factory=list)
    rows: dict[str, list[Array]] = field(default_factory=dict)
    """By name of the value, of each pass."""
    positions: dict[str, list[int]] = field(default_factory=dict)
    token_texts: dict[int, str] = field(default_factory=dict)
    """Of the tokens that lenses have read."""
    held_text: str = ""
    """Sent at the end."""
    reason: FinishReason | None = None
    """None before the end."""
    edit_counts: tuple[EditCount, ...] = ()


class GeneratedSequence:
    """One generated text with its values; `run.sequences` has them, a prompt's samples next to each other.

    run = client.generate("llama", ["one prompt", "another"], n=2, taps=["layer[10]"])
    for sequence in run.sequences:
        print(sequence.prompt, sequence.sample, sequence.text, sequence["layer[10]"].shape)
    """

    def __init__(self, parts: SequenceParts) -> None:
        self._parts = parts

    @property
    def prompt(self) -> int:
        """The index of its prompt in the call."""
        return self._parts.prompt

    @property
    def sample(self) -> int:
        """The index of its sample."""
        return self._parts.sample

    @property
    def prompt_ids(self) -> tuple[int, ...]:
        """The ids of the tokens of its prompt."""
        return self._parts.prompt_ids

    @property
    def prompt_texts(self) -> tuple[str, ...]:
        """What each token of its prompt adds to the text; empty for a token that ends within a character.

        All are empty for a model without a tokenizer, and where the prompts of a run have more than 4,096
        tokens.
        """
        return self._parts.prompt_texts or ("",) * len(self.prompt_ids)

    @property
    def tokens(self) -> tuple[GeneratedToken, ...]:
        """The generated tokens."""
        return tuple(self._parts.tokens)

    @property
    def token_ids(self) -> tuple[int, ...]:
        """The ids of the generated tokens, with that of the token that ended the text."""
        return tuple(token.token_id for token in self._parts.tokens)

    @property
    def logprobs(self) -> tuple[float, ...]:
        """The logarithm of each generated token's probability."""
        return tuple(token.logprob for token in self._parts.tokens)

    @property
    def text(self) -> str:
        """The generated text, without the prompt."""
        return "".join(token.text for token in self._parts.tokens) + self._parts.held_text

    @property
    def is_finished(self) -> bool:
        """Whether its end was received."""
        return self._parts.reason is not None

    @property
    def finish_reason(self) -> FinishReason:
        """Why the text ended.

        Raises:
            RuntimeError: The run was closed before.
        """
        if self._parts.reason is None:
            raise RuntimeError("the run was closed before the end of this text, which has no reason then")
        return self._parts.reason

    @property
    def edit_counts(self) -> tuple[EditCount, ...]:
        """For each edit, the positions at which it was applied."""
        return self._parts.edit_counts

    @property
    def values(self) -> tuple[str, ...]:
        """The names of the values, in the order of the taps."""
        return tuple(self._parts.rows)

    def __getitem__(self, name: str) -> Array:
        """Return the rows of a value, one for each computed position: prompt, then generated tokens.

        The last generated token has none: no pass computed it.

        Raises:
            KeyError: No value has this name.
        """
        return np.concatenate(self._parts.rows[self._name(name)])

    def positions(self, name: str) -> tuple[int, ...]:
        """Return the position of each row of a value, from 0 at the start of the prompt.

        Raises:
            KeyError: No value has this name.
        """
        return tuple(self._parts.positions[self._name(name)])

    def lens(self, name: str) -> list[tuple[LikelyToken, ...]]:
        """Return what a `trocar.lens(...)` read at each computed position, most likely token first.

        Raises:
            KeyError: No lens has this name.
        """
        name = lens_name(name, self._parts.rows, self._parts.expansions)
        return likely_tokens(self[name], self[f"{name}{IDS}"], self._parts.token_texts)

    def lens_positions(self, name: str) -> tuple[int, ...]:
        """Return the position of each entry of `lens(name)`.

        Raises:
            KeyError: No lens has this name.
        """
        return self.positions(lens_name(name, self._parts.rows, self._parts.expansions))

    def _name(self, name: str) -> str:
        names = self._parts.rows
        if name not in names:
            expanded = own_names(self._parts.expansions.get(name, ()))
            if len(expanded) != 1:
                raise unknown_name("value", name, names)
            name = expanded[0]
        if name not in names:
            raise KeyError(f"'{name}' has no values: the text ended before any of its positions was computed")
        return name

    def save(self, path: str | os.PathLike[str]) -> None:
        """Save the values to a safetensors file, with the ids of all tokens as `token_ids`.

        Its metadata have the length of the prompt, and the positions of each value's rows as JSON.
        """
        ids = np.array([*self.prompt_ids, *self.token_ids], np.int64)
        values = {name: np.ascontiguousarray(self[name]) for name in self.values}
        positions = json.dumps({name: self.positions(name) for name in values})
        metadata = {"prompt_tokens": str(len(self.prompt_ids)), "positions": positions, "text": self.text}
        with replacement(Path(path)) as part:
            save_file({**values, "token_ids": ids}, part, metadata)

    def as_inputs(self) -> list[list[int]]:
        """Return prompt and generated tokens as inputs, for `extract` or `gradients` on the finished text."""
        return [[*self.prompt_ids, *self.token_ids]]

    def show(self, colour_by: ColourBy = LOGPROB, *, positions: Sequence[int] | None = None) -> TokenView:
        """Return the text with coloured tokens, for a notebook; the prompt comes before it.

            sequence.show()                              # by log-probability
            sequence.show("lens:layer[10]")              # by what a lens gave each token, one position before
            sequence.show(np.linalg.norm(sequence["layer[10]"], axis=-1))

        Args:
            colour_by: "logprob"; "lens:" with the name of a `trocar.lens(...)` among the taps; an array of
                one number for each position; None for no colours.
            positions: The positions of the numbers of an array, as `positions(name)` returns them; when None
                they begin at 0 and end at the last token, or at the one before, which has no values.

        Raises:
            KeyError: No lens has this name.
            ValueError: `colour_by` is another word, or not one number for each position.
        """
        return sequences_view([self], None, colour_by, positions)

    def _repr_html_(self) -> str:
        """Show the text in a notebook, coloured by log-probability."""
        return self.show()._repr_html_()

    def __str__(self) -> str:
        return self.text

    def __repr__(self) -> str:
        kind, count = type(self).__name__, len(self._parts.tokens)
        return f"<{kind} prompt={self.prompt} sample={self.sample}: {count} tokens>"
