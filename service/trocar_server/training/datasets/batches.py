"""From samples in memory to a batch of tensors. Calls torch, so only the thread that owns it may use this.

# Note: [Chance by sample]
An augmentation draws its random numbers from torch's generator, seeded for each sample with a number that is
made of the fit's seed, the epoch and the sample's index. So the result is the same whatever the order in
which samples are read, however they are cut into shards and batches, and after a fit was interrupted; and
the generator of whoever calls is as it was before.
"""

import hashlib
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from trocar_api.reasons import ErrorReason
from trocar_server.errors import ServiceError
from trocar_server.models import HostedModel
from trocar_server.training.batch import Batch
from trocar_server.training.datasets.form import ArrayForm, DatasetInfo
from trocar_server.training.datasets.reader import LoadedSamples, as_pixels, is_pixels
from trocar_server.training.datasets.sources import Array

Augmentation = Callable[[Tensor], Tensor]
"""One input to what takes its place."""

_LABELS = (torch.int8, torch.int16, torch.int32, torch.uint8)


def check_dataset(info: DatasetInfo, hosted: HostedModel) -> None:
    """Refuse a data set whose inputs a model cannot take, before anything is computed.

    Raises:
        ServiceError: `DATASET_INVALID`, it is still being uploaded; `NO_PREPROCESSING`, it has images and the
            model takes none; `INPUT_REJECTED`, its arrays are floats of another width.
    """
    if info.form is None:
        raise ServiceError(
            ErrorReason.DATASET_INVALID, "the data set is still being uploaded; finish its upload first"
        )
    inputs = info.form.inputs
    if inputs is None and hosted.preprocessing is None:
        raise ServiceError(
            ErrorReason.NO_PREPROCESSING,
            f"model '{hosted.spec.model_id}' has no preprocessing for images; upload arrays of shape "
            f"(samples, {', '.join(map(str, hosted.input_shape))})",
        )
    if inputs is not None:
        _check_dtype(inputs, hosted)


def to_batch(
    loaded: LoadedSamples,
    info: DatasetInfo,
    hosted: HostedModel,
    augment: Augmentation | None = None,
    *,
    seed: int = 0,
    epoch: int = 0,
) -> Batch:
    """Make a batch on the model's device.

    Images, and RGB pixels for a model that takes images, go through the model's preprocessing; other arrays
    are taken as they are. Targets of whole numbers become int64.

    Args:
        loaded: Some samples.
        info: What is known of the data set.
        hosted: The model.
        augment: Takes one input at a time: an image (channels, height, width) after resize and crop, float32
            in [0, 1] and not normalised yet; or an array as it is. See Note: [Chance by sample].
        seed: Of the fit.
        epoch: From 0.

    Raises:
        ServiceError: `INPUT_REJECTED`, the inputs do not stack; `INVALID_IMAGE`.
    """

    def augmented(position: int, value: Tensor) -> Tensor:
        return value if augment is None else _drawn(augment, value, seed, epoch, loaded.indices[position])

    inputs = loaded.inputs
    if not isinstance(inputs, list) and is_pixels(inputs[0]) and hosted.preprocessing is not None:
        inputs = as_pixels(inputs)
    if isinstance(inputs, list):
        assert hosted.preprocessing is not None  # refused before: see check_dataset
        prepared = hosted.preprocessing(inputs, None if augment is None else augmented)
    else:
        form = info.form.inputs if info.form else None
        prepared = _stacked([augmented(*pair) for pair in enumerate(as_tensor(inputs, form).unbind())])
    targets = {name: _target(array, name, info).to(hosted.device) for name, array in loaded.targets.items()}
    return Batch((_placed(prepared, hosted),), {}, targets, len(loaded.indices))


def sample_seed(seed: int, epoch: int, index: int) -> int:
    """Return what torch's generator is seeded with for one sample; see Note: [Chance by sample]."""
    digest = hashlib.blake2b(f"{seed} {epoch} {index}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1


def as_tensor(array: Array, form: Any = None) -> Tensor:
    """Return an array as a tensor on its own memory; bits of bfloat16 as what they are."""
    if form is not None and form.dtype == "bfloat16":
        return torch.from_numpy(array.view("int16")).view(torch.bfloat16)
    return torch.from_numpy(array)


def _drawn(augment: Augmentation, value: Tensor, seed: int, epoch: int, index: int) -> Tensor:
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(sample_seed(seed, epoch, index))
        return augment(value)


def _stacked(tensors: list[Tensor]) -> Tensor:
    shapes = sorted({tuple(tensor.shape) for tensor in tensors})
    if len(shapes) > 1:
        raise ServiceError(
            ErrorReason.INPUT_REJECTED,
            f"the inputs of a batch have {len(shapes)} shapes after augmentation, {shapes[0]} and "
            f"{shapes[1]} among them; end with one that makes them equal, such as Resize",
        )
    return torch.stack(tensors)


def _placed(prepared: Tensor | list[Tensor], hosted: HostedModel) -> Tensor | list[Tensor]:
    if isinstance(prepared, list):
        return [tensor.to(hosted.device) for tensor in prepared]
    placed = prepared.to(hosted.device)
    return list(placed.unbind()) if hosted.takes_list else placed


def _target(array: Array, name: str, info: DatasetInfo) -> Tensor:
    tensor = as_tensor(array, info.form.targets[name] if info.form else None)
    return tensor.to(torch.int64) if tensor.dtype in _LABELS else tensor


def _check_dtype(inputs: ArrayForm, hosted: HostedModel) -> None:
    if "float" not in inputs.dtype or hosted.dtype is None:
        return
    wanted = str(hosted.dtype).removeprefix("torch.")
    if inputs.dtype != wanted:
        raise ServiceError(
            ErrorReason.INPUT_REJECTED,
            f"the data set's inputs are {inputs.dtype}, model '{hosted.spec.model_id}' computes in {wanted}; "
            f'upload them as `array.astype("{wanted}")`',
        )
