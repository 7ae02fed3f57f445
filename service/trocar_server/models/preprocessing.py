"""From PIL images to a model's input, exactly as its weights want it.

    preprocessor = Preprocessor(weights.transforms())
    batch = preprocessor([image, other])                # (2, 3, 224, 224), float32

The result is bit-equal to `torch.stack([weights.transforms()(image) for image in images])`. It calls
torch, so only the owner thread may use it; `images` has the part before, which any thread may do.
"""

import copy
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from PIL import Image
from torch import Tensor
from torchvision.transforms import InterpolationMode, functional

from trocar_api.reasons import ErrorReason
from trocar_server.errors import ServiceError
from trocar_server.models.spec import PreprocessingSpec

Transform = Callable[[Image.Image], Tensor]
"""One PIL image to one (channels, height, width) tensor."""
Augment = Callable[[int, Tensor], Tensor]
"""The position of an image in its batch, and the image, to what takes its place."""


@dataclass(frozen=True, slots=True)
class PreprocessingInfo:
    """What the wire tells of a preprocessing; the fields of its `Preprocessing` message."""

    description: str
    resize: tuple[int, ...]
    crop: tuple[int, ...]
    mean: tuple[float, ...]
    std: tuple[float, ...]
    interpolation: str


class SpecTransform:
    """A custom model's transform, in the order of torchvision's `ImageClassification` preset."""

    def __init__(self, spec: PreprocessingSpec) -> None:
        self.resize_size = list(spec.resize)
        self.crop_size = list(spec.crop)
        self.mean = list(spec.mean)
        self.std = list(spec.std)
        self.interpolation = InterpolationMode(spec.interpolation)

    def __call__(self, image: Image.Image) -> Tensor:
        """Resize, crop, scale to [0, 1] and normalise one image."""
        value: Any = image  # torchvision's functions take PIL images, their annotations do not
        if self.resize_size:
            value = functional.resize(
                value, self.resize_size, interpolation=self.interpolation, antialias=True
            )
        if self.crop_size:
            value = functional.center_crop(value, self.crop_size)
        tensor: Tensor = functional.convert_image_dtype(functional.pil_to_tensor(value), torch.float)
        return functional.normalize(tensor, self.mean, self.std) if self.mean else tensor

    def describe(self) -> str:
        """Return what is done, in the words of torchvision's presets."""
        steps = [
            f"resized to ``resize_size={self.resize_size}`` using ``interpolation={self.interpolation}``"
            if self.resize_size
            else "",
            f"cropped in the centre to ``crop_size={self.crop_size}``" if self.crop_size else "",
            "rescaled to ``[0.0, 1.0]``",
            f"normalized using ``mean={self.mean}`` and ``std={self.std}``" if self.mean else "",
        ]
        return f"The images are {', then '.join(step for step in steps if step)}."


class Preprocessor:
    """Prepares images with torchvision's preset or an operator's spec. Holds no state of a call.

    Args:
        transform: A torchvision preset, as `weights.transforms()` returns it, or a `SpecTransform`.
        as_list: Whether the model takes a list of images of any size (detection), not one batch.
    """

    def __init__(self, transform: Transform, *, as_list: bool = False) -> None:
        self._transform = transform
        self._as_list = as_list
        self._unnormalised = _without_normalisation(transform)

    def __call__(
        self, images: Iterable[Image.Image], augment: Augment | None = None
    ) -> Tensor | list[Tensor]:
        """Return (batch, channels, height, width) on the CPU; for detection a list without the batch.

        Args:
            images: What to prepare.
            augment: Takes the position of an image and the image as it is before it is normalised, resized
                and cropped, float32 in [0, 1]; returns what takes its place.

        Raises:
            ServiceError: `EMPTY_BATCH`; `INPUT_REJECTED`, the prepared images differ in size and
                would not stack; `INVALID_IMAGE`, an image is too narrow to be resized.
        """
        tensors = [self._prepare(index, image, augment) for index, image in enumerate(images)]
        if not tensors:
            raise ServiceError(ErrorReason.EMPTY_BATCH, "there is no image; send at least one")
        if self._as_list:
            return tensors
        _check_same_size(tensors)
        return torch.stack(tensors)

    def _normalised(self, image: Tensor) -> Tensor:
        mean, std = _numbers(self._transform, "mean"), _numbers(self._transform, "std")
        return functional.normalize(image, list(mean), list(std)) if mean else image

    def describe(self) -> PreprocessingInfo:
        """Return what is done, for the wire."""
        transform: Any = self._transform
        interpolation = getattr(transform, "interpolation", None)
        crop = _numbers(transform, "crop_size")
        return PreprocessingInfo(
            description=transform.describe(),
            resize=_numbers(transform, "resize_size"),
            crop=crop * 2 if len(crop) == 1 else crop,
            mean=_numbers(transform, "mean"),
            std=_numbers(transform, "std"),
            interpolation=interpolation.value if interpolation else "",
        )

    def _prepare(self, index: int, image: Image.Image, augment: Augment | None) -> Tensor:
        try:
            if augment is None:
                return self._transform(image)
            return self._normalised(augment(index, self._unnormalised(image)))
        except ValueError as error:  # Pillow: a side of 0 pixels after a resize that keeps the proportions
            raise ServiceError(
                ErrorReason.INVALID_IMAGE,
                f"an image of {image.height} x {image.width} pixels cannot be prepared: {error}",
            ) from error


def _without_normalisation(transform: Transform) -> Transform:
    """Return a transform that ends before it normalises: with mean 0 and deviation 1 nothing changes."""
    mean = _numbers(transform, "mean")
    if not mean:
        return transform
    changed: Any = copy.copy(transform)
    changed.mean, changed.std = [0.0] * len(mean), [1.0] * len(mean)
    return changed  # type: ignore[no-any-return]


def _check_same_size(tensors: Sequence[Tensor]) -> None:
    sizes = sorted({tuple(tensor.shape[-2:]) for tensor in tensors})
    if len(sizes) > 1:
        shown = ", ".join(f"{height} x {width}" for height, width in sizes[:4])
        raise ServiceError(
            ErrorReason.INPUT_REJECTED,
            f"the prepared images have {len(sizes)} sizes ({shown}) and the model takes one batch; "
            "send images of the same proportions, or one per call",
        )


def _numbers(transform: Any, name: str) -> tuple[Any, ...]:
    return tuple(getattr(transform, name, None) or ())
