"""Passes that are recorded for each batch size that comes back, and replayed."""

from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

import torch
from torch import nn

from trocar_server.engines.graphs import GraphApi, Values
from trocar_server.engines.numerics import Numerics
from trocar_server.engines.recipe import Recipe
from trocar_server.surgery import Collector, TapSession

MOST_GRAPHS = 8
"""Batch sizes that are recorded by one runner: each keeps the memory of a whole pass."""

_MOST_COUNTED = 64

_Form = tuple[tuple[torch.Size, torch.dtype], ...]


class Pass(Protocol):
    """What can be recorded."""

    numerics: Numerics

    def run(self, arguments: Sequence[torch.Tensor]) -> Values:
        """Run one pass; the values are by name."""
        ...


class PlainPass:
    """The eager pass itself, on a module tree of its own: the same kernels, so the same bits.

    Args:
        tree: A copy of the model's tree; its weights are shared.
        recipe: What is wanted.
        numerics: What it counts as.
    """

    def __init__(self, tree: nn.Module, recipe: Recipe, numerics: Numerics) -> None:
        self.numerics = numerics
        self._tree = tree
        self._recipe = recipe

    def run(self, arguments: Sequence[torch.Tensor]) -> Values:
        """See `Pass`."""
        collector = Collector()
        with torch.inference_mode(), TapSession(self._tree, self._recipe.targets, collector):
            self._tree(*arguments)
        return {name: collector.values[name] for name in self._recipe.names}


class CannotRecordError(Exception):
    """No form of a pass could be recorded, so nothing is gained."""


class GraphRunner:
    """Replays a pass. Owner thread only.

    A form of arguments is recorded when it comes for the second time, and its recording is used if a replay
    gives bit for bit what the pass itself gives for the arguments that came. All others run as they are.

    Args:
        inner: The pass.
        graphs: Records it.
        most_graphs: How many forms are recorded; the first that come twice.
    """

    engine = "cuda-graph"

    def __init__(self, inner: Pass, graphs: GraphApi, most_graphs: int = MOST_GRAPHS) -> None:
        self.numerics = inner.numerics
        self._inner = inner
        self._graphs = graphs
        self._most_graphs = most_graphs
        self._replays: dict[_Form, _Replay] = {}
        self._seen: set[_Form] = set()
        """Forms that came once."""
        self._refused: set[_Form] = set()
        """Forms that cannot be recorded."""

    @property
    def graph_count(self) -> int:
        """How many forms are recorded."""
        return len(self._replays)

    def run(self, arguments: Sequence[torch.Tensor]) -> Mapping[str, torch.Tensor]:
        """Run one pass; the values are the caller's own.

        Raises:
            CannotRecordError: The first form that came twice cannot be recorded.
        """
        form = tuple((argument.shape, argument.dtype) for argument in arguments)
        with torch.inference_mode():
            replay = self._replays.get(form)
            if replay is None and self._is_due(form):
                replay = self._recorded(form, arguments)
            return self._inner.run(arguments) if replay is None else replay(arguments)

    def _is_due(self, form: _Form) -> bool:
        if form in self._refused or len(self._replays) + len(self._refused) >= self._most_graphs:
            return False
        if form in self._seen:
            return True
        if len(self._seen) >= _MOST_COUNTED:
            self._seen.clear()
        self._seen.add(form)
        return False

    def _recorded(self, form: _Form, arguments: Sequence[torch.Tensor]) -> "_Replay | None":
        """Record a form; None where that cannot be done or its replay is not what the pass gives."""
        problem = "a replay gives other bits"
        try:
            replay = _Replay(self._graphs, self._inner.run, arguments)
            if _same_bits(self._inner.run(_copied(arguments)), replay(arguments)):
                self._replays[form] = replay
                return replay
        except Exception as error:  # noqa: BLE001 - of torch, whatever the model does
            problem = f"{type(error).__name__}: {error}"[:300]
        self._refused.add(form)
        if self._replays:
            return None
        raise CannotRecordError(problem)


class _Replay:
    """One recording, and the memory that its arguments come from."""

    def __init__(
        self,
        graphs: GraphApi,
        run: Callable[[Sequence[torch.Tensor]], Values],
        arguments: Sequence[torch.Tensor],
    ) -> None:
        self._given = _copied(arguments)
        self._graph = graphs.capture(lambda: run(self._given))

    def __call__(self, arguments: Sequence[torch.Tensor]) -> Values:
        for own, given in zip(self._given, arguments, strict=True):
            own.copy_(given)
        self._graph.replay()
        # The next replay writes over these.
        return {name: value.clone() for name, value in self._graph.values.items()}


def _same_bits(expected: Values, found: Values) -> bool:
    return expected.keys() == found.keys() and all(
        value.shape == found[name].shape
        and value.dtype == found[name].dtype
        and torch.equal(_bytes(value), _bytes(found[name]))
        for name, value in expected.items()
    )


def _bytes(value: torch.Tensor) -> torch.Tensor:
    return value.resolve_conj().resolve_neg().contiguous().reshape(-1).view(torch.uint8)


def _copied(arguments: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    return [argument.clone() for argument in arguments]
