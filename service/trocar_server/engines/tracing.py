"""From a model and what is wanted of its pass to a graph that computes just that."""

import torch
from torch import nn
from torch.export import Dim, ExportedProgram

from trocar_server.engines.recipe import Recipe
from trocar_server.surgery import Collector, TapSession

_MOST_ROWS = 65_536
_EXAMPLE_ROWS = 2  # of one row torch.export concludes that there is never more than one


class Tapped(nn.Module):
    """A model whose forward returns the values that a recipe wants.

    The pass runs to its end, as torch.export cannot be stopped on the way; what nothing wanted depends on
    is not in the graph afterwards.
    """

    def __init__(self, model: nn.Module, recipe: Recipe) -> None:
        super().__init__()
        self.model = model
        self._recipe = recipe

    def forward(self, *arguments: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Run the pass."""
        collector = Collector(ends_pass=False)
        with TapSession(self.model, self._recipe.targets, collector):
            self.model(*arguments)
        return tuple(_named(collector.values[name]) for name in self._recipe.names)


def _named(value: torch.Tensor) -> torch.Tensor:
    """Return an equal tensor made by an operation of its own.

    OpenVINO refuses graphs in which one tensor has two names, and a copy counts as none: two taps, or a
    module that returns what it was given. Its compiler removes this again.
    """
    return value.logical_or(value) if value.dtype is torch.bool else value * 1


def trace(model: nn.Module, recipe: Recipe) -> ExportedProgram:
    """Record what a pass computes, for any batch size.

    Args:
        model: In eval mode; not changed, but hooked for the moment.
        recipe: What is wanted.

    Raises:
        Exception: Whatever torch.export says of a model that it cannot follow.
    """
    arguments = tuple(form.example(_EXAMPLE_ROWS) for form in recipe.arguments)
    batch = Dim("batch", min=1, max=_MOST_ROWS)
    shapes = {"arguments": tuple({0: batch} for _ in arguments)}
    with torch.no_grad():
        return torch.export.export(
            Tapped(model, recipe).eval(), arguments, dynamic_shapes=shapes, strict=False
        )
