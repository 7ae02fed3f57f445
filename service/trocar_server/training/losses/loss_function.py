"""Loss function of a trainer: a weighted sum of terms on its output, on taps and against teachers.

loss = LossFunction(spec.losses)
loss.check_targets(batch.targets, batch.size, shapes)
total, terms = loss(output, tapped, batch.targets, teachers)
"""

from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor

from trocar_api.reasons import ErrorReason
from trocar_server.errors import ServiceError
from trocar_server.tensors.losses import LOSSES, kl_div_of_logits, number_dtype
from trocar_server.training.losses.loss_targets import (
    Shape,
    check_layout,
    check_shape,
    check_values,
    converted,
)
from trocar_server.training.spec.trainer_spec import LossSpec, TeacherSpec

_NO_TENSORS: Mapping[str, Tensor] = {}
_NO_TEACHERS: Mapping[TeacherSpec, Tensor] = {}
_MOST_FITTING = 256


class LossFunction:
    """A weighted sum of losses.

    Args:
        specs: Its terms.

    Attributes:
        specs: Its terms.
        names: A unique name per term: its loss with its selector, and a number to resolve duplicates:
            `cross_entropy`, `mse:layer4`, `mse:layer4#2`.
        selectors: Selectors of the values that it needs from the trained model's pass, besides the output.
        teachers: The values that it needs from other models.
    """

    def __init__(self, specs: Sequence[LossSpec]) -> None:
        self.specs = tuple(specs)
        self.names = _names(self.specs)
        self.selectors = tuple(dict.fromkeys(spec.selector for spec in specs if spec.selector))
        self.teachers = tuple(dict.fromkeys(spec.teacher for spec in specs if spec.teacher is not None))
        self._fitting: set[tuple[object, ...]] = set()
        """Layouts that were checked: the term, dtype and shape of its target, and the shape of the value."""

    def check_targets(
        self, targets: Mapping[str, Tensor], size: int, shapes: Mapping[str, Shape] | None = None
    ) -> None:
        """Validate targets before the pass; a label out of range would break the process's CUDA context.

        Args:
            targets: Targets by name; an unnamed target has the name "".
            size: The batch's size.
            shapes: Shapes of the values by selector, "" for the output, as far as known.

        Raises:
            ServiceError: `TARGET_REJECTED`.
        """
        for index, spec in enumerate(self.specs):
            if spec.teacher is not None or not LOSSES[spec.name].has_target:
                continue
            target, shape = _target(spec, targets), (shapes or {}).get(spec.selector)
            layout = (index, target.dtype, target.shape, size, None if shape is None else tuple(shape))
            if layout not in self._fitting:
                check_layout(spec, target, size, shape)
                self._fits(layout)
            check_values(spec, target, shape)

    def __call__(
        self,
        output: Any,
        values: Mapping[str, Tensor] = _NO_TENSORS,
        targets: Mapping[str, Tensor] = _NO_TENSORS,
        teachers: Mapping[TeacherSpec, Tensor] = _NO_TEACHERS,
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """Compute the loss.

        Args:
            output: The model's output; see `main_output`.
            values: Other values of its pass, by selector.
            targets: Targets by name, validated by `check_targets`; here only shapes are checked.
            teachers: Values of other models.

        Returns:
            The sum, and the terms by name: detached, before their weights.

        Raises:
            ServiceError: `TARGET_REJECTED`, or `TRAINER_INVALID` if the loss does not apply to a value.
        """
        total: Tensor | None = None
        terms: dict[str, Tensor] = {}
        for index, (spec, name) in enumerate(zip(self.specs, self.names, strict=True)):
            value = values[spec.selector] if spec.selector else main_output(output)
            term = self._term(index, value, targets, teachers)
            terms[name] = term.detach()
            weighted = term if spec.weight == 1.0 else term * spec.weight
            total = weighted if total is None else total + weighted
        if total is None:
            raise ServiceError(ErrorReason.TRAINER_INVALID, "losses: a trainer needs at least one loss")
        return total, terms

    def _fits(self, layout: tuple[object, ...]) -> None:
        if len(self._fitting) >= _MOST_FITTING:
            self._fitting.clear()
        self._fitting.add(layout)

    def _term(
        self,
        index: int,
        value: Tensor,
        targets: Mapping[str, Tensor],
        teachers: Mapping[TeacherSpec, Tensor],
    ) -> Tensor:
        spec = self.specs[index]
        if spec.teacher is not None:
            return _taught(spec, value, teachers[spec.teacher])
        if not LOSSES[spec.name].has_target:
            try:
                return LOSSES[spec.name].compute(value, **spec.options)
            except ValueError as error:
                raise ServiceError(ErrorReason.TRAINER_INVALID, f"{spec.name}: {error}") from None
        target = _target(spec, targets)
        layout = (index, target.dtype, target.shape, value.shape)
        if layout not in self._fitting:
            check_shape(spec, target, tuple(value.shape))
            self._fits(layout)
        try:
            return _computed(spec, value, converted(spec, target, value))
        except (IndexError, ValueError, RuntimeError) as error:
            if "out of bounds" not in str(error):
                raise
            raise ServiceError(ErrorReason.TARGET_REJECTED, f"{spec.name}: a label is out of range") from None


def main_output(output: Any) -> Tensor:
    """Return the tensor of a model's output to which the loss applies.

    It is the output itself, `logits` of a named tuple or an object (GoogLeNet and Inception in train mode),
    or the entry `out` of a dict (segmentation).

    Raises:
        ServiceError: `TRAINER_INVALID`, it is something else.
    """
    if isinstance(output, Tensor):
        return output
    for name in ("logits", "out"):
        found = output.get(name) if isinstance(output, Mapping) else getattr(output, name, None)
        if isinstance(found, Tensor):
            return found
    if isinstance(output, tuple | list) and len(output) == 1 and isinstance(output[0], Tensor):
        return output[0]
    raise ServiceError(
        ErrorReason.TRAINER_INVALID,
        f"the model returns a {type(output).__name__}, and it is unclear which part is its main output; set "
        'the `selector` of each loss, for example `selector: "/out[0]"`',
    )


def _taught(spec: LossSpec, value: Tensor, taught: Tensor) -> Tensor:
    other = taught.to(value.device, number_dtype(value))
    if other.shape != value.shape:
        raise ServiceError(
            ErrorReason.TRAINER_INVALID,
            f"{spec.name}: the teacher's value has shape {tuple(other.shape)}, this one "
            f"{tuple(value.shape)}; choose values of one shape",
        )
    return _computed(spec, value, other)


def _computed(spec: LossSpec, value: Tensor, target: Tensor) -> Tensor:
    options: dict[str, Any] = dict(spec.options)
    for name in LOSSES[spec.name].layout_options:
        options.pop(name, None)
    if spec.name == "kl_div":
        return kl_div_of_logits(value, target, is_teacher=spec.teacher is not None, **options)
    return LOSSES[spec.name].compute(value, target, **options)


def _target(spec: LossSpec, targets: Mapping[str, Tensor]) -> Tensor:
    if spec.target in targets:
        return targets[spec.target]
    if not spec.target and len(targets) == 1:
        return next(iter(targets.values()))
    available = ", ".join(f"'{name}'" for name in targets) or "none"
    wanted = f"a target '{spec.target}'" if spec.target else "one target, or the name of a target"
    raise ServiceError(
        ErrorReason.TARGET_REJECTED, f"{spec.name} needs {wanted}; the batch has {available}", loss=spec.name
    )


def _names(specs: Sequence[LossSpec]) -> tuple[str, ...]:
    names: list[str] = []
    for spec in specs:
        plain = f"{spec.name}:{spec.selector}" if spec.selector else spec.name
        count = sum(name == plain or name.startswith(f"{plain}#") for name in names)
        names.append(f"{plain}#{count + 1}" if count else plain)
    return tuple(names)
