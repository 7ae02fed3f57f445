"""Scaling and resizing against OpenCV, torch, pytorch-grad-cam and captum."""

import cv2
import numpy as np
import pytest
import torch
from captum.attr._utils.visualization import _normalize_attr
from hypothesis import given
from hypothesis import strategies as st
from pytorch_grad_cam.utils.image import scale_cam_image

from trocar._attribution.scaling import min_max_scaled, resized, share_scaled
from trocar._base.tensors import Array


def maps(*shape: int, seed: int = 0) -> Array:
    return np.random.default_rng(seed).standard_normal(shape)


SIZES = st.integers(1, 9)


@given(SIZES, SIZES, SIZES, SIZES)
def test_resizing_is_torchs(height: int, width: int, new_height: int, new_width: int) -> None:
    x = maps(2, height, width)
    found = resized(x, new_height, new_width)
    expected = torch.nn.functional.interpolate(
        torch.from_numpy(x)[:, None], size=(new_height, new_width), mode="bilinear", align_corners=False
    )
    np.testing.assert_allclose(found, expected[:, 0], atol=1e-12)


@pytest.mark.parametrize(("size", "new"), [((7, 7), (224, 224)), ((3, 5), (64, 48)), ((1, 1), (9, 9))])
def test_enlarging_is_opencvs(size: tuple[int, int], new: tuple[int, int]) -> None:
    x = maps(1, *size)
    expected = cv2.resize(x[0].astype(np.float32), new[::-1])
    np.testing.assert_allclose(resized(x, *new)[0], expected.reshape(new), atol=1e-5)


@given(SIZES, SIZES, SIZES, SIZES)
def test_nan_spreads_where_torchs_does(height: int, width: int, new_height: int, new_width: int) -> None:
    x = maps(2, height, width)
    x[0, height // 2, width // 3] = np.nan
    expected = torch.nn.functional.interpolate(
        torch.from_numpy(x)[:, None], size=(new_height, new_width), mode="bilinear", align_corners=False
    )
    np.testing.assert_allclose(resized(x, new_height, new_width), expected[:, 0], atol=1e-12)


def test_one_nan_leaves_most_of_an_enlarged_map() -> None:
    x = maps(1, 7, 7)
    x[0, 0, 0] = np.nan
    found, expected = resized(x, 224, 224), cv2.resize(x[0].astype(np.float32), (224, 224))
    assert np.isnan(found).mean() < 0.05
    np.testing.assert_array_equal(np.isnan(found[0]), np.isnan(expected))


@pytest.mark.parametrize("offset", [0.0, 1e4])
def test_min_max_is_that_of_grad_cam(offset: float) -> None:
    x = (maps(3, 4, 5) + offset).astype(np.float32)
    np.testing.assert_allclose(min_max_scaled(x), scale_cam_image(x), atol=1e-6)


def test_a_large_offset_does_not_hide_what_differs() -> None:
    x = maps(2, 4, 4)
    np.testing.assert_allclose(min_max_scaled(x + 1e8), min_max_scaled(x), atol=1e-6)


def test_equal_values_become_zero() -> None:
    assert not min_max_scaled(np.full((2, 3, 3), 7.0)).any()
    assert not share_scaled(np.zeros((2, 3, 3))).any()


def test_shares_are_those_of_captums_pictures() -> None:
    x = maps(3, 20, 30)
    expected = np.stack([_normalize_attr(one, "absolute_value", 2) for one in x])
    np.testing.assert_allclose(share_scaled(x), expected, rtol=1e-12)
    assert (expected == 1).sum() > 9


def test_nan_stays_nan_and_does_not_spread() -> None:
    x = maps(2, 4, 4)
    broken = x.copy()
    broken[0, 1, 2] = np.nan
    for scale in (min_max_scaled, share_scaled):
        found = scale(broken)
        assert np.isnan(found).sum() == np.isnan(found[0, 1, 2]) == 1
        np.testing.assert_array_equal(found[1], scale(x)[1])


def test_infinity_becomes_an_end() -> None:
    x = maps(1, 3, 3)
    x[0, 0, 0], x[0, 2, 2] = np.inf, -np.inf
    assert min_max_scaled(x)[0, 0, 0] == 1
    assert min_max_scaled(x)[0, 2, 2] == 0
    assert (share_scaled(x)[0, [0, 2], [0, 2]] == 1).all()
    assert np.isfinite(share_scaled(x)).all()


def test_a_map_of_nothing_but_nan_is_nan() -> None:
    x = np.full((1, 2, 2), np.nan)
    assert np.isnan(min_max_scaled(x)).all()
    assert np.isnan(share_scaled(x)).all()
