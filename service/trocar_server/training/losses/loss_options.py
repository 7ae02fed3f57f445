"""Loss options: allowed names and values."""

from typing import Any

from trocar_server.errors import nearest
from trocar_server.tensors.losses import LOSSES
from trocar_server.training.losses.token_targets import LEFT_OUT
from trocar_server.training.spec.option_values import is_number, is_whole
from trocar_server.training.spec.problems import Problems
from trocar_server.training.spec.trainer_spec import LossSpec

MAX_CLASSES = 1 << 53
"""Of a model whose classes are not known before a pass."""

_POSITIONS = 2
"""Dimensions of a value, beside the batch, from which on it has positions."""


def option_problems(spec: LossSpec, shape: tuple[int, ...] | None, field: str, problems: Problems) -> None:
    """Collect the problems of a loss's options.

    Args:
        spec: The loss.
        shape: Shape of its value, if known.
        field: Path of the loss in the trainer's spec.
        problems: Collects the problems.
    """
    known = LOSSES[spec.name].options + LOSSES[spec.name].layout_options
    for name, value in spec.options.items():
        where = f"{field}.options.{name}"
        if name not in known:
            hints = nearest(name, known)
            available = f"available: {', '.join(known)}" if known else "it has none"
            rest = f"nearest: {', '.join(hints)}" if hints else available
            problems.add(where, f"{spec.name} has no such option; {rest}")
        elif wrong := _wrong(spec, name, value, shape):
            problems.add(where, f"must be {wrong}, not {_short(value)}")
    if spec.teacher is not None and spec.options.get("log_target"):
        problems.add(f"{field}.options.log_target", "a teacher's value is logits; leave it out")


def _wrong(spec: LossSpec, name: str, value: Any, shape: tuple[int, ...] | None) -> str:
    """Return the requirement that an option fails; empty if it is valid."""
    if name == "reduction":
        allowed = ("batchmean", "mean", "sum") if spec.name == "kl_div" else ("mean", "sum")
        return "" if value in allowed else f"one of {', '.join(allowed)}"
    if name in ("log_target", "is_symmetric", "label_all_tokens"):
        return "" if isinstance(value, bool) else "true or false"
    if name == "ignore_index":
        return "" if is_whole(value, -(1 << 53)) else "a whole number"
    if name == "label_smoothing":
        return "" if is_number(value) and 0 <= value <= 1 else "a number from 0 to 1"
    if name in ("temperature", "delta", "scale", "clip"):
        return "" if is_number(value) and value > 0 else "a positive number"
    if name == "b_to_i":
        return _wrong_classes(value, shape)
    return _wrong_weights(spec, name, value, shape)


def _wrong_classes(value: Any, shape: tuple[int, ...] | None) -> str:
    count = None if shape is None else shape[-1]
    most = MAX_CLASSES if count is None else count
    numbers = value if isinstance(value, list) else []
    # JSON-like options arrive as floats.
    are_classes = all(
        is_number(number) and (number == LEFT_OUT or (number == int(number) and 0 <= number < most))
        for number in numbers
    )
    if numbers and are_classes and count in (None, len(numbers)):
        return ""
    size = "one class" if count is None else f"{count} classes, one"
    return f"a list of {size} for each class, or {LEFT_OUT} to leave out"


def _wrong_weights(spec: LossSpec, name: str, value: Any, shape: tuple[int, ...] | None) -> str:
    if value is None:
        return ""
    numbers = value if isinstance(value, list) else [value]
    may_be_one = name == "pos_weight"
    of_tokens, sizes = LOSSES[spec.name].of_tokens, () if shape is None else shape[1:]
    count = sizes[-1 if of_tokens else 0] if sizes else None
    # Where classes are in a value of three dimensions or more, its layout says, which is not known here.
    fits = {count} if len(sizes) < _POSITIONS else set(sizes)
    is_long_enough = count is None or len(numbers) in fits or (may_be_one and len(numbers) == 1)
    if (
        not all(is_number(number) and number >= 0 for number in numbers)
        or not is_long_enough
        or not (may_be_one or isinstance(value, list))
    ):
        one = "a number or " * may_be_one
        return f"{one}a list of {'' if count is None else f'{count} '}numbers, at least 0, one for each class"
    return "" if any(numbers) else "a list in which not all numbers are 0"


def _short(value: object) -> str:
    if isinstance(value, list) and len(value) > 8:
        return f"a list of {len(value)}"
    return repr(value)
