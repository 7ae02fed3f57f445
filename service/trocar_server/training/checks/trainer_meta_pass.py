"""Meta pass of a trainer: its module tree with the new head, and a pass on the meta device where possible.

meta_pass = run_meta_pass(spec, hosted, recording)
meta_pass.recording.modules["fc"]
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from trocar_api.reasons import ErrorReason
from trocar_server.errors import ServiceError, first_line
from trocar_server.forward_signature import signature_of
from trocar_server.models import HostedModel, make_meta_replica
from trocar_server.surgery import Collector, Recording, TapSession, record_calls, without_recomputation
from trocar_server.training.losses.loss_function import LossFunction, main_output
from trocar_server.training.losses.loss_values import loss_target
from trocar_server.training.model.head import replace_head
from trocar_server.training.model.lora import add_lora
from trocar_server.training.spec.trainer_spec import TrainerSpec


@dataclass(frozen=True)
class TrainerMetaPass:
    """Meta pass of a trainer.

    Attributes:
        module: Its module tree: on the meta device, or over the hosted model's weights where that fails.
        recording: A recorded pass in eval mode.
        head_path: Path of the new head; None without one.
    """

    module: nn.Module
    recording: Recording
    head_path: str | None


def run_meta_pass(spec: TrainerSpec, hosted: HostedModel, recording: Recording) -> TrainerMetaPass:
    """Put the new head into a copy of the model and record a pass.

    Args:
        spec: The trainer's spec.
        hosted: The base model.
        recording: A recorded pass of the base model.

    Raises:
        ServiceError: `TRAINER_INVALID`, the head cannot be replaced, or the model does not run with it.
    """
    module = make_meta_replica(hosted.module) if recording.is_symbolic else hosted.pristine.apart()
    if spec.head is None and spec.lora is None:
        return TrainerMetaPass(module, recording, None)
    head_path = None if spec.head is None else replace_head(module, spec.head, spec.seed, recording)
    if spec.lora is not None:
        add_lora(module, spec.lora, spec.seed, head_path or "")
    try:
        recorded = record_on(module, hosted, recording)
    except Exception as error:
        raise ServiceError(
            ErrorReason.TRAINER_INVALID,
            f"head: with a new layer at '{head_path}' the model does not run ({first_line(error)}); choose "
            "another `head.path`"
            if head_path
            else f"lora: with these layers the model does not run ({first_line(error)}); choose others",
        ) from error
    return TrainerMetaPass(module, replace(recorded, stages=recording.stages), head_path)


def record_on(module: nn.Module, hosted: HostedModel, recording: Recording) -> Recording:
    """Record a pass of a module tree on inputs with the signature of an earlier recorded pass.

    The tree may be another model's, whose arguments have other names: see `ForwardSignature.adopted`.
    """
    args, kwargs = signature_of(module).adopted(*_example(hosted, recording))
    return record_calls(module, args, kwargs, is_symbolic=recording.is_symbolic)


def influenced(
    meta_pass: TrainerMetaPass, hosted: HostedModel, trained: Collection[str], loss: LossFunction
) -> bool:
    """Whether any trained parameter influences a value of the loss, differentiably.

    Not checked where no pass can run without data.

    Raises:
        ServiceError: `TRAINER_INVALID`, the model does not run with gradients.
    """
    module, recording = meta_pass.module, meta_pass.recording
    if not recording.is_symbolic:
        return True
    for name, parameter in module.named_parameters():
        parameter.requires_grad_(name in trained)
    targets = [loss_target(selector, recording) for selector in loss.selectors]
    args, kwargs = _example(hosted, recording)
    output: Any = None
    try:
        session = TapSession(module, targets, Collector(ends_pass=False))
        with torch.enable_grad(), without_recomputation(), session:
            output = module(*args, **kwargs)
    except Exception as error:
        raise ServiceError(
            ErrorReason.TRAINER_INVALID,
            f"trainable: the model does not run with gradients ({first_line(error)}); train other parameters",
        ) from error
    outputs = [main_output(output)] if any(not spec.selector for spec in loss.specs) else []
    return any(value.requires_grad for value in (*session.values.values(), *outputs))


def _example(hosted: HostedModel, recording: Recording) -> tuple[Sequence[Any], Mapping[str, Any]]:
    call = recording.modules[""].calls[0]
    is_flat = all(leaf.shape is not None and len(leaf.picks) == (leaf.port == "in") for leaf in call.inputs)
    if not is_flat:
        return hosted.forward.called(hosted.example_names, hosted.example_inputs())
    device = "meta" if recording.is_symbolic else hosted.device
    tensors = {
        (leaf.port, leaf.picks): torch.zeros(leaf.shape or (), dtype=leaf.dtype, device=device)
        for leaf in call.inputs
    }
    parameters = recording.modules[""].arguments
    args = [tensors.pop(parameters.place_at(position)) for position in range(call.positional)]
    return args, {parameters.name_of(place): tensor for place, tensor in tensors.items()}
