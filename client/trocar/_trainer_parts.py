"""What a trainer is made of: heads, losses, optimizers, schedules, gradient rules, saved tensors.

Names and options are torch's own; the server checks them and says every problem at once.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from google.protobuf.struct_pb2 import Struct

from trocar_api.v1 import trainer_pb2 as pb

Selectors = str | Sequence[str]


def selectors(chosen: Selectors) -> list[str]:
    """Return one or several selectors as a list."""
    return [chosen] if isinstance(chosen, str) else [*chosen]


def options_to_wire(options: Mapping[str, object]) -> Struct:
    """Turn options by name into a message.

    Raises:
        TypeError: A value is no number, text, bool, None or list of these.
    """
    message = Struct()
    message.update({name: _plain(name, value) for name, value in options.items()})
    return message


def _plain(name: str, value: object) -> Any:
    if isinstance(value, np.generic | np.ndarray):
        value = value.tolist()
    if isinstance(value, Mapping):
        return {str(key): _plain(name, entry) for key, entry in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(name, entry) for entry in value]
    if value is None or isinstance(value, bool | int | float | str):
        return value
    raise TypeError(f"option {name} is a {type(value).__name__}; options are numbers, texts, bools and lists")


@dataclass(frozen=True)
class Head:
    """A new classifier; made by `head`."""

    classes: int
    hidden: tuple[int, ...] = ()
    dropout: float = 0.0
    init: str = "default"
    bias: bool = True
    path: str = ""

    def to_wire(self) -> pb.HeadSpec:
        """Return the message."""
        return pb.HeadSpec(
            path=self.path,
            classes=self.classes,
            hidden=self.hidden,
            dropout=self.dropout,
            init=self.init,
            bias=self.bias,
        )


def head(
    classes: int,
    *,
    hidden: Sequence[int] = (),
    dropout: float = 0.0,
    init: str = "default",
    bias: bool = True,
    path: str = "",
) -> Head:
    """Return a new classifier for `Client.train`.

        client.train("resnet18", head=trocar.head(10, hidden=[256], dropout=0.1))

    Args:
        classes: Its outputs.
        hidden: Widths of hidden layers, each followed by a ReLU; none for a single Linear.
        dropout: Probability of dropout before each layer.
        init: "default" (torch's own), "zeros", "normal" (deviation 0.01), "xavier" or "kaiming" (uniform).
        bias: Whether its layers have biases.
        path: The module that it takes the place of; the server finds the classifier when empty.
    """
    return Head(classes, tuple(hidden), dropout, init, bias, path)


@dataclass(frozen=True)
class Teacher:
    """A value of another hosted model on the same inputs; made by `teacher`."""

    model_id: str
    selector: str = ""


def teacher(model_id: str, selector: str = "") -> Teacher:
    """Return what a loss term compares with instead of a target.

    Args:
        model_id: The id of a loaded model.
        selector: Which of its values; its output when empty.
    """
    return Teacher(model_id, selector)


@dataclass(frozen=True)
class LossTerm:
    """One term of a trainer's loss; made by `loss_term`."""

    name: str
    weight: float = 1.0
    at: str = ""
    target: str = ""
    teacher: Teacher | None = None
    options: Mapping[str, object] = field(default_factory=dict)

    def to_wire(self) -> pb.LossSpec:
        """Return the message."""
        message = pb.LossSpec(
            name=self.name,
            weight=self.weight,
            selector=self.at,
            target=self.target,
            options=options_to_wire(self.options),
        )
        if self.teacher is not None:
            message.teacher.CopyFrom(
                pb.TeacherSpec(model_id=self.teacher.model_id, selector=self.teacher.selector)
            )
        return message


def loss_term(
    name: str,
    *,
    weight: float = 1.0,
    at: str = "",
    target: str = "",
    teacher: Teacher | str | None = None,
    **options: object,
) -> LossTerm:
    """Return one term of a trainer's loss.

        losses=[trocar.loss_term("cross_entropy", label_smoothing=0.1),
                trocar.loss_term("kl_div", teacher="resnet50", temperature=4.0, weight=0.5)]

    Args:
        name: "cross_entropy", "bce_with_logits", "mse", "l1", "huber", "kl_div", or without a target
            "l1_norm" (mean absolute value) and "l2_norm" (mean square).
        weight: Factor in the sum.
        at: The value that it is of, for example "layer4"; the model's output when empty.
        target: Which of the batch's targets, where there are several.
        teacher: Another model, or `teacher(...)`, to compare with instead of a target.
        **options: torch's own: label_smoothing, weight (of the classes), ignore_index, delta, ...; with
            "kl_div" and a teacher, temperature.
    """
    found = Teacher(teacher) if isinstance(teacher, str) else teacher
    return LossTerm(name, weight, at, target, found, options)


@dataclass(frozen=True)
class Regularizer:
    """A penalty on weights; made by `regularizer`."""

    parameters: tuple[str, ...]
    norm: str
    weight: float

    def to_wire(self) -> pb.RegularizerSpec:
        """Return the message."""
        return pb.RegularizerSpec(parameters=self.parameters, norm=self.norm, weight=self.weight)


def regularizer(parameters: Selectors, weight: float, *, norm: str = "l2") -> Regularizer:
    """Return a penalty on weights: weight times the sum of their squares ("l2") or absolute values ("l1").

    Args:
        parameters: Modules or parameters by selector.
        weight: Factor.
        norm: "l2" or "l1".
    """
    return Regularizer(tuple(selectors(parameters)), norm, weight)


@dataclass(frozen=True)
class ParameterGroup:
    """Parameters with options of their own; made by `parameter_group`."""

    parameters: tuple[str, ...]
    options: Mapping[str, object]


def parameter_group(parameters: Selectors, **options: object) -> ParameterGroup:
    """Return parameters with options of their own, such as another rate: `parameter_group("fc", lr=0.1)`."""
    return ParameterGroup(tuple(selectors(parameters)), options)


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
            in_backward=self.in_backward,
        )


def _optimizer(
    name: str, lr: float, groups: Sequence[ParameterGroup], in_backward: bool, options: Mapping[str, object]
) -> Optimizer:
    return Optimizer(name, {"lr": lr, **options}, tuple(groups), in_backward)


def sgd(
    lr: float = 0.01, *, groups: Sequence[ParameterGroup] = (), in_backward: bool = False, **options: object
) -> Optimizer:
    """Return `torch.optim.SGD`.

    Args:
        lr: Learning rate.
        groups: Parameters with other options; what none names has those given here.
        in_backward: Whether each parameter is updated, and its gradient freed, in the backward pass.
        **options: torch's own: momentum, weight_decay, nesterov, ...
    """
    return _optimizer("sgd", lr, groups, in_backward, options)


def adam(
    lr: float = 1e-3, *, groups: Sequence[ParameterGroup] = (), in_backward: bool = False, **options: object
) -> Optimizer:
    """Return `torch.optim.Adam`; see `sgd` for the arguments."""
    return _optimizer("adam", lr, groups, in_backward, options)


def adamw(
    lr: float = 1e-3, *, groups: Sequence[ParameterGroup] = (), in_backward: bool = False, **options: object
) -> Optimizer:
    """Return `torch.optim.AdamW`; see `sgd` for the arguments."""
    return _optimizer("adamw", lr, groups, in_backward, options)


def rmsprop(
    lr: float = 0.01, *, groups: Sequence[ParameterGroup] = (), in_backward: bool = False, **options: object
) -> Optimizer:
    """Return `torch.optim.RMSprop`; see `sgd` for the arguments."""
    return _optimizer("rmsprop", lr, groups, in_backward, options)


def adagrad(
    lr: float = 0.01, *, groups: Sequence[ParameterGroup] = (), in_backward: bool = False, **options: object
) -> Optimizer:
    """Return `torch.optim.Adagrad`; see `sgd` for the arguments."""
    return _optimizer("adagrad", lr, groups, in_backward, options)


def lbfgs(lr: float = 1.0, **options: object) -> Optimizer:
    """Return `torch.optim.LBFGS`, which runs the batch of a step several times.

    Args:
        lr: Learning rate.
        **options: torch's own: max_iter, history_size, line_search_fn, ...
    """
    return _optimizer("lbfgs", lr, (), False, options)


@dataclass(frozen=True)
class Schedule:
    """How learning rates change; made by `schedule`."""

    name: str
    options: Mapping[str, object]
    per: str = "step"
    warmup: int = 0
    warmup_start: float = 0.01

    def to_wire(self) -> pb.ScheduleSpec:
        """Return the message."""
        return pb.ScheduleSpec(
            name=self.name,
            options=options_to_wire(self.options),
            per=self.per,
            warmup=self.warmup,
            warmup_start=self.warmup_start,
        )


def schedule(
    name: str, *, per: str = "step", warmup: int = 0, warmup_start: float = 0.01, **options: object
) -> Schedule:
    """Return how learning rates change.

    Args:
        name: "constant", "step" (torch's StepLR), "cosine" (CosineAnnealingLR), "one_cycle" (OneCycleLR)
            or "plateau" (ReduceLROnPlateau).
        per: After what they change: "step" or "epoch".
        warmup: Steps (or epochs) in which they grow from `warmup_start` times to once themselves.
        warmup_start: See there.
        **options: torch's own. `fit` fills in T_max and total_steps.
    """
    return Schedule(name, options, per, warmup, warmup_start)


@dataclass(frozen=True)
class GradientRule:
    """A declared change to gradients; made by `clamp` or `gradient_rule`."""

    selector: str
    name: str
    options: Mapping[str, object]

    def to_wire(self) -> pb.GradientRuleSpec:
        """Return the message."""
        return pb.GradientRuleSpec(
            selector=self.selector, name=self.name, options=options_to_wire(self.options)
        )


def gradient_rule(selector: str, name: str, **options: object) -> GradientRule:
    """Return a change to gradients.

    Args:
        selector: Parameters ("fc.*", "layer4", "fc.bias") or the gradient at a value ("layer4/grad_out").
        name: "clamp" (low, high), "scale" (factor), "zero", "noise" (std), "nan_to_num" (nan, posinf, neginf)
            or "norm_limit" (limit: the most Euclidean norm of each tensor).
        **options: As said there.
    """
    return GradientRule(selector, name, options)


def clamp(selector: str, low: float, high: float) -> GradientRule:
    """Return the rule that clamps each element of gradients: `clamp("fc.*", -0.1, 0.1)`. NaN stays NaN."""
    return gradient_rule(selector, "clamp", low=low, high=high)


@dataclass(frozen=True)
class SavedTensors:
    """Where what autograd saves lies; made by `spool` or `host_memory`."""

    store: str
    budget_bytes: int = 256 << 20
    modules: tuple[str, ...] = ()
    min_bytes: int = 32 << 10
    store_dtype: str = ""

    def to_wire(self) -> pb.SavedTensorsSpec:
        """Return the message."""
        return pb.SavedTensorsSpec(
            store=self.store,
            budget_bytes=self.budget_bytes,
            modules=self.modules,
            min_bytes=self.min_bytes,
            store_dtype=self.store_dtype,
        )


def spool(
    budget_bytes: int = 256 << 20,
    *,
    modules: Selectors = (),
    min_bytes: int = 32 << 10,
    store_dtype: str = "",
) -> SavedTensors:
    """Keep what autograd saves within a budget in memory, and the rest on the server's disk.

    Args:
        budget_bytes: The most bytes in memory.
        modules: Only what these modules save; all when empty.
        min_bytes: Smaller tensors stay in memory.
        store_dtype: "bf16" or "int8" for less precision on disk; exact when empty.
    """
    return SavedTensors("spool", budget_bytes, tuple(selectors(modules)), min_bytes, store_dtype)


def host_memory() -> SavedTensors:
    """Keep what autograd saves in the host's memory instead of the GPU's."""
    return SavedTensors("host")
