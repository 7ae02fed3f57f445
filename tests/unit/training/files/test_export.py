"""Exported weights; the oracle is torchvision with safetensors."""

from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file
from torch import nn
from torchvision.models import mnasnet1_3, resnet18

from tests.unit.training.stores import assert_same_tensors
from trocar_api.reasons import ErrorReason
from trocar_server.errors import ServiceError
from trocar_server.models.weights.weights_file import read_weights
from trocar_server.training.files.export import Export, make_export
from trocar_server.training.files.snapshots import snapshot_state_dict


def written(export: Export, folder: Path) -> Path:
    path = folder / "x.safetensors"
    path.write_bytes(b"".join(export.pieces()))
    assert path.stat().st_size == export.byte_count
    return path


def test_plain_torchvision_takes_it(tmp_path: Path) -> None:
    tuned = resnet18()
    tuned.fc = nn.Linear(512, 7)
    path = written(make_export(snapshot_state_dict(tuned), {"note": "flowers"}), tmp_path)
    theirs = resnet18(num_classes=7)
    theirs.load_state_dict(load_file(path))
    inputs = torch.rand(2, 3, 64, 64)
    assert torch.equal(theirs.eval()(inputs), tuned.eval()(inputs))
    with safe_open(path, framework="pt") as file:
        assert (file.metadata()["format"], file.metadata()["note"]) == ("pt", "flowers")


def test_pieces_are_small_and_their_own() -> None:
    weights = {"x": torch.zeros(3 << 20, dtype=torch.uint8), "y": torch.zeros(5, dtype=torch.uint8)}
    sizes = []
    for piece in make_export(weights).pieces():
        assert isinstance(piece, bytes)
        sizes.append(len(piece))
    assert max(sizes) <= 1 << 20
    assert len(sizes) == 5


def test_it_can_be_read_twice() -> None:
    export = make_export({"x": torch.arange(10)})
    assert list(export.pieces()) == list(export.pieces())


def test_tied_weights_are_there_under_both_names(tmp_path: Path) -> None:
    module = nn.ModuleDict({"a": nn.Linear(3, 3), "b": nn.Linear(3, 3)})
    module["b"].weight = module["a"].weight
    path = written(make_export(snapshot_state_dict(module)), tmp_path)
    assert_same_tensors(load_file(path), dict(module.state_dict()))


def test_the_optimizer_comes_under_its_own_names(tmp_path: Path) -> None:
    moments = {"fc.weight.exp_avg": torch.ones(3), "fc.weight.step": torch.tensor(4.0)}
    path = written(make_export({"fc.weight": torch.zeros(3)}, optimizer=moments), tmp_path)
    expected = {
        "fc.weight": torch.zeros(3),
        **{f"optimizer.{name}": value for name, value in moments.items()},
    }
    assert_same_tensors(load_file(path), expected)


def test_a_model_with_such_names_of_its_own_is_not_overwritten() -> None:
    weights = {"optimizer.x": torch.ones(1)}
    with pytest.raises(ServiceError) as error:
        make_export(weights, optimizer={"x": torch.zeros(1)})
    assert error.value.reason is ErrorReason.TRAINER_INVALID
    assert make_export(weights).byte_count


def test_module_versions_are_in_the_header(tmp_path: Path) -> None:

    module = mnasnet1_3()
    path = written(make_export(snapshot_state_dict(module)), tmp_path)
    mnasnet1_3().load_state_dict(read_weights(path))
