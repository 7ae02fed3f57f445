"""Batch assembly: samples to tensors. Calls torch, so it runs on torch's owner thread only.

# Note: [Random seed per sample]
An augmentation draws its random numbers from torch's generator, seeded for each sample from the fit's seed,
the epoch and the sample's index. So the result depends neither on the order of reading, nor on shards and
batches, nor on interruptions of the fit. The caller's generator state is restored afterwards.
"""

import hashlib
from collections.abc import Callable, Sequence
from typing import Any

import torch
from PIL import Image
from torch import Tensor

from trocar_api.reasons import ErrorReason
from trocar_server.engine.execute.arguments import build_arguments, check_tensors
from trocar_server.engine.execute.processor import Processed
from trocar_server.errors import ServiceError
from trocar_server.models import HostedModel
from trocar_server.models.inputs import IMAGES
from trocar_server.models.preprocessing import Augment
from trocar_server.processing.inputs import ProcessorInput
from trocar_server.training.datasets.dataset_schema import ArraySignature, DatasetInfo
from trocar_server.training.datasets.reader import LoadedSamples, as_pixels, is_pixels
from trocar_server.training.datasets.sample_sources import MAX_LOADED_BYTES, Array
from trocar_server.training.losses.batch import Batch
from trocar_server.training.losses.token_targets import token_layout, with_token_labels
from trocar_server.training.spec.trainer_spec import LossSpec

Augmentation = Callable[[Tensor], Tensor]
"""Maps one input to its augmented value."""

_LABELS = (torch.int8, torch.int16, torch.int32, torch.uint8)


def check_dataset(info: DatasetInfo, hosted: HostedModel) -> None:
    """Refuse a data set whose inputs a model cannot take, before anything is computed.

    Raises:
        ServiceError: `DATASET_INVALID`, it is still being uploaded; `NO_PREPROCESSING`, it has images and the
            model takes none; `INPUT_REJECTED`, its arrays are floats of another width.
    """
    if info.signature is None:
        raise ServiceError(
            ErrorReason.DATASET_INVALID, "the data set is still being uploaded; finish its upload first"
        )
    inputs = info.signature.inputs
    if info.signature.is_text or info.signature.is_sound:
        return  # the tokenizer or the feature extractor refuses its samples, or takes them
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
    are used unchanged. Integer targets become int64.

    Args:
        loaded: The samples.
        info: Metadata of the data set.
        hosted: The model.
        augment: Applied to one input at a time: an image (channels, height, width) after resize and crop,
            float32 in [0, 1] and not normalised yet; or an unchanged array. Note: [Random seed per sample].
        seed: The fit's seed.
        epoch: Counted from 0.

    Raises:
        ServiceError: `INPUT_REJECTED`, the inputs do not stack; `INVALID_IMAGE`.
    """

    def augmented(position: int, value: Tensor) -> Tensor:
        return value if augment is None else _drawn(augment, value, seed, epoch, loaded.indices[position])

    inputs = loaded.inputs
    assert not isinstance(inputs, tuple)  # texts and sound: see to_processed_batch
    if not isinstance(inputs, list) and is_pixels(inputs[0]) and hosted.preprocessing is not None:
        inputs = as_pixels(inputs)
    if isinstance(inputs, list):
        assert hosted.preprocessing is not None  # ensured by check_dataset
        if hosted.preprocessing.made_names:
            return _with_made(loaded, inputs, info, hosted, None if augment is None else augmented)
        prepared = hosted.preprocessing(inputs, None if augment is None else augmented, MAX_LOADED_BYTES)
    else:
        signature = info.signature.inputs if info.signature else None
        prepared = _stacked([augmented(*pair) for pair in enumerate(as_tensor(inputs, signature).unbind())])
    positional, keyword = hosted.forward.called(hosted.bind([""]), [_placed(prepared, hosted)])
    return Batch(tuple(positional), keyword, _targets(loaded, info, hosted), len(loaded.indices))


def _with_made(
    loaded: LoadedSamples,
    images: list[Image.Image],
    info: DatasetInfo,
    hosted: HostedModel,
    augment: Augment | None,
) -> Batch:
    """Make a batch of images with the arguments that are made beside them, such as their mask."""
    assert hosted.preprocessing is not None
    prepared = hosted.preprocessing.with_made(images, augment, MAX_LOADED_BYTES)
    arguments: dict[str, Any] = {
        name: value.to(hosted.device) for name, value in {IMAGES: prepared.values, **prepared.made}.items()
    }
    return Batch((), arguments, _targets(loaded, info, hosted), len(loaded.indices))


def to_processed_batch(
    loaded: LoadedSamples,
    given: ProcessorInput,
    processed: Processed,
    info: DatasetInfo,
    hosted: HostedModel,
    losses: Sequence[LossSpec],
) -> Batch:
    """Make a batch of texts or sound on the model's device, padded to the longest of them.

    Args:
        loaded: The samples.
        given: Their texts, or their sound.
        processed: What the model's tokenizer or feature extractor made of them.
        info: Metadata of the data set.
        hosted: The model.
        losses: The terms of the trainer's loss, for labels of tokens.

    Raises:
        ServiceError: `INPUT_REJECTED`, the model takes no such arguments; `TARGET_REJECTED`, a text has not
            as many labels as tokens.
    """
    inputs = processed.inputs
    check_tensors(hosted, inputs)  # which have their names
    arguments = build_arguments(hosted, inputs, processed.payloads, [[] for _ in inputs])
    positional, keyword = hosted.forward.called([entry.name for entry in inputs], arguments)
    targets = _targets(loaded, info, hosted)
    layout = token_layout(processed.made, [given])
    if layout is not None:
        targets = with_token_labels(losses, targets, keyword, layout)
    return Batch(tuple(positional), keyword, targets, len(loaded.indices))


def sample_seed(seed: int, epoch: int, index: int) -> int:
    """Return the seed of torch's generator for one sample; see Note: [Random seed per sample]."""
    digest = hashlib.blake2b(f"{seed} {epoch} {index}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1


def as_tensor(array: Array, signature: Any = None) -> Tensor:
    """Return an array as a tensor that shares its memory; uint16 bits of bfloat16 become bfloat16."""
    if signature is not None and signature.dtype == "bfloat16":
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


def _targets(loaded: LoadedSamples, info: DatasetInfo, hosted: HostedModel) -> dict[str, Tensor]:
    return {name: _target(array, name, info).to(hosted.device) for name, array in loaded.targets.items()}


def _target(array: Array, name: str, info: DatasetInfo) -> Tensor:
    tensor = as_tensor(array, info.signature.targets[name] if info.signature else None)
    return tensor.to(torch.int64) if tensor.dtype in _LABELS else tensor


def _check_dtype(inputs: ArraySignature, hosted: HostedModel) -> None:
    if "float" not in inputs.dtype or hosted.dtype is None:
        return
    wanted = str(hosted.dtype).removeprefix("torch.")
    if inputs.dtype != wanted:
        name = "ml_dtypes.bfloat16" if wanted == "bfloat16" else f'"{wanted}"'  # NumPy itself has no bfloat16
        raise ServiceError(
            ErrorReason.INPUT_REJECTED,
            f"the data set's inputs are {inputs.dtype}, model '{hosted.spec.model_id}' computes in {wanted}; "
            f"upload them as `array.astype({name})`, or as a torch tensor of this dtype",
        )
