"""The form of what an operation sees, and the refusals that name it."""

from dataclasses import dataclass

import torch

from trocar_api.reasons import ErrorReason
from trocar_server.errors import ServiceError
from trocar_server.reductions import ConstantSpec, dtype_name


@dataclass(frozen=True)
class Form:
    """Shape, dtype and the meaning of the dimensions of a value, or of the part that an edit changes.

    What the dimensions mean is decided on the whole value. A part keeps it: of (batch, channels, height,
    width) `[:, :, 0]` leaves (batch, channels, width), and its channels are dimension 1 still.

    Attributes:
        name: Of the operation, for errors.
        shape: Sizes of the dimensions.
        dtype: Of the elements.
        samples: The dimension of the samples; None where there is none.
        channels: The dimension of the channels, from 0; None where there is none.
    """

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    samples: int | None
    channels: int | None

    def mismatch(self, problem: str) -> ServiceError:
        """Return the error of a shape that does not fit."""
        return self._refusal(ErrorReason.EDIT_SHAPE_MISMATCH, problem)

    def rejection(self, problem: str) -> ServiceError:
        """Return the error of a dtype that makes no sense."""
        return self._refusal(ErrorReason.EDIT_DTYPE_REJECTED, problem)

    def _refusal(self, reason: ErrorReason, problem: str) -> ServiceError:
        form = f"a {dtype_name(self.dtype)} value of shape {self.shape}"
        return ServiceError(reason, f"{self.name} does not fit {form}: {problem}")

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
                "it has no dimension of samples; index samples with a slice such as 0:1, which keeps it"
            )
        return self.samples

    @property
    def channel_count(self) -> int | None:
        """How many channels there are; None without a channel dimension."""
        return None if self.channels is None else self.shape[self.channels]

    @property
    def channels_shape(self) -> tuple[int, ...]:
        """The shape that puts a vector along the channels, for example (64, 1, 1); empty without channels."""
        if self.channels is None:
            return ()
        return (self.shape[self.channels], *[1] * (len(self.shape) - self.channels - 1))

    def need_broadcast(self, spec: ConstantSpec) -> None:
        """Refuse a tensor that NumPy's broadcasting would not bring to this very shape.

        Raises:
            ServiceError: `EDIT_SHAPE_MISMATCH`.
        """
        if not broadcasts_to(spec.shape, self.shape):
            raise self.mismatch(
                f"its tensor of shape {spec.shape} is not broadcast to that; give {self._shapes()}"
            )

    def _shapes(self) -> str:
        one_each = f", or {self.channels_shape} for one number per channel" if self.channels_shape else ""
        return f"that shape, () for one number{one_each}"


def broadcasts_to(shape: tuple[int, ...], wanted: tuple[int, ...]) -> bool:
    """Whether NumPy's broadcasting brings a tensor to a shape."""
    if len(shape) > len(wanted):
        return False
    ends = zip(reversed(shape), reversed(wanted), strict=False)
    return all(size in (1, end) for size, end in ends)
