"""Samples put together to batches."""

import random

import numpy as np
import pytest

from trocar._export.decoding import Loaded
from trocar._export.sample_batches import Batch, cut, inputs
from trocar.errors import SourceError


def image(index: int) -> Loaded:
    return Loaded(index, f"i{index}", b"x")


def array(index: int, width: int = 2) -> Loaded:
    return Loaded(index, f"a{index}", np.full(width, index, np.float32))


def broken(index: int) -> Loaded:
    return Loaded(index, f"b{index}", None, ValueError("no"))


def keys(samples: list[Loaded], size: int) -> list[list[str]]:
    return [[sample.key for sample in batch.samples] for batch in cut(samples, size)]


def test_batches_keep_the_order_and_hold_one_kind() -> None:
    samples = [image(0), image(1), image(2), array(3), image(4)]
    assert keys(samples, 2) == [["i0", "i1"], ["i2"], ["a3"], ["i4"]]


def test_uint8_pixels_are_images() -> None:
    pixels = Loaded(1, "p1", np.zeros((2, 2, 3), np.uint8))
    assert keys([image(0), pixels, array(2)], 4) == [["i0", "p1"], ["a2"]]


def test_samples_that_cannot_be_read_belong_to_the_batch_around_them() -> None:
    assert keys([broken(0), image(1), broken(2), array(3)], 3) == [["b0", "i1", "b2"], ["a3"]]


def test_cutting_may_begin_at_any_batch() -> None:
    chance = random.Random(0)
    samples = [chance.choice([image, array, broken])(index) for index in range(200)]
    whole = list(cut(samples, 5))
    position = 0
    for number, batch in enumerate(whole):
        assert list(cut(samples[position:], 5)) == whole[number:]
        position += len(batch.samples)
    assert position == 200


def test_arrays_are_stacked_and_images_listed() -> None:
    np.testing.assert_array_equal(inputs([array(0), array(1)]), [[0, 0], [1, 1]])
    assert inputs([image(0), image(1)]) == [b"x", b"x"]


def test_arrays_of_different_sizes_stay_a_list() -> None:
    assert [value.shape for value in inputs([array(0), array(1, width=3)])] == [(2,), (3,)]  # type: ignore[union-attr]


def test_arrays_that_differ_otherwise_are_refused() -> None:
    with pytest.raises(SourceError, match=r"\(2,\) float32, \(1, 2\) float32"):
        inputs([array(0), Loaded(1, "d", np.zeros((1, 2), np.float32))])
    with pytest.raises(SourceError, match="float64"):
        inputs([array(0), Loaded(1, "d", np.zeros(2))])


def test_name_is_first_and_last_sample() -> None:
    assert Batch([image(0)]).name == "i0"
    assert Batch([image(0), image(1), image(2)]).name == "i0 to i2"
