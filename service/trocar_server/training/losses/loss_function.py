"""Loss function of a trainer: a weighted sum of terms on its output, on taps and against teachers.

loss = LossFunction(spec.losses)
counts = loss.check_targets(batch.targets, batch.size, shapes)
total, terms = loss(output, tapped, batch.targets, teachers, counts=counts)

# Note: [Divergence of tokens]
Of a model of texts, a value of three dimensions is (batch, tokens, classes). `kl_div` then compares the
tokens that count, those of the attention mask, as rows (tokens, classes): `batchmean` is their mean. This is
the recipe of DistilBERT's distillation (`distiller.py` in the research projects of transformers). Where a
decoder has inputs of its own, the mask is `decoder_attention_mask`, or there is none, except for values of
the encoder; see Note: [Padding].
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from trocar_api.reasons import ErrorReason
from trocar_server.errors import ServiceError
from trocar_server.surgery.axes.layout import Layout
from trocar_server.tensors.losses import LOSSES, kl_div_of_logits, number_dtype
from trocar_server.tensors.reductions.padding import Padding
from trocar_server.training.losses.class_dims import POSITIONS, ClassDims
from trocar_server.training.spec.trainer_spec import LossSpec, TeacherSpec

_NO_TENSORS: Mapping[str, Tensor] = {}
_NO_TEACHERS: Mapping[TeacherSpec, Tensor] = {}
_NO_ARGUMENTS: Mapping[str, Any] = {}
_NO_COUNTS: Mapping[int, int | None] = {}
_MOST_FITTING = 256

Shape = Sequence[int | None]
"""Sizes of a value, batch first; None where unknown."""


class NoLabelsError(ServiceError):
    """All labels of a batch are ignored, so it has no loss. A fit may leave it out."""


class LossFunction:
    """A weighted sum of losses.

    Args:
        specs: Its terms.
        of_texts: Whether the model reads texts; see Note: [Divergence of tokens].
        layout_of: Returns what the dimensions of the value of a selector mean; None where that is not known.

    Attributes:
        specs: Its terms.
        names: A unique name per term: its loss with its selector, and a number to resolve duplicates:
            `cross_entropy`, `mse:layer4`, `mse:layer4#2`.
        selectors: Selectors of the values that it needs from the trained model's pass, besides the output.
        teachers: The values that it needs from other models.
        class_dims: Where values have their classes.
    """

    def __init__(
        self,
        specs: Sequence[LossSpec],
        *,
        of_texts: bool = False,
        layout_of: Callable[[str], Layout | None] = lambda _: None,
    ) -> None:
        self.specs, self._of_texts, self._layout_of = tuple(specs), of_texts, layout_of
        self.class_dims = ClassDims(layout_of, of_texts=of_texts)
        self.names = _names(self.specs)
        self.selectors = tuple(dict.fromkeys(spec.selector for spec in specs if spec.selector))
        self.teachers = tuple(dict.fromkeys(spec.teacher for spec in specs if spec.teacher is not None))
        self._fitting: set[tuple[object, ...]] = set()
        """Layouts that were checked: the term, dtype and shape of its target, and the shape of the value."""

    def check_targets(
        self, targets: Mapping[str, Tensor], size: int, shapes: Mapping[int, Shape] | None = None
    ) -> dict[int, int | None]:
        """Validate targets before the pass; a label out of range would break the process's CUDA context.

        Args:
            targets: Targets by name; an unnamed target has the name "".
            size: The batch's size.
            shapes: Shapes of the values by the position of the term, as far as known.

        Returns:
            The number of classes that the labels of each term are within, by its position; None if unknown.

        Raises:
            NoLabelsError: `TARGET_REJECTED`, all labels of a target are ignored.
            ServiceError: `TARGET_REJECTED`.
        """
        counts: dict[int, int | None] = {}
        for index, spec in enumerate(self.specs):
            if spec.teacher is not None or not LOSSES[spec.name].has_target:
                continue
            target, shape = _target(spec, targets), (shapes or {}).get(index)
            if target.ndim >= POSITIONS:
                target = self._arranged(spec, target)
            if shape is not None and len(shape) >= POSITIONS:
                shape = self.class_dims.shape(spec, shape)
            layout = (index, target.dtype, target.shape, size, None if shape is None else tuple(shape))
            if layout not in self._fitting:
                check_layout(spec, target, size, shape)
                self._fits(layout)
            if LOSSES[spec.name].further_targets:
                further_targets(spec, target, targets)
            counts[index] = check_values(spec, target, shape, of_texts=self._of_texts)
        return counts

    def __call__(
        self,
        output: Any,
        values: Mapping[str, Tensor] = _NO_TENSORS,
        targets: Mapping[str, Tensor] = _NO_TENSORS,
        teachers: Mapping[TeacherSpec, Tensor] = _NO_TEACHERS,
        arguments: Mapping[str, Any] = _NO_ARGUMENTS,
        counts: Mapping[int, int | None] = _NO_COUNTS,
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """Compute the loss.

        Args:
            output: The model's output; see `main_output`.
            values: Other values of its pass, by selector.
            targets: Targets by name, validated by `check_targets`; here shapes are checked.
            teachers: Values of other models.
            arguments: Keyword arguments of the pass, an attention mask among them.
            counts: From `check_targets`; labels are checked again if the value has other classes.

        Returns:
            The sum, and the terms by name: detached, before their weights.

        Raises:
            ServiceError: `TARGET_REJECTED`, or `TRAINER_INVALID` if the loss does not apply to a value.
        """
        total: Tensor | None = None
        terms: dict[str, Tensor] = {}
        for index, (spec, name) in enumerate(zip(self.specs, self.names, strict=True)):
            value = values[spec.selector] if spec.selector else main_output(output)
            term = self._term(index, value, targets, teachers, arguments, counts.get(index))
            terms[name] = term.detach()
            weighted = term if spec.weight == 1.0 else term * spec.weight
            total = weighted if total is None else total + weighted
        if total is None:
            raise ServiceError(ErrorReason.TRAINER_INVALID, "losses: a trainer needs at least one loss")
        return total, terms

    def _arranged(self, spec: LossSpec, target: Tensor) -> Tensor:
        """Return a target as the loss's function takes it: one of the value's shape has its dimensions."""
        return target if is_labels(spec, target) else self.class_dims.target(spec, target)

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
        arguments: Mapping[str, Any],
        count: int | None,
    ) -> Tensor:
        spec, raw = self.specs[index], value
        value = raw if raw.ndim < POSITIONS else self.class_dims.value(spec, raw)
        is_of_tokens = self._of_texts and spec.name == "kl_div" and value.ndim == 3
        if spec.teacher is not None:
            other = _taught(spec, value, self.class_dims.value(spec, teachers[spec.teacher]))
            if is_of_tokens:
                value, other = self._rows(spec.selector, raw, value, other, arguments)
            return _computed(spec, value, other)
        if not LOSSES[spec.name].has_target:
            try:
                return LOSSES[spec.name].compute(value, **spec.options)
            except ValueError as error:
                raise ServiceError(ErrorReason.TRAINER_INVALID, f"{spec.name}: {error}") from None
        target = _target(spec, targets)
        if target.ndim >= POSITIONS:
            target = self._arranged(spec, target)
        layout = (index, target.dtype, target.shape, value.shape)
        if layout not in self._fitting:
            check_shape(spec, target, tuple(value.shape))
            self._fits(layout)
        of_classes = value.shape[-1:] if LOSSES[spec.name].of_tokens else value.shape[1:2]
        if of_classes != (count,) and is_labels(spec, target):
            _check_classes(spec, target, tuple(value.shape))
        other = converted(spec, target, value)
        if is_of_tokens:
            value, other = self._rows(spec.selector, raw, value, other, arguments)
        further = further_targets(spec, other, targets) if LOSSES[spec.name].further_targets else {}
        return _computed(spec, value, other, further)

    def _rows(
        self, selector: str, raw: Tensor, value: Tensor, target: Tensor, arguments: Mapping[str, Any]
    ) -> tuple[Tensor, Tensor]:
        """Return the tokens that count as rows (tokens, classes). See Note: [Divergence of tokens].

        Args:
            selector: Of the value.
            raw: The value as the model has it.
            value: The value as (batch, tokens, classes).
            target: The same of the target.
            arguments: Of the pass.
        """
        padding = Padding.of(arguments)
        layout = self._layout_of(selector) if padding.masks else None
        own = padding.own(selector or "/out", raw, layout)
        if own is None or own.mask.shape != value.shape[:2]:
            return value.flatten(0, 1), target.flatten(0, 1)
        counts = own.mask.to(value.device)
        return value[counts], target[counts]


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
        result = output.get(name) if isinstance(output, Mapping) else getattr(output, name, None)
        if isinstance(result, Tensor):
            return result
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
    return other


def _computed(
    spec: LossSpec, value: Tensor, target: Tensor, further: Mapping[str, Tensor] = _NO_TENSORS
) -> Tensor:
    options: dict[str, Any] = dict(spec.options)
    for name in LOSSES[spec.name].layout_options:
        options.pop(name, None)
    if LOSSES[spec.name].compute is kl_div_of_logits:
        options["is_teacher"] = spec.teacher is not None
    return LOSSES[spec.name].compute(value, target, **further, **options)


def _target(spec: LossSpec, targets: Mapping[str, Tensor]) -> Tensor:
    if spec.target in targets:
        return targets[spec.target]
    own = [name for name in targets if name not in LOSSES[spec.name].further_targets]
    if not spec.target and len(own) == 1:
        return targets[own[0]]
    available = ", ".join(f"'{name}'" for name in targets) or "none"
    wanted = f"a target '{spec.target}'" if spec.target else "one target, or the name of a target"
    raise ServiceError(
        ErrorReason.TARGET_REJECTED, f"{spec.name} needs {wanted}; the batch has {available}", loss=spec.name
    )


def further_targets(spec: LossSpec, labels: Tensor, targets: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the further targets of a loss, on the device of its labels.

    Args:
        spec: The loss.
        labels: Its labels.
        targets: Targets by name.

    Raises:
        ServiceError: `TARGET_REJECTED`, the first is missing, or one does not fit the labels.
    """
    named: dict[str, Tensor] = {}
    for place, name in enumerate(LOSSES[spec.name].further_targets):
        if name not in targets and place:
            continue
        if (given := targets.get(name)) is None:
            raise _rejected(spec, f"comes with a target '{name}': a number for each label or sample")
        fits = tuple(given.shape) == tuple(labels.shape) or (not place and given.shape == labels.shape[:1])
        if not (given.is_floating_point() and fits and bool(torch.isfinite(given).all())):
            shapes = f"{tuple(labels.shape)}" + ("" if place else f" or ({len(labels)},)")
            raise _rejected(
                spec,
                f"comes with '{name}' of shape {tuple(given.shape)} and dtype {_dtype(given)}; it is finite "
                f"real numbers of shape {shapes}",
            )
        named[name] = given.to(labels.device)
    return named


def _names(specs: Sequence[LossSpec]) -> tuple[str, ...]:
    names: list[str] = []
    for spec in specs:
        plain = f"{spec.name}:{spec.selector}" if spec.selector else spec.name
        count = sum(name == plain or name.startswith(f"{plain}#") for name in names)
        names.append(f"{plain}#{count + 1}" if count else plain)
    return tuple(names)


def is_labels(spec: LossSpec, target: Tensor) -> bool:
    """Whether a target holds class indices, not values to approximate."""
    return LOSSES[spec.name].takes_indices and not target.is_floating_point()


def converted(spec: LossSpec, target: Tensor, value: Tensor) -> Tensor:
    """Return a target as its loss takes it: labels as int64, all others in the dtype of the value."""
    dtype = torch.int64 if is_labels(spec, target) else number_dtype(value)
    return target.to(value.device, dtype)


def check_layout(spec: LossSpec, target: Tensor, size: int, shape: Shape | None) -> None:
    """Refuse a target before the pass, by its dtype and shape.

    Args:
        spec: The loss.
        target: The batch's target.
        size: The batch's size.
        shape: Shape of the value that it is compared with, as far as known.

    Raises:
        ServiceError: `TARGET_REJECTED`.
    """
    if target.is_complex():
        raise _rejected(spec, f"has dtype {_dtype(target)}; send labels or real numbers")
    if target.ndim == 0 or target.shape[0] != size:
        got = "a single number" if target.ndim == 0 else f"{target.shape[0]} entries"
        raise _rejected(spec, f"has {got} for a batch of {size}; its first dimension is the batch")
    if shape is not None:
        check_shape(spec, target, shape)


def check_values(
    spec: LossSpec, target: Tensor, shape: Shape | None, *, of_texts: bool = False
) -> int | None:
    """Refuse a target before the pass, by its values.

    Args:
        spec: The loss.
        target: The batch's target, of a valid dtype and shape.
        shape: Shape of the value that it is compared with, as far as known.
        of_texts: See `LossFunction`.

    Returns:
        The number of classes that labels are within; None where it is unknown, and for other targets.

    Raises:
        NoLabelsError: All labels are ignored.
        ServiceError: `TARGET_REJECTED`: numbers that are not finite, labels out of range.
    """
    if target.is_floating_point() and not torch.isfinite(target).all():
        raise _rejected(spec, "has numbers that are not finite (NaN or infinity)")
    if LOSSES[spec.name].takes_indices:
        return None if target.is_floating_point() else _check_classes(spec, target, shape)
    if spec.name == "bce_with_logits":
        _check_range(spec, target)
    elif spec.name == "kl_div":
        _check_probabilities(spec, target, -1 if of_texts and target.ndim == 3 else min(1, target.ndim - 1))
    return None


def check_shape(spec: LossSpec, target: Tensor, shape: Shape) -> None:
    """Refuse a target whose shape does not fit the value's shape.

    Raises:
        ServiceError: `TARGET_REJECTED`, with the expected shape.
    """
    if LOSSES[spec.name].of_tokens:
        _check_token_labels(spec, target, shape)
        return
    if spec.name == "cross_entropy":
        labels = (*shape[:1], *shape[2:])
        if is_labels(spec, target):
            if not _matches(tuple(target.shape), labels):
                raise _rejected(
                    spec,
                    f"has shape {tuple(target.shape)}; labels for values of shape {_shown(shape)} have shape "
                    f"{_shown(labels)}",
                )
            return
        if _matches(tuple(target.shape), labels) and not _matches(tuple(target.shape), shape):
            raise _rejected(
                spec,
                f"has dtype {_dtype(target)}; labels are integers, soft targets have shape {_shown(shape)}",
            )
    if not _matches(tuple(target.shape), shape):
        raise _rejected(
            spec, f"has shape {tuple(target.shape)}; it must be that of the value, {_shown(shape)}"
        )


def _check_token_labels(spec: LossSpec, target: Tensor, shape: Shape) -> None:
    if not is_labels(spec, target):
        raise _rejected(spec, f"has dtype {_dtype(target)}; labels are integers")
    if not _matches(tuple(target.shape), shape[:-1]):
        raise _rejected(
            spec,
            f"has shape {tuple(target.shape)}; labels for values of shape {_shown(shape)} have shape "
            f"{_shown(shape[:-1])}",
        )


def _check_classes(spec: LossSpec, target: Tensor, shape: Shape | None) -> int | None:
    ignored = spec.options.get("ignore_index", -100)
    labels = target.to(torch.int64)
    is_counted = labels.ne(int(ignored) if isinstance(ignored, int) else -100)
    if target.dtype == torch.uint64:  # values over 2^63 became negative
        is_counted |= labels < 0
    if spec.name in (
        "causal_lm",
        "policy_gradient",
    ):  # nothing comes before the first token, so it is never predicted
        is_counted[..., :1] = False
    labels = labels[is_counted]
    if not labels.numel():
        problem = _rejected(
            spec,
            f"has only labels equal to ignore_index ({ignored}), so there is no loss; trainers with "
            "`on_nonfinite` 'skip' skip such batches",
        )
        raise NoLabelsError(problem.reason, problem.message, **problem.details)
    least, most = labels.aminmax()
    low, high = int(least), int(most)
    count = None
    if shape is not None:
        count = shape[-1] if LOSSES[spec.name].of_tokens else shape[1] if len(shape) > 1 else shape[0]
    if low < 0 or (count is not None and high >= count):
        top = "at least 0" if count is None else f"from 0 to {count - 1}: the model has {count} classes"
        raise _rejected(spec, f"has labels from {low} to {high}; they must be {top}")
    return count


def _check_range(spec: LossSpec, target: Tensor) -> None:
    if bool(((target < 0) | (target > 1)).any()):
        raise _rejected(spec, "has numbers outside of 0 to 1; bce_with_logits takes probabilities")


def _check_probabilities(spec: LossSpec, target: Tensor, dim: int) -> None:
    if not target.is_floating_point():
        raise _rejected(spec, f"has dtype {_dtype(target)}; kl_div takes probabilities")
    if spec.options.get("log_target"):
        target = target.exp()
    sums = target.double().sum(dim)
    if bool((target < 0).any()) or bool(((sums - 1).abs() > 1e-2).any()):
        raise _rejected(spec, "is not a list of probabilities: each is at least 0, and a sample's sum to 1")


def _matches(shape: tuple[int, ...], known: Shape) -> bool:
    if shape == tuple(known):
        return True
    return len(shape) == len(known) and all(
        wanted is None or size == wanted for size, wanted in zip(shape, known, strict=True)
    )


def _shown(shape: Shape) -> str:
    unknown = ("batch", *"?" * len(shape))
    sizes = ", ".join(name if size is None else str(size) for name, size in zip(unknown, shape, strict=False))
    return f"({sizes}{',' if len(shape) == 1 else ''})"


def _dtype(target: Tensor) -> str:
    return str(target.dtype).removeprefix("torch.")


def _rejected(spec: LossSpec, what: str) -> ServiceError:
    who = f"the target '{spec.target}'" if spec.target else "the target"
    return ServiceError(ErrorReason.TARGET_REJECTED, f"{who} of {spec.name} {what}", loss=spec.name)
