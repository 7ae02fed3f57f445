"""Graph tracing: from a model and the wanted values to a graph that computes only those."""

import torch
from torch import nn
from torch.export import Dim, ExportedProgram

from trocar_server.engine.compiled.backends.recipe import Recipe
from trocar_server.surgery import Collector, TapSession

_MOST_ROWS = 65_536
_EXAMPLE_ROWS = 2  # from one row torch.export infers a constant batch size of one


class _TracedModule(nn.Module):
    """A model whose forward returns the values that a recipe wants.

    The pass runs to its end, as torch.export cannot stop early. The graph afterwards has only operations
    that the wanted values depend on.
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
    """Return an equal tensor made by a separate operation.

    OpenVINO refuses graphs in which one tensor has two names, and ignores copies: two taps, or a
    module that returns its input. Its compiler removes this operation again.
    """
    return value.logical_or(value) if value.dtype is torch.bool else value * 1


def trace(model: nn.Module, recipe: Recipe) -> ExportedProgram:
    """Export a pass that computes the wanted values, for any batch size.

    Args:
        model: In eval mode; not changed, but hooked meanwhile.
        recipe: The values wanted.

    Raises:
        Exception: Any error of torch.export on a model that it does not support.
    """
    arguments = tuple(spec.example(_EXAMPLE_ROWS) for spec in recipe.arguments)
    batch = Dim("batch", min=1, max=_MOST_ROWS)
    shapes = {"arguments": tuple({0: batch} for _ in arguments)}
    with torch.no_grad():
        return torch.export.export(
            _TracedModule(model, recipe).eval(), arguments, dynamic_shapes=shapes, strict=False
        )
