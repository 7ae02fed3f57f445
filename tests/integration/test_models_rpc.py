"""The catalogue through a real server: list, get, load, unload, modules, and every way they fail."""

import gc
import weakref
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file
from torchvision.models import ResNet18_Weights, list_models

import trocar
from tests.support.gated_models import WAIT_S, Gate, Gated
from tests.support.odd_models import KeepsState
from tests.support.oracle import noise, rebuilt_by_name
from tests.support.running_server import RunningServer, running_server
from tests.support.serving import Serve, custom, rebuilt
from tests.support.tiny_models import DataDependent, Plain, Structured
from tests.support.wire import raw_channel
from trocar_api.v1 import model_pb2

IMAGES = noise(2, 3, 8, 8)


def broken_factory() -> None:
    """Return no module."""


def failing_factory() -> None:
    """Fail as an operator's code may."""
    raise FileNotFoundError("/home/operator/secret.txt")


@pytest.fixture(scope="module")
def catalogue_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    models: dict[str, Any] = {
        "plain": custom(Plain, (3, 8, 8)),
        "structured": custom(Structured),
        "dependent": custom(DataDependent),
        "labelled": custom(Plain, (3, 8, 8), categories=("a", "b", "c", "d", "e")),
        "resnet18": {"weights": "random:0"},
    }
    data_dir = tmp_path_factory.mktemp("data")
    with running_server(models=models, device="cpu", data_dir=data_dir) as running:
        yield running


@pytest.fixture(scope="module")
def models_client(catalogue_server: RunningServer) -> Iterator[trocar.Client]:
    with trocar.connect(catalogue_server.address) as connected:
        yield connected


# --- list and get


def test_models_are_listed_by_id_without_categories(models_client: trocar.Client) -> None:
    listed = models_client.models()
    ids = [model.model_id for model in listed]
    assert ids == sorted(ids)
    assert {"plain", "resnet18"} <= set(ids)
    assert all(model.categories == () for model in listed)


def test_a_model_is_described_in_full(models_client: trocar.Client) -> None:
    model = models_client.model("resnet18")
    module = rebuilt_by_name("resnet18")
    tensors = [*module.parameters(), *module.buffers()]
    assert (model.state, model.family, model.architecture, model.weights) == (
        "loaded",
        "classification",
        "resnet18",
        "random:0",
    )
    assert model.parameter_count == sum(parameter.numel() for parameter in module.parameters())
    assert model.byte_count == sum(tensor.nbytes for tensor in tensors)
    assert (model.device, model.dtype, model.input_shape) == ("cpu", "float32", (3, 224, 224))
    assert model.preprocessing is not None


def test_a_custom_model_names_its_factory_and_categories(models_client: trocar.Client) -> None:
    model = models_client.model("labelled")
    assert (model.family, model.architecture) == ("custom", "tests.support.tiny_models:Plain")
    assert model.categories == ("a", "b", "c", "d", "e")


@pytest.mark.parametrize("model_id", ["resnet81", "", "../plain", "plain\0", "PLAIN", "x" * 10_000, "größe"])
def test_an_unknown_model_is_not_found(models_client: trocar.Client, model_id: str) -> None:
    with pytest.raises(trocar.UnknownModelError) as caught:
        models_client.model(model_id)
    assert len(str(caught.value)) < 500


def test_the_nearest_ids_are_named(models_client: trocar.Client) -> None:
    with pytest.raises(trocar.UnknownModelError, match="nearest: plain"):
        models_client.model("plein")


# --- load and unload


def test_any_torchvision_name_can_be_loaded_and_freed(models_client: trocar.Client) -> None:
    loaded = models_client.load("squeezenet1_1", "random:5")
    assert (loaded.state, loaded.weights) == ("loaded", "random:5")
    freed = models_client.unload("squeezenet1_1")
    assert (freed.state, freed.byte_count) == ("unloaded", 0)
    assert models_client.model("squeezenet1_1").weights == "random:5"


def test_a_seed_is_the_one_of_torch(models_client: trocar.Client) -> None:
    from torchvision.models import squeezenet1_1

    models_client.load("squeezenet1_1", "random:5")
    torch.manual_seed(5)
    expected = squeezenet1_1(weights=None).eval()
    images = noise(1, 3, 64, 64)
    with torch.inference_mode():
        assert np.array_equal(
            models_client.extract("squeezenet1_1", images, taps="/out")["/out"],
            expected(torch.from_numpy(images)).numpy(),
        )
    models_client.unload("squeezenet1_1")


def test_loading_a_loaded_model_changes_nothing(
    models_client: trocar.Client, catalogue_server: RunningServer
) -> None:
    host = catalogue_server.engine._hosts["plain"]
    assert models_client.load("plain").is_loaded
    assert models_client.load("plain", "random:0").is_loaded
    assert catalogue_server.engine._hosts["plain"] is host


def test_unloading_an_unloaded_model_changes_nothing(models_client: trocar.Client) -> None:
    models_client.unload("dependent")
    assert models_client.unload("dependent").state == "unloaded"
    models_client.load("dependent")


def test_a_model_that_comes_back_computes_the_same(models_client: trocar.Client) -> None:
    before = models_client.extract("plain", IMAGES, taps="fc")["fc"]
    models_client.unload("plain")
    models_client.load("plain")
    assert np.array_equal(models_client.extract("plain", IMAGES, taps="fc")["fc"], before)


def test_an_unloaded_model_cannot_be_used(models_client: trocar.Client) -> None:
    models_client.unload("structured")
    with pytest.raises(trocar.ModelNotLoadedError, match="load it first"):
        models_client.extract("structured", noise(1, 3), taps="both")
    with pytest.raises(trocar.ModelNotLoadedError):
        models_client.modules("structured")
    models_client.load("structured")


def test_the_weights_of_an_unloaded_model_are_freed(serve: Serve) -> None:
    running = serve(models={"m": custom(Plain, (3, 8, 8))})
    with trocar.connect(running.address) as client:
        client.extract("m", IMAGES, taps="**")
        module = weakref.ref(running.engine._hosts["m"].hosted.module)
        client.unload("m")
        running.on_owner(lambda: None)
        gc.collect()
    assert module() is None


def test_many_loads_at_once_load_once(serve: Serve) -> None:
    running = serve()
    with trocar.connect(running.address) as client, ThreadPoolExecutor(6) as threads:
        states = list(threads.map(lambda _: client.load("squeezenet1_1", "random:0").state, range(6)))
    assert states == ["loaded"] * 6
    assert len(running.engine._hosts) == 1


def test_a_model_in_use_is_unloaded_when_its_calls_have_ended(serve: Serve, gate: Gate) -> None:
    running = serve(models={"gated": custom(Gated)})
    with trocar.connect(running.address) as client, ThreadPoolExecutor(2) as threads:
        expected = client.extract("gated", noise(1, 3), taps="last")["last"]
        gate.hold()
        call = threads.submit(client.extract, "gated", noise(1, 3), "last")
        assert gate.entered.wait(WAIT_S)
        unloading = threads.submit(client.unload, "gated")
        while client.model("gated").is_loaded:
            assert not unloading.done()
        with pytest.raises(trocar.ModelNotLoadedError):
            client.extract("gated", noise(1, 3), taps="last")
        assert not unloading.done()
        gate.release()
        assert np.array_equal(call.result(WAIT_S)["last"], expected)
        assert unloading.result(WAIT_S).state == "unloaded"


@pytest.mark.parametrize("name", ["nonsense", "", "../../etc/passwd", "os:system", "resnet18;", "x" * 5000])
def test_a_name_that_nobody_knows_cannot_be_loaded(models_client: trocar.Client, name: str) -> None:
    with pytest.raises(trocar.NotFoundError) as caught:
        models_client.load(name)
    assert len(str(caught.value)) < 500


def test_loading_an_unknown_name_raises_what_the_client_documents(models_client: trocar.Client) -> None:
    """`Client.load` promises `UnknownModelError` where neither catalogue nor torchvision has the name."""
    with pytest.raises(trocar.UnknownModelError):
        models_client.load("nonsense")


@pytest.mark.parametrize(
    "weights",
    [
        "IMAGENET1K_V9",
        "/etc/passwd",
        "model.safetensors",
        "../m.safetensors",
        "random:x",
        "random:-1",
        "default",
        " ",
    ],
)
def test_weights_that_do_not_exist_are_refused_with_those_that_do(
    models_client: trocar.Client, weights: str
) -> None:
    with pytest.raises(trocar.UnknownWeightsError) as caught:
        models_client.load("resnet34", weights)
    assert "random" in str(caught.value)
    assert "/etc" not in str(caught.value).partition("available")[2]


def test_a_model_that_could_not_be_loaded_is_not_in_the_catalogue(models_client: trocar.Client) -> None:
    with pytest.raises(trocar.UnknownWeightsError):
        models_client.load("resnet34", "nope")
    with pytest.raises(trocar.UnknownModelError):
        models_client.model("resnet34")


def test_other_weights_for_a_model_of_the_catalogue_are_a_conflict(models_client: trocar.Client) -> None:
    with pytest.raises(trocar.ModelConflictError, match="random:0"):
        models_client.load("resnet18", "random:1")


def test_a_download_that_is_impossible_says_how_to_give_a_file(
    serve: Serve, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from urllib.error import URLError

    def unreachable(*_: object, **__: object) -> None:
        raise URLError("no network")

    monkeypatch.setattr(torch.hub, "download_url_to_file", unreachable)
    monkeypatch.setattr(torch.hub, "get_dir", lambda: str(tmp_path / "hub"))
    running = serve(data_dir=tmp_path)
    with trocar.connect(running.address) as client:
        with pytest.raises(trocar.WeightsUnavailableError, match="trocar convert") as caught:
            client.load("resnet18")
        assert str(tmp_path) not in str(caught.value)
        failed = client.model("resnet18")
    assert failed.state == "failed"
    assert "no network" in failed.error_message
    assert ResNet18_Weights.DEFAULT.url in failed.error_message


def test_a_failed_load_can_be_tried_again(serve: Serve, tmp_path: Path) -> None:
    path = tmp_path / "plain.safetensors"
    with (
        pytest.raises(trocar.WeightsUnavailableError),
        trocar.connect((running := serve(models={})).address) as client,
    ):
        _add(running, "m", str(path))
        try:
            client.load("m")
        finally:
            save_file(rebuilt(Plain).state_dict(), path)
            assert client.load("m").is_loaded


def _add(running: RunningServer, model_id: str, weights: str) -> None:
    from trocar_server.app import model_spec
    from trocar_server.config import ModelConfig

    spec = model_spec(model_id, ModelConfig(**custom(Plain, (3, 8, 8), weights=weights)))

    async def add() -> None:
        running.engine.catalogue.add(spec)

    running.run(add)


def test_keys_that_do_not_fit_are_all_listed(serve: Serve, tmp_path: Path) -> None:
    state = rebuilt(Plain).state_dict()
    state["conv.weight"] = torch.zeros(1)
    state["extra"] = torch.zeros(1)
    del state["fc.bias"]
    path = tmp_path / "plain.safetensors"
    save_file(state, path)
    running = serve()
    _add(running, "m", str(path))
    with trocar.connect(running.address) as client, pytest.raises(trocar.WeightsMismatchError) as caught:
        client.load("m")
    assert all(key in str(caught.value) for key in ("conv.weight", "extra", "fc.bias"))
    assert str(tmp_path) not in str(caught.value)


def test_a_damaged_file_is_refused(serve: Serve, tmp_path: Path) -> None:
    path = tmp_path / "plain.safetensors"
    path.write_bytes(b"\x08\0\0\0\0\0\0\0{}garbage")
    running = serve()
    _add(running, "m", str(path))
    with trocar.connect(running.address) as client, pytest.raises(trocar.WeightsCorruptError):
        client.load("m")


class Lazy(torch.nn.Module):
    """Has parameters without a shape."""

    def __init__(self) -> None:
        super().__init__()
        self.fc = torch.nn.LazyLinear(3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.fc(x)


@pytest.mark.filterwarnings("ignore:Lazy modules are a new feature")
@pytest.mark.parametrize(
    "factory",
    [
        "tests.integration.test_models_rpc:broken_factory",
        "tests.integration.test_models_rpc:failing_factory",
        "tests.integration.test_models_rpc:nothing_there",
        "no.such.module:factory",
        "tests.integration.test_models_rpc:Lazy",
        "threading:Lock",
    ],
)
def test_a_factory_that_does_not_work_is_the_operators_to_mend(serve: Serve, factory: str) -> None:
    with pytest.raises(Exception, match="model 'm'") as caught:
        serve(models={"m": {"factory": factory, "weights": "random:0", "input_shape": (3,)}})
    assert getattr(caught.value, "reason", None) == "MODEL_INVALID"
    assert "/home/operator" not in str(caught.value)


# --- modules


def test_modules_come_in_execution_order_with_what_they_return(models_client: trocar.Client) -> None:
    tree = models_client.modules("plain")
    assert [module.path for module in tree] == ["", "conv", "relu", "conv2", "pool", "fc", "unused"]
    assert tree["conv"].output_shape == (1, 4, 8, 8)
    assert (tree["relu"].call_count, tree["unused"].call_count) == (2, 0)
    assert tree["conv"].parameter_count == 4 * 3 * 9 + 4
    assert tree[""].parameter_count == sum(p.numel() for p in Plain().parameters())
    assert "kernel_size=(3, 3)" in tree["conv"].description
    assert tree.is_symbolic


def test_shapes_are_those_of_the_inputs_assumed(models_client: trocar.Client) -> None:
    tree = models_client.modules("plain", (5, 3, 16, 12))
    assert tree["conv"].output_shape == (5, 4, 16, 12)
    assert tree["conv"].outputs[0].byte_count == 5 * 4 * 16 * 12 * 4


def test_structures_are_listed_leaf_by_leaf(models_client: trocar.Client) -> None:
    tree = models_client.modules("structured")
    assert [(leaf.pick, leaf.type) for leaf in tree["split"].outputs] == [
        ("[0]", "Tensor"),
        ("[1]", "NoneType"),
        ("[2]", "int"),
    ]
    assert [leaf.pick for leaf in tree["both"].outputs] == ['["first"]', '["second"]']


def test_a_tree_that_depends_on_data_says_so(models_client: trocar.Client) -> None:
    assert not models_client.modules("dependent").is_symbolic


def test_the_tree_of_a_large_model_arrives(models_client: trocar.Client) -> None:
    tree = models_client.modules("resnet18")
    assert {module.path for module in tree} == {
        path for path, _ in rebuilt_by_name("resnet18").named_modules()
    }
    assert tree["layer4"].output_shape == (1, 512, 7, 7)


@pytest.mark.parametrize("shape", [(1, 4, 8, 8), (3,), (1,) * 8, ()])
def test_inputs_that_the_model_cannot_take_are_rejected(
    models_client: trocar.Client, shape: tuple[int, ...]
) -> None:
    with pytest.raises(trocar.InputRejectedError):
        models_client.modules("plain", shape)


def test_modules_of_an_optical_flow_model_can_be_listed_for_another_size(
    models_client: trocar.Client,
) -> None:
    """It takes two frames; the client names one shape."""
    models_client.load("raft_small", "random:0")
    try:
        assert models_client.modules("raft_small")[""].call_count == 1
        assert models_client.modules("raft_small", (1, 3, 136, 128))[""].call_count == 1
    finally:
        models_client.unload("raft_small")


# --- the wire


@settings(max_examples=200, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    method=st.sampled_from(["GetModel", "LoadModel", "UnloadModel", "ListModules"]),
    data=st.binary(max_size=30)
    | st.builds(lambda name: b"\x0a" + bytes([len(name)]) + name, st.binary(max_size=20)),
)
def test_bytes_that_are_no_request_are_answered_with_a_reason(
    catalogue_server: RunningServer, method: str, data: bytes
) -> None:
    with raw_channel(catalogue_server.address) as channel:
        call = channel.unary_unary(f"/trocar_api.v1.ModelService/{method}", None, None)
        try:
            call(data, timeout=60)
        except grpc.RpcError as error:
            assert error.code() not in (grpc.StatusCode.UNKNOWN, grpc.StatusCode.INTERNAL)


def test_a_load_asks_for_what_it_names_and_no_more(catalogue_server: RunningServer) -> None:
    request = model_pb2.LoadModelRequest(model_id="plain").SerializeToString() + b"\xfa\x01\x03abc"
    with raw_channel(catalogue_server.address) as channel:
        reply = channel.unary_unary("/trocar_api.v1.ModelService/LoadModel", None, None)(request, timeout=60)
    assert model_pb2.LoadModelResponse.FromString(reply).model.model_id == "plain"


def test_every_torchvision_name_is_known_to_the_catalogue(models_client: trocar.Client) -> None:
    """Asked for weights that do not exist, so that nothing is built."""
    for name in list_models():
        if name in ("resnet18",):
            continue
        with pytest.raises(trocar.UnknownWeightsError):
            models_client.load(name, "NOT_THERE")


def test_a_model_that_keeps_state_is_loaded_fresh(serve: Serve) -> None:
    running = serve(models={"m": custom(KeepsState, (4,))})
    with trocar.connect(running.address) as client:
        one = np.ones((1, 4), np.float32)
        client.extract("m", one, taps="/out")
        client.unload("m")
        client.load("m")
        first = client.extract("m", one, taps="/out")["/out"]
        fresh = serve(models={"m": custom(KeepsState, (4,))})
        with trocar.connect(fresh.address) as other:
            assert np.array_equal(first, other.extract("m", one, taps="/out")["/out"])
