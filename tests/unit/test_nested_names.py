"""Names of inputs within dictionaries and lists, taken apart and put together again."""

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trocar_server.nested_names import flattened, nested, parse_name

KEYS = st.text(st.characters(codec="utf-8"), max_size=4)
TREES = st.recursive(
    st.integers(),
    lambda each: st.lists(each, min_size=1, max_size=3) | st.dictionaries(KEYS, each, min_size=1, max_size=3),
    max_leaves=8,
)


def leaves(name: str, value: Any) -> list[tuple[str, int]]:
    if isinstance(value, int):
        return [(name, value)]
    items = value.items() if isinstance(value, dict) else enumerate(value)
    return [leaf for key, each in items for leaf in leaves(f"{name}[{json.dumps(key)}]", each)]


def depth(value: Any) -> int:
    if isinstance(value, int):
        return 0
    return 1 + max(map(depth, value.values() if isinstance(value, dict) else value))


@given(
    st.dictionaries(st.sampled_from(["", "batch", "x"]), TREES.filter(lambda tree: depth(tree) <= 8)),
    st.randoms(),
)
def test_structures_are_put_together_from_their_leaves(arguments: dict[str, Any], random: Any) -> None:
    found = [leaf for name, value in arguments.items() for leaf in leaves(name, value)]
    random.shuffle(found)
    names, values = nested([name for name, _ in found], [value for _, value in found])
    assert dict(zip(names, values, strict=True)) == arguments


@given(st.dictionaries(st.sampled_from(["batch", "x"]), TREES.filter(lambda tree: depth(tree) <= 8)))
def test_structures_are_taken_apart_into_what_they_are_put_together_from(arguments: dict[str, Any]) -> None:
    names, values = flattened(list(arguments), list(arguments.values()))
    assert not [value for value in values if isinstance(value, dict)]
    names, values = nested(names, values)
    assert dict(zip(names, values, strict=True)) == arguments


def test_lists_of_tensors_stay_lists() -> None:
    assert flattened(["", "a"], [[1, 2], [{"x": 3}, {"x": [4]}]]) == (
        ["", 'a[0]["x"]', 'a[1]["x"]'],
        [[1, 2], 3, [4]],
    )


def test_arguments_keep_their_order() -> None:
    assert nested(["", 'b["x"]', "a", 'b["y"]'], [1, 2, 3, 4]) == (["", "b", "a"], [1, {"x": 2, "y": 4}, 3])
    assert parse_name('labels[1]["a \\"b\\""]') == ("labels", (1, 'a "b"'))


@pytest.mark.parametrize("name", ["a[", "a[]", "a[-1]", "a[0]x", 'a["x]', "a[0] [1]", "a[99999]", 'a["\\x"]'])
def test_other_names_are_refused(name: str) -> None:
    with pytest.raises(ValueError, match="is no name of an input"):
        parse_name(name)
