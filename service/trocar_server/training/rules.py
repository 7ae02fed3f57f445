"""From the gradient rules of a spec to those of a session: which parameters, which values of a pass."""

from collections.abc import Collection, Sequence

from torch import nn

from trocar_api.reasons import ErrorReason
from trocar_server.errors import ServiceError
from trocar_server.surgery import Recording, Target, parse_selector, resolve
from trocar_server.surgery.gradient_changes import Change, make_change
from trocar_server.surgery.gradient_rules import GradientRule
from trocar_server.training.parameters import Names, is_of_values, match_parameters
from trocar_server.training.problems import Problems
from trocar_server.training.spec import GradientRuleSpec


def make_rules(
    specs: Sequence[GradientRuleSpec], module: nn.Module, recording: Recording, trainable: Collection[str]
) -> tuple[GradientRule, ...]:
    """Return what a `GradientRuleSession` takes.

    Args:
        specs: The rules.
        module: The trainer's tree.
        recording: A pass of it.
        trainable: Names of the trained parameters; a rule leaves others alone.

    Raises:
        ServiceError: `TRAINER_INVALID` with all that is wrong.
    """
    problems = Problems()
    rules = rules_with_problems(specs, module, recording, trainable, problems)
    problems.raise_any(ErrorReason.TRAINER_INVALID, "the gradient rules do not work")
    return rules


def rules_with_problems(
    specs: Sequence[GradientRuleSpec],
    module: nn.Module,
    recording: Recording,
    trainable: Collection[str],
    problems: Problems,
) -> tuple[GradientRule, ...]:
    """Return the rules that work, and say what is wrong with the others."""
    names = Names.of_module(module, recording.stages)
    rules: list[GradientRule] = []
    for index, spec in enumerate(specs):
        field = f"gradient_rules[{index}]"
        change: Change | None = None
        with problems.noting(field):
            change = make_change(spec.name, spec.options)
        with problems.noting(f"{field}.selector"):
            parameters, targets = _places(spec.selector, names, recording, trainable, f"{field}.selector")
            if change is not None:
                rules.append(GradientRule(change, parameters, targets))
    return tuple(rules)


def _places(
    selector: str, names: Names, recording: Recording, trainable: Collection[str], field: str
) -> tuple[tuple[str, ...], tuple[Target, ...]]:
    """Return the parameters and the values that a selector means."""
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
