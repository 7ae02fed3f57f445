"""Linear reductions: Gram matrix, random projection, principal components."""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

import torch

from trocar_server.tensors.reductions.reduction import Gram, Pca, Projection, Readout
from trocar_server.tensors.reductions.reduction_stage import HALVES, Stage

MAX_PROJECTION_ELEMENTS = 1 << 29
"""The most elements of a projection's matrix; drawing them takes about 7 s on one core."""

BLOCK_ELEMENTS = 1 << 22
"""About how many elements of a projection's matrix exist at once: 16 MiB."""

_FLOAT32_BYTES = 4

# Note: [Random numbers by block]
# torch's CPU generator fills 16 float32 numbers at a time and, where a tensor's size is not a multiple of 16,
# draws its last 16 again; a tensor of fewer than 16 it fills in another way
# (aten/src/ATen/native/cpu/DistributionTemplates.h, torch 2.14). So blocks of multiples of 16, the last of at
# least 16, are together the same as one `torch.randn`.
_DRAWN_TOGETHER = 16


def gram(stage: Stage, wanted: Gram) -> Stage:
    """Return the inner products of the channels over the positions, (batch, channels, channels).

    Of float16 and bfloat16 the result is float32: sums of squares leave float16's range.

    Raises:
        ServiceError: `REDUCTION_REJECTED`, not floats, no samples or no channels.
    """
    stage.need_floats(wanted)
    stage = stage.need_samples(wanted)
    channel_dim = stage.need_channels(wanted)
    batch, channels = stage.shape[0], stage.shape[channel_dim]
    positions = math.prod(stage.shape[1:channel_dim] + stage.shape[channel_dim + 1 :])
    dtype = torch.float32 if stage.value.dtype in HALVES else stage.value.dtype
    shape = (batch, channels, channels)
    stage.need_size(wanted, shape, dtype.itemsize)

    def work() -> torch.Tensor:
        features = stage.value.movedim(channel_dim, 1).reshape(batch, channels, positions).to(dtype)
        count: int | torch.Tensor = positions
        if stage.own is not None:
            sizes = (*stage.shape[:channel_dim], 1, *stage.shape[channel_dim + 1 :])
            own = stage.own.expand(sizes).reshape(batch, 1, positions)
            features = features.where(own, 0)
            count = own.sum(2, keepdim=True)
        products = torch.bmm(features, features.mT)
        return products / count if wanted.is_normalized else products

    workspace_bytes = stage.byte_count + (stage.value.numel() + math.prod(shape)) * dtype.itemsize
    return Stage(stage.compute(shape, dtype, work), 0, 2, workspace_bytes)


def project(stage: Stage, wanted: Projection, check: Callable[[], None]) -> Stage:
    """Multiply each sample, flattened and in float32, by a random matrix: (batch, components), float32.

    The matrix, of shape (elements of a sample, components), is

        generator = torch.Generator().manual_seed(seed)
        torch.randn(elements, components, generator=generator) / math.sqrt(components)

    so that squared distances are kept on average (Johnson and Lindenstrauss 1984; the scaling of
    scikit-learn's `GaussianRandomProjection`). It is drawn on the CPU, in blocks, for every device.

    Args:
        stage: The value.
        wanted: Number of components and seed.
        check: Called between blocks; raises to stop.

    Raises:
        ServiceError: `REDUCTION_REJECTED`, not floats, no samples, or too large a matrix.
    """
    stage.need_floats(wanted)
    stage = stage.need_samples(wanted)
    batch, features = stage.shape[0], math.prod(stage.shape[1:])
    count = wanted.component_count
    if features * count > MAX_PROJECTION_ELEMENTS:
        raise stage.refuse(
            wanted,
            f"the matrix would have {features:,} x {count:,} elements, the most is "
            f"{MAX_PROJECTION_ELEMENTS:,}; pool first, or ask for fewer components",
        )
    stage.need_size(wanted, (batch, count), _FLOAT32_BYTES)
    rows = block_rows(count)

    def work() -> torch.Tensor:
        flat = stage.value.reshape(batch, features)  # a copy where the strides do not allow a view
        projected = stage.value.new_zeros((batch, count), dtype=torch.float32)
        for first, block in matrix_blocks(wanted, features, rows):
            check()
            part = flat[:, first : first + len(block)].float()
            projected.addmm_(part, block.to(projected.device))
        return projected

    height = min(rows + _DRAWN_TOGETHER, features)
    workspace_bytes = stage.byte_count + _FLOAT32_BYTES * height * (3 * count + batch)
    return Stage(stage.compute((batch, count), torch.float32, work), 0, 1, workspace_bytes)


def block_rows(component_count: int, block_elements: int = BLOCK_ELEMENTS) -> int:
    """Return how many rows of the matrix are drawn at once: a multiple of 16."""
    return max(1, block_elements // (component_count * _DRAWN_TOGETHER)) * _DRAWN_TOGETHER


def matrix_blocks(wanted: Projection, features: int, rows: int) -> Iterator[tuple[int, torch.Tensor]]:
    """Yield the first row of each block of the matrix, and the block.

    The blocks together are the same for every `rows`, a multiple of 16; see
    Note: [Random numbers by block].
    """
    generator = torch.Generator().manual_seed(wanted.seed)
    count, first = wanted.component_count, 0
    while first < features:
        left = features - first
        height = left if (left - rows) * count < _DRAWN_TOGETHER else rows
        yield first, torch.randn(height, count, generator=generator) / math.sqrt(count)
        first += height


def principal_components(stage: Stage, wanted: Pca, operands: Sequence[torch.Tensor]) -> Stage:
    """Return `(x - mean) @ components.T` over the channels, scores in the last dimension.

    (batch, channels, height, width) becomes (batch, height, width, components). Computed in the wider of
    the value's dtype and that of the components; centred first, so that a large mean costs no digits.

    Raises:
        ServiceError: `REDUCTION_REJECTED`, not floats, or another number of channels.
    """
    channel_dim = _need_channels(stage, wanted, "; give components for these")
    dtype = torch.promote_types(stage.value.dtype, wanted.dtype)
    positions = stage.shape[:channel_dim] + stage.shape[channel_dim + 1 :]
    shape = (*positions, wanted.component_count)
    stage.need_size(wanted, shape, dtype.itemsize)

    def work() -> torch.Tensor:
        components, *mean = (tensor.to(stage.value.device, dtype) for tensor in operands)
        last = stage.value.to(dtype)
        return (last - mean[0] if mean else last) @ components.T

    operand_count = sum(tensor.numel() for tensor in operands)
    workspace_bytes = (3 * stage.value.numel() + operand_count) * dtype.itemsize
    rest = [dim for dim in range(len(shape)) if dim != channel_dim]
    stage = stage.ordered([*rest, channel_dim])
    return replace(stage.to(stage.compute(shape, dtype, work), workspace_bytes), channel_dim=len(shape) - 1)


def _need_channels(stage: Stage, wanted: Pca | Readout, advice: str = "") -> int:
    """Return the dimension of as many channels, of floats, as vectors were given for.

    Raises:
        ServiceError: `REDUCTION_REJECTED`.
    """
    stage.need_floats(wanted)
    channel_dim = stage.need_channels(wanted)
    channels = stage.shape[channel_dim]
    if channels != wanted.channel_count:
        raise stage.refuse(wanted, f"dimension {channel_dim} has {channels:,} channels{advice}")
    return channel_dim


def read(stage: Stage, wanted: Readout, operands: Sequence[torch.Tensor]) -> Stage:
    """Return `vectors @ x + bias` over the channels, one number for each vector in the last dimension.

    In float32 of halves, otherwise in the value's dtype, so that a pass on a GPU does not wait for float64.

    Raises:
        ServiceError: `REDUCTION_REJECTED`, not floats, or another number of channels.
    """
    channel_dim = _need_channels(stage, wanted)
    dtype = torch.promote_types(stage.value.dtype, torch.float32)
    rest = [dim for dim in range(len(stage.shape)) if dim != channel_dim]
    stage = stage.ordered([*rest, channel_dim])
    shape = (*stage.shape[:-1], wanted.vector_count)

    def work() -> torch.Tensor:
        vectors, bias = (tensor.to(stage.value.device, dtype) for tensor in operands)
        return torch.nn.functional.linear(stage.value.to(dtype), vectors, bias)

    workspace_bytes = stage.value.numel() * dtype.itemsize
    return replace(stage.to(stage.compute(shape, dtype, work), workspace_bytes), channel_dim=len(shape) - 1)
