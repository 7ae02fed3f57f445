"""Requests about trainers; knows the messages, not the transport."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from trocar._inputs import wire_inputs
from trocar._requests import ExtractCall
from trocar._tensors import is_array, to_wire
from trocar._trainer_losses import LossTerm, Regularizer
from trocar._trainer_optimizers import Optimizer, Schedule
from trocar._trainer_options import (
    Selectors,
    flag,
    made_by,
    optional_number,
    selectors,
    several,
    text,
    whole,
)
from trocar._trainer_parts import GradientRule, Head, SavedTensors
from trocar_api.v1 import trainer_pb2 as pb
from trocar_api.v1.extraction_pb2 import Input
from trocar_api.v1.tensor_pb2 import TensorSpec

Targets = object
"""An array, a list of numbers, or a dict of name to either."""


def trainer_spec(  # noqa: PLR0913 - options of one trainer, by keyword
    model_id: str,
    *,
    head: Head | int | None = None,
    trainable: Selectors = (),
    losses: LossTerm | str | Sequence[LossTerm | str] = (),
    optimizer: Optimizer | None = None,
    schedule: Schedule | None = None,
    gradient_rules: GradientRule | Sequence[GradientRule] = (),
    saved_tensors: SavedTensors | None = None,
    regularizers: Regularizer | Sequence[Regularizer] = (),
    train_mode: Selectors = (),
    activation_checkpointing: Selectors = (),
    clip_norm: float | None = None,
    accumulation: int = 1,
    precision: str = "float32",
    ema_decay: float | None = None,
    seed: int = 0,
    deterministic: bool = False,
    on_nonfinite: str = "fail",
    ttl_s: float | None = None,
) -> pb.TrainerSpec:
    """Build a trainer's spec; see `Client.train` for the arguments.

    Raises:
        TypeError: An argument is not what `Client.train` takes.
        ValueError: A number is not finite, or does not fit into its field.
    """
    chosen: Any = Head(head) if type(head) is int else head
    terms = [LossTerm(term) if isinstance(term, str) else term for term in several(losses, "losses")]
    rules = several(gradient_rules, "gradient_rules")
    penalties = several(regularizers, "regularizers")
    for field, value, kind, advice in (
        ("head", chosen, Head, "give the number of classes, or trocar.head(...)"),
        *(("losses", term, LossTerm, "give names, or trocar.loss_term(...)") for term in terms),
        ("optimizer", optimizer, Optimizer, "make one with trocar.sgd(...), trocar.adamw(...) and so on"),
        ("schedule", schedule, Schedule, "make one with trocar.schedule('cosine', ...)"),
        *(("gradient_rules", rule, GradientRule, "make rules with trocar.clamp(...)") for rule in rules),
        ("saved_tensors", saved_tensors, SavedTensors, "give trocar.spool(...) or trocar.host_memory()"),
        *(("regularizers", r, Regularizer, "make them with trocar.regularizer(...)") for r in penalties),
    ):
        if value is not None:
            made_by(field, value, kind, advice)
    return pb.TrainerSpec(
        model_id=text("model_id", model_id),
        head=None if chosen is None else chosen.to_wire(),
        trainable=selectors(trainable, "trainable"),
        train_mode=selectors(train_mode, "train_mode"),
        losses=[term.to_wire() for term in terms],
        regularizers=[penalty.to_wire() for penalty in penalties],
        optimizer=None if optimizer is None else optimizer.to_wire(),
        schedule=None if schedule is None else schedule.to_wire(),
        gradient_rules=[rule.to_wire() for rule in rules],
        clip_norm=optional_number("clip_norm", clip_norm),
        accumulation=whole("accumulation", accumulation, bits=32),
        precision=text("precision", precision),
        activation_checkpointing=selectors(activation_checkpointing, "activation_checkpointing"),
        ema_decay=optional_number("ema_decay", ema_decay),
        seed=whole("seed", seed),
        deterministic=flag("deterministic", deterministic),
        on_nonfinite=text("on_nonfinite", on_nonfinite),
        saved_tensors=None if saved_tensors is None else saved_tensors.to_wire(),
        ttl_s=optional_number("ttl_s", ttl_s),
    )


@dataclass(frozen=True)
class WireBatch:
    """A batch, ready to be sent as often as it takes."""

    inputs: list[Input]
    targets: list[pb.Target]
    payloads: list[memoryview]

    def call(self, trainer_id: str, kind: pb.TrainKind.ValueType, number: int | None = None) -> ExtractCall:
        """Build the messages of one call."""
        head = pb.TrainRequest(
            trainer_id=trainer_id, kind=kind, number=number, inputs=self.inputs, targets=self.targets
        )
        return ExtractCall(head.SerializeToString(), self.payloads)


def wire_batch(inputs: object, targets: Targets) -> WireBatch:
    """Convert inputs and targets.

    Raises:
        TypeError, ValueError: What `wire_inputs` raises, of inputs and targets.
    """
    arguments, payloads = wire_inputs(inputs)
    named = targets if isinstance(targets, Mapping) else {} if targets is None else {"": targets}
    messages, arrays = [], []
    for name, values in named.items():
        tensor = to_wire(_target_array(values, text("the name of a target", name)))
        arrays.append(tensor.payload)
        messages.append(pb.Target(name=name, tensor=TensorSpec(dtype=tensor.dtype, shape=tensor.shape)))
    return WireBatch(arguments, messages, [*payloads, *arrays])


def _target_array(values: Any, name: str) -> Any:
    if is_array(values):
        return values
    what = f"target {name!r}" if name else "targets"
    if not isinstance(values, Sequence) or isinstance(values, str | bytes):
        raise TypeError(f"{what}: a {type(values).__name__}; give labels or numbers, as an array or a list")
    try:
        found = np.asarray(values)
    except ValueError:
        raise ValueError(f"{what}: the entries of the list have different lengths") from None
    if found.dtype.kind not in "biuf":
        raise TypeError(f"{what}: a list of {found.dtype} entries; give labels or numbers")
    return found
