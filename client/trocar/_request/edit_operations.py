"""Edit operations: one function each, whose parameters are the operation's options."""

import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, TypeAlias

from trocar._base.names import name_hint
from trocar._base.tensors import WireTensor
from trocar._request.operands import (
    OperandLike,
    count,
    dimension,
    flag,
    integer,
    number,
    one_of,
    operand,
    spec,
    tensor,
    text,
)
from trocar._request.stored.direction_fits import check_direction_name
from trocar_api.enums import numbers
from trocar_api.v1 import edit_pb2 as pb
from trocar_api.v1 import tensor_pb2

Built: TypeAlias = tuple[pb.Edit, tuple[WireTensor, ...]]
"""An edit of which only the operation is set, and the arrays that go with it, in order."""

EditOperation: TypeAlias = Literal[
    "set",
    "zero",
    "add",
    "scale",
    "affine",
    "clamp",
    "noise",
    "mean_ablate",
    "resample",
    "swap",
    "add_input",
    "steer",
    "cap",
    "project_out",
    "project_onto",
    "top_k",
    "dropout",
    "cast",
    "skip",
    "normalise",
    "nan_to_num",
]
"""The names of `OPERATIONS`, for type checkers."""

NOISE_KINDS = numbers(pb.NoiseKind)
"""Wire kind of noise by name."""

NORM_SCOPES = numbers(pb.NormScope)
"""Wire scope of norms by name."""

DIRECTION_UNITS = numbers(pb.DirectionUnits)
"""Wire units of edits with stored directions by name."""

CAST_DTYPES: dict[str, tensor_pb2.Dtype.ValueType] = {
    "float16": tensor_pb2.DTYPE_FLOAT16,
    "bfloat16": tensor_pb2.DTYPE_BFLOAT16,
    "int8": tensor_pb2.DTYPE_INT8,
}
"""Wire dtype of casts by name."""


def _set(value: OperandLike) -> Built:
    message, tensors = operand("set: value", value)
    return pb.Edit(set=message), tensors


def _zero() -> Built:
    return pb.Edit(zero=pb.ZeroEdit()), ()


def _add(value: OperandLike) -> Built:
    message, tensors = operand("add: value", value)
    return pb.Edit(add=message), tensors


def _scale(factor: OperandLike) -> Built:
    message, tensors = operand("scale: factor", factor)
    return pb.Edit(scale=message), tensors


def _affine(scale: OperandLike = 1.0, shift: OperandLike = 0.0) -> Built:
    factor, factors = operand("affine: scale", scale)
    added, shifts = operand("affine: shift", shift)
    return pb.Edit(affine=pb.AffineEdit(scale=factor, shift=added)), (*factors, *shifts)


def _clamp(low: float | None = None, high: float | None = None) -> Built:
    return pb.Edit(clamp=pb.ClampEdit(**_limits("clamp", low, high))), ()


def _limits(operation: str, low: float | None, high: float | None) -> dict[str, float]:
    """Return the given limits by name.

    Raises:
        ValueError: There are none, or they are in the wrong order.
    """
    ends = {"low": low, "high": high}
    numbers = {name: number(f"{operation}: {name}", end) for name, end in ends.items() if end is not None}
    if not numbers:
        raise ValueError(f"{operation} needs low, high or both")
    if len(numbers) == 2 and numbers["low"] > numbers["high"]:
        raise ValueError(f"{operation}: low {numbers['low']} is above high {numbers['high']}")
    return numbers


def _noise(scale: float, kind: str = "gaussian", seed: int = 0) -> Built:
    message = pb.NoiseEdit(
        kind=NOISE_KINDS[one_of("noise: kind", kind, NOISE_KINDS)],
        scale=_not_negative("noise: scale", scale),
        seed=integer("noise: seed", seed),
    )
    return pb.Edit(noise=message), ()


def _mean_ablate(reference: OperandLike | None = None) -> Built:
    if reference is None:
        return pb.Edit(mean_ablate=pb.MeanAblateEdit()), ()
    sent = tensor("mean_ablate: reference", reference)
    return pb.Edit(mean_ablate=pb.MeanAblateEdit(reference=spec(sent))), (sent,)


def _resample(seed: int = 0) -> Built:
    return pb.Edit(resample=pb.ResampleEdit(seed=integer("resample: seed", seed))), ()


def _swap(source: str | None = None, at: str | None = None) -> Built:
    if source is None and at is None:
        raise ValueError("swap needs source=, the name of other inputs, or at=, a selector, or both")
    message = pb.SwapEdit(
        source="" if source is None else text("swap: source", source),
        selector="" if at is None else text("swap: at", at),
    )
    return pb.Edit(swap=message), ()


def _add_input() -> Built:
    return pb.Edit(add_input=pb.AddInputEdit()), ()


def _steer(
    direction: OperandLike | str,
    alpha: float = 1.0,
    keep_norm: bool = False,
    units: str = "raw",
    relative: bool = False,
) -> Built:
    if isinstance(direction, str):
        steer = pb.DirectionSteer(
            alpha=number("steer: alpha", alpha),
            keeps_norm=flag("steer: keep_norm", keep_norm),
            is_relative=flag("steer: relative", relative),
        )
        return _along(direction, units, steer=steer)
    _check_raw("steer", units)
    sent = tensor("steer: direction", direction, ranks=(1, 2))
    message = pb.SteerEdit(
        direction=spec(sent),
        alpha=number("steer: alpha", alpha),
        keeps_norm=flag("steer: keep_norm", keep_norm),
        is_relative=flag("steer: relative", relative),
    )
    return pb.Edit(steer=message), (sent,)


def _cap(
    direction: OperandLike | str, low: float | None = None, high: float | None = None, units: str = "raw"
) -> Built:
    limits = _limits("cap", low, high)
    if isinstance(direction, str):
        return _along(direction, units, cap=pb.DirectionCap(**limits))
    _check_raw("cap", units)
    sent = tensor("cap: direction", direction, ranks=(1, 2))
    return pb.Edit(cap=pb.CapEdit(direction=spec(sent), **limits)), (sent,)


def _along(name: str, units: str, **kind: Any) -> Built:
    """Return an edit with a stored direction."""
    unit = DIRECTION_UNITS[one_of("units", units, DIRECTION_UNITS)]
    return pb.Edit(direction=pb.DirectionEdit(name=check_direction_name(name), units=unit, **kind)), ()


def _check_raw(name: str, units: str) -> None:
    """Refuse units of an array, whose place nothing is known of."""
    one_of("units", units, DIRECTION_UNITS)
    if units != "raw":
        raise ValueError(
            f"{name}: units={units!r} is for stored directions, by name; scale the array instead"
        )


def _project_out(basis: OperandLike | str) -> Built:
    if isinstance(basis, str):
        return _along(basis, "raw", project_out=True)
    message, tensors = _basis("project_out", basis)
    return pb.Edit(project_out=message), tensors


def _project_onto(basis: OperandLike) -> Built:
    message, tensors = _basis("project_onto", basis)
    return pb.Edit(project_onto=message), tensors


def _top_k(k: int, dim: int | None = None, absolute: bool = False) -> Built:
    message = pb.TopKEdit(
        k=count("top_k: k", k),
        dim=None if dim is None else dimension("top_k: dim", dim),
        is_absolute=flag("top_k: absolute", absolute),
    )
    return pb.Edit(top_k=message), ()


def _dropout(probability: float, seed: int = 0) -> Built:
    share = number("dropout: probability", probability)
    if not 0 <= share < 1:
        raise ValueError(f"dropout: probability is {share}; it must be 0 to below 1")
    return pb.Edit(dropout=pb.DropoutEdit(probability=share, seed=integer("dropout: seed", seed))), ()


def _cast(dtype: str) -> Built:
    return pb.Edit(cast=pb.CastEdit(dtype=CAST_DTYPES[one_of("cast: dtype", dtype, CAST_DTYPES)])), ()


def _skip() -> Built:
    return pb.Edit(skip=pb.SkipEdit()), ()


def _normalise(max_norm: float, scope: str = "sample", exact: bool = False) -> Built:
    limit = number("normalise: max_norm", max_norm)
    if limit <= 0:
        raise ValueError(f"normalise: max_norm is {limit}; it must be above 0")
    message = pb.NormaliseEdit(
        max_norm=limit,
        scope=NORM_SCOPES[one_of("normalise: scope", scope, NORM_SCOPES)],
        is_exact=flag("normalise: exact", exact),
    )
    return pb.Edit(normalise=message), ()


def _nan_to_num(nan: float = 0.0, posinf: float | None = None, neginf: float | None = None) -> Built:
    given = {"nan": nan, "posinf": posinf, "neginf": neginf}
    numbers = {name: number(f"nan_to_num: {name}", new) for name, new in given.items() if new is not None}
    return pb.Edit(nan_to_num=pb.NanToNumEdit(**numbers)), ()


OPERATIONS: dict[str, Callable[..., Built]] = {
    "set": _set,
    "zero": _zero,
    "add": _add,
    "scale": _scale,
    "affine": _affine,
    "clamp": _clamp,
    "noise": _noise,
    "mean_ablate": _mean_ablate,
    "resample": _resample,
    "swap": _swap,
    "add_input": _add_input,
    "steer": _steer,
    "cap": _cap,
    "project_out": _project_out,
    "project_onto": _project_onto,
    "top_k": _top_k,
    "dropout": _dropout,
    "cast": _cast,
    "skip": _skip,
    "normalise": _normalise,
    "nan_to_num": _nan_to_num,
}
"""What makes an operation's message, by its name on the wire."""


COMMON_OPTIONS = ("channels", "samples", "tokens", "index", "mask", "positions", "order", "channel_dim")
"""What every edit can say."""


def build_operation(name: str, values: Sequence[Any], options: Mapping[str, Any]) -> Built:
    """Return an operation as a message.

    Args:
        name: One of `OPERATIONS`.
        values: Its first options, by position.
        options: Others, by name.

    Raises:
        TypeError: An option is unknown, missing, given twice, or of the wrong type.
        ValueError: There is no such operation, or a value is out of range.
    """
    if name not in OPERATIONS:
        raise ValueError(f"no operation {name!r}; {name_hint(name, OPERATIONS)}")
    make, known = OPERATIONS[name], operation_options(name)
    unknown = next((option for option in options if option not in known), None)
    if unknown is not None:
        raise TypeError(f"{name} has no option {unknown!r}; {name_hint(unknown, (*known, *COMMON_OPTIONS))}")
    try:
        bound = inspect.signature(make).bind(*values, **options)
    except TypeError as error:
        raise TypeError(f"{name}: {error}; it is written {_form(name)}") from None
    return make(*bound.args, **bound.kwargs)


def operation_options(name: str) -> tuple[str, ...]:
    """Return the names of an operation's options, in order."""
    return tuple(inspect.signature(OPERATIONS[name]).parameters)


def _form(name: str) -> str:
    """Return the signature of an operation, for example `noise(scale, kind='gaussian', seed=0)`."""
    parameters = inspect.signature(OPERATIONS[name]).parameters.values()
    return f"{name}({', '.join(str(p.replace(annotation=inspect.Parameter.empty)) for p in parameters)})"


def _not_negative(label: str, value: object) -> float:
    result = number(label, value)
    if result < 0:
        raise ValueError(f"{label} is {result}; it must be at least 0")
    return result


def _basis(name: str, basis: OperandLike) -> tuple[pb.ProjectEdit, tuple[WireTensor, ...]]:
    """Return the rows that span a subspace; one vector is a basis of one row."""
    sent = tensor(f"{name}: basis", basis, ranks=(1, 2))
    sent = sent if len(sent.shape) == 2 else sent._replace(shape=(1, *sent.shape))
    return pb.ProjectEdit(basis=spec(sent)), (sent,)
