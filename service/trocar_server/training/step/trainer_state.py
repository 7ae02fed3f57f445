"""Trainer state: tensors and plain facts, enough to resume.

    state = core.state()
    ...
    other_core_of_the_same_spec.load_state(state)   # resumes bit-equal

Tensor names begin with their owner: `weights/fc.bias`, `buffers/bn1.running_mean`, `averages/fc.bias`,
`gradients/fc.bias`, `optimizer/fc.bias/momentum_buffer`, `random/cpu`. Facts are JSON.
"""

import math
from collections.abc import Iterator, Mapping, MutableMapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from trocar_api.reasons import ErrorReason
from trocar_server.errors import ServiceError

Json = None | bool | int | float | str | list[Any] | dict[str, Any]


@dataclass(frozen=True, eq=False)
class TrainerState:
    """State of a trainer between two steps.

    Attributes:
        tensors: Copies in host memory, by name.
        facts: Counters, the schedule and the optimizer's plain values.
    """

    tensors: dict[str, Tensor] = field(default_factory=dict)
    facts: dict[str, Json] = field(default_factory=dict)


def pack(value: Any, name: str, tensors: MutableMapping[str, Tensor]) -> Json:
    """Return a value as JSON; its tensors go into `tensors` under names that begin with `name`.

    Raises:
        TypeError: The value contains other types than tensors, numbers, strings, lists, tuples and dicts.
    """
    if isinstance(value, Tensor):
        stored = value.detach().to("cpu", copy=True)
        if value.dtype is torch.complex128:  # safetensors (0.8) has no such dtype
            tensors[name] = torch.view_as_real(stored.resolve_conj())
            return {"complex": name}
        tensors[name] = stored
        return {"tensor": name}
    if isinstance(value, float) and not math.isfinite(value):
        return {"float": str(value)}
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    if isinstance(value, (list, tuple)):
        items = [pack(item, f"{name}/{index}", tensors) for index, item in enumerate(value)]
        return items if isinstance(value, list) else {"tuple": items}
    if isinstance(value, Mapping):
        pairs = [[str(key), pack(item, f"{name}/{key}", tensors)] for key, item in value.items()]
        return {"dict": pairs}
    raise TypeError(f"{name}: a {type(value).__name__} cannot be stored")


def unpack(value: Json, tensors: Mapping[str, Tensor]) -> Any:
    """Return the packed value, with copies of its tensors.

    Raises:
        ServiceError: `CHECKPOINT_CORRUPT`, it is malformed, or a tensor is missing.
    """
    if isinstance(value, list):
        return [unpack(item, tensors) for item in value]
    if not isinstance(value, dict):
        return value
    try:
        ((kind, inner),) = value.items()
        if kind == "tensor":
            return tensors[inner].clone()
        if kind == "complex":
            return torch.view_as_complex(tensors[inner].clone())
        if kind == "float":
            return float(inner)
        if kind == "tuple":
            return tuple(unpack(item, tensors) for item in inner)
        if kind == "dict":
            return {key: unpack(item, tensors) for key, item in inner}
    except (ValueError, KeyError, TypeError, RuntimeError) as error:
        raise damaged(f"{type(error).__name__}") from None
    raise damaged(f"'{kind}'")


def pack_optimizer(
    optimizer: torch.optim.Optimizer, names: Mapping[int, str], tensors: MutableMapping[str, Tensor]
) -> Json:
    """Return an optimizer's state and the options of its groups; `names` maps ids of parameters to names."""
    states = {}
    for parameter in _parameters(optimizer):
        name = names[id(parameter)]
        if parameter in optimizer.state:
            states[name] = pack(optimizer.state[parameter], f"optimizer/{name}", tensors)
    groups = [
        pack(
            {key: value for key, value in group.items() if key != "params"}, f"optimizer_groups/{i}", tensors
        )
        for i, group in enumerate(optimizer.param_groups)
    ]
    return {"states": states, "groups": groups}


def unpack_optimizer(
    packed: Json, optimizer: torch.optim.Optimizer, names: Mapping[int, str], tensors: Mapping[str, Tensor]
) -> tuple[dict[Tensor, dict[str, Any]], list[dict[str, Any]]]:
    """Return an optimizer's state by parameter, and the options of its groups, ready for `put_optimizer`.

    Raises:
        ServiceError: `CHECKPOINT_CORRUPT`, it belongs to another optimizer.
    """
    states: dict[Tensor, dict[str, Any]] = {}
    if not isinstance(packed, dict):
        raise damaged("no optimizer")
    result, groups = packed.get("states"), packed.get("groups")
    if not isinstance(result, dict) or not isinstance(groups, list):
        raise damaged("no optimizer")
    by_name = {names[id(parameter)]: parameter for parameter in _parameters(optimizer)}
    if result.keys() - by_name.keys() or len(groups) != len(optimizer.param_groups):
        raise damaged("it has a different optimizer")
    for name, value in result.items():
        parameter = by_name[name]
        states[parameter] = _on_device(unpack(value, tensors), parameter.device)
    return states, [unpack(group, tensors) for group in groups]


def put_optimizer(
    optimizer: torch.optim.Optimizer,
    states: Mapping[Tensor, dict[str, Any]],
    groups: list[dict[str, Any]],
) -> None:
    """Load the result of `unpack_optimizer` into an optimizer."""
    optimizer.state.clear()
    for parameter, state in states.items():
        optimizer.state[parameter] = state
    for group, options in zip(optimizer.param_groups, groups, strict=True):
        group.update(options)


def check_tensors(given: Mapping[str, Tensor], kind: str, own: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the stored tensors of a kind by name, checked against the trainer's own.

    Raises:
        ServiceError: `CHECKPOINT_CORRUPT`, names, shapes or dtypes differ.
    """
    prefix = f"{kind}/"
    result = {name.removeprefix(prefix): value for name, value in given.items() if name.startswith(prefix)}
    if result.keys() != own.keys():
        name = sorted(result.keys() ^ own.keys())[0]
        raise damaged(f"'{name}' of its {kind} is missing in one of the two")
    for name, tensor in own.items():
        if result[name].shape != tensor.shape or result[name].dtype != tensor.dtype:
            raise damaged(f"'{name}' of its {kind} has another shape or dtype")
    return result


def damaged(why: str) -> ServiceError:
    """Return the error for a state that does not fit."""
    return ServiceError(
        ErrorReason.CHECKPOINT_CORRUPT, f"the checkpoint does not fit the trainer: {why}; restore another one"
    )


def _parameters(optimizer: torch.optim.Optimizer) -> Iterator[Tensor]:
    for group in optimizer.param_groups:
        yield from group["params"]


def _on_device(state: dict[str, Any], device: torch.device) -> dict[str, Any]:
    """Move an optimizer's tensors; torch keeps counters of steps on the host (2.14)."""

    def move(value: Any) -> Any:
        if isinstance(value, Tensor):
            return value.to(device)
        return [move(item) for item in value] if isinstance(value, list) else value

    return {key: value if key == "step" else move(value) for key, value in state.items()}
