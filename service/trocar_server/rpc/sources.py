"""From `SourceInputs` messages to the inputs of other passes, from which swaps take values."""

from collections.abc import Sequence

from trocar_api.v1 import extraction_pb2 as pb
from trocar_server.config import Limits
from trocar_server.engine.plan import SourceInputs
from trocar_server.rpc.fields import MAX_TEXT_CHARACTERS, invalid
from trocar_server.rpc.inputs import to_inputs

_MAX_SOURCES = 8


def source_names(messages: Sequence[pb.SourceInputs]) -> list[str]:
    """Check the names of sources and return them.

    Raises:
        ServiceError: `INVALID_ARGUMENT`, with the field named.
    """
    if len(messages) > _MAX_SOURCES:
        raise invalid("sources", f"{len(messages)} given; at most {_MAX_SOURCES} are allowed")
    names: list[str] = []
    for i, message in enumerate(messages):
        if not 1 <= len(message.name) <= MAX_TEXT_CHARACTERS:
            raise invalid(f"sources[{i}].name", f"1 to {MAX_TEXT_CHARACTERS} characters are needed")
        if message.name in names:
            raise invalid(f"sources[{i}].name", f"'{message.name[:80]}' is there twice; names are unique")
        names.append(message.name)
    return names


def to_sources(
    messages: Sequence[pb.SourceInputs], limits: Limits, *, needs_inputs: bool
) -> tuple[tuple[SourceInputs, ...], list[int]]:
    """Convert and check sources whose names are fine, and return them with the bytes of each payload.

    Args:
        messages: As they came.
        limits: What a call may not exceed.
        needs_inputs: Whether one without inputs is refused.

    Raises:
        ServiceError: With the field named.
    """
    sources: list[SourceInputs] = []
    byte_counts: list[int] = []
    for i, message in enumerate(messages):
        if not (message.inputs or needs_inputs):
            sources.append(SourceInputs(message.name, ()))
            continue
        inputs, found = to_inputs(message.inputs, limits, f"sources[{i}].inputs")
        sources.append(SourceInputs(message.name, inputs))
        byte_counts += found
    return tuple(sources), byte_counts
