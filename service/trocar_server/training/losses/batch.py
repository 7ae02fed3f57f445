"""Batch of a training step: model inputs and targets, as described by a request and as tensors."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from trocar_server.config import Limits
from trocar_server.engine.execute.arguments import build_arguments, has_images, tensor_of
from trocar_server.engine.execute.image_texts import takes_image_texts
from trocar_server.engine.execute.prepared_images import DecodedImages
from trocar_server.engine.request.plan import (
    ArgumentInput,
    Payload,
    TensorInput,
    row_count,
)
from trocar_server.models import HostedModel
from trocar_server.processing.inputs import ProcessorInput
from trocar_server.surgery import PassGuard
from trocar_server.training.losses.token_targets import TokenLayout, with_token_labels
from trocar_server.training.spec.trainer_spec import LossSpec


@dataclass(frozen=True, eq=False)
class Batch:
    """Inputs and targets.

        Batch((images,), {}, {"": labels}, size=32)

    Attributes:
        args: Positional arguments of the forward pass.
        kwargs: Keyword arguments.
        targets: Targets by name; a single unnamed target has the name "".
        size: Number of samples.
    """

    args: tuple[Any, ...]
    kwargs: dict[str, Any] = field(default_factory=dict)
    targets: Mapping[str, Tensor] = field(default_factory=dict)
    size: int = 0

    def to(self, device: torch.device) -> "Batch":
        """Return the batch on a device; itself if all of its values are tensors that are there."""
        for value in (*self.args, *self.kwargs.values(), *self.targets.values()):
            if not isinstance(value, Tensor) or value.device != device:
                break
        else:
            return self
        return replace(
            self,
            args=_moved(self.args, device),
            kwargs=_moved(self.kwargs, device),
            targets=_moved(dict(self.targets), device),
        )


def _moved(value: Any, device: torch.device) -> Any:
    if isinstance(value, Tensor):
        return value.to(device)
    if isinstance(value, dict):
        return {name: _moved(item, device) for name, item in value.items()}
    if isinstance(value, (list, tuple)):
        return type(value)(_moved(item, device) for item in value)
    return value


@dataclass(frozen=True)
class BatchPlan:
    """A batch as described and checked, without its bytes.

    Attributes:
        key: The request as serialised, without its number.
        hosted: The model that it was checked against.
        limits: The limits that it was checked against.
        losses: The terms of the trainer's loss.
        inputs: The arguments of the forward.
        targets: The values that outputs are compared with.
        byte_counts: The size of each payload.
        unprocessed: Further arguments: texts and sound, which the model's processor turns into tensors.
        layout: The layout of tokens; None before texts were processed, and without texts.
    """

    key: bytes
    hosted: HostedModel
    limits: Limits
    losses: tuple[LossSpec, ...]
    inputs: tuple[ArgumentInput, ...]
    targets: list[TensorInput]
    byte_counts: list[int]
    unprocessed: tuple[ProcessorInput, ...] = ()
    layout: TokenLayout | None = None

    @cached_property
    def rows(self) -> int:
        """Samples of the batch, at least 1."""
        return self.unprocessed[0].row_count if self.unprocessed else row_count(self.inputs)

    @cached_property
    def needs_processing(self) -> bool:
        """Whether the model's own processor has to make arguments of it."""
        return bool(self.unprocessed) or takes_image_texts(self.hosted, self.inputs, ())

    @cached_property
    def names(self) -> list[str]:
        """The name of each argument of the forward; empty where it has none."""
        return [entry.name for entry in self.inputs]

    @cached_property
    def are_keywords(self) -> bool:
        """Whether each argument is passed by its name, as it is."""
        return self.hosted.forward.takes_as_keywords(self.names)

    @cached_property
    def has_images(self) -> bool:
        """Whether any argument is images."""
        return has_images(self.inputs)

    @cached_property
    def no_images(self) -> list[DecodedImages]:
        """The images of each argument, where all are tensors."""
        return [[] for _ in self.inputs]

    @cached_property
    def byte_count(self) -> int:
        """Bytes of all payloads."""
        return sum(self.byte_counts)


def make_batch(
    plan: BatchPlan,
    own: Sequence[Payload],
    of_targets: Sequence[Payload],
    images: Sequence[DecodedImages],
    guard: PassGuard,
) -> Batch:
    """Make the tensors of a batch. On the thread that owns torch.

    Args:
        plan: The batch as planned; its texts have been processed.
        own: Bytes of the arguments.
        of_targets: Bytes of the targets.
        images: Decoded images of each argument.
        guard: Aborts the preparation of images.

    Raises:
        ServiceError: The arguments do not fit the model.
    """
    hosted = plan.hosted
    arguments = build_arguments(hosted, plan.inputs, own, images, guard)
    positional: Sequence[object] = ()
    keyword: Mapping[str, object] = dict(zip(plan.names, arguments, strict=True))
    if not plan.are_keywords:
        positional, keyword = hosted.forward.called(plan.names, arguments)
    compared: dict[str, torch.Tensor] = {}
    for target, payload in zip(plan.targets, of_targets, strict=True):
        compared[target.name] = tensor_of(target.dtype, target.shape, payload).to(hosted.device)
    if plan.layout is not None:
        compared = with_token_labels(plan.losses, compared, keyword, plan.layout)
    return Batch(tuple(positional), dict(keyword), compared, plan.rows)
