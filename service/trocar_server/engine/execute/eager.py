"""Eager execution: a pass of PyTorch on a replica, from the inputs or from a value in the middle."""

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from itertools import chain

import torch
from torch import nn

from trocar_server.engine.execute.collecting import Collected, collect
from trocar_server.engine.execute.executor import ReadyCall
from trocar_server.engine.request.numerics import Numerics
from trocar_server.engine.schedule.lease import Replica
from trocar_server.models import make_replica
from trocar_server.surgery import StartMixedError, StartSession, Target, laid_out

EAGER = "eager"
"""The backend name of unmodified PyTorch."""

_NO_GRAPH: AbstractContextManager[None] = nullcontext()


@dataclass(frozen=True)
class Eager:
    """Runs passes of a replica, one after the other.

    Attributes:
        replica: Leased by the caller.
        engine: As in `Executor`.
        numerics: As in `Executor`.
    """

    replica: Replica
    engine: str = EAGER
    numerics: Numerics = Numerics.EXACT

    def run(self, calls: Sequence[ReadyCall]) -> Sequence[Collected]:
        """See `Executor`.

        Raises:
            StateWrittenError: A pass has to run again.
            CallsDifferError: The data calls modules more or less often than the plan was resolved for.
            Exception: As `collect`.
        """
        values = []
        replica = self.replica
        for call in calls:
            graph = _NO_GRAPH if call.pass_spec.graph is None else replica.passing()
            mode = torch.inference_mode() if call.is_inference else torch.no_grad()
            is_changed = not call.pass_spec.collects_only
            with replica.passing(is_changed=is_changed) as module, graph as graph_module, mode:
                collected = collect(module, call.arguments, call.pass_spec, call.guard, graph_module)
                if not call.is_inference:  # the model may have derived them itself
                    collected = _derived(collected)
                if replica.is_live:
                    collected = replace(collected, values=_apart(collected.values, replica.module))
            values.append(collected)
        return values


class NotStartedError(Exception):
    """A part of the model before the start failed, for want of data."""

    def __init__(self, problem: Exception) -> None:
        super().__init__(problem)
        self.problem = problem


@dataclass(frozen=True)
class Middle:
    """Runs the part of a pass after a value. See Note: [Partial passes] in `surgery.sessions.starting`.

    Attributes:
        replica: Leased by the caller. A pass runs on a tree of its own, whose parts before the start have no
            data.
        target: The value to start from.
        value: What it is; a pass gets a copy.
        strides: The strides that it has in a full pass.
        engine: As in `Executor`.
        numerics: As in `Executor`.
    """

    replica: Replica
    target: Target
    value: torch.Tensor
    strides: tuple[int, ...]
    engine: str = EAGER
    numerics: Numerics = Numerics.EXACT

    def run(self, calls: Sequence[ReadyCall]) -> Sequence[Collected]:
        """See `Executor`.

        Raises:
            StartMixedError: A module after the start needs a value from before it.
            NotStartedError: A part before the start failed.
            Exception: As `Eager.run`.
        """
        return [self._run(call) for call in calls]

    def _run(self, call: ReadyCall) -> Collected:
        pristine = self.replica.pristine
        module = pristine.tree() if pristine.is_renewed else make_replica(self.replica.module)
        passing = Eager(Replica(pristine, self.replica.is_live, module))
        session: StartSession | None = None
        try:
            session = StartSession(module, self.target, laid_out(self.value.clone(), self.strides))
            (collected,) = passing.run([replace(call, pass_spec=replace(call.pass_spec, start=session))])
        except StartMixedError:
            raise
        except Exception as error:
            if session is not None and session.has_begun:
                raise
            raise NotStartedError(error) from None
        for name, value in collected.values.items():
            if value.is_meta:  # computed beside the start, from values before it
                raise StartMixedError(name)
        return collected


def _derived(collected: Collected) -> Collected:
    return replace(collected, values={name: value.detach() for name, value in collected.values.items()})


def _apart(values: Mapping[str, torch.Tensor], module: nn.Module) -> dict[str, torch.Tensor]:
    """Copy values that share memory with weights, which may change while the reply is being sent."""
    weights = {_storage(tensor) for tensor in chain(module.parameters(), module.buffers())}
    return {name: value.clone() if _storage(value) in weights else value for name, value in values.items()}


def _storage(value: torch.Tensor) -> int | None:
    return value.untyped_storage().data_ptr() if value.layout is torch.strided else None
