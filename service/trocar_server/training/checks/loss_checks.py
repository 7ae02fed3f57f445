"""Checks of loss terms against a model: values, options, targets and teachers."""

from collections.abc import Mapping, Sequence
from dataclasses import replace

from trocar_api.reasons import ErrorReason
from trocar_server.errors import ServiceError, first_line, nearest
from trocar_server.models import HostedModel, make_meta_replica, stages_for
from trocar_server.surgery import Leaf, Recording
from trocar_server.tensors.losses import LOSSES
from trocar_server.training.checks.trainer_meta_pass import record_on
from trocar_server.training.losses.loss_options import option_problems
from trocar_server.training.losses.loss_values import loss_leaf
from trocar_server.training.spec.problems import Problems
from trocar_server.training.spec.trainer_spec import LossSpec, TeacherSpec


def loss_problems(
    losses: Sequence[LossSpec],
    hosted: HostedModel,
    recording: Recording | None,
    teachers: Mapping[str, HostedModel],
    problems: Problems,
) -> None:
    """Collect the problems of loss terms.

    Args:
        losses: The terms.
        hosted: The base model.
        recording: A recorded pass of it with its new head; None where that is not possible.
        teachers: Hosted models by id.
        problems: Collects the problems.
    """
    if not losses:
        problems.add("losses", "give at least one")
    for index, spec in enumerate(losses):
        field = f"losses[{index}]"
        leaf: Leaf | None = None
        if recording is not None:
            with problems.noting(f"{field}.selector"):
                leaf = loss_leaf(spec.selector, recording)
        option_problems(spec, None if leaf is None else leaf.shape, field, problems)
        _check_comparison(spec, leaf, field, problems)
        if spec.teacher is not None:
            with problems.noting(f"{field}.teacher"):
                other = _teacher_leaf(spec.teacher, hosted, recording, teachers)
                if leaf is not None and other is not None and leaf.shape != other.shape:
                    problems.add(
                        f"{field}.teacher",
                        f"its value has shape {other.shape} and that of this model {leaf.shape}; choose "
                        "values of one shape",
                    )


def _check_comparison(spec: LossSpec, leaf: Leaf | None, field: str, problems: Problems) -> None:
    if not LOSSES[spec.name].has_target:
        for name in ("target", "teacher"):
            if getattr(spec, name):
                problems.add(f"{field}.{name}", f"{spec.name} uses the value alone; leave it out")
    elif spec.teacher is not None:
        if spec.target:
            problems.add(f"{field}.target", "give a target or a teacher, not both")
        if not LOSSES[spec.name].takes_teacher:
            available = ", ".join(sorted(name for name, loss in LOSSES.items() if loss.takes_teacher))
            problems.add(f"{field}.teacher", f"{spec.name} takes no teacher; {available} do")
    if LOSSES[spec.name].of_tokens and leaf is not None and len(leaf.shape or ()) != 3:
        problems.add(
            f"{field}.selector", f"{spec.name} needs a value (batch, tokens, classes), not {leaf.shape}"
        )
    if spec.name in ("cross_entropy", "kl_div") and leaf is not None and len(leaf.shape or ()) < 2:
        problems.add(f"{field}.selector", f"{spec.name} needs a value (batch, classes), not {leaf.shape}")


def _teacher_leaf(
    teacher: TeacherSpec,
    hosted: HostedModel,
    recording: Recording | None,
    teachers: Mapping[str, HostedModel],
) -> Leaf | None:
    """Return the metadata of a teacher's value on the trained model's inputs."""
    model = teachers.get(teacher.model_id)
    if model is None:
        hints = nearest(teacher.model_id, teachers)
        rest = f"nearest: {', '.join(hints)}" if hints else "load it first"
        raise _invalid(f"no loaded model '{teacher.model_id}'; {rest}")
    if recording is None:
        return None
    module = make_meta_replica(model.module) if recording.is_symbolic else model.pristine.apart()
    try:
        recorded = record_on(module, hosted, recording)
    except Exception as error:
        raise _invalid(
            f"'{teacher.model_id}' cannot take this model's inputs ({first_line(error)}); choose another"
        ) from error
    return loss_leaf(teacher.selector, replace(recorded, stages=stages_for(model)))


def _invalid(message: str) -> ServiceError:
    return ServiceError(ErrorReason.TRAINER_INVALID, message)
