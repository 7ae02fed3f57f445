"""Values that a dry run may get: whole tensors of integers and booleans, by which a model may decide."""

from collections.abc import Iterable, Mapping, Sequence

import numpy as np
import torch

from trocar_api.v1 import tensor_pb2
from trocar_server.engine.request.plan import Payload, Plan, TensorInput, payload_count
from trocar_server.rpc.codec.fields import invalid

_MOST_BYTES = 64 << 10
_FIELD = "extraction.chunks"


def plan_values(
    chunks: Iterable[tensor_pb2.TensorChunk], plan: Plan, byte_counts: Sequence[int]
) -> dict[str, Payload]:
    """Return the values that were sent for a dry run, by the name of their argument.

    Args:
        chunks: Those of the request.
        plan: Its plan.
        byte_counts: Of all payloads of the plan, in order.

    Raises:
        ServiceError: `INVALID_ARGUMENT`, a chunk is of another tensor or not whole, or they are too large.
    """
    names, values, total = _names(plan), dict[str, Payload](), 0
    for chunk in chunks:
        name = names.get(chunk.payload_index)
        if name is None:
            raise invalid(_FIELD, "a dry run takes values of named tensors of integers and booleans alone")
        if chunk.offset_bytes or len(chunk.data) != byte_counts[chunk.payload_index]:
            raise invalid(_FIELD, f"the values of '{name[:80]}' are sent in one chunk of all of their bytes")
        total += len(chunk.data)
        if total > _MOST_BYTES:
            raise invalid(_FIELD, f"a dry run takes at most {_MOST_BYTES:,} bytes of values")
        values[name] = np.frombuffer(chunk.data, np.uint8).copy()
    return values


def _names(plan: Plan) -> Mapping[int, str]:
    """Return the arguments whose values may be sent, by the index of their payload."""
    names: dict[int, str] = {}
    index = 0
    for entry in plan.inputs:
        if isinstance(entry, TensorInput) and entry.name and not _is_of_floats(entry.dtype):
            names[index] = entry.name
        index += payload_count(entry)
    return names


def _is_of_floats(dtype: torch.dtype) -> bool:
    return dtype.is_floating_point or dtype.is_complex
