"""What another engine is built for: values of one pass of one model, for any batch size."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from trocar_server.surgery import Target


@dataclass(frozen=True)
class ArgumentForm:
    """One positional argument: its dtype and its shape without the batch dimension."""

    dtype: torch.dtype
    row_shape: tuple[int, ...]

    def example(self, batch: int) -> torch.Tensor:
        """Return an argument of this form, seeded."""
        shape = (batch, *self.row_shape)
        if not self.dtype.is_floating_point:
            return torch.zeros(shape, dtype=self.dtype)
        return torch.rand(shape, generator=torch.Generator().manual_seed(0)).to(self.dtype)


@dataclass(frozen=True)
class Recipe:
    """What a compiled form of a model computes.

    Attributes:
        arguments: The positional arguments of the forward.
        targets: The values wanted: of calls of modules, no gradients and no parameters.
    """

    arguments: tuple[ArgumentForm, ...]
    targets: tuple[Target, ...]

    @property
    def names(self) -> tuple[str, ...]:
        """The names of the values, in the order in which a compiled form returns them."""
        return tuple(target.name for target in self.targets)


def is_compilable(targets: Sequence[Target]) -> bool:
    """Whether values can come from anything but the eager modules: outputs and inputs of calls of modules."""
    return bool(targets) and all(
        target.kind == "module" and target.parameter is None and not target.is_gradient for target in targets
    )
