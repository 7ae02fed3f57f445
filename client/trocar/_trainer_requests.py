"""Requests about trainers; knows the messages, not the transport."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from trocar._inputs import wire_inputs
from trocar._requests import ExtractCall
from trocar._tensors import is_array, to_wire
from trocar._trainer_parts import (
    GradientRule,
    Head,
    LossTerm,
    Optimizer,
    Regularizer,
    SavedTensors,
    Schedule,
    Selectors,
    selectors,
)
from trocar_api.v1 import trainer_pb2 as pb
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
    """Build a trainer's spec; see `Client.train` for the arguments."""
    chosen = Head(head) if isinstance(head, int) else head
    terms = [losses] if isinstance(losses, LossTerm | str) else losses
    rules = [gradient_rules] if isinstance(gradient_rules, GradientRule) else gradient_rules
    penalties = [regularizers] if isinstance(regularizers, Regularizer) else regularizers
    return pb.TrainerSpec(
        model_id=model_id,
        head=None if chosen is None else chosen.to_wire(),
        trainable=selectors(trainable),
        train_mode=selectors(train_mode),
        losses=[(LossTerm(term) if isinstance(term, str) else term).to_wire() for term in terms],
        regularizers=[penalty.to_wire() for penalty in penalties],
        optimizer=None if optimizer is None else optimizer.to_wire(),
        schedule=None if schedule is None else schedule.to_wire(),
        gradient_rules=[rule.to_wire() for rule in rules],
        clip_norm=clip_norm,
        accumulation=accumulation,
        precision=precision,
        activation_checkpointing=selectors(activation_checkpointing),
        ema_decay=ema_decay,
        seed=seed,
        deterministic=deterministic,
        on_nonfinite=on_nonfinite,
        saved_tensors=None if saved_tensors is None else saved_tensors.to_wire(),
        ttl_s=ttl_s,
    )


def train_call(
    trainer_id: str, kind: pb.TrainKind.ValueType, number: int | None, inputs: object, targets: Targets
) -> ExtractCall:
    """Build the messages of one batch.

    Raises:
        TypeError, ValueError: What `wire_inputs` raises, of inputs and targets.
    """
    arguments, payloads = wire_inputs(inputs)
    named = targets if isinstance(targets, Mapping) else {} if targets is None else {"": targets}
    messages, arrays = [], []
    for name, values in named.items():
        tensor = to_wire(values if is_array(values) else np.asarray(values))
        arrays.append(tensor.payload)
        form = TensorSpec(dtype=tensor.dtype, shape=tensor.shape)
        messages.append(pb.Target(name=str(name), tensor=form))
    head = pb.TrainRequest(
        trainer_id=trainer_id, kind=kind, number=number, inputs=arguments, targets=messages
    )
    return ExtractCall(head.SerializeToString(), [*payloads, *arrays])
