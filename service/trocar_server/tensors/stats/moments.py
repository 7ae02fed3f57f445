"""Higher moments, for skewness and kurtosis: sums of powers of deviations, mergeable without loss.

Moments are a float64 tensor of shape (6, groups): count, centre, correction, and the sums of the second,
third and fourth power of the deviations from the mean. The mean is in two parts, centre + correction:
see Note: [A centre in two parts] in `spread`.
"""

import torch

_EPSILON = torch.finfo(torch.float64).eps


def measure(block: torch.Tensor, dims: tuple[int, ...]) -> torch.Tensor:
    """Measure a non-empty float64 block over `dims`, in three passes."""
    centre = block.mean(dims, keepdim=True)
    deviation = block - centre
    count = block.numel() // centre.numel()
    correction = deviation.mean(dims, keepdim=True)
    correction = torch.where(correction.isfinite(), correction, 0.0)
    deviation -= correction
    squares = deviation.square()
    sums = (squares, squares * deviation, squares.square())
    rows = (torch.full_like(centre, count), centre, correction, *(row.sum(dims) for row in sums))
    return torch.stack([row.reshape(-1) for row in rows])


def merge(left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
    """Merge the moments of the same groups.

    Pebay, "Formulas for robust, one-pass parallel computation of covariances and arbitrary-order
    statistical moments", Sandia report SAND2008-6212, 2008, equations 2.1 to 2.3 (the first is
    that of Chan, Golub and LeVeque).
    """
    (count_l, centre_l, correction_l, second_l, third_l, fourth_l) = left
    (count_r, centre_r, correction_r, second_r, third_r, fourth_r) = right
    count = count_l + count_r
    share_l, share_r = count_l / count, count_r / count
    delta = (centre_r - centre_l) + (correction_r - correction_l)
    step = delta * share_r
    centre = centre_l + step
    rounded_off = torch.where(centre.isfinite(), step - (centre - centre_l), 0.0)
    between = delta * step * count_l  # contribution of the distance of the two means to the squares
    second = second_l + second_r + between
    third = third_l + third_r + between * delta * (share_l - share_r)
    third += 3.0 * delta * (share_l * second_r - share_r * second_l)
    fourth = fourth_l + fourth_r + between * delta.square() * (1.0 - 3.0 * share_l * share_r)
    fourth += 6.0 * delta.square() * (share_l.square() * second_r + share_r.square() * second_l)
    fourth += 4.0 * delta * (share_l * third_r - share_r * third_l)
    merged = torch.stack([count, centre, correction_l + rounded_off, second, third, fourth])
    return torch.where(count_l == 0, right, torch.where(count_r == 0, left, merged))


def skewness(moments: torch.Tensor) -> torch.Tensor:
    """Return m3 / m2**1.5, of shape (groups,); NaN without elements or if all are equal."""
    count, second, third = moments[0], moments[3], moments[4]
    return torch.where(_are_equal(moments), torch.nan, third / count / (second / count) ** 1.5)


def kurtosis(moments: torch.Tensor) -> torch.Tensor:
    """Return m4 / m2**2 - 3, of shape (groups,); NaN without elements or if all are equal."""
    count, second, fourth = moments[0], moments[3], moments[5]
    return torch.where(_are_equal(moments), torch.nan, fourth / count / (second / count).square() - 3.0)


def _are_equal(moments: torch.Tensor) -> torch.Tensor:
    """Return the groups of equal elements in float64 (a mask) by SciPy's rule (`scipy.stats.skew`, 1.17)."""
    count, centre, correction, second, _, _ = moments
    resolution = (_EPSILON * (centre + correction)).square()
    return torch.le(second / count, resolution)
