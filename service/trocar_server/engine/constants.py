"""The tensors that come with a request beside its inputs, on the model's device. Owner thread only."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Self

import torch

from trocar_server.engine.hosting import Host
from trocar_server.engine.inputs import tensor_of
from trocar_server.engine.plan import Payload, Payloads, Plan
from trocar_server.reductions import ConstantSpec, constant_specs

Tensors = list[torch.Tensor]


@dataclass(frozen=True)
class Constants:
    """What taps, edits and the objective need.

    Attributes:
        taps: Of each tap's reductions.
        edits: Of each edit.
        objective: The labels of losses.
    """

    taps: Sequence[Tensors]
    edits: Sequence[Tensors]
    objective: Tensors

    @classmethod
    def of(cls, host: Host, plan: Plan, payloads: Payloads) -> Self:
        """Make the tensors of a plan."""
        device = host.hosted.device
        taps, edits = iter(payloads.taps), iter(payloads.edits)
        return cls(
            [_tensors(constant_specs(tap.reductions), taps, device) for tap in plan.taps],
            [_tensors(request.edit.constants, edits, device) for request in plan.edits],
            _tensors(plan.objective_constants, iter(payloads.objective), device),
        )


def _tensors(specs: Iterable[ConstantSpec], payloads: Iterator[Payload], device: torch.device) -> Tensors:
    return [tensor_of(spec.dtype, spec.shape, next(payloads)).to(device) for spec in specs]
