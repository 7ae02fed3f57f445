"""Random operations: torch's CPU generator in float32, so that every device gets the same numbers."""

import hashlib
import struct
from dataclasses import dataclass, replace
from enum import StrEnum, unique
from typing import Self

import torch

from trocar_server.tensors.edits.base import Operation, require, require_seed
from trocar_server.tensors.edits.part import Part
from trocar_server.tensors.edits.value_dtypes import need_operands
from trocar_server.tensors.edits.value_signature import ValueSignature


@unique
class NoiseKind(StrEnum):
    """The distribution of random numbers."""

    GAUSSIAN = "gaussian"
    """Mean 0, standard deviation `scale`."""
    UNIFORM = "uniform"
    """From -`scale` to `scale`."""


@dataclass(frozen=True)
class Noise(Operation):
    """x + random numbers.

    Attributes:
        kind: Their distribution.
        scale: Standard deviation, or half of the range.
        seed: Of torch's CPU generator, in float32, so that every device gets the same numbers. None: torch's
            present generator of the value's device, in its dtype.
    """

    name = "noise"
    wide_copies = 2
    kind: NoiseKind
    scale: float
    seed: int | None = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        require(self.scale >= 0, f"noise: scale {self.scale} is negative")
        if self.seed is not None:
            require_seed(self, self.seed)

    def check(self, part: ValueSignature) -> None:
        """Check that the scale is a number of the dtype."""
        need_operands(part, self.scale)

    def at(self, position: int) -> Self:
        """See `Operation.at` and `_seed_at`."""
        return self if self.seed is None else replace(self, seed=_seed_at(self.seed, position))

    def apply(self, part: Part) -> torch.Tensor:
        """Return x + numbers of mean 0; complex values get real ones.

        Gaussian: `torch.randn(shape) * scale`; uniform: `(torch.rand(shape) * 2 - 1) * scale`.
        """
        drawn = self._drawn(part).mul_(self.scale)
        return part.value + drawn.to(part.value.device, part.value.dtype)

    def _drawn(self, part: Part) -> torch.Tensor:
        is_gaussian = self.kind is NoiseKind.GAUSSIAN
        if self.seed is None:
            value = part.value
            return torch.randn_like(value) if is_gaussian else torch.rand_like(value).mul_(2).sub_(1)
        generator = torch.Generator(device="cpu").manual_seed(self.seed)
        draw = torch.randn if is_gaussian else torch.rand
        numbers = draw(part.signature.shape, generator=generator, dtype=torch.float32, device="cpu")
        return numbers if is_gaussian else numbers.mul_(2).sub_(1)


@dataclass(frozen=True)
class Dropout(Operation):
    """Random elements become zero, the others are divided by 1 - probability."""

    name = "dropout"
    wide_copies = 1
    probability: float
    seed: int = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        require(
            0 <= self.probability < 1,
            f"dropout: probability {self.probability}; it must be at least 0 and below 1",
        )
        require_seed(self, self.seed)

    def at(self, position: int) -> Self:
        """See `Operation.at` and `_seed_at`."""
        return replace(self, seed=_seed_at(self.seed, position))

    def apply(self, part: Part) -> torch.Tensor:
        """Return 0 where `torch.rand(shape) < probability`, also for NaN; x / (1 - probability) elsewhere."""
        generator = torch.Generator(device="cpu").manual_seed(self.seed)
        drawn = torch.rand(part.signature.shape, generator=generator, dtype=torch.float32, device="cpu")
        is_dropped = (drawn < self.probability).to(part.value.device)
        return (part.value / (1 - self.probability)).masked_fill_(is_dropped, 0)


def _seed_at(seed: int, position: int) -> int:
    """Return the seed of the numbers at a position of a text; at the first, of a whole text, the seed itself.

    Elsewhere the first eight bytes of the SHA-256 of both as little-endian 64-bit integers, without the
    highest bit: each generated token gets numbers of its own, which depend on nothing but its position.
    """
    if not position:
        return seed
    digest = hashlib.sha256(struct.pack("<qQ", seed, position)).digest()
    number: int = struct.unpack("<Q", digest[:8])[0]
    return number >> 1
