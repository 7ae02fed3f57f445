"""Operand tensors: a request's tensors beside its inputs, on the model's device. Owner thread only."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Self

import torch

from trocar_server.engine.execute.arguments import tensor_of
from trocar_server.engine.host.deployment import Deployment
from trocar_server.engine.request.plan import Payload, Payloads, Plan
from trocar_server.engine.resolve.edit_resolution import named
from trocar_server.engine.resolve.planner import Resolved
from trocar_server.tensors import edits
from trocar_server.tensors.reductions import OperandSpec, operand_specs

Tensors = list[torch.Tensor]


@dataclass(frozen=True)
class OperandTensors:
    """Operand tensors of taps, edits and the objective.

    Attributes:
        taps: For each tap, those of its reductions.
        edits: For each edit; in host memory, where their elements are checked without waiting for the device.
        objective: The labels of losses.
    """

    taps: Sequence[Tensors]
    edits: Sequence[Tensors]
    objective: Tensors

    @classmethod
    def of(cls, deployment: Deployment, plan: Plan, payloads: Payloads) -> Self:
        """Make the tensors of a plan."""
        device, host = deployment.hosted.device, torch.device("cpu")
        taps, of_edits = iter(payloads.taps), iter(payloads.edits)
        return cls(
            [_tensors(operand_specs(tap.reductions), taps, device) for tap in plan.taps],
            [_tensors(request.edit.operands, of_edits, host) for request in plan.edits],
            _tensors(plan.objective_operands, iter(payloads.objective), device),
        )

    def edits_on(self, device: torch.device) -> Tensors:
        """Return the tensors of all edits on a device, one after the other."""
        return [tensor.to(device) for tensor in chain(*self.edits)]


NO_OPERANDS = OperandTensors((), (), [])
"""Of a plan without edits, whose taps and objective have no tensors."""


def check_dtypes(resolved: Resolved, operands: OperandTensors) -> None:
    """Check that the dtypes of edited values can represent the elements of the edits' tensors.

    Raises:
        ServiceError: `EDIT_DTYPE_REJECTED`, naming the value.
    """
    for entry in resolved.surgery.edits:
        with named(entry.target.name):
            edits.check_operands(
                entry.request.edit, operands.edits[entry.position], entry.leaf.dtype or torch.float32
            )


def _tensors(specs: Iterable[OperandSpec], payloads: Iterator[Payload], device: torch.device) -> Tensors:
    return [tensor_of(spec.dtype, spec.shape, next(payloads)).to(device) for spec in specs]
