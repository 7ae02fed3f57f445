"""A checked request, free of protobuf."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray

from trocar_server.edits import Edit
from trocar_server.engine.fair_queue import Priority
from trocar_server.engine.objective import Objective
from trocar_server.engines import Numerics
from trocar_server.reductions import Cast, ConstantSpec, Reduction, constant_specs
from trocar_server.stats import NO_PARAMETERS, Scope, Statistic, StatisticParameters
from trocar_server.surgery import Selector

Payload: TypeAlias = NDArray[np.uint8]
"""The bytes of one tensor or image, one-dimensional, writable, owned by the call."""


SENDABLE = frozenset(
    (
        *(torch.float32, torch.float64, torch.float16, torch.bfloat16),
        *(torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64, torch.bool),
        *(torch.complex64, torch.complex128),
    )
)
"""The dtypes that the values of a reply can have."""

WIDE_UNSIGNED = frozenset((torch.uint16, torch.uint32, torch.uint64))
"""Those that they can have, too, where a request says so."""


@dataclass(frozen=True)
class TapRequest:
    """What to collect at one selector."""

    selector: Selector
    alias: str = ""
    values: bool = True
    statistics: tuple[Statistic, ...] = ()
    scope: Scope = Scope.ALL
    channel_dim: int | None = None
    reductions: tuple[Reduction, ...] = ()
    cast: Cast | None = None
    parameters: StatisticParameters = NO_PARAMETERS
    takes_wide_unsigned: bool = False
    """Whether values may be of `WIDE_UNSIGNED`, which our own wire has no names for."""
    suffix: str = ""
    """Goes behind every name that it becomes, so that another tap may select the same values."""


@dataclass(frozen=True)
class TensorInput:
    """An argument of the forward, given as a tensor: one payload."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    convert_to: torch.dtype | None = None
    """What the model gets instead; as it came when None."""

    @property
    def model_dtype(self) -> torch.dtype:
        """The dtype that the model sees."""
        return self.convert_to or self.dtype


@dataclass(frozen=True)
class ImageForm:
    """One image: encoded when `height` is 0, otherwise (height, width, 3) uint8. One payload."""

    byte_count: int
    height: int = 0
    width: int = 0


@dataclass(frozen=True)
class ImageInput:
    """An argument of the forward, given as images for the server to preprocess: a payload each."""

    name: str
    images: tuple[ImageForm, ...]


ArgumentInput: TypeAlias = TensorInput | ImageInput


@dataclass(frozen=True)
class StartAt:
    """Where a pass starts instead of at the model's input; the plan's one input is the value there."""

    selector: Selector
    inputs: tuple[TensorInput, ...] = ()
    """The form of the model's own inputs; its example input with the value's batch size when empty."""


@dataclass(frozen=True)
class EditRequest:
    """What to change at one selector; a value, a parameter or a gradient, as the selector says.

    Attributes:
        selector: Where.
        edit: What.
        is_after_taps: Whether taps at the same place see the value as it was.
        stored: The name of the stored list that it comes from; empty for one of the request itself.
    """

    selector: Selector
    edit: Edit
    is_after_taps: bool = False
    stored: str = ""


@dataclass(frozen=True)
class SourceInputs:
    """Inputs of another pass, from which swaps take values."""

    name: str
    inputs: tuple[ArgumentInput, ...]


@dataclass(frozen=True)
class Execution:
    """How a pass may be run.

    Attributes:
        numerics: The loosest that the caller takes; the model's default when None.
        merge: Whether its batch may be run together with those of other calls.
        cache: Whether the reply may come from the feature cache, and go there.
        priority: Which of the caller's calls go first.
    """

    numerics: Numerics | None = None
    merge: bool = True
    cache: bool = True
    priority: Priority = Priority.NORMAL


AS_USUAL = Execution()
"""What a caller who says nothing gets."""


@dataclass(frozen=True)
class Plan:
    """One extraction, with everything in it checked that needs no model.

    Its payloads travel in this order: those of the inputs, then of `tap_constants`, `edit_constants` (but for
    stored edits) and `objective_constants`, then those of the inputs of each source. `Payloads` has all.
    """

    model_id: str
    taps: tuple[TapRequest, ...]
    inputs: tuple[ArgumentInput, ...]
    max_chunk_bytes: int
    start_at: StartAt | None = None
    edits: tuple[EditRequest, ...] = ()
    objective: Objective | None = None
    sources: tuple[SourceInputs, ...] = ()
    execution: Execution = AS_USUAL

    @property
    def tap_constants(self) -> list[ConstantSpec]:
        """The tensors that the taps' reductions need."""
        return [spec for tap in self.taps for spec in constant_specs(tap.reductions)]

    @property
    def edit_constants(self) -> list[ConstantSpec]:
        """The tensors that the edits need, those of stored ones included."""
        return [spec for request in self.edits for spec in request.edit.constants]

    @property
    def objective_constants(self) -> list[ConstantSpec]:
        """The tensors that the objective needs."""
        return [] if self.objective is None else list(self.objective.constants)


def batch_size(inputs: Sequence[ArgumentInput]) -> int | None:
    """Return the images, or the first dimension, of the first argument; None without one, or of a scalar."""
    if not inputs:
        return None
    first = inputs[0]
    if isinstance(first, ImageInput):
        return len(first.images)
    return first.shape[0] if first.shape else None


def row_count(inputs: Sequence[ArgumentInput]) -> int:
    """Return how many samples the arguments of a pass have, as far as their form tells; at least 1."""
    return batch_size(inputs) or 1


@dataclass(frozen=True)
class Payloads:
    """What came with a plan, sorted by what it is for; each part in the order of the plan."""

    inputs: Sequence[Payload] = ()
    taps: Sequence[Payload] = ()
    """Of `Plan.tap_constants`."""
    edits: Sequence[Payload] = ()
    """Of `Plan.edit_constants`, those of stored edits included."""
    objective: Sequence[Payload] = ()
    """Of `Plan.objective_constants`."""
    sources: Sequence[Sequence[Payload]] = ()
    """The inputs of each of `Plan.sources`."""


@dataclass(frozen=True)
class TensorSignature:
    """Shape and dtype of one argument; a list of tensors has several shapes."""

    name: str
    dtype: torch.dtype
    shapes: tuple[tuple[int, ...], ...]
    is_list: bool = False

    def make(self, device: torch.device | str) -> torch.Tensor | list[torch.Tensor]:
        """Return an argument of this form with unset values."""
        tensors = [torch.empty(shape, dtype=self.dtype, device=device) for shape in self.shapes]
        return tensors if self.is_list else tensors[0]


Signature: TypeAlias = tuple[TensorSignature, ...]


def split_arguments(names: Sequence[str], values: Sequence[object]) -> tuple[list[object], dict[str, object]]:
    """Return positional and keyword arguments; an empty name is positional."""
    positional = [value for name, value in zip(names, values, strict=True) if not name]
    keyword = {name: value for name, value in zip(names, values, strict=True) if name}
    return positional, keyword
