"""Trainers and batches for tests."""

from base64 import b64encode
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from tests.unit.engine.deployments import hosted
from trocar_server.models import HostedModel, ModelSpec, load_model
from trocar_server.surgery import PassGuard
from trocar_server.training.losses.batch import Batch
from trocar_server.training.spec.trainer_spec import TrainerSpec
from trocar_server.training.step.core import TrainerCore
from trocar_server.training.step.step_result import StepResult

Pair = tuple[Tensor, Tensor]


class TinyNet(nn.Module):
    """Convolutions with batch norm, in-place ReLUs, dropout and a head; 0.1 s for a dozen of steps."""

    def __init__(self, classes: int = 5) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(inplace=True))
        self.block = nn.Sequential(
            nn.Conv2d(8, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(inplace=True), nn.Dropout2d(0.2)
        )
        self.pool = nn.AdaptiveAvgPool2d(1)
        self.drop = nn.Dropout(0.3)
        self.fc = nn.Linear(8, classes)

    def forward(self, x: Tensor) -> Any:
        x = self.pool(self.block(self.stem(x))).flatten(1)
        return self.fc(self.drop(x))


def tiny(kind: type[nn.Module] = TinyNet, shape: tuple[int, ...] = (3, 8, 8)) -> HostedModel:
    """Host a small model with random weights."""
    return hosted(kind, shape)


def by_name(architecture: str, size: int = 64) -> HostedModel:
    """Host a torchvision model with random weights."""
    spec = ModelSpec("m", architecture, "random:0", input_shape=(3, size, size))
    return load_model(spec, torch.device("cpu"), Path("unused"))


def batches(count: int, classes: int = 5, size: int = 4, shape: Sequence[int] = (3, 8, 8)) -> list[Pair]:
    """Return random images and labels."""
    made = torch.Generator().manual_seed(7)
    return [
        (torch.randn(size, *shape, generator=made), torch.randint(classes, (size,), generator=made))
        for _ in range(count)
    ]


def core_of(
    base: HostedModel,
    scratch: Path = Path("unused"),
    teachers: Mapping[str, HostedModel] | None = None,
    **fields: Any,
) -> TrainerCore:
    """Make a trainer from the fields of its spec, as JSON would give them."""
    spec = TrainerSpec.model_validate({"model_id": "m", **fields})
    return TrainerCore(base, spec, teachers or {}, scratch)


def value_edit(selector: str, name: str, vectors: object, **options: Any) -> dict[str, Any]:
    """Return an edit of a spec, with vectors of shape (channels,) or (vectors, channels)."""
    numbers = np.asarray(vectors, "<f8")
    return {
        "selector": selector,
        "name": name,
        "options": options,
        "shape": numbers.shape,
        "vectors": b64encode(numbers.tobytes()).decode(),
        "sent": "",
    }


def net(owner: TrainerCore | HostedModel) -> Any:
    """Return a module whose parts a test reaches by their names."""
    return owner.module


def batch_of(pair: Pair) -> Batch:
    """Return a batch of images and labels."""
    return Batch((pair[0],), {}, {"": pair[1]}, len(pair[0]))


def run(core: TrainerCore, pairs: Sequence[Pair]) -> list[StepResult]:
    """Take steps."""
    return [core.step(batch_of(pair), PassGuard()) for pair in pairs]


def assert_same(module: nn.Module, other: nn.Module) -> None:
    """Compare all weights and buffers of two models, bit by bit."""
    mine, theirs = module.state_dict(), other.state_dict()
    assert mine.keys() == theirs.keys()
    different = [name for name in mine if not torch.equal(mine[name], theirs[name])]
    assert different == []
