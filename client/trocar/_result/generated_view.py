"""Views of generated texts: which number colours each token, and what is told of it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal, TypeAlias

import numpy as np

from trocar._base.names import few
from trocar._base.tables import number_text
from trocar._base.tensors import Array, float_array, is_array
from trocar._result.likely_tokens import LikelyToken
from trocar._result.token_view import SURPRISE, Piece, Scale, TextPieces, TokenView, scale_of

if TYPE_CHECKING:
    from trocar._result.generated import GeneratedSequence, GeneratedToken

ColourBy: TypeAlias = Literal["logprob"] | str | Array | Sequence[float] | None
"""What colours tokens: "logprob", "lens:" with the name of a lens, or a number for each position."""

LOGPROB = "logprob"
_LENS = "lens:"
_MOST_LIKELY = 5
_INCOMPLETE = "\N{REPLACEMENT CHARACTER}"
MOST_SEQUENCES = 16
"""Texts of a run in a view."""


@dataclass(frozen=True)
class Colouring:
    """The numbers of a text's tokens."""

    scale: Scale | None = None
    values: Mapping[int, float] = field(default_factory=dict)
    """By position."""
    notes: Mapping[int, str] = field(default_factory=dict)
    """A line about the number, by position."""


def colouring(sequence: GeneratedSequence, by: ColourBy, positions: Sequence[int] | None = None) -> Colouring:
    """Return the numbers that colour the tokens of a text.

    Args:
        sequence: The text.
        by: As in `GeneratedSequence.show`.
        positions: Of the numbers.

    Raises:
        KeyError: No lens has this name.
        TypeError: It is neither a name nor numbers.
        ValueError: Another name, or not one number for each position.
    """
    if positions is not None and (by is None or isinstance(by, str)):
        raise ValueError("positions= belong to an array; a name has its own")
    if by is None:
        return Colouring()
    if not isinstance(by, str):
        return _by_numbers(sequence, by, positions)
    if by == LOGPROB:
        return Colouring(SURPRISE, {token.position: -token.logprob for token in sequence.tokens})
    if by.startswith(_LENS):
        return _by_lens(sequence, by.removeprefix(_LENS))
    raise ValueError(f'colour_by={by!r} is not "logprob", "lens:<name>" or a number for each position')


def _by_lens(sequence: GeneratedSequence, name: str) -> Colouring:
    """Colour each token by what a lens gave it, at the position before."""
    ids = (*sequence.prompt_ids, *sequence.token_ids)
    values, notes = {}, {}
    for position, tokens in zip(sequence.lens_positions(name), sequence.lens(name), strict=True):
        if position + 1 < len(ids):
            own = [each.logprob for each in tokens if each.token_id == ids[position + 1]]
            values[position + 1] = -(own[0] if own else tokens[-1].logprob)
            which = "" if own else f"not among the {len(tokens)} most likely; "
            notes[position + 1] = f"lens {name}: {which}{_listed(tokens)}"
    return Colouring(SURPRISE, values, notes)


def _by_numbers(
    sequence: GeneratedSequence, by: Array | Sequence[float], positions: Sequence[int] | None
) -> Colouring:
    numbers = float_array(by if is_array(by) else np.asarray(by)).astype(np.float64)
    count = len(sequence.prompt_ids) + len(sequence.tokens)
    if positions is None:
        if numbers.shape not in {(count,), (count - 1,)}:
            raise ValueError(
                f"colour_by has shape {numbers.shape}; the text has {count} tokens, of which the last has no "
                "values. Give one number for each, or positions=, such as run.positions(name)"
            )
        positions = range(len(numbers))
    elif numbers.shape != (len(positions),):
        raise ValueError(f"colour_by has shape {numbers.shape} for {len(positions)} positions")
    wrong = [position for position in positions if not 0 <= position < count]
    if wrong:
        raise ValueError(f"positions {few(wrong)}: the text has {count} tokens, counted from 0")
    values = dict(zip(positions, numbers.tolist(), strict=True))
    notes = {position: f"value {number_text(value)}" for position, value in values.items()}
    return Colouring(scale_of(numbers), values, notes)


def text_pieces(sequence: GeneratedSequence, colours: Colouring, title: str = "") -> TextPieces:
    """Return the tokens of a text with their numbers."""
    prompt = tuple(
        _piece(position, token_id, text, (), colours)
        for position, (token_id, text) in enumerate(
            zip(sequence.prompt_ids, sequence.prompt_texts, strict=True)
        )
    )
    generated = tuple(
        _piece(token.position, token.token_id, token.text or _own_text(token), _notes(token), colours)
        for token in sequence.tokens
    )
    return TextPieces(prompt, generated, sequence.text[len("".join(map(str, sequence.tokens))) :], title)


def _piece(position: int, token_id: int, text: str, notes: tuple[str, ...], colours: Colouring) -> Piece:
    own = colours.notes.get(position)
    value = colours.values.get(position, np.nan)
    return Piece(text, token_id, position, (*notes, *([own] if own else [])), value)


def _own_text(token: GeneratedToken) -> str:
    """Return the text of a token that adds none, such as an end token, if it is among the likely ones."""
    texts = [each.text for each in token.likely if each.token_id == token.token_id]
    return texts[0] if texts and _INCOMPLETE not in texts[0] else ""


def _notes(token: GeneratedToken) -> tuple[str, ...]:
    chance = f"log-probability {token.logprob:.4g} ({np.exp(token.logprob):.2%})"
    return (chance, f"likely: {_listed(token.likely)}") if token.likely else (chance,)


def _listed(tokens: Sequence[LikelyToken]) -> str:
    return ", ".join(f"{each.text!r} {each.logprob:.3g}" for each in tokens[:_MOST_LIKELY])


def sequences_view(
    sequences: Sequence[GeneratedSequence],
    baseline: Sequence[GeneratedSequence] | None,
    by: ColourBy,
    positions: Sequence[int] | None = None,
) -> TokenView:
    """Return a view of the texts of a run, beside its baseline if that was read.

    Args:
        sequences: The texts.
        baseline: The texts without edits.
        by: As in `GeneratedSequence.show`. Numbers colour the only text, and no baseline.
        positions: Of the numbers.

    Raises:
        ValueError: As `colouring`; or numbers for several texts.
    """
    is_named = by is None or isinstance(by, str)
    if not is_named and len(sequences) > 1:
        raise ValueError(
            f"numbers colour one text, and the run has {len(sequences)}: call show of run.sequences[i]"
        )
    shown = sequences[:MOST_SEQUENCES]
    colours = [colouring(each, by, positions) for each in shown]
    scale = next((one.scale for one in colours), None)
    with_edits = [] if baseline is None else ["with edits"]
    columns = [_column(shown, colours, [*with_edits, *_left_out(sequences)])]
    if baseline is not None:
        plain = baseline[:MOST_SEQUENCES]
        plain_colours = [colouring(each, by) if is_named else Colouring() for each in plain]
        columns.append(_column(plain, plain_colours, ["without edits", *_left_out(baseline)]))
    return TokenView(columns, scale, sequences_text(sequences))


def _left_out(sequences: Sequence[GeneratedSequence]) -> list[str]:
    count = len(sequences) - MOST_SEQUENCES
    return [f"the first {MOST_SEQUENCES} of {len(sequences):,} texts"] if count > 0 else []


def _column(
    sequences: Sequence[GeneratedSequence], colours: Sequence[Colouring], words: Sequence[str]
) -> list[TextPieces]:
    return [
        text_pieces(each, own, "; ".join([*words, *_title(each, len(sequences))]))
        for each, own in zip(sequences, colours, strict=True)
    ]


def _title(sequence: GeneratedSequence, count: int) -> list[str]:
    which = [f"prompt {sequence.prompt}, sample {sequence.sample}"] if count > 1 else []
    return [*which, *([] if sequence.is_finished else ["so far"])]


def sequences_text(sequences: Sequence[GeneratedSequence]) -> str:
    """Return the generated texts for a terminal; several below each other, each below its indices."""
    if len(sequences) == 1:
        return sequences[0].text
    return "\n".join(f"--- prompt {each.prompt}, sample {each.sample}\n{each.text}" for each in sequences)
