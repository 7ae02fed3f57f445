"""What an edit refuses when it is made, beside any value; and what it says of itself."""

from collections.abc import Callable

import pytest
import torch

from trocar_api.reasons import ErrorReason
from trocar_server.errors import ServiceError
from trocar_server.tensors.edits import (
    Add,
    Affine,
    Cast,
    Clamp,
    Dropout,
    Edit,
    NanToNum,
    Noise,
    NoiseKind,
    Normalise,
    Project,
    ProjectOnto,
    Region,
    Resample,
    Set,
    Skip,
    Steer,
    Swap,
    TopK,
    Zero,
)
from trocar_server.tensors.reductions import Axis, Index, OperandSpec, Take

VECTOR = OperandSpec(torch.float32, (4,))
MASK = OperandSpec(torch.bool, (2, 4))


@pytest.mark.parametrize(
    "make",
    [
        Clamp,
        lambda: Clamp(1.0, 0.0),
        lambda: Noise(NoiseKind.UNIFORM, -1.0),
        lambda: Noise(NoiseKind.UNIFORM, 1.0, 2**63),
        lambda: Resample(-(2**63) - 1),
        lambda: Dropout(1.0),
        lambda: Dropout(-0.1),
        lambda: Dropout(0.5, 2**64),
        Swap,
        lambda: TopK(0),
        lambda: Cast(torch.float64),
        lambda: Normalise(0.0),
        lambda: Project(VECTOR),
        lambda: ProjectOnto(OperandSpec(torch.float32, (4096, 4096))),
        lambda: Region(Index((0,)), mask=MASK),
        lambda: Region(takes=(Take(Axis.SAMPLES, (0,)),), mask=MASK),
        lambda: Region(mask=VECTOR),
        lambda: Region(takes=(Take(Axis.SAMPLES, (0,)), Take(Axis.SAMPLES, (1,)))),
        lambda: Region(takes=(Take(Axis.SAMPLES, (0, 1, 0)),)),
        lambda: Edit(Skip(), Region(Index((0,)))),
    ],
)
def test_what_is_wrong_in_itself_is_refused_at_once(make: Callable[[], object]) -> None:
    with pytest.raises(ServiceError) as refused:
        make()
    assert refused.value.reason is ErrorReason.INVALID_ARGUMENT


@pytest.mark.parametrize("number", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize(
    "make",
    [
        Set,
        Add,
        Affine,
        lambda number: Affine(1.0, number),
        Clamp,
        lambda number: Clamp(None, number),
        lambda number: Noise(NoiseKind.GAUSSIAN, number),
        Dropout,
        lambda number: Steer(VECTOR, number),
        Normalise,
        NanToNum,
        lambda number: NanToNum(neginf=number),
    ],
)
def test_numbers_are_finite(make: Callable[[float], object], number: float) -> None:
    with pytest.raises(ServiceError, match="finite") as refused:
        make(number)
    assert refused.value.reason is ErrorReason.NON_FINITE_VALUE


def test_tensors_come_mask_first_then_in_the_order_of_the_operation() -> None:
    scale, shift = OperandSpec(torch.float32, ()), OperandSpec(torch.float64, (4,))
    assert Edit(Affine(scale, shift), Region(mask=MASK)).operands == (MASK, scale, shift)
    assert Edit(Affine(1.0, shift)).operands == (shift,)
    assert Edit(Zero(), Region(mask=MASK)).operands == (MASK,)


def test_edits_are_keys() -> None:
    assert len({Edit(Set(1.0)), Edit(Set(1.0)), Edit(Set(VECTOR)), Edit(Zero())}) == 3
