"""Tensors that come along with edits and objectives: their form, and whether their numbers can be used.

Checked with NumPy: torch belongs to the thread that owns it.
"""

import asyncio
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from trocar_api.reasons import ErrorReason
from trocar_api.v1 import tensor_pb2 as pb
from trocar_server.engine.plan import EditRequest, Payload, Payloads, Plan
from trocar_server.errors import ServiceError
from trocar_server.reductions import ConstantSpec
from trocar_server.rpc.dtypes import from_wire
from trocar_server.rpc.fields import invalid
from trocar_server.rpc.payloads import tensor_byte_count

# Below, checking takes less than a millisecond, and handing it to another thread as much.
_LARGE_BYTES = 1 << 20
_BLOCK_BYTES = 4 << 20
_NUMPY: dict[torch.dtype, Any] = {
    torch.float16: np.float16,
    torch.float32: np.float32,
    torch.float64: np.float64,
    torch.complex64: np.complex64,
    torch.complex128: np.complex128,
}
_BFLOAT16_EXPONENT = 0x7F80


class Constant(NamedTuple):
    """A tensor that has come."""

    owner: str
    """What it belongs to, as errors say it."""
    spec: ConstantSpec
    payload: Payload


def constant_from_wire(field: str, spec: pb.TensorSpec) -> ConstantSpec:
    """Convert and check the form of a tensor that comes along; `field` is its name in errors.

    Raises:
        ServiceError: `INVALID_TENSOR`, with the field named.
    """
    dtype, shape = from_wire(field, spec.dtype), tuple(spec.shape)
    tensor_byte_count(field, shape, dtype.itemsize)
    return ConstantSpec(dtype, shape)


def constants_of_edits(edits: Iterable[EditRequest], payloads: Sequence[Payload]) -> Iterator[Constant]:
    """Yield the tensors of edits with their bytes, those of stored ones left out: they were checked before.

    Args:
        edits: As in a plan.
        payloads: One for each of their constants.
    """
    remaining = iter(payloads)
    for request in edits:
        for spec in request.edit.constants:
            payload = next(remaining)
            if not request.stored:
                yield Constant(f"edits: a tensor of {request.edit.operation}", spec, payload)


def constants_of(plan: Plan, payloads: Payloads) -> Iterator[Constant]:
    """Yield the tensors that came along with the edits and the objective of a plan."""
    yield from constants_of_edits(plan.edits, payloads.edits)
    for spec, payload in zip(plan.objective_constants, payloads.objective, strict=True):
        yield Constant("objective: a tensor of labels", spec, payload)


async def check_constants(constants: Iterable[Constant]) -> None:
    """Refuse tensors with numbers that cannot be used; large ones are looked at on another thread.

    Raises:
        ServiceError: `NON_FINITE_VALUE`, or `INVALID_ARGUMENT` for a bool that is neither 0 nor 1.
    """
    found = list(constants)
    if sum(constant.payload.nbytes for constant in found) < _LARGE_BYTES:
        _check_all(found)
    else:
        await asyncio.to_thread(_check_all, found)


def _check_all(constants: Sequence[Constant]) -> None:
    for owner, spec, payload in constants:
        field = owner.partition(":")[0]
        for start in range(0, payload.nbytes, _BLOCK_BYTES):
            block = payload[start : start + _BLOCK_BYTES]
            if spec.dtype == torch.bool and block.max() > 1:
                problem = "a bool is the byte 0 or 1, and it holds another"
                raise invalid(field, f"{owner.removeprefix(f'{field}: ')}: {problem}")
            if not _is_finite(spec.dtype, block):
                raise ServiceError(
                    ErrorReason.NON_FINITE_VALUE,
                    f"{owner} holds NaN or infinity; edits and objectives take finite numbers only",
                    field=field,
                )


def _is_finite(dtype: torch.dtype, block: NDArray[np.uint8]) -> bool:
    if dtype == torch.bfloat16:
        exponents = block.view(np.uint16) & _BFLOAT16_EXPONENT
        return not bool((exponents == _BFLOAT16_EXPONENT).any())
    if dtype not in _NUMPY:
        return True
    return bool(np.isfinite(block.view(_NUMPY[dtype])).all())
