"""Recipe of a compiled variant: values of one pass of one model, for any batch size."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from trocar_server.surgery import Target


@dataclass(frozen=True)
class ArgumentSpec:
    """One positional argument: its dtype and its shape without the batch dimension."""

    dtype: torch.dtype
    row_shape: tuple[int, ...]

    def example(self, batch: int) -> torch.Tensor:
        """Return a seeded argument of this shape and dtype."""
        shape = (batch, *self.row_shape)
        if not self.dtype.is_floating_point:
            return torch.zeros(shape, dtype=self.dtype)
        return torch.rand(shape, generator=torch.Generator().manual_seed(0)).to(self.dtype)


@dataclass(frozen=True)
class Recipe:
    """The values that a compiled variant computes.

    Attributes:
        arguments: The positional arguments of the forward.
        targets: The values wanted: of calls of modules, no gradients and no parameters.
    """

    arguments: tuple[ArgumentSpec, ...]
    targets: tuple[Target, ...]

    @property
    def names(self) -> tuple[str, ...]:
        """The names of the values, in the order in which a compiled variant returns them."""
        return tuple(target.name for target in self.targets)


def copied(arguments: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Return copies of arguments, into which a pass may write."""
    return [argument.clone() for argument in arguments]


def is_compilable(targets: Sequence[Target]) -> bool:
    """Whether a compiled variant can compute the values: only outputs and inputs of module calls."""
    return bool(targets) and all(
        target.kind == "module" and target.parameter is None and not target.is_gradient for target in targets
    )
