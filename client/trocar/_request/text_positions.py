"""Positions of a text, given or generated: for `positions=` of taps and edits."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from math import isfinite
from operator import index as as_integer
from typing import Any, Literal, Self, SupportsIndex, TypeAlias

from trocar._base.delegation import explained
from trocar._request.positions import TextSpan, span
from trocar_api.v1 import position_pb2 as pb

Some: TypeAlias = Literal["all"] | SupportsIndex | slice | Iterable[SupportsIndex]
"""All positions, one, a slice, or several."""
SpanLike: TypeAlias = TextSpan | str | tuple[int, int]
"""A part of a text: a `trocar.span(...)`, a text that occurs in it, or where it starts and stops."""


@dataclass(frozen=True)
class TextPositions:
    """Positions of a text; made by `positions`."""

    message: bytes
    """As it goes to the server."""

    def to_wire(self) -> pb.Positions:
        """Return the positions as a message."""
        return pb.Positions.FromString(self.message)


@dataclass(frozen=True)
class Gate:
    """A condition on positions; made by `gate`."""

    message: bytes
    """As it goes to the server."""

    @classmethod
    def of(cls, message: pb.Gate) -> Self:
        """Return a gate as it came from the server."""
        return cls(message.SerializeToString(deterministic=True))

    def to_wire(self) -> pb.Gate:
        """Return the gate as a message."""
        return pb.Gate.FromString(self.message)


@explained
def gate(name: str, at: str = "", *, above: float | None = None, below: float | None = None) -> Gate:
    """Select positions by the number that a stored direction reads there.

    For an edit, `positions(when=)`, and for the end of a generated text, `generate(stop_when=)`:

        rude = trocar.gate("rude", "layer[8]", above=0)
        trocar.edit("layer[12]", "steer", "polite", positions=trocar.positions(generated="all", when=rude))
        client.generate("llama", "a prompt", stop_when=rude)

    Args:
        name: A direction of yours with one vector.
        at: Its place; for an edit earlier in the pass, or the edit's own. May be left out where there is
            one.
        above: The number is above this.
        below: The number is below this.

    Raises:
        ValueError: No limit is given, or one is not finite.
    """
    limits = {name: float(end) for name, end in (("above", above), ("below", below)) if end is not None}
    if not limits or not all(map(isfinite, limits.values())):
        raise ValueError("a gate needs above=, below= or both, as finite numbers")
    return Gate.of(pb.Gate(direction=name, place=at, **limits))


@explained
def positions(
    *,
    prompt: Some | None = None,
    generated: Some | None = None,
    spans: SpanLike | Sequence[SpanLike] = (),
    roles: str | Sequence[str] = (),
    token_ids: SupportsIndex | Iterable[SupportsIndex] = (),
    but_not: TextPositions | None = None,
    when: Gate | None = None,
) -> TextPositions:
    """Select positions of texts, for `positions=` of a tap or an edit.

        trocar.positions(prompt=[-1])                         # the last token of each text
        trocar.positions(prompt="all", generated=slice(0, 8)) # in `generate`
        trocar.positions(spans=["France", (0, 3)])            # the tokens of these characters
        trocar.positions(roles="user", but_not=trocar.positions(token_ids=198))

    What is named by any of them is selected. Positions count in each text from its own first token, special
    tokens included. Padding has none.

    Args:
        prompt: Of the prompt, or of each text of `extract`, `gradients` and streams: "all", a position, a
            slice, or several positions. Negative ones count from its end. None of it when None.
        generated: Of the generated tokens, from 0; in `generate` alone. None of them when None.
        spans: Of the prompt: the tokens that hold a character of these texts, each time they occur, or of
            these ranges of characters, without special tokens; also `trocar.span(...)`.
        roles: Of a chat: the contents of the messages with these roles.
        token_ids: Of the prompt: the tokens with these ids.
        but_not: Left out of all these: other positions, without a `but_not` of their own. Its spans, roles
            and ids need not occur.
        when: Of edits only: those alone of these positions, or of all, at which a stored direction reads a
            number within limits, `trocar.gate(...)`.

    Raises:
        ValueError: Nothing is selected, a position of a generated token is negative, or a span is impossible.
        TypeError: A position is no integer, or a span is none.
    """
    message = pb.Positions()
    if prompt is not None:
        message.prompt.CopyFrom(_set("prompt", prompt))
    if generated is not None:
        message.generated.CopyFrom(_set("generated", generated))
        bounds = message.generated.range
        if min((*message.generated.list.positions, bounds.start, bounds.stop, 0)) < 0:
            raise ValueError("generated= counts from 0: where the text ends is not known before")
    message.spans.extend(each.to_wire() for each in _spans(spans))
    message.spans.extend(span(role=role).to_wire() for role in ([roles] if isinstance(roles, str) else roles))
    given = [token_ids] if isinstance(token_ids, SupportsIndex) else token_ids
    message.token_ids.extend(map(as_integer, given))
    if when is not None:
        message.when.CopyFrom(when.to_wire())
    if not message.ListFields():
        raise ValueError('nothing is selected; give prompt=, generated= or spans=, for example prompt="all"')
    if but_not is not None:
        message.but_not.CopyFrom(but_not.to_wire())
        if message.but_not.HasField("but_not"):
            raise ValueError("but_not= has no but_not= of its own")
    return TextPositions(message.SerializeToString(deterministic=True))


def _spans(given: SpanLike | Sequence[SpanLike]) -> list[TextSpan]:
    """Return the spans of `spans=`.

    Raises:
        TypeError: One is no span, or is of the decoder's own texts.
        ValueError: One is impossible.
    """
    is_range = isinstance(given, tuple) and any(isinstance(each, SupportsIndex) for each in given)
    listed = [given] if is_range or isinstance(given, (TextSpan, str)) else given
    spans = [_span(each) for each in listed]
    if any(each.decoder for each in spans):
        raise TypeError("positions are of the texts of the model; for a decoder's own give tokens=")
    return spans


def _span(given: Any) -> TextSpan:
    match given:
        case TextSpan():
            return given
        case str(text):
            return span(text)
        case (start, stop):
            return span(start, stop)
    raise TypeError(f"a span is a text, two characters or trocar.span(...), not {given!r}")


def _set(name: str, chosen: Some) -> pb.PositionSet:
    if isinstance(chosen, str):
        if chosen != "all":
            raise ValueError(f'{name}={chosen!r} is not one of: "all", a position, a slice, positions')
        return pb.PositionSet(all=True)
    if isinstance(chosen, slice):
        if chosen.step is not None and as_integer(chosen.step) < 1:
            raise ValueError(f"{name}: the step of a slice is at least 1")
        return pb.PositionSet(range=pb.PositionRange(start=chosen.start, stop=chosen.stop, step=chosen.step))
    single = [chosen] if isinstance(chosen, SupportsIndex) else list(chosen)
    if not single:
        raise ValueError(f"{name}=[] selects nothing")
    return pb.PositionSet(list=pb.PositionList(positions=map(as_integer, single)))
