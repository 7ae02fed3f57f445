"""Whether the numbers and tensors of each operation fit the part that it is for."""

from collections.abc import Callable
from typing import Any, TypeAlias

from trocar_server.edits.base import Operand, Operation
from trocar_server.edits.dtypes import need_kind, need_number
from trocar_server.edits.form import Form
from trocar_server.edits.operation import (
    Add,
    Affine,
    Clamp,
    MeanAblate,
    NanToNum,
    Noise,
    Normalise,
    NormScope,
    Project,
    ProjectOnto,
    Resample,
    Scale,
    Set,
    Steer,
    TopK,
)
from trocar_server.reductions import ConstantSpec

_Check: TypeAlias = Callable[[Form, Any], object]


def check_operation(form: Form, operation: Operation) -> None:
    """Check what an operation needs of its part.

    Raises:
        ServiceError: `EDIT_SHAPE_MISMATCH` or `EDIT_DTYPE_REJECTED`.
    """
    if check := _CHECKS.get(type(operation)):
        check(form, operation)


def _check_operands(form: Form, *operands: Operand | None) -> None:
    for operand in operands:
        if isinstance(operand, ConstantSpec):
            need_kind(form, operand.dtype)
            form.need_broadcast(operand)
        elif operand is not None:
            need_number(form, operand)


def _check_mean_ablate(form: Form, wanted: MeanAblate) -> None:
    if wanted.reference is None:
        form.need_samples()
        return
    need_kind(form, wanted.reference.dtype)
    if wanted.reference.shape != (form.channel_count,):  # else it lies along the channels
        form.need_broadcast(wanted.reference)


def _check_steer(form: Form, wanted: Steer) -> None:
    channels = form.shape[form.need_channels()]
    need_kind(form, wanted.direction.dtype)
    need_number(form, wanted.alpha)
    fitting: list[tuple[int, ...]] = [(channels,)]
    if form.samples is not None and form.samples != form.channels:
        fitting += [(1, channels), (form.shape[form.samples], channels)]
    if wanted.direction.shape not in fitting:
        hint = " or ".join(str(shape) for shape in dict.fromkeys(fitting))
        raise form.mismatch(f"a direction of shape {wanted.direction.shape}; give one of {hint}")


def _check_project(form: Form, wanted: Project) -> None:
    channels = form.shape[form.need_channels()]
    need_kind(form, wanted.basis.dtype)
    if wanted.basis.shape[1] != channels:
        raise form.mismatch(f"a basis of shape {wanted.basis.shape}; give one of (vectors, {channels})")


def _check_top_k(form: Form, wanted: TopK) -> None:
    rank = len(form.shape)
    if form.dtype.is_complex and not wanted.is_absolute:
        raise form.rejection("complex numbers have no order; compare absolute values")
    if wanted.dim is not None and not -rank <= wanted.dim < rank:
        raise form.mismatch(f"there is no dimension {wanted.dim}; give one of the part's {rank}")
    dim = form.need_channels() if wanted.dim is None else wanted.dim % rank
    if wanted.k > form.shape[dim]:
        raise form.mismatch(f"{wanted.k:,} of dimension {dim}, which has {form.shape[dim]:,}; keep fewer")


def _check_normalise(form: Form, wanted: Normalise) -> None:
    if wanted.scope is NormScope.SAMPLE:
        form.need_samples()
    if wanted.scope is NormScope.CHANNEL_VECTOR:
        form.need_channels()


_CHECKS: dict[type[Operation], _Check] = {
    Set: lambda form, wanted: _check_operands(form, wanted.value),
    Add: lambda form, wanted: _check_operands(form, wanted.value),
    Scale: lambda form, wanted: _check_operands(form, wanted.factor),
    Affine: lambda form, wanted: _check_operands(form, wanted.scale, wanted.shift),
    Clamp: lambda form, wanted: _check_operands(form, wanted.low, wanted.high),
    NanToNum: lambda form, wanted: _check_operands(form, wanted.nan, wanted.posinf, wanted.neginf),
    Noise: lambda form, wanted: _check_operands(form, wanted.scale),
    Resample: lambda form, _: form.need_samples(),
    MeanAblate: _check_mean_ablate,
    Steer: _check_steer,
    Project: _check_project,
    ProjectOnto: _check_project,
    TopK: _check_top_k,
    Normalise: _check_normalise,
}
