"""The value at which a pass starts, laid out in memory as in a whole pass."""

import pytest
import torch

from trocar_server.surgery import laid_out


@pytest.mark.parametrize(
    ("shape", "strides"), [((2, 3), (1, 2)), ((1, 3), (0, 1)), ((2, 3, 4), (12, 1, 3)), ((2, 2), (8, 3))]
)
def test_a_value_gets_the_strides_of_a_whole_pass(shape: tuple[int, ...], strides: tuple[int, ...]) -> None:
    value = torch.randn(shape)
    found = laid_out(value, strides)
    assert (found.stride(), torch.equal(found, value)) == (strides, True)


@pytest.mark.parametrize(
    ("shape", "strides"), [((2, 3), (0, 1)), ((2, 3), (2, 1)), ((3, 2), (1, 1)), ((2, 2), (1,))]
)
def test_strides_whose_elements_would_share_memory_are_not_taken(
    shape: tuple[int, ...], strides: tuple[int, ...]
) -> None:
    value = torch.randn(shape)
    assert laid_out(value, strides) is value
