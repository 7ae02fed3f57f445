"""Where windows lie, and what is refused."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from trocar._attribution.occlusion import OccludedBatches, Windows, windows


@given(st.data())
def test_every_element_is_covered_and_every_window_lies_in_the_sample(data: st.DataObject) -> None:
    shape = tuple(data.draw(st.lists(st.integers(1, 7), min_size=1, max_size=3)))
    window = tuple(data.draw(st.integers(1, size)) for size in shape)
    stride = tuple(data.draw(st.integers(1, size)) for size in window)
    placed = Windows(shape, window, stride)
    covered = np.zeros(shape, int)
    for place in placed:
        covered[place] += 1
        assert covered[place].size
    assert covered.all()
    assert len(placed) == len(list(placed))


def test_a_number_is_a_size_through_all_channels() -> None:
    assert windows((3, 20, 30), 4, 2) == Windows((3, 20, 30), (3, 4, 4), (2, 2, 2))
    assert windows((3, 224, 224), None, None) == Windows((3, 224, 224), (3, 16, 16), (1, 8, 8))
    assert windows((3, 4, 5), None, None) == Windows((3, 4, 5), (3, 1, 1), (1, 1, 1))
    assert windows((7,), 2, None) == Windows((7,), (2,), (1,))


@pytest.mark.parametrize(
    ("window", "stride", "message"),
    [
        ((3, 4), None, "one size for each dimension"),
        ((3, 4, 4), (1, 2), "one size for each dimension"),
        (21, None, "larger than a sample"),
        (0, None, "1 or more"),
        (4, 0, "1 or more"),
        (4, 5, "gaps"),
    ],
)
def test_windows_that_do_not_fit_are_refused(window: object, stride: object, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        windows((3, 20, 30), window, stride)  # type: ignore[arg-type]


def test_batches_have_one_window_replaced_in_every_sample() -> None:
    x = np.random.default_rng(0).standard_normal((2, 1, 4, 4)).astype(np.float32)
    placed = windows((1, 4, 4), 2, 2)
    batches = OccludedBatches(x, np.broadcast_to(np.float32(9), x.shape), placed, 3)
    shown = [batch.reshape(-1, *x.shape) for batch in batches]
    assert [len(batch) for batch in shown] == [3, 1]
    for occluded, place in zip(np.concatenate(shown), placed, strict=True):
        assert (occluded[:, *place] == 9).all()
        assert (occluded != x).sum() == 2 * 4
