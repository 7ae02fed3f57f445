"""Evaluation of a fit, batch by batch."""

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from trocar_server.surgery import PassGuard
from trocar_server.training.datasets.order import batches
from trocar_server.training.fit.fit_caches import FitCaches
from trocar_server.training.fit.fit_data import Core, Reader, named_target
from trocar_server.training.fit.metrics import Metrics
from trocar_server.training.losses.batch import Batch
from trocar_server.training.losses.loss_function import NoLabelsError
from trocar_server.training.spec.fit_spec import EarlyStopSpec
from trocar_server.training.spec.trainer_spec import LossSpec
from trocar_server.training.step.step_result import EvalResult


class Evaluation:
    """Evaluates a data set in its own order.

    Args:
        core: The trainer.
        reader: The data set; None for an evaluation that is never advanced.
        batch_size: Samples in a batch.
        metrics: Metrics beside the loss.
        target: Name of the target that they compare with.
    """

    def __init__(
        self, core: Core, reader: Reader | None, batch_size: int, metrics: Metrics, target: str
    ) -> None:
        self._core, self._reader, self._metrics, self._target = core, reader, metrics, target
        self._batches = batches(torch.arange(len(reader)), batch_size) if reader is not None else []
        self.reset()

    def reset(self) -> None:
        """Start again."""
        self._position, self._loss_sum, self._count = 0, 0.0, 0
        self._metrics.reset()

    @property
    def is_done(self) -> bool:
        """Whether all batches are done."""
        return self._position == len(self._batches)

    def advance(self, caches: FitCaches, guard: PassGuard) -> int:
        """Evaluate one batch; return its number of samples."""
        assert self._reader is not None
        indices = self._batches[self._position]
        outcome = caches.evaluate(indices, lambda batch: self._evaluate(batch, guard))
        if outcome is None:
            batch = self._reader.batch(indices)
            for others in self._batches[self._position + 1 : self._position + 2]:
                caches.announce_evaluation(others)
            outcome = self._evaluate(batch, guard)
        result, target = outcome
        self._position += 1
        if result is None:
            return len(indices)
        if target is not None and result.output is not None:
            self._metrics.update(result.output, target)
        self._loss_sum += result.loss * loss_weight(self._core.spec.losses, len(indices))
        self._count += len(indices)
        return len(indices)

    def result(self) -> tuple[float, dict[str, Any]]:
        """Return the mean loss over the samples, and the metrics.

        Batches whose labels are all ignored have no loss and do not count.
        """
        loss = self._loss_sum / self._count if self._count else math.nan
        return loss, dict(self._metrics.compute())

    def _evaluate(self, batch: Batch, guard: PassGuard) -> tuple[EvalResult | None, Tensor | None]:
        try:
            result = self._core.evaluate(batch, guard)
        except NoLabelsError:
            return None, None
        return result, named_target(batch.targets, self._target)


def loss_weight(losses: Sequence[LossSpec], sample_count: int, workers: int = 1) -> int:
    """Return the factor of a batch's loss in the sum over samples.

    A loss that is such a sum itself counts once for each worker, as it is the mean of their sums.
    """
    is_sum = all(term.options.get("reduction") == "sum" for term in losses)
    return workers if is_sum else sample_count


def is_better(value: float, best: float | None, rule: EarlyStopSpec) -> bool:
    """Whether an evaluation is better than the best one; NaN never is."""
    if math.isnan(value):
        return False
    if best is None:
        return True
    return value > best + rule.min_delta if rule.is_higher_better else value < best - rule.min_delta
