"""Graph runner: passes recorded for each recurring batch size, and replayed."""

from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Protocol

import torch
from torch import nn

from trocar_server.engine.compiled.backends.graphs import GraphApi, Values
from trocar_server.engine.compiled.backends.recipe import Recipe, copied
from trocar_server.engine.request.numerics import Numerics
from trocar_server.engine.schedule.device_memory import is_out_of_memory
from trocar_server.engine.schedule.lease import Replica
from trocar_server.models import Pristine
from trocar_server.surgery import Collector, operate
from trocar_server.tensors.bits import same_bits

MOST_GRAPHS = 8
"""The most batch sizes that one runner records: each keeps the memory of a full pass."""

_MOST_COUNTED = 64
_MOST_SHORTAGES = 3

_Signature = tuple[tuple[torch.Size, torch.dtype], ...]


class CannotRecordError(Exception):
    """No signature of a pass could be recorded, so there is no gain."""


class Pass(Protocol):
    """A pass that can be recorded."""

    numerics: Numerics

    def run(self, arguments: Sequence[torch.Tensor]) -> Values:
        """Run one pass; returns its values by name."""
        ...


class PlainPass:
    """The eager pass on its own module tree, with its edits: the same kernels, so the same bits.

    Args:
        tree: A copy of the model's tree; its weights are shared.
        recipe: The values wanted, and the edits.
        numerics: The numerics that it is reported as.
    """

    def __init__(self, tree: nn.Module, recipe: Recipe, numerics: Numerics) -> None:
        self.numerics = numerics
        self._replica = Replica(Pristine(tree))
        self._recipe = recipe

    def run(self, arguments: Sequence[torch.Tensor]) -> Values:
        """See `Pass`."""
        recipe, collector = self._recipe, Collector()
        inputs, surgery = recipe.bound(arguments)
        (args, kwargs), passing = recipe.called(inputs), self._replica.passing()
        with passing as tree, torch.inference_mode(), operate(tree, surgery, recipe.targets, collector):
            tree(*args, **kwargs)
        if missing := recipe.edited - collector.edited:
            raise CannotRecordError(f"the pass ended before the edit of '{min(missing)}'")
        return {name: collector.values[name] for name in recipe.names}


class GraphRunner:
    """Replays a pass. Owner thread only.

    An argument signature is recorded on its second call. The recording is used if a replay is bit-equal to
    the pass itself on those arguments. All other calls run the pass directly.

    Args:
        inner: The pass.
        graphs: Records it.
        most_graphs: The most signatures recorded; the first that come twice.
    """

    engine = "cuda-graph"

    def __init__(self, inner: Pass, graphs: GraphApi, most_graphs: int = MOST_GRAPHS) -> None:
        self.numerics = inner.numerics
        self._inner = inner
        self._graphs = graphs
        self._most_graphs = most_graphs
        self._replays: dict[_Signature, _Replay] = {}
        self._seen: set[_Signature] = set()
        """Signatures seen once."""
        self._refused: set[_Signature] = set()
        """Signatures that cannot be recorded."""
        self._shortages: Counter[_Signature] = Counter()
        """Recordings for which there was too little memory."""

    @property
    def graph_count(self) -> int:
        """Number of recorded signatures."""
        return len(self._replays)

    def run(
        self, arguments: Sequence[torch.Tensor], lent: Collection[str] = ()
    ) -> Mapping[str, torch.Tensor]:
        """Run one pass; the values are the caller's own, except those that are lent until the next pass.

        Raises:
            CannotRecordError: The first signature that came twice cannot be recorded.
            Exception: Too little memory; a later run may have it.
        """
        signature = tuple((argument.shape, argument.dtype) for argument in arguments)
        with torch.inference_mode():
            replay = self._replays.get(signature)
            if replay is None and self._is_due(signature):
                replay = self._recorded(signature, arguments)
            return self._inner.run(arguments) if replay is None else replay(arguments, lent)

    def _is_due(self, signature: _Signature) -> bool:
        if signature in self._refused or len(self._replays) + len(self._refused) >= self._most_graphs:
            return False
        if signature in self._seen:
            return True
        if len(self._seen) >= _MOST_COUNTED:
            self._seen.clear()
        self._seen.add(signature)
        return False

    def _recorded(self, signature: _Signature, arguments: Sequence[torch.Tensor]) -> "_Replay | None":
        """Record a signature; None where that fails or the replay differs from the pass.

        Too little memory is raised the first times, and the signature is as if it had not come yet.
        """
        problem = "a replay of the CUDA graph returns other values"
        try:
            replay = _Replay(self._graphs, self._inner.run, arguments)
            if _same_bits(self._inner.run(copied(arguments)), replay(arguments)):
                self._replays[signature] = replay
                return replay
        except Exception as error:
            if is_out_of_memory(error):
                self._shortages[signature] += 1
                if self._shortages[signature] < _MOST_SHORTAGES:
                    self._seen.discard(signature)
                    raise
            problem = f"{type(error).__name__}: {error}"[:300]
        self._refused.add(signature)
        if self._replays:
            return None
        raise CannotRecordError(problem)


class _Replay:
    """One recording, and the memory that it reads its arguments from."""

    def __init__(
        self,
        graphs: GraphApi,
        run: Callable[[Sequence[torch.Tensor]], Values],
        arguments: Sequence[torch.Tensor],
    ) -> None:
        self._given = copied(arguments)
        self._graph = graphs.capture(lambda: run(self._given))

    def __call__(self, arguments: Sequence[torch.Tensor], lent: Collection[str] = ()) -> Values:
        for own, given in zip(self._given, arguments, strict=True):
            own.copy_(given)
        self._graph.replay()
        # The next replay overwrites these.
        result = self._graph.values.items()
        return {name: value if name in lent else value.clone() for name, value in result}


def _same_bits(expected: Values, outcome: Values) -> bool:
    return expected.keys() == outcome.keys() and all(
        same_bits(value, outcome[name]) for name, value in expected.items()
    )
