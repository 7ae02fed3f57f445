"""Splitting into blocks must not show in the numbers, and must keep memory small."""

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from torch.utils._python_dispatch import TorchDispatchMode

from tests.unit.tensors.stats.oracle import PLAIN
from trocar_server.tensors.stats import Statistic
from trocar_server.tensors.stats.parts import Part
from trocar_server.tensors.stats.summary import needed_parts, summarize


@given(
    shape=hnp.array_shapes(min_dims=2, max_dims=4, max_side=6),
    block_elements=st.integers(1, 50),
    data=st.data(),
)
def test_blocks_of_any_size_give_the_same(
    shape: tuple[int, ...], block_elements: int, data: st.DataObject
) -> None:
    value = torch.randn(shape, generator=torch.Generator().manual_seed(0))
    group_dim = data.draw(st.integers(0, len(shape) - 1))
    whole = summarize(value, group_dim, needed_parts(PLAIN))
    blocks = summarize(value, group_dim, needed_parts(PLAIN), block_elements)
    for statistic in PLAIN:
        torch.testing.assert_close(
            blocks.finish(statistic), whole.finish(statistic), rtol=1e-12, atol=1e-12, equal_nan=True
        )


@pytest.mark.parametrize("shape", [(50, 40), (1, 2000), (2, 10, 100), (2000, 1)])
@pytest.mark.parametrize("group_dim", [0, 1])
def test_no_block_is_larger_than_the_limit(
    shape: tuple[int, ...], group_dim: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    sizes: list[int] = []
    measure = Part.measure

    def record(part: Part, block: torch.Tensor, dim: int) -> torch.Tensor:
        sizes.append(block.numel())
        return measure(part, block, dim)

    monkeypatch.setattr(Part, "measure", record)
    summarize(torch.ones(shape), group_dim, (Part.TOTAL,), block_elements=100)
    assert sum(sizes) == torch.Size(shape).numel()
    assert max(sizes) <= 100


@pytest.mark.parametrize(
    ("statistic", "parts"),
    [
        (Statistic.MEAN, {Part.TOTAL}),
        (Statistic.STD, {Part.SPREAD}),
        (Statistic.ABSMAX, {Part.LOW, Part.HIGH}),
    ],
)
def test_only_the_parts_that_are_needed_are_computed(statistic: Statistic, parts: set[Part]) -> None:
    assert summarize(torch.ones(2, 2), 0, needed_parts([statistic])).parts.keys() == parts


def test_the_largest_absolute_value_of_negative_zeros_is_zero() -> None:
    value = torch.tensor([[-0.0, -0.0], [0.0, -0.0]])
    found = summarize(value, 0, needed_parts([Statistic.ABSMAX])).finish(Statistic.ABSMAX)
    assert not found.signbit().any()


class Operations(TorchDispatchMode):
    """The names of torch's operations inside the context."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch's
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.append(func.__name__)
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("shape", [(3, 4), (2, 3, 5), (0, 3), (3, 0)])
@pytest.mark.parametrize("group_dim", [0, 1])
def test_a_count_alone_reads_no_element(shape: tuple[int, ...], group_dim: int) -> None:
    value = torch.randn(shape)
    expected = summarize(value, group_dim, (Part.ZEROS,), 2).count
    with Operations() as operations:
        count = summarize(value, group_dim, needed_parts([Statistic.COUNT]), 2).count
    assert torch.equal(count, expected)
    assert count.dtype == torch.float64
    assert operations.names == ["new_full.default"]


class _OnDevice(torch.Tensor):
    """Says that it is on a GPU, where parts are measured of the whole tensor at once."""

    @property
    def device(self) -> torch.device:  # type: ignore[override]
        return torch.device("cuda")


@pytest.mark.parametrize(
    "dtype", [torch.float8_e4m3fn, torch.float8_e5m2, torch.float16, torch.bfloat16, torch.float32], ids=str
)
def test_every_floating_dtype_has_its_statistics_on_a_device(dtype: torch.dtype) -> None:
    value = torch.tensor([[1.0, -2.0, 0.0], [0.5, 4.0, -1.5]]).to(dtype)
    found = summarize(value.as_subclass(_OnDevice), 1, needed_parts(PLAIN))
    expected = summarize(value, 1, needed_parts(PLAIN))
    for statistic in PLAIN:
        assert found.finish(statistic).tolist() == expected.finish(statistic).tolist()
