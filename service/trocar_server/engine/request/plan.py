"""Plan: a checked request, free of protobuf."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from math import copysign
from typing import TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray

from trocar_server.engine.request.numerics import Numerics
from trocar_server.engine.request.objective import Objective
from trocar_server.engine.request.priority import Priority
from trocar_server.processing.inputs import AudioInput, ProcessedInput, ProcessorInput
from trocar_server.surgery import Selector
from trocar_server.tensors.edits import Edit
from trocar_server.tensors.reductions import Cast, Lens, OperandSpec, Positions, Reduction, operand_specs
from trocar_server.tensors.stats import NO_PARAMETERS, Scope, Statistic, StatisticParameters

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
"""Further dtypes of reply values, only where a request allows them."""


@dataclass(frozen=True)
class TapRequest:
    """Tap: values to collect at one selector."""

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
    """Whether values may be of `WIDE_UNSIGNED`, which our own wire format has no names for."""
    includes_padding: bool = False
    """Whether statistics and reductions count the tokens of padding. See Note: [Padding]."""
    positions: Positions | None = None
    """Of a text that is generated: whose rows are collected; all when None. Elsewhere the first reduction."""
    suffix: str = ""
    """Appended to every name of this tap's values, so that another tap may select the same values."""
    stored: str = ""
    """The name under which its operands are stored; empty for those of the request itself."""

    @cached_property
    def reads_tokens(self) -> bool:
        """Whether the value is read by the model's head, as tokens."""
        return bool(self.reductions) and isinstance(self.reductions[-1], Lens)

    @cached_property
    def is_plain(self) -> bool:
        """Whether values alone are wanted, as they are."""
        return self.values and not (self.statistics or self.reductions or self.cast)


@dataclass(frozen=True)
class TensorInput:
    """An argument of the forward, given as a tensor: one payload."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    convert_to: torch.dtype | None = None
    """The dtype that the model gets; unconverted when None."""

    @cached_property
    def model_dtype(self) -> torch.dtype:
        """The dtype that the model sees."""
        return self.convert_to or self.dtype


@dataclass(frozen=True)
class ImageSpec:
    """One image: encoded when `height` is 0, otherwise (height, width, 3) uint8. One payload."""

    byte_count: int
    height: int = 0
    width: int = 0
    encoded_size: tuple[int, int] | None = None
    """Height and width of an encoded image as the caller told them for a dry run."""


@dataclass(frozen=True)
class ImageInput:
    """An argument of the forward, given as images for the server to preprocess: one payload per image."""

    name: str
    images: tuple[ImageSpec, ...]


@dataclass(frozen=True)
class TensorListInput:
    """An argument of the forward, given as samples of different sizes: one payload per sample."""

    name: str
    dtype: torch.dtype
    shapes: tuple[tuple[int, ...], ...]
    """Of each sample, without a batch dimension; at least one."""
    convert_to: torch.dtype | None = None
    """The dtype that the model gets; unconverted when None."""

    @cached_property
    def model_dtype(self) -> torch.dtype:
        """The dtype that the model sees."""
        return self.convert_to or self.dtype


Flag: TypeAlias = bool | int | str
"""The value of an argument that is no tensor."""


@dataclass(frozen=True)
class FlagInput:
    """An argument of the forward that is no tensor: no payload."""

    name: str
    value: Flag


@dataclass(frozen=True)
class MadeInput:
    """An argument that the preprocessing makes beside the images, such as their mask: no payload."""

    name: str
    count: int
    """Number of the images."""


ArgumentInput: TypeAlias = TensorInput | TensorListInput | ImageInput | FlagInput | MadeInput


def payload_count(entry: ArgumentInput) -> int:
    """Return the number of an argument's payloads."""
    if isinstance(entry, (TensorInput, FlagInput, MadeInput)):
        return int(isinstance(entry, TensorInput))
    return len(entry.shapes if isinstance(entry, TensorListInput) else entry.images)


@dataclass(frozen=True)
class StartAt:
    """Start of a pass in place of the model's input; the plan's one input is the value there."""

    selector: Selector
    inputs: tuple[TensorInput, ...] = ()
    """The signature of the model's own inputs; its example input with the value's batch size when empty."""


@dataclass(frozen=True)
class EditRequest:
    """Edit at one selector: of a value, a parameter or a gradient, as the selector says.

    Attributes:
        selector: The values to edit.
        edit: The operation.
        is_after_taps: Whether taps at the same place see the value before the edit.
        stored: The name of the stored list that it comes from; empty for an edit of the request itself.
        positions: Of a text that is generated: which are changed; all when None. Elsewhere they are in the
            region of the edit.
        stored_gate: The name under which the tensors of its gate are stored; empty without a gate.
    """

    selector: Selector
    edit: Edit
    is_after_taps: bool = False
    stored: str = ""
    positions: Positions | None = None
    stored_gate: str = ""


@dataclass(frozen=True)
class SourceInputs:
    """Inputs of another pass, from which swaps take values."""

    name: str
    inputs: tuple[ArgumentInput, ...]
    unprocessed: tuple[ProcessorInput, ...] = ()
    """As `Plan.unprocessed`."""


@dataclass(frozen=True)
class Execution:
    """Execution options of a pass.

    Attributes:
        numerics: The loosest that the caller accepts; the model's default when None.
        merge: Whether its batch may be merged with those of other calls; see `merge_group`.
        cache: Whether the reply may be read from and written to the feature cache.
        priority: Order among the caller's own calls.
    """

    numerics: Numerics | None = None
    merge: bool = True
    cache: bool = True
    priority: Priority = Priority.NORMAL


AS_USUAL = Execution()
"""The default."""


@dataclass(frozen=True)
class Plan:
    """One extraction; everything that needs no model is checked.

    Its payloads are sent in this order: those of the inputs, then of `tap_operands`, `edit_operands`
    (except stored edits) and `objective_operands`, then those of each source's inputs. `Payloads` has all.
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
    unprocessed: tuple[ProcessorInput, ...] = ()
    """Further inputs, which the model's processor turns into arguments; see `Preparation.process`. Their
    payloads are among those of `inputs`."""
    processed: tuple[ProcessedInput, ...] = ()
    """What the processor made of them."""

    @cached_property
    def needs_processing(self) -> bool:
        """Whether there are inputs for the model's processor, or positions of texts."""
        return (
            bool(self.unprocessed) or any(source.unprocessed for source in self.sources) or self.has_positions
        )

    @cached_property
    def has_positions(self) -> bool:
        """Whether a tap or an edit selects positions of texts that are not read yet."""
        of_taps = (reduction for tap in self.taps for reduction in tap.reductions)
        of_edits = (request.edit.region.tokens for request in self.edits)
        of_objective = () if self.objective is None else self.objective.reductions
        given = (*of_taps, *of_edits, *of_objective, *self.read_positions)
        return any(isinstance(entry, Positions) for entry in given)

    @property
    def read_positions(self) -> list[Positions]:
        """Positions of prompts that depend on the tokens of these."""
        of_taps, of_edits = ([entry.positions for entry in entries] for entries in (self.taps, self.edits))
        return [entry for entry in (*of_taps, *of_edits) if entry is not None and entry.reads_text]

    @cached_property
    def negative_zeros(self) -> tuple[tuple[int, str], ...]:
        """Position of an edit and name of its option, for each option that is -0.0: it equals 0.0."""
        return tuple(
            (position, name)
            for position, request in enumerate(self.edits)
            for name, value in vars(request.edit.operation).items()
            if value == 0 and isinstance(value, float) and copysign(1.0, value) < 0
        )

    @cached_property
    def has_images(self) -> bool:
        """Whether any input, or one of a source, is images."""
        given = (*self.inputs, *(entry for source in self.sources for entry in source.inputs))
        return any(isinstance(entry, ImageInput) for entry in given)

    @cached_property
    def batch_size(self) -> int | None:
        """See `batch_size`."""
        return batch_size(self.inputs)

    @property
    def has_flags(self) -> bool:
        """Whether any input is a flag, which can change what the model calls and returns."""
        return any(isinstance(entry, FlagInput) for entry in self.inputs)

    @property
    def has_made(self) -> bool:
        """Whether the preprocessing makes an input beside images, which the example input does not have."""
        return any(isinstance(entry, MadeInput) for entry in self.inputs)

    @property
    def has_sound(self) -> bool:
        """Whether any input, or one of a source, is sound."""
        given = (*self.unprocessed, *(entry for source in self.sources for entry in source.unprocessed))
        return any(isinstance(entry, AudioInput) for entry in given)

    @property
    def tap_operands(self) -> list[OperandSpec]:
        """The tensors that the taps' reductions need."""
        return [spec for tap in self.taps for spec in operand_specs(tap.reductions)]

    @property
    def edit_operands(self) -> list[OperandSpec]:
        """The tensors that the edits need, stored edits included."""
        return [spec for request in self.edits for spec in request.edit.operands]

    @property
    def objective_operands(self) -> list[OperandSpec]:
        """The tensors that the objective needs."""
        return [] if self.objective is None else list(self.objective.operands)


def batch_size(inputs: Sequence[ArgumentInput]) -> int | None:
    """Return the images, or the first dimension, of the first argument; None without one or for a scalar."""
    if not inputs or isinstance(inputs[0], FlagInput):
        return None
    first = inputs[0]
    if isinstance(first, ImageInput):
        return len(first.images)
    if isinstance(first, MadeInput):
        return first.count
    if isinstance(first, TensorListInput):
        return len(first.shapes)
    return first.shape[0] if first.shape else None


def input_payload_count(inputs: Sequence[ArgumentInput], unprocessed: Sequence[ProcessorInput] = ()) -> int:
    """Return the number of payloads of all inputs of a pass."""
    clips = (len(entry.clips) for entry in unprocessed if isinstance(entry, AudioInput))
    return sum(map(payload_count, inputs)) + sum(clips)


def row_count(inputs: Sequence[ArgumentInput]) -> int:
    """Return the number of samples in the arguments of a pass, as far as their shapes tell; at least 1."""
    return batch_size(inputs) or 1


@dataclass(frozen=True)
class Payloads:
    """Payloads of a plan, by use; each part in the order of the plan."""

    inputs: Sequence[Payload] = ()
    taps: Sequence[Payload] = ()
    """Of `Plan.tap_operands`."""
    edits: Sequence[Payload] = ()
    """Of `Plan.edit_operands`, those of stored edits included."""
    objective: Sequence[Payload] = ()
    """Of `Plan.objective_operands`."""
    sources: Sequence[Sequence[Payload]] = ()
    """The inputs of each of `Plan.sources`."""


@dataclass(frozen=True)
class TensorSignature:
    """Shape and dtype of one argument; a list of tensors has several shapes, a flag none."""

    name: str
    dtype: torch.dtype
    shapes: tuple[tuple[int, ...], ...]
    is_list: bool = False
    flag: Flag | None = None
    """The value of an argument that is no tensor; None for tensors."""

    @classmethod
    def of_flag(cls, name: str, value: Flag) -> "TensorSignature":
        """Signature of a flag. The dtype tells its type, as `True == 1` in Python."""
        dtypes = {bool: torch.bool, int: torch.int64, str: torch.uint8}
        return cls(name, dtypes[type(value)], (), flag=value)

    def make(self, device: torch.device | str) -> torch.Tensor | list[torch.Tensor] | Flag:
        """Return an argument of this signature, uninitialised where it is a tensor."""
        if self.flag is not None:
            return self.flag
        tensors = [torch.empty(shape, dtype=self.dtype, device=device) for shape in self.shapes]
        return tensors if self.is_list else tensors[0]


Signature: TypeAlias = tuple[TensorSignature, ...]
