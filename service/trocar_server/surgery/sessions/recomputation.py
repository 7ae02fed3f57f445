"""Recomputation: a model's own activation checkpointing, in a pass with hooks.

    with without_recomputation():
        model(batch)

    with RecomputationInGraph(replay):
        model(batch).sum().backward()

# Note: [Recomputation and hooks]
`torch.utils.checkpoint` runs a part of the model again in the backward pass. What sessions attach belongs to
the first forward: hooks on modules count its calls, hooks on tensors belong to its graph, and edited
parameters may be back by then. With use_reentrant=True the first forward has no graph at all: hooks on
tensors are refused or have no effect, and values inside have no gradient. So

- where hooks and edits are removed before the backward pass, the part keeps its values, as any other does;
- where they stay, as in a training step, the part is computed again, but for its saved tensors only, as torch
  does with use_reentrant=False: its graph is that of the first forward, with everything attached to it.
  Edits are made once more, as the saved tensors are those of edited values.

Models import `checkpoint` by name; it looks up in its module, in each call, its generator or, with
use_reentrant=True, its function of autograd: these are replaced. A recomputation may run in a thread of
autograd (on a GPU), so it brings its settings with it.
"""

import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import cache, wraps
from typing import Any, TypeAlias

import torch
import torch.utils.checkpoint

Replay: TypeAlias = Callable[[Callable[..., Any]], Callable[[], AbstractContextManager[None]]]
"""Takes a checkpointed function before its first forward; returns the context of each recomputation of it."""

_GENERATORS = (
    "_checkpoint_without_reentrant_generator_impl",  # torch 2.14
    "_checkpoint_without_reentrant_generator",  # torch 2.10 to 2.13
)


class _Thread(threading.local):
    is_off = False
    """Whether checkpointing is off in this thread; another one may be training meanwhile."""
    replay: Replay | None = None
    """The contexts of recomputations in the first forward's graph; None for checkpointing as in torch."""
    is_again = False
    """Whether this thread runs a recomputation."""


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
    outer = _THREAD.is_off, _THREAD.replay
    _THREAD.is_off, _THREAD.replay = True, None
    try:
        yield
    finally:
        _THREAD.is_off, _THREAD.replay = outer


class RecomputationInGraph:
    """A context in which checkpointed parts are recomputed for their saved tensors only, in this thread.

    Of a forward pass inside the context, gradients and hooks on tensors are those of the same pass without
    checkpointing, and as much memory is saved. The backward pass may run after the context, which may be
    entered again and again, not inside itself.

    Args:
        replay: Gives the contexts of recomputations, which restore what the first forward has written.
    """

    def __init__(self, replay: Replay) -> None:
        _install()
        self._replay = replay
        self._outer: tuple[bool, Replay | None] = (False, None)

    def __enter__(self) -> None:
        self._outer = _THREAD.is_off, _THREAD.replay
        _THREAD.is_off, _THREAD.replay = False, self._replay

    def __exit__(self, *_: object) -> None:
        _THREAD.is_off, _THREAD.replay = self._outer


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
    def made(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Iterator[None]:
        if _THREAD.is_off:
            return _nothing()
        if _THREAD.replay is not None and torch.is_grad_enabled():
            function = _replayed(function, _THREAD.replay)
        return generator(function, *args, **kwargs)

    return made


def _switchable_apply(apply: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(apply)
    def made(function: Callable[..., Any], preserves_rng_state: bool, *args: Any) -> Any:
        if _THREAD.is_off:
            return function(*args)
        if _THREAD.replay is not None and torch.is_grad_enabled():
            return torch.utils.checkpoint.checkpoint(
                function, *args, use_reentrant=False, preserve_rng_state=preserves_rng_state
            )
        return apply(function, preserves_rng_state, *args)

    return made


def _replayed(function: Callable[..., Any], replay: Replay) -> Callable[..., Any]:
    """Return what torch calls for the recomputation; for the first forward it calls the function itself."""
    context = replay(function)

    def again(*args: Any, **kwargs: Any) -> Any:
        with context(), _again(), RecomputationInGraph(replay):
            return function(*args, **kwargs)

    return again


@contextmanager
def _again() -> Iterator[None]:
    outer, _THREAD.is_again = _THREAD.is_again, True
    try:
        yield
    finally:
        _THREAD.is_again = outer


def is_recomputing() -> bool:
    """Return whether a checkpointed part runs again in this thread, for the graph of its first forward."""
    return _THREAD.is_again


def _nothing() -> Iterator[None]:
    yield
