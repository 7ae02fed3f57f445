"""How values of other layouts become (batch, channels, height, width)."""

import numpy as np
import pytest

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


@pytest.mark.parametrize("extra", [0, 1])
def test_tokens_become_a_square_behind_a_class_token(extra: int) -> None:
    values = np.arange(2 * (9 + extra) * 4.0).reshape(2, 9 + extra, 4)
    found = channels_first(values)
    assert found.shape == (2, 4, 3, 3)
    assert found[1, 2, 0, 1] == values[1, extra + 1, 2]


def test_registers_are_dropped_where_the_grid_is_given() -> None:
    values = np.arange(1 * 11 * 4.0).reshape(1, 11, 4)  # a class token, four registers, 2 x 3 positions
    found = channels_first(values, grid=(2, 3))
    assert found[0, 1, 1, 2] == values[0, -1, 1]


@pytest.mark.parametrize(
    ("shape", "grid", "message"),
    [
        ((2, 8, 4), None, "do not form a square"),
        ((2, 9, 4), (2, 5), "does not match the"),
        ((2, 9, 4), (0, 5), "does not match the"),
        ((2, 8, 4, 4), (2, 2), "grid is for tokens"),
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
