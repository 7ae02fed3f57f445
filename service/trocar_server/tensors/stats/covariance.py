"""Channel covariance, mergeable without loss."""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import reduce

import torch

from trocar_api.reasons import ErrorReason
from trocar_server.errors import ServiceError
from trocar_server.tensors.stats.accumulator_state import Unpacked
from trocar_server.tensors.stats.groups import Grouped, row_blocks
from trocar_server.tensors.stats.statistic import Statistic
from trocar_server.tensors.stats.topic import Topic

MAX_CHANNELS = 4096
"""The most channels: a matrix of 128 MiB."""


@dataclass(frozen=True)
class Comoments:
    """Sums of products of deviations from the mean, of every pair of channels.

    The mean is in two parts, see Note: [A centre in two parts] in `spread`.
    """

    count: int
    """Elements of each channel."""

    centre: torch.Tensor
    """Of shape (channels,), float64."""

    correction: torch.Tensor
    """Of shape (channels,), float64: the mean is centre + correction."""

    products: torch.Tensor
    """Of shape (channels, channels), float64, exactly symmetric."""

    def merge(self, other: "Comoments") -> "Comoments":
        """Merge with the co-moments of the same channels over other elements.

        Pebay, "Formulas for robust, one-pass parallel computation of covariances and arbitrary-order
        statistical moments", Sandia report SAND2008-6212, 2008, equation 3.12.
        """
        if not self.count or not other.count:
            return self if self.count else other
        count = self.count + other.count
        delta = (other.centre - self.centre) + (other.correction - self.correction)
        step = delta * (other.count / count)
        centre = self.centre + step
        rounded_off = torch.where(centre.isfinite(), step - (centre - self.centre), 0.0)
        products = torch.outer(delta, delta).mul_(self.count * (other.count / count))
        products.add_(self.products).add_(other.products)
        return Comoments(count, centre, self.correction + rounded_off, products)

    def to(self, device: torch.device) -> "Comoments":
        """Return this on `device`."""
        tensors = (self.centre, self.correction, self.products)
        return Comoments(self.count, *(tensor.to(device) for tensor in tensors))

    def finish(self, statistic: Statistic) -> torch.Tensor:
        """Return the population covariance, of shape (channels, channels); NaN without elements."""
        del statistic  # there is only one
        return self.products / self.count if self.count else torch.full_like(self.products, torch.nan)


def topic() -> Topic[Comoments]:
    """Return the topic of covariances."""
    return Topic(measure, Comoments.merge, pack, unpack)


def measure(grouped: Grouped) -> Comoments:
    """Measure a tensor whose groups are the channels, block by block.

    Raises:
        ServiceError: `REDUCTION_REJECTED`, there are too many channels.
    """
    check_channel_count(grouped.view.shape[grouped.group_dim])
    blocks = row_blocks(grouped.view, grouped.group_dim)
    return reduce(Comoments.merge, (_measure_block(block.to(torch.float64)) for block in blocks))


def check_channel_count(count: int) -> None:
    """Reject a matrix that is too large.

    Raises:
        ServiceError: `REDUCTION_REJECTED`.
    """
    if count > MAX_CHANNELS:
        raise ServiceError(
            ErrorReason.REDUCTION_REJECTED,
            f"a covariance of {count:,} channels is too large, the limit is {MAX_CHANNELS:,}; choose some of "
            "the channels with a reduction, or project them to fewer",
        )


def pack(accumulated: Comoments) -> Mapping[str, torch.Tensor]:
    """Return the tensors; only one triangle of the products."""
    return {
        "covariance.centre": accumulated.centre,
        "covariance.correction": accumulated.correction,
        "covariance.products": accumulated.products[
            _triangle(len(accumulated.centre), accumulated.products.device)
        ],
    }


def unpack(state: Unpacked, channels: int, count: int) -> Comoments:
    """Read the tensors of `pack`.

    Raises:
        ServiceError: `INVALID_ARGUMENT`, it is damaged.
    """
    check_channel_count(channels)
    centre = state.tensor("covariance.centre", (channels,), torch.float64)
    correction = state.tensor("covariance.correction", (channels,), torch.float64, finite=True)
    half = state.tensor("covariance.products", (channels * (channels + 1) // 2,), torch.float64)
    products = centre.new_zeros(channels, channels)
    triangle = _triangle(channels, centre.device)
    products[triangle] = half
    products.T[triangle] = half
    return Comoments(count, centre, correction, products)


def _measure_block(block: torch.Tensor) -> Comoments:
    """Measure float64 elements of shape (channels, elements)."""
    channels, count = block.shape
    if count == 0:
        nothing = block.new_zeros(channels)
        return Comoments(0, nothing, nothing, block.new_zeros(channels, channels))
    centre = block.mean(1)
    deviation = block - centre[:, None]
    correction = deviation.mean(1)
    correction = torch.where(correction.isfinite(), correction, 0.0)
    deviation -= correction[:, None]
    products = deviation @ deviation.T
    return Comoments(count, centre, correction, (products + products.T) / 2)


def _triangle(size: int, device: torch.device) -> torch.Tensor:
    return torch.ones(size, size, dtype=torch.bool, device=device).triu()
