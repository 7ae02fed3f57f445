"""Copies of what a trainer is now, for a thread that writes them while the trainer goes on."""

from collections.abc import Collection, Mapping

import torch
from torch import Tensor, nn

from trocar_server.models.weights_file import StateDict
from trocar_server.training.state import TrainerState

_CPU = torch.device("cpu")


def snapshot(state: TrainerState) -> TrainerState:
    """Copy a state to the CPU: owner thread only.

    The facts are taken as they are: they were made for this state.
    """
    return TrainerState(snapshot_tensors(state.tensors), state.facts)


def snapshot_tensors(tensors: Mapping[str, Tensor], unchanging: Collection[str] = ()) -> dict[str, Tensor]:
    """Copy tensors to the CPU, contiguous, bit by bit: owner thread only.

    Tensors that are the same memory in the same form (tied weights) are copied once and are one afterwards.

    Args:
        tensors: By name, on any device.
        unchanging: Names of what nobody changes as long as the copy lives, frozen weights for example: taken
            as it is where it lies on the CPU.
    """
    made: dict[tuple[object, ...], Tensor] = {}
    copies = {}
    for name, tensor in tensors.items():
        key = _memory_of(tensor) if tensor.numel() else (name,)
        if key not in made:
            made[key] = _copied(tensor, is_shared=name in unchanging)
        copies[name] = made[key]
    return copies


def snapshot_state_dict(module: nn.Module, unchanging: Collection[str] = ()) -> StateDict:
    """Copy a module's state dict to the CPU, with the module versions on it: owner thread only.

    What is no tensor (`get_extra_state`) is left out.

    Args:
        module: Whose.
        unchanging: See `snapshot_tensors`.
    """
    state = module.state_dict()
    tensors = {name: value for name, value in state.items() if isinstance(value, Tensor)}
    copied = StateDict(snapshot_tensors(tensors, unchanging))
    copied._metadata = state._metadata  # type: ignore[attr-defined]  # where torch looks for it
    return copied


def same_memory(tensors: Mapping[str, Tensor]) -> dict[str, str]:
    """Return the names of tensors that are the memory of an earlier one, in the same form, with its name."""
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
    """Return what two tensors have in common that are the same bytes, read in the same way."""
    flags = (tensor.is_conj(), tensor.is_neg())
    return (tensor.device, tensor.data_ptr(), tensor.dtype, tensor.shape, tensor.stride(), flags)
