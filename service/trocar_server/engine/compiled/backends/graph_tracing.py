"""Graph tracing: from a model and the wanted values to a graph that computes only those.

# Note: [Indices outside of a table]
Eager raises an error for an index outside of a table, such as the id of a word beyond the vocabulary.
OpenVINO (2026.4) returns zeros or another row. So a graph whose model looks rows up has another output, a
number that is not 0 where an index was outside. `OpenVinoRunner` then raises an error itself, and the eager
pass decides. The number is NaN where something was not finite, see Note: [What appears inside a pass]. Where
OpenVINO itself fails, as in `gather`, it may return the values of the pass before if it has one thread:
models that take whole numbers and use such functions are not converted.
"""

import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import nullcontext
from typing import Any

import torch
from torch import nn
from torch.export import Dim, ExportedProgram
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from trocar_server.engine.compiled.backends.not_finite import NotFinite, check_weights
from trocar_server.engine.compiled.backends.recipe import Recipe
from trocar_server.surgery import Collector, TapSession
from trocar_server.surgery.rows.proof import why_mixed, why_other_alone

_MOST_ROWS = 65_536
_EXAMPLE_ROWS = 2  # from one row torch.export infers a constant batch size of one


class _TracedModule(nn.Module):
    """A model whose forward returns the values that a recipe wants, and whether eager has to decide.

    The pass runs to its end, as torch.export cannot stop early. The graph afterwards has only operations
    that the wanted values depend on.
    """

    def __init__(self, model: nn.Module, recipe: Recipe, *, has_doubts: bool) -> None:
        super().__init__()
        self.model = model
        self._recipe, self._has_doubts = recipe, has_doubts

    def forward(self, *arguments: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Run the pass."""
        collector = Collector(ends_pass=False)
        args, kwargs = self._recipe.called(arguments)
        with (
            TapSession(self.model, self._recipe.targets, collector),
            _Doubts(collector, self._recipe) if self._has_doubts else nullcontext() as doubts,
        ):
            self.model(*args, **kwargs)
        values = tuple(_named(collector.values[name]) for name in self._recipe.names)
        return (*values, torch.stack(doubts.all).sum()) if doubts and doubts.all else values


def _named(value: torch.Tensor) -> torch.Tensor:
    """Return an equal tensor made by a separate operation.

    OpenVINO refuses graphs in which one tensor has two names, and ignores copies: two taps, or a
    module that returns its input. Its compiler removes this operation again.
    """
    return value.logical_or(value) if value.dtype is torch.bool else value * 1


class _Doubts(TorchFunctionMode):
    """What may differ from eager until the last wanted value, where an eager pass ends."""

    def __init__(self, collector: Collector, recipe: Recipe) -> None:
        super().__init__()
        self._collector = collector
        self._takes_integers = not all(spec.dtype.is_floating_point for spec in recipe.arguments)
        self._are_outside: list[torch.Tensor] = []
        self._not_finite = NotFinite()

    @property
    def all(self) -> list[torch.Tensor]:
        """Numbers: 1 where an index is outside of its table, NaN where something is not finite, else 0."""
        return [*self._are_outside, *self._not_finite.sums]

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Call the function; note a lookup, and a result that may not be finite.

        Raises:
            ValueError: OpenVINO may fail on the indices; see Note: [Indices outside of a table].
        """
        if func in _FAILING and self._takes_integers:
            raise ValueError(f"OpenVINO may fail on the indices of {func.__name__}")
        given = kwargs or {}
        is_wanted = bool(self._collector.pending)
        lookups = _LOOKUPS.get(func)
        if lookups is not None and is_wanted:
            for indices, least, end in lookups(*args, **given):
                self._are_outside.append(((indices < least) | (indices >= end)).any().float())
        result = func(*args, **given)
        if is_wanted:
            self._not_finite.see(func, args, given, result)
        return result


_Lookup = tuple[torch.Tensor, int, int]
"""Indices, the least valid one, and the one after the last valid one."""


def _of_embedding(input: torch.Tensor, weight: torch.Tensor, *_: Any, **__: Any) -> Iterator[_Lookup]:
    yield input, 0, weight.shape[0]


def _along(input: torch.Tensor, dim: int, index: torch.Tensor, **_: Any) -> Iterator[_Lookup]:
    yield index, 0, input.shape[dim]


def _of_item(table: torch.Tensor, index: Any) -> Iterator[_Lookup]:
    """Yield the integer tensors among the first indices, whose dimensions are known."""
    for dim, part in enumerate(index if isinstance(index, tuple) else (index,)):
        is_tensor = isinstance(part, torch.Tensor)
        if not (isinstance(part, int | slice) or (is_tensor and part.dtype not in (torch.bool, torch.uint8))):
            return
        if is_tensor:
            yield part, -table.shape[dim], table.shape[dim]


_LOOKUPS: Mapping[Any, Callable[..., Iterator[_Lookup]]] = {
    functional.embedding: _of_embedding,
    torch.index_select: _along,
    torch.Tensor.index_select: _along,
    torch.Tensor.__getitem__: _of_item,
}


_FAILING = frozenset(
    {
        functional.embedding_bag,
        torch.embedding_bag,
        torch.gather,
        torch.Tensor.gather,
        torch.take,
        torch.Tensor.take,
        torch.take_along_dim,
        torch.Tensor.take_along_dim,
    }
)


def trace(model: nn.Module, recipe: Recipe) -> ExportedProgram:
    """Export a pass that computes the wanted values, for any batch size.

    Args:
        model: In eval mode; not changed, but hooked meanwhile.
        recipe: The values wanted.

    Returns:
        The program. It may have another output, see Note: [Indices outside of a table].

    Raises:
        ValueError: Some of its weights are not finite.
        Exception: Any error of torch.export on a model that it does not support.
    """
    check_weights(model)
    return _traced(model, recipe, _EXAMPLE_ROWS, has_doubts=True)


def why_rows_mix(model: nn.Module, recipe: Recipe) -> str:
    """Return why rows of the wanted values may depend on each other; empty where it is proved that none does.

    Args:
        model: In eval mode; not changed, but hooked meanwhile.
        recipe: The values wanted.
    """
    programs = []
    for rows in (_EXAMPLE_ROWS, 1):
        try:
            program = _traced(model, recipe, rows, has_doubts=False)
            programs.append(program.run_decompositions({}))  # writes become results, composites stay
        except Exception as error:  # noqa: BLE001 - torch.export raises anything
            return f"the pass cannot be traced for any number of rows: {type(error).__name__}"
    return why_mixed(programs[0]) or why_other_alone(*programs)


def _traced(model: nn.Module, recipe: Recipe, rows: int, *, has_doubts: bool) -> ExportedProgram:
    """Export a pass, for any number of rows from an example with several, else for one."""
    arguments = tuple(spec.example(rows) for spec in recipe.arguments)
    batch = Dim("batch", min=1, max=_MOST_ROWS)
    shapes = {"arguments": tuple({0: batch} for _ in arguments)} if rows > 1 else None
    module = _TracedModule(model, recipe, has_doubts=has_doubts).eval()
    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return torch.export.export(module, arguments, dynamic_shapes=shapes, strict=False)
