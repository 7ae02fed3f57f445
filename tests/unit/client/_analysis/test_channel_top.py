"""Running top-k of channels against a sort of everything."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from trocar._analysis.top_inputs.channel_top import ChannelTop


@given(st.integers(0, 2**32 - 1), st.integers(1, 6), st.integers(1, 9), st.integers(1, 5))
@settings(deadline=None)
def test_batches_give_what_a_sort_of_everything_gives(seed: int, k: int, count: int, size: int) -> None:
    rng = np.random.default_rng(seed)
    values = rng.integers(-2, 3, (count, 3)).astype(np.float32)  # with many equal ones
    values[rng.random(values.shape) < 0.1] = np.nan
    values[rng.random(values.shape) < 0.1] = -np.inf
    positions = rng.integers(0, 49, values.shape)
    top = ChannelTop(k)
    for start in range(0, count, size):
        top.add(values[start : start + size], positions[start : start + size])
    assert top.count == count
    for channel in range(3):
        rows = [row for row in range(count) if not np.isnan(values[row, channel])]
        rows = sorted(rows, key=lambda row: (-values[row, channel], row))[:k]
        filling = [-1] * (k - len(rows))
        assert top.samples[channel].tolist() == rows + filling
        assert top.values[channel, : len(rows)].tolist() == values[rows, channel].tolist()
        assert top.positions[channel, : len(rows)].tolist() == positions[rows, channel].tolist()
        assert top.nan_count[channel] == np.isnan(values[:, channel]).sum()


def test_batches_of_other_channels_are_refused() -> None:
    top = ChannelTop(2)
    top.add(np.ones((2, 3)))
    with pytest.raises(ValueError, match="3 channels in one batch and 4 in another"):
        top.add(np.ones((2, 4)))
    with pytest.raises(ValueError, match="no numbers of channels"):
        top.add(np.ones((2, 3, 1)))
