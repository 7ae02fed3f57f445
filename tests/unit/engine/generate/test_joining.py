"""Joining: values of several passes are those of one pass over their tokens."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from trocar_server.engine.generate.decoding import DecodedPass
from trocar_server.engine.generate.joining import joined
from trocar_server.engine.generate.sampling import Choice
from trocar_server.engine.request.plan import TapRequest
from trocar_server.engine.resolve.tap_outputs import Output, TapTarget
from trocar_server.engine.run.pass_result import FeatureMap
from trocar_server.surgery import Leaf, Target, parse_selector
from trocar_server.surgery.axes.layout import Layout, Meaning
from trocar_server.tensors.reductions import Cast


def decoded(first: int, count: int, *values: tuple[str, torch.Tensor, tuple[str, ...]]) -> DecodedPass:
    """Return a pass with these values, one row for each of its tokens."""
    maps: list[FeatureMap] = []
    for name, value, axes in values:
        layout = Layout(tuple(Meaning(axis) for axis in axes))
        target = Target(name, name, 0, "out", layout=layout)
        leaf = Leaf("out", (), "Tensor", tuple(value.shape), value.dtype)
        source = TapTarget(target, leaf, TapRequest(parse_selector(name)), "Linear")
        sent = value.contiguous().view(torch.uint8).numpy().reshape(-1)
        maps.append(FeatureMap(Output(name, source, tuple(value.shape), value.dtype, True), sent))
    positions = {name: range(first, first + count) for name, _, _ in values}
    return DecodedPass(first, count, Choice(1, 0.0), tuple(maps), positions, {}, 0.0, None)


def read(found: FeatureMap) -> torch.Tensor:
    assert found.values is not None
    assert found.output.dtype is not None
    return torch.from_numpy(found.values.copy()).view(found.output.dtype).reshape(found.output.shape)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64])
@pytest.mark.parametrize(
    ("shape", "axes", "dim"),
    [
        ((1, 1, 4), ("batch", "tokens", "channels"), 1),
        ((1, 3, 1, 4), ("batch", "heads", "tokens", "channels"), 2),
        ((1, 4), ("tokens", "channels"), 0),
    ],
)
def test_rows_come_in_the_order_of_their_passes(
    dtype: torch.dtype, shape: tuple[int, ...], axes: tuple[str, ...], dim: int
) -> None:
    values = [torch.randint(-50, 50, shape).to(dtype) for _ in range(4)]
    passes = [decoded(7 + place, 1, ("a", value, axes)) for place, value in enumerate(values)]
    (together,) = joined(passes)
    (found,) = together.feature_maps
    assert torch.equal(read(found), torch.cat(values, dim))
    assert (together.first_position, together.token_count) == (7, 4)
    assert [*together.positions["a"]] == [7, 8, 9, 10]


def test_a_value_that_not_all_passes_have_keeps_its_positions() -> None:
    axes = ("batch", "tokens", "channels")
    first, last = torch.randn(1, 1, 2), torch.randn(1, 1, 2)
    passes = [decoded(5, 1, ("a", first, axes)), decoded(6, 1), decoded(7, 1, ("a", last, axes))]
    (together,) = joined(passes)
    assert torch.equal(read(together.feature_maps[0]), torch.cat([first, last], 1))
    assert [*together.positions["a"]] == [5, 7]


def counts(passes: list[DecodedPass]) -> list[tuple[int, int]]:
    return [(each.first_position, each.token_count) for each in joined(passes)]


def test_the_pass_of_a_prompt_comes_alone() -> None:
    axes = ("batch", "tokens", "channels")
    passes = [decoded(0, 5, ("a", torch.randn(1, 5, 2), axes)), decoded(5, 1), decoded(6, 1)]
    assert counts(passes) == [(0, 1), (5, 2)]


def test_values_that_are_not_plain_come_pass_by_pass() -> None:
    value: Any = ("a", torch.randn(1, 1, 2), ("batch", "tokens", "channels"))
    passes = []
    for place in range(3):
        plain = decoded(5 + place, 1, value)
        output = plain.feature_maps[0].output
        tap = replace(output.source.tap, cast=Cast(torch.int8))
        own = replace(output, source=replace(output.source, tap=tap))
        passes.append(replace(plain, feature_maps=(replace(plain.feature_maps[0], output=own),)))
    assert counts(passes) == [(5, 1), (6, 1), (7, 1)]
    assert all(isinstance(each.feature_maps[0].values, np.ndarray) for each in passes)
