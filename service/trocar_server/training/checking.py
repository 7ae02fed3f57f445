"""Everything that can be wrong with a trainer's description, found before anything starts, in one error.

spec = parse_spec({"model_id": "resnet18", "head": {"classes": 10}})
check_spec(spec, hosted, recording, {})
"""

from collections.abc import Mapping
from typing import Any

import pydantic
from torch import nn

from trocar_api.reasons import ErrorReason
from trocar_server.models import HostedModel
from trocar_server.surgery import Recording
from trocar_server.training.combinations import combination_problems, count_problems
from trocar_server.training.forms import form_problems
from trocar_server.training.loss_checks import loss_problems
from trocar_server.training.losses import LossFunction
from trocar_server.training.optimizers import optimizer_problems, parameter_groups
from trocar_server.training.parameters import Names, select_modules, select_names, trained_parameters
from trocar_server.training.problems import Problems
from trocar_server.training.rehearsal import Rehearsal, influenced, rehearse
from trocar_server.training.rules import rules_with_problems
from trocar_server.training.schedule_checks import schedule_problems
from trocar_server.training.spec import TrainerSpec

_WHAT = "no such trainer can be made"


def parse_spec(data: Mapping[str, Any]) -> TrainerSpec:
    """Read a description, given as plain dicts and lists.

    Raises:
        ServiceError: `TRAINER_INVALID`, with every field that is missing, unknown or of the wrong form.
    """
    problems = Problems()
    try:
        return TrainerSpec.model_validate(data)
    except pydantic.ValidationError as error:
        form_problems(error, problems)
    raise problems.error(ErrorReason.TRAINER_INVALID, _WHAT)


def check_spec(
    spec: TrainerSpec, hosted: HostedModel, recording: Recording, teachers: Mapping[str, HostedModel]
) -> None:
    """Refuse a trainer that cannot work.

    Args:
        spec: What is asked for.
        hosted: The model that it begins with.
        recording: A pass of that model on its example input, with its stages.
        teachers: Hosted models by id, those that the losses name among them.

    Raises:
        ServiceError: `TRAINER_INVALID`; the message lists every problem with its field.
    """
    problems = Problems()
    count_problems(spec, problems)
    problems.raise_any(ErrorReason.TRAINER_INVALID, _WHAT)
    combination_problems(spec, problems)
    optimizer_problems(spec.optimizer, problems)
    rehearsal = _rehearsed(spec, hosted, recording, problems)
    group_count = len(spec.optimizer.groups) + 1
    if rehearsal is not None:
        group_count = _check_selectors(spec, rehearsal, problems)
    schedule_problems(spec.schedule, spec.optimizer, group_count, problems)
    recorded = rehearsal.recording if rehearsal else None
    loss_problems(spec.losses, hosted, recorded, teachers, problems)
    if rehearsal is not None and not problems.lines:
        _check_influence(spec, rehearsal, hosted, problems)
    problems.raise_any(ErrorReason.TRAINER_INVALID, _WHAT)


def _rehearsed(
    spec: TrainerSpec, hosted: HostedModel, recording: Recording, problems: Problems
) -> Rehearsal | None:
    if spec.head is not None and spec.head.classes < 1:
        problems.add("head.classes", "say how many classes there are")
        spec = spec.model_copy(update={"head": spec.head.model_copy(update={"classes": 2})})
    with problems.noting("head"):
        return rehearse(spec, hosted, recording)
    # Without its new head, so that the rest is looked up as well.
    return rehearse(spec.model_copy(update={"head": None}), hosted, recording)


def _check_selectors(spec: TrainerSpec, rehearsal: Rehearsal, problems: Problems) -> int:
    """Look every selector up; returns the number of parameter groups."""
    module, stages = rehearsal.module, rehearsal.recording.stages
    for field in ("train_mode", "activation_checkpointing"):
        with problems.noting(field):
            select_modules(module, getattr(spec, field), field, stages)
    with problems.noting("saved_tensors.modules"):
        select_modules(module, spec.saved_tensors.modules, "saved_tensors.modules", stages)
    trained: tuple[str, ...] | None = None
    with problems.noting("trainable"):
        trained = trained_parameters(module, spec.trainable, rehearsal.head_path, stages)
    if trained is None:  # what is trained is not known, so the rest is only looked up
        trained = tuple(name for name, _ in module.named_parameters())
    elif not trained:
        problems.add("trainable", "the model has no parameters of floats, so nothing would be trained")
    names = Names.of_module(module, stages)
    named = {name: parameter for name, parameter in module.named_parameters() if name in set(trained)}
    _check_regularizers(spec, names, named, problems)
    rules_with_problems(spec.gradient_rules, module, rehearsal.recording, trained, problems)
    return len(parameter_groups(spec.optimizer, named, names, problems))


def _check_influence(
    spec: TrainerSpec, rehearsal: Rehearsal, hosted: HostedModel, problems: Problems
) -> None:
    stages = rehearsal.recording.stages
    trained = trained_parameters(rehearsal.module, spec.trainable, rehearsal.head_path, stages)
    with problems.noting("trainable"):
        is_influenced = influenced(rehearsal, hosted, trained, LossFunction(spec.losses))
        if not is_influenced and not spec.regularizers:
            problems.add(
                "losses", "nothing that is trained influences them; choose other values, or train more"
            )


def _check_regularizers(
    spec: TrainerSpec, names: Names, named: Mapping[str, nn.Parameter], problems: Problems
) -> None:
    for index, regularizer in enumerate(spec.regularizers):
        field = f"regularizers[{index}].parameters"
        if not regularizer.parameters:
            problems.add(field, "say which parameters it is of; `**` is all")
            continue
        with problems.noting(field):
            found = select_names(names, regularizer.parameters, field)
            if not any(name in named for name in found):
                problems.add(field, "none of these parameters is trained; leave it out, or train them")
