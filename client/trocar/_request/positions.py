"""Positions, index expressions and spans of texts, converted to the wire."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from operator import index as as_integer
from types import EllipsisType
from typing import Any, SupportsIndex, TypeAlias, overload

import numpy as np

from trocar._base.delegation import explained
from trocar_api.v1 import reduction_pb2 as pb

MAX_POSITIONS = 65_536
MAX_SPAN_CHARACTERS = 512

Positions: TypeAlias = SupportsIndex | slice | Iterable[SupportsIndex]
"""One position, a slice with bounds, or several positions."""
IndexItem: TypeAlias = SupportsIndex | slice | EllipsisType
IndexExpression: TypeAlias = IndexItem | tuple[IndexItem, ...]
"""What `numpy.s_[...]` returns for integers, slices and an ellipsis."""


@dataclass(frozen=True)
class TextSpan:
    """A part of a text, whose tokens are selected; made by `span`."""

    start: int | None = None
    """The first character, from 0."""
    stop: int | None = None
    """The character behind the last one."""
    text: str = ""
    """What is looked for."""
    role: str = ""
    """Of the messages of a chat."""
    decoder: bool = False
    """Whether it is a part of the decoder's own text."""

    def to_wire(self) -> pb.TextSpan:
        """Return the span as a message."""
        if self.text:
            return pb.TextSpan(text=self.text)
        if self.role:
            return pb.TextSpan(role=self.role)
        return pb.TextSpan(characters=pb.CharacterRange(start=self.start or 0, stop=self.stop or 0))


TextSpans: TypeAlias = TextSpan | Sequence[TextSpan]
"""One span for all texts, or one for each."""


@overload
def span(start: int, stop: int, /, *, decoder: bool = ...) -> TextSpan: ...
@overload
def span(text: str, /, *, decoder: bool = ...) -> TextSpan: ...
@overload
def span(*, role: str, decoder: bool = ...) -> TextSpan: ...
@explained
def span(
    start: int | str = "", stop: int | None = None, /, *, role: str = "", decoder: bool = False
) -> TextSpan:
    """Select the tokens of a part of a text, without special tokens; for `tokens=`.

        trocar.tap("layer[3]", tokens=trocar.span("Paris"))          # every occurrence
        trocar.tap("layer[3]", tokens=trocar.span(4, 9))             # characters 4 to 8
        trocar.tap("layer[3]", tokens=trocar.span(role="assistant")) # of a chat, without template text
        trocar.tap("layer[3]", tokens=[trocar.span("cat"), trocar.span("dog")])  # one for each text

    Args:
        start: The first character, from 0; for a pair in its first text, for a chat in the rendered template
            (`maps.tokens.samples[0].rendered`). Or the text to find, at most 512 characters.
        stop: The position after the last character, above `start`.
        role: A role of a chat: the contents of its messages.
        decoder: Whether the decoder's own texts are meant, where the encoder has texts too.

    Raises:
        TypeError: Characters, a text and a role are given together, or none of them.
        ValueError: The text or the role is too long, or `stop` is not above `start`.
    """
    is_range = not isinstance(start, str)
    kinds = (is_range, isinstance(start, str) and bool(start), bool(role))
    if sum(kinds) != 1 or is_range != (stop is not None):
        raise TypeError(
            'a span is two characters, a text or a role: span(4, 9), span("cat"), span(role="user")'
        )
    if isinstance(start, str):
        if max(len(start), len(role)) > MAX_SPAN_CHARACTERS:
            raise ValueError(f"a span of over {MAX_SPAN_CHARACTERS} characters of text")
        return TextSpan(text=start, role=role, decoder=decoder)
    first, behind = _integer(start), _integer(stop)
    if not 0 <= first < behind:
        raise ValueError(f"span({first}, {behind}): it starts at 0 or above and ends after its start")
    return TextSpan(first, behind, decoder=decoder)


def wire_spans(spans: Sequence[TextSpan]) -> pb.SpanReduction:
    """Return the spans of one value as a message.

    Raises:
        ValueError: Only some are of the decoder's texts.
    """
    if len({each.decoder for each in spans}) > 1:
        raise ValueError("spans of one list are all of the decoder's texts, or none")
    return pb.SpanReduction(spans=[each.to_wire() for each in spans], is_decoder=spans[0].decoder)


def listed_spans(given: object) -> list[TextSpan]:
    """Return the spans among `tokens=`: one, or a list of them; empty for positions.

    Raises:
        TypeError: Only some entries of the list are spans.
    """
    if isinstance(given, TextSpan):
        return [given]
    if not isinstance(given, (list, tuple)):
        return []
    result = [entry for entry in given if isinstance(entry, TextSpan)]
    if result and len(result) < len(given):
        raise TypeError("tokens are spans or positions, not both in one list")
    return result


def wire_index(expression: IndexExpression) -> pb.IndexReduction:
    """Return an index expression as a message.

    Raises:
        TypeError: Anything but integers, slices and an ellipsis is in it.
        ValueError: A slice has a step below 1, or there are two ellipses.
    """
    items = expression if isinstance(expression, tuple) else (expression,)
    if sum(item is ... for item in items) > 1:
        raise ValueError("an index can have one ellipsis")
    return pb.IndexReduction(items=[_index_item(item) for item in items])


def position_list(axis: str, positions: Positions) -> Sequence[int]:
    """Return a caller's positions.

    Raises:
        TypeError: They are not integers.
        ValueError: There are none or too many, or the slice cannot be counted.
    """
    chosen: Sequence[int]
    if isinstance(positions, slice):
        chosen = _countable(axis, positions)
    elif isinstance(positions, Iterable):
        chosen = [_integer(position) for position in positions]
    else:
        chosen = [_integer(positions)]
    if not chosen or chosen[MAX_POSITIONS:]:  # the length of a range may be more than `len` can say
        raise ValueError(f"{axis}: no positions or too many; 1 to {MAX_POSITIONS:,} are allowed")
    return chosen


def _index_item(item: object) -> pb.IndexItem:
    if item is ...:
        return pb.IndexItem(ellipsis=True)
    if isinstance(item, slice):
        if item.step is not None and _integer(item.step) < 1:
            raise ValueError(f"a slice with the step {item.step}; it must be at least 1")
        start, stop, step = (_optional_integer(bound) for bound in (item.start, item.stop, item.step))
        return pb.IndexItem(slice=pb.IndexSlice(start=start, stop=stop, step=step))
    return pb.IndexItem(position=_integer(item))


def _countable(axis: str, wanted: slice) -> range:
    """Return the positions of a slice, without the size of its dimension, which only the server knows."""
    step = 1 if wanted.step is None else _integer(wanted.step)
    start = 0 if wanted.start is None else _integer(wanted.start)
    stop = None if wanted.stop is None else _integer(wanted.stop)
    is_from_the_end = start < 0 and (stop is None or stop < 0)
    is_from_the_start = start >= 0 and stop is not None and stop >= 0
    if step < 1 or not (is_from_the_end or is_from_the_start):
        raise ValueError(
            f"{axis}={wanted}: only slices such as slice(2, 8) and slice(-8, None) are supported here; use "
            "index= for others"
        )
    return range(start, 0 if stop is None else stop, step)


def _integer(value: Any) -> int:
    """Return the int of an integer of any library; True is a mask to NumPy, so it is none.

    Raises:
        TypeError: It is no integer.
    """
    if isinstance(value, (bool, np.bool_)):
        raise TypeError("a mask cannot be sent here; give positions, as returned by numpy.flatnonzero(mask)")
    try:
        return as_integer(value)
    except TypeError:
        raise TypeError(
            f"{value!r} is not a position; an index has integers, slices and ..., lists of integers go to "
            "samples=, channels= or tokens="
        ) from None


def _optional_integer(value: Any) -> int | None:
    return None if value is None else _integer(value)
