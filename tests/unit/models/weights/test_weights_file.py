import hashlib
import os
from collections import OrderedDict
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from tests.unit.models.conftest import reason_of
from trocar_api.reasons import ErrorReason
from trocar_server.errors import ServiceError
from trocar_server.models.weights import weights_file
from trocar_server.models.weights.weights_file import read_weights, write_checksum, write_weights


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "w.safetensors"
    write_weights({"a": torch.arange(6.0).reshape(2, 3), "b": torch.ones(2, dtype=torch.float16)}, path)
    return path


def test_what_was_written_is_read_bit_for_bit(file: Path) -> None:
    state = read_weights(file)
    assert list(state) == ["a", "b"]
    assert torch.equal(state["a"], torch.arange(6.0).reshape(2, 3))
    assert state["b"].dtype is torch.float16


def test_nothing_but_the_file_and_its_checksum_is_left(file: Path) -> None:
    assert sorted(path.name for path in file.parent.iterdir()) == ["w.safetensors", "w.safetensors.sha256"]


@pytest.mark.parametrize("write", ["weights", "checksum"])
def test_two_servers_may_write_one_file_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, write: str
) -> None:
    state = {"a": torch.ones(3)}
    own = {name: getattr(weights_file, name) for name in ("write_durably", "move_durably")}
    for name in ("one", "two"):
        save_file(state, tmp_path / name)

    def write_once(name: str) -> None:
        if write == "weights":
            write_weights(state, tmp_path / "w.safetensors")
        else:
            write_checksum(tmp_path / name, tmp_path / "w.safetensors")

    def interrupted(name: str, *given: Any, **named: Any) -> None:
        for each, real in own.items():
            monkeypatch.setattr(weights_file, each, real)
        write_once("two")  # the whole of another one's write
        own[name](*given, **named)

    for name in own:
        monkeypatch.setattr(weights_file, name, partial(interrupted, name))
    write_once("one")
    assert torch.equal(read_weights(tmp_path / "w.safetensors")["a"], state["a"])
    assert list(tmp_path.glob("*.partial")) == []


def test_others_may_read_it_as_the_umask_says(file: Path) -> None:
    assert file.stat().st_mode == file.with_name("w.safetensors.sha256").stat().st_mode


def test_tied_and_strided_tensors_survive(tmp_path: Path) -> None:
    tied = torch.arange(6.0).reshape(2, 3)
    write_weights({"one": tied, "two": tied, "transposed": tied.t()}, tmp_path / "w.safetensors")
    state = read_weights(tmp_path / "w.safetensors")
    assert torch.equal(state["one"], state["two"])
    assert torch.equal(state["transposed"], tied.t())


def test_module_versions_survive(tmp_path: Path) -> None:
    original = nn.Sequential(nn.BatchNorm2d(2)).state_dict()
    write_weights(original, tmp_path / "w.safetensors")
    restored = read_weights(tmp_path / "w.safetensors")
    assert restored._metadata == original._metadata  # type: ignore[attr-defined]  # torch hangs it there


def test_a_missing_file_is_unavailable_and_its_path_is_not_told(tmp_path: Path) -> None:
    with pytest.raises(ServiceError, match=r"'no\.safetensors' \(No such file") as error:
        read_weights(tmp_path / "no.safetensors")
    assert reason_of(error) is ErrorReason.WEIGHTS_UNAVAILABLE
    assert str(tmp_path) not in error.value.message


def test_a_directory_is_no_weights_file(tmp_path: Path) -> None:
    with pytest.raises(ServiceError):
        read_weights(tmp_path)


@pytest.mark.parametrize(
    "content", [b"", b"\x00" * 8, b"\xff" * 64, b"\x02\x00\x00\x00\x00\x00\x00\x00{}tail", b"x" * 9]
)
def test_what_is_no_safetensors_file_is_corrupt(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "w.safetensors"
    path.write_bytes(content)
    with pytest.raises(ServiceError, match=r"'w\.safetensors' is damaged") as error:
        read_weights(path)
    assert reason_of(error) is ErrorReason.WEIGHTS_CORRUPT


def test_a_flipped_bit_is_found_by_the_checksum(file: Path) -> None:
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(content)
    with pytest.raises(ServiceError, match="sha256") as error:
        read_weights(file)
    assert reason_of(error) is ErrorReason.WEIGHTS_CORRUPT


def test_a_file_that_somebody_else_wrote_needs_no_checksum(tmp_path: Path) -> None:
    save_file({"a": torch.zeros(1)}, tmp_path / "w.safetensors")
    assert list(read_weights(tmp_path / "w.safetensors")) == ["a"]


def test_a_failed_write_leaves_the_old_file(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def disk_full(*_: object) -> int:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "write", disk_full)
    with pytest.raises(OSError, match="No space"):
        write_weights({"a": torch.zeros(1)}, file)
    assert torch.equal(read_weights(file)["a"], torch.arange(6.0).reshape(2, 3))
    assert len(list(file.parent.iterdir())) == 2


def test_a_file_is_replaced_whole(file: Path) -> None:
    write_weights(OrderedDict(c=torch.ones(1)), file)
    assert list(read_weights(file)) == ["c"]


def test_a_known_sha256_counts_and_that_beside_the_file_does_not(file: Path) -> None:
    digest = hashlib.sha256(file.read_bytes()).hexdigest()
    file.with_name("w.safetensors.sha256").write_text("0  w.safetensors\n")
    assert list(read_weights(file, digest)) == ["a", "b"]
    with pytest.raises(ServiceError, match="sha256") as error:
        read_weights(file, "0" * 64)
    assert reason_of(error) is ErrorReason.WEIGHTS_CORRUPT
