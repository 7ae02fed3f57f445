"""The words of the package."""

import pytest

from trocar_server.tensors.stats import default_channel_dim


@pytest.mark.parametrize(("rank", "dim"), [(2, 1), (3, 2), (4, 1), (5, 1)])
def test_channels_are_last_for_tokens_and_second_otherwise(rank: int, dim: int) -> None:
    assert default_channel_dim(rank) == dim
