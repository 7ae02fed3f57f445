"""A trainer's model as others see it: extraction, surgery, prediction, publishing."""

from collections.abc import Mapping
from dataclasses import replace
from itertools import chain

from torch import Tensor, nn

from trocar_server.models import HostedModel, make_hosted_copy
from trocar_server.models.hosted import count_bytes
from trocar_server.training.spec import TrainerSpec


def hosted_view(
    base: HostedModel, module: nn.Module, spec: TrainerSpec, averages: Mapping[str, Tensor] | None
) -> HostedModel:
    """Return a model in eval mode over a trainer's memory, which follows its steps by itself.

    Args:
        base: What the trainer began with: preprocessing and input shape are its.
        module: The trainer's tree.
        spec: The trainer's. A new head has no class names, so they are `class 0` and so on.
        averages: Moving averages by parameter, shown in the place of the weights.
    """
    shown = make_hosted_copy(module)
    for part in shown.modules():
        part.training = False  # not `eval()`: some modules change their weights there
    for name, parameter in shown.named_parameters():
        if averages is not None and name in averages:
            parameter.data = averages[name]
    categories = base.categories
    if spec.head is not None:
        categories = tuple(f"class {index}" for index in range(spec.head.classes))
    return replace(
        base,
        module=shown,
        categories=categories,
        parameter_count=sum(parameter.numel() for parameter in shown.parameters()),
        byte_count=count_bytes(chain(shown.parameters(), shown.buffers())),
    )
