"""Value edits: changes of values with directions in the training passes of a trainer.

    edits = ValueEdits(spec.edits, recording)
    with edits.session(model) as session:
        session.carry_writes()
        loss(model(batch)).backward()
        session.check_made()

Gradients flow through an edit as through any other operation of the pass. Evaluation, extraction and
generation are other passes, without edits: weights are trained with a direction that is not there later.
"""

from base64 import b64decode
from collections.abc import Sequence

import numpy as np
import torch
from torch import nn

from trocar_api.reasons import ErrorReason
from trocar_server.engine.request.plan import EditRequest
from trocar_server.engine.resolve.edit_resolution import PlannedEdit, plan_edits
from trocar_server.errors import ServiceError
from trocar_server.surgery import Collector, EditSession, EditTarget, Recording, parse_selector
from trocar_server.surgery.sessions.call_writes import ModuleWrites
from trocar_server.surgery.sessions.editing import in_place_calls
from trocar_server.surgery.sessions.hooks import Session
from trocar_server.tensors.edits import OPERATIONS, Edit
from trocar_server.tensors.reductions import OperandSpec
from trocar_server.training.spec.trainer_spec import ValueEditSpec


class ValueEdits:
    """The edits of a spec, resolved.

    Args:
        specs: The edits.
        recording: A recorded pass of the trainer's model, with layouts.

    Raises:
        ServiceError: `EDIT_SHAPE_MISMATCH`, `EDIT_DTYPE_REJECTED` or `EDIT_NOT_POSSIBLE`; a selector's error.
    """

    def __init__(self, specs: Sequence[ValueEditSpec], recording: Recording) -> None:
        planned, _ = plan_edits([_request(spec) for spec in specs], recording, {})
        vectors = [_vectors(spec) for spec in specs]
        self._planned = [(entry, vectors[entry.position]) for entry in planned]

    @property
    def paths(self) -> frozenset[str]:
        """The paths of the modules of their values."""
        return frozenset(entry.target.path for entry, _ in self._planned)

    def session(self, module: nn.Module) -> "ValueEditSession":
        """Return the session of one pass of a module tree."""
        return ValueEditSession(module, [_target(*each, module) for each in self._planned])


class ValueEditSession(Session):
    """Makes edits in one forward pass, and in what its backward pass computes again.

    Args:
        module: The module tree.
        edits: The edits.
    """

    def __init__(self, module: nn.Module, edits: Sequence[EditTarget]) -> None:
        self._edits = edits
        self._collector = Collector()
        self._writes = ModuleWrites(module, in_place_calls(edits), self._collector)
        self._session = EditSession(module, edits, collector=self._collector)

    def _open(self) -> None:
        self._writes.open_first(self._handles)
        self._handles.enter_context(self._session)

    def carry_writes(self) -> None:
        """Let edited modules write to their inputs; called when the other sessions have been entered."""
        self._writes.open_last(self._handles)

    def check_made(self) -> None:
        """Refuse a forward pass that did not reach an edited value.

        Raises:
            ServiceError: `MODULE_NOT_CALLED`.
        """
        for name in (entry.target.name for entry in self._edits):
            if name not in self._collector.edited:
                raise ServiceError(
                    ErrorReason.MODULE_NOT_CALLED,
                    f"'{name}' was not called in this pass, so it could not be edited: which modules run "
                    "depends on the data",
                    name=name,
                )


def _request(spec: ValueEditSpec) -> EditRequest:
    vectors = OperandSpec(torch.float64, spec.shape)
    operation = OPERATIONS[spec.name](vectors, **spec.options)  # type: ignore[call-arg]  # of a subclass
    return EditRequest(parse_selector(spec.selector), Edit(operation, channel_dim=spec.channel_dim))


def _vectors(spec: ValueEditSpec) -> torch.Tensor:
    numbers = np.frombuffer(b64decode(spec.vectors), "<f8").astype(np.float64)
    return torch.from_numpy(numbers.reshape(spec.shape))


def _target(entry: PlannedEdit, vectors: torch.Tensor, module: nn.Module) -> EditTarget:
    """Return an edit. A module may write to its input in train mode only, as dropout does."""
    writes = entry.written_bytes > 0 or bool(
        getattr(module.get_submodule(entry.target.path), "inplace", False)
    )
    return EditTarget(
        entry.target, entry.request.edit, (vectors,), position=entry.position, is_in_place=writes
    )
