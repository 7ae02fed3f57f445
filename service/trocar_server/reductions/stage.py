"""A value between two reductions: what it is, and what its dimensions mean.

Note: [The channels stay the channels]
    What the dimensions mean is decided once, on the value as the model made it: dimension 0 holds the
    samples; the channels are the last dimension of rank 3, otherwise dimension 1, or the tap's
    `channel_dim`. Reductions that drop or move dimensions take this along: of (batch, channels, height,
    width) `[:, :, 0]` leaves (batch, channels, width), and its channels are dimension 1 still, though its
    rank is 3. Where an integer of an index drops the samples or the channels, what needs them is refused.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

import torch

from trocar_api.reasons import ErrorReason
from trocar_server.errors import ServiceError
from trocar_server.reductions.reduction import dtype_name

HALVES = (torch.float16, torch.bfloat16)
FLOATS = (*HALVES, torch.float32, torch.float64)
ORDERED = (*FLOATS, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64)

# Far above what any device holds and far below 2**63, where torch's own counting overflows. What a server
# really allows is decided on `Reduced.value` and `Reduced.extra_bytes` before anything is computed.
_MAX_BYTES = 1 << 50


@dataclass(frozen=True)
class Stage:
    """A value on its way through the reductions.

    Attributes:
        value: The value; on the meta device it has a form and nothing else.
        has_samples: Whether dimension 0 holds the samples.
        channel_dim: The dimension of the channels, from 0; None where there is none.
        workspace_bytes: Bytes that its making held beside what it was made of and itself.
        companions: What else came out, by role.
    """

    value: torch.Tensor
    has_samples: bool
    channel_dim: int | None
    workspace_bytes: int = 0
    companions: dict[str, torch.Tensor] = field(default_factory=dict)

    @classmethod
    def of(cls, value: torch.Tensor, channel_dim: int | None = None) -> "Stage":
        """Return the first stage; see Note: [The channels stay the channels]."""
        rank = value.ndim
        wanted = (2 if rank == 3 else 1) if channel_dim is None else channel_dim
        channels = wanted % rank if -rank <= wanted < rank else None
        return cls(value, has_samples=rank > 0 and channels != 0, channel_dim=channels)

    @property
    def shape(self) -> tuple[int, ...]:
        """Size of each dimension."""
        return tuple(self.value.shape)

    @property
    def byte_count(self) -> int:
        """Bytes of the value and its companions."""
        return sum(held.numel() * held.itemsize for held in (self.value, *self.companions.values()))

    def to(self, value: torch.Tensor, workspace_bytes: int = 0) -> "Stage":
        """Return the stage after this one, with dimensions of the same meaning."""
        return replace(self, value=value, workspace_bytes=workspace_bytes)

    def compute(
        self, shape: Sequence[int], dtype: torch.dtype, work: Callable[[], torch.Tensor]
    ) -> torch.Tensor:
        """Return what `work` computes, of this form; on the meta device the form alone.

        The first `div` or `bmm` on the meta device imports torch's reference operators, for 2 s (torch 2.14).
        """
        return self.value.new_empty(tuple(shape), dtype=dtype) if self.value.is_meta else work()

    def refuse(self, asked: object, problem: str) -> ServiceError:
        """Return the error that says what was asked of which value, and what to do."""
        return rejected(self.value, asked, problem)

    def need_floats(self, asked: object) -> None:
        """Refuse integers, bool, complex and the float8 kinds.

        Raises:
            ServiceError: `REDUCTION_REJECTED`.
        """
        if self.value.dtype not in FLOATS:
            raise self.refuse(
                asked, "it works on float16, bfloat16, float32 and float64; take the values as they are"
            )

    def need_channels(self, asked: object) -> int:
        """Return the dimension of the channels.

        Raises:
            ServiceError: `REDUCTION_REJECTED`, there is none.
        """
        if self.channel_dim is None:
            raise self.refuse(
                asked,
                "the value has no channel dimension; give channel_dim within its rank, and index "
                "channels with a slice such as 3:4, which keeps the dimension",
            )
        return self.channel_dim

    def need_samples(self, asked: object) -> None:
        """Refuse a value whose dimension 0 does not hold the samples.

        Raises:
            ServiceError: `REDUCTION_REJECTED`.
        """
        if not self.has_samples:
            raise self.refuse(
                asked,
                "dimension 0 does not hold samples; index samples with a slice such as 0:1, which keeps "
                "the dimension, and give another channel_dim than 0",
            )

    def need_tokens(self, asked: object) -> int:
        """Return the dimension of the tokens.

        Raises:
            ServiceError: `REDUCTION_REJECTED`, the value is not (batch, tokens, width).
        """
        if (len(self.shape), self.has_samples, self.channel_dim) != (3, True, 2):
            raise self.refuse(
                asked, "tokens are dimension 1 of (batch, tokens, width); use an index for other values"
            )
        return 1

    def need_size(self, asked: object, shape: Sequence[int], itemsize: int) -> None:
        """Refuse a result that no device holds, before torch counts its bytes.

        Raises:
            ServiceError: `REDUCTION_REJECTED`.
        """
        count = math.prod(shape) * itemsize
        if count > _MAX_BYTES:
            raise self.refuse(asked, f"the result would be {count:,} bytes; ask for a smaller one")


def rejected(value: torch.Tensor, asked: object, problem: str) -> ServiceError:
    """Return the error that says what was asked of which value, and what to do."""
    form = f"a {dtype_name(value.dtype)} value of shape {tuple(value.shape)}"
    return ServiceError(ErrorReason.REDUCTION_REJECTED, f"{asked} does not fit {form}: {problem}")
