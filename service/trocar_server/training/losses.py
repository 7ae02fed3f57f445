"""The loss of a trainer: a weighted sum of terms on its output, on taps and against teachers.

loss = LossFunction(spec.losses)
loss.check_targets(batch.targets, batch.size, shapes)
total, terms = loss(output, tapped, batch.targets, teachers)
"""

from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor

from trocar_api.reasons import ErrorReason
from trocar_server.errors import ServiceError
from trocar_server.training.loss_targets import Shape, check_target, converted, number_dtype
from trocar_server.training.loss_terms import WITHOUT_TARGET, compute
from trocar_server.training.spec import LossSpec, TeacherSpec

_NO_TENSORS: Mapping[str, Tensor] = {}
_NO_TEACHERS: Mapping[TeacherSpec, Tensor] = {}


class LossFunction:
    """A weighted sum of losses.

    Args:
        specs: Its terms.

    Attributes:
        specs: Its terms.
        names: A name for each term: that of its loss with its selector, and a number where that is not
            enough: `cross_entropy`, `mse:layer4`, `mse:layer4#2`.
        selectors: The values of the trained model's pass that it needs, besides the output, as texts.
        teachers: The values of other models that it needs.
    """

    def __init__(self, specs: Sequence[LossSpec]) -> None:
        self.specs = tuple(specs)
        self.names = _names(self.specs)
        self.selectors = tuple(dict.fromkeys(spec.selector for spec in specs if spec.selector))
        self.teachers = tuple(dict.fromkeys(spec.teacher for spec in specs if spec.teacher is not None))

    def check_targets(
        self, targets: Mapping[str, Tensor], size: int, shapes: Mapping[str, Shape] | None = None
    ) -> None:
        """Refuse targets before the pass; on a GPU a label out of range would end the process's use of it.

        Args:
            targets: By name; one without a name is "".
            size: The batch's size.
            shapes: Shapes of the values by selector, "" for the output, as far as they are known.

        Raises:
            ServiceError: `TARGET_REJECTED`.
        """
        for spec in self.specs:
            if _needs_target(spec):
                shape = (shapes or {}).get(spec.selector)
                check_target(spec, _target(spec, targets), size, shape)

    def __call__(
        self,
        output: Any,
        values: Mapping[str, Tensor] = _NO_TENSORS,
        targets: Mapping[str, Tensor] = _NO_TENSORS,
        teachers: Mapping[TeacherSpec, Tensor] = _NO_TEACHERS,
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """Compute the loss.

        Args:
            output: What the model returned; see `main_output`.
            values: Other values of its pass, by selector.
            targets: By name. `check_targets` comes before; here only shapes are looked at.
            teachers: Values of other models.

        Returns:
            The sum, and the terms by name: detached, before their weights.

        Raises:
            ServiceError: `TARGET_REJECTED`, or `TRAINER_INVALID` where a value cannot have such a loss.
        """
        total: Tensor | None = None
        terms: dict[str, Tensor] = {}
        for spec, name in zip(self.specs, self.names, strict=True):
            value = values[spec.selector] if spec.selector else main_output(output)
            term = _term(spec, value, targets, teachers)
            terms[name] = term.detach()
            weighted = term if spec.weight == 1.0 else term * spec.weight
            total = weighted if total is None else total + weighted
        if total is None:
            raise ServiceError(ErrorReason.TRAINER_INVALID, "losses: a trainer needs a loss at least")
        return total, terms


def main_output(output: Any) -> Tensor:
    """Return the tensor of a model's output that the loss is of.

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
        f"the model returns a {type(output).__name__}, of which no part is known to be the main one; say in "
        'each loss which value it is of, for example `selector: "/out[0]"`',
    )


def _term(
    spec: LossSpec, value: Tensor, targets: Mapping[str, Tensor], teachers: Mapping[TeacherSpec, Tensor]
) -> Tensor:
    if spec.teacher is not None:
        other = teachers[spec.teacher].to(value.device, number_dtype(value))
        if other.shape != value.shape:
            raise ServiceError(
                ErrorReason.TRAINER_INVALID,
                f"{spec.name}: the teacher's value has shape {tuple(other.shape)}, this one "
                f"{tuple(value.shape)}; choose values of one shape",
            )
        return compute(spec, value, other)
    if spec.name in WITHOUT_TARGET:
        return compute(spec, value, None)
    target = converted(spec, _target(spec, targets), value)
    try:
        return compute(spec, value, target)
    except (IndexError, ValueError, RuntimeError) as error:
        if "out of bounds" not in str(error):
            raise
        raise ServiceError(ErrorReason.TARGET_REJECTED, f"{spec.name}: a label is out of range") from None


def _needs_target(spec: LossSpec) -> bool:
    return spec.teacher is None and spec.name not in WITHOUT_TARGET


def _target(spec: LossSpec, targets: Mapping[str, Tensor]) -> Tensor:
    if spec.target in targets:
        return targets[spec.target]
    if not spec.target and len(targets) == 1:
        return next(iter(targets.values()))
    there = ", ".join(f"'{name}'" for name in targets) or "none"
    wanted = f"a target '{spec.target}'" if spec.target else "one target, or to be told which"
    raise ServiceError(
        ErrorReason.TARGET_REJECTED, f"{spec.name} needs {wanted}; the batch has {there}", loss=spec.name
    )


def _names(specs: Sequence[LossSpec]) -> tuple[str, ...]:
    names: list[str] = []
    for spec in specs:
        plain = f"{spec.name}:{spec.selector}" if spec.selector else spec.name
        count = sum(name == plain or name.startswith(f"{plain}#") for name in names)
        names.append(f"{plain}#{count + 1}" if count else plain)
    return tuple(names)
