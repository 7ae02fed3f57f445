"""Value signature: shape and dtype of an operation's input, and the errors that name it."""

from dataclasses import dataclass

import torch

from trocar_api.reasons import ErrorReason
from trocar_server.errors import ServiceError
from trocar_server.tensors.reductions import OperandSpec, dtype_name


@dataclass(frozen=True)
class ValueSignature:
    """Shape, dtype and the meaning of the dimensions of a value, or of the part that an edit changes.

    The meaning of dimensions is decided on the full value, and a part keeps it: of (batch, channels, height,
    width) `[:, :, 0]` leaves (batch, channels, width), whose channels are still dimension 1.

    Attributes:
        name: Of the operation, for errors.
        shape: Sizes of the dimensions.
        dtype: Of the elements.
        samples: The dimension of the samples; None without one.
        channels: The dimension of the channels, from 0; None without one.
    """

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    samples: int | None
    channels: int | None

    def mismatch(self, problem: str) -> ServiceError:
        """Return the error for a shape that does not fit."""
        return self._refusal(ErrorReason.EDIT_SHAPE_MISMATCH, problem)

    def rejection(self, problem: str) -> ServiceError:
        """Return the error for an unsupported dtype."""
        return self._refusal(ErrorReason.EDIT_DTYPE_REJECTED, problem)

    def _refusal(self, reason: ErrorReason, problem: str) -> ServiceError:
        described = f"a {dtype_name(self.dtype)} value of shape {self.shape}"
        return ServiceError(reason, f"{self.name} does not fit {described}: {problem}")

    def need_channels(self) -> int:
        """Return the dimension of the channels.

        Raises:
            ServiceError: `EDIT_SHAPE_MISMATCH`, there is none.
        """
        if self.channels is None:
            raise self.mismatch(
                "it has no channel dimension; index channels with a slice such as 3:4, which keeps it"
            )
        return self.channels

    def need_samples(self) -> int:
        """Return the dimension of the samples.

        Raises:
            ServiceError: `EDIT_SHAPE_MISMATCH`, there is none.
        """
        if self.samples is None:
            raise self.mismatch(
                "it has no batch dimension; index samples with a slice such as 0:1, which keeps it"
            )
        return self.samples

    @property
    def channel_count(self) -> int | None:
        """Number of channels; None without a channel dimension."""
        return None if self.channels is None else self.shape[self.channels]

    @property
    def channels_shape(self) -> tuple[int, ...]:
        """The shape that puts a vector along the channels, for example (64, 1, 1); empty without channels."""
        if self.channels is None:
            return ()
        return (self.shape[self.channels], *[1] * (len(self.shape) - self.channels - 1))

    def need_broadcast(self, spec: OperandSpec) -> None:
        """Reject a tensor that does not broadcast (NumPy's rules) to exactly this shape.

        Raises:
            ServiceError: `EDIT_SHAPE_MISMATCH`.
        """
        if not broadcasts_to(spec.shape, self.shape):
            raise self.mismatch(
                f"its tensor of shape {spec.shape} cannot be broadcast to it; give {self._shapes()}"
            )

    def _shapes(self) -> str:
        one_each = f", or {self.channels_shape} for one number per channel" if self.channels_shape else ""
        return f"that shape, () for one number{one_each}"


def broadcasts_to(shape: tuple[int, ...], wanted: tuple[int, ...]) -> bool:
    """Whether a shape broadcasts to another one by NumPy's rules."""
    if len(shape) > len(wanted):
        return False
    ends = zip(reversed(shape), reversed(wanted), strict=False)
    return all(size in (1, end) for size, end in ends)
