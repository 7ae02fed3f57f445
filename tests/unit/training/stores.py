"""States, stores and comparisons for the tests of what lies on disk."""

import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from trocar_server.training.files.trainer_storage import TrainingStorage
from trocar_server.training.spec.trainer_spec import HeadSpec
from trocar_server.training.step.trainer_state import TrainerState

ID = "0123456789abcdef0123456789abcdef"
OTHER_ID = "f" * 32
SPEC = {"model_id": "resnet18", "seed": 7}
DTYPES = [
    torch.float64,
    torch.float32,
    torch.float16,
    torch.bfloat16,
    torch.float8_e4m3fn,
    torch.float8_e5m2,
    torch.complex64,
    torch.int64,
    torch.int32,
    torch.int16,
    torch.int8,
    torch.uint8,
    torch.uint16,
    torch.uint32,
    torch.uint64,
    torch.bool,
]

OPERATIONS = ("open", "write", "fsync", "replace", "rename", "unlink", "mkdir", "rmdir")
"""Of `os`: all that a store changes the disk with."""


def bits(tensor: Tensor) -> bytes:
    """Return what a tensor holds, NaN payloads and signs of zero included."""
    plain = tensor.detach().resolve_conj().resolve_neg().contiguous().reshape(-1)
    return plain.view(torch.uint8).numpy().tobytes()


def random_tensor(shape: tuple[int, ...], dtype: torch.dtype, seed: int = 0) -> Tensor:
    """Make a tensor of random bits; booleans are 0 or 1."""
    count = torch.Size(shape).numel() * dtype.itemsize
    raw = torch.randint(0, 256, (count,), generator=torch.Generator().manual_seed(seed), dtype=torch.uint8)
    if dtype is torch.bool:
        raw %= 2
    return raw.view(dtype).reshape(shape) if count else torch.empty(shape, dtype=dtype)


def make_state(seed: int = 0, size: int = 300) -> TrainerState:
    """Make a small state with what makes states difficult."""
    weight = random_tensor((3, size), torch.float32, seed)
    tensors = {
        "fc.weight": weight,
        "tied": weight,
        "transposed": random_tensor((4, 5), torch.bfloat16, seed).t(),
        "every second": random_tensor((20,), torch.int64, seed)[::2],
        "scalar": random_tensor((), torch.int64, seed),
        "flag": random_tensor((), torch.bool, seed),
        "empty": torch.empty(0, 7),
        "rng": torch.Generator().manual_seed(seed).get_state(),
    }
    return TrainerState(tensors, {"step": seed, "loss": [0.1, float("inf")], "nested": {"a": None}})


def assert_same_tensors(found: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> None:
    assert set(found) == set(expected)
    for name, tensor in expected.items():
        assert (found[name].dtype, found[name].shape) == (tensor.dtype, tensor.shape), name
        assert bits(found[name]) == bits(tensor), name


def assert_same_state(found: TrainerState, expected: TrainerState) -> None:
    assert_same_tensors(found.tensors, expected.tensors)
    assert found.facts == expected.facts


def tree(folder: Path) -> list[str]:
    """Return every file below a folder, but the lock."""
    paths = (path for path in folder.rglob("*") if path.is_file() and path.name != "lock")
    return sorted(str(path.relative_to(folder)) for path in paths)


@contextmanager
def opened(data_dir: Path, keep: int = 3) -> Iterator[TrainingStorage]:
    storage = TrainingStorage(data_dir, keep)
    try:
        yield storage
    finally:
        storage.close()


def with_trainer(storage: TrainingStorage, trainer_id: str = ID) -> None:
    storage.trainers.create(trainer_id, "alice", SPEC, "resnet18", "00" * 32)


def replace_fc(module: nn.Module, head: HeadSpec, seed: int) -> str:
    """Stand for `head.replace_head`: a Linear in the place of `head.path`, or of `fc`."""
    path = head.path or "fc"
    parent, _, name = path.rpartition(".")
    holder = module.get_submodule(parent)
    old: Any = getattr(holder, name)
    torch.manual_seed(seed)
    setattr(holder, name, nn.Linear(old.in_features, head.classes, bias=head.bias))
    return path


class Fuse:
    """Counts the operations that change the disk, and does something at one of them, by its number from 0."""

    def __init__(self, at: int, act: Callable[[str, tuple[Any, ...]], None]) -> None:
        self.count = 0
        self._at = at
        self._act = act

    def install(self, patch: Callable[[object, str, Any], None]) -> "Fuse":
        for name in OPERATIONS:
            patch(os, name, self._watched(name, getattr(os, name)))
        return self

    def _watched(self, name: str, real: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any, **named: Any) -> Any:
            is_reading = name == "open" and not arguments[1] & (os.O_WRONLY | os.O_RDWR)
            if not is_reading:
                self.count += 1
                if self.count - 1 == self._at:
                    self._act(name, arguments)
            return real(*arguments, **named)

        return call


@contextmanager
def fuse(at: int, act: Callable[[str, tuple[Any, ...]], None]) -> Iterator[Fuse]:
    """Watch the disk's operations inside the context."""
    with pytest.MonkeyPatch.context() as patch:
        yield Fuse(at, act).install(patch.setattr)


def count_operations(run: Callable[[], object]) -> int:
    """Return how many operations a call makes."""
    with fuse(-1, lambda *_: None) as watching:
        run()
    return watching.count
