"""Spread, for the variance: squared deviations from a centre, mergeable without loss.

A spread is a float64 tensor of shape (4, groups): count, centre, correction, squares.

# Note: [A centre in two parts]
Data around 1e8 leave their float64 mean with an error of 1e-8. Harmless inside one block, it decides
the result where block means are subtracted from each other. So the mean is kept as
centre + correction: the rounded mean, and the mean deviation from it.
"""

import torch


def measure(block: torch.Tensor, dims: tuple[int, ...]) -> torch.Tensor:
    """Measure a non-empty float64 block over `dims`, in two passes.

    The corrected two-pass algorithm: Chan, Golub and LeVeque, "Algorithms for computing the
    sample variance", 1983, equation 1.7.
    """
    centre = block.mean(dims, keepdim=True)
    deviation = block - centre
    total = deviation.sum(dims)
    squares = deviation.square_().sum(dims)
    count = torch.full_like(total, block.numel() // total.numel())
    correction = torch.where(total.isfinite(), total / count, 0.0)
    squares = (squares - correction.square() * count).clamp_min(0.0)
    return torch.stack([count, centre.reshape(-1), correction, squares])


def merge(left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
    """Merge two spreads of the same groups as Chan, Golub and LeVeque do (equation 2.1)."""
    (count_l, centre_l, correction_l, squares_l), (count_r, centre_r, correction_r, squares_r) = left, right
    count = count_l + count_r
    delta = (centre_r - centre_l) + (correction_r - correction_l)
    step = delta * (count_r / count)
    centre = centre_l + step
    rounded_off = torch.where(centre.isfinite(), step - (centre - centre_l), 0.0)
    squares = squares_l + squares_r + delta * step * count_l
    merged = torch.stack([count, centre, correction_l + rounded_off, squares])
    return torch.where(count_l == 0, right, torch.where(count_r == 0, left, merged))


def variance(spread: torch.Tensor) -> torch.Tensor:
    """Return the population variance, of shape (groups,); NaN without elements."""
    return spread[3] / spread[0]
