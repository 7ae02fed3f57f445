"""Every operation against NumPy in float64."""

import numpy as np
import pytest
import torch

from tests.unit.tensors.edits.cases import SHAPES, Case, cases, randn, regions, seeded_value, spec
from tests.unit.tensors.edits.oracle import expected
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
    Project,
    ProjectOnto,
    Region,
    Resample,
    Scale,
    Set,
    Steer,
    Swap,
    TopK,
    Zero,
    edit_value,
)
from trocar_server.tensors.reductions import Axis, Index, Take

NAN, INF = float("nan"), float("inf")
HALF_TOLERANCE = {torch.float16: 2e-3, torch.bfloat16: 1.6e-2}


def check(case: Case, value: torch.Tensor, rtol: float = 1e-9, atol: float = 1e-9) -> None:
    other = randn(*value.shape, seed=21, dtype=value.dtype)
    found = case.run(value, other)
    exact = [
        constant.to(torch.promote_types(constant.dtype, torch.float32)).numpy() for constant in case.operands
    ]
    exact = [
        e.astype(bool) if c.dtype == torch.bool else e for e, c in zip(exact, case.operands, strict=True)
    ]
    wide = torch.promote_types(value.dtype, torch.float64)
    wanted = expected(
        case.edit, value.to(wide).numpy(), exact, other.to(wide).numpy() if case.needs_other else None
    )
    assert found.dtype == value.dtype
    np.testing.assert_allclose(found.to(wide).numpy(), wanted, rtol, atol, err_msg=str(case.edit))


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_every_operation_is_what_numpy_makes(shape: tuple[int, ...]) -> None:
    for case in cases(shape, dtype=torch.float64):
        check(case, seeded_value(shape), 1e-7, 1e-7)  # of noise and dropout float32 is the definition


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_every_operation_in_part_of_a_value(shape: tuple[int, ...]) -> None:
    for region, part in regions(shape):
        for case in cases(part, region, dtype=torch.float64):
            check(case, seeded_value(shape), 1e-7, 1e-7)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_every_operation_behind_a_mask(shape: tuple[int, ...]) -> None:
    masks = [randn(*shape, seed=5) > 0, randn(shape[-1], seed=6) > 0]
    for case in cases(shape, dtype=torch.float64):
        for mask in masks:
            check(case.masked(mask), seeded_value(shape), 1e-7, 1e-7)


@pytest.mark.parametrize("channel_dim", [-1, -2, 0, 2])
def test_channels_lie_where_the_edit_says(channel_dim: int) -> None:
    shape = (3, 4, 2, 5)
    for case in cases(shape, channel_dim=channel_dim, dtype=torch.float64):
        check(case, seeded_value(shape), 1e-7, 1e-7)


def test_float32_is_as_exact_as_it_can_be() -> None:
    shape = (3, 4, 2, 5)
    for case in cases(shape, dtype=torch.float32):
        check(case, seeded_value(shape, torch.float32), 1e-5, 1e-6)


@pytest.mark.parametrize("dtype", HALF_TOLERANCE)
def test_halves_are_within_a_rounding(dtype: torch.dtype) -> None:
    shape = (3, 5, 4)
    for case in cases(shape, dtype=dtype):
        if not isinstance(case.edit.operation, Cast):
            check(case, seeded_value(shape, dtype), HALF_TOLERANCE[dtype], 2 * HALF_TOLERANCE[dtype])


@pytest.mark.parametrize("dtype", [torch.complex64, torch.complex128])
def test_complex_values_are_edited_like_others(dtype: torch.dtype) -> None:
    shape = (3, 4, 2, 5)
    for case in cases(shape, dtype=dtype):
        check(case, seeded_value(shape, dtype), 1e-5, 1e-5)


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64])
def test_integers_stay_exact(dtype: torch.dtype) -> None:
    value = torch.arange(24).reshape(2, 3, 4).to(dtype)
    other = value.flip(0)
    tensor = torch.tensor([0, 1, 2, 3], dtype=dtype)
    plain = [Set(7.0), Zero(), Add(3.0), Scale(2.0), Clamp(4.0, 9.0), Resample(1), TopK(2), TopK(1, 1, True)]
    given = [Set(spec(tensor)), Add(spec(tensor)), Scale(spec(tensor))]
    edits = [*((operation, ()) for operation in plain), *((operation, (tensor,)) for operation in given)]
    for operation, operands in edits:
        case = Case(Edit(operation), operands)
        wanted = expected(case.edit, value.numpy(), [tensor.numpy()])
        assert case.run(value).dtype == dtype
        assert np.array_equal(case.run(value).numpy(), wanted)
    assert torch.equal(edit_value(Edit(AddInput()), value, other=other), value + other)
    assert torch.equal(edit_value(Edit(Swap("s")), value, other=other), other)


def test_numbers_beyond_the_digits_of_a_float_stay_exact() -> None:
    value = torch.tensor([2**62 + 1, 5])
    assert edit_value(Edit(Add(1.0)), value).tolist() == [2**62 + 2, 6]
    assert edit_value(Edit(Scale(1.0)), value).tolist() == [2**62 + 1, 5]


@pytest.mark.parametrize("dtype", [torch.int8, torch.int16, torch.int64])
def test_the_smallest_integer_has_the_largest_absolute_value(dtype: torch.dtype) -> None:
    value = torch.tensor([100, torch.iinfo(dtype).min, 3, -50], dtype=dtype)
    assert edit_value(Edit(TopK(1, is_absolute=True)), value).tolist() == [0, value[1].item(), 0, 0]


def test_booleans_can_be_set_zeroed_swapped_and_resampled() -> None:
    value = torch.tensor([[True, False], [False, True], [True, True]])
    assert edit_value(Edit(Set(1.0)), value).all()
    assert not edit_value(Edit(Zero()), value).any()
    assert torch.equal(edit_value(Edit(Swap("s")), value, other=~value), ~value)
    order = torch.randperm(3, generator=torch.Generator().manual_seed(4))
    assert torch.equal(edit_value(Edit(Resample(4)), value), value[order])
    row = torch.tensor([True, False])
    assert edit_value(Edit(Set(spec(row))), value, [row]).tolist() == [[True, False]] * 3


def test_what_is_replaced_leaves_no_nan_behind() -> None:
    value = torch.tensor([[NAN, INF], [-INF, 1.0]])
    for edit in (Edit(Zero()), Edit(Set(0.0)), Edit(Swap("s"))):
        other = torch.zeros(2, 2) if isinstance(edit.operation, Swap) else None
        assert torch.equal(edit_value(edit, value, other=other), torch.zeros(2, 2))
    assert torch.equal(edit_value(Edit(Dropout(0.99999, 0)), value), torch.zeros(2, 2))


def test_nan_stays_nan_in_a_clamp_and_infinity_does_not() -> None:
    found = edit_value(Edit(Clamp(-1.0, 1.0)), torch.tensor([NAN, INF, -INF, 0.5]))
    np.testing.assert_array_equal(found.numpy(), [NAN, 1, -1, 0.5])


def test_a_norm_of_zero_or_nan_leaves_a_sample_as_it_is() -> None:
    value = torch.tensor([[0.0, 0.0], [NAN, 3.0], [3.0, 4.0]])
    for is_exact in (False, True):
        found = edit_value(Edit(Normalise(1.0, is_exact=is_exact)), value)
        np.testing.assert_allclose(found.numpy(), np.array([[0, 0], [NAN, 3], [0.6, 0.8]]), rtol=1e-6)


def test_a_norm_of_infinity_does_what_torch_s_clipping_does() -> None:
    value = torch.tensor([1.0, INF, -2.0])
    parameter = torch.nn.Parameter(torch.zeros(3))
    parameter.grad = value.clone()
    torch.nn.utils.clip_grad_norm_([parameter], 1.0)
    found = edit_value(Edit(Normalise(1.0, NormScope.ALL)), value)
    np.testing.assert_array_equal(found.numpy(), parameter.grad.numpy())


@pytest.mark.parametrize("size", [1e-30, 1e25, 3e38])
def test_squares_neither_overflow_nor_vanish(size: float) -> None:
    value = torch.tensor([[3.0, 4.0, 0.0]]) / 4 * size
    found = edit_value(Edit(Normalise(1.0, is_exact=True)), value)
    np.testing.assert_allclose(found.numpy(), [[0.6, 0.8, 0.0]], rtol=1e-6)
    direction = torch.tensor([0.0, 0.0, 1.0])
    steered = edit_value(Edit(Steer(spec(direction), size / 4, keeps_norm=True)), value, [direction])
    np.testing.assert_allclose(steered.double().norm().item(), value.double().norm().item(), rtol=1e-6)


def test_an_offset_of_1e8_costs_no_more_than_float32_does() -> None:
    value = (randn(8, 6) + 1e8).float()
    for case in cases((8, 6), dtype=torch.float32):
        if not isinstance(case.edit.operation, TopK):  # float32 makes them equal
            check(case, value, 1e-6, 40)


def test_steering_a_vector_to_zero_leaves_zero() -> None:
    value = torch.tensor([[1.0, -2.0], [0.0, 0.0]])
    direction = torch.tensor([1.0, -2.0])
    found = edit_value(Edit(Steer(spec(direction), -1.0, keeps_norm=True)), value, [direction])
    assert torch.equal(found, torch.zeros(2, 2))


def test_a_basis_may_be_of_dependent_zero_and_very_unequal_rows() -> None:
    first, second = randn(6, seed=1), randn(6, seed=2)
    clean = torch.stack([first, second])
    dependent = torch.stack([first * 1e-12, second * 1e9, torch.zeros(6), first - second]).float()
    value = randn(4, 6, seed=3)
    for kind in (Project, ProjectOnto):
        wanted = edit_value(Edit(kind(spec(clean))), value, [clean])
        found = edit_value(Edit(kind(spec(dependent))), value, [dependent])
        np.testing.assert_allclose(found.numpy(), wanted.numpy(), atol=1e-6)


def test_a_basis_of_nothing_or_of_everything() -> None:
    value = randn(4, 3)
    for basis, out in ((torch.zeros(2, 3), value), (torch.zeros(0, 3), value), (randn(5, 3), 0 * value)):
        onto = edit_value(Edit(ProjectOnto(spec(basis))), value, [basis])
        np.testing.assert_allclose(
            edit_value(Edit(Project(spec(basis))), value, [basis]).numpy(), out.numpy(), atol=1e-12
        )
        np.testing.assert_allclose(onto.numpy(), (value - out).numpy(), atol=1e-12)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.int64])
def test_a_basis_of_any_dtype_is_taken_as_given(dtype: torch.dtype) -> None:
    basis = torch.tensor([[3.0, 1.0, 0.0], [1.0, -2.0, 5.0]]).to(dtype)
    value = randn(4, 3)
    found = edit_value(Edit(ProjectOnto(spec(basis))), value, [basis])
    exact = basis.double().numpy()
    np.testing.assert_allclose(found.numpy(), value.numpy() @ np.linalg.pinv(exact) @ exact, atol=1e-12)


def test_exactly_k_are_kept_of_equal_elements_and_nan_counts_as_largest() -> None:
    assert edit_value(Edit(TopK(2)), torch.ones(3, 5)).sum(1).tolist() == [2, 2, 2]
    found = edit_value(Edit(TopK(1)), torch.tensor([[1.0, NAN, INF]]))
    np.testing.assert_array_equal(found.numpy(), [[0, NAN, 0]])


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
@pytest.mark.parametrize("to", [torch.float16, torch.bfloat16])
def test_a_cast_is_torch_s_there_and_back(dtype: torch.dtype, to: torch.dtype) -> None:
    value = torch.tensor([1.0, 1e-30, 7e4, -1 / 3, NAN, INF], dtype=torch.float64).to(dtype)
    torch.testing.assert_close(
        edit_value(Edit(Cast(to)), value), value.to(to).to(dtype), equal_nan=True, rtol=0, atol=0
    )


def test_int8_rounds_half_to_even_and_keeps_zero_nan_and_the_range() -> None:
    steps = torch.tensor([127.0, 0.5, 1.5, 2.5, -0.5, -1.5, 0.0])
    found = edit_value(Edit(Cast(torch.int8)), steps)
    assert found.tolist() == [127, 0, 2, 2, 0, -2, 0]
    assert edit_value(Edit(Cast(torch.int8)), torch.zeros(3)).tolist() == [0, 0, 0]
    assert edit_value(Edit(Cast(torch.int8)), torch.full((3,), 1e-45)).tolist() == [0, 0, 0]
    odd = edit_value(Edit(Cast(torch.int8)), torch.tensor([NAN, INF, -INF, 12.7, 0.04]))
    np.testing.assert_allclose(odd.numpy(), [NAN, 12.7, -12.7, 12.7, 0.0], rtol=1e-6)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_int8_does_not_leave_the_range_of_the_largest_floats(dtype: torch.dtype) -> None:
    largest = torch.finfo(dtype).max
    found = edit_value(Edit(Cast(torch.int8)), torch.tensor([1.0, largest, -largest, INF, -INF], dtype=dtype))
    expected = torch.tensor([0.0, largest, -largest, largest, -largest], dtype=torch.float64)
    np.testing.assert_allclose(found.double(), expected, rtol=torch.finfo(dtype).eps)


def test_int8_is_exactly_a_whole_number_of_steps() -> None:
    value = randn(1000, dtype=torch.float32)
    scale = value.abs().max() / 127
    assert torch.equal(edit_value(Edit(Cast(torch.int8)), value), (value / scale).round() * scale)


def test_a_swap_from_a_batch_of_one_reaches_every_sample() -> None:
    value, other = randn(4, 3, 2), randn(1, 3, 2, seed=8)
    assert torch.equal(edit_value(Edit(Swap("s")), value, other=other), other.expand(4, 3, 2))
    region = Region(Index((1,)))
    found = edit_value(Edit(Swap("s"), region), value, other=other)
    assert torch.equal(found[1], other[0])
    assert torch.equal(found[0], value[0])


def test_the_other_value_gets_the_value_s_dtype() -> None:
    value, other = randn(2, 3, dtype=torch.float32), randn(2, 3, seed=8)
    assert torch.equal(edit_value(Edit(Swap("s")), value, other=other), other.float())
    assert torch.equal(edit_value(Edit(AddInput()), value, other=other), value + other.float())


def test_random_numbers_are_those_of_the_part_and_of_the_seed() -> None:
    value = torch.zeros(4, 6)
    edit = Edit(Noise(NoiseKind.GAUSSIAN, 2.0, 5), Region(takes=(Take(Axis.CHANNELS, (4, 1)),)))
    drawn = torch.randn(4, 2, generator=torch.Generator().manual_seed(5)) * 2
    assert torch.equal(edit_value(edit, value)[:, [4, 1]], drawn)
    assert torch.equal(edit_value(edit, value), edit_value(edit, value))


def test_random_numbers_leave_torch_s_own_generator_alone() -> None:
    before = torch.get_rng_state()
    for operation in (Noise(NoiseKind.UNIFORM, 1.0), Dropout(0.5), Resample()):
        edit_value(Edit(operation), torch.ones(4, 3))
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.parametrize("seed", [-(2**63), -1, 2**63 - 1])
def test_seeds_are_of_64_bits_with_a_sign(seed: int) -> None:
    drawn = torch.rand(40, generator=torch.Generator().manual_seed(seed))
    assert torch.equal(edit_value(Edit(Dropout(0.5, seed)), torch.ones(40)) == 0, drawn < 0.5)


def test_the_mean_is_of_the_samples_that_are_selected() -> None:
    value = torch.arange(8.0).reshape(4, 2)
    found = edit_value(Edit(MeanAblate(), Region(takes=(Take(Axis.SAMPLES, (0, 3)),))), value)
    assert found.tolist() == [[3, 4], [2, 3], [4, 5], [3, 4]]


def test_halves_are_averaged_in_float32() -> None:
    value = torch.full((64, 2), 60_000.0, dtype=torch.float16)
    assert torch.equal(edit_value(Edit(MeanAblate()), value), value)


def test_affine_multiplies_first() -> None:
    shift = torch.tensor([1.0, 2.0])
    assert edit_value(Edit(Affine(3.0, spec(shift))), torch.ones(1, 2), [shift]).tolist() == [[4, 5]]


def test_constants_get_the_value_s_dtype() -> None:
    value = torch.ones(2, 3, dtype=torch.float16)
    third = torch.tensor(1 / 3, dtype=torch.float64)
    assert torch.equal(edit_value(Edit(Add(spec(third))), value, [third]), value + third.half())
    flags = torch.tensor([True, False, True])
    assert edit_value(Edit(Scale(spec(flags))), value, [flags])[0].tolist() == [1, 0, 1]


def test_nan_to_num_is_torch_s() -> None:
    value = torch.tensor([NAN, INF, -INF, 2.0])
    assert torch.equal(edit_value(Edit(NanToNum()), value), value.nan_to_num())
    assert edit_value(Edit(NanToNum(1.0, 5.0, -5.0)), value).tolist() == [1, 5, -5, 2]
