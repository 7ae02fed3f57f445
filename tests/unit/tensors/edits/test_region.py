"""Regions against NumPy's own indexing."""

from types import EllipsisType
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from tests.support.files.scale import count
from tests.unit.tensors.edits.cases import spec
from tests.unit.tensors.edits.oracle import channel_axis, expected, numpy_items
from trocar_api.reasons import ErrorReason
from trocar_server.errors import ServiceError
from trocar_server.tensors.edits import Add, Edit, NanToNum, Region, Set, Zero, check_edit, edit_value
from trocar_server.tensors.reductions import Axis, Index, Slice, Spans, Take, TextSpan, TokenRows

BOUNDS = st.none() | st.integers(-7, 7) | st.sampled_from([-(2**80), 2**80])
STEPS = st.none() | st.integers(1, 7) | st.just(2**80)
ITEMS = st.builds(Slice, BOUNDS, BOUNDS, STEPS) | st.integers(-5, 4)
SHAPES = hnp.array_shapes(min_dims=0, max_dims=5, min_side=0, max_side=5)
CHANNEL_DIMS = st.none() | st.integers(-5, 4)
POSITIONS = st.lists(st.integers(-5, 4), min_size=1, max_size=5, unique=True).map(tuple)
TAKES = st.lists(
    st.builds(Take, st.sampled_from(Axis), POSITIONS), max_size=3, unique_by=lambda take: take.axis
)


@st.composite
def indices(draw: st.DrawFn) -> Index | None:
    items: list[int | Slice | EllipsisType] = list(draw(st.lists(ITEMS, max_size=5)))
    if draw(st.booleans()):
        items.insert(draw(st.integers(0, len(items))), ...)
    return draw(st.none() | st.just(Index(tuple(items))))


def counted(shape: tuple[int, ...]) -> torch.Tensor:
    return torch.arange(float(np.prod(shape, dtype=int))).reshape(shape)


def is_refused(edit: Edit, shape: tuple[int, ...]) -> bool:
    try:
        check_edit(edit, shape, torch.float32)
    except ServiceError as refused:
        return refused.reason is ErrorReason.EDIT_SHAPE_MISMATCH
    return False


def numpy_selects(shape: tuple[int, ...], index: Index | None) -> bool:
    try:
        np.zeros(shape)[numpy_items(index, len(shape))]
    except IndexError:
        return False
    return True


def can_take(shape: tuple[int, ...], index: Index | None, takes: list[Take], channel_dim: int | None) -> bool:
    """Whether each take has a dimension of its own that the index leaves whole, and distinct positions."""
    rank = len(shape)
    if channel_dim is not None and not -rank <= channel_dim < rank:
        return False
    channels = channel_axis(Edit(Zero(), channel_dim=channel_dim), rank)
    tokens = 1 if rank == 3 and channels != 1 else None
    dims = {Axis.SAMPLES: 0 if rank else None, Axis.CHANNELS: channels, Axis.TOKENS: tokens}
    used, items = [dims[take.axis] for take in takes], numpy_items(index, rank)
    return len(set(used)) == len(used) and all(
        dim is not None and leaves_whole(shape[dim], items[dim]) and are_distinct(shape[dim], take)
        for dim, take in zip(used, takes, strict=True)
    )


def leaves_whole(size: int, item: int | slice) -> bool:
    return isinstance(item, slice) and len(np.arange(size)[item]) == size


def are_distinct(size: int, take: Take) -> bool:
    try:
        taken = np.arange(size)[list(take.positions)]
    except IndexError:
        return False
    return len(set(taken)) == len(taken)


@settings(max_examples=count(600))
@given(shape=SHAPES, index=indices(), takes=TAKES, channel_dim=CHANNEL_DIMS)
def test_a_region_is_what_numpy_selects(
    shape: tuple[int, ...], index: Index | None, takes: list[Take], channel_dim: int | None
) -> None:
    edit = Edit(Add(1000.0), Region(index, tuple(takes)), channel_dim)
    if not numpy_selects(shape, index) or not can_take(shape, index, takes, channel_dim):
        assert is_refused(edit, shape)
        return
    value = counted(shape)
    wanted = expected(edit, value.double().numpy(), [])
    np.testing.assert_array_equal(edit_value(edit, value).double().numpy(), wanted)


@settings(max_examples=count(200))
@given(data=st.data(), shape=SHAPES, index=indices())
def test_a_tensor_is_broadcast_to_the_part_as_numpy_broadcasts(
    data: st.DataObject, shape: tuple[int, ...], index: Index | None
) -> None:
    assume(numpy_selects(shape, index))
    items = numpy_items(index, len(shape))
    value = counted(shape).numpy()
    part = value[items]
    rank = data.draw(st.integers(0, part.ndim))
    given_shape = tuple(data.draw(st.sampled_from([1, size])) for size in part.shape[part.ndim - rank :])
    tensor = -1 - counted(given_shape)
    found = edit_value(Edit(Set(spec(tensor)), Region(index)), torch.from_numpy(value), [tensor])
    wanted = value.copy()
    wanted[items] = tensor.numpy()
    np.testing.assert_array_equal(found.numpy(), wanted)


@settings(max_examples=count(200))
@given(value=SHAPES, tensor=SHAPES)
def test_a_tensor_is_refused_exactly_where_it_would_enlarge_the_value(
    value: tuple[int, ...], tensor: tuple[int, ...]
) -> None:
    constant = torch.zeros(tensor)
    try:
        fits = np.broadcast_shapes(value, tensor) == value
    except ValueError:
        fits = False
    for edit in (Edit(Set(spec(constant))), Edit(Zero(), Region(mask=spec(constant.bool())))):
        assert is_refused(edit, value) is not fits


def test_takes_are_an_outer_product_in_the_order_given() -> None:
    takes = (Take(Axis.CHANNELS, (3, 0)), Take(Axis.SAMPLES, (-1,)), Take(Axis.TOKENS, (1, 2)))
    tensor = torch.tensor([[[1.0, 2.0], [3.0, 4.0]]])  # (samples, tokens, channels)
    found = edit_value(Edit(Set(spec(tensor)), Region(None, takes)), torch.zeros(2, 3, 4), [tensor])
    wanted = np.zeros((2, 3, 4))
    wanted[np.ix_([1], [1, 2], [3, 0])] = tensor.numpy()
    np.testing.assert_array_equal(found.numpy(), wanted)


def test_a_full_slice_leaves_a_dimension_whole_however_it_is_written() -> None:
    for whole in (Slice(), Slice(0, 4), Slice(-4, 99, 1)):
        region = Region(Index((0, whole)), (Take(Axis.CHANNELS, (2,)),))
        assert edit_value(Edit(Set(5.0), region), torch.zeros(2, 4)).nonzero().tolist() == [[0, 2]]


@pytest.mark.parametrize(
    ("shape", "region", "channel_dim", "hint"),
    [
        ((2, 3), Region(Index((0, 0, 0))), None, "give fewer"),
        ((2, 3), Region(Index((2,))), None, "position 2 is not among the 2 of dimension 0"),
        ((2, 3), Region(Index((..., -4))), None, "position -4 is not among the 3 of dimension 1"),
        ((2, 3), Region(takes=(Take(Axis.CHANNELS, (3,)),)), None, "position 3"),
        ((2, 3), Region(takes=(Take(Axis.CHANNELS, (2, -1)),)), None, "twice"),
        ((2, 3), Region(Index((Slice(), 1)), (Take(Axis.CHANNELS, (1,)),)), None, "full slice"),
        ((2, 3), Region(Index((Slice(1), Slice())), (Take(Axis.SAMPLES, (0,)),)), None, "full slice"),
        ((2, 3), Region(takes=(Take(Axis.TOKENS, (0,)),)), None, "use an index"),
        ((2, 3, 4), Region(takes=(Take(Axis.TOKENS, (0,)),)), 1, "use an index"),
        (
            (4,),
            Region(takes=(Take(Axis.SAMPLES, (0,)), Take(Axis.CHANNELS, (1,)))),
            None,
            "given twice for dimension 0",
        ),
        ((), Region(takes=(Take(Axis.SAMPLES, (0,)),)), None, "samples"),
        ((), Region(takes=(Take(Axis.CHANNELS, (0,)),)), None, "channel"),
        ((2, 3), Region(), 2, "give channel_dim within its 2"),
        ((2, 3), Region(tokens=Spans((TextSpan(text="a"),))), None, "use an index"),
        ((2, 3, 4), Region(tokens=TokenRows(((0,),), 3, (0,))), None, "the texts are 1 of 3 tokens"),
        ((1, 4, 4), Region(tokens=TokenRows(((0,),), 3, (0,))), None, "decoder=True"),
    ],
)
def test_a_region_that_does_not_fit_is_refused_with_a_hint(
    shape: tuple[int, ...], region: Region, channel_dim: int | None, hint: str
) -> None:
    with pytest.raises(ServiceError, match=hint) as refused:
        check_edit(Edit(Zero(), region, channel_dim), shape, torch.float32)
    assert refused.value.reason is ErrorReason.EDIT_SHAPE_MISMATCH


@given(data=st.data())
def test_tokens_of_texts_are_a_mask_within_samples_and_channels(data: st.DataObject) -> None:
    rows = data.draw(
        st.lists(st.sets(st.integers(0, 4), min_size=1).map(sorted).map(tuple), min_size=3, max_size=3)
    )
    samples = data.draw(st.lists(st.integers(0, 2), min_size=1, unique=True))
    channels = data.draw(st.lists(st.integers(0, 3), min_size=1, unique=True))
    value = counted((3, 5, 4))
    takes = (Take(Axis.SAMPLES, tuple(samples)), Take(Axis.CHANNELS, tuple(channels)))
    region = Region(takes=takes, tokens=TokenRows(tuple(rows), 5, (0, 0, 0)))
    expected = value.numpy().copy()
    for sample in samples:
        for token in rows[sample]:
            expected[sample, token, channels] = -1
    np.testing.assert_array_equal(edit_value(Edit(Set(-1.0), region), value).numpy(), expected)


@pytest.mark.parametrize(
    "options",
    [
        {"index": Index((0,))},
        {"mask": spec(torch.tensor([True]))},
        {"takes": (Take(Axis.TOKENS, (0,)),)},
    ],
)
def test_tokens_of_texts_go_with_samples_and_channels_only(options: dict[str, Any]) -> None:
    with pytest.raises(ServiceError, match="channels and samples only"):
        Region(**options, tokens=Spans((TextSpan(text="a"),)))


def test_a_mask_hides_what_the_operation_makes_elsewhere() -> None:
    value = torch.tensor([[float("nan"), 1.0], [float("nan"), 2.0]])
    mask = torch.tensor([[True], [False]])
    found = edit_value(Edit(NanToNum(7.0), Region(mask=spec(mask))), value, [mask])
    np.testing.assert_array_equal(found.numpy(), [[7, 1], [np.nan, 2]])
