"""Operations on vectors of channels: steer, project_out, project_onto; and top_k along any dimension."""

import torch

from trocar_server.edits.norms import squares
from trocar_server.edits.operation import Project, ProjectOnto, Steer, TopK
from trocar_server.edits.part import Part


def steer(part: Part, wanted: Steer) -> torch.Tensor:
    """Return x + alpha * direction, in float32 for halves; in float64 where norms are kept."""
    (direction,) = part.constants
    dtype = part.wide_dtype if wanted.keeps_norm else part.compute_dtype
    # Multiplied in float64: alpha and direction may be of very different size.
    shift = part.along_channels(direction.to(part.value.device, part.wide_dtype) * wanted.alpha).to(dtype)
    steered = part.value + shift
    if wanted.keeps_norm:
        steered = _with_norms_of(part.value.to(dtype), steered, part.form.need_channels())
    return steered.to(part.value.dtype)


def project(part: Part, wanted: Project) -> torch.Tensor:
    """Return each vector's projection onto the span of the rows of the basis, or what is left without it.

    Computed in the value's dtype, in float32 for halves.
    """
    (basis,) = part.constants
    dim, dtype = part.form.need_channels(), part.compute_dtype
    rows = orthonormal_rows(basis).to(part.value.device, dtype)
    vectors = part.value.movedim(dim, -1).to(dtype)
    projected = (vectors @ rows.mH) @ rows
    found = projected if isinstance(wanted, ProjectOnto) else vectors - projected
    return found.to(part.value.dtype).movedim(-1, dim)


def orthonormal_rows(basis: torch.Tensor) -> torch.Tensor:
    """Return an orthonormal basis of the span of the rows, (rank, channels), in float64 or complex128.

    The length of a row says nothing about the span, so rows are brought to length 1 first. A direction
    counts when its singular value is above what rounding of the given numbers makes of rows that depend
    on each other; halves are taken as exact to float32.
    """
    exact = _unit_rows(basis.to("cpu", torch.promote_types(basis.dtype, torch.float64)))
    _, values, rows = torch.linalg.svd(exact, full_matrices=False)
    is_single = torch.promote_types(basis.dtype, torch.float32) in (torch.float32, torch.complex64)
    epsilon = torch.finfo(torch.float32 if is_single else torch.float64).eps
    found: torch.Tensor = rows[values > 4 * epsilon * len(basis)]
    return found


def _unit_rows(basis: torch.Tensor) -> torch.Tensor:
    """Return the rows with norm 1, or 0 where they are 0; the largest element is divided out first."""
    for order in (torch.inf, 2):
        lengths = torch.linalg.vector_norm(basis, order, dim=1, keepdim=True)
        basis = basis / torch.where(lengths > 0, lengths, 1)
    return basis


def top_k(part: Part, wanted: TopK) -> torch.Tensor:
    """Return x with all but the k largest along a dimension zero; NaN counts as largest.

    Exactly k are kept: of equal elements torch's `topk` decides.
    """
    value = part.value
    dim = part.form.need_channels() if wanted.dim is None else wanted.dim
    if not wanted.is_absolute or value.dtype == torch.uint8:
        places = value.topk(wanted.k, dim, sorted=False).indices
    elif value.is_floating_point() or value.is_complex():
        places = value.abs().topk(wanted.k, dim, sorted=False).indices
    else:  # -|x|, because the absolute value of the smallest integer is none of its dtype
        places = torch.minimum(value, -value).topk(wanted.k, dim, largest=False, sorted=False).indices
    return torch.zeros_like(value).scatter(dim, places, value.gather(dim, places))


def _with_norms_of(before: torch.Tensor, after: torch.Tensor, dim: int) -> torch.Tensor:
    """Return `after` with the norms along a dimension that `before` has; 0 where one of them is 0."""
    wanted, found = squares(before, (dim,)), squares(after, (dim,))
    is_zero = (wanted == 0) | (found == 0)
    # The root sees 1 where it does not count: its derivative at 0 is infinite, and 0 * inf is NaN.
    ratio = torch.where(is_zero, 1, wanted) / torch.where(is_zero, 1, found)
    return after * torch.where(is_zero, 0, ratio.sqrt())
