"""What a gradient rule does to one gradient.

make_change("clamp", {"low": -0.1, "high": 0.1})(gradient)
"""

import math
from collections.abc import Callable, Mapping
from functools import partial

import torch
from torch import Tensor

from trocar_api.reasons import ErrorReason
from trocar_server.errors import ServiceError, nearest

Change = Callable[[Tensor], Tensor]
"""Returns a new tensor of the same shape, dtype and device."""


def make_change(name: str, options: Mapping[str, object]) -> Change:
    """Return what a rule does.

    `clamp` (`low`, `high`; one may be missing), `scale` (`factor`), `zero`, `noise` (`std`: adds normal
    numbers of torch's present generator), `nan_to_num` (`nan`, `posinf`, `neginf` as in torch), `norm_limit`
    (`limit`: times limit / norm where the Euclidean norm, computed in float64, is over it).

    Raises:
        ServiceError: `TRAINER_INVALID`, an unknown option, a missing one, or one that is no finite number.
    """
    known = _OPTIONS[name]
    for option, value in options.items():
        if option not in known:
            hints = nearest(option, known)
            there = ", ".join(known) or "none"
            rest = f"nearest: {', '.join(hints)}" if hints else f"its options: {there}"
            raise _invalid(f"{name} has no option '{option}'; {rest}")
        if value is not None and not _is_finite(value):
            raise _invalid(f"{option} must be a finite number, not {value!r}")
    numbers = {option: float(value) for option, value in options.items() if isinstance(value, int | float)}
    for option in _REQUIRED.get(name, ()):
        if option not in numbers:
            raise _invalid(f"{name} needs the option '{option}'")
    for option in ("std", "limit"):
        if numbers.get(option, 0.0) < 0:
            raise _invalid(f"{option} must be at least 0, not {numbers[option]}")
    if name == "clamp":
        _check_clamp(numbers)
    return partial(_CHANGES[name], options=numbers)


def _check_clamp(numbers: Mapping[str, float]) -> None:
    low, high = numbers.get("low"), numbers.get("high")
    if low is None and high is None:
        raise _invalid("clamp needs `low`, `high` or both")
    if low is not None and high is not None and low > high:
        raise _invalid(f"clamp: low {low} is above high {high}")


def _is_finite(value: object) -> bool:
    if isinstance(value, bool) or not isinstance(value, int | float):
        return False
    try:
        return math.isfinite(value)
    except OverflowError:
        return False


def _clamp(gradient: Tensor, options: Mapping[str, float]) -> Tensor:
    return gradient.clamp(options.get("low"), options.get("high"))


def _scale(gradient: Tensor, options: Mapping[str, float]) -> Tensor:
    return gradient * options["factor"]


def _zero(gradient: Tensor, options: Mapping[str, float]) -> Tensor:
    return torch.zeros_like(gradient)


def _noise(gradient: Tensor, options: Mapping[str, float]) -> Tensor:
    return gradient + options["std"] * torch.randn_like(gradient)


def _nan_to_num(gradient: Tensor, options: Mapping[str, float]) -> Tensor:
    return torch.nan_to_num(gradient, options.get("nan", 0.0), options.get("posinf"), options.get("neginf"))


def _norm_limit(gradient: Tensor, options: Mapping[str, float]) -> Tensor:
    # In float64, so that squares of large finite numbers do not become infinite.
    norm = torch.linalg.vector_norm(gradient, dtype=torch.float64)
    factor = torch.where(norm > options["limit"], options["limit"] / norm, 1.0)
    return (gradient.double() * factor).to(gradient.dtype)


_OPTIONS: dict[str, tuple[str, ...]] = {
    "clamp": ("low", "high"),
    "scale": ("factor",),
    "zero": (),
    "noise": ("std",),
    "nan_to_num": ("nan", "posinf", "neginf"),
    "norm_limit": ("limit",),
}
_REQUIRED = {"scale": ("factor",), "noise": ("std",), "norm_limit": ("limit",)}
_CHANGES: dict[str, Callable[..., Tensor]] = {
    "clamp": _clamp,
    "scale": _scale,
    "zero": _zero,
    "noise": _noise,
    "nan_to_num": _nan_to_num,
    "norm_limit": _norm_limit,
}


def _invalid(message: str) -> ServiceError:
    return ServiceError(ErrorReason.TRAINER_INVALID, message)
