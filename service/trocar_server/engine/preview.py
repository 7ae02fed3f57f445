"""A dry run: what a plan would return and need, without computing anything."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch

from trocar_server.engine.inputs import predicted_signature
from trocar_server.engine.outputs import Output
from trocar_server.engine.plan import ArgumentInput, ImageInput, Signature, TensorSignature
from trocar_server.engine.planner import Resolved
from trocar_server.models import HostedModel
from trocar_server.surgery import Recording, Target


@dataclass(frozen=True)
class Preview:
    """What a request would come to."""

    outputs: tuple[Output, ...]
    """The feature maps of the reply."""
    expansions: tuple[tuple[str, ...], ...]
    """The names that each tap becomes."""
    stopped_at: str | None
    """The module after which the pass would stop; None when it would run to its end."""
    memory_bytes: int
    """The most device memory that the pass needs at once, beside the weights."""
    is_symbolic: bool
    """Whether it holds for any data of this form."""


def make_preview(resolved: Resolved, recording: Recording, memory_bytes: int) -> Preview:
    """Put together what is known of a pass before it runs."""
    outputs = tuple(output for target in resolved.targets for output in target.outputs)
    last = last_target((target.target for target in resolved.targets), recording)
    return Preview(outputs, resolved.expansions, last.path, memory_bytes, recording.is_symbolic)


def last_target(targets: Iterable[Target], recording: Recording) -> Target:
    """Return the target that a pass collects last: there it stops."""
    return max(targets, key=lambda target: moment(target, recording))


def moment(target: Target, recording: Recording) -> int:
    """Return when a target is collected, on the clock of the recording."""
    call = recording.modules[target.path].calls[target.call]
    return call.ended if target.port == "out" else call.started


def assumed_signature(hosted: HostedModel, inputs: Sequence[ArgumentInput]) -> Signature:
    """Return the form of a model's arguments; of images that have not come, that of its example input.

    Without any inputs it is the example input itself, with a batch of one.
    """
    counts = [len(entry.images) for entry in inputs if isinstance(entry, ImageInput)]
    if inputs and not counts:
        return predicted_signature(hosted, inputs) or ()
    dtype = hosted.dtype or torch.float32
    batch = counts[0] if counts else 1
    if hosted.takes_list:
        return (TensorSignature("", dtype, (hosted.input_shape,) * batch, is_list=True),)
    shape = (batch, *hosted.input_shape)
    return (TensorSignature("", dtype, (shape,)),) * len(hosted.example_inputs())
