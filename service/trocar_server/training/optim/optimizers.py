"""Optimizers of `torch.optim`, by name, with torch's own options.

optimizer = make_optimizer(spec.optimizer, dict(trained), module)
"""

import inspect
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn

from trocar_api.reasons import ErrorReason
from trocar_server.errors import first_line, nearest
from trocar_server.training.model.trained_parameters import NO_STAGES, Names, select_names
from trocar_server.training.spec.option_values import is_number, is_whole
from trocar_server.training.spec.problems import Problems
from trocar_server.training.spec.trainer_spec import OptimizerSpec, Options

CLASSES: dict[str, type[torch.optim.Optimizer]] = {
    "sgd": torch.optim.SGD,
    "adam": torch.optim.Adam,
    "adamw": torch.optim.AdamW,
    "rmsprop": torch.optim.RMSprop,
    "adagrad": torch.optim.Adagrad,
    "lbfgs": torch.optim.LBFGS,
}
"""torch's classes by our names."""

_NOT_OFFERED = ("self", "params", "differentiable", "capturable", "fused")
_WHOLE = ("max_iter", "max_eval", "history_size")
_MOST = 1000
"""Limit of these options; a step takes time in proportion."""
_SWITCHES = ("foreach", "nesterov", "maximize", "amsgrad", "centered", "decoupled_weight_decay")


def make_optimizer(
    spec: OptimizerSpec,
    named: Mapping[str, nn.Parameter],
    module: nn.Module | None = None,
    stages: Mapping[str, str] = NO_STAGES,
) -> torch.optim.Optimizer:
    """Create an optimizer.

    Its groups are those of the spec in order, then one for the remaining parameters; within a group
    parameters are in the order of `named`.

    Args:
        spec: The optimizer, its options, its groups.
        named: The trained parameters, in the order of `named_parameters`.
        module: The module tree, for selectors with classes.
        stages: Selectors by stage name.

    Raises:
        ServiceError: `TRAINER_INVALID`, with every problem of options and groups.
    """
    problems = Problems()
    optimizer_problems(spec, problems)
    groups = parameter_groups(spec, named, Names.of_trained(named, module, stages), problems)
    problems.raise_any(ErrorReason.TRAINER_INVALID, "the optimizer's options are invalid")
    return _make(spec.name, groups, spec.options)


def parameter_groups(
    spec: OptimizerSpec,
    named: Mapping[str, nn.Parameter],
    names: Names,
    problems: Problems,
) -> list[dict[str, Any]]:
    """Return the groups as torch takes them; problems of their selectors go to `problems`."""
    rest = dict(named)
    groups: list[dict[str, Any]] = []
    for index, group in enumerate(spec.groups):
        field = f"optimizer.groups[{index}].parameters"
        result: Sequence[str] = ()
        with problems.noting(field):
            result = select_names(names, group.parameters, field)
            if not any(name in rest for name in result):
                problems.add(field, "all of its parameters are frozen or in an earlier group; leave it out")
        taken = [rest.pop(name) for name in named if name in result and name in rest]
        groups.append({"params": taken, **_for_torch(group.options)})
    return [*groups, {"params": list(rest.values())}] if rest else groups


def optimizer_problems(spec: OptimizerSpec, problems: Problems) -> None:
    """Collect the problems of the options of an optimizer and of its groups."""
    field = "optimizer.options"
    options = _well_formed(spec.name, spec.options, field, problems)
    is_possible = _try(spec.name, options, field, problems)
    if spec.name == "lbfgs" and spec.groups:
        problems.add("optimizer.groups", "torch's LBFGS has no parameter groups")
        return
    for index, group in enumerate(spec.groups):
        where = f"optimizer.groups[{index}].options"
        own = _well_formed(spec.name, group.options, where, problems)
        if is_possible:
            _try(spec.name, {**options, **own}, where, problems)


def known_options(name: str) -> list[str]:
    """Return the names of an optimizer's options."""
    parameters = inspect.signature(CLASSES[name].__init__).parameters
    return [option for option in parameters if option not in _NOT_OFFERED]


def _well_formed(name: str, options: Options, field: str, problems: Problems) -> Options:
    """Return the options that exist and have a value of the right type; collect problems for the others."""
    known = known_options(name)
    fine: Options = {}
    for option, value in options.items():
        if option not in known:
            hints = nearest(option, known)
            rest = f"nearest: {', '.join(hints)}" if hints else f"available: {', '.join(known)}"
            problems.add(f"{field}.{option}", f"{name} has no such option; {rest}")
            continue
        wrong = _wrong_value(option, value)
        if wrong:
            problems.add(f"{field}.{option}", f"must be {wrong}, not {value!r}")
        else:
            fine[option] = value
    return fine


def _wrong_value(option: str, value: object) -> str:
    """Return the requirement that an option's value fails; empty if it is valid."""
    if option == "line_search_fn":
        return "" if value in (None, "strong_wolfe") else "strong_wolfe or unset"
    if option in _SWITCHES:
        is_left_out = value is None and option == "foreach"
        return "" if isinstance(value, bool) or is_left_out else "true or false"
    if option in _WHOLE:
        is_fine = is_whole(value, 1, _MOST) or (value is None and option == "max_eval")
        return "" if is_fine else f"a whole number from 1 to {_MOST}"
    if option == "betas":
        is_pair = isinstance(value, list) and len(value) == 2 and all(is_number(each) for each in value)
        return "" if is_pair else "a list of two numbers"
    return "" if is_number(value) else "a finite number"


def _try(name: str, options: Options, field: str, problems: Problems) -> bool:
    """Try out the options in torch's constructor; return whether it accepts them."""
    try:
        _make(name, [{"params": [nn.Parameter(torch.zeros(1))]}], options)
    except (ValueError, TypeError, RuntimeError, OverflowError) as error:
        problems.add(field, f"PyTorch rejects them: {first_line(error)}")
        return False
    return True


def _make(name: str, groups: list[dict[str, Any]], options: Options) -> torch.optim.Optimizer:
    return CLASSES[name](groups, **_for_torch(options))


def _for_torch(options: Options) -> dict[str, Any]:
    return {name: tuple(value) if isinstance(value, list) else value for name, value in options.items()}
