"""Planted faults of training: one for each way of `trainings.py`, which must fail on it."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from trocar_server.surgery.sessions import recomputation
from trocar_server.training.features.cached_runs import CachedRuns
from trocar_server.training.fit.fit import Fit
from trocar_server.training.step import state_conversion
from trocar_server.training.step.core import TrainerCore
from trocar_server.training.step.saved_tensors import SavedTensors

Patch = pytest.MonkeyPatch


def _optimizer_stays(patch: Patch) -> None:
    patch.setattr(state_conversion, "put_optimizer", lambda *_: None)


def plant_for_good() -> None:
    """Let no trainer of this process, which is a server's, load the state of an optimizer."""
    _optimizer_stays(pytest.MonkeyPatch())


def _spooled_is_rounded(patch: Patch) -> None:
    def rounded(value: Tensor) -> Tensor:
        return value.bfloat16().to(value.dtype) if value.is_floating_point() else value

    def forward(_: SavedTensors) -> Any:
        return torch.autograd.graph.saved_tensors_hooks(rounded, lambda value: value)

    patch.setattr(SavedTensors, "forward", forward)


def _recomputed_from_others(patch: Patch) -> None:
    original = recomputation._replayed

    def replayed(*given: Any) -> Any:
        again = original(*given)
        return lambda *args, **named: again(*(1.01 * value for value in args), **named)

    patch.setattr(recomputation, "_replayed", replayed)


def _half_step_is_longer(patch: Patch) -> None:
    original = TrainerCore.optimizer_step

    def longer(self: Any) -> Any:
        for parameter in self.module.parameters():
            if parameter.grad is not None:
                parameter.grad[:1] *= 2
        return original(self)

    patch.setattr(TrainerCore, "optimizer_step", longer)


def _fit_goes_backwards(patch: Patch) -> None:
    original = Fit._batches
    patch.setattr(Fit, "_batches", lambda self, epoch: original(self, epoch)[::-1])


def _features_of_neighbours(patch: Patch) -> None:
    original = CachedRuns.run

    def run(self: CachedRuns, indices: Tensor, work: Any) -> Any:
        def rolled(batch: Any) -> Any:
            return work(replace(batch, args=tuple(value.roll(1, 0) for value in batch.args)))

        return original(self, indices, rolled)

    patch.setattr(CachedRuns, "run", run)


PLANTED: dict[str, Callable[[Patch], None]] = {
    "restored": _optimizer_stays,
    "reopened": _optimizer_stays,
    "spooled": _spooled_is_rounded,
    **dict.fromkeys(("recomputed", "reentrant", "not reentrant"), _recomputed_from_others),
    "in two calls": _half_step_is_longer,
    "fitted": _fit_goes_backwards,
    "kept features": _features_of_neighbours,
}
"""The faults by way; those of `KILLED` are planted with `plant_for_good`."""
