"""Token views: a text as a notebook shows it, each token coloured by a number.

Every text comes from a model and is escaped. Colours are translucent, so that letters are readable in light
and in dark themes.
"""

from __future__ import annotations

import unicodedata
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from html import escape

import numpy as np

from trocar._base.tables import number_text
from trocar._base.tensors import Array

MOST_PIECES = 2000
"""Tokens of one text in a view; the first ones are left out."""
_LEAST_LOGPROB = -5.0
"""Less likely tokens are no darker: a probability of 0.7 %."""
_STRONGEST = 0.75
"""The opacity of the darkest colour."""
_HIGH, _LOW = "230,130,30", "40,120,220"
_SHOWN = {"\n": "⏎\n", "\r": "␍", "\t": "⇥\t"}
_HIDDEN_KINDS = ("Cc", "Cf", "Co", "Cs", "Zl", "Zp")
"""Categories of characters that change what is around them, or that nobody sees."""


@dataclass(frozen=True)
class Piece:
    """One token of a text, as it is shown."""

    text: str
    """What it adds to the text; empty for a part of a character."""
    token_id: int
    """Its id."""
    position: int
    """Its position in the text."""
    notes: tuple[str, ...] = ()
    """Lines about it, which are shown beside the pointer."""
    value: float = np.nan
    """The number that it is coloured by; NaN for none."""


@dataclass(frozen=True)
class Scale:
    """How numbers become colours.

    `low` has no colour and `high` the darkest; of a scale of two signs 0 has none.
    """

    low: float
    high: float
    legend: str

    def style(self, value: float) -> str:
        """Return the colour of a number as CSS; empty for none."""
        if np.isnan(value):
            return ""
        value = min(max(value, self.low), self.high)
        if self.low < 0 < self.high:
            share = value / max(-self.low, self.high)
        else:
            share = (value - self.low) / (self.high - self.low) if self.high != self.low else 1.0
        opacity = round(abs(share) * _STRONGEST, 2)
        return f"background-color:rgba({_LOW if share < 0 else _HIGH},{opacity})" if opacity else ""


SURPRISE = Scale(
    0.0, -_LEAST_LOGPROB, f"darker: less likely, down to a log-probability of {_LEAST_LOGPROB:g}"
)
"""The scale of negated log-probabilities."""


def scale_of(values: Array, legend: str = "") -> Scale:
    """Return a scale from the least to the largest of some numbers; of both signs as large to either side.

    Args:
        values: The numbers; NaN and infinities are left out.
        legend: What they are.
    """
    finite = values[np.isfinite(values)]
    if not finite.size:
        return Scale(0.0, 0.0, "no number is finite")
    low, high = float(finite.min()), float(finite.max())
    name = f"{legend}: " if legend else ""
    darker = "farther from 0; blue: below it" if low < 0 < high else "larger"
    return Scale(low, high, f"{name}{number_text(low)} to {number_text(high)}, darker: {darker}")


@dataclass(frozen=True)
class TextPieces:
    """The tokens of one text."""

    prompt: tuple[Piece, ...]
    generated: tuple[Piece, ...]
    rest: str = ""
    """Text behind the last token."""
    title: str = ""

    def html(self, scale: Scale | None) -> str:
        """Return the text as HTML, the prompt in front of a bar."""
        left_out = max(len(self.prompt) + len(self.generated) - MOST_PIECES, 0)
        prompt, generated = self.prompt[left_out:], self.generated[max(left_out - len(self.prompt), 0) :]
        parts = [f"… {left_out:,} tokens before " if left_out else ""]
        parts += [_span(piece, scale, "opacity:0.65") for piece in prompt]
        parts += ['<b title="the generated text begins">│</b>' if self.prompt else ""]
        parts += [_span(piece, scale) for piece in generated]
        parts += [f"<span>{escape(visible(self.rest))}</span>" if self.rest else ""]
        title = f"<div><small>{escape(self.title)}</small></div>" if self.title else ""
        return f'{title}<div style="{_BLOCK}">{"".join(parts)}</div>'


_BLOCK = "white-space:pre-wrap;overflow-wrap:anywhere;font-family:monospace;line-height:1.7;text-align:left"


class TokenView:
    """Texts with coloured tokens, which a notebook shows; made by `run.show`.

    Args:
        columns: Texts beside each other: those of a run, and those of its baseline.
        scale: How their numbers become colours; None for no colours.
        text: What is printed in place of it.
    """

    def __init__(self, columns: Sequence[Sequence[TextPieces]], scale: Scale | None, text: str) -> None:
        self._columns, self._scale, self._text = columns, scale, text

    def __str__(self) -> str:
        return self._text

    def __repr__(self) -> str:
        count = sum(len(one.prompt) + len(one.generated) for texts in self._columns for one in texts)
        return f"<{type(self).__name__} of {count} tokens>"

    def _repr_html_(self) -> str:
        """Show the texts in a notebook."""
        columns = ["".join(one.html(self._scale) for one in texts) for texts in self._columns]
        legend = f"<div><small>{escape(self._scale.legend)}</small></div>" if self._scale else ""
        if len(columns) == 1:
            return f"<div>{columns[0]}{legend}</div>"
        cells = "".join(
            f'<td style="vertical-align:top;text-align:left;width:50%">{cell}</td>' for cell in columns
        )
        return f"<div><table><tr>{cells}</tr></table>{legend}</div>"


def visible(text: str) -> str:
    r"""Return a text whose spaces and control characters are seen: `⏎`, `⇥`, `\u202e`.

    What turns the direction of letters, or hides them, becomes an escape: nothing outside of a token changes.
    """
    if text and not text.strip(" "):
        return "␣" * len(text)
    return "".join(_visible_characters(text))


def _visible_characters(text: str) -> Iterator[str]:
    for character in text:
        kind = unicodedata.category(character)
        is_odd_space = kind == "Zs" and character != " "
        if character in _SHOWN:
            yield _SHOWN[character]
        elif kind in _HIDDEN_KINDS or is_odd_space:
            yield character.encode("unicode_escape").decode()
        else:
            yield character


def _span(piece: Piece, scale: Scale | None, look: str = "") -> str:
    """Return a token as HTML; an empty one shows its id."""
    text = visible(piece.text) if piece.text else f"#{piece.token_id}"
    notes = [f"position {piece.position}, token {piece.token_id}", *piece.notes]
    styles = [look, scale.style(piece.value) if scale is not None else ""]
    style = ";".join(filter(None, (*styles, "border-radius:3px" if styles[1] else "")))
    attributes = f' style="{style}"' if style else ""
    return f'<span title="{escape(_lines(notes))}"{attributes}>{escape(text)}</span>'


def _lines(notes: Iterable[str]) -> str:
    return "\n".join(notes)
