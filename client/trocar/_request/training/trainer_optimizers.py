"""Optimizers and schedules of a trainer. Names and options are torch's own; the server checks them."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from trocar._base.delegation import explained
from trocar._request.training.trainer_options import (
    Selectors,
    flag,
    made_by,
    number,
    options_to_wire,
    selectors,
    text,
    whole,
)
from trocar_api.v1 import trainer_pb2 as pb


@dataclass(frozen=True)
class ParameterGroup:
    """Parameters with options of their own; made by `parameter_group`."""

    parameters: tuple[str, ...]
    options: Mapping[str, object]


@explained
def parameter_group(parameters: Selectors, **options: object) -> ParameterGroup:
    """Return parameters with separate options, such as another rate: `parameter_group("fc", lr=0.1)`."""
    return ParameterGroup(tuple(selectors(parameters, "parameters")), options)


@dataclass(frozen=True)
class Optimizer:
    """An optimizer of torch; made by `sgd`, `adam`, `adamw`, `rmsprop`, `adagrad`, `lbfgs`."""

    name: str
    options: Mapping[str, object]
    groups: tuple[ParameterGroup, ...] = ()
    in_backward: bool = False

    def to_wire(self) -> pb.OptimizerSpec:
        """Return the message."""
        groups = [
            pb.ParameterGroupSpec(parameters=group.parameters, options=options_to_wire(group.options))
            for group in self.groups
        ]
        return pb.OptimizerSpec(
            name=self.name,
            options=options_to_wire(self.options),
            groups=groups,
            in_backward=flag("in_backward", self.in_backward),
        )


def _optimizer(
    name: str, lr: float, groups: Sequence[ParameterGroup], in_backward: bool, options: Mapping[str, object]
) -> Optimizer:
    for group in groups:
        made_by(
            "groups",
            group,
            ParameterGroup,
            "create groups with trocar.training.parameter_group('fc', lr=0.1)",
        )
    return Optimizer(name, {"lr": lr, **options}, tuple(groups), in_backward)


@explained
def sgd(
    lr: float = 0.01, *, groups: Sequence[ParameterGroup] = (), in_backward: bool = False, **options: object
) -> Optimizer:
    """Return `torch.optim.SGD`.

    Args:
        lr: Learning rate.
        groups: Parameters with other options; all other parameters have the options given here.
        in_backward: Whether each parameter is updated, and its gradient freed, in the backward pass.
        **options: torch's own: momentum, weight_decay, nesterov, ...
    """
    return _optimizer("sgd", lr, groups, in_backward, options)


@explained
def adam(
    lr: float = 1e-3, *, groups: Sequence[ParameterGroup] = (), in_backward: bool = False, **options: object
) -> Optimizer:
    """Return `torch.optim.Adam`; see `sgd` for the arguments."""
    return _optimizer("adam", lr, groups, in_backward, options)


@explained
def adamw(
    lr: float = 1e-3, *, groups: Sequence[ParameterGroup] = (), in_backward: bool = False, **options: object
) -> Optimizer:
    """Return `torch.optim.AdamW`; see `sgd` for the arguments."""
    return _optimizer("adamw", lr, groups, in_backward, options)


@explained
def rmsprop(
    lr: float = 0.01, *, groups: Sequence[ParameterGroup] = (), in_backward: bool = False, **options: object
) -> Optimizer:
    """Return `torch.optim.RMSprop`; see `sgd` for the arguments."""
    return _optimizer("rmsprop", lr, groups, in_backward, options)


@explained
def adagrad(
    lr: float = 0.01, *, groups: Sequence[ParameterGroup] = (), in_backward: bool = False, **options: object
) -> Optimizer:
    """Return `torch.optim.Adagrad`; see `sgd` for the arguments."""
    return _optimizer("adagrad", lr, groups, in_backward, options)


@explained
def lbfgs(lr: float = 1.0, **options: object) -> Optimizer:
    """Return `torch.optim.LBFGS`, which runs the batch of a step several times.

    Args:
        lr: Learning rate.
        **options: torch's own: max_iter, history_size, line_search_fn, ...
    """
    return _optimizer("lbfgs", lr, (), False, options)


@dataclass(frozen=True)
class Schedule:
    """Learning rate schedule; made by `schedule`."""

    name: str
    options: Mapping[str, object]
    per: str = "step"
    warmup: int = 0
    warmup_start: float = 0.01

    def to_wire(self) -> pb.ScheduleSpec:
        """Return the message."""
        return pb.ScheduleSpec(
            name=text("name", self.name),
            options=options_to_wire(self.options),
            per=text("per", self.per),
            warmup=whole("warmup", self.warmup, bits=32),
            warmup_start=number("warmup_start", self.warmup_start),
        )


@explained
def schedule(
    name: Literal["constant", "step", "cosine", "one_cycle", "plateau"],
    *,
    per: Literal["step", "epoch"] = "step",
    warmup: int = 0,
    warmup_start: float = 0.01,
    **options: object,
) -> Schedule:
    """Return a learning rate schedule.

    Args:
        name: "constant", "step" (torch's StepLR), "cosine" (CosineAnnealingLR), "one_cycle" (OneCycleLR)
            or "plateau" (ReduceLROnPlateau).
        per: When the rate changes: after each "step" or "epoch".
        warmup: Steps (or epochs) in which the rate grows from `warmup_start` times its value to its value.
        warmup_start: The factor at the start of `warmup`.
        **options: torch's own. `fit` fills in T_max and total_steps.
    """
    return Schedule(name, options, per, warmup, warmup_start)
