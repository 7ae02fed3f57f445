"""Compiled executor: calls of one recipe, run together on a compiled pass. Owner thread only."""

from collections.abc import Sequence
from itertools import chain

import torch

from trocar_server.engine.compiled.backends.candidates import Runner
from trocar_server.engine.execute.collecting import Collected
from trocar_server.engine.execute.executor import ReadyCall


class CompiledExecutor:
    """Runs passes on a compiled pass; several as one batch.

    Args:
        runner: The compiled pass.
    """

    def __init__(self, runner: Runner) -> None:
        self._runner = runner
        self.engine, self.numerics = runner.engine, runner.numerics

    def run(self, calls: Sequence[ReadyCall]) -> Sequence[Collected]:
        """See `Executor`. Calls that run together have no edits; see `merge_group`."""
        with torch.inference_mode():
            if len(calls) == 1:
                values = self._runner.run(given(calls[0]), calls[0].lent)
                return [Collected(dict(values), is_stop_known=False)]
            rows = [call.tensors[0].shape[0] for call in calls]
            joined = [torch.cat(columns) for columns in zip(*(call.tensors for call in calls), strict=True)]
            parts = {name: value.split(rows) for name, value in self._runner.run(joined).items()}
            of_calls = [{name: split[i] for name, split in parts.items()} for i in range(len(calls))]
            return [Collected(values, is_stop_known=False) for values in of_calls]


def given(call: ReadyCall) -> list[torch.Tensor]:
    """Return the tensors of a run: the arguments, then the edits' tensors."""
    device = call.tensors[0].device
    return [*call.tensors, *(tensor.to(device) for tensor in chain(*call.operands))]
