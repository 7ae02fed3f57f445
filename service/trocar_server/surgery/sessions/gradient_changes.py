"""Gradient changes: an edit operation applied to one gradient.

make_change("clamp", {"low": -0.1, "high": 0.1})(gradient)
"""

import math
from collections.abc import Callable, Mapping, Sequence
from functools import partial

from torch import Tensor

from trocar_api.reasons import ErrorReason
from trocar_server.errors import ServiceError, nearest
from trocar_server.tensors.edits import (
    Clamp,
    NanToNum,
    Noise,
    NoiseKind,
    Normalise,
    NormScope,
    Operation,
    Scale,
    Zero,
    apply_operation,
)

Change = Callable[[Tensor], Tensor]
"""Returns a new tensor of the same shape, dtype and device."""


def make_change(name: str, options: Mapping[str, object]) -> Change:
    """Return a rule's change, by name.

    `clamp` (`low`, `high`; one may be missing), `scale` (`factor`), `zero`, `noise` (`scale`: adds normal
    numbers of torch's present generator), `nan_to_num` (`nan`, `posinf`, `neginf` as in torch), `normalise`
    (`max_norm`: times max_norm / norm where the Euclidean norm, computed in float64, is over it).

    Raises:
        ServiceError: `TRAINER_INVALID`, an unknown option, a missing one, or one that is not a finite number.
    """
    numbers = check_options(name, options, _OPTIONS[name], _REQUIRED.get(name, ()))
    for option in ("scale", "max_norm"):
        if numbers.get(option, 0.0) < 0:
            raise _invalid(f"{option} must be at least 0, not {numbers[option]}")
    try:
        return partial(apply_operation, _EDITS[name](**numbers))
    except ServiceError as problem:  # what edits refuse, too
        raise _invalid(problem.message) from None


def check_options(
    name: str, options: Mapping[str, object], known: Sequence[str], required: Sequence[str]
) -> dict[str, float]:
    """Return a rule's numeric options, validated.

    Raises:
        ServiceError: `TRAINER_INVALID`, an unknown option, a missing one, or one that is not a finite number.
    """
    for option, value in options.items():
        if option not in known:
            hints = nearest(option, known)
            available = ", ".join(known) or "none"
            rest = f"nearest: {', '.join(hints)}" if hints else f"available: {available}"
            raise _invalid(f"{name} has no option '{option}'; {rest}")
        if value is not None and not _is_finite(value):
            raise _invalid(f"{option} must be a finite number, not {value!r}")
    numbers = {option: float(value) for option, value in options.items() if isinstance(value, int | float)}
    for option in required:
        if option not in numbers:
            raise _invalid(f"{name} needs the option '{option}'")
    return numbers


def _is_finite(value: object) -> bool:
    if isinstance(value, bool) or not isinstance(value, int | float):
        return False
    try:
        return math.isfinite(value)
    except OverflowError:
        return False


def _noise(scale: float) -> Operation:
    return Noise(NoiseKind.GAUSSIAN, scale, seed=None)


def _normalise(max_norm: float) -> Operation:
    return Normalise(max_norm, NormScope.ALL) if max_norm else Scale(0.0)


_OPTIONS: dict[str, tuple[str, ...]] = {
    "clamp": ("low", "high"),
    "scale": ("factor",),
    "zero": (),
    "noise": ("scale",),
    "nan_to_num": ("nan", "posinf", "neginf"),
    "normalise": ("max_norm",),
}
_REQUIRED = {"scale": ("factor",), "noise": ("scale",), "normalise": ("max_norm",)}
_EDITS: dict[str, Callable[..., Operation]] = {
    "clamp": Clamp,
    "scale": Scale,
    "zero": Zero,
    "noise": _noise,
    "nan_to_num": NanToNum,
    "normalise": _normalise,
}


def _invalid(message: str) -> ServiceError:
    return ServiceError(ErrorReason.TRAINER_INVALID, message)
