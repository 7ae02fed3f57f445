"""Learning rate schedules: torch's own schedulers behind one interface.

    schedule = Schedule(spec.schedule, optimizer)
    schedule.expect(total_steps=1000)       # if the length is known, as in `fit`
    schedule.advance("step")                # after each update

# Note: [Steps and epochs]
A schedule counts steps or epochs, as `per` says. A plateau counts evaluations, its warm-up steps or epochs.
"""

import copy
import math
from collections.abc import Mapping
from typing import Any, Literal

import torch
from torch.optim.lr_scheduler import (
    CosineAnnealingLR,
    LinearLR,
    LRScheduler,
    OneCycleLR,
    ReduceLROnPlateau,
    SequentialLR,
    StepLR,
)

from trocar_api.reasons import ErrorReason
from trocar_server.errors import ServiceError
from trocar_server.training.spec.trainer_spec import ScheduleSpec

JSON = Any
"""A JSON value."""

_TOTALS = {"cosine": "T_max", "one_cycle": "total_steps"}


class Schedule:
    """Changes the learning rates of an optimizer's groups.

    torch's schedulers are created at once, or, if the options lack the length of the training, by `expect`.
    Creating them sets the initial rates.

    Args:
        spec: The schedule.
        optimizer: A new optimizer, with the rates of its options; or one with a loaded state, before `load`.

    Attributes:
        count: Steps or epochs so far, as `per` says.
        evaluation_count: Evaluations so far that a plateau has seen.
        is_made: Whether it has the length that it requires.
    """

    def __init__(self, spec: ScheduleSpec, optimizer: torch.optim.Optimizer) -> None:
        self.count = 0
        self.evaluation_count = 0
        self._spec = spec
        self._optimizer = optimizer
        self._total: int | None = None
        self._clock: LRScheduler | None = None
        self._plateau: ReduceLROnPlateau | None = None
        self.is_made = False
        self._initial_groups = [_scheduled(group) for group in optimizer.param_groups]
        if not needs_total(spec):
            self._make()

    @property
    def rates(self) -> list[float]:
        """The current rate of each group."""
        return [float(group["lr"]) for group in self._optimizer.param_groups]

    def expect(self, total_steps: int | None = None, total_epochs: int | None = None) -> None:
        """Set the length of the training, before its first step; a length in the spec takes precedence.

        It has no effect once a step is counted, or if no length is missing. Before that the last one holds: a
        fit that ends before its first update does not determine the length of the next one.

        Raises:
            ServiceError: `FIT_INVALID`, the schedule cannot have this length; it is as before.
        """
        total = total_steps if self._spec.per == "step" else total_epochs
        if total is None or self.count or not needs_total(self._spec) or total == self._total:
            return
        before = self.state()
        self._unmake()
        self._total = total
        try:
            self._make()
        except ZeroDivisionError as error:  # of torch's OneCycleLR (2.14), with a part of no step
            self._unmake()
            self.load(before)
            units = "updates" if self._spec.per == "step" else "epochs"
            raise ServiceError(
                ErrorReason.FIT_INVALID,
                f"schedule.options.pct_start: the fit has {total} {units}, and a cycle cannot end its rise "
                "with the first one; use another `pct_start`, or more epochs",
            ) from error

    def check_ready(self) -> None:
        """Refuse to train if the schedule lacks a required length. Call it before a step.

        Raises:
            ServiceError: `TRAINER_INVALID`.
        """
        if not self.is_made:
            option = _TOTALS[self._spec.name]
            raise ServiceError(
                ErrorReason.TRAINER_INVALID,
                f"schedule.options.{option}: a {self._spec.name} schedule needs its length; set `{option}`, "
                "or train with `fit`, which knows it",
            )

    def advance(self, unit: Literal["step", "epoch"]) -> None:
        """Count an update or an epoch; no effect on a schedule of the other unit."""
        if self._spec.per != unit:
            return
        self.count += 1
        if self._clock is None:
            return
        if isinstance(self._clock, OneCycleLR) and self.count >= self._clock.total_steps:
            return  # keep the last rate; torch would go one step beyond the end, then raise (2.14)
        self._optimizer._opt_called = True  # type: ignore[attr-defined]  # updated in backward: torch would warn
        self._clock.step()

    def after_evaluation(self, value: float) -> None:
        """Pass the result of an evaluation to a plateau."""
        if self._plateau is not None:
            self.evaluation_count += 1
            self._plateau.step(value)

    def state(self) -> dict[str, JSON]:
        """Return the state for `load`, as JSON values."""
        return {
            "count": self.count,
            "evaluation_count": self.evaluation_count,
            "total": self._total,
            "is_made": self.is_made,
            "clock": _to_json(self._clock.state_dict()) if self._clock else None,
            "plateau": _to_json(self._plateau.state_dict()) if self._plateau else None,
            "groups": [_to_json(_scheduled(group)) for group in self._optimizer.param_groups],
        }

    def load(self, state: Mapping[str, JSON]) -> None:
        """Resume from another schedule's state; the optimizer's rates are restored, too."""
        if needs_total(self._spec) and not state["is_made"]:
            self._unmake()
        self._total = state["total"]
        if state["is_made"] and not self.is_made:
            self._make()
        if self._clock and state["clock"]:
            self._clock.load_state_dict(_from_json(state["clock"]))
        if self._plateau and state["plateau"]:
            self._plateau.load_state_dict(_from_json(state["plateau"]))
        self.count, self.evaluation_count = state["count"], state["evaluation_count"]
        for group, saved in zip(self._optimizer.param_groups, state["groups"], strict=True):
            for name, value in saved.items():
                read = _from_json(value)
                group[name] = tuple(read) if isinstance(read, list) else read

    def _make(self) -> None:
        self._clock, self._plateau = make_schedulers(self._spec, self._optimizer, self._total)
        self.is_made = True

    def _unmake(self) -> None:
        """Forget the length, and what its scheduler has put into the groups: the next one would keep it."""
        self._clock, self._total, self.is_made = None, None, False
        for group, initial in zip(self._optimizer.param_groups, self._initial_groups, strict=True):
            for name in _scheduled(group).keys() - initial.keys():
                del group[name]
            group.update(initial)


_SCHEDULED = ("lr", "initial_lr", "max_lr", "min_lr", "momentum", "betas", "max_momentum", "base_momentum")


def _scheduled(group: Mapping[str, Any]) -> dict[str, Any]:
    """Return the values of a group that schedulers set."""
    return {name: value for name, value in group.items() if name in _SCHEDULED}


def needs_total(spec: ScheduleSpec) -> bool:
    """Whether the length of the training is missing from the options."""
    option = _TOTALS.get(spec.name)
    if option is None or spec.options.get(option) is not None:
        return False
    return spec.name == "cosine" or not (spec.options.get("epochs") and spec.options.get("steps_per_epoch"))


def make_schedulers(
    spec: ScheduleSpec, optimizer: torch.optim.Optimizer, total: int | None = None
) -> tuple[LRScheduler | None, ReduceLROnPlateau | None]:
    """Return torch's scheduler for steps or epochs, and the one for evaluations.

    Args:
        spec: The schedule.
        optimizer: The optimizer; its rates are set to the initial ones.
        total: Steps or epochs of the training, warm-up included.
    """
    options: dict[str, Any] = copy.deepcopy(spec.options)
    if "pct_start" in options:  # whole numbers arrive as int, which torch refuses here
        options["pct_start"] = float(options["pct_start"])
    if total is not None and needs_total(spec):
        options[_TOTALS[spec.name]] = max(1, total - spec.warmup)
    warm = None
    if spec.warmup:
        warm = LinearLR(optimizer, start_factor=spec.warmup_start, total_iters=spec.warmup)
    if spec.name == "plateau":
        return warm, ReduceLROnPlateau(optimizer, **options)
    if spec.name == "constant":
        return warm, None
    main: LRScheduler
    if spec.name == "step":
        main = StepLR(optimizer, **options)
    elif spec.name == "cosine":
        main = CosineAnnealingLR(optimizer, **options)
    else:
        main = OneCycleLR(optimizer, **options)
    return (SequentialLR(optimizer, [warm, main], [spec.warmup]) if warm else main), None


def _to_json(value: Any) -> JSON:
    """Copy a state; a non-finite number, which JSON lacks, becomes a string."""
    if isinstance(value, dict):
        return {key: _to_json(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [_to_json(each) for each in value]
    if isinstance(value, float) and not math.isfinite(value):
        return {"float": str(value)}
    return value


def _from_json(value: JSON) -> Any:
    if isinstance(value, dict):
        if value.keys() == {"float"}:
            return float(value["float"])
        return {key: _from_json(each) for key, each in value.items()}
    if isinstance(value, list):
        return [_from_json(each) for each in value]
    return value
