"""Models of torchvision train with a spool as without; `tests/sweeps/spool_models.py` tries all of them."""

from pathlib import Path

import pytest

from tests.support.spool.spool_models import outcome


@pytest.mark.parametrize(
    "name",
    ["resnet18", "mobilenet_v3_small", "shufflenet_v2_x0_5", "lraspp_mobilenet_v3_large", "raft_small"],
)
def test_gradients_are_the_same_bits(tmp_path: Path, name: str) -> None:
    found = outcome(name, tmp_path)
    assert (found.error, found.skipped) == (None, None)
