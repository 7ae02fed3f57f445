"""Train and eval modes of a trainer's modules.

    set_modes(model, {"fc.weight", "fc.bias"}, train_mode=())

# Note: [Modes of a trainer]
The model itself and every module with a trained parameter inside are in train mode. A module without
parameters (a dropout, a stochastic depth) has the mode of its parent; all others are in eval mode. A batch
norm, or any module with running statistics, is in eval mode if its own parameters are frozen; without
parameters it follows its parent, unless that contains a frozen parameter. `train_mode` then switches modules,
with their submodules, to train mode.
"""

from collections.abc import Collection, Mapping, Sequence

from torch import nn

from trocar_server.training.model.trained_parameters import select_modules


def set_modes(
    module: nn.Module,
    trainable: Collection[str],
    train_mode: Sequence[str] = (),
    stages: Mapping[str, str] | None = None,
) -> None:
    """Put each module of a tree in train or eval mode. See Note: [Modes of a trainer].

    Args:
        module: The trainer's module tree.
        trainable: Names of the trained parameters, as in `named_parameters`.
        train_mode: Selectors of modules to put in train mode regardless.
        stages: Selectors by stage name.

    Raises:
        ServiceError: `UNKNOWN_MODULE` or `INVALID_SELECTOR`, for a selector of `train_mode`.
    """
    chosen = select_modules(module, train_mode, "train_mode", stages or {})
    names = frozenset(trainable)
    trained = {id(p) for name, p in module.named_parameters(remove_duplicate=False) if name in names}
    _set(module, parent=True, is_root=True, parent_is_whole=_is_whole(module, trained), trained=trained)
    for path in chosen:
        for part in module.get_submodule(path).modules():
            part.training = True


def has_running_statistics(module: nn.Module) -> bool:
    """Whether a module keeps running statistics of its inputs, as batch norms do."""
    return any(module._buffers.get(name) is not None for name in ("running_mean", "running_var"))


def _set(
    module: nn.Module, *, parent: bool, parent_is_whole: bool, trained: Collection[int], is_root: bool = False
) -> None:
    # Not `train(mode)`: some modules override it and change their weights in it.
    inside = [id(parameter) for parameter in module.parameters()]
    if has_running_statistics(module) and not is_root:
        own = [id(parameter) for parameter in module.parameters(recurse=False)]
        mode = any(key in trained for key in own) if own else parent and parent_is_whole
    elif not inside:
        mode = parent
    else:
        mode = is_root or any(key in trained for key in inside)
    module.training = mode
    is_whole = _is_whole(module, trained) if inside else parent_is_whole
    for child in module.children():
        _set(child, parent=mode, parent_is_whole=is_whole, trained=trained)


def _is_whole(module: nn.Module, trained: Collection[int]) -> bool:
    return all(id(parameter) in trained for parameter in module.parameters())
