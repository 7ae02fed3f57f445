"""Trainer requests; knows the messages, not the transport."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, field
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from trocar._base.tensors import Array, is_array, to_wire
from trocar._base.token_labels import padded_labels
from trocar._request.edits import Edit
from trocar._request.inputs import wire_inputs
from trocar._request.training.fit_parts import FitOptions
from trocar._request.training.trainer_losses import LossName, LossTerm, Regularizer
from trocar._request.training.trainer_optimizers import Optimizer, Schedule
from trocar._request.training.trainer_options import (
    Selectors,
    flag,
    made_by,
    optional_number,
    selectors,
    several,
    text,
    whole,
)
from trocar._request.training.trainer_parts import GradientEdit, Head, Lora, SavedTensors, lora
from trocar._wire.requests import ExtractCall
from trocar_api.v1 import trainer_pb2 as pb
from trocar_api.v1.tensor_pb2 import TensorSpec

if TYPE_CHECKING:
    from collections.abc import Callable

    from trocar._result.history import FitEvent
    from trocar._uploads.upload_plan import UploadProgress

Targets = object
"""An array, a list of numbers, or a dict of name to either."""


@dataclass(frozen=True)
class TrainerOptions:
    """Arguments of `Client.train`, which documents them."""

    model_id: str
    _: KW_ONLY
    head: Head | int | None = None
    trainable: Selectors = ()
    losses: LossTerm | LossName | Sequence[LossTerm | LossName] = ()
    optimizer: Optimizer | None = None
    schedule: Schedule | None = None
    gradient_edits: GradientEdit | Sequence[GradientEdit] = ()
    edits: Edit | Sequence[Edit] = ()
    saved_tensors: SavedTensors | None = None
    regularizers: Regularizer | Sequence[Regularizer] = ()
    train_mode: Selectors = ()
    activation_checkpointing: Selectors = ()
    clip_norm: float | None = None
    accumulation: int = 1
    precision: Literal["float32", "bf16"] = "float32"
    ema_decay: float | None = None
    seed: int = 0
    deterministic: bool = False
    on_nonfinite: Literal["fail", "skip"] = "fail"
    lora: Lora | int | None = None
    ttl_s: float | None = None
    timeout_s: float | None = None


@dataclass(frozen=True)
class FitCall(FitOptions):
    """Arguments of `Trainer.fit`, which documents them."""

    progress: bool = field(default=True, kw_only=True)
    on_event: Callable[[FitEvent], None] | None = field(default=None, kw_only=True)


@dataclass(frozen=True)
class StartFitCall(FitOptions):
    """Arguments of `Trainer.start_fit`, which documents them."""

    on_upload: Callable[[UploadProgress], object] | None = field(default=None, kw_only=True)


def trainer_spec(options: TrainerOptions) -> pb.TrainerSpec:
    """Build a trainer's spec.

    Raises:
        TypeError: An argument is not what `Client.train` takes.
        ValueError: A number is not finite, or does not fit into its field.
    """
    chosen: Any = Head(options.head) if type(options.head) is int else options.head
    adapter: Any = lora(options.lora) if type(options.lora) is int else options.lora
    terms = [LossTerm(term) if isinstance(term, str) else term for term in several(options.losses, "losses")]
    rules = several(options.gradient_edits, "gradient_edits")
    edits = several(options.edits, "edits")
    penalties = several(options.regularizers, "regularizers")
    optimizer, saved_tensors = options.optimizer, options.saved_tensors
    for name, value, kind, advice in (
        ("head", chosen, Head, "give the number of classes, or trocar.training.head(...)"),
        ("lora", adapter, Lora, "give a rank, or trocar.training.lora({'*.q_proj': 16})"),
        *(("losses", term, LossTerm, "give names, or trocar.training.loss_term(...)") for term in terms),
        (
            "optimizer",
            optimizer,
            Optimizer,
            "create one with trocar.training.sgd(...), trocar.training.adamw(...) and so on",
        ),
        ("schedule", options.schedule, Schedule, "create one with trocar.training.schedule('cosine', ...)"),
        *(
            ("gradient_edits", rule, GradientEdit, "create rules with trocar.training.gradient_edit(...)")
            for rule in rules
        ),
        *(("edits", one, Edit, "create them with trocar.edit(...)") for one in edits),
        (
            "saved_tensors",
            saved_tensors,
            SavedTensors,
            "give trocar.training.save_on_disk(...) or trocar.training.save_on_host()",
        ),
        *(
            ("regularizers", r, Regularizer, "create them with trocar.training.regularizer(...)")
            for r in penalties
        ),
    ):
        if value is not None:
            made_by(name, value, kind, advice)
    return pb.TrainerSpec(
        model_id=text("model_id", options.model_id),
        head=None if chosen is None else chosen.to_wire(),
        trainable=selectors(options.trainable, "trainable"),
        train_mode=selectors(options.train_mode, "train_mode"),
        losses=[term.to_wire() for term in terms],
        regularizers=[penalty.to_wire() for penalty in penalties],
        optimizer=None if optimizer is None else optimizer.to_wire(),
        schedule=None if options.schedule is None else options.schedule.to_wire(),
        gradient_edits=[rule.to_wire() for rule in rules],
        edits=[one.to_wire() for one in edits],
        clip_norm=optional_number("clip_norm", options.clip_norm),
        accumulation=whole("accumulation", options.accumulation, bits=32),
        precision=text("precision", options.precision),
        activation_checkpointing=selectors(options.activation_checkpointing, "activation_checkpointing"),
        ema_decay=optional_number("ema_decay", options.ema_decay),
        seed=whole("seed", options.seed),
        deterministic=flag("deterministic", options.deterministic),
        on_nonfinite=text("on_nonfinite", options.on_nonfinite),
        saved_tensors=None if saved_tensors is None else saved_tensors.to_wire(),
        ttl_s=optional_number("ttl_s", options.ttl_s),
        lora=None if adapter is None else adapter.to_wire(),
    )


@dataclass(frozen=True)
class WireBatch:
    """A batch, ready to be sent any number of times."""

    described: bytes
    """`TrainRequest` with inputs and targets alone, serialised."""
    payloads: list[memoryview]

    def call(self, trainer_id: str, kind: pb.TrainKind.ValueType, number: int | None = None) -> ExtractCall:
        """Build the messages of one call."""
        head = pb.TrainRequest(trainer_id=trainer_id, kind=kind, number=number)
        return ExtractCall(head.SerializeToString() + self.described, self.payloads)


_MAX_KEPT = 256


class Batches:
    """Converts batches; equal layouts are described once. Thread-safe.

        batch = batches.convert(images, labels)

    Kept are descriptions of one array that is sent as it is with one target without a name, an array or a
    list of numbers: they have dtype and shape of both, and nothing of their values.
    """

    def __init__(self) -> None:
        self._described: dict[tuple[object, ...], bytes] = {}

    def convert(self, inputs: object, targets: Targets) -> WireBatch:
        """Convert inputs and targets; raises what `wire_batch` raises."""
        if type(inputs) is not np.ndarray or type(targets) not in (np.ndarray, list):
            return wire_batch(inputs, targets)
        target = targets if type(targets) is np.ndarray else _listed(targets, "targets")
        layout = (inputs.dtype, inputs.shape, target.dtype, target.shape)
        described = self._described.get(layout)
        if described is not None and inputs.flags.c_contiguous and target.flags.c_contiguous:
            flat = [inputs.reshape(-1).view(np.uint8).data, target.reshape(-1).view(np.uint8).data]
            return WireBatch(described, flat)
        batch, arrays = wire_batch(inputs, target), (inputs, target)
        if len(batch.payloads) == len(arrays) and all(map(_is_memory_of, batch.payloads, arrays)):
            if len(self._described) >= _MAX_KEPT:
                self._described.clear()
            self._described[layout] = batch.described
        return batch


def _is_memory_of(payload: memoryview, array: Array) -> bool:
    """Whether a payload is the very memory of an array: it was sent as it is."""
    is_whole = payload.nbytes == array.nbytes > 0
    return is_whole and np.frombuffer(payload, np.uint8).ctypes.data == array.ctypes.data


def wire_batch(inputs: object, targets: Targets) -> WireBatch:
    """Convert inputs and targets.

    Raises:
        TypeError, ValueError: What `wire_inputs` raises, of inputs and targets.
    """
    arguments, payloads = wire_inputs(inputs)
    is_text = any(argument.HasField("texts") for argument in arguments)
    named = targets if isinstance(targets, Mapping) else {} if targets is None else {"": targets}
    messages, arrays = [], []
    for name, values in named.items():
        labels = padded_labels(values) if is_text else None
        array = _target_array(values, text("the name of a target", name)) if labels is None else labels
        tensor = to_wire(array)
        arrays.append(tensor.payload)
        messages.append(pb.Target(name=name, tensor=TensorSpec(dtype=tensor.dtype, shape=tensor.shape)))
    described = pb.TrainRequest(inputs=arguments, targets=messages)
    return WireBatch(described.SerializeToString(), [*payloads, *arrays])


def _target_array(values: Any, name: str) -> Any:
    if is_array(values):
        return values
    what = f"target {name!r}" if name else "targets"
    if not isinstance(values, Sequence) or isinstance(values, str | bytes):
        raise TypeError(f"{what}: a {type(values).__name__}; give labels or numbers, as an array or a list")
    return _listed(values, what)


def _listed(values: Any, what: str) -> Any:
    """Return the array of a list of numbers."""
    try:
        result = np.asarray(values)
    except ValueError:
        raise ValueError(f"{what}: the entries of the list have different lengths") from None
    if result.dtype.kind not in "biuf":
        raise TypeError(
            f"{what}: a list of texts or mixed entries; give class numbers or floats, for "
            "example `[classes.index(name) for name in names]`"
        )
    return result
