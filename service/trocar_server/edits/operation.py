"""The words of this package: which operations there are. Plain data, hashable, free of tensors.

Each checks its own numbers when it is made, and its text is how errors name it. Whether it fits a value
is known only beside the value.
"""

from dataclasses import dataclass
from enum import StrEnum, unique

import torch

from trocar_server.edits.base import Operand, Operation, require, require_seed
from trocar_server.reductions import ConstantSpec

MAX_BASIS_WORK = 1 << 33
"""The most vectors * channels * the smaller of the two, of a basis: some seconds of a CPU."""


@unique
class NoiseKind(StrEnum):
    """The distribution of random numbers."""

    GAUSSIAN = "gaussian"
    """Mean 0, standard deviation `scale`."""
    UNIFORM = "uniform"
    """From -`scale` to `scale`."""


@unique
class NormScope(StrEnum):
    """What is measured by a norm."""

    SAMPLE = "sample"
    """Each sample, dimension 0."""
    CHANNEL_VECTOR = "channel_vector"
    """Each vector of channels."""
    ALL = "all"
    """The whole part."""


@dataclass(frozen=True)
class Set(Operation):
    """Replaces the part."""

    name = "set"
    takes_integers = True
    takes_booleans = True
    value: Operand


@dataclass(frozen=True)
class Zero(Operation):
    """Replaces the part by zeros."""

    name = "zero"
    takes_integers = True
    takes_booleans = True


@dataclass(frozen=True)
class Add(Operation):
    """x + value."""

    name = "add"
    takes_integers = True
    value: Operand


@dataclass(frozen=True)
class Scale(Operation):
    """x * factor."""

    name = "scale"
    takes_integers = True
    factor: Operand


@dataclass(frozen=True)
class Affine(Operation):
    """x * scale + shift."""

    name = "affine"
    scale: Operand = 1.0
    shift: Operand = 0.0


@dataclass(frozen=True)
class Clamp(Operation):
    """Limits each element to [low, high]; an end that is None is open."""

    name = "clamp"
    takes_integers = True
    takes_complex = False
    low: float | None = None
    high: float | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        require(self.low is not None or self.high is not None, "clamp needs a low or a high end")
        if self.low is not None and self.high is not None:
            require(self.low <= self.high, f"clamp: low {self.low} is above high {self.high}")


@dataclass(frozen=True)
class Noise(Operation):
    """x + random numbers of torch's CPU generator in float32."""

    name = "noise"
    kind: NoiseKind
    scale: float
    seed: int = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        require(self.scale >= 0, f"noise: scale {self.scale} is negative")
        require_seed(self, self.seed)


@dataclass(frozen=True)
class MeanAblate(Operation):
    """Each sample becomes the mean over the samples of the part, or the reference."""

    name = "mean_ablate"
    reference: ConstantSpec | None = None


@dataclass(frozen=True)
class Resample(Operation):
    """Sample i becomes sample `torch.randperm(batch)[i]` of torch's CPU generator."""

    name = "resample"
    takes_integers = True
    takes_booleans = True
    seed: int = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        require_seed(self, self.seed)


@dataclass(frozen=True)
class Swap(Operation):
    """Replaces the part by the same part of a value from elsewhere.

    Attributes:
        source: The name of other inputs of the request; this pass itself when empty.
        selector: Where the value is taken, as a text; at the edit's own selector when empty.
    """

    name = "swap"
    takes_integers = True
    takes_booleans = True
    source: str = ""
    selector: str = ""

    def __post_init__(self) -> None:
        require(bool(self.source or self.selector), "swap needs a source or a selector")


@dataclass(frozen=True)
class AddInput(Operation):
    """output + input of the same call."""

    name = "add_input"
    takes_integers = True


@dataclass(frozen=True)
class Steer(Operation):
    """x + alpha * direction along the channels."""

    name = "steer"
    direction: ConstantSpec
    alpha: float = 1.0
    keeps_norm: bool = False


@dataclass(frozen=True)
class Project(Operation):
    """Removes the projection of each vector of channels onto the span of the rows of `basis`."""

    name = "project_out"
    basis: ConstantSpec

    def __post_init__(self) -> None:
        super().__post_init__()
        require(
            len(self.basis.shape) == 2,
            f"{self.name}: basis of shape {self.basis.shape}; it is (vectors, channels)",
        )
        vectors, channels = self.basis.shape
        require(
            vectors * channels * min(vectors, channels) <= MAX_BASIS_WORK,
            f"{self.name}: a basis of shape {self.basis.shape} is too large; give fewer vectors",
        )


@dataclass(frozen=True)
class ProjectOnto(Project):
    """Leaves the projection of each vector of channels onto the span of the rows of `basis`."""

    name = "project_onto"


@dataclass(frozen=True)
class TopK(Operation):
    """All but the k largest elements along a dimension become zero."""

    name = "top_k"
    takes_integers = True
    k: int
    dim: int | None = None
    is_absolute: bool = False

    def __post_init__(self) -> None:
        require(self.k >= 1, f"top_k: k is {self.k}; it must be at least 1")


@dataclass(frozen=True)
class Dropout(Operation):
    """Random elements become zero, the others are divided by 1 - probability."""

    name = "dropout"
    probability: float
    seed: int = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        require(0 <= self.probability < 1, f"dropout: probability {self.probability}; it is 0 to below 1")
        require_seed(self, self.seed)


@dataclass(frozen=True)
class Cast(Operation):
    """To a dtype and back: float16, bfloat16, or int8 with one scale for the part."""

    name = "cast"
    takes_complex = False
    dtype: torch.dtype

    def __post_init__(self) -> None:
        allowed = (torch.float16, torch.bfloat16, torch.int8)
        require(self.dtype in allowed, "cast: to float16, bfloat16 or int8")


@dataclass(frozen=True)
class Skip(Operation):
    """Does not run the module: its first input is its output."""

    name = "skip"
    takes_integers = True
    takes_booleans = True


@dataclass(frozen=True)
class Normalise(Operation):
    """Scales down what has a larger Euclidean norm than the limit; `is_exact`: up, too."""

    name = "normalise"
    max_norm: float
    scope: NormScope = NormScope.SAMPLE
    is_exact: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        require(self.max_norm > 0, f"normalise: max_norm {self.max_norm}; it must be above 0")


@dataclass(frozen=True)
class NanToNum(Operation):
    """As `torch.nan_to_num`."""

    name = "nan_to_num"
    takes_complex = False
    nan: float = 0.0
    posinf: float | None = None
    neginf: float | None = None
