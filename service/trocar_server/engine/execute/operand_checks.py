"""Operand checks: values in the tensors of edits and objectives.

With NumPy: torch belongs to the thread that owns it.
"""

import asyncio
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from trocar_api.reasons import ErrorReason
from trocar_server.engine.request.plan import EditRequest, Payload, Payloads, Plan
from trocar_server.errors import ServiceError
from trocar_server.tensors.reductions import OperandSpec

# Below this size a check takes less than a millisecond, as does handing it to another thread.
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


class ReceivedOperand(NamedTuple):
    """A received tensor."""

    owner: str
    """The field that it belongs to, as named in errors."""
    spec: OperandSpec
    payload: Payload


def operands_of_edits(edits: Iterable[EditRequest], payloads: Sequence[Payload]) -> Iterator[ReceivedOperand]:
    """Yield the tensors of edits with their bytes, except of stored edits, which were checked before.

    Args:
        edits: As in a plan.
        payloads: One for each of their tensors.
    """
    remaining = iter(payloads)
    for request in edits:
        own = len(request.edit.own_operands)
        for index, spec in enumerate(request.edit.operands):
            payload = next(remaining)
            if not request.stored and index < own:
                yield ReceivedOperand(f"edits: a tensor of {request.edit.operation}", spec, payload)


def operands_of(plan: Plan, payloads: Payloads) -> Iterator[ReceivedOperand]:
    """Yield the received tensors of the edits and the objective of a plan."""
    yield from operands_of_edits(plan.edits, payloads.edits)
    for spec, payload in zip(plan.objective_operands, payloads.objective, strict=True):
        yield ReceivedOperand("objective: a tensor of labels", spec, payload)


async def check_operands(plan: Plan, payloads: Payloads) -> None:
    """Refuse invalid values in the received tensors of a plan.

    Raises:
        ServiceError: See `check_received`.
    """
    await check_received(operands_of(plan, payloads))


async def check_received(operands: Iterable[ReceivedOperand]) -> None:
    """Refuse tensors with invalid values; large ones are checked on another thread.

    Raises:
        ServiceError: `NON_FINITE_VALUE`, or `INVALID_ARGUMENT` for a bool that is neither 0 nor 1.
    """
    result = list(operands)
    if sum(operand.payload.nbytes for operand in result) < _LARGE_BYTES:
        _check_all(result)
    else:
        await asyncio.to_thread(_check_all, result)


def _check_all(operands: Sequence[ReceivedOperand]) -> None:
    for owner, spec, payload in operands:
        field = owner.partition(":")[0]
        for start in range(0, payload.nbytes, _BLOCK_BYTES):
            block = payload[start : start + _BLOCK_BYTES]
            if spec.dtype == torch.bool and block.max() > 1:
                problem = "a bool is the byte 0 or 1, but another byte was found"
                raise ServiceError(ErrorReason.INVALID_ARGUMENT, f"{owner}: {problem}", field=field)
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
