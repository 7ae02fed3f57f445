"""Nodes of the traced graph and functions of torch, from a selector to the reply."""

from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torchvision.models import resnet18, vit_b_16
from torchvision.models.feature_extraction import create_feature_extractor, get_graph_node_names

import trocar
from tests.support.oracles.oracle import Array, noise
from tests.support.servers.footprint import hook_counts
from tests.support.servers.running_server import RunningServer, running_server

IMAGES = noise(2, 3, 64, 64)
SDPA = "fn:scaled_dot_product_attention"


@pytest.fixture(scope="module")
def models() -> Any:
    names = ("resnet18", "vit_b_16", "ssdlite320_mobilenet_v3_large")
    with running_server(models={name: {"weights": "random:7"} for name in names}, device="cpu") as running:
        yield running


@pytest.fixture(scope="module")
def client(models: RunningServer) -> Any:
    with trocar.connect(models.address, timeout_s=300) as connected:
        yield connected


def rebuilt(builder: Any) -> nn.Module:
    torch.manual_seed(7)
    module: nn.Module = builder(weights=None).eval()
    return module


def test_every_node_equals_torchvisions_extractor(client: trocar.Client) -> None:
    module = rebuilt(resnet18)
    for child in module.modules():  # the extractor returns what in-place modules leave of a value
        if hasattr(child, "inplace"):
            setattr(child, "inplace", False)  # noqa: B010 - of whatever class it is
    names = get_graph_node_names(module)[1]
    with torch.inference_mode():
        expected = create_feature_extractor(module, names)(torch.from_numpy(IMAGES))
    maps = client.extract("resnet18", IMAGES, "fx:**")
    assert list(maps) == [f"fx:{name}" for name in names]
    for name in names:
        assert np.array_equal(maps[f"fx:{name}"], expected[name].numpy()), name


def test_nodes_modules_and_functions_come_in_one_reply(client: trocar.Client) -> None:
    taps = ["layer4", "fx:layer4.1.relu_1", "fn:linear", "fc", "fx:layer1.0.add"]
    maps = client.extract("resnet18", IMAGES, taps)
    assert np.array_equal(maps["layer4"], maps["fx:layer4.1.relu_1"])
    assert np.array_equal(maps["fn:linear"], maps["fc"])
    assert [maps.info[name].type for name in maps] == ["Sequential", "node", "function", "Linear", "node"]
    plan = client.plan("resnet18", IMAGES, taps)
    assert plan.feature_maps == maps.info
    assert maps.stopped_at is not None


def test_a_run_of_the_graph_stops_after_the_last_node(client: trocar.Client) -> None:
    maps = client.extract("resnet18", IMAGES, "fx:layer2.0.add")
    assert maps.stopped_at == "layer2.0.add"
    assert client.plan("resnet18", IMAGES, "fx:layer2.0.add").stopped_at == "layer2.0.add"


def test_attention_scores_are_those_of_torch(client: trocar.Client) -> None:
    images = noise(1, 3, 224, 224)
    path = "encoder.layers.encoder_layer_4.self_attention"
    maps = client.extract("vit_b_16", images, [f"{SDPA}@4/scores", f"{SDPA}@4", f"{SDPA}@4/in[2]"])
    scores = maps[f"{SDPA}@4/scores"]
    (given,) = client.extract("vit_b_16", images, f"{path}/in[0]").values()
    attention = rebuilt(vit_b_16).get_submodule(path)
    query = torch.from_numpy(given)
    with torch.inference_mode():
        _, weights = attention(query, query, query, need_weights=True, average_attn_weights=False)
    np.testing.assert_allclose(scores, weights.numpy(), atol=1e-6)
    value: Array = maps[f"{SDPA}@4/in[2]"]
    np.testing.assert_allclose(scores @ value, maps[f"{SDPA}@4"], atol=1e-5)


@pytest.mark.parametrize("tap", ["fx:flatten", "fn:linear"])
def test_images_reach_them_as_arrays_do(client: trocar.Client, tap: str) -> None:
    pixels = np.random.default_rng(0).integers(0, 256, (2, 240, 250, 3), dtype=np.uint8)
    maps = client.extract("resnet18", pixels, [tap, "fc", "fc/in"])
    assert np.array_equal(maps[tap], maps["fc/in" if tap.startswith("fx") else "fc"])
    (result,) = client.extract_stream("resnet18", [pixels], tap)
    assert np.array_equal(result.unwrap()[tap], maps[tap])


def test_reductions_and_statistics_are_taken_of_them_too(client: trocar.Client) -> None:
    taps = [
        trocar.tap("fx:layer1.0.add", reduce=trocar.pool("avg"), alias="sum"),
        trocar.tap("fn:max_pool2d", stats=["mean"], values=False),
    ]
    maps = client.extract("resnet18", IMAGES, taps)
    plain = client.extract("resnet18", IMAGES, ["fx:layer1.0.add", "maxpool"])
    expected = torch.from_numpy(plain["fx:layer1.0.add"]).mean((2, 3)).numpy()
    np.testing.assert_allclose(maps["sum"], expected, rtol=1e-6, atol=1e-6)
    mean = plain["maxpool"].astype(np.float64).mean()
    np.testing.assert_allclose(maps.stats["fn:max_pool2d"].mean, mean, rtol=1e-12)


@pytest.mark.parametrize(
    ("model_id", "tap", "error", "words"),
    [
        ("resnet18", "fx:layer1.0.addd", trocar.errors.UnknownNodeError, "nearest: layer1.0.add"),
        ("resnet18", "fn:softmax", trocar.errors.UnknownFunctionError, "conv2d"),
        ("resnet18", "fn:conv2d", trocar.errors.AmbiguousCallError, "called 20 times"),
        ("resnet18", "fn:conv2d@20", trocar.errors.CallOutOfRangeError, "20 times"),
        ("ssdlite320_mobilenet_v3_large", "fx:**", trocar.errors.NotTraceableError, "select modules"),
    ],
)
def test_what_is_not_there_is_told(
    client: trocar.Client, model_id: str, tap: str, error: type[Exception], words: str
) -> None:
    with pytest.raises(error, match=words):
        client.extract(model_id, noise(1, 3, 64, 64), tap)


def test_nothing_is_left_on_the_replicas(models: RunningServer, client: trocar.Client) -> None:
    before = hook_counts(models)
    for taps in (["fx:**", "fn:relu@*"], ["fn:linear", "layer1"]):
        client.extract("resnet18", IMAGES, taps)
    with pytest.raises(trocar.errors.InputRejectedError):
        client.extract("resnet18", noise(1, 4, 64, 64), ["fx:conv1", "fn:linear"])
    assert hook_counts(models) == before
    stack_size: int = models.on_owner(torch._C._len_torch_function_stack)
    assert stack_size == 0
