"""How values of other layouts become (batch, channels, height, width)."""

import itertools
from dataclasses import dataclass

import numpy as np
import pytest

from trocar import TokenGrid
from trocar._attribution.cam import channels_first, grad_cam, grad_cam_plus_plus


def test_convolutions_stay_as_they_are() -> None:
    values = np.arange(2 * 3 * 4 * 5.0).reshape(2, 3, 4, 5)
    assert channels_first(values) is not None
    np.testing.assert_array_equal(channels_first(values), values)


def test_channels_may_be_any_dimension() -> None:
    values = np.arange(2 * 3 * 4 * 5.0).reshape(2, 3, 4, 5)
    np.testing.assert_array_equal(channels_first(values, -1), values.transpose(0, 3, 1, 2))
    np.testing.assert_array_equal(channels_first(values[..., 0], 1), values[..., 0])


@pytest.mark.parametrize("dim", [0, -4, 4, -5])
def test_a_dimension_that_cannot_hold_channels_is_refused(dim: int) -> None:
    with pytest.raises(ValueError, match="channel_dim"):
        channels_first(np.zeros((2, 3, 4, 5)), dim)


@dataclass(frozen=True)
class Told:
    """What a reply says of a value."""

    axes: tuple[str, ...]
    channel_dim: int | None = None
    token_grids: tuple[TokenGrid, ...] = ()


def test_patches_become_rows_and_columns_wherever_they_are() -> None:
    """Two samples of 3 x 5 patches of 4 channels, behind three other tokens, and before one."""
    patches = np.arange(2 * 4 * 3 * 5.0).reshape(2, 4, 3, 5)
    tokens = np.full((2, 19, 4), -1.0)
    tokens[:, 3:18] = patches.reshape(2, 4, 15).transpose(0, 2, 1)
    for order in itertools.permutations(range(3)):
        axes = tuple(("batch", "height", "channels")[dim] for dim in order)
        told = Told(axes, axes.index("channels"), (TokenGrid(axes.index("height"), (3, 5), 3),))
        np.testing.assert_array_equal(channels_first(tokens.transpose(order), described=told), patches)


def test_tokens_that_are_no_patches_stay_one_dimension() -> None:
    """Sixteen words are no square."""
    values = np.arange(2 * 16 * 4.0).reshape(2, 16, 4)
    found = channels_first(values, described=Told(("batch", "tokens", "channels"), 2))
    np.testing.assert_array_equal(found, values.transpose(0, 2, 1))
    assert grad_cam(found, found).shape == (2, 16)


def test_patches_of_a_video_have_frames() -> None:
    values = np.arange(2 * 12 * 4.0).reshape(2, 12, 4)
    told = Told(("batch", "tokens", "channels"), 2, (TokenGrid(1, (3, 2, 2)),))
    found = channels_first(values, described=told)
    np.testing.assert_array_equal(found, values.transpose(0, 2, 1).reshape(2, 4, 3, 2, 2))


def test_what_is_said_goes_before_what_is_known() -> None:
    values = np.arange(2 * 4 * 5 * 6.0).reshape(2, 4, 5, 6)
    told = Told(("batch", "channels", "height", "width"), 1)
    np.testing.assert_array_equal(channels_first(values, -1, described=told), values.transpose(0, 3, 1, 2))
    tokens = np.arange(2 * 7 * 4.0).reshape(2, 7, 4)
    known = Told(("batch", "height", "channels"), 2, (TokenGrid(1, (2, 3), 1),))
    found = channels_first(tokens, grid=(3, 2), described=known)
    np.testing.assert_array_equal(found, tokens[:, 1:].transpose(0, 2, 1).reshape(2, 4, 3, 2))


def test_registers_are_dropped_where_the_grid_is_given() -> None:
    values = np.arange(1 * 11 * 4.0).reshape(1, 11, 4)  # a class token, four registers, 2 x 3 positions
    found = channels_first(values, grid=(2, 3))
    assert found[0, 1, 1, 2] == values[0, -1, 1]


@pytest.mark.parametrize(
    ("shape", "grid", "message"),
    [
        ((2, 8, 4), None, "pass channel_dim="),
        ((2, 9, 4), (2, 5), "does not match the"),
        ((2, 9, 4), (0, 5), "does not match the"),
        ((2, 8, 4, 4), (2, 2), "grid is for values with one dimension of tokens"),
        ((2, 5), None, "no spatial positions"),
        ((2, 9, 4), lambda value: value[:, 0], "grid returned"),
    ],
)
def test_what_has_no_positions_is_refused(shape: tuple[int, ...], grid: object, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        channels_first(np.zeros(shape), None, grid)  # type: ignore[arg-type]


def test_maps_may_have_any_number_of_positions() -> None:
    rng = np.random.default_rng(0)
    for shape in ((2, 3, 7), (2, 3, 2, 4, 5)):
        values, gradients = rng.standard_normal(shape), rng.standard_normal(shape)
        weights = gradients.reshape(2, 3, -1).mean(axis=2)
        expected = np.maximum(
            sum(weights[:, c].reshape(2, *[1] * (len(shape) - 2)) * values[:, c] for c in range(3)), 0
        )
        np.testing.assert_allclose(grad_cam(values, gradients), expected)
        assert grad_cam_plus_plus(values, gradients).shape == (2, *shape[2:])
