"""Trainer description: parameter counts and memory sizes."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from torch import Tensor, nn

from trocar_server.models.hosted import count_bytes


@dataclass(frozen=True)
class TrainerDescription:
    """Counts and sizes of a trainer.

    Attributes:
        trainable: Names of the trained parameters.
        trainable_count: Elements of the trained parameters.
        frozen_count: Elements of the other parameters.
        trained_bytes: Bytes of the trained parameters.
        buffer_bytes: Bytes of all buffers.
        average_bytes: Bytes of moving averages.
        optimizer_bytes: Bytes of the optimizer's current state.
        train_mode: Paths of the modules in train mode; "" is the model itself.
    """

    trainable: tuple[str, ...]
    trainable_count: int
    frozen_count: int
    trained_bytes: int
    buffer_bytes: int
    average_bytes: int
    optimizer_bytes: int
    train_mode: tuple[str, ...]

    @property
    def owned_bytes(self) -> int:
        """Bytes of the trainer's own memory beside the base model's, without gradients."""
        return self.trained_bytes + self.buffer_bytes + self.average_bytes + self.optimizer_bytes


def describe(
    module: nn.Module,
    trained: Mapping[str, nn.Parameter],
    averages: Iterable[Tensor],
    optimizer_state: Iterable[Mapping[str, object]],
) -> TrainerDescription:
    """Count parameters and bytes of a trainer."""
    trainable_count = sum(parameter.numel() for parameter in trained.values())
    return TrainerDescription(
        trainable=tuple(trained),
        trainable_count=trainable_count,
        frozen_count=sum(parameter.numel() for parameter in module.parameters()) - trainable_count,
        trained_bytes=count_bytes(trained.values()),
        buffer_bytes=count_bytes(module.buffers()),
        average_bytes=count_bytes(averages),
        optimizer_bytes=count_bytes(tensor for state in optimizer_state for tensor in _tensors(state)),
        train_mode=tuple(path for path, part in module.named_modules() if part.training),
    )


def _tensors(value: object) -> Iterable[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, Mapping):
        for item in value.values():
            yield from _tensors(item)
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from _tensors(item)
