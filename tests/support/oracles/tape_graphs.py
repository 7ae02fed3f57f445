"""Graphs on a CPU: operators of torch are recorded with the memory that they read and write, and run again.

It promises what `GraphApi` says and no more. A replay runs no Python of the model and no hook; it reads the
arguments where they were when the pass was recorded, and writes over the values of the replay before. A look
at a value cannot be recorded, as on a GPU. Before the first replay the values are rubbish.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from trocar_server.engine.compiled.backends.graphs import Graph, Values

_Step = tuple[Callable[..., Any], Sequence[Any], Mapping[str, Any], list[torch.Tensor]]


class _Tape(TorchDispatchMode):
    """Records every operator that runs inside the context."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.steps: list[_Step] = []

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        found = func(*args, **(kwargs or {}))
        if isinstance(found, bool | int | float | complex) and _tensors((args, kwargs)):
            raise RuntimeError("operation not permitted when stream is capturing")
        if results := _tensors(found):  # else about dtypes alone
            self.steps.append((func, args, kwargs or {}, results))
        return found

    def replay(self) -> None:
        with torch.inference_mode():
            for func, args, kwargs, results in self.steps:
                for result, again in zip(results, _tensors(func(*args, **kwargs)), strict=True):
                    if again.data_ptr() != result.data_ptr():  # else a view, or written in place
                        result.copy_(again)


@dataclass
class TapeGraphs:
    """See the module.

    Attributes:
        problem: Why nothing can be recorded; empty where it can.
        is_wrong: Whether replays change a bit.
        capture_count: Recordings asked for.
        replay_count: Replays of all recordings.
    """

    problem: str = ""
    is_wrong: bool = False
    capture_count: int = 0
    replay_count: int = 0

    def capture(self, run: Callable[[], Values]) -> Graph:
        self.capture_count += 1
        if self.problem:
            raise RuntimeError(self.problem)
        run()
        with _Tape() as tape:
            values = run()
        for _, args, kwargs, results in tape.steps:
            _spoil(results, _tensors((args, dict(kwargs))))

        def replay() -> None:
            self.replay_count += 1
            tape.replay()
            if self.is_wrong:
                _bytes_of(next(iter(values.values())))[:1] ^= 1

        return Graph(replay, values)


def _tensors(found: Any) -> list[torch.Tensor]:
    return [leaf for leaf in tree_leaves(found) if isinstance(leaf, torch.Tensor)]


def _spoil(results: Sequence[torch.Tensor], given: Sequence[torch.Tensor]) -> None:
    """Write over what an operator made, unless it is memory that it was given: weights are among that."""
    taken = {value.untyped_storage().data_ptr() for value in given}
    for result in results:
        if result.untyped_storage().data_ptr() not in taken:
            result.fill_(True if result.dtype == torch.bool else 77)


def _bytes_of(value: torch.Tensor) -> torch.Tensor:
    return value.view(-1).view(torch.uint8)
