import os
from collections import OrderedDict
from functools import cache
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from torch import Tensor, nn
from torchvision.models import GoogLeNet_Weights, ResNet18_Weights, get_model, get_model_weights

from tests.unit.models.conftest import CPU, Downloads, assert_same_state, load, reason_of
from trocar_api.reasons import ErrorReason
from trocar_server.errors import ServiceError
from trocar_server.models.loading import load_model
from trocar_server.models.spec import ModelSpec, parse_model_argument
from trocar_server.models.weights.convert import convert_checkpoint
from trocar_server.models.weights.downloads import clean_downloads, prefetch_weights

RESNET18 = "resnet18-f37072fd"


@cache
def random_state(name: str) -> OrderedDict[str, Tensor]:
    """Return a state dict as torchvision would publish it, auxiliary heads included."""
    options: dict[str, dict[str, Any]] = {
        "googlenet": {"init_weights": False},
        "lraspp_mobilenet_v3_large": {"weights_backbone": None},
    }
    state = get_model(name, weights=None, **options.get(name, {})).state_dict()
    return cast(OrderedDict[str, Tensor], state)  # itself, for its `_metadata`


def run(module: nn.Module, side: int) -> Tensor:
    with torch.inference_mode():
        output: Tensor = module(torch.rand(1, 3, side, side, generator=torch.Generator().manual_seed(0)))
    return output


@pytest.fixture
def resnet18(downloads: Downloads) -> Downloads:
    downloads.publish(ResNet18_Weights.DEFAULT.url, random_state("resnet18"))
    return downloads


@pytest.mark.parametrize("name", ["resnet18", "squeezenet1_1", "mnasnet0_5", "lraspp_mobilenet_v3_large"])
def test_default_weights_make_torchvisions_own_model(name: str, downloads: Downloads, data_dir: Path) -> None:
    downloads.publish(get_model_weights(name)["DEFAULT"].url, random_state(name))
    hosted = load(name, data_dir)
    assert_same_state(hosted.module, get_model(name, weights="DEFAULT").eval())
    assert hosted.weights == get_model_weights(name)["DEFAULT"].name
    assert hosted.categories == tuple(get_model_weights(name)["DEFAULT"].meta["categories"])


def test_googlenet_transforms_its_input_and_drops_its_auxiliary_heads(
    downloads: Downloads, data_dir: Path
) -> None:
    downloads.publish(GoogLeNet_Weights.DEFAULT.url, random_state("googlenet"))
    ours, theirs = load("googlenet", data_dir).module, get_model("googlenet", weights="DEFAULT").eval()
    assert [getattr(ours, name) for name in ("transform_input", "aux1", "aux2")] == [True, None, None]
    assert_same_state(ours, theirs)
    assert torch.equal(run(ours, 96), run(theirs, 96))


def test_a_quantizable_model_takes_the_float_weights(resnet18: Downloads, data_dir: Path) -> None:
    hosted = load("quantized_resnet18", data_dir)
    assert_same_state(hosted.module, get_model("quantized_resnet18", weights="DEFAULT").eval())


def test_weights_are_downloaded_once_and_kept_as_safetensors(resnet18: Downloads, data_dir: Path) -> None:
    first = load("resnet18", data_dir)
    resnet18.published.clear()
    assert_same_state(load("resnet18=IMAGENET1K_V1", data_dir).module, first.module)
    assert len(resnet18.asked) == 1
    names = sorted(path.name for path in (data_dir / "weights").rglob("*") if path.is_file())
    assert names == [f"{RESNET18}.safetensors", f"{RESNET18}.safetensors.sha256"]


def test_torch_hubs_cache_is_used_where_it_has_the_file(resnet18: Downloads, data_dir: Path) -> None:
    get_model("resnet18", weights="DEFAULT")
    load("resnet18", data_dir)
    prefetch_weights(parse_model_argument("resnet18"), data_dir)
    assert len(resnet18.asked) == 1


def test_what_was_prefetched_is_not_downloaded_again(resnet18: Downloads, data_dir: Path) -> None:
    spec = parse_model_argument("resnet18")
    prefetch_weights(spec, data_dir)
    prefetch_weights(spec, data_dir)
    load_model(spec, CPU, data_dir)
    prefetch_weights(spec, data_dir)
    assert len(resnet18.asked) == 1


@pytest.mark.parametrize(
    "spec",
    [
        ModelSpec("a", "resnet18", "random:0"),
        ModelSpec("a", "m:f"),
        ModelSpec("a", "resnet18", "x.safetensors"),
    ],
)
def test_only_torchvisions_weights_are_prefetched(
    spec: ModelSpec, downloads: Downloads, data_dir: Path
) -> None:
    prefetch_weights(spec, data_dir)
    assert downloads.asked == []


@pytest.mark.parametrize(
    "attempt", [load_model, lambda spec, device, data_dir: prefetch_weights(spec, data_dir)]
)
def test_an_impossible_download_says_how_to_give_a_file(attempt, data_dir: Path) -> None:  # type: ignore[no-untyped-def]
    with pytest.raises(ServiceError) as error:
        attempt(parse_model_argument("resnet18"), CPU, data_dir)
    assert reason_of(error) is ErrorReason.WEIGHTS_UNAVAILABLE
    assert f"`trocar admin convert {RESNET18}.pth {RESNET18}.safetensors`" in error.value.message
    assert f"`trocar serve resnet18={RESNET18}.safetensors`" in error.value.message
    assert "`trocar serve resnet18=random:0`" in error.value.message
    assert "network is unreachable" in error.value.message
    assert str(data_dir) not in error.value.message


def test_a_data_directory_that_cannot_be_written_is_told_without_its_path(
    resnet18: Downloads, data_dir: Path
) -> None:
    data_dir.write_text("a file is in the way")
    with pytest.raises(ServiceError, match="Not a directory") as error:
        load("resnet18", data_dir)
    assert reason_of(error) is ErrorReason.WEIGHTS_UNAVAILABLE
    assert str(data_dir) not in error.value.message


def test_a_converted_download_given_as_a_file_is_torchvisions_own_model(
    downloads: Downloads, tmp_path: Path
) -> None:
    name = GoogLeNet_Weights.DEFAULT.url.rpartition("/")[2].removesuffix(".pth")
    torch.save(random_state("googlenet"), tmp_path / f"{name}.pth")
    convert_checkpoint(tmp_path / f"{name}.pth", tmp_path / f"{name}.safetensors")
    hosted = load(f"googlenet={tmp_path / name}.safetensors")
    assert [getattr(hosted.module, name) for name in ("transform_input", "aux1")] == [True, None]
    assert (hosted.weights, len(hosted.categories)) == ("IMAGENET1K_V1", 1000)


def test_densenets_old_names_are_understood(downloads: Downloads, data_dir: Path) -> None:
    state = random_state("densenet121")
    old = OrderedDict((_old_name(key), state[key]) for key in state if "num_batches" not in key)
    assert old.keys() != state.keys()
    downloads.publish(get_model_weights("densenet121")["DEFAULT"].url, old)
    assert torch.equal(
        load("densenet121", data_dir).module.state_dict()["features.norm0.weight"],
        state["features.norm0.weight"],
    )


def _old_name(key: str) -> str:
    if "denselayer" not in key:
        return key
    for part in ("norm", "conv"):
        key = key.replace(f".{part}1.", f".{part}.1.").replace(f".{part}2.", f".{part}.2.")
    return key


def test_weights_that_do_not_fit_the_options_are_told(resnet18: Downloads, data_dir: Path) -> None:
    with pytest.raises(ServiceError, match="num_classes") as error:
        load_model(ModelSpec("a", "resnet18", options={"num_classes": 5}), CPU, data_dir)
    assert reason_of(error) is ErrorReason.MODEL_INVALID


def test_a_pickle_with_code_is_not_run(downloads: Downloads, data_dir: Path, tmp_path: Path) -> None:
    class Canary:
        def __reduce__(self) -> tuple[object, tuple[Path]]:
            return Path.touch, (tmp_path / "canary",)

    downloads.publish(ResNet18_Weights.DEFAULT.url, {"a": Canary()})  # type: ignore[dict-item]  # on purpose
    with pytest.raises(ServiceError) as error:
        load("resnet18", data_dir)
    assert reason_of(error) is ErrorReason.WEIGHTS_UNAVAILABLE
    assert not (tmp_path / "canary").exists()
    assert not any(path.is_file() for path in data_dir.rglob("*"))


def test_a_damaged_stored_file_is_corrupt(resnet18: Downloads, data_dir: Path) -> None:
    load("resnet18", data_dir)
    stored = data_dir / "weights" / f"{RESNET18}.safetensors"
    stored.write_bytes(stored.read_bytes()[:-1])
    with pytest.raises(ServiceError) as error:
        load("resnet18", data_dir)
    assert reason_of(error) is ErrorReason.WEIGHTS_CORRUPT


def test_what_a_killed_download_left_is_removed_and_a_running_one_is_not(data_dir: Path) -> None:
    downloads = data_dir / "weights" / "downloads"
    downloads.mkdir(parents=True)
    abandoned, running = downloads / "x.pth.0123.partial", downloads / "y.pth.4567.partial"
    kept = data_dir / "weights" / "x.safetensors"
    unfinished = data_dir / "weights" / "x.safetensors.89ab.partial"
    for file in (abandoned, running, kept, unfinished):
        file.touch()
    for file in (abandoned, kept, unfinished):
        os.utime(file, (0, 0))
    clean_downloads(data_dir)
    assert [file.exists() for file in (abandoned, running, kept, unfinished)] == [False, True, True, False]


def test_what_a_killed_download_of_a_repository_left_is_removed_and_a_running_one_is_not(
    data_dir: Path,
) -> None:
    hub = data_dir / "hub"
    abandoned, empty, running = hub / ".partial-0123", hub / ".partial-4567", hub / ".partial-89ab"
    kept = hub / "org--name@0123"
    files = [folder / "files" / ".cache" / "model.incomplete" for folder in (abandoned, running, kept)]
    for file in (*files, empty / "file"):
        file.parent.mkdir(parents=True)
        file.touch()
    (empty / "file").unlink()
    for path in (*hub.rglob("*"), hub):
        os.utime(path, (0, 0))
    os.utime(files[1])
    clean_downloads(data_dir)
    assert [path.exists() for path in (abandoned, empty, running, kept)] == [False, False, True, True]
    assert files[1].exists()
    assert files[2].exists()
