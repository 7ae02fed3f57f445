"""Views of values by what a reply says of their dimensions: samples, tokens, channels, patches."""

import itertools
from typing import Any

import numpy as np
import pytest

import trocar
from trocar._result.processed import ProcessedInput, ProcessedSample

LENGTHS, PADDED, WIDTH = (3, 5), 5, 5  # as wide as the longest text
NAMES = ("batch", "tokens", "channels")


def sample(length: int) -> ProcessedSample:
    words = tuple(f"w{place}" for place in range(length))
    spans = tuple((3 * place, 3 * place + 2) for place in range(length))
    return ProcessedSample(length, tuple(range(length)), words, spans, (False,) * length)


def reply(
    values: np.ndarray[Any, Any], axes: tuple[str, ...], *grids: trocar.TokenGrid
) -> trocar.FeatureMaps:
    info = trocar.FeatureMapInfo(
        "a", "a", "Block", 0, "out", "", values.shape, "float32", True, axes=axes, token_grids=grids
    )
    processed = ProcessedInput(tuple(map(sample, LENGTHS)), PADDED, False, ("input_ids",), "")
    timing = trocar.ServerTiming(0.0, 0.0)
    return trocar.FeatureMaps(
        {"a": values}, info={"a": info}, stats={}, expansions={}, timing=timing, processed=[processed]
    )


@pytest.mark.parametrize("order", [*itertools.permutations(range(3))])
def test_tokens_of_each_text_wherever_the_dimensions_are(order: tuple[int, ...]) -> None:
    values = np.arange(2 * PADDED * WIDTH, dtype=np.float32).reshape(2, PADDED, WIDTH)
    maps = reply(values.transpose(order), tuple(NAMES[dim] for dim in order))
    is_width_first = order.index(2) < order.index(1)
    for number, (found, length) in enumerate(zip(maps.samples("a"), LENGTHS, strict=True)):
        own = values[number, :length]
        np.testing.assert_array_equal(found, own.T if is_width_first else own)
    (second,) = maps.span("a", 3, 5, sample=1).reshape(1, -1)
    np.testing.assert_array_equal(second, values[1, 1])


def test_a_value_that_is_as_wide_as_the_texts_are_long_has_no_tokens() -> None:
    maps = reply(np.zeros((2, WIDTH), np.float32), ("batch", "channels"))
    with pytest.raises(ValueError, match=r"\(batch, channels\): it has no dimension for the tokens"):
        maps.samples("a")


def test_where_nothing_is_known_the_length_tells() -> None:
    values = np.arange(2 * PADDED * 4, dtype=np.float32).reshape(2, PADDED, 4)
    for axes in ((), ("batch", "?", "channels")):
        np.testing.assert_array_equal(reply(values, axes).samples("a")[0], values[0, :3])


def drawn(maps: trocar.FeatureMaps) -> list[np.ndarray[Any, Any]]:
    figure = maps.plot("a")
    return [np.asarray(axes.get_images()[0].get_array()) for axes in figure.axes if axes.get_images()]


@pytest.mark.parametrize("order", [*itertools.permutations(range(4))])
def test_pictures_are_of_channels_wherever_they_are(order: tuple[int, ...]) -> None:
    """Rows before columns in every order of the others."""
    if order.index(2) > order.index(3):
        return
    values = np.random.default_rng(0).standard_normal((2, 3, 4, 5)).astype(np.float32)
    names = ("batch", "channels", "height", "width")
    pictures = drawn(reply(values.transpose(order), tuple(names[dim] for dim in order)))
    np.testing.assert_array_equal(pictures, values[0])


def test_pictures_of_patches_have_rows_and_columns() -> None:
    values = np.random.default_rng(0).standard_normal((2, 7, 4)).astype(np.float32)
    pictures = drawn(reply(values, ("batch", "height", "channels"), trocar.TokenGrid(1, (2, 3), 1)))
    np.testing.assert_array_equal(pictures, values[0, 1:].T.reshape(4, 2, 3))


def test_steps_and_tokens_are_rows_and_channels_columns() -> None:
    values = np.random.default_rng(0).standard_normal((2, 4, 7)).astype(np.float32)
    (picture,) = drawn(reply(values, ("batch", "channels", "length")))
    np.testing.assert_array_equal(picture, values[0].T)
    (picture,) = drawn(reply(values, NAMES))
    np.testing.assert_array_equal(picture, values[0])
