"""Leaves and picks of values that are more than one tensor."""

from collections import OrderedDict, namedtuple
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torchvision.models.detection.image_list import ImageList

from tests.support.models.odd_models import SlottedPair
from tests.support.models.tiny_models import Pair
from trocar_server.surgery.structure import format_picks, leaves, pick, put

Point = namedtuple("Point", ["x", "y"])
A, B = torch.ones(1), torch.zeros(2)


class CallablePair(Pair):
    """A dataclass that can be called."""

    def __call__(self) -> None: ...


@dataclass
class Underscored:
    """A dataclass with a field that looks private."""

    _hidden: torch.Tensor


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (A, {(): A}),
        ((A, B), {(0,): A, (1,): B}),
        ([A, [B]], {(0,): A, (1, 0): B}),
        ({"out": A, "aux": (B,)}, {("out",): A, ("aux", 0): B}),
        (OrderedDict({0: A, 3: B}), {(0,): A, (3,): B}),
        (Point(A, B), {("x",): A, ("y",): B}),
        (Pair(A, B), {("first",): A, ("second",): B}),
        (SlottedPair(A, B), {("first",): A, ("second",): B}),
        (CallablePair(A, B), {("first",): A, ("second",): B}),
        (ImageList(A, [(1, 2)]), {("tensors",): A, ("image_sizes", 0, 0): 1, ("image_sizes", 0, 1): 2}),
        (torch.ones(2, 3).max(dim=1), {(0,): torch.ones(2), (1,): torch.zeros(2, dtype=torch.int64)}),
        ((A, None, 7, "text"), {(0,): A, (1,): None, (2,): 7, (3,): "text"}),
        ((), {}),
        ({}, {}),
        (None, {(): None}),
    ],
    ids=lambda value: type(value).__name__,
)
def test_every_leaf_comes_with_its_picks(
    value: object, expected: dict[tuple[int | str, ...], object]
) -> None:
    found = dict(leaves(value))
    assert list(found) == list(expected)
    assert all(found[picks] is leaf or torch.equal(found[picks], leaf) for picks, leaf in expected.items())  # type: ignore[arg-type]


@pytest.mark.parametrize("atom", [nn.Linear(1, 1), print, torch.float32, torch.device("cpu"), b"bytes", 1j])
def test_what_is_no_structure_is_its_own_leaf(atom: object) -> None:
    assert list(leaves(atom)) == [((), atom)]


def test_an_object_that_refers_to_itself_has_finitely_many_leaves() -> None:
    class Loop:
        def __init__(self) -> None:
            self.value = A
            self.myself = self

    assert (("value",), A) in list(leaves(Loop()))


@pytest.mark.parametrize(
    ("value", "picks", "expected"),
    [
        (A, (), A),
        ((A, B), (1,), B),
        ((A, B), (-1,), B),
        ({"out": (A, B)}, ("out", -2), A),
        ({0: A, 3: B}, (3,), B),
        ({-1: A, 1: B}, (-1,), A),
        (Point(A, B), ("y",), B),
        (SlottedPair(A, B), ("second",), B),
    ],
)
def test_a_pick_reaches_its_element(
    value: object, picks: tuple[int | str, ...], expected: torch.Tensor
) -> None:
    assert pick(value, picks) is expected


@pytest.mark.parametrize(
    ("value", "picks"),
    [((A,), (1,)), ((A,), (-2,)), ((A,), ("0",)), ({"a": A}, (0,)), (A, (0,)), (None, ("x",))],
)
def test_a_pick_of_nothing_is_a_key_error(value: object, picks: tuple[int | str, ...]) -> None:
    with pytest.raises(KeyError):
        pick(value, picks)


def test_picks_are_written_as_in_a_selector() -> None:
    assert format_picks((0, "out", -1, 'a"b')) == '[0]["out"][-1]["a\\"b"]'


def _children(inner: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    keys = st.integers(-3, 3) | st.text(max_size=3) | st.booleans()
    return (
        st.lists(inner, max_size=3)
        | st.lists(inner, max_size=3).map(tuple)
        | st.dictionaries(keys, inner, max_size=3)
    )


_STRUCTURES = st.recursive(st.builds(torch.Tensor) | st.none() | st.integers(), _children, max_leaves=8)


@given(_STRUCTURES)
def test_the_picks_of_a_leaf_reach_that_leaf_and_no_other(value: object) -> None:
    found = list(leaves(value))
    assert len({picks for picks, _ in found}) == len(found)
    for picks, leaf in found:
        assert pick(value, picks) is leaf


@pytest.mark.parametrize(
    ("value", "picks", "expected"),
    [
        ({"a": A, "b": [A]}, ("b", 0), {"a": A, "b": [B]}),
        (OrderedDict(a=A), ("a",), OrderedDict(a=B)),
        ((A, [A, A]), (1, -1), (A, [A, B])),
        (Point(A, A), ("y",), Point(A, B)),
        (A, (), B),
    ],
)
def test_an_element_is_replaced_in_a_copy(value: Any, picks: tuple[int | str, ...], expected: Any) -> None:
    before = repr(value)
    found = put(value, picks, B)
    assert type(found) is type(expected)
    assert repr(found) == repr(expected)
    assert repr(value) == before


def test_a_field_of_a_frozen_dataclass_is_replaced_in_a_copy() -> None:
    value = Frozen(A)
    assert put(value, ("held",), B).held is B
    assert value.held is A


@dataclass(frozen=True)
class Frozen:
    """A dataclass whose fields cannot be set."""

    held: Any


def test_a_value_of_a_function_with_named_results_keeps_their_names() -> None:
    value = torch.ones(2, 3).max(dim=1)
    found = put(value, (0,), B)
    assert type(found) is type(value)
    assert found.values is B
    assert found.indices is value.indices
    assert value.values is not B
