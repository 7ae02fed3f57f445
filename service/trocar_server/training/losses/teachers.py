"""Teachers: values of other hosted models on a step's inputs, for loss terms to compare with."""

from collections.abc import Mapping, Sequence
from dataclasses import replace

import torch
from torch import Tensor, nn

from trocar_api.reasons import ErrorReason
from trocar_server.engine.host.recordings import record_example
from trocar_server.engine.run.pass_errors import domain_errors
from trocar_server.engine.schedule.lease import Replica
from trocar_server.errors import ServiceError
from trocar_server.models import HostedModel, stages_for
from trocar_server.surgery import PassGuard, Recording
from trocar_server.training.losses.batch import Batch
from trocar_server.training.losses.loss_function import main_output
from trocar_server.training.losses.loss_taps import LossTaps
from trocar_server.training.spec.trainer_spec import TeacherSpec


class Teacher:
    """A model in eval mode and without gradients, run once for all requested values.

    Args:
        hosted: The model; passes run on a replica of it.
        specs: The requested values.

    Raises:
        ServiceError: A selector does not select exactly one value.
    """

    def __init__(self, hosted: HostedModel, specs: Sequence[TeacherSpec]) -> None:
        self._hosted = hosted
        self._replica = Replica(hosted.pristine)
        self._specs = specs
        selectors = list(dict.fromkeys(spec.selector for spec in specs if spec.selector))
        self._loss_taps = LossTaps(selectors, lambda: _recording(hosted))
        self._needs_output = any(not spec.selector for spec in specs)

    def values(self, batch: Batch, guard: PassGuard) -> dict[TeacherSpec, Tensor]:
        """Run a pass and return the requested values.

        Raises:
            ServiceError: `INPUT_REJECTED`, the teacher cannot take the inputs; `CANCELLED` and others.
        """
        with domain_errors(self._hosted), torch.no_grad():
            return self._replica.run(lambda module: self._values(module, batch, guard))

    def _values(self, module: nn.Module, batch: Batch, guard: PassGuard) -> dict[TeacherSpec, Tensor]:
        output = None
        collecting = self._loss_taps.collecting(module, ends_pass=not self._needs_output)
        with guard.watching(module), collecting as values:
            args, kwargs = self._hosted.forward.adopted(batch.args, batch.kwargs)
            output = module(*args, **kwargs)
        return {
            spec: values[spec.selector] if spec.selector else main_output(output).detach()
            for spec in self._specs
        }


def _recording(hosted: HostedModel) -> Recording:
    return replace(record_example(hosted)[1], stages=stages_for(hosted))


def make_teachers(specs: Sequence[TeacherSpec], hosted: Mapping[str, HostedModel]) -> list[Teacher]:
    """Return a teacher for each model that the specs name.

    Raises:
        ServiceError: `MODEL_NOT_LOADED`, a model is not among those given.
    """
    by_model: dict[str, list[TeacherSpec]] = {}
    for spec in dict.fromkeys(specs):
        by_model.setdefault(spec.model_id, []).append(spec)
    for model_id in by_model:
        if model_id not in hosted:
            raise ServiceError(
                ErrorReason.MODEL_NOT_LOADED,
                f"losses.teacher: model '{model_id}' is not in memory; load it first",
            )
    return [Teacher(hosted[model_id], wanted) for model_id, wanted in by_model.items()]
