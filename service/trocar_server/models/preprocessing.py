"""Image preprocessing: from PIL images to a model's input, exactly as its weights require.

    preprocessor = Preprocessor(weights.transforms())
    batch = preprocessor([image, other])                # (2, 3, 224, 224), float32

The result is bit-equal to `torch.stack([weights.transforms()(image) for image in images])`, or to what the
model's own image processor of transformers makes of them; see `image_rules`. It calls torch, so only the
owner thread may use it; `decoding` is the earlier stage, which any thread may run.

# Note: [Memory of resizing]
Presets make the shorter side so long, and crop then: 1 x 8000 pixels become 256 x 2,048,000 before 224 x
224 of them are kept, 2.8 GB. So the size is computed before anything is allocated. An image of up to
`WHOLE_PIXELS` after the resize is resized entirely, by torchvision's own code. Of a larger one only the part
that the crop keeps is resized: Pillow's box is of single precision, so a few values differ by one of 255 (of
224 x 224, one in 1,000). Where nothing is cropped, an image that is enlarged beyond `WHOLE_PIXELS` is
refused.
"""

import copy
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from PIL import Image
from torch import Tensor
from torchvision.transforms import InterpolationMode, functional
from torchvision.transforms._presets import ImageClassification
from torchvision.transforms.functional import pil_modes_mapping

from trocar_api.reasons import ErrorReason
from trocar_server.errors import ServiceError
from trocar_server.models.fitting import Fitting, table_of
from trocar_server.models.image_rules import TORCHVISION, ImageRules, Size, rules_of, scaled
from trocar_server.models.inputs import PATCH_MASK, PIXEL_MASK, SPATIAL_SHAPES
from trocar_server.models.spec import PreprocessingSpec
from trocar_server.padding import padded_count

Transform = Callable[[Image.Image], Tensor]
"""One PIL image to one (channels, height, width) tensor."""
WHOLE_PIXELS = 4 << 20
"""Pixel limit after the resize; or four times the square of the longest side of resize and crop, if more."""
_WIDEST_FILTER = 3
"""Pixels to each side that Lanczos looks at."""
_PIXEL_BYTES = 4
"""Of an RGB image in Pillow."""
_VALUE_BYTES = 4
_NO_PADDING = (0, 0)
_PADDED_BYTES = 3 * _VALUE_BYTES + 8
"""Of one pixel of padded images with its mask."""
_PATCH_MASK_BYTES = 4
Augment = Callable[[int, Tensor], Tensor]
"""Augmentation: from the position of an image in its batch, and the image, to its replacement."""


@dataclass(frozen=True, slots=True)
class PreprocessingInfo:
    """Description of a preprocessing on the wire; the fields of its `Preprocessing` message."""

    description: str
    resize: tuple[int, ...]
    crop: tuple[int, ...]
    mean: tuple[float, ...]
    std: tuple[float, ...]
    interpolation: str
    longest: int = 0
    scale: float | None = None


@dataclass(frozen=True, slots=True)
class PreparedSize:
    """Sizes of prepared images, computed before they are allocated."""

    batch_bytes: int
    """Bytes of the model's input."""
    working_bytes: int
    """Peak bytes beside it, images not included."""
    padded: Size | None = None
    """Size that every image is padded to; None where none is padded."""

    @property
    def byte_count(self) -> int:
        """Peak bytes in total."""
        return self.batch_bytes + self.working_bytes


@dataclass(frozen=True, slots=True)
class PreparedImages:
    """Prepared images with what is made beside them."""

    values: Tensor
    """(batch, channels, height, width)."""
    made: Mapping[str, Tensor]
    """Further arguments of the forward, by name."""


class SpecTransform:
    """The transform of a spec, in the order of torchvision's `ImageClassification` preset."""

    def __init__(self, spec: PreprocessingSpec) -> None:
        self.resize_size = list(spec.resize)
        self.crop_size = list(spec.crop)
        self.mean = list(spec.mean)
        self.std = list(spec.std)
        self.interpolation = InterpolationMode(spec.interpolation)
        self.longest = spec.longest
        self.pads = spec.pads
        self.patch, self.patches = spec.patch, spec.patches
        self.rules = rules_of(spec.rules, spec.longest, spec.scale, spec.patch, spec.patches)

    def __call__(self, image: Image.Image) -> Tensor:
        """Resize, crop, scale and normalise one image."""
        value: Any = image  # torchvision's functions take PIL images, their annotations do not
        if self.resize_size or self.patch:
            size = self.rules.resized((image.height, image.width), tuple(self.resize_size))
            value = functional.resize(value, list(size), interpolation=self.interpolation, antialias=True)
        if self.crop_size:
            crop = self.crop_size * 2 if len(self.crop_size) == 1 else self.crop_size
            value = self.rules.cropped(value, (crop[0], crop[1]))
        tensor = scaled(value, self.rules.scale)
        return functional.normalize(tensor, self.mean, self.std) if self.mean else tensor

    def describe(self) -> str:
        """Description in the terms of torchvision's presets."""
        limit = f", at most {self.longest} on the longer side," if self.longest else ""
        scale = self.rules.scale
        steps = [
            f"resized to ``resize_size={self.resize_size}``{limit} using "
            f"``interpolation={self.interpolation}``"
            if self.resize_size
            else "",
            f"resized to at most {self.patches} patches of {self.patch} x {self.patch} pixels"
            * bool(self.patch),
            f"cropped in the centre to ``crop_size={self.crop_size}``" if self.crop_size else "",
            "rescaled to ``[0.0, 1.0]``" if scale is None else f"multiplied by ``{scale}``",
            f"normalized using ``mean={self.mean}`` and ``std={self.std}``" if self.mean else "",
            f"padded with zeros to the largest of the batch, with ``{PIXEL_MASK}``" if self.pads else "",
        ]
        return f"The images are {', then '.join(step for step in steps if step)}."


class Preprocessor:
    """Prepares images with torchvision's preset or an operator's spec. Stateless across calls.

    Args:
        transform: A torchvision preset, as `weights.transforms()` returns it, or a `SpecTransform`.
        as_list: Whether the model takes a list of images of any size (detection), not one batch.

    Attributes:
        fitting: The same for images prepared without torch, on any thread; None where prepared images may
            differ in size, or are padded or cut into patches.
    """

    def __init__(self, transform: Transform, *, as_list: bool = False) -> None:
        self._transform = transform
        self._as_list = as_list
        self._unnormalised = _without_normalisation(transform)
        self._rules: ImageRules = getattr(transform, "rules", TORCHVISION)
        self._resize: tuple[int, ...] = _numbers(transform, "resize_size")
        crop = _numbers(transform, "crop_size")
        self._crop: tuple[int, ...] = crop * 2 if len(crop) == 1 else crop
        self.fitting = self._fitting()

    @property
    def made_names(self) -> tuple[str, ...]:
        """Names of the arguments that `with_made` makes beside the images."""
        if self.patch_count:
            return (PATCH_MASK, SPATIAL_SHAPES)
        return (PIXEL_MASK,) if getattr(self._transform, "pads", False) else ()

    @property
    def patch_count(self) -> int:
        """Number of patches of every image, filled up; 0 where images are not cut into patches."""
        return int(getattr(self._transform, "patches", 0))

    def prepared_size(self, sizes: Iterable[Size | None]) -> PreparedSize:
        """Sizes after preparing images of these sizes; None is an image of unknown size.

        Raises:
            ServiceError: `IMAGE_TOO_LARGE`, one would become too large, with its position; `INVALID_IMAGE`,
                one has no pixels.
        """
        batch_bytes = most_bytes = count = 0
        prepared: list[Size] = []
        for index, size in enumerate(sizes):
            resized, kept = self._sizes(index, size) if size else ((0, 0), self._smallest())
            count = index + 1
            prepared.append(kept)
            value_bytes = 3 * kept[0] * kept[1] * _VALUE_BYTES
            batch_bytes += value_bytes
            # On the way: an image in Pillow, its values as bytes and as floats, before and after the mean.
            made = min(resized[0] * resized[1], self._whole_pixels()) * _PIXEL_BYTES
            most_bytes = max(most_bytes, made + 2 * value_bytes)
        if self.patch_count:
            patch_bytes = 3 * self._transform.patch**2 * _VALUE_BYTES  # type: ignore[attr-defined]
            patches_bytes = count * self.patch_count * (patch_bytes + _PATCH_MASK_BYTES)
            return PreparedSize(patches_bytes, most_bytes + batch_bytes)
        if self.made_names:  # beside the padded batch its parts
            padded_bytes = padded_count(prepared, _NO_PADDING) * _PADDED_BYTES
            heights, widths = zip(_NO_PADDING, *prepared, strict=True)
            return PreparedSize(padded_bytes, most_bytes + batch_bytes, (max(heights), max(widths)))
        return PreparedSize(batch_bytes, most_bytes + (0 if self._as_list else batch_bytes))

    def __call__(
        self, images: Iterable[Image.Image], augment: Augment | None = None, max_bytes: int | None = None
    ) -> Tensor | list[Tensor]:
        """Return (batch, channels, height, width) on the CPU; for detection a list without the batch.

        Args:
            images: What to prepare.
            augment: Takes the position of an image and the image as it is before it is normalised, resized
                and cropped, float32 in [0, 1]; returns the replacement.
            max_bytes: The most bytes of the batch; None if `prepared_size` was checked before.

        Raises:
            ServiceError: `EMPTY_BATCH`; `INPUT_REJECTED`, the prepared images differ in size and
                would not stack; `INVALID_IMAGE`, an image is too narrow to be resized; `IMAGE_TOO_LARGE`, one
                would become too large, or all together.
        """
        tensors = self._tensors(images, augment, max_bytes)
        if self._as_list:
            return tensors
        _check_same_size(tensors)
        return torch.stack(tensors)

    def with_made(
        self, images: Iterable[Image.Image], augment: Augment | None = None, max_bytes: int | None = None
    ) -> PreparedImages:
        """Return images of any sizes as one batch, with the arguments of `made_names`.

        Images are padded with zeros, after they are normalised, below and to the right; or they are cut into
        patches, (batch, patches, width), row by row, with zeros behind the last one.

        Args:
            images: As for one size.
            augment: As for one size.
            max_bytes: As for one size.

        Raises:
            ServiceError: `EMPTY_BATCH`, `INVALID_IMAGE` or `IMAGE_TOO_LARGE`, as for one size.
        """
        tensors = self._tensors(images, augment, max_bytes)
        if self.patch_count:
            return self._in_patches(tensors)
        height, width = (max(tensor.shape[side] for tensor in tensors) for side in (1, 2))
        byte_count = padded_count([tensor.shape[1:] for tensor in tensors]) * _PADDED_BYTES
        if max_bytes is not None and byte_count > max_bytes:
            raise too_many_padded(len(tensors), (height, width), byte_count, max_bytes)
        values = tensors[0].new_zeros(len(tensors), 3, height, width)
        mask = torch.zeros(len(tensors), height, width, dtype=torch.int64)
        for index, tensor in enumerate(tensors):
            own = tensor.shape[1:]
            values[index, :, : own[0], : own[1]] = tensor
            mask[index, : own[0], : own[1]] = 1
        return PreparedImages(values, {PIXEL_MASK: mask})

    def _in_patches(self, tensors: Sequence[Tensor]) -> PreparedImages:
        side = int(self._transform.patch)  # type: ignore[attr-defined]
        values = torch.zeros(len(tensors), self.patch_count, 3 * side * side)
        mask = torch.zeros(len(tensors), self.patch_count, dtype=torch.int32)
        grids = [(tensor.shape[1] // side, tensor.shape[2] // side) for tensor in tensors]
        for index, (tensor, (rows, columns)) in enumerate(zip(tensors, grids, strict=True)):
            cut = tensor.reshape(3, rows, side, columns, side).permute(1, 3, 2, 4, 0)
            values[index, : rows * columns] = cut.reshape(rows * columns, -1)
            mask[index, : rows * columns] = 1
        return PreparedImages(values, {PATCH_MASK: mask, SPATIAL_SHAPES: torch.tensor(grids)})

    def _tensors(
        self, images: Iterable[Image.Image], augment: Augment | None, max_bytes: int | None
    ) -> list[Tensor]:
        tensors: list[Tensor] = []
        byte_count = 0
        for index, image in enumerate(images):
            byte_count += self._check(index, (image.height, image.width))
            if max_bytes is not None and byte_count > max_bytes:
                raise too_many(index, max_bytes)
            tensors.append(self._prepare(index, image, augment))
        if not tensors:
            raise ServiceError(ErrorReason.EMPTY_BATCH, "no image given; send at least one")
        return tensors

    def _normalised(self, image: Tensor) -> Tensor:
        mean, std = _numbers(self._transform, "mean"), _numbers(self._transform, "std")
        return functional.normalize(image, list(mean), list(std)) if mean else image

    def settings(self) -> dict[str, Any]:
        """Return all that decides its pixels; see `identity`."""
        known = {name: value for name, value in vars(self._transform).items() if not name.startswith("_")}
        known.pop("training", None)  # torchvision's presets are modules
        return {"kind": type(self._transform).__name__, "as_list": self._as_list, **known}

    def describe(self) -> PreprocessingInfo:
        """Description for the wire."""
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
            longest=getattr(transform, "longest", 0),
            scale=self._rules.scale,
        )

    def _sizes(self, index: int, size: Size) -> tuple[Size, Size]:
        """Size of an image after the resize, and after the crop.

        Raises:
            ServiceError: `IMAGE_TOO_LARGE` or `INVALID_IMAGE`.
        """
        if not (size[0] and size[1]):
            raise ServiceError(
                ErrorReason.INVALID_IMAGE, f"image {index}: {size[0]} x {size[1]} pixels; it is empty"
            )
        resized = self._rules.resized(size, self._resize)
        if self._crop:
            return resized, (self._crop[0], self._crop[1])
        pixels = resized[0] * resized[1]
        if pixels > max(size[0] * size[1], self._whole_pixels()):
            raise ServiceError(
                ErrorReason.IMAGE_TOO_LARGE,
                f"image {index}: {size[0]} x {size[1]} pixels would become {resized[0]} x {resized[1]}, and "
                f"an image that is enlarged may have {self._whole_pixels():,}; cut it to other proportions",
                image=str(index),
            )
        return resized, resized

    def _check(self, index: int, size: Size) -> int:
        """Byte count of an image as the model gets it, within the limit."""
        _, kept = self._sizes(index, size)
        return 3 * kept[0] * kept[1] * _VALUE_BYTES

    def _smallest(self) -> Size:
        """Size of an image of unknown size after the resize: exact, or a lower bound."""
        if self._crop:
            return self._crop[0], self._crop[1]
        if getattr(self._transform, "longest", 0):
            return 1, 1
        return (self._resize * 2)[0:2] if self._resize else (1, 1)  # type: ignore[return-value]

    def common_size(self, sizes: Sequence[Size | None]) -> Size | None:
        """Return the size of prepared images, (height, width); None where it depends on those not known.

        Args:
            sizes: Sizes of the images; None for one of unknown size.

        Raises:
            ServiceError: `IMAGE_TOO_LARGE` or `INVALID_IMAGE`.
        """
        if self._crop or len(self._resize) == 2:
            return self._smallest()
        kept = {self._sizes(index, size)[1] for index, size in enumerate(sizes) if size}
        if None in sizes or not kept or (len(kept) > 1 and not self.made_names):
            return None
        return max(height for height, _ in kept), max(width for _, width in kept)

    def _whole_pixels(self) -> int:
        side = max((*self._resize, *self._crop, 0))
        return max(WHOLE_PIXELS, 4 * side * side)

    def _transformed(self, transform: Transform, image: Image.Image) -> Tensor:
        """Prepare one image; see Note: [Memory of resizing]."""
        height, width = self._rules.resized((image.height, image.width), self._resize)
        if not (self._crop and self._resize) or height * width <= self._whole_pixels():
            return transform(image)
        kept = self._rules.cropped(self._kept(image, height, width), (self._crop[0], self._crop[1]))
        return self._finished(transform, kept)

    def _finished(self, transform: Transform, image: Image.Image) -> Tensor:
        """Scale and normalise an image that was resized and cropped."""
        tensor = scaled(image, self._rules.scale)
        mean, std = _numbers(transform, "mean"), _numbers(transform, "std")
        return functional.normalize(tensor, list(mean), list(std)) if mean else tensor

    def _fitting(self) -> Fitting | None:
        transform: Any = self._transform
        has_one_size = len(self._crop) == 2 or len(self._resize) == 2
        if not (has_one_size and isinstance(transform, (ImageClassification, SpecTransform))):
            return None
        if self._as_list or self.made_names:
            return None
        return Fitting(
            self._smallest(),
            self._resize,
            int(pil_modes_mapping[transform.interpolation]),
            self._rules,
            self._whole_pixels(),
            table_of(partial(self._finished, transform)),
        )

    def _kept(self, image: Image.Image, height: int, width: int) -> Image.Image:
        """Part of an image resized to (height, width) that the centre crop keeps, not yet padded."""
        crop_height, crop_width = min(self._crop[0], height), min(self._crop[1], width)
        rows = self._part(image.height, height, crop_height)
        columns = self._part(image.width, width, crop_width)
        # Without the rest: by the proportions of what it is given Pillow 13 chooses which pass comes first.
        needed = image.crop((columns.start, rows.start, columns.stop, rows.stop))
        box = (columns.low, rows.low, columns.high, rows.high)
        interpolation: Any = getattr(self._transform, "interpolation", InterpolationMode.BILINEAR)
        return needed.resize((crop_width, crop_height), pil_modes_mapping[interpolation], box)

    def _part(self, length: int, resized: int, kept: int) -> "_Span":
        """Source pixels of the middle `kept` of `resized` pixels."""
        scale = length / resized
        low = self._rules.crop_start(resized, kept) * scale
        high = min(low + kept * scale, float(length))
        margin = math.ceil(_WIDEST_FILTER * max(1.0, scale)) + 1
        start, stop = max(0, math.floor(low) - margin), min(length, math.ceil(high) + margin)
        return _Span(start, stop, low - start, high - start)

    def _prepare(self, index: int, image: Image.Image, augment: Augment | None) -> Tensor:
        try:
            if augment is None:
                return self._transformed(self._transform, image)
            plain, scale = self._transformed(self._unnormalised, image), self._rules.scale
            if scale is None:
                return self._normalised(augment(index, plain))
            whole = 255 * scale  # augmentations take values from 0 to 1
            return self._normalised(augment(index, plain / whole) * whole)
        except ValueError as error:  # Pillow: a side of 0 pixels after a resize that keeps the proportions
            raise ServiceError(
                ErrorReason.INVALID_IMAGE,
                f"an image of {image.height} x {image.width} pixels cannot be prepared: {error}",
            ) from error


def too_many(index: int, max_bytes: int) -> ServiceError:
    """Error for a batch of images that is too large."""
    return ServiceError(
        ErrorReason.IMAGE_TOO_LARGE,
        f"the first {index + 1} images need more than the {max_bytes:,} bytes that one call may have of "
        "them; send fewer at once",
    )


def too_many_padded(count: int, size: Size, byte_count: int, max_bytes: int) -> ServiceError:
    """Error for a batch of images that is too large once they are padded to one size."""
    return ServiceError(
        ErrorReason.IMAGE_TOO_LARGE,
        f"the {count} images are padded to {size[0]} x {size[1]} pixels, the most of their heights and "
        f"widths, and become {byte_count:,} bytes; one call may have {max_bytes:,}. Send fewer at once, or "
        "images of like proportions together",
    )


@dataclass(frozen=True, slots=True)
class _Span:
    """Pixels `start` to `stop` of one side of an image, and in these the stretch that is resized."""

    start: int
    stop: int
    low: float
    high: float


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
