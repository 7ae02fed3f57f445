"""Gradient edit targets: resolves a spec's gradient edits to parameters and values of a pass."""

from collections.abc import Collection, Sequence
from dataclasses import replace

from torch import Tensor, nn

from trocar_api.reasons import ErrorReason
from trocar_server.errors import ServiceError
from trocar_server.surgery import Recording, Target, parse_selector, resolve
from trocar_server.surgery.sessions.gradient_changes import make_change
from trocar_server.surgery.sessions.gradient_edits import GradientEdit
from trocar_server.surgery.sessions.gradient_sets import SETS, each, make_set_change
from trocar_server.training.model.trained_parameters import Names, is_of_values, match_parameters
from trocar_server.training.spec.problems import Problems
from trocar_server.training.spec.trainer_spec import GradientEditSpec


def make_rules(
    specs: Sequence[GradientEditSpec], module: nn.Module, recording: Recording, trainable: Collection[str]
) -> tuple[GradientEdit, ...]:
    """Return the rules for a `GradientEditSession`.

    Args:
        specs: The rules.
        module: The trainer's module tree.
        recording: A recorded pass of it.
        trainable: Names of the trained parameters; rules do not affect others.

    Raises:
        ServiceError: `TRAINER_INVALID` with every problem.
    """
    problems = Problems()
    rules = rules_with_problems(specs, module, recording, trainable, problems)
    problems.raise_any(ErrorReason.TRAINER_INVALID, "the gradient edits do not work")
    return rules


def rules_with_problems(
    specs: Sequence[GradientEditSpec],
    module: nn.Module,
    recording: Recording,
    trainable: Collection[str],
    problems: Problems,
) -> tuple[GradientEdit, ...]:
    """Return the valid rules, and collect the problems of the others."""
    names = Names.of_module(module, recording.stages)
    rules: list[GradientEdit] = []
    parameters: tuple[str, ...]
    targets: tuple[Target, ...]
    for index, spec in enumerate(specs):
        field = f"gradient_edits[{index}]"
        parameters, targets = (), ()
        rule: GradientEdit | None = None
        with problems.noting(field):
            rule = _rule(spec)
        with problems.noting(f"{field}.selector"):
            parameters, targets = _places(spec.selector, names, recording, trainable, f"{field}.selector")
        for place, selector in enumerate(spec.selectors):
            where = f"{field}.selectors[{place}]"
            with problems.noting(where):
                more = _places(selector, names, recording, trainable, where)
                parameters, targets = (*parameters, *more[0]), (*targets, *more[1])
        if rule is not None:
            if targets and rule.late is not None:
                problems.add(f"{field}.selector", _LATE)
            rules.append(replace(rule, parameters=tuple(dict.fromkeys(parameters)), targets=targets))
    return tuple(rules)


_LATE = (
    "rules over a set, and on accumulated gradients, are for parameters: the gradient at a value is "
    "passed on before "
    "the others are known; select parameters"
)


def _rule(spec: GradientEditSpec) -> GradientEdit:
    """Return a rule's operation, without its targets."""
    if spec.name in SETS:
        return GradientEdit(_as_it_is, late=make_set_change(spec.name, spec.options), when=spec.when)
    change = make_change(spec.name, spec.options)
    late = each(change) if spec.when == "accumulated" else None
    return GradientEdit(change, late=late, when=spec.when)


def _as_it_is(gradient: Tensor) -> Tensor:
    return gradient


def _places(
    selector: str, names: Names, recording: Recording, trainable: Collection[str], field: str
) -> tuple[tuple[str, ...], tuple[Target, ...]]:
    """Return the parameters and the values that a selector matches."""
    if is_of_values(selector):
        ((*values,),) = resolve([parse_selector(selector)], recording)
        return (), tuple(target for target, _ in values)
    matched = match_parameters(names, selector, field)
    trained = tuple(name for name in names.parameters if name in matched and name in trainable)
    if not trained:
        raise ServiceError(
            ErrorReason.TRAINER_INVALID,
            f"{field}: none of the {len(matched)} parameters of '{selector}' is trained; add them to "
            "`trainable`, or leave the rule out",
        )
    return trained, ()
