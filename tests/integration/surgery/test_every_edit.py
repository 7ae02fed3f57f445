"""A random part of `tests.sweeps.edits`: every operation at every value, equal to the same change by hand."""

import pytest

import trocar
from tests.support.servers.footprint import hook_counts
from tests.support.servers.running_server import running_server
from tests.support.wire.every_edit import OPERATIONS
from tests.sweeps.edits import hosted, tried

COUNTS = {"resnet18": 60, "vit_b_16": 12, "swin_t": 12, "mobilenet_v3_small": 36}


@pytest.mark.parametrize("name", COUNTS)
def test_an_edit_is_the_change_by_hand_or_refused_for_its_reason(name: str) -> None:
    with (
        running_server(models={name: hosted(name)}, device="cpu") as server,
        trocar.connect(server.address, timeout_s=120) as client,
    ):
        hooks = hook_counts(server)
        outcomes, wrong = tried(server, client, name, COUNTS[name], seed=1)
        assert hook_counts(server) == hooks
    assert not wrong, wrong
    assert outcomes["equal"] > COUNTS[name] / 2, outcomes
    assert len(OPERATIONS) == 21
