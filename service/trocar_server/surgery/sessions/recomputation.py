"""Recomputation: a model's own activation checkpointing, off while a pass with gradients runs its forward.

    with without_recomputation():
        model(batch)

# Note: [Recomputation and hooks]
`torch.utils.checkpoint` runs a part of the model again in the backward pass. Hooks and edited parameters are
removed by then, and calls are counted on: the derivatives would be those of the pass without edits, and
nothing would tell. With use_reentrant=True the part has no graph before. So that part keeps its values
instead, as any other does. Models import `checkpoint` by name; it looks up in its module, in each call, its
generator or, with use_reentrant=True, its function of autograd: these are replaced.
"""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache, wraps
from typing import Any

import torch
import torch.utils.checkpoint

_GENERATORS = (
    "_checkpoint_without_reentrant_generator_impl",  # torch 2.14
    "_checkpoint_without_reentrant_generator",  # torch 2.10 to 2.13
)


class _Thread(threading.local):
    is_off = False
    """Whether checkpointing is off in this thread; another one may be training meanwhile."""


_THREAD = _Thread()


@contextmanager
def without_recomputation() -> Iterator[None]:
    """Let checkpointed parts of a model run as others do, in this thread.

    See Note: [Recomputation and hooks].

    Raises:
        RuntimeError: In the forward pass: it has a checkpointed part, and this torch has another generator.
    """
    if not _install():
        refused = "this PyTorch would recompute checkpointed parts without edits; switch checkpointing off"
        with torch.autograd.graph.disable_saved_tensors_hooks(refused):
            yield
        return
    before, _THREAD.is_off = _THREAD.is_off, True
    try:
        yield
    finally:
        _THREAD.is_off = before


@cache
def _install() -> bool:
    """Make torch's two kinds of checkpointing switchable, for good; returns whether there are generators."""
    module = torch.utils.checkpoint
    reentrant: Any = module.CheckpointFunction
    reentrant.apply = staticmethod(_switchable_apply(reentrant.apply))
    names = [name for name in _GENERATORS if hasattr(module, name)]
    for name in names:
        setattr(module, name, _switchable(getattr(module, name)))
    return bool(names)


def _switchable(generator: Callable[..., Iterator[None]]) -> Callable[..., Iterator[None]]:
    @wraps(generator)
    def made(*args: Any, **kwargs: Any) -> Iterator[None]:
        return _nothing() if _THREAD.is_off else generator(*args, **kwargs)

    return made


def _switchable_apply(apply: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(apply)
    def made(function: Callable[..., Any], preserves_rng_state: bool, *args: Any) -> Any:
        return function(*args) if _THREAD.is_off else apply(function, preserves_rng_state, *args)

    return made


def _nothing() -> Iterator[None]:
    yield
