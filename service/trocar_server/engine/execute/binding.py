"""Binding: every argument of a request gets the name of its parameter.

    inputs = bound_inputs(hosted, plan.inputs)    # each with the name that the model's forward has for it

See Note: [Names of arguments] in `forward_signature`.
"""

from dataclasses import replace

from trocar_server.engine.execute.arguments import has_images
from trocar_server.engine.request.plan import ArgumentInput, FlagInput, ImageInput, MadeInput
from trocar_server.models import HostedModel
from trocar_server.models.inputs import IMAGES

_IMAGE_NAMES = frozenset({"images", "image"})
"""Names of images in transformers' processors."""


def bound_inputs(hosted: HostedModel, inputs: tuple[ArgumentInput, ...]) -> tuple[ArgumentInput, ...]:
    """Return the arguments of a forward by name, with what the preprocessing makes beside images.

    They are as given where they have their names, and where the forward has no names that can be read.

    Raises:
        ServiceError: `INPUT_REJECTED`: one too many, an unknown name, or an argument given twice.
    """
    inputs = _with_named_images(hosted, inputs)
    flags = [entry.name for entry in inputs if isinstance(entry, FlagInput)]
    names = hosted.bind([entry.name for entry in inputs], flags)
    return tuple(
        entry if entry.name == name else replace(entry, name=name)
        for entry, name in zip(inputs, names, strict=True)
    )


def _with_named_images(hosted: HostedModel, inputs: tuple[ArgumentInput, ...]) -> tuple[ArgumentInput, ...]:
    """Give images without a name, or of the name `images`, the name that the model has for them.

    What is made beside them, such as the mask of padded images, is appended. In most signatures of texts and
    images the first position is that of the token ids.
    """
    signature = hosted.known_signature
    if signature is None or not (signature.takes_images and has_images(inputs)):
        return inputs
    own = {spec.name for spec in signature.inputs}
    named = tuple(
        replace(entry, name=IMAGES)
        if isinstance(entry, ImageInput) and entry.name in {"", *_IMAGE_NAMES} - own
        else entry
        for entry in inputs
    )
    if hosted.preprocessing is None or any(isinstance(entry, MadeInput) for entry in inputs):
        return named
    counts = [len(entry.images) for entry in named if isinstance(entry, ImageInput)]
    return (*named, *(MadeInput(name, counts[0]) for name in hosted.preprocessing.made_names))
