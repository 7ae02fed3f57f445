"""Reduction stage: a value between two reductions, with the meaning of its dimensions.

Note: [Channel dimension through reductions]
    The meaning of dimensions is decided once, on the value as the model returned it, by its layout or the
    tap's `channel_dim`. Where nothing is known, dimension 0 is the samples; the channels are the last
    dimension of rank 3, otherwise dimension 1. Reductions of each sample move the samples to the front,
    where they are behind other dimensions. Reductions that drop or move dimensions keep track: of
    (batch, channels, height, width) `[:, :, 0]` leaves (batch, channels, width), whose channels are still
    dimension 1, though its rank is 3.
    Where an integer of an index drops the samples or the channels, reductions that need them are rejected.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

import torch

from trocar_api.reasons import ErrorReason
from trocar_server.errors import ServiceError
from trocar_server.tensors.reductions.padding import Own
from trocar_server.tensors.reductions.reduction import dtype_name
from trocar_server.tensors.stats.statistic import default_channel_dim

HALVES = (torch.float16, torch.bfloat16)
FLOATS = (*HALVES, torch.float32, torch.float64)
FLOAT8 = (torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e4m3fnuz, torch.float8_e5m2fnuz)
"""Floats of 8 bits, which float16 holds exactly; torch 2.14 converts them and does little else."""
ORDERED = (*FLOATS, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64)

# Far above the memory of any device and far below 2**63, where torch's own counting overflows. A server's
# real limit is checked on `Reduced.value` and `Reduced.extra_bytes` before anything is computed.
_MAX_BYTES = 1 << 50


@dataclass(frozen=True)
class Stage:
    """A value between reductions.

    Attributes:
        value: The value; on the meta device it has only a signature.
        samples_dim: The dimension of the samples, from 0; None without one.
        channel_dim: The dimension of the channels, from 0; None without one.
        workspace_bytes: Bytes of temporaries that computing it needed, besides input and result.
        companions: Further results, by role.
        mask: Of a value with padding: which positions are a sample's own. Without a dimension that an index
            dropped it lacks it, too. See Note: [Padding].
        mask_dims: The dimensions of the value that the mask has, in ascending order.
        is_filled: Whether the mask is of filling: places that hold no element of the original value.
    """

    value: torch.Tensor
    samples_dim: int | None
    channel_dim: int | None
    workspace_bytes: int = 0
    companions: dict[str, torch.Tensor] = field(default_factory=dict)
    mask: torch.Tensor | None = None
    mask_dims: tuple[int, ...] = ()
    is_filled: bool = False

    @classmethod
    def of(
        cls,
        value: torch.Tensor,
        channel_dim: int | None = None,
        own: Own | None = None,
        samples_dim: int | None = 0,
    ) -> "Stage":
        """Return the first stage; see Note: [Channel dimension through reductions]."""
        rank = value.ndim
        wanted = default_channel_dim(rank) if channel_dim is None else channel_dim
        channels = wanted % rank if -rank <= wanted < rank else None
        has_samples = samples_dim is not None and samples_dim < rank and samples_dim != channels
        stage = cls(value, samples_dim if has_samples else None, channels)
        if own is None or channels in own.dims:
            return stage
        order = sorted(range(len(own.dims)), key=own.dims.__getitem__)
        return replace(stage, mask=own.mask.permute(order), mask_dims=tuple(sorted(own.dims)))

    @property
    def own(self) -> torch.Tensor | None:
        """The mask with as many dimensions as the value, to be broadcast to it; None without a mask."""
        if self.mask is None:
            return None
        sizes = dict(zip(self.mask_dims, self.mask.shape, strict=True))
        return self.mask.reshape([sizes.get(dim, 1) for dim in range(self.value.ndim)])

    def ordered(self, dims: Sequence[int]) -> "Stage":
        """Return the stage with its dimensions in another order."""
        order = tuple(dims)
        if order == tuple(range(len(order))):
            return self
        places = {dim: place for place, dim in enumerate(order)}
        moved = sorted(self.mask_dims, key=places.__getitem__)
        mask = None if self.mask is None else self.mask.permute([self.mask_dims.index(dim) for dim in moved])
        return replace(
            self,
            value=self.value.permute(order),
            samples_dim=None if self.samples_dim is None else places[self.samples_dim],
            channel_dim=None if self.channel_dim is None else places[self.channel_dim],
            mask=mask,
            mask_dims=tuple(places[dim] for dim in moved),
        )

    @property
    def shape(self) -> tuple[int, ...]:
        """Size of each dimension."""
        return tuple(self.value.shape)

    @property
    def byte_count(self) -> int:
        """Bytes of the value and its companions."""
        return sum(held.numel() * held.itemsize for held in (self.value, *self.companions.values()))

    def to(self, value: torch.Tensor, workspace_bytes: int = 0) -> "Stage":
        """Return the next stage, with dimensions of the same meaning."""
        return replace(self, value=value, workspace_bytes=workspace_bytes)

    def compute(
        self, shape: Sequence[int], dtype: torch.dtype, work: Callable[[], torch.Tensor]
    ) -> torch.Tensor:
        """Return the result of `work`, of this signature; on the meta device an empty tensor of it.

        The first `div` or `bmm` on the meta device imports torch's reference operators, for 2 s (torch 2.14).
        """
        return self.value.new_empty(tuple(shape), dtype=dtype) if self.value.is_meta else work()

    def refuse(self, asked: object, problem: str) -> ServiceError:
        """Return the error that names the reduction, the value, and what to do."""
        return rejected(self.value, asked, problem)

    def need_floats(self, asked: object) -> None:
        """Reject integers, bool, complex and the float8 kinds.

        Raises:
            ServiceError: `REDUCTION_REJECTED`.
        """
        if self.value.dtype not in FLOATS:
            raise self.refuse(
                asked, "it takes float16, bfloat16, float32 and float64; leave the reduction out"
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

    def need_samples(self, asked: object) -> "Stage":
        """Return the stage with its samples in dimension 0.

        Raises:
            ServiceError: `REDUCTION_REJECTED`, no dimension has samples.
        """
        if self.samples_dim is None:
            raise self.refuse(
                asked,
                "no dimension holds samples: index samples with a slice such as 0:1, which keeps the "
                "dimension, and give another channel_dim than theirs; a value that is the same for all "
                "samples has none",
            )
        rest = [dim for dim in range(len(self.shape)) if dim != self.samples_dim]
        return self.ordered([self.samples_dim, *rest])

    def need_tokens(self, asked: object) -> int:
        """Return the dimension of the tokens.

        Raises:
            ServiceError: `REDUCTION_REJECTED`, the value has not samples, tokens and channels alone.
        """
        rest = [dim for dim in range(len(self.shape)) if dim not in (self.samples_dim, self.channel_dim)]
        if self.samples_dim is None or self.channel_dim is None or len(rest) != 1:
            raise self.refuse(
                asked,
                "tokens are dimension 1 of (batch, tokens, width), or the one beside samples and channels; "
                "use an index for other values",
            )
        return rest[0]

    def of_tokens(self, asked: object) -> "Stage":
        """Return the stage as (batch, tokens, width).

        Raises:
            ServiceError: See `need_tokens`.
        """
        tokens = self.need_tokens(asked)
        assert self.samples_dim is not None
        assert self.channel_dim is not None
        return self.ordered([self.samples_dim, tokens, self.channel_dim])

    def need_size(self, asked: object, shape: Sequence[int], itemsize: int) -> None:
        """Reject a result larger than any device's memory, before torch counts its bytes.

        Raises:
            ServiceError: `REDUCTION_REJECTED`.
        """
        count = math.prod(shape) * itemsize
        if count > _MAX_BYTES:
            raise self.refuse(asked, f"the result would be {count:,} bytes; ask for a smaller one")


def rejected(value: torch.Tensor, asked: object, problem: str) -> ServiceError:
    """Return the error that names the reduction, the value, and what to do."""
    described = f"a {dtype_name(value.dtype)} value of shape {tuple(value.shape)}"
    return ServiceError(ErrorReason.REDUCTION_REJECTED, f"{asked} does not fit {described}: {problem}")
