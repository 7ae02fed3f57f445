from pathlib import Path

import pytest
import torch
from torch import nn

from tests.unit.models.conftest import assert_same_state, reason_of
from trocar_api.reasons import ErrorReason
from trocar_server.errors import ServiceError
from trocar_server.models.matching import load_matching
from trocar_server.models.weights.convert import convert_checkpoint
from trocar_server.models.weights.weights_file import read_weights


def model() -> nn.Module:
    return nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4))


class Canary:
    """A pickle that touches a file when it is loaded carelessly."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[object, tuple[str]]:
        return Path.touch, (self.path,)  # type: ignore[return-value]  # what pickle calls


@pytest.mark.parametrize("wrapper", [None, "state_dict", "model"])
def test_a_converted_checkpoint_loads_into_the_same_model(tmp_path: Path, wrapper: str | None) -> None:
    original = model()
    state = original.state_dict()
    torch.save({wrapper: state, "epoch": 3} if wrapper else state, tmp_path / "w.pth")
    assert convert_checkpoint(tmp_path / "w.pth", tmp_path / "w.safetensors") == len(state)
    restored = model()
    load_matching(restored, read_weights(tmp_path / "w.safetensors"), "w.safetensors")
    assert_same_state(restored, original)


def test_tied_weights_are_converted(tmp_path: Path) -> None:
    weight = torch.arange(4.0)
    torch.save({"a": weight, "b": weight, "c": weight[1:]}, tmp_path / "w.pth")
    assert convert_checkpoint(tmp_path / "w.pth", tmp_path / "w.safetensors") == 3
    assert torch.equal(read_weights(tmp_path / "w.safetensors")["c"], weight[1:])


def test_a_pickle_with_code_is_refused_and_never_run(tmp_path: Path) -> None:
    torch.save({"a": torch.zeros(1), "b": Canary(tmp_path / "canary")}, tmp_path / "w.pth")
    with pytest.raises(ServiceError, match="never executed") as error:
        convert_checkpoint(tmp_path / "w.pth", tmp_path / "w.safetensors")
    assert reason_of(error) is ErrorReason.WEIGHTS_CORRUPT
    assert sorted(path.name for path in tmp_path.iterdir()) == ["w.pth"]


def test_the_canary_sings_when_it_is_unpickled(tmp_path: Path) -> None:
    torch.save(Canary(tmp_path / "canary"), tmp_path / "w.pth")
    torch.load(tmp_path / "w.pth", weights_only=False)
    assert (tmp_path / "canary").exists()


@pytest.mark.parametrize(
    "checkpoint", [{"a": torch.zeros(1), "epoch": 3}, {}, {0: torch.zeros(1)}, [1], torch.zeros(1)]
)
def test_what_is_no_state_dict_is_refused(tmp_path: Path, checkpoint: object) -> None:
    torch.save(checkpoint, tmp_path / "w.pth")
    with pytest.raises(ServiceError, match="state dict") as error:
        convert_checkpoint(tmp_path / "w.pth", tmp_path / "w.safetensors")
    assert reason_of(error) is ErrorReason.WEIGHTS_CORRUPT


def test_entries_that_are_no_tensors_are_named(tmp_path: Path) -> None:
    torch.save({"a": torch.zeros(1), "epoch": 3}, tmp_path / "w.pth")
    with pytest.raises(ServiceError, match="epoch"):
        convert_checkpoint(tmp_path / "w.pth", tmp_path / "w.safetensors")


def test_a_sparse_tensor_is_refused(tmp_path: Path) -> None:
    torch.save({"a": torch.eye(2).to_sparse()}, tmp_path / "w.pth")
    with pytest.raises(ServiceError, match="plain tensors"):
        convert_checkpoint(tmp_path / "w.pth", tmp_path / "w.safetensors")


@pytest.mark.parametrize("content", [b"", b"not a checkpoint", b"PK\x03\x04broken"])
def test_a_file_that_torch_cannot_read_is_refused(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "w.pth").write_bytes(content)
    with pytest.raises(ServiceError, match=r"'w\.pth' cannot be converted") as error:
        convert_checkpoint(tmp_path / "w.pth", tmp_path / "w.safetensors")
    assert reason_of(error) is ErrorReason.WEIGHTS_CORRUPT


def test_a_missing_source_is_unavailable(tmp_path: Path) -> None:
    with pytest.raises(ServiceError, match=r"cannot read 'w\.pth'") as error:
        convert_checkpoint(tmp_path / "w.pth", tmp_path / "w.safetensors")
    assert reason_of(error) is ErrorReason.WEIGHTS_UNAVAILABLE


def test_a_target_that_cannot_be_written_is_unavailable(tmp_path: Path) -> None:
    torch.save({"a": torch.zeros(1)}, tmp_path / "w.pth")
    with pytest.raises(ServiceError, match=r"cannot write 'w\.safetensors'") as error:
        convert_checkpoint(tmp_path / "w.pth", tmp_path / "absent" / "w.safetensors")
    assert reason_of(error) is ErrorReason.WEIGHTS_UNAVAILABLE


def test_a_target_of_another_kind_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ServiceError, match="safetensors") as error:
        convert_checkpoint(tmp_path / "w.pth", tmp_path / "w.pth")
    assert reason_of(error) is ErrorReason.INVALID_ARGUMENT
