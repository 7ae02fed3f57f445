"""Tensors come back from the bytes that were kept for them: against the tensors themselves."""

import math
from dataclasses import replace

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from tests.support.files.scale import count
from trocar_server.spool.saved.views import View, small_part

_DTYPES = (
    torch.float32,
    torch.float64,
    torch.int8,
    torch.bfloat16,
    torch.bool,
    torch.complex64,
    torch.complex128,
)
_STORAGE_BYTES = 16_384


def storage_of(count: int = _STORAGE_BYTES) -> torch.UntypedStorage:
    numbers = torch.randint(0, 2, (count,), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    return numbers.untyped_storage()


@st.composite
def views(draw: st.DrawFn) -> View:
    """Views of a storage, by whatever sizes, strides and offset fit in."""
    dtype = draw(st.sampled_from(_DTYPES))
    rank = draw(st.integers(0, 4))
    shape = tuple(draw(st.lists(st.integers(1, 6), min_size=rank, max_size=rank)))
    strides = tuple(draw(st.lists(st.integers(0, 60), min_size=rank, max_size=rank)))
    view = View(
        shape,
        strides,
        draw(st.integers(0, 700)),
        dtype,
        is_conjugate=dtype.is_complex and draw(st.booleans()),
    )
    assume((view.offset + view.span) * dtype.itemsize <= _STORAGE_BYTES)
    return view


@given(view=views())
@settings(max_examples=count(400))
def test_a_view_comes_back_from_a_small_part_of_its_storage(view: View) -> None:
    storage = storage_of()
    expected = view.tensor(storage)
    part = small_part(view, storage)
    if part is None:
        return
    kept = part.copy()
    assert kept.nbytes() == part.byte_count < storage.nbytes() / 2
    found = part.view.tensor(kept)
    assert torch.equal(found.resolve_conj(), expected.resolve_conj())
    assert (found.shape, found.stride(), found.is_conj()) == (
        expected.shape,
        expected.stride(),
        expected.is_conj(),
    )
    assert found.data_ptr() % 64 == expected.data_ptr() % 64


@given(view=views())
@settings(max_examples=count(400))
def test_what_is_written_to_every_element_is_seen_by_no_other(view: View) -> None:
    bare = replace(view, is_conjugate=False)
    assume(not bare.overlaps())
    count = math.prod(bare.distinct_shape)
    tensor = bare.tensor(torch.zeros(_STORAGE_BYTES, dtype=torch.uint8).untyped_storage())
    distinct = tensor.as_strided(bare.distinct_shape, bare.strides, bare.offset).view(dtype=tensor.dtype)
    numbers = torch.arange(count).remainder(2).to(tensor.dtype).reshape(bare.distinct_shape)
    distinct.copy_(numbers)
    assert torch.equal(distinct, numbers)


def test_an_overlap_is_seen_where_torch_refuses_to_write() -> None:
    lapping: list[tuple[tuple[int, ...], tuple[int, ...]]]
    lapping = [((3, 2), (1, 1)), ((2, 4, 3), (2, 1, 8)), ((5, 5), (4, 1))]
    for shape, strides in lapping:
        assert View(shape, strides, 0, torch.float32).overlaps()
    apart: list[tuple[tuple[int, ...], tuple[int, ...]]] = [
        ((3, 2), (2, 1)),
        ((4, 3, 2), (1, 8, 4)),
        ((7, 5), (0, 1)),
        ((1, 9), (1, 1)),
        ((), ()),
    ]
    for shape, strides in apart:
        assert not View(shape, strides, 0, torch.float32).overlaps()


def test_a_contiguous_part_is_kept_as_it_lies() -> None:
    batch = torch.randn(100, 4, 6, 6).to(memory_format=torch.channels_last)
    image = batch[7:9]
    part = small_part(View.of(image), batch.untyped_storage())
    assert part is not None
    assert part.byte_count < image.nbytes + 64
    found = part.view.tensor(part.copy())
    assert torch.equal(found, image)
    assert found.is_contiguous(memory_format=torch.channels_last)


def test_of_scattered_elements_nothing_else_is_kept() -> None:
    tokens = torch.randn(8, 50, 16)
    first = tokens[:, 0]
    part = small_part(View.of(first), tokens.untyped_storage())
    assert part is not None
    assert part.byte_count == first.nbytes
    found = part.view.tensor(part.copy())
    assert torch.equal(found, first)
    assert found.stride() == first.stride()


def test_an_expanded_part_is_kept_once() -> None:
    column = torch.randn(40, 50)[:, 3:4].expand(40, 1000)
    part = small_part(View.of(column), column.untyped_storage())
    assert part is not None
    assert part.byte_count == 40 * 4
    found = part.view.tensor(part.copy())
    assert torch.equal(found, column)
    assert found.stride() == column.stride()


def test_half_of_a_storage_or_more_is_no_small_part() -> None:
    whole = torch.randn(10, 100)
    for view in (whole, whole.T, whole[:6], whole[:, :60], whole[:, ::2]):
        assert small_part(View.of(view), whole.untyped_storage()) is None


def test_overlapping_elements_are_not_taken_apart() -> None:
    windows = torch.randn(1000).as_strided((4, 3), (300, 0), 0).as_strided((4, 3, 3), (300, 1, 1), 0)
    assert small_part(View.of(windows), windows.untyped_storage()) is None


@pytest.mark.parametrize("is_conjugate", [False, True])
def test_conjugates_and_negatives_come_back_as_such(is_conjugate: bool) -> None:
    numbers = torch.randn(50, dtype=torch.complex64)
    imaginary = numbers.conj().imag
    assert imaginary.is_neg()
    found = View.of(imaginary).tensor(imaginary.untyped_storage())
    assert found.is_neg()
    assert torch.equal(found, imaginary)
    tensor = numbers.conj() if is_conjugate else numbers
    found = View.of(tensor).tensor(tensor.untyped_storage())
    assert found.is_conj() == is_conjugate
    assert torch.equal(found, tensor)
    assert found.data_ptr() == numbers.data_ptr()
