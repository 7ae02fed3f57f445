"""A dry run tells what then arrives, and computes nothing."""

import os
from typing import Any

import numpy as np
import pytest

import trocar
from tests.support.oracles.oracle import noise
from tests.support.servers.running_server import RunningServer
from tests.support.servers.serving import Serve

TAPS: list[list[str | trocar.Tap]] = [
    ["**"],
    ["layer4", "layer*.0.relu@*", "fc/in"],
    [trocar.tap("layer1", stats=["mean"], values=False), "/out"],
    ["/in"],
]


@pytest.mark.parametrize("taps", TAPS)
def test_names_shapes_bytes_and_the_stop_are_those_of_the_reply(serve: Serve, taps: list[Any]) -> None:
    server = serve(models={"resnet18": {"weights": "random:0"}})
    images = noise(2, 3, 64, 64)
    with trocar.connect(server.address) as client:
        plan = client.plan("resnet18", (2, 3, 64, 64), taps)
        maps = client.extract("resnet18", images, taps)
    assert list(plan.feature_maps) == list(maps.info)
    assert plan.feature_maps == maps.info
    assert plan.expansions == maps.expansions
    assert plan.stopped_at == maps.stopped_at
    assert plan.reply_bytes == sum(values.nbytes for values in maps.values())
    assert plan.request_bytes == images.nbytes
    assert plan.is_symbolic


def test_arrays_images_and_nothing_say_the_form_too(client: trocar.Client, serve: Serve) -> None:
    assert client.plan("plain", noise(3, 3, 8, 8), "fc").feature_maps["fc"].shape == (3, 5)
    assert client.plan("plain", None, "fc").feature_maps["fc"].shape == (1, 5)
    server = serve(models={"resnet18": {"weights": "random:0"}})
    with trocar.connect(server.address) as other:
        plan = other.plan("resnet18", np.zeros((4, 30, 20, 3), np.uint8), "layer4")
    assert plan.feature_maps["layer4"].shape == (4, 512, 7, 7)


def test_nothing_runs_on_data(server: RunningServer, client: trocar.Client) -> None:
    deployment = server.engine.deployment("plain")
    before = len(deployment.recordings)
    plan = client.plan("plain", (5, 3, 9, 9), "fc")
    assert plan.feature_maps["fc"].shape == (5, 5)
    assert len(deployment.recordings) == before + 1
    assert deployment.meta is not None


def test_what_a_call_would_refuse_a_plan_refuses(client: trocar.Client) -> None:
    with pytest.raises(trocar.errors.UnknownModuleError, match="nearest"):
        client.plan("plain", (1, 3, 8, 8), "conv9")
    with pytest.raises(trocar.errors.InputRejectedError):
        client.plan("plain", (1, 4, 8, 8), "fc")
    with pytest.raises(trocar.errors.ReplyTooLargeError, match="bytes"):
        client.plan("plain", (1024, 3, 256, 256), "**")


def test_a_plan_prints_as_a_table(client: trocar.Client) -> None:
    text = str(client.plan("plain", (2, 3, 8, 8), ["conv", "fc"]))
    assert text.splitlines()[1].split() == ["conv", "(2,", "4,", "8,", "8)", "float32", "2,048"]
    assert "stops after fc" in text


async def test_the_asyncio_client_plans_too(server: RunningServer) -> None:
    async with trocar.aio.connect(server.address) as aio:
        plan = await aio.plan("plain", (2, 3, 8, 8), "fc")
    assert plan.reply_bytes == 40


def test_the_memory_of_a_pass_is_told_and_bounded(serve: Serve) -> None:
    server = serve(models={"resnet18": {"weights": "random:0"}}, limits={"max_pass_bytes": 40 << 20})
    with trocar.connect(server.address) as client:
        assert client.server_info().limits.max_pass_bytes == 40 << 20
        early, late, all_of_it = (
            client.plan("resnet18", (2, 3, 64, 64), taps).memory_bytes for taps in ("conv1", "fc", "**")
        )
        # The input, its output as it is kept and as it lives in the pass; convolutions have a workspace, too.
        assert early >= 2 * 3 * 64 * 64 * 4 + 2 * (2 * 64 * 32 * 32 * 4)
        assert early < late < all_of_it
        for call in (client.plan, client.extract):
            with pytest.raises(
                trocar.errors.PassTooLargeError, match=r"would need about .* Nothing was computed"
            ):
                call("resnet18", noise(32, 3, 224, 224), "fc")
        (result,) = client.extract_stream("resnet18", [noise(32, 3, 224, 224)], "fc")
        assert isinstance(result.error, trocar.errors.PassTooLargeError)
        client.extract("resnet18", None, "fc/param(weight)")


def test_without_a_setting_the_limit_is_a_share_of_the_machine(client: trocar.Client) -> None:
    limit = client.server_info().limits.max_pass_bytes
    assert limit == int(os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") * 0.75)
