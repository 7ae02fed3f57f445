"""Codec of positions of texts."""

from dataclasses import replace

from trocar_api.v1 import position_pb2 as pb
from trocar_server.rpc.codec.fields import check_count, invalid, named
from trocar_server.rpc.codec.reductions import span_from_wire
from trocar_server.tensors.reductions import Axis, Reduction, Spans, Take
from trocar_server.tensors.reductions.positions import (
    MAX_POSITION_SPANS,
    MAX_TOKEN_IDS,
    Positions,
    PositionSet,
)

_MAX_POSITIONS = 65_536


def positions_from_wire(field: str, message: pb.Positions) -> Positions:
    """Convert and check positions.

    Raises:
        ServiceError: `INVALID_ARGUMENT`, with the field named.
    """
    but_not = None
    if message.HasField("when"):
        raise invalid(f"{field}.when", "a gate is for edits alone")
    if message.HasField("but_not"):
        if message.but_not.HasField("but_not"):
            raise invalid(f"{field}.but_not.but_not", "is one too many; but_not has none of its own")
        but_not = _clauses(f"{field}.but_not", message.but_not)
    return replace(_clauses(field, message), but_not=but_not)


def prompt_positions(field: str, message: pb.Positions) -> Positions:
    """Convert and check positions of a call that generates none; `field` is of what has them.

    Raises:
        ServiceError: `INVALID_ARGUMENT`, with the field named.
    """
    positions = positions_from_wire(f"{field}.positions", message)
    check_prompt_alone(field, positions)
    return positions


def check_prompt_alone(field: str, positions: Positions) -> None:
    """Refuse positions of generated tokens where none are generated.

    Raises:
        ServiceError: `INVALID_ARGUMENT`, with the field named.
    """
    if positions.has_generated:
        raise invalid(
            f"{field}.positions.generated",
            "is of tokens that are generated, and this call generates none; ask `generate`, or give prompt=",
        )


def selects_tokens(reduction: Reduction) -> bool:
    """Whether a reduction selects tokens, which goes with no positions."""
    return isinstance(reduction, Spans) or (isinstance(reduction, Take) and reduction.axis is Axis.TOKENS)


def _clauses(field: str, message: pb.Positions) -> Positions:
    """Convert everything but `but_not`."""
    check_count(f"{field}.spans", len(message.spans), MAX_POSITION_SPANS)
    check_count(f"{field}.token_ids", len(message.token_ids), MAX_TOKEN_IDS)
    prompt = _set(f"{field}.prompt", message.prompt) if message.HasField("prompt") else None
    generated = _set(f"{field}.generated", message.generated) if message.HasField("generated") else None
    if generated is not None:
        bounds = (*(generated.only or ()), generated.start or 0, generated.stop or 0)
        if min(bounds) < 0:
            raise invalid(f"{field}.generated", "counts from 0: where the text ends is not known before")
    with named(f"{field}.spans"):
        spans = tuple(map(span_from_wire, message.spans))
    if prompt is None and generated is None and not (spans or message.token_ids):
        raise invalid(field, "selects nothing; give positions of the prompt or of generated tokens")
    return Positions(prompt, generated, spans, tuple(message.token_ids))


def _set(field: str, message: pb.PositionSet) -> PositionSet:
    kind = message.WhichOneof("kind")
    if kind == "all" and message.all:
        return PositionSet()
    if kind == "list" and message.list.positions:
        check_count(field, len(message.list.positions), _MAX_POSITIONS)
        return PositionSet(tuple(message.list.positions))
    if kind != "range":
        raise invalid(field, "selects nothing; give all, positions or a range")
    chosen = message.range
    step = chosen.step if chosen.HasField("step") else 1
    if step < 1:
        raise invalid(f"{field}.range.step", f"is {step}; at least 1")
    start = chosen.start if chosen.HasField("start") else None
    return PositionSet(None, start, chosen.stop if chosen.HasField("stop") else None, step)
