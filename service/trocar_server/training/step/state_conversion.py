"""State conversion: a trainer's parts to its state, and back."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from trocar_server.training.optim.schedules import Schedule
from trocar_server.training.step.rollback import RandomStream
from trocar_server.training.step.trainer_state import (
    TrainerState,
    check_tensors,
    damaged,
    pack_optimizer,
    put_optimizer,
    unpack_optimizer,
)
from trocar_server.training.step.update_rules import HALF_DTYPES, Updater

_VERSION = 1


@dataclass(frozen=True)
class StateParts:
    """The stateful parts of a trainer.

    Attributes:
        module: The trainer's module tree.
        trained: Its trained parameters by name.
        updater: Optimizer, schedule and averages.
        random: The random stream of steps.
    """

    module: nn.Module
    trained: Mapping[str, nn.Parameter]
    updater: Updater
    random: RandomStream

    def live(self) -> dict[str, dict[str, Tensor]]:
        """Return the tensors with fixed memory, by kind and name."""
        averages = self.updater.averages
        return {
            "weights": {name: parameter.detach() for name, parameter in self.trained.items()},
            "buffers": dict(self.module.named_buffers()),
            "averages": averages.masters if averages else {},
        }

    def names(self) -> dict[int, str]:
        """Return the names of trained parameters by their id."""
        return {id(parameter): name for name, parameter in self.trained.items()}


def write_state(parts: StateParts, counts: Mapping[str, int]) -> TrainerState:
    """Return the state of the parts, as copies in host memory."""
    tensors = {
        f"{kind}/{name}": tensor.detach().to("cpu", copy=True)
        for kind, result in parts.live().items()
        for name, tensor in result.items()
    }
    for name, parameter in parts.trained.items():
        if parameter.grad is not None:
            tensors[f"gradients/{name}"] = parameter.grad.detach().to("cpu", copy=True)
    for kind, tensor in parts.random.state().items():
        tensors[f"random/{kind}"] = tensor
    optimizer = pack_optimizer(parts.updater.optimizer, parts.names(), tensors)
    schedule = parts.updater.schedule.state()
    return TrainerState(
        tensors, {"version": _VERSION, "counts": dict(counts), "optimizer": optimizer, "schedule": schedule}
    )


def read_state(parts: StateParts, state: TrainerState, names: Sequence[str]) -> dict[str, int]:
    """Load a state into the parts, all or nothing, and return its counters of these names.

    Raises:
        ServiceError: `CHECKPOINT_CORRUPT`.
    """
    facts, tensors = state.facts, _with_masters(state.tensors)
    counts = facts.get("counts")
    if facts.get("version") != _VERSION or not isinstance(counts, dict) or counts.keys() != set(names):
        raise damaged("it was written by another version")
    live = parts.live()
    result = {kind: check_tensors(tensors, kind, own) for kind, own in live.items()}
    gradients = {
        name: tensors[f"gradients/{name}"] for name in parts.trained if f"gradients/{name}" in tensors
    }
    check_tensors(tensors, "gradients", {name: live["weights"][name] for name in gradients})
    random = check_tensors(tensors, "random", parts.random.state())
    optimizer = parts.updater.optimizer
    states, groups = unpack_optimizer(facts.get("optimizer"), optimizer, parts.names(), tensors)
    schedule = facts.get("schedule")
    if not isinstance(schedule, dict):
        raise damaged("it has no schedule")
    _load_schedule(parts.updater.schedule, schedule)
    with torch.no_grad():
        for kind, own in live.items():
            for name, tensor in own.items():
                tensor.copy_(result[kind][name])
        if parts.updater.averages is not None:
            parts.updater.averages.round()
    for name, parameter in parts.trained.items():
        gradient = gradients.get(name)
        parameter.grad = None if gradient is None else gradient.to(parameter.device, copy=True)
    put_optimizer(optimizer, states, groups)
    parts.random.load(random)
    return {name: int(counts[name]) for name in names}


def _with_masters(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return a state with averages in float32, which older ones have in the 16 bits of their weights."""
    return {
        name: tensor.float() if name.startswith("averages/") and tensor.dtype in HALF_DTYPES else tensor
        for name, tensor in tensors.items()
    }


def _load_schedule(schedule: Schedule, state: dict[str, Any]) -> None:
    before = schedule.state()
    try:
        schedule.load(state)
    except (KeyError, TypeError, ValueError, AttributeError):
        schedule.load(before)
        raise damaged("it has a different schedule") from None
