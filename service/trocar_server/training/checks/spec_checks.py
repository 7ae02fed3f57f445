"""Validation of a trainer's spec before anything starts: every problem in one error.

spec = parse_spec({"model_id": "resnet18", "head": {"classes": 10}})
check_spec(spec, hosted, recording, {})
"""

from collections.abc import Mapping, Sequence
from typing import Any

import pydantic
from torch import nn

from trocar_api.reasons import ErrorReason
from trocar_server.models import HostedModel
from trocar_server.surgery import Recording
from trocar_server.surgery.sessions.gradient_edits import GradientEdit
from trocar_server.training.checks.loss_checks import loss_problems
from trocar_server.training.checks.schedule_checks import schedule_problems
from trocar_server.training.checks.spec_combinations import combination_problems, count_problems
from trocar_server.training.checks.trainer_meta_pass import (
    TrainerMetaPass,
    influenced,
    record_on,
    run_meta_pass,
)
from trocar_server.training.losses.loss_function import LossFunction
from trocar_server.training.model.trained_parameters import (
    Names,
    select_modules,
    select_names,
)
from trocar_server.training.model.tree import trained_names
from trocar_server.training.optim.optimizers import optimizer_problems, parameter_groups
from trocar_server.training.spec.problems import Problems
from trocar_server.training.spec.trainer_spec import TrainerSpec
from trocar_server.training.spec.validation import validation_problems
from trocar_server.training.step.gradient_edit_targets import rules_with_problems

_WHAT = "the trainer's specification is invalid"


def parse_spec(data: Mapping[str, Any]) -> TrainerSpec:
    """Parse a trainer spec from plain dicts and lists.

    Raises:
        ServiceError: `TRAINER_INVALID`, with every field that is missing, unknown or malformed.
    """
    problems = Problems()
    try:
        return TrainerSpec.model_validate(data)
    except pydantic.ValidationError as error:
        validation_problems(error, problems)
    raise problems.error(ErrorReason.TRAINER_INVALID, _WHAT)


def check_spec(
    spec: TrainerSpec, hosted: HostedModel, recording: Recording, teachers: Mapping[str, HostedModel]
) -> None:
    """Refuse a spec that cannot work on its model.

    Args:
        spec: The spec.
        hosted: The base model.
        recording: A recorded pass of the base model on its example input, with its stages.
        teachers: Hosted models by id, including those that the losses name.

    Raises:
        ServiceError: `TRAINER_INVALID`; the message lists every problem with its field.
    """
    problems = Problems()
    count_problems(spec, problems)
    problems.raise_any(ErrorReason.TRAINER_INVALID, _WHAT)
    combination_problems(spec, problems)
    optimizer_problems(spec.optimizer, problems)
    meta_pass = _meta_pass(spec, hosted, recording, problems)
    group_count = len(spec.optimizer.groups) + 1
    if meta_pass is not None:
        group_count = _check_selectors(spec, meta_pass, hosted, problems)
    schedule_problems(spec.schedule, spec.optimizer, group_count, problems)
    recorded = meta_pass.recording if meta_pass else None
    loss_problems(spec.losses, hosted, recorded, teachers, problems)
    if meta_pass is not None and not problems.lines:
        _check_influence(spec, meta_pass, hosted, problems)
    problems.raise_any(ErrorReason.TRAINER_INVALID, _WHAT)


def _meta_pass(
    spec: TrainerSpec, hosted: HostedModel, recording: Recording, problems: Problems
) -> TrainerMetaPass | None:
    if spec.head is not None and spec.head.classes < 1:
        problems.add("head.classes", "give the number of classes")
        spec = spec.model_copy(update={"head": spec.head.model_copy(update={"classes": 2})})
    with problems.noting("head" if spec.lora is None else ""):
        return run_meta_pass(spec, hosted, recording)
    # Without the new layers, so that the rest is checked as well.
    return run_meta_pass(spec.model_copy(update={"head": None, "lora": None}), hosted, recording)


def _check_selectors(
    spec: TrainerSpec, meta_pass: TrainerMetaPass, hosted: HostedModel, problems: Problems
) -> int:
    """Resolve every selector; return the number of parameter groups."""
    module, stages = meta_pass.module, meta_pass.recording.stages
    for field in ("train_mode", "activation_checkpointing"):
        with problems.noting(field):
            select_modules(module, getattr(spec, field), field, stages)
    with problems.noting("saved_tensors.modules"):
        select_modules(module, spec.saved_tensors.modules, "saved_tensors.modules", stages)
    trained: tuple[str, ...] | None = None
    with problems.noting("trainable"):
        trained = trained_names(module, spec, meta_pass.head_path, stages)
    if not trained and spec.lora is not None:  # its layers could not be made
        trained = None
    if trained is None:  # trained parameters unknown: selectors are resolved among all
        trained = tuple(name for name, _ in module.named_parameters())
    elif not trained:
        problems.add("trainable", "the model has no parameters of floats, so nothing would be trained")
    names = Names.of_module(module, stages)
    named = {name: parameter for name, parameter in module.named_parameters() if name in set(trained)}
    _check_regularizers(spec, names, named, problems)
    rules = rules_with_problems(spec.gradient_edits, module, meta_pass.recording, trained, problems)
    _check_rules_are_met(rules, meta_pass, hosted, problems)
    return len(parameter_groups(spec.optimizer, named, names, problems))


def _check_rules_are_met(
    rules: Sequence[GradientEdit], meta_pass: TrainerMetaPass, hosted: HostedModel, problems: Problems
) -> None:
    """Refuse gradient edits whose parameters no pass reads, in eval or train mode: they get no gradient."""
    unread = [rule for rule in rules if rule.parameters and not _is_read(rule, meta_pass.recording)]
    if not unread:
        return
    meta_pass.module.train()
    try:
        in_training = record_on(meta_pass.module, hosted, meta_pass.recording)
    except Exception:  # noqa: BLE001 - for example batch norm refuses a batch of one: undecidable
        return
    finally:
        meta_pass.module.eval()
    for rule in unread:
        if not _is_read(rule, in_training):
            problems.add(
                "gradient_edits",
                f"'{rule.parameters[0]}' is not used by the forward pass, so a rule would see no "
                "gradient; leave the rule out",
            )


def _is_read(rule: GradientEdit, recording: Recording) -> bool:
    """Whether a recorded pass reads one of a rule's parameters."""
    paths = [name.rpartition(".") for name in rule.parameters]
    modules = [(recording.modules.get(path), name) for path, _, name in paths]
    leaves = [module.parameters.get(name) if module else None for module, name in modules]
    return any(leaf is None or leaf.read_at != -1 for leaf in leaves)


def _check_influence(
    spec: TrainerSpec, meta_pass: TrainerMetaPass, hosted: HostedModel, problems: Problems
) -> None:
    stages = meta_pass.recording.stages
    trained = trained_names(meta_pass.module, spec, meta_pass.head_path, stages)
    with problems.noting("trainable"):
        is_influenced = influenced(meta_pass, hosted, trained, LossFunction(spec.losses))
        if not is_influenced and not spec.regularizers:
            problems.add(
                "losses",
                "they do not depend on any trained parameter; choose other values, or train more parameters",
            )


def _check_regularizers(
    spec: TrainerSpec, names: Names, named: Mapping[str, nn.Parameter], problems: Problems
) -> None:
    for index, regularizer in enumerate(spec.regularizers):
        field = f"regularizers[{index}].parameters"
        if not regularizer.parameters:
            problems.add(field, "select parameters; `**` selects all")
            continue
        with problems.noting(field):
            result = select_names(names, regularizer.parameters, field)
            if not any(name in named for name in result):
                problems.add(field, "none of these parameters is trained; leave it out, or train them")
