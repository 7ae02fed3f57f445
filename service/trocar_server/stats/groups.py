"""Which elements belong to one number: every scope becomes one group dimension of a tensor."""

import torch

from trocar_api.reasons import ErrorReason
from trocar_server.errors import ServiceError
from trocar_server.stats.statistic import Scope, default_channel_dim


def check_value(value: torch.Tensor) -> None:
    """Refuse what has no order or no plain elements.

    Raises:
        ServiceError: `INVALID_ARGUMENT`, the tensor is complex, sparse or quantized.
    """
    if value.is_complex():
        advice = "take them of the real and the imaginary part apart"
        raise ServiceError(ErrorReason.INVALID_ARGUMENT, f"no statistics of complex numbers; {advice}")
    if value.layout != torch.strided or value.is_quantized:
        raise ServiceError(
            ErrorReason.INVALID_ARGUMENT,
            f"no statistics of a {value.dtype} tensor of layout {value.layout}; make it dense first",
        )


def resolve_channel_dim(scope: Scope, rank: int, channel_dim: int | None) -> int | None:
    """Return the channel dimension from 0, or None if the scope has none.

    Raises:
        ServiceError: `INVALID_ARGUMENT`, a tensor of this rank has no such dimension or too few.
    """
    if scope is Scope.SAMPLE and rank < 1:
        raise _too_few_dimensions(scope, rank, "1 dimension")
    if scope is not Scope.CHANNEL:
        return None
    if rank < 2:
        raise _too_few_dimensions(scope, rank, "2 dimensions")
    wanted = default_channel_dim(rank) if channel_dim is None else channel_dim
    if not -rank <= wanted < rank:
        raise ServiceError(
            ErrorReason.INVALID_ARGUMENT,
            f"channel_dim {wanted} is out of range for rank {rank}; give {-rank} to {rank - 1}",
        )
    return wanted % rank


def with_group_dim(value: torch.Tensor, scope: Scope, channel_dim: int | None) -> tuple[torch.Tensor, int]:
    """Return a view of at least two dimensions, and the one of them that tells the groups apart.

    The other dimensions are reduced; there is always one, because an empty tuple of
    dimensions means "all of them" to `torch.sum`.
    """
    view = value.unsqueeze(0) if scope is Scope.ALL else value
    view = view.unsqueeze(-1) if view.ndim < 2 else view
    return view, channel_dim if scope is Scope.CHANNEL and channel_dim is not None else 0


def _too_few_dimensions(scope: Scope, rank: int, needed: str) -> ServiceError:
    return ServiceError(
        ErrorReason.INVALID_ARGUMENT,
        f"scope '{scope}' needs a tensor of at least {needed}, this one has {rank}; use scope 'all'",
    )
