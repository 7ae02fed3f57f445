"""Whether the terms of a loss make sense for a model: values, options, what they are compared with."""

from collections.abc import Mapping, Sequence
from dataclasses import replace

from trocar_api.reasons import ErrorReason
from trocar_server.errors import ServiceError, first_line, nearest
from trocar_server.models import HostedModel, make_meta_replica, make_replica, stages_for
from trocar_server.surgery import Leaf, Recording
from trocar_server.training.loss_options import option_problems
from trocar_server.training.loss_terms import WITH_TEACHER, WITHOUT_TARGET
from trocar_server.training.loss_values import loss_leaf
from trocar_server.training.problems import Problems
from trocar_server.training.rehearsal import record_on
from trocar_server.training.spec import LossSpec, TeacherSpec


def loss_problems(
    losses: Sequence[LossSpec],
    hosted: HostedModel,
    recording: Recording | None,
    teachers: Mapping[str, HostedModel],
    problems: Problems,
) -> None:
    """Say what is wrong with the terms of a loss.

    Args:
        losses: The terms.
        hosted: The model that is trained.
        recording: A pass of it with its new head; None where that is not possible.
        teachers: Hosted models by id.
        problems: Where to.
    """
    if not losses:
        problems.add("losses", "a trainer needs one at least")
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
    if spec.name in WITHOUT_TARGET:
        for name in ("target", "teacher"):
            if getattr(spec, name):
                problems.add(f"{field}.{name}", f"{spec.name} is of a value alone; leave it out")
    elif spec.teacher is not None:
        if spec.target:
            problems.add(f"{field}.target", "a term has a target or a teacher, not both")
        if spec.name not in WITH_TEACHER:
            there = ", ".join(sorted(WITH_TEACHER))
            problems.add(f"{field}.teacher", f"{spec.name} takes no teacher; {there} do")
    if spec.name in ("cross_entropy", "kl_div") and leaf is not None and len(leaf.shape or ()) < 2:
        problems.add(f"{field}.selector", f"{spec.name} needs a value (batch, classes), not {leaf.shape}")


def _teacher_leaf(
    teacher: TeacherSpec,
    hosted: HostedModel,
    recording: Recording | None,
    teachers: Mapping[str, HostedModel],
) -> Leaf | None:
    """Return what is known about a teacher's value on the trained model's inputs."""
    model = teachers.get(teacher.model_id)
    if model is None:
        hints = nearest(teacher.model_id, teachers)
        rest = f"nearest: {', '.join(hints)}" if hints else "load it first"
        raise _invalid(f"no loaded model '{teacher.model_id}'; {rest}")
    if recording is None:
        return None
    copy = make_meta_replica if recording.is_symbolic else make_replica
    try:
        recorded = record_on(copy(model.module), hosted, recording)
    except Exception as error:
        raise _invalid(
            f"'{teacher.model_id}' cannot take this model's inputs ({first_line(error)}); choose another"
        ) from error
    return loss_leaf(teacher.selector, replace(recorded, stages=stages_for(model.spec)))


def _invalid(message: str) -> ServiceError:
    return ServiceError(ErrorReason.TRAINER_INVALID, message)
