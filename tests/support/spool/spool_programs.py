"""Random programs over autograd, run plainly and with a spool: both must come to the same, bit by bit.

A program makes tensors, views and changes in place, keeps several graphs, runs them backward in any order,
once, twice, to the second order, in other threads, drops them, and fails now and then. It draws all it does
from one seed, so that it does the same as long as it sees the same.
"""

import gc
import random
import threading
from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack, nullcontext
from typing import Any

import torch

from tests.support.spool.spool_operations import BINARY, IN_PLACE, UNARY, VIEWS

Contexts = list[Callable[[], AbstractContextManager[Any]]]
"""Ways to save tensors that a program may enter, one within the other."""

Events = list[tuple[str, list[torch.Tensor]]]

PLAIN: Contexts = [nullcontext] * 3

_SHAPES = ((8,), (40,), (6, 8), (3, 4, 4), (30, 10), (2, 5, 7), (1,), (16, 16))
_DTYPES = (torch.float32, torch.float32, torch.float64, torch.complex64)
_MOST_TENSORS = 10
_STEPS = {
    "leaf": 2,
    "unary": 8,
    "binary": 5,
    "view": 7,
    "in_place": 2,
    "backward": 4,
    "grad": 2,
    "read_saved": 2,
    "drop": 3,
    "enter": 2,
    "leave": 1,
    "collect": 0.02,
}


class Program:
    """One run of a program.

    Args:
        seed: Says what it does.
        contexts: What it may enter; as many as in the run that it is compared with.
        step_count: How long it is.
    """

    def __init__(self, seed: int, contexts: Contexts, step_count: int = 40) -> None:
        self.events: Events = []
        self._random = random.Random(seed)
        self._numbers = torch.Generator().manual_seed(seed)
        self._contexts = contexts
        self._step_count = step_count
        self._tensors: list[torch.Tensor] = []
        self._leaves: list[torch.Tensor] = []

    def run(self) -> Events:
        """Run it; returns what came of it."""
        entered: list[ExitStack] = []
        names, weights = list(_STEPS), list(_STEPS.values())
        try:
            self._leaf()
            entered.append(ExitStack())
            entered[0].enter_context(self._contexts[0]())
            for _ in range(self._step_count):
                name = self._random.choices(names, weights)[0]
                self._note(name)
                step = getattr(self, f"_{name}")
                self._attempt(lambda: step(entered) if name in ("enter", "leave") else step())  # noqa: B023
        finally:
            while entered:
                entered.pop().close()
        self._note("leaves", *self._leaves)
        self._tensors.clear()
        self._leaves.clear()
        return self.events

    # --- Steps ------------------------------------------------------------------------------------

    def _enter(self, entered: list[ExitStack]) -> None:
        if len(entered) < 3:
            stack = ExitStack()
            stack.enter_context(self._random.choice(self._contexts)())
            entered.append(stack)

    def _leave(self, entered: list[ExitStack]) -> None:
        if entered:
            entered.pop().close()

    def _leaf(self) -> None:
        shape, dtype = self._random.choice(_SHAPES), self._random.choice(_DTYPES)
        leaf = torch.randn(shape, dtype=dtype, generator=self._numbers)
        if self._random.random() < 0.7:
            leaf.requires_grad_()
            self._leaves = [*self._leaves, leaf][-6:]
        self._keep(leaf)

    def _unary(self) -> None:
        name = self._random.choice(list(UNARY))
        self._keep(UNARY[name](self._any()), name)

    def _binary(self) -> None:
        name = self._random.choice(list(BINARY))
        self._keep(BINARY[name](self._any(), self._any()), name)

    def _view(self) -> None:
        name = self._random.choice(list(VIEWS))
        self._keep(VIEWS[name](self._random, self._any()), name)

    def _in_place(self) -> None:
        name = self._random.choice(list(IN_PLACE))
        target = self._any()
        if self._random.random() < 0.5:
            target = VIEWS[self._random.choice(list(VIEWS))](self._random, target)
        is_silent = self._random.random() < 0.5
        self._note(name)
        with torch.no_grad() if is_silent else nullcontext():
            IN_PLACE[name](target)

    def _backward(self) -> None:
        total, keeps = self._total(), self._random.random() < 0.5
        self._perhaps_elsewhere(lambda: total.backward(retain_graph=keeps))
        self._note("gradients", *[leaf.grad for leaf in self._leaves if leaf.grad is not None])

    def _grad(self) -> None:
        total, goes_on = self._total(), self._random.random() < 0.5
        found: list[torch.Tensor | None] = []
        self._perhaps_elsewhere(
            lambda: found.extend(
                torch.autograd.grad(total, self._leaves, create_graph=goes_on, allow_unused=True)
            )
        )
        gradients = [gradient for gradient in found if gradient is not None]
        self._note("gradients", *gradients)
        if goes_on and gradients:
            self._keep(self._random.choice(gradients))

    def _read_saved(self) -> None:
        node = self._any().grad_fn
        for name in sorted(entry for entry in dir(node) if entry.startswith("_saved_")):
            first, second = getattr(node, name), getattr(node, name)
            if isinstance(first, torch.Tensor) and isinstance(second, torch.Tensor):
                self._note(name, first, second)
                assert (first.stride(), second.is_conj()) == (second.stride(), first.is_conj())

    def _drop(self) -> None:
        if len(self._tensors) > 2:
            self._tensors.pop(self._random.randrange(len(self._tensors)))

    def _collect(self) -> None:
        gc.collect()

    # --- Within -----------------------------------------------------------------------------------

    def _any(self) -> torch.Tensor:
        return self._random.choice(self._tensors)

    def _total(self) -> torch.Tensor:
        chosen = [tensor for tensor in self._tensors if tensor.requires_grad]
        tensor = self._random.choice(chosen or self._tensors)
        return (tensor.real if tensor.is_complex() else tensor).sum()

    def _keep(self, tensor: torch.Tensor, name: str = "leaf") -> None:
        self._tensors.append(tensor)
        self._note(f"{name} {tuple(tensor.shape)} {tensor.stride()} {tensor.dtype}", tensor)
        if len(self._tensors) > _MOST_TENSORS:
            self._tensors.pop(self._random.randrange(_MOST_TENSORS))

    def _note(self, name: str, *tensors: torch.Tensor) -> None:
        self.events.append((name, [tensor.detach().clone() for tensor in tensors]))

    def _perhaps_elsewhere(self, work: Callable[[], object]) -> None:
        if self._random.random() < 0.7:
            work()
            return
        errors: list[BaseException] = []

        def guarded() -> None:
            try:
                work()
            except BaseException as error:  # noqa: BLE001 - raised in the thread that waits
                errors.append(error)

        thread = threading.Thread(target=guarded)
        thread.start()
        thread.join()
        if errors:
            raise errors.pop()

    def _attempt(self, step: Callable[[], object]) -> None:
        try:
            step()
        except Exception as error:  # noqa: BLE001 - must be the same in both runs
            self._note(_kind_of(error))


def difference(plain: Events, spooled: Events) -> str | None:
    """Say where two runs part; None where they are the same."""
    for index, ((name, tensors), (other_name, others)) in enumerate(zip(plain, spooled, strict=False)):
        if name != other_name:
            return f"event {index}: plainly {name}, with a spool {other_name}"
        if len(tensors) != len(others) or not all(map(_same, tensors, others)):
            return f"event {index}, {name}: other values with a spool"
    return None if len(plain) == len(spooled) else f"{len(plain)} events plainly, {len(spooled)} with a spool"


def _same(one: torch.Tensor, other: torch.Tensor) -> bool:
    if one.shape != other.shape or one.dtype != other.dtype or one.stride() != other.stride():
        return False
    if one.is_complex():
        one, other = torch.view_as_real(one.resolve_conj()), torch.view_as_real(other.resolve_conj())
    return bool(((one == other) | (one.isnan() & other.isnan())).all())


def _kind_of(error: Exception) -> str:
    # Of a view whose base was changed torch may say so while it looks for the words of its first message.
    if "modified by an inplace operation" in str(error) or "has been modified inplace" in str(error):
        return "changed in place"
    return f"{type(error).__name__}: {str(error)[:60]}"
