"""Edits and gradients by hand: plain torch hooks on a rebuilt model, none of our code.

    values = run(model, (x,), {"layer1": lambda value: value * 2}, keep=["layer2", "fc"])

A place is written `path`, `path@call`, `path/in` or `path@call/in`; what is kept is kept after the change.
"""

import copy
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import nn

Change = Callable[..., Any]


def plain(model: Any) -> Any:
    """Return a copy whose modules do not work in place, so that hooks keep what they saw."""
    found = copy.deepcopy(model)
    for module in found.modules():
        if isinstance(getattr(module, "inplace", None), bool):
            module.inplace = False
    return found


def run(
    model: nn.Module,
    arguments: Sequence[Any],
    changes: Mapping[str, Change] | None = None,
    keep: Iterable[str] = (),
    **keywords: Any,
) -> dict[str, torch.Tensor]:
    """Run a copy of a model with changes at places, and return values and the output, as `/out`.

    Args:
        model: As hosted.
        arguments: Positional.
        changes: What the first positional input, or the whole output, becomes, by place. A change with two
            parameters gets the first positional input of the call, too.
        keep: Places whose values are wanted.
        keywords: Of the forward.
    """
    model, kept = plain(model), dict[str, torch.Tensor]()
    changes = changes or {}
    keep = set(keep)
    for path in {_path(place) for place in (*changes, *keep)}:
        _watch(model.get_submodule(path), path, changes, keep, kept)
    output = model(*arguments, **keywords)
    return {**kept, "/out": output}


def gradients(
    model: nn.Module,
    arguments: Sequence[torch.Tensor],
    objective: Callable[[dict[str, Any]], torch.Tensor],
    at: Sequence[str],
    changes: Mapping[str, Change] | None = None,
) -> dict[str, torch.Tensor]:
    """Return the gradients of an objective of the kept values with respect to places, the input as `/in`."""
    inputs = [tensor.clone().requires_grad_(tensor.is_floating_point()) for tensor in arguments]
    places = [place for place in at if place != "/in"]
    kept = run(model, inputs, changes, places)
    wanted = [inputs[0] if place == "/in" else kept[place] for place in at]
    return dict(zip(at, torch.autograd.grad(objective(kept), wanted), strict=True))


def _path(place: str) -> str:
    return place.partition("/")[0].partition("@")[0]


def _watch(
    module: nn.Module, path: str, changes: Mapping[str, Change], keep: set[str], kept: dict[str, Any]
) -> None:
    calls: list[Any] = []

    def names(port: str) -> list[str]:
        found = [f"{path}@{len(calls) - 1}{port}"]
        return [*found, f"{path}{port}"] if len(calls) == 1 else found

    def before(_: nn.Module, args: Any, keywords: Any) -> Any:
        first: Any = args[0] if args else None
        calls.append(first)
        for name in names("/in"):
            first = changes[name](first) if name in changes else first
            if name in keep:
                kept[name] = first = first.view_as(first)
        calls[-1] = first
        return ((first, *args[1:]) if args else args), keywords

    def after(_: nn.Module, __: Any, output: Any) -> Any:
        for name in names(""):
            if name in changes:
                wants_input = changes[name].__code__.co_argcount == 2
                output = changes[name](output, calls[-1]) if wants_input else changes[name](output)
            if name in keep:
                kept[name] = output
        return output

    module.register_forward_pre_hook(before, with_kwargs=True)
    module.register_forward_hook(after)
