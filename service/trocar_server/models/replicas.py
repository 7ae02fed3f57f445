"""Replicas: copies of a module tree that share its weights.

Module hooks are state of the module, not of the request. So every replica is its own tree of modules
over the same `Parameter` and buffer objects, and serves one pass at a time: hooks on one are invisible
to the others, and a replica costs milliseconds and no weight memory.

Our hooks are registered on replicas only, never on the hosted module: so a new replica has none of ours, and
keeps the model's own (weight norm, a backbone's own feature hooks). Hooks that are bound methods move to the
copy; closures still see the original.
"""

import copy
from collections.abc import Collection, Iterator
from itertools import chain

import torch
from torch import Tensor, nn

from trocar_api.reasons import ErrorReason
from trocar_server.errors import ServiceError


def make_replica(module: nn.Module, owned: Collection[Tensor] = ()) -> nn.Module:
    """Copy a module tree; parameters and buffers are shared objects, everything else is copied.

    Plain tensor attributes are copied, so that a pass may keep state in them; those that carry a
    graph, which torch refuses to copy, are shared.

    Args:
        module: The model; it is left as it is.
        owned: Parameters and buffers that the replica gets copies of.

    Raises:
        ServiceError: `MODEL_INVALID`, the module holds something that cannot be copied (a lock, an
            open file), or copies its weights in a `__deepcopy__` of its own.
    """
    own = {id(tensor): tensor for tensor in owned}
    shared = [tensor for tensor in _state(module) if id(tensor) not in own]
    with_graph = [tensor for tensor in _tensors_of(module) if not tensor.is_leaf]
    memo = {id(tensor): tensor for tensor in chain(shared, with_graph)}
    memo |= {key: _copied(tensor) for key, tensor in own.items()}
    replica = _copy(module, memo)
    if not _are_shared(module, replica, own):
        raise _not_copyable(module, "its copy would not share its weights")
    return replica


def copied_bytes(module: nn.Module, owned: Collection[Tensor] = ()) -> int:
    """Return the bytes of the tensors that `make_replica` copies."""
    shared = {id(tensor) for tensor in _state(module)} - {id(tensor) for tensor in owned}
    copied = {id(each): each for each in _tensors_of(module) if each.is_leaf and id(each) not in shared}
    return sum(each.nbytes for each in copied.values() if each.layout is torch.strided)


def _are_shared(module: nn.Module, replica: nn.Module, own: Collection[int]) -> bool:
    """Whether a copy has the module's own parameters and buffers, but for those that it owns."""
    pairs = zip(_state(replica), _state(module), strict=True)
    return all(mine is theirs or id(theirs) in own for mine, theirs in pairs)


def _state(module: nn.Module) -> Iterator[Tensor]:
    return chain(module.parameters(), module.buffers())


def make_meta_replica(module: nn.Module) -> nn.Module:
    """Copy a module tree onto the meta device: shapes and dtypes, no data and no memory.

    Tied weights stay tied. Plain tensors in attributes, and in lists and dicts there, go along.

    Raises:
        ServiceError: `MODEL_INVALID`, as `make_replica` does.
    """
    return _copy(module, {id(tensor): _to_meta(tensor) for tensor in _tensors_of(module)})


def make_hosted_copy(module: nn.Module) -> nn.Module:
    """Copy a module tree that the caller continues to use, for hosting.

    Its parameters and buffers are other tensor objects over the same memory: eval mode, gradients
    switched off or another device do not affect the original, while in-place changes of its weights, as by an
    optimiser, are visible here.

    Raises:
        ServiceError: `MODEL_INVALID`, as `make_replica` does.
    """
    shared = {id(tensor) for tensor in chain(module.parameters(), module.buffers())}
    memo = {
        id(tensor): _over_same_memory(tensor)
        for tensor in _tensors_of(module)
        if id(tensor) in shared or not tensor.is_leaf
    }
    return _copy(module, memo)


def make_training_copy(module: nn.Module, trained: Collection[Tensor]) -> nn.Module:
    """Copy a module tree for training a part of it.

    Trained parameters and all buffers have memory of their own; the other parameters are other tensor objects
    over the same memory. Only the trained ones require gradients. Tied tensors stay
    tied.

    Args:
        module: The model; it is left as it is.
        trained: The parameters to train.

    Raises:
        ServiceError: `MODEL_INVALID`, as `make_replica` does.
    """
    owned, buffers = {id(tensor) for tensor in trained}, {id(tensor) for tensor in module.buffers()}
    frozen = {id(tensor) for tensor in module.parameters()}
    memo: dict[int, Tensor] = {}
    for tensor in _tensors_of(module):
        if id(tensor) in owned:
            memo[id(tensor)] = nn.Parameter(tensor.detach().clone())
        elif id(tensor) in buffers:
            memo[id(tensor)] = tensor.detach().clone()
        elif id(tensor) in frozen or not tensor.is_leaf:
            memo[id(tensor)] = _over_same_memory(tensor)
    return _copy(module, memo)


def _copied(tensor: Tensor) -> Tensor:
    copy = tensor.detach().clone()
    return nn.Parameter(copy, requires_grad=False) if isinstance(tensor, nn.Parameter) else copy


def _over_same_memory(tensor: Tensor) -> Tensor:
    bare = tensor.detach()
    return nn.Parameter(bare, requires_grad=False) if isinstance(tensor, nn.Parameter) else bare


def _copy(module: nn.Module, memo: dict[int, Tensor]) -> nn.Module:
    try:
        return copy.deepcopy(module, memo)
    except (TypeError, RuntimeError, NotImplementedError, copy.Error) as error:
        raise _not_copyable(module, str(error)[:300]) from error


def _to_meta(tensor: Tensor) -> Tensor:
    empty = torch.empty_like(tensor, device="meta", requires_grad=False)
    if isinstance(tensor, nn.Parameter):
        return nn.Parameter(empty, requires_grad=tensor.requires_grad)
    return empty


def kept_tensors(module: nn.Module) -> set[int]:
    """Return the identities of a tree's plain tensors, in attributes and in lists and dicts there."""
    state = {id(tensor) for tensor in _state(module)}
    return {id(tensor) for tensor in _tensors_of(module)} - state


def _tensors_of(module: nn.Module) -> Iterator[Tensor]:
    """Yield every tensor of a tree: parameters, buffers, and plain ones in attributes."""
    for part in module.modules():
        yield from _tensors_in(vars(part))


def _tensors_in(value: object) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, dict):
        for item in value.values():
            yield from _tensors_in(item)
    elif isinstance(value, (list, tuple, set)):
        for item in value:
            yield from _tensors_in(item)


def _not_copyable(module: nn.Module, why: str) -> ServiceError:
    return ServiceError(
        ErrorReason.MODEL_INVALID,
        f"a {type(module).__name__} cannot be replicated: {why}; keep locks and files out of the module",
    )
