"""The catalogue through a real server: list, get, load, unload."""

import gc
import weakref
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch
from torchvision.models import list_models, squeezenet1_1

import trocar
from tests.support.models.gated_models import WAIT_S, Gate, Gated
from tests.support.models.odd_models import KeepsState
from tests.support.models.tiny_models import Plain
from tests.support.oracles.oracle import noise, rebuilt_by_name
from tests.support.servers.running_server import RunningServer
from tests.support.servers.serving import Serve, custom
from tests.support.servers.waiting import wait_until

IMAGES = noise(2, 3, 8, 8)


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
    assert (model.family, model.architecture) == ("custom", "tests.support.models.tiny_models:Plain")
    assert model.categories == ("a", "b", "c", "d", "e")


@pytest.mark.parametrize("model_id", ["resnet81", "", "../plain", "plain\0", "PLAIN", "x" * 10_000, "größe"])
def test_an_unknown_model_is_not_found(models_client: trocar.Client, model_id: str) -> None:
    with pytest.raises(trocar.errors.UnknownModelError) as caught:
        models_client.model(model_id)
    assert len(str(caught.value)) < 500


def test_a_digest_is_told_where_it_is_wanted(models_client: trocar.Client) -> None:
    digest = models_client.model("plain", has_digest=True).digest
    assert len(bytes.fromhex(digest)) == 32
    assert models_client.model("plain", has_digest=True).digest == digest
    assert models_client.model("labelled", has_digest=True).digest == digest  # ids and class names are names
    other = models_client.model("resnet18", has_digest=True)
    assert other.digest != digest
    assert {"weights", "code", "architecture"} <= other.digest_parts.keys()
    assert models_client.model("plain").digest == ""
    assert {model.digest for model in models_client.models()} == {""}
    assert {str(model.digest_parts) for model in models_client.models()} == {"{}"}


def test_the_nearest_ids_are_named(models_client: trocar.Client) -> None:
    with pytest.raises(trocar.errors.UnknownModelError, match="nearest: plain"):
        models_client.model("plein")


# --- load and unload


def test_any_torchvision_name_can_be_loaded_and_freed(models_client: trocar.Client) -> None:
    loaded = models_client.load("squeezenet1_1", "random:5")
    assert (loaded.state, loaded.weights) == ("loaded", "random:5")
    freed = models_client.unload("squeezenet1_1")
    assert (freed.state, freed.byte_count) == ("unloaded", 0)
    assert models_client.model("squeezenet1_1").weights == "random:5"


def seeded_squeezenet() -> torch.nn.Module:
    torch.manual_seed(5)
    model: torch.nn.Module = squeezenet1_1(weights=None).eval()
    return model


def test_a_seed_is_the_one_of_torch(models_client: trocar.Client, catalogue_server: RunningServer) -> None:
    models_client.load("squeezenet1_1", "random:5")
    # Where the server's own torch runs: the generator is one for all threads.
    expected = catalogue_server.on_owner(seeded_squeezenet)
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
    deployment = catalogue_server.engine.deployment("plain")
    assert models_client.load("plain").is_loaded
    assert models_client.load("plain", "random:0").is_loaded
    assert catalogue_server.engine.deployment("plain") is deployment


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
    with pytest.raises(trocar.errors.ModelNotLoadedError, match="load it first"):
        models_client.extract("structured", noise(1, 3), taps="both")
    with pytest.raises(trocar.errors.ModelNotLoadedError):
        models_client.modules("structured")
    models_client.load("structured")


def test_the_weights_of_an_unloaded_model_are_freed(serve: Serve) -> None:
    running = serve(models={"m": custom(Plain, (3, 8, 8))})
    with trocar.connect(running.address) as client:
        client.extract("m", IMAGES, taps="**")
        module = weakref.ref(running.engine.deployment("m").hosted.module)
        client.unload("m")
        # What follows the meanings of its dimensions may not have ended yet, beside the calls.
        wait_until(lambda: gc.collect() >= 0 and module() is None)


def test_many_loads_at_once_load_once(serve: Serve) -> None:
    running = serve()
    with trocar.connect(running.address) as client, ThreadPoolExecutor(6) as threads:
        states = list(threads.map(lambda _: client.load("squeezenet1_1", "random:0").state, range(6)))
    assert states == ["loaded"] * 6
    assert len(running.engine.deployments) == 1


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
        with pytest.raises(trocar.errors.ModelNotLoadedError):
            client.extract("gated", noise(1, 3), taps="last")
        assert not unloading.done()
        gate.release()
        assert np.array_equal(call.result(WAIT_S)["last"], expected)
        assert unloading.result(WAIT_S).state == "unloaded"


def test_every_torchvision_name_is_known_to_the_catalogue(serve: Serve) -> None:
    """Asked for weights that do not exist, so that nothing is built."""
    with trocar.connect(serve().address) as client:
        for name in list_models():
            with pytest.raises(trocar.errors.UnknownWeightsError):
                client.load(name, "NOT_THERE")


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
