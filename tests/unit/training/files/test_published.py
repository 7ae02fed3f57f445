"""Published models: on disk, and hosted again without the trainer and without a download."""

import asyncio
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import nn
from torchvision.models import GoogLeNet_Weights, WeightsEnum, get_model, googlenet

from tests.unit.models.conftest import Downloads
from tests.unit.models.factories import Net
from tests.unit.training.stores import assert_same_tensors, replace_fc, tree
from trocar_api.reasons import ErrorReason
from trocar_server.config import Limits
from trocar_server.engine.engine import Engine
from trocar_server.engine.schedule.device import DeviceThread
from trocar_server.errors import ServiceError
from trocar_server.models import Catalogue, HostedModel, ModelSpec, PreprocessingSpec, load_model
from trocar_server.training.files.published import PublishedStore
from trocar_server.training.files.snapshots import snapshot_state_dict
from trocar_server.training.spec.trainer_spec import HeadSpec

CPU = torch.device("cpu")
HEAD = HeadSpec(path="fc", classes=3)
FACTORY = "tests.unit.models.factories:Net"


@pytest.fixture
def store(tmp_path: Path) -> PublishedStore:
    return PublishedStore(tmp_path / "published", lambda: 12.5)


def hosted(spec: ModelSpec) -> HostedModel:
    return load_model(spec, CPU, Path("unused"))


def tune(base: HostedModel, heads: tuple[HeadSpec, ...] = (HEAD,)) -> nn.Module:
    """Stand for a trainer: the base's module with a new head, and every value changed."""
    module = base.module
    for head in heads:
        replace_fc(module, head, 9)
    for value in module.state_dict().values():
        if value.is_floating_point():
            value.add_(0.01)
    return module


def host_again(store: PublishedStore, model_id: str) -> HostedModel:
    catalogue = Catalogue()
    for model in store.entries():
        catalogue.add(store.model_spec(model, replace_fc))
    return hosted(catalogue.get(model_id).spec)


def flag(module: nn.Module, name: str) -> object:
    return getattr(module, name)


def assert_equal(found: nn.Module, expected: nn.Module) -> None:
    assert_same_tensors(dict(found.state_dict()), dict(expected.state_dict()))


def publish(store: PublishedStore, base: HostedModel, module: nn.Module, **named: Any) -> None:
    named = {"heads": (HEAD,), **named}
    store.publish("flowers", "alice", base, snapshot_state_dict(module), **named)


def test_a_published_model_is_hosted_after_a_restart(tmp_path: Path, store: PublishedStore) -> None:
    base = hosted(ModelSpec("mine", "resnet18", "random:4", stages={"stem": "conv1"}))
    module = tune(base)
    publish(store, base, module, categories=("rose", "tulip", "daisy"))
    found = host_again(PublishedStore(tmp_path / "published"), "flowers")
    assert_equal(found.module, module)
    assert (found.weights, found.categories) == ("published", ("rose", "tulip", "daisy"))
    assert (found.input_shape, found.family) == (base.input_shape, base.family)
    assert found.spec.stages == {"stem": "conv1"}
    assert found.preprocessing is not None
    assert base.preprocessing is not None
    assert found.preprocessing.describe() == base.preprocessing.describe()
    inputs = found.example_inputs(2)
    assert torch.equal(found.module(*inputs), module.eval()(*inputs))


async def test_an_engine_hosts_it_and_its_successor(tmp_path: Path, store: PublishedStore) -> None:
    base = hosted(ModelSpec("mine", "resnet18", "random:4"))
    publish(store, base, tune(base))
    catalogue, owner = Catalogue(), DeviceThread(CPU)
    owner.start()
    engine = Engine(catalogue, owner, Limits(), tmp_path / "nothing")
    try:
        for _ in range(2):
            (model,) = store.entries()
            catalogue.add(store.model_spec(model, replace_fc))
            entry = await engine.deployments.load("flowers")
            assert entry.hosted is not None
            assert_equal(entry.hosted.module, base.module)
            await engine.deployments.unload("flowers")
            catalogue.remove("flowers")
            base.module.state_dict()["fc.weight"].add_(1)
            publish(store, base, base.module, is_replacing=True)
    finally:
        await asyncio.to_thread(owner.stop)


def test_the_record_says_whose_it_is_and_what_it_was_made_of(store: PublishedStore) -> None:
    base = hosted(ModelSpec("mine", "squeezenet1_1", "random:4"))
    publish(store, base, base.module, heads=())
    (model,) = store.entries()
    assert (model.model_id, model.principal, model.base_model_id) == ("flowers", "alice", "mine")
    assert (model.created_at_s, model.heads, model.categories) == (12.5, (), ())


def test_a_custom_model_is_built_by_its_factory(store: PublishedStore) -> None:
    shaping = PreprocessingSpec(resize=(8,), crop=(6, 6), mean=(0.1, 0.2, 0.3), std=(1.0, 2.0, 3.0))
    spec = ModelSpec(
        "net", FACTORY, arguments=(6,), options={"classes": 2}, preprocessing=shaping, input_shape=(6,)
    )
    base = hosted(spec)
    head = HeadSpec(path="head", classes=5)
    module = tune(base, (head,))
    publish(store, base, module, heads=(head,))
    found = host_again(store, "flowers")
    assert_equal(found.module, module)
    assert (found.spec.preprocessing, found.input_shape) == (shaping, (6,))


def tiny_weights(weights: WeightsEnum, downloads: Downloads) -> None:
    """Publish random numbers as torchvision's own weights."""
    with torch.random.fork_rng():
        torch.manual_seed(5)
        module = googlenet(weights=None, aux_logits=True, init_weights=False)
    downloads.publish(weights.url, module.state_dict())


def test_what_named_weights_decide_beside_numbers_is_kept_without_a_download(
    store: PublishedStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake = Downloads()
    monkeypatch.setattr(torch.hub, "download_url_to_file", fake.download)
    monkeypatch.setattr(torch.hub, "get_dir", lambda: str(tmp_path / "hub"))
    tiny_weights(GoogLeNet_Weights.DEFAULT, fake)
    base = load_model(ModelSpec("googlenet", "googlenet"), CPU, tmp_path)
    assert flag(base.module, "transform_input") is True
    asked = list(fake.asked)
    module = tune(base)
    publish(store, base, module)
    found = host_again(store, "flowers")
    assert flag(found.module, "transform_input") is True
    assert found.module.aux1 is None
    assert_equal(found.module, module)
    assert fake.asked == asked
    assert found.weights == "published"


def test_a_model_published_of_a_published_one_has_both_heads(store: PublishedStore) -> None:
    base = hosted(ModelSpec("mine", "resnet18", "random:4"))
    publish(store, base, tune(base))
    second = host_again(store, "flowers")
    replaced = HeadSpec(path="fc", classes=11)
    module = tune(second, (replaced,))
    store.publish("birds", "bob", second, snapshot_state_dict(module), heads=(replaced,))
    found = host_again(store, "birds")
    assert found.module.get_parameter("fc.bias").shape == (11,)
    assert_equal(found.module, module)
    assert [model.heads for model in store.entries()] == [(HEAD, replaced), (HEAD,)]


def test_a_catalogue_recognises_a_model_that_it_has(store: PublishedStore) -> None:
    base = hosted(ModelSpec("mine", "resnet18", "random:4"))
    publish(store, base, tune(base))
    catalogue = Catalogue()
    (model,) = store.entries()
    entry = catalogue.add(store.model_spec(model, replace_fc))
    assert catalogue.add(store.model_spec(model, replace_fc)) is entry
    assert entry.weights == "published"
    publish(store, base, base.module, is_replacing=True)
    (model,) = store.entries()
    with pytest.raises(ServiceError) as error:
        catalogue.add(store.model_spec(model, replace_fc))
    assert error.value.reason is ErrorReason.MODEL_CONFLICT


def test_building_leaves_the_generator_as_it_was(store: PublishedStore) -> None:
    base = hosted(ModelSpec("mine", "resnet18", "random:4"))
    publish(store, base, tune(base))
    before = torch.get_rng_state()
    host_again(store, "flowers")
    assert torch.equal(torch.get_rng_state(), before)


def test_an_id_is_taken_until_it_is_replaced_or_removed(tmp_path: Path, store: PublishedStore) -> None:
    base = hosted(ModelSpec("net", FACTORY, "random:1", arguments=(6,), input_shape=(6,)))
    publish(store, base, base.module, heads=())
    with pytest.raises(ServiceError) as error:
        publish(store, base, base.module, heads=())
    assert error.value.reason is ErrorReason.MODEL_CONFLICT
    tune(base, ())
    publish(store, base, base.module, heads=(), is_replacing=True)
    assert_equal(host_again(store, "flowers").module, base.module)
    assert len(tree(tmp_path / "published")) == 2
    store.remove("flowers")
    assert store.entries() == []
    assert list((tmp_path / "published").iterdir()) == []
    with pytest.raises(ServiceError) as error:
        store.remove("flowers")
    assert error.value.reason is ErrorReason.UNKNOWN_MODEL
    publish(store, base, base.module, heads=())


@pytest.mark.parametrize("model_id", ["", "..", "../x", "a/b", "Flowers", "-x", "x" * 64, "a\n", "~a", ".a"])
def test_what_is_no_id_makes_no_path(tmp_path: Path, store: PublishedStore, model_id: str) -> None:
    base = hosted(ModelSpec("net", FACTORY, "random:1", arguments=(6,), input_shape=(6,)))
    for call in (
        lambda: store.publish(model_id, "eve", base, snapshot_state_dict(base.module)),
        lambda: store.remove(model_id),
    ):
        with pytest.raises(ServiceError) as error:
            call()
        assert error.value.reason is ErrorReason.MODEL_INVALID
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    "change",
    [
        {"factory": Net},
        {"options": {"classes": (2,)}},
        {"options": {"classes": Path("x")}},
        {"options": {"classes": {1: 2}}},
    ],
)
def test_a_base_that_cannot_be_built_again_is_refused(
    tmp_path: Path, store: PublishedStore, change: Mapping[str, Any]
) -> None:
    base = hosted(ModelSpec("net", FACTORY, "random:1", arguments=(6,), input_shape=(6,)))
    other = replace(base, spec=replace(base.spec, **change))
    with pytest.raises(ServiceError, match="export the weights instead") as error:
        publish(store, other, base.module, heads=())
    assert error.value.reason is ErrorReason.MODEL_INVALID
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("damage", ["bit", "cut", "gone", "another's"])
def test_damaged_weights_are_not_hosted(tmp_path: Path, store: PublishedStore, damage: str) -> None:
    base = hosted(ModelSpec("net", FACTORY, "random:1", arguments=(6,), input_shape=(6,)))
    publish(store, base, base.module, heads=())
    (path,) = (tmp_path / "published").rglob("*.safetensors")
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    if damage == "gone":
        path.unlink()
    elif damage == "another's":
        tune(base, ())
        store.publish("birds", "eve", base, snapshot_state_dict(base.module))
        (other,) = (tmp_path / "published" / "birds").glob("*.safetensors")
        path.write_bytes(other.read_bytes())
    else:
        path.write_bytes(content if damage == "bit" else content[:-1])
    with pytest.raises(ServiceError) as error:
        host_again(store, "flowers")
    expected = ErrorReason.WEIGHTS_UNAVAILABLE if damage == "gone" else ErrorReason.WEIGHTS_CORRUPT
    assert error.value.reason is expected
    assert str(tmp_path) not in error.value.message


@pytest.mark.parametrize("damage", [b"", b"{}", b"trocar model 1 0\n{}"])
def test_a_damaged_record_hides_no_other_model(tmp_path: Path, store: PublishedStore, damage: bytes) -> None:
    base = hosted(ModelSpec("net", FACTORY, "random:1", arguments=(6,), input_shape=(6,)))
    publish(store, base, base.module, heads=())
    store.publish("birds", "alice", base, snapshot_state_dict(base.module))
    (tmp_path / "published" / "birds" / "model.json").write_bytes(damage)
    (tmp_path / "published" / "notes.txt").write_text("mine")
    assert [model.model_id for model in store.entries()] == ["flowers"]


def test_a_record_in_another_models_folder_does_not_count(tmp_path: Path, store: PublishedStore) -> None:
    base = hosted(ModelSpec("net", FACTORY, "random:1", arguments=(6,), input_shape=(6,)))
    publish(store, base, base.module, heads=())
    (tmp_path / "published" / "flowers").rename(tmp_path / "published" / "birds")
    assert store.entries() == []


@pytest.mark.parametrize(
    "architecture", ["squeezenet1_1", "mobilenet_v3_small", "densenet121", "efficientnet_b0"]
)
def test_other_families_come_back(store: PublishedStore, architecture: str) -> None:
    base = hosted(ModelSpec("mine", architecture, "random:4"))
    module = tune(base, ())
    publish(store, base, module, heads=())
    assert_equal(host_again(store, "flowers").module, module)


def test_the_file_opens_in_plain_torchvision(tmp_path: Path, store: PublishedStore) -> None:
    base = hosted(ModelSpec("mine", "resnet18", "random:4"))
    module = tune(base)
    publish(store, base, module)
    (path,) = (tmp_path / "published").rglob("*.safetensors")
    theirs = get_model("resnet18", num_classes=3)
    theirs.load_state_dict(load_file(path))
    assert_equal(theirs, module)
