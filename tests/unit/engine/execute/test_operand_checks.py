"""Tensors that come along: NaN and infinity are found wherever they are, in every dtype that has them."""

import numpy as np
import pytest
import torch

from trocar_api.reasons import ErrorReason
from trocar_server.engine.execute.operand_checks import (
    ReceivedOperand,
    check_received,
    operands_of,
    operands_of_edits,
)
from trocar_server.engine.request.objective import Loss, LossKind, Objective, Term
from trocar_server.engine.request.plan import EditRequest, Payload, Payloads, Plan
from trocar_server.errors import ServiceError
from trocar_server.surgery import parse_selector
from trocar_server.tensors.edits import Edit, Region, Set
from trocar_server.tensors.reductions import OperandSpec

FLOATS = [torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.complex64, torch.complex128]
OTHERS = [torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64]


def payload_of(values: torch.Tensor) -> Payload:
    found: Payload = values.contiguous().view(torch.uint8).numpy().copy()
    return found


def operand(values: torch.Tensor) -> ReceivedOperand:
    return ReceivedOperand(
        "edits: a tensor of set", OperandSpec(values.dtype, tuple(values.shape)), payload_of(values)
    )


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("wrong", [float("nan"), float("inf"), float("-inf")])
async def test_one_number_that_is_not_finite_is_found(dtype: torch.dtype, wrong: float) -> None:
    values = torch.ones(7).to(dtype)
    values[6] = wrong
    with pytest.raises(ServiceError) as caught:
        await check_received([operand(torch.ones(3)), operand(values)])
    assert caught.value.reason is ErrorReason.NON_FINITE_VALUE
    assert caught.value.details["field"] == "edits"


@pytest.mark.parametrize("dtype", FLOATS)
async def test_the_largest_and_smallest_numbers_are_fine(dtype: torch.dtype) -> None:
    limits = torch.finfo(dtype)
    await check_received([operand(torch.tensor([limits.max, limits.min, limits.tiny, 0.0], dtype=dtype))])


@pytest.mark.parametrize("dtype", OTHERS)
async def test_any_whole_number_is_fine(dtype: torch.dtype) -> None:
    await check_received([operand(torch.tensor([-1, 0, 1]).to(dtype))])


async def test_a_number_at_the_end_of_a_large_tensor_is_found() -> None:
    values = torch.zeros(3 << 20)
    await check_received([operand(values)])
    values[-1] = float("nan")
    with pytest.raises(ServiceError, match="NaN"):
        await check_received([operand(values)])


async def test_an_empty_tensor_is_fine() -> None:
    await check_received([operand(torch.ones(0)), operand(torch.ones(0, dtype=torch.bool))])


async def test_a_bool_is_0_or_1() -> None:
    spec = OperandSpec(torch.bool, (3,))
    await check_received([ReceivedOperand("edits: a tensor of set", spec, np.array([0, 1, 1], np.uint8))])
    with pytest.raises(ServiceError) as caught:
        await check_received([ReceivedOperand("edits: a tensor of set", spec, np.array([0, 2, 1], np.uint8))])
    assert caught.value.reason is ErrorReason.INVALID_ARGUMENT
    assert caught.value.message == (
        "edits: a tensor of set: a bool is the byte 0 or 1, but another byte was found"
    )


def test_every_tensor_is_with_its_own_bytes_and_stored_ones_are_passed_over() -> None:
    mask, float32 = OperandSpec(torch.bool, (1,)), OperandSpec(torch.float32, (1,))
    where = parse_selector("fc")
    edits = (
        EditRequest(where, Edit(Set(float32), Region(mask=mask))),
        EditRequest(where, Edit(Set(float32)), stored="kept"),
        EditRequest(where, Edit(Set(mask))),
    )
    payloads = [np.full(1, i, np.uint8) for i in range(4)]
    found = list(operands_of_edits(edits, payloads))
    assert [(entry.spec, int(entry.payload[0])) for entry in found] == [(mask, 0), (float32, 1), (mask, 3)]
    objective = Objective((Term(1.0, Loss(LossKind.MSE, where, float32)),))
    plan = Plan("m", (), (), 1, edits=edits, objective=objective)
    *_, labels = operands_of(plan, Payloads(edits=payloads, objective=[np.full(4, 9, np.uint8)]))
    assert (labels.owner.partition(":")[0], labels.spec, labels.payload[0]) == ("objective", float32, 9)
