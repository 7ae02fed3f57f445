"""Passes that start in the middle equal full passes, bit for bit, or are refused."""

from typing import Any

import numpy as np
import pytest

import trocar
from tests.support.oracles.oracle import noise
from tests.support.servers.footprint import hook_counts
from tests.support.servers.running_server import RunningServer, running_server


@pytest.fixture(scope="module")
def models() -> Any:
    names = ("resnet18", "mobilenet_v3_small", "swin_t", "densenet121", "vit_b_16")
    with running_server(models={name: {"weights": "random:7"} for name in names}, device="cpu") as running:
        yield running


@pytest.fixture(scope="module")
def client(models: RunningServer) -> Any:
    with trocar.connect(models.address, timeout_s=300) as connected:
        yield connected


STARTS = [
    ("resnet18", 64, ["layer3", "layer4/in", "conv1", "bn1", "layer1.0", "avgpool", "fc"], "fc"),
    ("mobilenet_v3_small", 64, ["features.5", "features.4.block.2", "classifier.0"], "classifier"),
    ("swin_t", 64, ["features.3", "features.1.0"], "head"),
    ("densenet121", 64, ["features.transition1", "features.denseblock2"], "classifier"),
    ("vit_b_16", 224, ["encoder.layers.encoder_layer_5", "encoder.dropout", "encoder.ln"], "heads"),
]


@pytest.mark.parametrize(("model_id", "size", "starts", "end"), STARTS)
def test_what_follows_equals_the_full_pass(
    client: trocar.Client, model_id: str, size: int, starts: list[str], end: str
) -> None:
    image = noise(2, 3, size, size)
    full = client.extract(model_id, image, [*starts, end])
    for start in starts:
        found = client.extract(model_id, full[start], end, start_at=start, start_shape=(2, 3, size, size))
        assert np.array_equal(found[end], full[end]), start


def test_the_example_input_is_assumed_where_no_shape_is_given(client: trocar.Client) -> None:
    full = client.extract("resnet18", noise(3, 3, 224, 224), ["layer3", "fc"])
    assert np.array_equal(
        client.extract("resnet18", full["layer3"], "fc", start_at="layer3")["fc"], full["fc"]
    )


def test_the_start_itself_and_several_taps_after_it_can_be_collected(client: trocar.Client) -> None:
    taps: list[Any] = ["layer3", "layer4.0.relu@*", trocar.tap("fc", stats=["mean"], values=False)]
    full = client.extract("resnet18", noise(1, 3, 224, 224), taps)
    found = client.extract("resnet18", full["layer3"], taps, start_at="layer3")
    assert list(found) == list(full)
    assert all(np.array_equal(found[name], full[name]) for name in full)
    assert found.stats["fc"] == full.stats["fc"]


@pytest.mark.parametrize("start", ["layer1.0.conv1", "layer1.0.bn2"])
def test_a_start_that_a_skip_connection_goes_around_is_refused(client: trocar.Client, start: str) -> None:
    value = client.extract("resnet18", noise(1, 3, 64, 64), start)[start]
    with pytest.raises(trocar.errors.StartNotPossibleError, match="needs a value from before it"):
        client.extract("resnet18", value, "fc", start_at=start, start_shape=(1, 3, 64, 64))


@pytest.mark.parametrize(
    ("changes", "error", "words"),
    [
        ({"taps": "layer2"}, trocar.errors.StartNotPossibleError, "'layer2' comes before it"),
        ({"taps": "layer9"}, trocar.errors.UnknownModuleError, "nearest"),
        ({"start_at": "layer9"}, trocar.errors.UnknownModuleError, "nearest"),
        ({"start_at": "layer3.**"}, trocar.errors.InvalidArgumentError, "name one"),
        ({"start_at": "layer3.0.relu"}, trocar.errors.AmbiguousCallError, "called 2 times"),
        ({"start_shape": None}, trocar.errors.StartNotPossibleError, "start_shape="),
        ({"inputs": noise(1, 256, 5, 4)}, trocar.errors.StartNotPossibleError, r"\(1, 256, 4, 4\)"),
        ({"inputs": noise(1, 256, 4, 4).astype(np.float64)}, trocar.TrocarError, "float64"),
        ({"inputs": (noise(1, 256, 4, 4),) * 2}, trocar.errors.InvalidArgumentError, "one tensor"),
        ({"start_shape": (1, 4, 64, 64)}, trocar.errors.InputRejectedError, "cannot take"),
    ],
)
def test_what_cannot_be_is_refused_before_anything_is_computed(
    client: trocar.Client, changes: dict[str, Any], error: type[Exception], words: str
) -> None:
    call: dict[str, Any] = {
        "inputs": noise(1, 256, 4, 4),
        "taps": "fc",
        "start_at": "layer3",
        "start_shape": (1, 3, 64, 64),
    }
    with pytest.raises(error, match=words):
        client.extract("resnet18", **{**call, **changes})


def test_a_shape_without_a_start_is_refused(client: trocar.Client) -> None:
    with pytest.raises(ValueError, match="start_at, which is None"):
        client.extract("resnet18", noise(1, 3, 64, 64), "fc", start_shape=(1, 3, 64, 64))


def test_nothing_is_left_of_a_refused_start(models: RunningServer, client: trocar.Client) -> None:
    image, before = noise(1, 3, 64, 64), hook_counts(models)
    expected = client.extract("resnet18", image, "fc")["fc"]
    value = client.extract("resnet18", image, "layer1.0.conv1")["layer1.0.conv1"]
    for _ in range(3):
        with pytest.raises(trocar.errors.StartNotPossibleError):
            client.extract("resnet18", value, "fc", start_at="layer1.0.conv1", start_shape=image.shape)
    assert np.array_equal(client.extract("resnet18", image, "fc")["fc"], expected)
    assert hook_counts(models) == before


def test_streams_and_plans_start_in_the_middle_too(client: trocar.Client) -> None:
    full = client.extract("resnet18", noise(2, 3, 224, 224), ["layer3", "fc"])
    (result,) = client.extract_stream("resnet18", [full["layer3"]], "fc", start_at="layer3")
    assert np.array_equal(result.unwrap()["fc"], full["fc"])
    plan = client.plan("resnet18", (2, 256, 14, 14), "fc", start_at="layer3")
    assert plan.reply_bytes == full["fc"].nbytes


def test_a_model_that_looks_at_its_data_cannot_start_in_the_middle(
    request: pytest.FixtureRequest,
) -> None:
    server: RunningServer = request.getfixturevalue("server")
    with (
        trocar.connect(server.address) as tiny,
        pytest.raises(trocar.errors.StartNotPossibleError, match="looks at its data"),
    ):
        tiny.extract("data-dependent", noise(1, 3), "late", start_at="first")
