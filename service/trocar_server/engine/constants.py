"""The tensors that come with a request beside its inputs, on the model's device. Owner thread only."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Self

import torch

from trocar_server import edits
from trocar_server.engine.edits import named
from trocar_server.engine.hosting import Host
from trocar_server.engine.inputs import tensor_of
from trocar_server.engine.plan import Payload, Payloads, Plan
from trocar_server.engine.planner import Resolved
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
        taps, of_edits = iter(payloads.taps), iter(payloads.edits)
        return cls(
            [_tensors(constant_specs(tap.reductions), taps, device) for tap in plan.taps],
            [_tensors(request.edit.constants, of_edits, device) for request in plan.edits],
            _tensors(plan.objective_constants, iter(payloads.objective), device),
        )


def check_constants(resolved: Resolved, constants: Constants) -> None:
    """Check that the values that edits go to can hold the elements of their tensors.

    Raises:
        ServiceError: `EDIT_DTYPE_REJECTED`, naming the value.
    """
    for entry in resolved.surgery.edits:
        with named(entry.target.name):
            edits.check_constants(
                entry.request.edit, constants.edits[entry.position], entry.leaf.dtype or torch.float32
            )


def _tensors(specs: Iterable[ConstantSpec], payloads: Iterator[Payload], device: torch.device) -> Tensors:
    return [tensor_of(spec.dtype, spec.shape, next(payloads)).to(device) for spec in specs]
