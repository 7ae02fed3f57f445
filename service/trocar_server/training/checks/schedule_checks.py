"""Schedule options: allowed names and values."""

import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.optim import lr_scheduler

from trocar_server.errors import ServiceError, first_line, nearest
from trocar_server.training.optim.optimizers import make_optimizer
from trocar_server.training.optim.schedules import make_schedulers
from trocar_server.training.spec.option_values import is_number, is_whole
from trocar_server.training.spec.problems import Problems
from trocar_server.training.spec.trainer_spec import OptimizerSpec, Option, ScheduleSpec

_CLASSES: dict[str, Callable[..., Any]] = {
    "step": lr_scheduler.StepLR,
    "cosine": lr_scheduler.CosineAnnealingLR,
    "one_cycle": lr_scheduler.OneCycleLR,
    "plateau": lr_scheduler.ReduceLROnPlateau,
}
_NOT_OFFERED = ("self", "optimizer", "last_epoch")
_REQUIRED = {"step": ("step_size",), "one_cycle": ("max_lr",)}
_COUNTS = {
    "step_size": 1,
    "T_max": 1,
    "total_steps": 1,
    "epochs": 1,
    "steps_per_epoch": 1,
    "patience": 0,
    "cooldown": 0,
}
_LENGTH = 1_000_003
"""Length of the training to try out schedules with, if none is given: no usual share of it is one step."""
_BOOLEANS = ("cycle_momentum", "three_phase")
_LISTS = ("max_lr", "base_momentum", "max_momentum", "min_lr")
_POSITIVE = ("div_factor", "final_div_factor", "max_lr")
_WORDS = {
    "anneal_strategy": ("cos", "linear"),
    "mode": ("min", "max"),
    "threshold_mode": ("rel", "abs"),
}


def schedule_problems(
    spec: ScheduleSpec, optimizer: OptimizerSpec, group_count: int, problems: Problems
) -> None:
    """Collect the problems of a schedule.

    Args:
        spec: The schedule.
        optimizer: The optimizer that it changes, already valid.
        group_count: Number of the optimizer's parameter groups.
        problems: Collects the problems.
    """
    known = known_options(spec.name)
    before = len(problems.lines)
    for name, value in spec.options.items():
        field = f"schedule.options.{name}"
        if name not in known:
            hints = nearest(name, known)
            available = f"available: {', '.join(known)}" if known else "it has none"
            rest = f"nearest: {', '.join(hints)}" if hints else available
            problems.add(field, f"{spec.name} has no such option; {rest}")
        elif wrong := _wrong(name, value, group_count):
            problems.add(field, f"must be {wrong}, not {value!r}")
    for name in _REQUIRED.get(spec.name, ()):
        if spec.options.get(name) is None:
            problems.add(f"schedule.options.{name}", f"{spec.name} needs it")
    if len(problems.lines) == before:
        _try(spec, optimizer, group_count, problems)


def known_options(name: str) -> list[str]:
    """Return the names of a schedule's options."""
    if name not in _CLASSES:
        return []
    parameters = inspect.signature(_CLASSES[name]).parameters
    return [option for option in parameters if option not in _NOT_OFFERED]


def _wrong(name: str, value: Option, group_count: int) -> str:
    """Return the requirement that an option fails; empty if it is valid."""
    if name in _WORDS:
        return "" if value in _WORDS[name] else f"one of {', '.join(_WORDS[name])}"
    if name in _BOOLEANS:
        return "" if isinstance(value, bool) else "true or false"
    if name in _COUNTS:
        is_left_out = value is None and name in ("T_max", "total_steps", "epochs", "steps_per_epoch")
        return (
            "" if is_whole(value, _COUNTS[name]) or is_left_out else f"a whole number from {_COUNTS[name]} on"
        )
    least = "positive" if name in _POSITIVE else "finite"
    if isinstance(value, list) and name in _LISTS:
        is_fine = len(value) == group_count and all(_is_fine(name, number) for number in value)
        rest = f"a {least} number, or a list of {group_count}, one for each parameter group"
        return "" if is_fine else rest
    if name == "pct_start":
        is_share = isinstance(value, int | float) and is_number(value) and 0 <= value < 1
        return "" if is_share else "a number from 0 to less than 1"
    return "" if _is_fine(name, value) else f"a {least} number"


def _is_fine(name: str, value: Any) -> bool:
    return is_number(value) and bool(value > 0 or name not in _POSITIVE)


def _try(spec: ScheduleSpec, optimizer: OptimizerSpec, group_count: int, problems: Problems) -> None:
    """Try out the schedule in torch, on a throwaway parameter."""
    named = {f"p{index}": nn.Parameter(torch.zeros(1)) for index in range(group_count)}
    try:
        made = make_optimizer(optimizer.model_copy(update={"groups": ()}), named)
        if group_count > 1:
            made.param_groups[0]["params"] = [named["p0"]]
            for name in list(named)[1:]:
                made.add_param_group({"params": [named[name]]})
        make_schedulers(spec, made, _LENGTH + spec.warmup)
    except ServiceError:
        return  # the optimizer's own problem
    except (ValueError, TypeError, ZeroDivisionError, OverflowError) as error:
        problems.add("schedule.options", f"PyTorch rejects them: {first_line(error)}")
