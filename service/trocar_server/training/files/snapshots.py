"""Snapshots of a trainer's state, for a background writer while training continues."""

from collections.abc import Collection, Mapping

import torch
from torch import Tensor, nn

from trocar_server.models.weights.weights_file import StateDict
from trocar_server.training.step.core import TrainerCore
from trocar_server.training.step.trainer_state import TrainerState

_CPU = torch.device("cpu")


def snapshot(state: TrainerState) -> TrainerState:
    """Copy a state to the CPU: owner thread only.

    The facts are not copied: they were made for this state.
    """
    return TrainerState(snapshot_tensors(state.tensors), state.facts)


def snapshot_tensors(tensors: Mapping[str, Tensor], unchanging: Collection[str] = ()) -> dict[str, Tensor]:
    """Copy tensors to the CPU, contiguous, bit by bit: owner thread only.

    Tensors with the same memory and layout (tied weights) are copied once and are one object afterwards.

    Args:
        tensors: By name, on any device.
        unchanging: Names of tensors that do not change while the copy lives, frozen weights for example: on
            the CPU these are not copied.
    """
    made: dict[tuple[object, ...], Tensor] = {}
    copies = {}
    for name, tensor in tensors.items():
        key = _memory_of(tensor) if tensor.numel() else (name,)
        if key not in made:
            made[key] = _copied(tensor, is_shared=name in unchanging)
        copies[name] = made[key]
    return copies


def snapshot_weights(core: TrainerCore) -> StateDict:
    """Copy the weights that a trainer shows. Owner thread only.

    Raises:
        ServiceError: `TRAINER_BROKEN`, they are half updated.
    """
    core.check_usable()
    return snapshot_state_dict(core.hosted.module)


def snapshot_state_dict(module: nn.Module, unchanging: Collection[str] = ()) -> StateDict:
    """Copy a module's state dict to the CPU, with the module versions on it: owner thread only.

    Entries that are not tensors (`get_extra_state`) are left out.

    Args:
        module: The module.
        unchanging: See `snapshot_tensors`.
    """
    state = module.state_dict()
    tensors = {name: value for name, value in state.items() if isinstance(value, Tensor)}
    copied = StateDict(snapshot_tensors(tensors, unchanging))
    copied._metadata = state._metadata  # type: ignore[attr-defined]  # where torch expects it
    return copied


def same_memory(tensors: Mapping[str, Tensor]) -> dict[str, str]:
    """Return the names of aliases, tensors with the memory and layout of an earlier one, with its name."""
    first: dict[tuple[object, ...], str] = {}
    same = {}
    for name, tensor in tensors.items():
        if tensor.numel():
            original = first.setdefault(_memory_of(tensor), name)
            if original != name:
                same[name] = original
    return same


def _copied(tensor: Tensor, is_shared: bool) -> Tensor:
    with torch.no_grad():
        plain = tensor.detach().resolve_conj().resolve_neg()
        if is_shared and plain.device == _CPU:
            return plain.contiguous()
        return torch.empty(plain.shape, dtype=plain.dtype, device=_CPU).copy_(plain)


def _memory_of(tensor: Tensor) -> tuple[object, ...]:
    """Return a key that is equal for tensors with the same memory and layout."""
    flags = (tensor.is_conj(), tensor.is_neg())
    return (tensor.device, tensor.data_ptr(), tensor.dtype, tensor.shape, tensor.stride(), flags)
