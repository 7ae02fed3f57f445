"""Validation of a fit's workers."""

from collections.abc import Iterator

from torch import nn

from trocar_server.training.spec.fit_spec import FitSpec
from trocar_server.training.spec.trainer_spec import TrainerSpec


def worker_problems(
    trainer: TrainerSpec, module: nn.Module, sample_count: int, spec: FitSpec, room_problem: str
) -> Iterator[tuple[str, str]]:
    """Yield why a fit cannot have its workers, as fields and messages.

    Args:
        trainer: The trainer's spec.
        module: Its module tree.
        sample_count: Number of training samples.
        spec: The fit's spec; of several workers.
        room_problem: Why there can never be so many workers here; empty if there can.
    """
    count = spec.workers
    if room_problem:
        yield "workers", room_problem
    if spec.batch_size % count:
        near = max(count, round(spec.batch_size / count) * count)
        yield (
            "batch_size",
            f"{spec.batch_size} samples cannot be divided equally among {count} workers; use a multiple, for "
            f"example {near}",
        )
    if 0 < sample_count < count:
        yield "workers", f"{count} is more than the {sample_count} samples"
    if trainer.optimizer.name == "lbfgs":
        yield "workers", "lbfgs runs a batch several times in a step; use another optimizer, or one worker"
    elif trainer.optimizer.in_backward:
        yield (
            "workers",
            "an optimizer that runs in the backward pass has no gradients to average; create the trainer "
            "without `in_backward`, or use one worker",
        )
    if any(parameter.device.type != "cpu" for parameter in module.parameters()):
        yield "workers", "they are processes on CPUs, and the trainer's model is on another device; use one"
    if any(getattr(part, "sparse", False) for part in module.modules()):
        yield "workers", "the model has sparse gradients, which are not averaged; use one worker"
