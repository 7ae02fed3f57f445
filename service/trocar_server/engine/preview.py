"""A dry run: what a plan would return and need, without computing anything."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from trocar_server.engine.edits import Expansions
from trocar_server.engine.hosting import Host
from trocar_server.engine.inputs import predicted_signature, signature_of_batch
from trocar_server.engine.outputs import Output
from trocar_server.engine.plan import ArgumentInput, ImageInput, Signature
from trocar_server.engine.planner import Resolved
from trocar_server.surgery import Recording, Target, moment


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
    edit_expansions: Expansions = ()
    """What each edit's selector becomes."""


def make_preview(resolved: Resolved, recording: Recording, memory_bytes: int) -> Preview:
    """Put together what is known of a pass before it runs."""
    outputs = tuple(output for target in resolved.targets for output in target.outputs)
    forward = [target.target for target in resolved.targets if not target.target.is_gradient]
    stop = stop_path([*forward, *(target for target, _ in resolved.surgery.scored)], recording)
    edits = resolved.surgery.expansions
    return Preview(outputs, resolved.expansions, stop, memory_bytes, recording.is_symbolic, edits)


def stop_path(targets: Sequence[Target], recording: Recording) -> str | None:
    """Return where a pass ends because nothing more is wanted.

    None where parameters alone are wanted, and where modules and functions are: their clocks differ.
    """
    of_pass = [target for target in targets if target.parameter is None]
    if len({target.kind for target in of_pass}) != 1:
        return None
    return max(of_pass, key=lambda target: moment(target, recording)).path


def assumed_signature(host: Host, inputs: Sequence[ArgumentInput]) -> Signature:
    """Return the form of a model's arguments; of images that have not come, that of its example input.

    Without any inputs it is the example input itself, with a batch of one.
    """
    if not inputs:
        return host.example_signature
    hosted = host.hosted
    counts = [len(entry.images) for entry in inputs if isinstance(entry, ImageInput)]
    if not counts:
        return predicted_signature(hosted, inputs) or ()
    return signature_of_batch(hosted, counts[0], hosted.dtype or torch.float32)
