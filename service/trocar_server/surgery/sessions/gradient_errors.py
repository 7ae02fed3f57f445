"""Missing gradients: the reason, as an error."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch

from trocar_api.reasons import ErrorReason
from trocar_server.errors import ServiceError, first_line

_NO_DERIVATIVE = (
    "is not differentiable with respect to",
    "don't support automatic differentiation",
    "derivative for",
    "modified by an inplace operation",
    "a leaf Variable that requires grad",
    "does not require grad",
)


@contextmanager
def differentiable() -> Iterator[None]:
    """Convert torch's errors about missing derivatives inside the context.

    Raises:
        ServiceError: `NOT_DIFFERENTIABLE`.
    """
    try:
        yield
    except RuntimeError as error:
        message = first_line(error)
        if not any(words in message for words in _NO_DERIVATIVE):
            raise
        problem = ServiceError(
            ErrorReason.NOT_DIFFERENTIABLE,
            f"PyTorch has no derivative here: {message}; choose other values",
        )
    else:
        return
    raise problem  # outside of the handler, which keeps the frames of the failed pass alive


def no_gradient_of(name: str, dtype: torch.dtype) -> ServiceError:
    """Build the error for a value whose dtype has no gradient."""
    return ServiceError(
        ErrorReason.NOT_DIFFERENTIABLE,
        f"'{name}' is of {str(dtype).removeprefix('torch.')}, and only floats have gradients; choose a value "
        "that comes after it",
        name=name,
    )


def independent(names: Sequence[str]) -> ServiceError:
    """Build the error for an objective that does not depend on these values."""
    shown = ", ".join(f"'{name}'" for name in names[:5])
    return ServiceError(
        ErrorReason.NOT_DIFFERENTIABLE,
        f"the objective does not depend on {shown}: choose values from which the objective is computed",
        name=names[0] if names else "",
    )
