"""Dry run: what a plan would return and need, without computing anything."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from trocar_server.engine.execute.arguments import image_sizes, predicted_signature, signature_of_batch
from trocar_server.engine.host.deployment import Deployment
from trocar_server.engine.request.plan import (
    ArgumentInput,
    ImageInput,
    MadeInput,
    Signature,
    TensorSignature,
)
from trocar_server.engine.resolve.edit_resolution import Expansions
from trocar_server.engine.resolve.planner import Resolved
from trocar_server.engine.resolve.tap_outputs import Output
from trocar_server.models import HostedModel
from trocar_server.models.image_rules import Size
from trocar_server.models.inputs import IMAGES, PATCH_MASK, PIXEL_MASK
from trocar_server.surgery import Recording, Target, call_order


@dataclass(frozen=True)
class Preview:
    """Preview of a request."""

    outputs: tuple[Output, ...]
    """The feature maps of the reply."""
    expansions: tuple[tuple[str, ...], ...]
    """The names that each tap expands to."""
    stopped_at: str | None
    """The module after which the pass would stop; None when it would run to its end."""
    memory_bytes: int
    """Peak memory of the pass in bytes, without the weights, with decoded and prepared images."""
    is_symbolic: bool
    """Whether it is valid for any data of this signature."""
    edit_expansions: Expansions = ()
    """The names that each edit's selector expands to."""


def make_preview(resolved: Resolved, recording: Recording, memory_bytes: int) -> Preview:
    """Assemble the preview of a pass."""
    outputs = tuple(output for target in resolved.targets for output in target.outputs)
    forward = [target.target for target in resolved.targets if not target.target.is_gradient]
    ends = [*forward, *(target for target, _ in resolved.surgery.scored)]
    stop = None if resolved.calls else stop_path(ends, recording)
    edits = resolved.surgery.expansions
    return Preview(outputs, resolved.expansions, stop, memory_bytes, recording.is_symbolic, edits)


def stop_path(targets: Sequence[Target], recording: Recording) -> str | None:
    """Return the module after which a pass ends, because nothing later is wanted.

    None where only parameters are wanted, and where both modules and functions are: their call orders differ.
    """
    of_pass = [target for target in targets if target.parameter is None]
    if len({target.kind for target in of_pass}) != 1:
        return None
    return max(of_pass, key=lambda target: call_order(target, recording)).path


def assumed_signature(deployment: Deployment, inputs: Sequence[ArgumentInput]) -> Signature:
    """Return the signature of a model's arguments; for images not yet received, that of its example input.

    Without any inputs it is that of the example input, with a batch of one.
    """
    if not inputs:
        return deployment.example_signature
    hosted = deployment.hosted
    counts = [len(entry.images) for entry in inputs if isinstance(entry, ImageInput)]
    if not counts:
        return predicted_signature(hosted, inputs) or ()
    if hosted.known_signature is not None and hosted.known_signature.takes_images:
        sizes = [
            size for entry in inputs if isinstance(entry, ImageInput) for size in image_sizes(entry.images)
        ]
        return tuple(_assumed(hosted, entry, sizes) for entry in inputs)
    return signature_of_batch(hosted, counts[0], hosted.dtype or torch.float32)


def _assumed(hosted: HostedModel, entry: ArgumentInput, sizes: Sequence[Size | None]) -> TensorSignature:
    """Signature of an argument; of images whose size is not known, that of the model's example."""
    if isinstance(entry, MadeInput):
        count, *rest = _image_shape(hosted, IMAGES, sizes)
        if entry.name == PATCH_MASK:
            return TensorSignature(entry.name, torch.int32, ((count, rest[0]),))
        return TensorSignature(
            entry.name, torch.int64, ((count, *(rest[1:] if entry.name == PIXEL_MASK else (2,))),)
        )
    if not isinstance(entry, ImageInput):
        result = predicted_signature(hosted, (entry,))
        assert result  # only that of images may be unknown
        return result[0]
    shape = _image_shape(hosted, entry.name, sizes)
    return TensorSignature(entry.name, hosted.dtype or torch.float32, (shape,))


def _image_shape(hosted: HostedModel, name: str, sizes: Sequence[Size | None]) -> tuple[int, ...]:
    assert hosted.known_signature is not None
    example = hosted.known_signature.shape_of(hosted.known_signature.find(name, 0), len(sizes))
    if hosted.preprocessing and hosted.preprocessing.patch_count:
        return len(sizes), hosted.preprocessing.patch_count, example[2]
    size = hosted.preprocessing.common_size(sizes) if hosted.preprocessing else None
    return (*example[:2], *(size or example[2:]))
