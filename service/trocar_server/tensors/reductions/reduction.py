"""Reductions: the closed set of declarations. Plain data, hashable, free of tensors.

Each validates its own numbers when it is constructed; errors name it by its `str`. Whether it fits a value
is checked with the value.
"""

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from enum import StrEnum, unique
from types import EllipsisType
from typing import TypeAlias

import torch

from trocar_server.tensors.reductions.positions import Positions, TextSpan, require

MAX_INDEX_ITEMS = 16
MAX_POSITIONS = 65_536
MAX_COMPONENTS = 65_536
MAX_CHANNELS = 1 << 20
MAX_LENS = 1024


@dataclass(frozen=True)
class Slice:
    """`start:stop:step` as in Python; torch has no negative step."""

    start: int | None = None
    stop: int | None = None
    step: int | None = None

    def __post_init__(self) -> None:
        require(self.step is None or self.step >= 1, f"step {self.step} of a slice; it must be at least 1")

    def __str__(self) -> str:
        start, stop = ("" if bound is None else str(bound) for bound in (self.start, self.stop))
        return f"{start}:{stop}" + ("" if self.step is None else f":{self.step}")


@dataclass(frozen=True)
class Index:
    """Basic indexing as NumPy's, with integers, slices and at most one ellipsis."""

    items: tuple[int | Slice | EllipsisType, ...]

    def __post_init__(self) -> None:
        count = len(self.items)
        require(count <= MAX_INDEX_ITEMS, f"{count} index items; at most {MAX_INDEX_ITEMS} are allowed")
        require(sum(item is ... for item in self.items) <= 1, "an index can have one ellipsis")

    def __str__(self) -> str:
        return f"index [{', '.join('...' if item is ... else str(item) for item in self.items)}]"


@unique
class Axis(StrEnum):
    """A dimension by its meaning."""

    SAMPLES = "samples"
    """Dimension 0."""
    CHANNELS = "channels"
    """The last dimension of rank 3, otherwise dimension 1; or the tap's `channel_dim`."""
    TOKENS = "tokens"
    """Dimension 1 of (batch, tokens, width)."""


@dataclass(frozen=True)
class Take:
    """Some positions of one dimension, in this order; negative ones count from the end."""

    axis: Axis
    positions: tuple[int, ...]

    def __post_init__(self) -> None:
        count = len(self.positions)
        require(1 <= count <= MAX_POSITIONS, f"{count} positions; 1 to {MAX_POSITIONS:,} are allowed")

    def __str__(self) -> str:
        shown = ", ".join(map(str, self.positions[:4])) + (", ..." if len(self.positions) > 4 else "")
        return f"{self.axis.value} [{shown}]"


@dataclass(frozen=True)
class Crop:
    """A rectangle of the last two dimensions."""

    top: int
    left: int
    height: int
    width: int

    def __post_init__(self) -> None:
        require(min(self.top, self.left) >= 0, f"{self} starts below 0")
        require(min(self.height, self.width) >= 1, f"{self}; height and width are at least 1")

    def __str__(self) -> str:
        return f"crop {self.height} x {self.width} at ({self.top}, {self.left})"


@unique
class PoolKind(StrEnum):
    """Kinds of pooling over positions."""

    AVG = "avg"
    """Arithmetic mean."""
    MAX = "max"
    """Largest value."""
    GEM = "gem"
    """Generalised mean: `(mean(max(x, 1e-6) ** p)) ** (1 / p)`, Radenovic et al. 2018, arXiv:1711.02512."""
    CLS = "cls"
    """The first token of (batch, tokens, width) that is no padding."""
    LAST = "last"
    """The last token that is no padding."""


@dataclass(frozen=True)
class Pool:
    """Positions pooled together: all dimensions but samples and channels.

    Attributes:
        kind: The kind of pooling.
        size: The output size, one number per pooled dimension or one for all, adaptive as in
        torch's `adaptive_avg_pool2d`. When empty the pooled dimensions are dropped.
        power: The power of gem.
    """

    kind: PoolKind
    size: tuple[int, ...] = ()
    power: float = 3.0

    def __post_init__(self) -> None:
        require(len(self.size) <= 3, f"a pool of {len(self.size)} sizes; at most 3 are allowed")
        require(min(self.size, default=1) >= 1, f"{self}; sizes are at least 1")
        is_one = self.kind in (PoolKind.CLS, PoolKind.LAST)
        require(not (self.size and is_one), f"pool {self.kind.value} takes one token and no size")
        require(0 < self.power < math.inf, f"power {self.power} of gem; it must be above 0 and finite")

    def __str__(self) -> str:
        return f"pool {self.kind.value}" + (f" to {' x '.join(map(str, self.size))}" if self.size else "")


@dataclass(frozen=True)
class TopK:
    """The k largest elements along a dimension, largest first, with their positions as `indices`."""

    k: int
    dim: int = -1
    is_smallest: bool = False

    def __post_init__(self) -> None:
        require(self.k >= 1, f"{self}; k is at least 1")

    def __str__(self) -> str:
        return f"top-k of {self.k} along dimension {self.dim}"


@dataclass(frozen=True)
class Peak:
    """The largest value of each channel over the positions, with its position as `indices`."""

    def __str__(self) -> str:
        return "peak"


@dataclass(frozen=True)
class Gram:
    """The inner products of the channels of each sample, (batch, channels, channels).

    `G[i, j] = sum over positions of F[i] * F[j]`, Gatys et al. 2016, equation 3.

    Attributes:
        is_normalized: Whether to divide by the number of positions.
    """

    is_normalized: bool = False

    def __str__(self) -> str:
        return "gram"


@dataclass(frozen=True)
class Grid:
    """Patch tokens as a picture: (batch, tokens, width) to (batch, width, height, width of the grid).

    Attributes:
        height: Rows of patches; with 0 all three numbers are the model's own.
        width: Columns of patches.
        prefix_count: Tokens before the patches, which are left out: class and register tokens.
    """

    height: int = 0
    width: int = 0
    prefix_count: int = 0

    def __post_init__(self) -> None:
        is_given = self.height >= 1 and self.width >= 1 and self.prefix_count >= 0
        is_open = (self.height, self.width, self.prefix_count) == (0, 0, 0)
        require(is_given or is_open, f"{self}; give height and width, at least 1, or nothing")

    def __str__(self) -> str:
        return f"grid {self.height} x {self.width}" if self.height else "grid"


@dataclass(frozen=True)
class Spans:
    """Tokens by where they are in their text; `TokenRows` once the texts are tokenized.

    Attributes:
        spans: One for all samples, or one for each.
        is_decoder: Whether the decoder's own texts are meant.
    """

    spans: tuple[TextSpan, ...]
    is_decoder: bool = False

    def __post_init__(self) -> None:
        count = len(self.spans)
        require(1 <= count <= MAX_POSITIONS, f"{count} spans; 1 to {MAX_POSITIONS:,} are allowed")

    def __str__(self) -> str:
        return f"tokens of {self.spans[0]}" + (", ..." if len(self.spans) > 1 else "")


@dataclass(frozen=True)
class TokenRows:
    """Tokens of (batch, tokens, width), other ones of each sample; shorter rows are filled up with zeros.

    Attributes:
        rows: Positions of each sample in the padded batch, ascending, at least one.
        token_count: Tokens that the value has.
        first: Position of the first token of each sample that is no padding.
        is_from_end: Whether rows are counted from the end, -1 the last: the value may lack the first tokens.
    """

    rows: tuple[tuple[int, ...], ...]
    token_count: int
    first: tuple[int, ...]
    is_from_end: bool = False

    def __str__(self) -> str:
        return "tokens of texts"

    @property
    def longest(self) -> int:
        """The most tokens of a sample."""
        return max(map(len, self.rows))

    @property
    def own_positions(self) -> tuple[tuple[int, ...], ...]:
        """Positions of each sample without its padding."""
        pairs = zip(self.rows, self.first, strict=True)
        return tuple(tuple(position - first for position in row) for row, first in pairs)


@dataclass(frozen=True)
class Projection:
    """Each sample, flattened, times a Gaussian matrix of variance 1 / components: (batch, components).

    See `projection` for the matrix.
    """

    component_count: int
    seed: int = 0

    def __post_init__(self) -> None:
        count = self.component_count
        require(1 <= count <= MAX_COMPONENTS, f"{count} components; 1 to {MAX_COMPONENTS:,} are allowed")
        require(-(2**63) <= self.seed < 2**63, f"seed {self.seed}; it must fit 64 bits with a sign")

    def __str__(self) -> str:
        return f"projection to {self.component_count}"


@dataclass(frozen=True)
class Lens:
    """The most likely next tokens, as the model's own norm and head read them from vectors (.., width).

    Attributes:
        top_k: Their number.
    """

    top_k: int

    def __post_init__(self) -> None:
        require(1 <= self.top_k <= MAX_LENS, f"{self.top_k} tokens of a lens; 1 to {MAX_LENS:,} are allowed")

    def __str__(self) -> str:
        return f"lens of {self.top_k} tokens"


@dataclass(frozen=True)
class OperandSpec:
    """Shape and dtype of a tensor of the request."""

    dtype: torch.dtype
    shape: tuple[int, ...]

    @property
    def byte_count(self) -> int:
        """Bytes of the tensor."""
        return math.prod(self.shape) * self.dtype.itemsize


@dataclass(frozen=True)
class Pca:
    """`(x - mean) @ components.T` over the channels; component scores in the last dimension.

    Attributes:
        component_count: Rows of the components.
        channel_count: Columns of the components: the channels that the value must have.
        dtype: Of components and mean, float32 or float64.
        has_mean: Whether a mean, of shape (channels,), follows the components.
    """

    component_count: int
    channel_count: int
    dtype: torch.dtype = torch.float32
    has_mean: bool = False

    def __post_init__(self) -> None:
        fits = 1 <= self.component_count <= MAX_COMPONENTS and 1 <= self.channel_count <= MAX_CHANNELS
        limits = f"at least 1, at most {MAX_COMPONENTS:,} and {MAX_CHANNELS:,}"
        require(fits, f"{self}; components are of shape (components, channels), {limits}")
        is_known = self.dtype in (torch.float32, torch.float64)
        require(is_known, f"components of {dtype_name(self.dtype)}; give float32 or float64")

    def __str__(self) -> str:
        return f"pca of {self.component_count} components of {self.channel_count} channels"

    def operands(self) -> Iterator[OperandSpec]:
        """Yield the tensors of the request: the components, then the mean if there is one."""
        yield OperandSpec(self.dtype, (self.component_count, self.channel_count))
        if self.has_mean:
            yield OperandSpec(self.dtype, (self.channel_count,))


@dataclass(frozen=True)
class Readout:
    """`vectors @ x + bias` over the channels; one number for each vector, in the last dimension.

    Attributes:
        vector_count: Rows of the vectors.
        channel_count: Their columns: the channels that the value must have.
    """

    vector_count: int
    channel_count: int

    def __str__(self) -> str:
        return f"readout of {self.vector_count} vectors of {self.channel_count} channels"

    def operands(self) -> Iterator[OperandSpec]:
        """Yield the tensors: the vectors and the bias."""
        yield OperandSpec(torch.float64, (self.vector_count, self.channel_count))
        yield OperandSpec(torch.float64, (self.vector_count,))


@dataclass(frozen=True)
class PooledNorm:
    """The mean over the positions, and behind it that of the norms of the channel vectors; float32."""

    def __str__(self) -> str:
        return "pool for a direction"


Reduction: TypeAlias = (
    Index
    | Take
    | Spans
    | Positions
    | TokenRows
    | Crop
    | Pool
    | Peak
    | TopK
    | Gram
    | Grid
    | Projection
    | Pca
    | Lens
    | Readout
    | PooledNorm
)


def operand_specs(reductions: Iterable[Reduction]) -> list[OperandSpec]:
    """Return the tensors of the request, in order."""
    return [
        spec
        for reduction in reductions
        if isinstance(reduction, (Pca, Readout))
        for spec in reduction.operands()
    ]


def dtype_name(dtype: torch.dtype) -> str:
    """Return the name without the module, for example `float32`."""
    return str(dtype).removeprefix("torch.")
