"""Image rules: where torchvision and transformers differ in resizing, cropping and scaling an image.

    rules = rules_of("transformers", longest=1333, scale=None)
    rules.resized((480, 640), (800,))          # (800, 1066)

Both resize with Pillow. They differ in where a crop of unequal margins begins, on which side an image smaller
than the crop gets more black, and in limits of the longer side.
"""

import math
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from PIL import Image
from torch import Tensor
from torchvision.transforms import functional

Size = tuple[int, int]
"""Height and width in pixels."""
_SCALE_STEP = 1e-5


class ImageRules(Protocol):
    """The rules of one library."""

    @property
    def scale(self) -> float | None:
        """Factor of 8-bit values; 1/255 when None."""
        ...

    def resized(self, size: Size, resize: tuple[int, ...]) -> Size:
        """Size after a resize: one number is the shorter side, two are both, none keeps it."""
        ...

    def crop_start(self, length: int, kept: int) -> int:
        """First of the pixels that a centre crop keeps of one side; negative where it adds some."""
        ...

    def cropped(self, image: Image.Image, crop: Size) -> Image.Image:
        """Centre crop, with black where the image is smaller."""
        ...


@dataclass(frozen=True)
class TorchvisionRules:
    """torchvision's rules."""

    scale: float | None = None

    def resized(self, size: Size, resize: tuple[int, ...]) -> Size:
        """See `ImageRules`."""
        return _by_shorter_side(size, resize)

    def crop_start(self, length: int, kept: int) -> int:
        """See `ImageRules`."""
        return round((length - kept) / 2)

    def cropped(self, image: Image.Image, crop: Size) -> Image.Image:
        """See `ImageRules`."""
        value: Any = image  # torchvision's functions take PIL images, their annotations do not
        cropped: Any = functional.center_crop(value, list(crop))
        return cropped  # type: ignore[no-any-return]


@dataclass(frozen=True)
class TransformersRules:
    """The rules of transformers' image processors, of those that compute with Pillow and NumPy (5.23).

    Attributes:
        longest: Limit of the longer side after a resize by the shorter one; 0 for none.
        scale: Factor of 8-bit values; 1/255 when None.
        patch: Side of the patches that an image is resized for; 0 for none.
        patches: The most of them.
    """

    longest: int = 0
    scale: float | None = None
    patch: int = 0
    patches: int = 0

    def resized(self, size: Size, resize: tuple[int, ...]) -> Size:
        """See `ImageRules`; as `get_size_with_aspect_ratio` of `transformers.image_transforms`."""
        if self.patch:
            return _in_patches(size, self.patch, self.patches)
        if not self.longest or len(resize) != 1:
            return _by_shorter_side(size, resize)
        height, width = size
        shorter, longer = float(min(size)), float(max(size))
        side: float = resize[0]
        if longer / shorter * side > self.longest:
            side = self.longest * shorter / longer
        short = round(side)
        if min(size) == short:
            return size
        return (int(side * height / width), short) if width < height else (short, int(side * width / height))

    def crop_start(self, length: int, kept: int) -> int:
        """See `ImageRules`."""
        return (length - kept) // 2

    def cropped(self, image: Image.Image, crop: Size) -> Image.Image:
        """See `ImageRules`."""
        top, left = self.crop_start(image.height, crop[0]), self.crop_start(image.width, crop[1])
        return image.crop((left, top, left + crop[1], top + crop[0]))


TORCHVISION = TorchvisionRules()


def rules_of(library: str, longest: int, scale: float | None, patch: int = 0, patches: int = 0) -> ImageRules:
    """Return the rules of `torchvision` or `transformers`; the former have none of the other settings."""
    return TransformersRules(longest, scale, patch, patches) if library == "transformers" else TORCHVISION


def scaled(image: Image.Image, scale: float | None) -> Tensor:
    """Return an image as float32 (channels, height, width), its 8-bit values times a factor.

    Args:
        image: The image.
        scale: The factor; 1/255 when None, with the very bits of torchvision and of transformers.
    """
    value: Any = image
    pixels = functional.pil_to_tensor(value)
    if scale is None:
        floats: Tensor = functional.convert_image_dtype(pixels, torch.float)
        return floats
    return torch.stack([channel.double().mul_(scale).float() for channel in pixels])


def _by_shorter_side(size: Size, resize: tuple[int, ...]) -> Size:
    if not resize:
        return size
    if len(resize) == 2:
        return resize[0], resize[1]
    height, width = size
    longer = int(resize[0] * max(size) / min(size))
    return (resize[0], longer) if height <= width else (longer, resize[0])


def _in_patches(size: Size, patch: int, patches: int) -> Size:
    """Size whose sides are whole patches, and which has the most of them.

    The search is that of `get_image_size_for_max_num_patches` of transformers' SigLIP 2 (5.23).
    """
    low, high = _SCALE_STEP / 10, 100.0
    while high - low >= _SCALE_STEP:
        scale = (low + high) / 2
        height, width = (_whole_patches(side * scale, patch) for side in size)
        if (height / patch) * (width / patch) <= patches:
            low = scale
        else:
            high = scale
    return _whole_patches(size[0] * low, patch), _whole_patches(size[1] * low, patch)


def _whole_patches(length: float, patch: int) -> int:
    return max(patch, math.ceil(length / patch) * patch)
