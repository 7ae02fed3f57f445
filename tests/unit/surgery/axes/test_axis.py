"""Digits of dimensions, against the indices that torch's own views leave at each place."""

import math
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from trocar_server.surgery.axes.axis import Axis, Dim, Kind, regrouped, size_of, whole
from trocar_server.surgery.axes.combining import unified

SIZES = (2, 6, 4, 3)


@st.composite
def steps(draw: st.DrawFn) -> list[Any]:
    """Draw views and permutations of a tensor of these sizes."""
    made: list[Any] = []
    rank = len(SIZES)
    for _ in range(draw(st.integers(1, 5))):
        if draw(st.booleans()):
            made.append(("permute", draw(st.permutations(range(rank)))))
            continue
        factors = draw(st.permutations([2, 2, 3, 2, 2, 3]))
        cuts = sorted(draw(st.sets(st.integers(1, 5), max_size=4)))
        groups = [factors[a:b] for a, b in zip([0, *cuts], [*cuts, 6], strict=True)]
        made.append(("view", [math.prod(group) for group in groups]))
        rank = len(groups)
    return made


def index_of(dim: Dim, axis: Axis, places: torch.Tensor) -> torch.Tensor:
    """Return what the digits of a dimension add to the index along an axis."""
    total = torch.zeros_like(places)
    rest = size_of(dim)
    for digit in dim:
        rest //= digit.size
        if digit.axis is axis:
            total += places // rest % digit.size * digit.stride
    return total


@given(steps())
def test_digits_tell_the_index_along_each_axis(drawn: list[Any]) -> None:
    axes = [Axis(Kind.NAMED, size, name) for size, name in zip(SIZES, "abcd", strict=True)]
    value = torch.arange(math.prod(SIZES)).view(SIZES)
    dims = tuple(map(whole, axes))
    for name, numbers in drawn:
        if name == "permute":
            value, dims = value.permute(*numbers), tuple(dims[place] for place in numbers)
            continue
        regroup = regrouped(dims, numbers)
        if regroup is None:  # a digit would have to be cut at a place that is none
            return
        value, dims = value.reshape(numbers), regroup
    for number, axis in enumerate(axes):
        expected = value // math.prod(SIZES[number + 1 :]) % axis.size
        found = torch.zeros_like(value)
        for place, dim in enumerate(dims):
            along = index_of(dim, axis, torch.arange(value.shape[place]))
            found += along.view([-1 if other == place else 1 for other in range(value.dim())])
        assert torch.equal(found, expected)


def test_a_view_that_cuts_within_a_digit_is_unknown() -> None:
    assert regrouped([whole(Axis(Kind.NAMED, 6, "a")), whole(Axis(Kind.NAMED, 4, "b"))], (4, 6)) is None


def test_heads_that_are_split_and_joined_are_the_channels_again() -> None:
    batch, width = Axis(Kind.BATCH, 3), Axis(Kind.CHANNELS, 12)
    split = regrouped([whole(batch), whole(width)], (3, 4, 3))
    assert split is not None
    folded = regrouped(split, (12, 3))
    assert folded is not None
    assert regrouped(folded, (3, 12)) == (whole(batch), whole(width))


def test_an_unknown_axis_becomes_what_it_is_added_to() -> None:
    tokens, open_axis = Axis(Kind.NAMED, 5, "tokens"), Axis(Kind.UNKNOWN, 5)
    elsewhere = whole(open_axis)
    assert unified(whole(open_axis), whole(tokens))[0].axis is tokens
    assert elsewhere[0].axis.real is tokens


@pytest.mark.parametrize(
    "other",
    [Axis(Kind.BATCH, 5), Axis(Kind.CHANNELS, 5), Axis(Kind.NAMED, 5, "frames")],
    ids=lambda axis: axis.kind,
)
def test_dimensions_that_contradict_each_other_are_unknown(other: Axis) -> None:
    (digit,) = unified(whole(Axis(Kind.NAMED, 5, "tokens")), whole(other))
    assert digit.axis.kind is Kind.UNKNOWN
