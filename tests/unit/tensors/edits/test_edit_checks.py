"""What is refused before anything is computed, with its reason and what would fit."""

import pytest
import torch

from tests.unit.tensors.edits.cases import spec
from trocar_api.reasons import ErrorReason
from trocar_server.errors import ServiceError
from trocar_server.tensors.edits import (
    Add,
    AddInput,
    Affine,
    Cast,
    Clamp,
    Dropout,
    Edit,
    MeanAblate,
    NanToNum,
    Noise,
    NoiseKind,
    Normalise,
    NormScope,
    Operation,
    Project,
    Region,
    Resample,
    Scale,
    Set,
    Skip,
    Steer,
    Swap,
    TopK,
    Zero,
    check_edit,
    check_finite,
    check_operands,
)
from trocar_server.tensors.reductions import Index, OperandSpec, Slice

SHAPE = (8, 64, 7, 5)
FIRST = Region(Index((0,)))
CHANNEL_3 = Region(Index((Slice(), 3)))


def given(*shape: int, dtype: torch.dtype = torch.float32) -> OperandSpec:
    return OperandSpec(dtype, shape)


def refusal(
    edit: Edit, shape: tuple[int, ...] = SHAPE, dtype: torch.dtype = torch.float32
) -> tuple[str, str]:
    with pytest.raises(ServiceError) as refused:
        check_edit(edit, shape, dtype)
    return refused.value.reason.value, refused.value.message


@pytest.mark.parametrize(
    ("operation", "hint"),
    [
        (Set(given(64)), "(64, 1, 1) for one number per channel"),
        (Add(given(64)), "(64, 1, 1) for one number per channel"),
        (Scale(given(1, 1, 1, 1, 1)), "give that shape"),
        (Affine(given(64), 0.0), "(64, 1, 1)"),
        (Affine(1.0, given(64)), "(64, 1, 1)"),
        (MeanAblate(given(63)), "(64, 1, 1)"),
        (Steer(given(63)), "(64,) or (1, 64) or (8, 64)"),
        (Steer(given(2, 64)), "(64,) or (1, 64) or (8, 64)"),
        (Project(given(2, 63)), "(vectors, 64)"),
        (TopK(65), "which has 64; keep fewer"),
        (TopK(8, 3), "dimension 3, which has 5"),
        (TopK(1, 4), "give one of the part's 4"),
        (TopK(1, -5), "give one of the part's 4"),
    ],
    ids=str,
)
def test_a_shape_that_does_not_fit_is_refused_with_one_that_would(operation: Operation, hint: str) -> None:
    reason, message = refusal(Edit(operation))
    assert reason == "EDIT_SHAPE_MISMATCH"
    assert str(SHAPE) in message
    assert str(operation) in message
    assert hint in message


@pytest.mark.parametrize("operation", [Steer(given(64)), Project(given(2, 64)), TopK(1)], ids=str)
def test_an_operation_on_channels_needs_them(operation: Operation) -> None:
    reason, message = refusal(Edit(operation, CHANNEL_3))
    assert (reason, "3:4" in message) == ("EDIT_SHAPE_MISMATCH", True)
    check_edit(Edit(operation, FIRST), SHAPE, torch.float32)


def test_norms_of_channel_vectors_need_channels() -> None:
    edit = Edit(Normalise(1.0, NormScope.CHANNEL_VECTOR), CHANNEL_3)
    assert refusal(edit)[0] == "EDIT_SHAPE_MISMATCH"


@pytest.mark.parametrize("operation", [MeanAblate(), Resample(), Normalise(1.0)], ids=str)
def test_an_operation_on_samples_needs_them(operation: Operation) -> None:
    reason, message = refusal(Edit(operation, FIRST))
    assert (reason, "0:1" in message) == ("EDIT_SHAPE_MISMATCH", True)


def test_a_reference_needs_no_samples() -> None:
    check_edit(Edit(MeanAblate(given(64)), FIRST), SHAPE, torch.float32)


def test_one_direction_for_each_sample_needs_samples() -> None:
    assert refusal(Edit(Steer(given(8, 64)), FIRST))[0] == "EDIT_SHAPE_MISMATCH"
    assert refusal(Edit(Steer(given(1, 64))), (64,))[0] == "EDIT_SHAPE_MISMATCH"


def test_a_mask_that_does_not_fit_is_refused() -> None:
    reason, message = refusal(Edit(Zero(), Region(mask=given(3, dtype=torch.bool))))
    assert (reason, "mask" in message) == ("EDIT_SHAPE_MISMATCH", True)


@pytest.mark.parametrize(
    "operation",
    [
        Affine(2.0),
        Noise(NoiseKind.UNIFORM, 1.0),
        MeanAblate(),
        Steer(given(64)),
        Project(given(2, 64)),
        Dropout(0.5),
        Cast(torch.int8),
        Normalise(1.0),
        NanToNum(),
    ],
    ids=str,
)
@pytest.mark.parametrize("dtype", [torch.uint8, torch.int64, torch.bool], ids=str)
def test_what_makes_no_sense_for_integers_is_refused(operation: Operation, dtype: torch.dtype) -> None:
    assert refusal(Edit(operation), dtype=dtype)[0] == "EDIT_DTYPE_REJECTED"


@pytest.mark.parametrize("operation", [Add(1.0), Scale(1.0), Clamp(0.0), TopK(1), AddInput()], ids=str)
def test_booleans_are_not_computed_with(operation: Operation) -> None:
    assert refusal(Edit(operation), dtype=torch.bool)[0] == "EDIT_DTYPE_REJECTED"
    check_edit(Edit(operation), SHAPE, torch.int32)


@pytest.mark.parametrize("operation", [Clamp(0.0), TopK(1), Cast(torch.float16), NanToNum()], ids=str)
def test_complex_numbers_have_no_order(operation: Operation) -> None:
    assert refusal(Edit(operation), dtype=torch.complex64)[0] == "EDIT_DTYPE_REJECTED"


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.uint16, torch.uint64], ids=str)
def test_dtypes_that_torch_hardly_computes_with_are_refused(dtype: torch.dtype) -> None:
    assert refusal(Edit(Zero()), dtype=dtype)[0] == "EDIT_DTYPE_REJECTED"


@pytest.mark.parametrize(
    ("operation", "dtype"),
    [
        (Set(0.5), torch.int64),
        (Add(-0.5), torch.int8),
        (Scale(1.5), torch.uint8),
        (Clamp(0.5, 2.0), torch.int32),
        (Set(300.0), torch.uint8),
        (Add(-1.0), torch.uint8),
        (Clamp(None, 128.0), torch.int8),
        (Set(2.0**63), torch.int64),
        (Set(2.0), torch.bool),
        (Set(0.5), torch.bool),
        (Set(70_000.0), torch.float16),
        (Scale(-1e39), torch.float32),
        (Clamp(None, 1e39), torch.bfloat16),
        (NanToNum(posinf=1e5), torch.float16),
        (Noise(NoiseKind.UNIFORM, 1e39), torch.float32),
        (Set(given(dtype=torch.float32)), torch.int64),
        (Add(given(dtype=torch.complex64)), torch.float32),
        (Set(given(dtype=torch.int64)), torch.bool),
        (Affine(given(dtype=torch.complex64)), torch.float32),
        (MeanAblate(given(dtype=torch.complex64)), torch.float32),
        (Steer(given(64, dtype=torch.complex64)), torch.float32),
        (Project(given(2, 64, dtype=torch.complex128)), torch.float32),
    ],
    ids=str,
)
def test_a_constant_that_the_dtype_does_not_hold_is_refused(operation: Operation, dtype: torch.dtype) -> None:
    assert refusal(Edit(operation), dtype=dtype)[0] == "EDIT_DTYPE_REJECTED"


@pytest.mark.parametrize(
    ("operation", "dtype"),
    [
        (Set(255.0), torch.uint8),
        (Set(-(2.0**63)), torch.int64),
        (Set(65_504.0), torch.float16),
        (Set(given(dtype=torch.bool)), torch.uint8),
        (Set(given(dtype=torch.int64)), torch.float16),
        (Add(given(dtype=torch.float64)), torch.float16),
        (Add(1e39), torch.float64),
        (Add(1.5), torch.complex64),
    ],
    ids=str,
)
def test_a_constant_may_lose_digits_but_no_more(operation: Operation, dtype: torch.dtype) -> None:
    check_edit(Edit(operation), SHAPE, dtype)


@pytest.mark.parametrize("operation", [AddInput(), Skip()], ids=str)
@pytest.mark.parametrize("shape", [(8, 64, 7, 6), (1, 64, 7, 5), (64, 7, 5), ()], ids=str)
def test_the_input_has_the_output_s_shape(operation: Operation, shape: tuple[int, ...]) -> None:
    with pytest.raises(ServiceError, match="keeps the shape") as refused:
        check_edit(Edit(operation), SHAPE, torch.float32, other_shape=shape)
    assert refused.value.reason is ErrorReason.EDIT_SHAPE_MISMATCH
    check_edit(Edit(operation), SHAPE, torch.float32, other_shape=SHAPE, other_dtype=torch.float32)


@pytest.mark.parametrize("shape", [(8, 64, 7, 6), (2, 64, 7, 5), (64, 7, 5), ()], ids=str)
def test_what_is_swapped_in_has_the_value_s_shape_or_a_batch_of_one(shape: tuple[int, ...]) -> None:
    with pytest.raises(ServiceError, match="batch of 1") as refused:
        check_edit(Edit(Swap("s")), SHAPE, torch.float32, other_shape=shape)
    assert refused.value.reason is ErrorReason.EDIT_SHAPE_MISMATCH
    for fitting in (SHAPE, (1, *SHAPE[1:])):
        check_edit(Edit(Swap("s")), SHAPE, torch.float32, other_shape=fitting)


@pytest.mark.parametrize(
    ("operation", "dtype", "other"),
    [
        (Swap("s"), torch.float32, torch.complex64),
        (Swap("s"), torch.int64, torch.float32),
        (Swap("s"), torch.uint8, torch.int64),
        (Swap("s"), torch.bool, torch.uint8),
        (AddInput(), torch.int64, torch.float32),
        (AddInput(), torch.int8, torch.uint8),
        (Skip(), torch.float32, torch.float16),
        (Skip(), torch.float32, torch.int64),
    ],
)
def test_another_value_s_dtype_must_do(operation: Operation, dtype: torch.dtype, other: torch.dtype) -> None:
    with pytest.raises(ServiceError) as refused:
        check_edit(Edit(operation), SHAPE, dtype, other_shape=SHAPE, other_dtype=other)
    assert refused.value.reason is ErrorReason.EDIT_DTYPE_REJECTED


def test_a_half_takes_a_float_from_elsewhere() -> None:
    check_edit(Edit(Swap("s")), SHAPE, torch.float16, other_shape=SHAPE, other_dtype=torch.float32)


@pytest.mark.parametrize("number", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize(
    "dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.complex64, torch.complex128]
)
def test_tensors_with_nan_or_infinity_are_refused(number: float, dtype: torch.dtype) -> None:
    bad = torch.zeros(3, 4, dtype=dtype)
    bad[1, 2] = torch.tensor(complex(0, number)) if dtype.is_complex else number
    with pytest.raises(ServiceError, match=r"tensor 1 of the edits, of shape \(3, 4\)") as refused:
        check_finite([torch.ones(2), bad])
    assert refused.value.reason is ErrorReason.NON_FINITE_VALUE


def test_finite_tensors_of_every_dtype_pass() -> None:
    for dtype in (torch.bool, torch.uint8, torch.int64, torch.float16, torch.float64, torch.complex64):
        check_finite([torch.ones(2, dtype=dtype), torch.ones(0, 3, dtype=dtype), torch.ones((), dtype=dtype)])
    limits = torch.finfo(torch.float64)
    check_finite([torch.tensor([limits.max, limits.min], dtype=torch.float64)])


@pytest.mark.parametrize(
    ("constant", "dtype"),
    [
        (torch.tensor([1, 300]), torch.uint8),
        (torch.tensor([1, -1]), torch.uint8),
        (torch.tensor([1.0, 7e4]), torch.float16),
        (torch.tensor([70_000]), torch.float16),
        (torch.tensor([1e39], dtype=torch.float64), torch.float32),
        (torch.tensor([1e39j], dtype=torch.complex128), torch.complex64),
    ],
)
def test_numbers_of_a_tensor_that_the_dtype_does_not_hold_are_refused(
    constant: torch.Tensor, dtype: torch.dtype
) -> None:
    edit = Edit(Set(spec(constant)), channel_dim=3)
    with pytest.raises(ServiceError, match="not within") as refused:
        check_operands(edit, [constant], dtype)
    assert refused.value.reason is ErrorReason.EDIT_DTYPE_REJECTED


def test_masks_and_bases_are_of_their_own_dtype() -> None:
    mask, constant = torch.ones(2, dtype=torch.bool), torch.tensor(3.0)
    check_operands(Edit(Set(spec(constant)), Region(mask=spec(mask))), [mask, constant], torch.float16)
    basis = torch.tensor([[1e30, 0.0]])
    check_operands(Edit(Project(spec(basis))), [basis], torch.float16)
