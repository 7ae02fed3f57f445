"""What a tap makes of a value on the server equals the same on the values that come unreduced."""

from typing import Any

import numpy as np
import pytest
import torch
from torch.nn import functional as F

import trocar
from tests.support.oracles.oracle import Array, noise
from tests.support.servers.running_server import RunningServer, running_server

IMAGES = noise(3, 3, 64, 64)


@pytest.fixture(scope="module")
def resnet() -> Any:
    with running_server(models={"resnet18": {"weights": "random:7"}}, device="cpu") as running:
        yield running


@pytest.fixture(scope="module")
def client(resnet: RunningServer) -> Any:
    with trocar.connect(resnet.address) as connected:
        yield connected


@pytest.fixture(scope="module")
def tiny_client(server: RunningServer) -> Any:
    with trocar.connect(server.address) as connected:
        yield connected


@pytest.fixture(scope="module")
def plain(client: trocar.Client) -> Array:
    return client.extract("resnet18", IMAGES, "layer2")["layer2"]


def reduced(client: trocar.Client, **options: Any) -> trocar.FeatureMaps:
    """Extract `layer2` reduced, and hold the plan to it."""
    tap = trocar.tap("layer2", **options)
    maps = client.extract("resnet18", IMAGES, tap)
    plan = client.plan("resnet18", IMAGES, tap)
    told = {name: (info.shape, info.dtype, info.byte_count) for name, info in plan.feature_maps.items()}
    assert told == {name: (info.shape, info.dtype, info.byte_count) for name, info in maps.info.items()}
    assert plan.reply_bytes == sum(info.byte_count for info in maps.info.values())
    return maps


def test_selecting_equals_numpy(client: trocar.Client, plain: Array) -> None:
    assert np.array_equal(reduced(client, index=np.s_[:, 3:9:2, ..., -1])["layer2"], plain[:, 3:9:2, ..., -1])
    assert np.array_equal(reduced(client, channels=[5, -1])["layer2"], plain[:, [5, -1]])
    assert np.array_equal(reduced(client, samples=[2, 0])["layer2"], plain[[2, 0]])
    crop = reduced(client, reduce=[trocar.crop(1, 2, 3, 4)])["layer2"]
    assert np.array_equal(crop, plain[:, :, 1:4, 2:6])


def test_pooling_equals_torch(client: trocar.Client, plain: Array) -> None:
    value = torch.from_numpy(plain)
    found = reduced(client, reduce=[trocar.pool("avg", size=2)])["layer2"]
    assert np.array_equal(found, F.adaptive_avg_pool2d(value, 2).numpy())
    found = reduced(client, reduce=[trocar.pool("max")])["layer2"]
    assert np.array_equal(found, value.amax((2, 3)).numpy())


def test_top_k_brings_its_indices(client: trocar.Client) -> None:
    logits = client.extract("resnet18", IMAGES, "fc")["fc"]
    maps = client.extract("resnet18", IMAGES, trocar.tap("fc", reduce=trocar.top_k(5)))
    order = np.argsort(-logits, axis=1)[:, :5]
    assert np.array_equal(maps["fc.indices"], order)
    assert np.array_equal(maps["fc"], np.take_along_axis(logits, order, 1))
    assert maps.info["fc.indices"].companion_of == "fc"


def test_principal_components_come_with_the_request(client: trocar.Client, plain: Array) -> None:
    components, mean = noise(4, 128, seed=1), noise(128, seed=2)
    found = reduced(client, reduce=[trocar.pool("avg"), trocar.pca(components, mean)])["layer2"]
    expected = (plain.astype(np.float64).mean((2, 3)) - mean) @ components.T.astype(np.float64)
    np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-4)
    other = trocar.tap("layer2", alias="b", reduce=[trocar.pool("avg"), trocar.pca(noise(4, 128, seed=3))])
    first = trocar.tap("layer2", alias="a", reduce=[trocar.pool("avg"), trocar.pca(components, mean)])
    both = client.extract("resnet18", IMAGES, [first, other])
    assert np.array_equal(both["a"], found)
    assert not np.array_equal(both["a"], both["b"])
    (streamed,) = client.extract_stream("resnet18", [IMAGES], [first, other])
    assert all(np.array_equal(streamed.unwrap()[name], both[name]) for name in both)


def test_two_taps_that_differ_in_constants_alone_need_two_names(client: trocar.Client) -> None:
    taps = [trocar.tap("fc", reduce=trocar.pca(noise(2, 1000, seed=seed))) for seed in (1, 2)]
    with pytest.raises(trocar.errors.DuplicateNameError):
        client.extract("resnet18", IMAGES, taps)


@pytest.mark.parametrize("cast", ["float16", "bfloat16", "int8", "int8_per_channel"])
def test_a_cast_is_within_the_error_that_the_reply_names(
    client: trocar.Client, plain: Array, cast: Any
) -> None:
    maps = reduced(client, cast=cast)
    info = maps.info["layer2"].cast
    assert info is not None
    error = np.abs(maps.dequantized("layer2").astype(np.float64) - plain).max()
    assert 0 < error <= info.max_error * (1 + 1e-12)
    assert maps.info["layer2"].byte_count == plain.size * (1 if "int8" in cast else 2)


def test_statistics_are_of_what_the_reductions_leave_and_before_the_cast(
    client: trocar.Client, plain: Array
) -> None:
    options: Any = {"reduce": trocar.pool("max"), "stats": ["max", "mean"], "over": "channel"}
    maps = reduced(client, cast="float16", **options)
    pooled = plain.max((2, 3)).astype(np.float64)
    np.testing.assert_allclose(maps.stats["layer2"].mean, pooled.mean(0), rtol=1e-12)
    assert np.array_equal(maps.stats["layer2"].max, pooled.max(0))


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"channels": [128]}, "'layer2'"),
        ({"reduce": trocar.crop(0, 0, 9, 9)}, "'layer2'"),
        ({"tokens": [0]}, "'layer2'"),
        ({"index": 0, "stats": ["mean"], "over": "sample"}, "over='all'"),
        ({"reduce": trocar.pca(noise(2, 64))}, "128"),
    ],
)
def test_what_does_not_fit_is_refused_before_anything_is_computed(
    client: trocar.Client, options: dict[str, Any], words: str
) -> None:
    tap = trocar.tap("layer2", **options)
    for call in (client.extract, client.plan):
        with pytest.raises(trocar.errors.ReductionRejectedError, match=words):
            call("resnet18", IMAGES, tap)


def test_a_crop_needs_positions_beside_the_samples(client: trocar.Client) -> None:
    with pytest.raises(trocar.errors.ReductionRejectedError, match="beside the samples"):
        client.extract("resnet18", IMAGES, trocar.tap("fc", reduce=trocar.crop(0, 0, 1, 1)))


def test_scales_count_as_numbers_of_the_reply(request: pytest.FixtureRequest) -> None:
    tiny: trocar.Client = request.getfixturevalue("tiny_client")
    row = noise(1, 2_000_000)
    assert tiny.extract("identity", row, trocar.tap("identity", cast="int8"))["identity"].shape == row.shape
    with pytest.raises(
        trocar.errors.ReplyTooLargeError, match="statistics and scales would be 16,000,000 bytes"
    ):
        tiny.extract("identity", row, trocar.tap("identity", cast="int8_per_channel"))


def test_a_pool_cannot_blow_a_reply_up_past_the_limit(client: trocar.Client) -> None:
    tap = trocar.tap("layer2", reduce=trocar.pool("avg", size=(30_000, 30_000)))
    with pytest.raises(trocar.errors.ReplyTooLargeError, match="bytes"):
        client.extract("resnet18", IMAGES, tap)


def test_parameters_need_no_inputs(client: trocar.Client, resnet: RunningServer) -> None:
    maps = client.extract("resnet18", None, ["fc/param(weight)", "**:BatchNorm2d/param(running_mean)"])
    module = resnet.engine.deployment("resnet18").hosted.module
    assert np.array_equal(maps["fc/param(weight)"], module.get_parameter("fc.weight").numpy())
    assert len(maps) == 21
    with pytest.raises(trocar.errors.InvalidArgumentError, match="inputs"):
        client.extract("resnet18", None, "fc")
