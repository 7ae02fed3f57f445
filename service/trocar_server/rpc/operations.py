"""From the operation of an `Edit` message to ours."""

from collections.abc import Callable
from typing import Any

from trocar_api.reasons import ErrorReason
from trocar_api.v1 import edit_pb2 as pb
from trocar_server.edits import (
    Add,
    AddInput,
    Affine,
    Cast,
    Clamp,
    Dropout,
    MeanAblate,
    NanToNum,
    Noise,
    NoiseKind,
    Normalise,
    NormScope,
    Operand,
    Operation,
    Project,
    ProjectOnto,
    Resample,
    Scale,
    Set,
    Skip,
    Steer,
    Swap,
    TopK,
    Zero,
)
from trocar_server.rpc.constants import constant_from_wire
from trocar_server.rpc.dtypes import from_wire
from trocar_server.rpc.fields import MAX_TEXT_CHARACTERS, invalid, named
from trocar_server.rpc.selector_parts import selector_from_text

_NOISE_KINDS: dict[pb.NoiseKind.ValueType, NoiseKind] = {
    pb.NOISE_KIND_GAUSSIAN: NoiseKind.GAUSSIAN,
    pb.NOISE_KIND_UNIFORM: NoiseKind.UNIFORM,
}
_NORM_SCOPES: dict[pb.NormScope.ValueType, NormScope] = {
    pb.NORM_SCOPE_UNSPECIFIED: NormScope.SAMPLE,
    pb.NORM_SCOPE_SAMPLE: NormScope.SAMPLE,
    pb.NORM_SCOPE_CHANNEL_VECTOR: NormScope.CHANNEL_VECTOR,
    pb.NORM_SCOPE_ALL: NormScope.ALL,
}


def operation_from_wire(field: str, message: pb.Edit) -> Operation:
    """Convert and check the operation of an edit that is no stored one; `field` is the edit's name in errors.

    Raises:
        ServiceError: `INVALID_ARGUMENT`, `INVALID_TENSOR`, `NON_FINITE_VALUE`, `INVALID_SELECTOR` or
            `EDIT_NOT_POSSIBLE`, with the field named.
    """
    kind = message.WhichOneof("operation")
    if kind is None:
        raise invalid(field, "has no operation; set one, for example `zero`")
    name = f"{field}.{kind}"
    with named(name):
        return _READERS[kind](name, getattr(message, kind))


def _operand(field: str, message: pb.Operand) -> Operand:
    kind = message.WhichOneof("kind")
    if kind is None:
        raise invalid(field, "needs a constant or a tensor")
    return message.constant if kind == "constant" else constant_from_wire(field, message.tensor)


def _affine(field: str, message: pb.AffineEdit) -> Operation:
    return Affine(
        _operand(f"{field}.scale", message.scale) if message.HasField("scale") else 1.0,
        _operand(f"{field}.shift", message.shift) if message.HasField("shift") else 0.0,
    )


def _clamp(field: str, message: pb.ClampEdit) -> Operation:
    return Clamp(
        message.low if message.HasField("low") else None, message.high if message.HasField("high") else None
    )


def _noise(field: str, message: pb.NoiseEdit) -> Operation:
    if message.kind not in _NOISE_KINDS:
        raise invalid(f"{field}.kind", f"noise kind {message.kind} is unset or unknown")
    return Noise(_NOISE_KINDS[message.kind], message.scale, message.seed)


def _mean_ablate(field: str, message: pb.MeanAblateEdit) -> Operation:
    if not message.HasField("reference"):
        return MeanAblate()
    return MeanAblate(constant_from_wire(f"{field}.reference", message.reference))


def _swap(field: str, message: pb.SwapEdit) -> Operation:
    if len(message.source) > MAX_TEXT_CHARACTERS:
        raise invalid(f"{field}.source", f"over {MAX_TEXT_CHARACTERS} characters")
    if message.selector:
        with named(f"{field}.selector"):
            selector = selector_from_text(f"{field}.selector", message.selector)
        if selector.is_gradient or selector.parameter is not None:
            raise invalid(
                f"{field}.selector",
                f"'{message.selector}' is no value of the forward pass; swap takes an output or input",
                ErrorReason.EDIT_NOT_POSSIBLE,
            )
    return Swap(message.source, message.selector)


def _steer(field: str, message: pb.SteerEdit) -> Operation:
    direction = constant_from_wire(f"{field}.direction", message.direction)
    if not 1 <= len(direction.shape) <= 2:
        raise invalid(
            f"{field}.direction", f"of shape {direction.shape}; it is (channels,) or (batch, channels)"
        )
    return Steer(direction, message.alpha, message.keeps_norm)


def _normalise(field: str, message: pb.NormaliseEdit) -> Operation:
    if message.scope not in _NORM_SCOPES:
        raise invalid(f"{field}.scope", f"unknown scope {message.scope}")
    return Normalise(message.max_norm, _NORM_SCOPES[message.scope], message.is_exact)


def _nan_to_num(field: str, message: pb.NanToNumEdit) -> Operation:
    return NanToNum(
        message.nan if message.HasField("nan") else 0.0,
        message.posinf if message.HasField("posinf") else None,
        message.neginf if message.HasField("neginf") else None,
    )


def _top_k(field: str, message: pb.TopKEdit) -> Operation:
    return TopK(message.k, message.dim if message.HasField("dim") else None, message.is_absolute)


_READERS: dict[str, Callable[[str, Any], Operation]] = {
    "set": lambda field, message: Set(_operand(field, message)),
    "zero": lambda field, message: Zero(),
    "add": lambda field, message: Add(_operand(field, message)),
    "scale": lambda field, message: Scale(_operand(field, message)),
    "affine": _affine,
    "clamp": _clamp,
    "noise": _noise,
    "mean_ablate": _mean_ablate,
    "resample": lambda field, message: Resample(message.seed),
    "swap": _swap,
    "add_input": lambda field, message: AddInput(),
    "steer": _steer,
    "project_out": lambda field, message: Project(constant_from_wire(f"{field}.basis", message.basis)),
    "project_onto": lambda field, message: ProjectOnto(constant_from_wire(f"{field}.basis", message.basis)),
    "top_k": _top_k,
    "dropout": lambda field, message: Dropout(message.probability, message.seed),
    "cast": lambda field, message: Cast(from_wire(f"{field}.dtype", message.dtype)),
    "skip": lambda field, message: Skip(),
    "normalise": _normalise,
    "nan_to_num": _nan_to_num,
}
"""By the name in the message's oneof; `stored` is no operation."""
