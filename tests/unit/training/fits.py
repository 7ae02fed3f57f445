"""Data sets in memory and fits on them, for tests."""

import json
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from tests.unit.training.trainers import TinyNet, tiny
from trocar_server.models import HostedModel
from trocar_server.surgery import PassGuard
from trocar_server.training.datasets.order import random_numbers
from trocar_server.training.fit.augmentations import Augmentation
from trocar_server.training.fit.events import FitEvent
from trocar_server.training.fit.fit import Fit
from trocar_server.training.fit.fit_state import FitState
from trocar_server.training.losses.batch import Batch
from trocar_server.training.spec.fit_spec import FitSpec
from trocar_server.training.spec.trainer_spec import TrainerSpec
from trocar_server.training.step.core import TrainerCore
from trocar_server.training.step.trainer_state import TrainerState


class ArrayReader:
    """Images and labels in memory. Counts what it is asked for."""

    categories: Sequence[str] = ()

    def __init__(self, images: Tensor, labels: Tensor) -> None:
        self.images, self.targets = images, labels
        self.loaded_count = 0

    @property
    def input_shape(self) -> tuple[int, ...]:
        return tuple(self.images.shape[1:])

    def __len__(self) -> int:
        return len(self.images)

    def batch(self, indices: Tensor, augmentation: Augmentation | None = None, epoch: int = 0) -> Batch:
        self.loaded_count += len(indices)
        images = self.images[indices]
        if augmentation is not None:
            images = torch.stack(
                [
                    augmented(image, augmentation, epoch, int(i))
                    for image, i in zip(images, indices, strict=True)
                ]
            )
        return Batch((images,), {}, {"": self.targets[indices]}, len(indices))

    def announce(self, indices: Tensor) -> None:
        """Nothing is loaded ahead."""

    def labels(self, target: str) -> Collection[int] | None:
        return None if self.targets.is_floating_point() else set(self.targets.unique().tolist())


def augmented(image: Tensor, augmentation: Augmentation, epoch: int, index: int) -> Tensor:
    """Augment a sample as a reader does: by a seed of its own."""
    with random_numbers(1000 * epoch + index):
        return augmentation(image)


def dataset(count: int, classes: int = 5, shape: tuple[int, ...] = (3, 8, 8), seed: int = 1) -> ArrayReader:
    """Return random images; all classes occur when there are enough samples."""
    made = torch.Generator().manual_seed(seed)
    labels = torch.arange(count).remainder(classes)[torch.randperm(count, generator=made)]
    return ArrayReader(torch.randn(count, *shape, generator=made), labels)


def shown_core(base: HostedModel | None = None, scratch: Path = Path("unused"), **fields: Any) -> TrainerCore:
    """Make a trainer from the fields of its spec."""
    spec = TrainerSpec.model_validate({"model_id": "m", **fields})
    return TrainerCore(base or tiny(TinyNet), spec, {}, scratch)


class Checkpoints:
    """Keeps what a fit saves, in memory, as JSON where it is JSON."""

    def __init__(self, core: TrainerCore) -> None:
        self.core = core
        self.saved: list[tuple[str, TrainerState]] = []

    def __call__(self, state: FitState) -> int:
        self.saved.append((json.dumps(state.to_json(), allow_nan=False), self.core.state()))
        return len(self.saved)


def fit_of(
    core: TrainerCore,
    train: ArrayReader,
    evaluation: ArrayReader | None = None,
    scratch: Path = Path("unused"),
    state: FitState | None = None,
    checkpoint: Any = None,
    **fields: Any,
) -> Fit:
    """Make a fit from the fields of its spec."""
    spec = FitSpec.model_validate({"dataset_id": "d", **fields})
    kept = checkpoint or Checkpoints(core)
    return Fit(core, train, evaluation, spec, scratch, kept, state)


def run_fit(fit: Fit, units: int = 10**6) -> list[FitEvent]:
    """Advance a fit to its end, or for so many units."""
    events: list[FitEvent] = []
    while not fit.is_over and units:
        events += fit.advance(PassGuard())
        units -= 1
    return events


def steps_of(fit: Fit, count: int) -> list[FitEvent]:
    """Advance a fit until it has done so many steps in all."""
    events: list[FitEvent] = []
    while fit.state().step < count:
        events += fit.advance(PassGuard())
    return events
