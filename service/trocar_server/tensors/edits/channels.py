"""Channel-vector operations: steer, cap, project_out, project_onto; and top_k along any dimension."""

from dataclasses import dataclass

import torch

from trocar_server.tensors.edits.base import Operation, require
from trocar_server.tensors.edits.norms import squares
from trocar_server.tensors.edits.part import Part
from trocar_server.tensors.edits.value_dtypes import need_kind, need_number
from trocar_server.tensors.edits.value_signature import ValueSignature
from trocar_server.tensors.reductions import OperandSpec

MAX_BASIS_WORK = 1 << 33
"""The most vectors * channels * min(vectors, channels) of a basis: some seconds of a CPU."""


@dataclass(frozen=True)
class Steer(Operation):
    """x + alpha * direction along the channels; relative: x + alpha * |x| * direction, of length 1."""

    name = "steer"
    wide_copies = 5
    direction: OperandSpec
    alpha: float = 1.0
    keeps_norm: bool = False
    is_relative: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        shape = self.direction.shape
        is_right = 1 <= len(shape) <= 2
        require(is_right, f"steer: direction of shape {shape}; it must be (channels,) or (batch, channels)")

    def check(self, part: ValueSignature) -> None:
        """Check that the direction is one vector, or one for each sample."""
        channels = part.shape[part.need_channels()]
        need_kind(part, self.direction.dtype)
        need_number(part, self.alpha)
        fitting: list[tuple[int, ...]] = [(channels,)]
        if part.samples is not None and part.samples != part.channels:
            fitting += [(1, channels), (part.shape[part.samples], channels)]
        if self.direction.shape not in fitting:
            hint = " or ".join(str(shape) for shape in dict.fromkeys(fitting))
            raise part.mismatch(f"a direction of shape {self.direction.shape}; give one of {hint}")

    def mixed_dims(self, part: ValueSignature) -> tuple[int, ...]:
        """See `Operation.mixed_dims`."""
        return (part.need_channels(),)

    def apply(self, part: Part) -> torch.Tensor:
        """Return the steered value, in float32 for halves; in float64 where norms are computed."""
        (direction,) = part.tensors
        dim = part.signature.need_channels()
        dtype = part.wide_dtype if self.keeps_norm or self.is_relative else part.compute_dtype
        direction = direction.to(part.value.device, part.wide_dtype)
        if self.is_relative:
            direction = _unit_rows(direction.reshape(-1, direction.shape[-1])).reshape(direction.shape)
        # Multiplied in float64: alpha and direction may be of very different size.
        shift = part.along_channels(direction * self.alpha).to(dtype)
        if self.is_relative:
            shift = shift * _norms(part.value.to(dtype), dim)
        steered = part.value + shift
        if self.keeps_norm:
            steered = _with_norms_of(part.value.to(dtype), steered, dim)
        return steered.to(part.value.dtype)


@dataclass(frozen=True)
class Cap(Operation):
    """x + (clip(x.u, low, high) - x.u) u along the channels, u the direction of length 1."""

    name = "cap"
    takes_complex = False
    wide_copies = 4
    is_range_free = True
    direction: OperandSpec
    low: float | None = None
    high: float | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        shape = self.direction.shape
        is_one = len(shape) == 1 or (len(shape) == 2 and shape[0] == 1)
        require(is_one, f"cap: direction of shape {shape}; it must be (channels,)")
        require(self.low is not None or self.high is not None, "cap needs low, high or both")
        in_order = self.low is None or self.high is None or self.low <= self.high
        require(in_order, f"cap: low {self.low} is above high {self.high}")

    def check(self, part: ValueSignature) -> None:
        """Check that the direction has the part's channels."""
        channels = part.shape[part.need_channels()]
        need_kind(part, self.direction.dtype)
        if self.direction.shape[-1] != channels:
            raise part.mismatch(f"a direction of shape {self.direction.shape}; give one of ({channels},)")

    def apply(self, part: Part) -> torch.Tensor:
        """Return x with a limited component; in the value's dtype, in float32 for halves."""
        (direction,) = part.tensors
        dim, dtype = part.signature.need_channels(), part.compute_dtype
        row = direction.to("cpu", torch.float64).reshape(1, -1)
        unit = _unit_rows(row)[0].to(part.value.device, dtype)
        vectors = part.value.movedim(dim, -1).to(dtype)
        component = (vectors @ unit)[..., None]
        capped = vectors + (component.clamp(self.low, self.high) - component) * unit
        return capped.to(part.value.dtype).movedim(-1, dim)


@dataclass(frozen=True)
class Project(Operation):
    """Removes the projection of each vector of channels onto the span of the rows of `basis`."""

    name = "project_out"
    wide_copies = 4
    operand_copies = 6  # the basis is decomposed
    is_range_free = True
    basis: OperandSpec

    def __post_init__(self) -> None:
        super().__post_init__()
        require(
            len(self.basis.shape) == 2,
            f"{self.name}: basis of shape {self.basis.shape}; it must be (vectors, channels)",
        )
        vectors, channels = self.basis.shape
        require(
            vectors * channels * min(vectors, channels) <= MAX_BASIS_WORK,
            f"{self.name}: a basis of shape {self.basis.shape} is too large; give fewer vectors",
        )

    def check(self, part: ValueSignature) -> None:
        """Check that the basis has vectors of that many channels."""
        channels = part.shape[part.need_channels()]
        need_kind(part, self.basis.dtype)
        if self.basis.shape[1] != channels:
            raise part.mismatch(f"a basis of shape {self.basis.shape}; give one of (vectors, {channels})")

    def mixed_dims(self, part: ValueSignature) -> tuple[int, ...]:
        """See `Operation.mixed_dims`."""
        return (part.need_channels(),)

    def apply(self, part: Part) -> torch.Tensor:
        """Return each vector without its projection; in the value's dtype, in float32 for halves."""
        return self._projected(part, is_rest=True)

    def _projected(self, part: Part, *, is_rest: bool) -> torch.Tensor:
        (basis,) = part.tensors
        dim, dtype = part.signature.need_channels(), part.compute_dtype
        rows = orthonormal_rows(basis).to(part.value.device, dtype)
        vectors = part.value.movedim(dim, -1).to(dtype)
        projected = (vectors @ rows.mH) @ rows
        result = vectors - projected if is_rest else projected
        return result.to(part.value.dtype).movedim(-1, dim)


@dataclass(frozen=True)
class ProjectOnto(Project):
    """Keeps only the projection of each vector of channels onto the span of the rows of `basis`."""

    name = "project_onto"

    def apply(self, part: Part) -> torch.Tensor:
        """Return each vector's projection; in the value's dtype, in float32 for halves."""
        return self._projected(part, is_rest=False)


@dataclass(frozen=True)
class TopK(Operation):
    """All but the k largest elements along a dimension become zero."""

    name = "top_k"
    takes_integers = True
    wide_copies = 3
    k: int
    dim: int | None = None
    is_absolute: bool = False

    def __post_init__(self) -> None:
        require(self.k >= 1, f"top_k: k is {self.k}; it must be at least 1")

    def check(self, part: ValueSignature) -> None:
        """Check that the dimension exists and has that many elements, which have an order."""
        rank = len(part.shape)
        if part.dtype.is_complex and not self.is_absolute:
            raise part.rejection("complex numbers have no order; compare absolute values")
        if self.dim is not None and not -rank <= self.dim < rank:
            raise part.mismatch(f"there is no dimension {self.dim}; give one of the part's {rank}")
        (dim,) = self.mixed_dims(part)
        if self.k > part.shape[dim]:
            raise part.mismatch(f"{self.k:,} of dimension {dim}, which has {part.shape[dim]:,}; keep fewer")

    def mixed_dims(self, part: ValueSignature) -> tuple[int, ...]:
        """See `Operation.mixed_dims`."""
        return (part.need_channels() if self.dim is None else self.dim % len(part.shape),)

    def apply(self, part: Part) -> torch.Tensor:
        """Return x with all but the k largest along a dimension zero; NaN counts as largest.

        Exactly k are kept: of equal elements torch's `topk` decides.
        """
        value = part.value
        (dim,) = self.mixed_dims(part.signature)
        if not self.is_absolute or value.dtype == torch.uint8:
            places = value.topk(self.k, dim, sorted=False).indices
        elif value.is_floating_point() or value.is_complex():
            places = value.abs().topk(self.k, dim, sorted=False).indices
        else:  # -|x|, because the absolute value of the smallest integer does not fit its dtype
            places = torch.minimum(value, -value).topk(self.k, dim, largest=False, sorted=False).indices
        return torch.zeros_like(value).scatter(dim, places, value.gather(dim, places))


def orthonormal_rows(basis: torch.Tensor) -> torch.Tensor:
    """Return an orthonormal basis of the span of the rows, (rank, channels), in float64 or complex128.

    The length of a row does not change the span, so rows are normalised first. A direction counts when its
    singular value is above the rounding error of linearly dependent rows; halves are taken as exact to
    float32.
    """
    exact = _unit_rows(basis.to("cpu", torch.promote_types(basis.dtype, torch.float64)))
    _, values, rows = torch.linalg.svd(exact, full_matrices=False)
    is_single = torch.promote_types(basis.dtype, torch.float32) in (torch.float32, torch.complex64)
    epsilon = torch.finfo(torch.float32 if is_single else torch.float64).eps
    spanning: torch.Tensor = rows[values > 4 * epsilon * len(basis)]
    return spanning


def _unit_rows(basis: torch.Tensor) -> torch.Tensor:
    """Return the rows with norm 1, or 0 where they are 0; the largest element is divided out first."""
    for order in (torch.inf, 2):
        lengths = torch.linalg.vector_norm(basis, order, dim=1, keepdim=True)
        basis = basis / torch.where(lengths > 0, lengths, 1)
    return basis


def _norms(value: torch.Tensor, dim: int) -> torch.Tensor:
    """Return the norms along a dimension, which is kept; their derivative is 0 where they are 0."""
    squared = squares(value, (dim,))
    is_zero = squared == 0
    return torch.where(is_zero, 0, torch.where(is_zero, 1, squared).sqrt())


def _with_norms_of(before: torch.Tensor, after: torch.Tensor, dim: int) -> torch.Tensor:
    """Return `after` with the norms along a dimension that `before` has; 0 where one of them is 0."""
    wanted, present = squares(before, (dim,)), squares(after, (dim,))
    is_zero = (wanted == 0) | (present == 0)
    # The root of 1 where it is not used: its derivative at 0 is infinite, and 0 * inf is NaN.
    ratio = torch.where(is_zero, 1, wanted) / torch.where(is_zero, 1, present)
    return after * torch.where(is_zero, 0, ratio.sqrt())
