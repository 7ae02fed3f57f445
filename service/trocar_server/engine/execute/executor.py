"""Executor: computes the values of passes. Every rule of a pass is the runner's, see `engine.run.runner`."""

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from trocar_server.engine.execute.collecting import Arguments, Collected, PassSpec
from trocar_server.engine.request.numerics import Numerics
from trocar_server.surgery import PassGuard


class NotFiniteError(Exception):
    """A number inside a pass was not finite: the eager pass decides what becomes of it."""


@dataclass(frozen=True)
class ReadyCall:
    """A call whose pass can be executed.

    Attributes:
        arguments: Of the forward. The pass may write to them.
        pass_spec: Values, edits and objective.
        guard: Stops the pass. An executor hands it to the sessions that attach it, and asks it nothing.
        is_inference: Whether the pass runs in inference mode; see Note: [Inference mode] in
            `surgery.kept_tensors`.
        tensors: The arguments one after the other, in the order of the request: tensors, or lists of them.
        operands: The tensors of each edit, in the order of the request, in host memory.
        lent: The names of values that nobody reads once the next pass runs.
    """

    arguments: Arguments
    pass_spec: PassSpec
    guard: PassGuard
    is_inference: bool = True
    tensors: Sequence[Any] = ()
    operands: Sequence[Sequence[torch.Tensor]] = ()
    lent: Collection[str] = ()


class Executor(Protocol):
    """Computes values of passes on the owner thread.

    It knows tensors, values and edits; no limit, no padding, no reply, and no error but its own.
    """

    @property
    def engine(self) -> str:
        """The name of the backend."""
        ...

    @property
    def numerics(self) -> Numerics:
        """The numerics of its values."""
        ...

    def run(self, calls: Sequence[ReadyCall]) -> Sequence[Collected]:
        """Run passes, together where it can.

        Raises:
            NotFiniteError: A number inside a pass was not finite.
            Exception: Any error of the model or the backend.
        """
        ...
