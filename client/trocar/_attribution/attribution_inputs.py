"""Attribution inputs: one array, or images."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from trocar._base.input_kinds import is_image, is_pixels
from trocar._base.tensors import Array, check_sendable, float_array, is_array
from trocar._request.texts import Audio, Texts, is_texts

_TEXTS = (
    "attributions need an input of floating-point numbers, and token ids are integers; multiply each token's "
    "embedding by its gradient instead: `client.gradients(model_id, texts, of=trocar.value(VALUE), "
    "at=[EMBEDDINGS], taps=[EMBEDDINGS])`, where EMBEDDINGS is the module that looks them up"
)


def array_input(inputs: object) -> Array | None:
    """Return the model's input if it is given as an array; None for images and sound.

    Raises:
        TypeError: It is several arguments, or texts, or neither an array nor images.
    """
    if isinstance(inputs, Texts) or is_texts(inputs):
        raise TypeError(_TEXTS)
    if isinstance(inputs, Audio):
        return None
    if isinstance(inputs, (tuple, Mapping)):
        raise TypeError("attributions need a model with one input; pass one array, or images")
    if isinstance(inputs, list):
        if all(is_image(item) for item in inputs):
            return None
        return np.stack([_plain(item) for item in inputs])
    if is_image(inputs) or (is_array(inputs) and is_pixels(inputs, ranks=(4,))):
        return None
    return _plain(inputs)


def check_input(values: Array) -> Array:
    """Return an input that can be attributed to.

    Raises:
        ValueError: There is no sample.
    """
    if not values.ndim or not len(values):
        raise ValueError(f"the inputs have shape {values.shape}; pass at least one sample")
    return values


def check_float(values: Array, method: str) -> Array:
    """Return a floating-point input, as interpolation and noise need.

    Raises:
        TypeError: It holds no floating-point numbers.
    """
    if values.dtype.kind != "f":
        raise TypeError(f"{method} needs floating-point inputs, not {values.dtype}")
    return values


def baseline_array(baseline: object, inputs: Array) -> Array:
    """Broadcast a baseline to the inputs, in their dtype.

    Raises:
        ValueError: It does not fit, is not finite, or is a number that the inputs' dtype does not have.
    """
    values = float_array(baseline) if is_array(baseline) else np.asarray(baseline)
    if values.dtype.kind not in "fiu" or not np.isfinite(values).all():
        raise ValueError("the baseline must be finite numbers")
    with np.errstate(over="ignore", invalid="ignore"):
        cast = values.astype(inputs.dtype)
    # Floats are rounded; integers that changed are other numbers.
    is_held = np.isfinite(cast) if inputs.dtype.kind == "f" else cast == values
    if not is_held.all():
        raise ValueError(f"{inputs.dtype} inputs cannot hold the baseline {values[~is_held][0]}")
    try:
        return np.broadcast_to(cast, inputs.shape)
    except ValueError as error:
        raise ValueError(
            f"a baseline of shape {values.shape} cannot be broadcast to inputs of shape {inputs.shape}"
        ) from error


def _plain(value: object) -> Array:
    if not is_array(value):
        raise TypeError(f"{type(value).__name__} cannot be an input; pass one array, or images")
    array = float_array(value)
    check_sendable(array, array.dtype.name)
    return array
