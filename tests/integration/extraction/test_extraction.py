"""Feature maps through a real server against torch itself, bit for bit."""

from collections.abc import Iterator

import numpy as np
import pytest
import torch
from torchvision.models.feature_extraction import create_feature_extractor

import trocar
from tests.support.models.odd_models import TakesMany
from tests.support.models.tiny_models import DataDependent, Half, Plain, Structured
from tests.support.oracles.oracle import Array, hooked_outputs, noise, rebuilt_by_name, same_bits, takes_list
from tests.support.servers.running_server import RunningServer, running_server
from tests.support.servers.serving import Serve, custom, rebuilt

CASES = {
    "resnet18": (2, 3, 64, 64),
    "mobilenet_v3_small": (2, 3, 64, 64),
    "squeezenet1_0": (2, 3, 64, 64),
    "swin_t": (1, 3, 64, 64),
    "vit_b_32": (1, 3, 224, 224),
    "lraspp_mobilenet_v3_large": (1, 3, 64, 64),
    "ssdlite320_mobilenet_v3_large": (2, 3, 64, 64),
    "mc3_18": (1, 3, 4, 32, 32),
    "raft_small": (1, 3, 128, 128),
}
"""One model or two of every family, and an input that is large enough for it."""

PLAIN_IMAGES = noise(2, 3, 8, 8, seed=5)
ROWS = noise(2, 3, seed=6) - 0.5


@pytest.fixture(scope="module")
def zoo() -> Iterator[RunningServer]:
    """A server that hosts what is loaded into it."""
    with running_server(device="cpu") as running:
        yield running


@pytest.fixture(scope="module")
def zoo_client(zoo: RunningServer) -> Iterator[trocar.Client]:
    with trocar.connect(zoo.address) as connected:
        yield connected


@pytest.fixture(params=CASES)
def loaded(request: pytest.FixtureRequest, zoo_client: trocar.Client) -> Iterator[str]:
    """A torchvision model with seeded weights, unloaded afterwards."""
    zoo_client.load(request.param, "random:0")
    yield request.param
    zoo_client.unload(request.param)


@pytest.fixture
def resnet(zoo_client: trocar.Client) -> Iterator[str]:
    zoo_client.load("resnet18", "random:0")
    yield "resnet18"
    zoo_client.unload("resnet18")


def inputs_of(name: str) -> tuple[Array, ...]:
    return tuple(noise(*CASES[name], seed=seed) for seed in range(2 if name.startswith("raft") else 1))


def test_every_call_of_every_module_is_bit_equal_to_hooks_that_clone_at_once(
    zoo_client: trocar.Client, loaded: str
) -> None:
    inputs = inputs_of(loaded)
    model = rebuilt_by_name(loaded)
    paths = [path for path, _ in model.named_modules() if path]
    expected = hooked_outputs(model, inputs, paths, as_list=takes_list(loaded))
    maps = zoo_client.extract(loaded, inputs, taps="**")
    found = {(info.path, info.call_index, info.pick): maps[name] for name, info in maps.info.items()}
    assert found.keys() == expected.keys()
    assert [key for key, value in expected.items() if not same_bits(found[key], value)] == []


def test_the_models_own_output_is_bit_equal_to_a_pass_without_hooks(
    zoo_client: trocar.Client, loaded: str
) -> None:
    inputs = inputs_of(loaded)
    expected = hooked_outputs(rebuilt_by_name(loaded), inputs, [""], as_list=takes_list(loaded))
    maps = zoo_client.extract(loaded, inputs, taps="/out")
    found = {(info.path, info.call_index, info.pick): maps[name] for name, info in maps.info.items()}
    assert found.keys() == expected.keys()
    assert all(same_bits(found[key], value) for key, value in expected.items())


def test_bn1_of_resnet18_has_its_true_minimum(zoo_client: trocar.Client, resnet: str) -> None:
    """The ReLU after it is in place: kept by reference, its minimum would be 0."""
    images = np.random.default_rng(0).standard_normal((2, 3, 224, 224), dtype=np.float32)
    maps = zoo_client.extract(resnet, images, taps=["bn1", "relu", "fc"])
    model = rebuilt_by_name(resnet)
    with torch.inference_mode():
        expected = model.bn1(model.conv1(torch.from_numpy(images)))
    assert same_bits(maps["bn1"], expected)
    assert maps["bn1"].min() < -1
    assert maps["relu"].min() == 0


def test_values_agree_with_torchvisions_extractor(zoo_client: trocar.Client, resnet: str) -> None:
    images = noise(2, 3, 64, 64)
    nodes = ["layer1", "layer2.0.downsample", "layer4", "avgpool", "fc"]
    with torch.inference_mode():
        expected = create_feature_extractor(rebuilt_by_name(resnet), nodes)(torch.from_numpy(images))
    maps = zoo_client.extract(resnet, images, taps=nodes)
    assert [name for name in nodes if not same_bits(maps[name], expected[name])] == []


def test_an_early_stop_changes_no_bit(zoo_client: trocar.Client, resnet: str) -> None:
    images = noise(3, 3, 64, 64)
    stopped = zoo_client.extract(resnet, images, taps="layer2")
    whole = zoo_client.extract(resnet, images, taps=["layer2", "/out"])
    assert stopped.stopped_at == "layer2"
    assert whole.stopped_at in (None, "")
    assert np.array_equal(stopped["layer2"], whole["layer2"])


def test_the_same_call_twice_gives_the_same_bits(zoo_client: trocar.Client, resnet: str) -> None:
    images = noise(2, 3, 64, 64)
    first, second = (zoo_client.extract(resnet, images, taps="layer4")["layer4"] for _ in range(2))
    assert np.array_equal(first, second)


def test_a_glob_stands_for_all_that_it_matches_in_execution_order(client: trocar.Client) -> None:
    maps = client.extract("plain", PLAIN_IMAGES, taps=["conv*", "**:Linear"])
    assert list(maps) == ["conv", "conv2", "fc"]
    assert maps.expansions == {"conv*": ("conv", "conv2"), "**:Linear": ("fc",)}


def test_a_call_index_chooses_the_call(client: trocar.Client) -> None:
    model = rebuilt(Plain)
    with torch.inference_mode():
        first = model.relu(model.conv(torch.from_numpy(PLAIN_IMAGES))).clone()
        last = model.relu(model.conv2(first)).clone()
    maps = client.extract("plain", PLAIN_IMAGES, taps=["relu@0", "relu@-1"])
    assert same_bits(maps["relu@0"], first)
    assert same_bits(maps["relu@1"], last)
    assert same_bits(maps["relu@-1"], last)


def test_every_call_comes_under_a_name_of_its_own(client: trocar.Client) -> None:
    maps = client.extract("plain", PLAIN_IMAGES, taps="relu@*")
    assert list(maps) == ["relu@0", "relu@1"]
    assert [maps.info[name].call_index for name in maps] == [0, 1]


def test_the_input_of_a_module_is_what_it_was_given(client: trocar.Client) -> None:
    maps = client.extract("plain", PLAIN_IMAGES, taps=["conv/in", "conv", "relu@0/in", "fc/in", "pool"])
    assert np.array_equal(maps["conv/in"], PLAIN_IMAGES)
    assert np.array_equal(maps["relu@0/in"], maps["conv"])
    assert np.array_equal(maps["fc/in"], maps["pool"].reshape(2, 4))


def test_the_models_own_input_comes_back_as_it_was_sent(client: trocar.Client) -> None:
    assert np.array_equal(client.extract("plain", PLAIN_IMAGES, taps="/in")["/in"], PLAIN_IMAGES)


def test_picks_lead_into_dataclasses_tuples_and_dicts(client: trocar.Client) -> None:
    maps = client.extract("structured", ROWS, taps=["both", "split[0]", '/out["aux"]'])
    assert list(maps) == ['both["first"]', 'both["second"]', "split[0]", '/out["aux"]']
    assert np.array_equal(maps['both["first"]'], ROWS + 1)
    assert np.array_equal(maps["split[0]"], (ROWS + 1) * (ROWS * 2))
    assert np.array_equal(maps['/out["aux"]'], ROWS * 2)


def test_a_structure_without_a_pick_comes_as_all_its_tensors(client: trocar.Client) -> None:
    maps = client.extract("structured", ROWS, taps="/out")
    assert maps.expansions["/out"] == ('/out["out"]', '/out["aux"]')


def test_keyword_inputs_reach_the_model_and_can_be_tapped(client: trocar.Client) -> None:
    bias = np.array([1, 2, 3], np.float32)
    maps = client.extract(
        "structured", {"x": ROWS, "bias": bias}, taps=["/in(bias)", '/out["out"]', "split/in(scale)"]
    )
    expected = rebuilt(Structured)(torch.from_numpy(ROWS), bias=torch.from_numpy(bias))["out"]
    assert np.array_equal(maps["/in(bias)"], bias)
    assert same_bits(maps['/out["out"]'], expected)
    assert np.array_equal(maps["split/in(scale)"], ROWS * 2)


def test_positional_arguments_go_as_a_tuple(client: trocar.Client) -> None:
    other = noise(2, 3, seed=9)
    with torch.inference_mode():
        expected = rebuilt(TakesMany)(torch.from_numpy(ROWS), torch.from_numpy(other))
    assert same_bits(client.extract("many", (ROWS, other), taps="/out")["/out"], expected)


def test_an_alias_names_a_value(client: trocar.Client) -> None:
    maps = client.extract("plain", PLAIN_IMAGES, taps=[trocar.tap("relu@1", alias="features"), "fc"])
    assert list(maps) == ["features", "fc"]
    assert maps.info["features"].path == "relu"


def test_bfloat16_values_come_exactly_as_float32(client: trocar.Client) -> None:
    inputs = noise(3, 7, seed=4) * 100
    with torch.inference_mode():
        expected = rebuilt(Half)(torch.from_numpy(inputs)).to(torch.float32)
    maps = client.extract("half", inputs, taps="/out")
    assert maps.info["/out"].dtype == "bfloat16"
    assert same_bits(maps["/out"], expected)


def test_a_strided_array_is_sent_as_its_values(client: trocar.Client) -> None:
    wide = noise(2, 6)
    maps = client.extract("identity", wide[:, ::2], taps="identity")
    assert np.array_equal(maps["identity"], wide[:, ::2])


@pytest.mark.parametrize("shape", [(2, 0), (1, 0, 4)])
def test_an_input_without_elements_comes_back_as_one(client: trocar.Client, shape: tuple[int, ...]) -> None:
    maps = client.extract("identity", np.empty(shape, np.float32), taps="identity")
    assert maps["identity"].shape == shape


def test_a_scalar_comes_back_as_one(client: trocar.Client) -> None:
    maps = client.extract("identity", np.array(3.5, np.float32), taps="identity")
    assert maps["identity"].shape == ()
    assert maps["identity"] == 3.5


@pytest.mark.parametrize(
    "dtype", ["bool", "uint8", "int8", "int16", "int32", "int64", "float32", "complex64", "complex128"]
)
def test_values_of_any_dtype_go_both_ways(client: trocar.Client, dtype: str) -> None:
    values: Array = (np.arange(12) % 5).astype(dtype).reshape(3, 4)
    found = client.extract("identity", values, taps="identity")["identity"]
    assert found.dtype == values.dtype
    assert np.array_equal(found, values)


def test_nan_and_infinity_keep_their_bits(client: trocar.Client) -> None:
    values = np.array([[np.nan, np.inf, -np.inf, -0.0]], np.float32)
    values[0, 0] = np.frombuffer(b"\x01\x00\xc0\x7f", np.float32)[0]
    found = client.extract("identity", values, taps="identity")["identity"]
    assert found.tobytes() == values.tobytes()


def test_a_model_without_symbolic_pass_is_bit_equal_too(client: trocar.Client) -> None:
    with torch.inference_mode():
        expected = rebuilt(DataDependent).first(torch.from_numpy(ROWS + 5))
    maps = client.extract("data-dependent", ROWS + 5, taps=["first", "late"])
    assert same_bits(maps["first"], expected)


def test_a_server_on_two_replicas_gives_the_same_bits(serve: Serve) -> None:
    models = {"one": custom(Plain, (3, 8, 8)), "two": custom(Plain, (3, 8, 8), replicas=2)}
    running = serve(models=models)
    with trocar.connect(running.address) as connected:
        values = [connected.extract(name, PLAIN_IMAGES, taps="fc")["fc"] for name in ("one", "two", "two")]
    assert np.array_equal(values[0], values[1])
    assert np.array_equal(values[0], values[2])
