"""What holds for every edit: a new tensor of the same form, differentiable, the same on every way."""

import functools
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode

from tests.support.files.scale import count
from tests.unit.tensors.edits.cases import (
    SHAPES,
    Case,
    cases,
    randn,
    regions,
    seeded_value,
    simple_operations,
    spec,
)
from trocar_api.reasons import ErrorReason
from trocar_server.errors import ServiceError
from trocar_server.tensors.edits import (
    Add,
    AddInput,
    Cast,
    Dropout,
    Edit,
    MeanAblate,
    Noise,
    NoiseKind,
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
    edit_bytes,
    edit_value,
)
from trocar_server.tensors.reductions import Axis, Index, OperandSpec, Slice, Take

SHAPE = (3, 4, 2, 5)


def every_case(shape: tuple[int, ...] = SHAPE, dtype: torch.dtype = torch.float64) -> Iterator[Case]:
    """Yield whole-value edits, edits of parts, and masked ones."""
    yield from cases(shape, dtype=dtype)
    for region, part in regions(shape):
        yield from cases(part, region, dtype=dtype)
    mask = randn(*shape, seed=5) > 0
    yield from (case.masked(mask) for case in cases(shape, dtype=dtype))


def storage(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16, torch.bfloat16])
def test_the_result_shares_no_memory_and_nothing_given_is_written(dtype: torch.dtype) -> None:
    for case in every_case(dtype=dtype):
        value, other = seeded_value(SHAPE, dtype), randn(*SHAPE, seed=21, dtype=dtype)
        givens = (value, other, *case.operands)
        before = [tensor.clone() for tensor in givens]
        found = case.run(value, other)
        assert storage(found) not in [storage(tensor) for tensor in givens], case
        found.zero_()  # a module that works in place
        assert all(torch.equal(*pair) for pair in zip(givens, before, strict=True)), case


def test_every_element_of_the_result_has_memory_of_its_own() -> None:
    for case in every_case():
        found = case.run(seeded_value(SHAPE), randn(*SHAPE, seed=21))
        places = torch.arange(found.numel()).reshape(SHAPE).double()
        assert torch.equal(found.copy_(places), places), case


def test_a_batch_of_one_is_no_alias_either() -> None:
    shape = (1, 4, 2, 5)
    for case in cases(shape, dtype=torch.float64):
        value, other = seeded_value(shape), randn(*shape, seed=21)
        found = case.run(value, other)
        assert storage(found) not in [storage(tensor) for tensor in (value, other, *case.operands)], case


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_shape_dtype_and_strides_are_the_value_s(shape: tuple[int, ...]) -> None:
    backwards = tuple(reversed(range(len(shape))))
    for dtype in (torch.float32, torch.float16):
        for case in every_case(shape, dtype):
            value, other = seeded_value(shape, dtype), randn(*shape, seed=21, dtype=dtype)
            turned = value.permute(backwards).contiguous().permute(backwards)
            for given_value in (value, turned):
                found = case.run(given_value, other)
                assert (found.shape, found.dtype) == (value.shape, dtype), case
                assert found.stride() == given_value.stride(), case


def test_channels_last_stays() -> None:
    value = randn(2, 8, 6, 6).to(memory_format=torch.channels_last)
    other = randn(2, 8, 6, 6, seed=3)
    for case in every_case((2, 8, 6, 6)):
        assert case.run(value, other).is_contiguous(memory_format=torch.channels_last), case


def test_values_that_are_views_are_edited_like_copies() -> None:
    base = randn(6, 4, 2, 10)
    views = (base[::2, :, :, 1::2], base[:1, :, :, :5].expand(3, 4, 2, 5), base[0, 0, 0, 0].expand(SHAPE))
    for view in views:
        for case in every_case():
            other = randn(*SHAPE, seed=21)
            found = case.run(view, other)
            torch.testing.assert_close(found, case.run(view.contiguous(), other))
            assert found.is_contiguous(), case


def test_edits_work_in_inference_mode_as_outside() -> None:
    for case in every_case():
        wanted = case.run(seeded_value(SHAPE), randn(*SHAPE, seed=21))
        with torch.inference_mode():
            found = case.run(seeded_value(SHAPE), randn(*SHAPE, seed=21))
            assert found.is_inference()
            assert torch.equal(found, wanted), case


def is_smooth(operation: Operation) -> bool:
    """Whether finite differences say what the gradient is; int8's passes through by definition."""
    return not isinstance(operation, Cast)


@pytest.mark.filterwarnings("ignore:Input #:UserWarning")
def test_gradients_and_second_gradients_are_those_of_finite_differences() -> None:
    for case in every_case((2, 3, 2, 2)):
        if not is_smooth(case.edit.operation):
            continue
        value = randn(2, 3, 2, 2, seed=11).requires_grad_()
        other = randn(2, 3, 2, 2, seed=12).requires_grad_()
        assert torch.autograd.gradcheck(case.run, (value, other), fast_mode=True), case
        assert torch.autograd.gradgradcheck(case.run, (value, other), fast_mode=True), case


@pytest.mark.parametrize("to", [torch.float16, torch.bfloat16, torch.int8])
def test_the_gradient_passes_a_cast_unchanged(to: torch.dtype) -> None:
    value = randn(3, 4, dtype=torch.float32).requires_grad_()
    weights = torch.arange(12.0).reshape(3, 4)
    (edit_value(Edit(Cast(to)), value) * weights).sum().backward()
    assert value.grad is not None
    assert torch.equal(value.grad, weights)


@pytest.mark.parametrize("edit", [Edit(Set(2.0)), Edit(Zero()), Edit(Zero(), Region(Index((0,))))], ids=str)
def test_behind_a_replaced_value_the_gradient_is_zero_not_missing(edit: Edit) -> None:
    value = torch.tensor([float("nan"), 1.0]).requires_grad_()
    edited = edit_value(edit, value)
    (edited * torch.tensor([3.0, 5.0])).sum().backward()
    assert value.grad is not None
    assert value.grad.tolist() == ([0, 5] if edit.region.index else [0, 0])


@pytest.mark.filterwarnings("error")
def test_second_gradients_at_zero_vectors_are_finite() -> None:
    direction = randn(3)
    operations = [o for o in simple_operations(torch.float64) if o.name == "normalise"]
    steers = [Steer(spec(direction), 0.5, keeps_norm=True), Steer(spec(direction), 0.0, keeps_norm=True)]
    for operation in (*operations, *steers):
        value = torch.zeros(2, 3, dtype=torch.float64)
        value[1, 1] = 4.0
        value.requires_grad_()
        operands = [direction] if isinstance(operation, Steer) else []
        found = edit_value(Edit(operation), value, operands)
        (gradient,) = torch.autograd.grad(found.square().sum(), value, create_graph=True)
        gradient.square().sum().backward()
        assert value.grad is not None
        assert value.grad.isfinite().all(), operation


def test_an_edited_value_may_be_written_in_place_under_autograd() -> None:
    for case in every_case():
        value = seeded_value(SHAPE).requires_grad_()
        case.run(value, randn(*SHAPE, seed=21)).mul_(2).relu_().sum().backward()
        assert value.grad is not None, case


def test_the_gradient_reaches_the_other_value() -> None:
    other = randn(1, 3).requires_grad_()
    edit_value(Edit(Swap("s"), Region(Index((Slice(1), ...)))), randn(4, 3), other=other).sum().backward()
    assert other.grad is not None
    assert other.grad.tolist() == [[3, 3, 3]]


@pytest.mark.parametrize("shape", [(0, 4, 2, 5), (3, 0, 2, 5), (0,), (0, 3, 4)], ids=str)
def test_empty_values_stay_empty(shape: tuple[int, ...]) -> None:
    operations = [o for o in simple_operations(torch.float32) if not isinstance(o, TopK)]
    for operation in operations:
        assert edit_value(Edit(operation), torch.zeros(shape)).shape == shape
    for operation in (Swap("s"), AddInput()):
        assert edit_value(Edit(operation), torch.zeros(shape), other=torch.zeros(shape)).shape == shape


def test_a_region_of_nothing_changes_nothing() -> None:
    value = randn(3, 4)
    for operation in simple_operations(torch.float64):
        if not isinstance(operation, TopK):
            found = edit_value(Edit(operation, Region(Index((..., Slice(2, 2))))), value)
            assert torch.equal(found, value)
            assert storage(found) != storage(value)


def test_one_number_is_a_value_too() -> None:
    for operation in (Set(2.0), Add(1.0), Scale(3.0), Noise(NoiseKind.UNIFORM, 0.0), Cast(torch.int8)):
        assert edit_value(Edit(operation), torch.tensor(2.0)).shape == ()


# --- Random edits: the form is known before anything is computed ------------------------------------

DTYPES = [
    *(torch.float16, torch.bfloat16, torch.float32, torch.float64),
    *(torch.uint8, torch.int32, torch.int64, torch.bool, torch.complex64),
]
FORMS = hnp.array_shapes(min_dims=0, max_dims=5, min_side=0, max_side=3)
SPECS = st.builds(
    OperandSpec,
    st.sampled_from([torch.float32, torch.float64, torch.int64, torch.bool, torch.complex64]),
    hnp.array_shapes(min_dims=0, max_dims=3, min_side=1, max_side=3),
)
NUMBERS = st.sampled_from([-1.0, 0.0, 0.5, 1.0, 2.0, 300.0, 1e5, 1e39])
OPERANDS = NUMBERS | SPECS
POSITIONS = st.lists(st.integers(-3, 2), min_size=1, max_size=3, unique=True).map(tuple)
INDICES = st.lists(st.integers(-2, 2) | st.builds(Slice, st.none() | st.integers(-2, 2)), max_size=3).map(
    lambda items: Index((*items, ...))
)
TAKES = st.lists(
    st.builds(Take, st.sampled_from(Axis), POSITIONS), max_size=2, unique_by=lambda take: take.axis
).map(tuple)
MASKS = FORMS.map(lambda shape: Region(mask=OperandSpec(torch.bool, shape)))
OPERATIONS: st.SearchStrategy[Any] = st.one_of(
    st.sampled_from(list(simple_operations(torch.float32))),
    st.builds(Set, OPERANDS),
    st.builds(Add, OPERANDS),
    st.builds(Scale, OPERANDS),
    st.builds(MeanAblate, SPECS),
    st.builds(Steer, SPECS.filter(lambda spec: len(spec.shape) in (1, 2)), NUMBERS, st.booleans()),
    st.builds(TopK, st.integers(1, 3), st.none() | st.integers(-3, 3), st.booleans()),
    st.builds(Project, st.builds(OperandSpec, st.just(torch.float32), st.tuples(*[st.integers(1, 3)] * 2))),
    st.just(AddInput()),
    st.just(Swap("s")),
)
EDITS = st.builds(
    Edit,
    OPERATIONS,
    st.builds(Region, st.none() | INDICES, TAKES) | MASKS,
    st.none() | st.none() | st.integers(-4, 4),
)


def outcome(edit: Edit, value: torch.Tensor, other: torch.Tensor) -> torch.Tensor | tuple[ErrorReason, str]:
    operands = [torch.ones(s.shape, dtype=s.dtype, device=value.device) for s in edit.operands]
    try:
        return edit_value(edit, value, operands, other)
    except ServiceError as refused:
        return refused.reason, refused.message


@settings(max_examples=count(1000))
@given(edit=EDITS, shape=FORMS, dtype=st.sampled_from(DTYPES), data=st.data())
def test_a_random_edit_is_refused_or_works_alike_on_meta_and_with_data(
    edit: Edit, shape: tuple[int, ...], dtype: torch.dtype, data: st.DataObject
) -> None:
    other_shape = data.draw(st.just(shape) | FORMS | st.just((1, *shape[1:])))
    other_dtype = data.draw(st.just(dtype) | st.sampled_from(DTYPES))
    value, other = torch.ones(shape, dtype=dtype), torch.ones(other_shape, dtype=other_dtype)
    found = outcome(edit, value, other)
    planned = outcome(edit, value.to("meta"), other.to("meta"))
    if isinstance(found, tuple) or isinstance(planned, tuple):
        assert found == planned
        assert isinstance(found, tuple)
        assert found[0] in (ErrorReason.EDIT_SHAPE_MISMATCH, ErrorReason.EDIT_DTYPE_REJECTED)
        with pytest.raises(ServiceError) as refused:
            check_edit(edit, shape, dtype, other_shape=other_shape, other_dtype=other_dtype)
        assert (refused.value.reason, refused.value.message) == found
        return
    check_edit(edit, shape, dtype, other_shape=other_shape, other_dtype=other_dtype)
    assert planned.is_meta
    assert (found.shape, found.dtype) == (planned.shape, planned.dtype) == (value.shape, dtype)
    assert storage(found) != storage(value) or not value.numel()


def test_nothing_is_drawn_on_the_meta_device() -> None:
    value = torch.empty(2**30, 2**10, device="meta")  # 4 TiB of random numbers
    for operation in (Noise(NoiseKind.GAUSSIAN, 1.0), Dropout(0.5), Resample()):
        assert edit_value(Edit(operation), value).shape == value.shape


# --- Memory -----------------------------------------------------------------------------------------


class Held(TorchDispatchMode):
    """Follows the memory of all tensors that operators return, for as long as they live."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch has no annotation here
        self.known: dict[int, tuple[StorageWeakRef, int]] = {}
        self.most = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = func(*args, **(kwargs or {}))
        given = {t.untyped_storage()._cdata for t in args if isinstance(t, torch.Tensor)}
        for tensor in found if isinstance(found, tuple | list) else (found,):
            if isinstance(tensor, torch.Tensor) and tensor.untyped_storage()._cdata not in given:
                kept = tensor.untyped_storage()
                self.known[kept._cdata] = (StorageWeakRef(kept), kept.nbytes())
        self.known = {key: entry for key, entry in self.known.items() if not entry[0].expired()}
        self.most = max(self.most, sum(count for _, count in self.known.values()))
        return found


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32, torch.float64, torch.complex64])
def test_an_edit_holds_no_more_than_is_announced(dtype: torch.dtype) -> None:
    shape = (8, 16, 9, 7)
    for layout in (torch.contiguous_format, torch.channels_last):
        for case in every_case(shape, dtype):
            value = seeded_value(shape, dtype).to(memory_format=layout)
            other = randn(*shape, seed=21, dtype=dtype)
            with Held() as held:
                found = case.run(value, other)
            announced = edit_bytes(case.edit, shape, dtype)
            assert held.most <= announced, case
            assert announced >= found.numel() * found.itemsize


def test_what_is_announced_stays_within_reason() -> None:
    shape, value_bytes = (8, 16, 9, 7), 8 * 16 * 9 * 7 * 4
    assert edit_bytes(Edit(Scale(0.5)), shape, torch.float32) <= 3 * value_bytes
    operations = simple_operations(torch.float32)
    assert max(edit_bytes(Edit(o), shape, torch.float32) for o in operations) <= 16 * value_bytes


@pytest.mark.parametrize(
    "operation", [Set(1.0), Zero(), Add(1.0), Scale(2.0), Swap("s"), AddInput()], ids=str
)
def test_an_edit_of_the_whole_value_is_one_pass_over_memory(operation: Operation) -> None:
    value = randn(2, 8, 6, 6).to(memory_format=torch.channels_last)
    other = randn(2, 8, 6, 6, seed=2)
    with Held() as held:
        edit_value(Edit(operation), value, other=other)
    assert held.most <= value.numel() * value.itemsize + 16  # a condition, a number


# --- Misuse by code ---------------------------------------------------------------------------------


@pytest.mark.parametrize("operands", [[], [torch.ones(3)] * 2, [torch.ones(2)], [torch.ones(3).double()]])
def test_constants_must_be_those_announced(operands: list[torch.Tensor]) -> None:
    with pytest.raises(ValueError, match="operands"):
        edit_value(Edit(Add(OperandSpec(torch.float32, (3,)))), torch.ones(2, 3), operands)


@pytest.mark.parametrize("operation", [Swap("s"), AddInput()], ids=str)
def test_an_operation_that_needs_another_value_says_so(operation: Operation) -> None:
    with pytest.raises(ValueError, match="needs another value"):
        edit_value(Edit(operation), torch.ones(2, 3))


def test_skip_is_no_operation_on_a_value() -> None:
    with pytest.raises(ValueError, match="skip"):
        edit_value(Edit(Skip()), torch.ones(2, 3))


def test_sparse_values_are_refused() -> None:
    with pytest.raises(ServiceError, match="dense") as refused:
        edit_value(Edit(Zero()), torch.eye(3).to_sparse())
    assert refused.value.reason is ErrorReason.EDIT_DTYPE_REJECTED


def test_edits_compose_in_the_order_they_are_applied() -> None:
    edits = [Edit(Add(1.0)), Edit(Scale(2.0)), Edit(Zero(), Region(Index((0,))))]
    found = functools.reduce(lambda value, edit: edit_value(edit, value), edits, torch.ones(2))
    assert found.tolist() == [0, 4]


@pytest.mark.cuda
@pytest.mark.parametrize("is_on_host", [True, False])
def test_every_edit_of_a_cuda_tensor_gives_what_a_cpu_gives(is_on_host: bool) -> None:
    """With operands in host memory, as a server has them, or on the device."""
    value, other = seeded_value(SHAPE, torch.float64), randn(*SHAPE, seed=21)
    for case in every_case():
        there = case if is_on_host else replace(case, operands=tuple(o.cuda() for o in case.operands))
        found = there.run(value.cuda(), other.cuda())
        assert found.is_cuda
        torch.testing.assert_close(found.cpu(), case.run(value, other), rtol=1e-10, atol=1e-10, msg=str(case))
