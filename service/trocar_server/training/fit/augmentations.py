"""Augmentations: torchvision's v2 transforms by name, for training inputs.

    augmentation = make_augmentation([AugmentationSpec(name="RandomHorizontalFlip", options={"p": 0.5})])
    with order.random_numbers(seed):
        image = augmentation(image)         # (channels, height, width) -> the same rank

Only transforms of a single image tensor are allowed, and none that takes a function. Each draws from torch's
global CPU generator, which the caller seeds; none uses the generators of Python or NumPy.
"""

import inspect
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from trocar_api.reasons import ErrorReason
from trocar_server.errors import ServiceError, first_line, nearest
from trocar_server.late_imports import import_compiler
from trocar_server.training.datasets.order import random_numbers
from trocar_server.training.datasets.sample_sources import MAX_LOADED_BYTES
from trocar_server.training.spec.fit_spec import AugmentationSpec

_GEOMETRIC = (
    "RandomHorizontalFlip", "RandomVerticalFlip", "RandomCrop", "RandomResizedCrop", "RandomRotation",
    "RandomAffine", "RandomPerspective", "ElasticTransform", "CenterCrop", "Pad", "Resize", "RandAugment",
    "TrivialAugmentWide", "AutoAugment", "AugMix",
)  # fmt: skip
_COLOUR = (
    "ColorJitter", "RandomErasing", "GaussianBlur", "GaussianNoise", "Grayscale", "RandomGrayscale",
    "Normalize", "RandomInvert", "RandomPosterize", "RandomSolarize", "RandomAdjustSharpness",
    "RandomAutocontrast", "RandomEqualize", "RandomChannelPermutation", "RandomPhotometricDistort",
)  # fmt: skip
_STEADY = ("CenterCrop", "Pad", "Resize", "Grayscale", "Normalize")
_BATCHED = ("MixUp", "CutMix")
NAMES = (*_GEOMETRIC, *_COLOUR)
"""Names of the allowed transforms."""

_LIMITS = {
    "size": 4096, "max_size": 8192, "padding": 4096, "kernel_size": 255, "num_ops": 16, "magnitude": 1000,
    "num_magnitude_bins": 1000, "severity": 10, "mixture_width": 16, "chain_depth": 16,
}  # fmt: skip
"""Upper limits of integer options; larger values would only cost memory and time."""
_MAX_SIGMA = 100
"""Upper limit of an elastic transform's `sigma`: its kernel has (8 * sigma + 1) ** 2 numbers."""
_LARGEST = 1e9
_REFUSED = {
    "inplace": "it would change the data set",
    "expand": "images of a batch would differ in size",
}
_PROBE_SHAPE = (3, 32, 32)


@dataclass(frozen=True)
class Augmentation:
    """A sequence of transforms. Falsy when empty.

    Attributes:
        transforms: torchvision's modules, in order.
        is_random: Whether two calls may return different results.
        is_geometric: Whether pixels move, so that image targets would need the same transform.
    """

    transforms: tuple[Any, ...] = ()
    is_random: bool = False
    is_geometric: bool = False

    def __call__(self, image: Tensor) -> Tensor:
        """Return a transformed copy of (channels, height, width); the argument is unchanged."""
        for transform in self.transforms:
            image = transform(image)
        return image

    def __bool__(self) -> bool:
        return bool(self.transforms)


def make_augmentation(
    specs: Sequence[AugmentationSpec], input_shape: Sequence[int] = _PROBE_SHAPE, batch_size: int = 1
) -> Augmentation:
    """Build the augmentation of a fit's training inputs.

    Args:
        specs: In order.
        input_shape: (channels, height, width) of one sample, on which the transforms are tried out.
        batch_size: Samples that are in memory at once.

    Raises:
        ServiceError: `FIT_INVALID`, with every problem and its position in the list.
    """
    augmentation, problems = build_augmentation(specs, input_shape, batch_size)
    if problems:
        raise ServiceError(ErrorReason.FIT_INVALID, "; ".join(problems))
    return augmentation


def build_augmentation(
    specs: Sequence[AugmentationSpec], input_shape: Sequence[int] = _PROBE_SHAPE, batch_size: int = 1
) -> tuple[Augmentation, list[str]]:
    """As `make_augmentation`, but return the problems instead of raising them."""
    problems: list[str] = []
    transforms = []
    for index, spec in enumerate(specs):
        field = f"augmentations[{index}] ({spec.name})"
        result = list(_problems_of(spec))
        if not result:
            transform, result = _build(spec)
            transforms.append(transform)
        problems += [f"{field}: {problem}" for problem in result]
    augmentation = Augmentation(
        tuple(transforms),
        is_random=any(spec.name not in _STEADY for spec in specs),
        is_geometric=any(spec.name in _GEOMETRIC for spec in specs),
    )
    return augmentation, problems or list(_trial(specs, augmentation, tuple(input_shape), batch_size))


def _problems_of(spec: AugmentationSpec) -> Iterator[str]:
    if spec.name in _BATCHED:
        yield "transforms that mix the samples and labels of a batch are not supported; leave it out"
        return
    if spec.name not in NAMES:
        near = nearest(spec.name, NAMES) or NAMES
        yield f"no such transform is allowed; use one of {', '.join(near)}"
        return
    known = _arguments(spec.name)
    for name in sorted(set(spec.options) - set(known)):
        near = nearest(name, known) or sorted(known)
        yield f"no option '{name}'; it has {', '.join(near) or 'none'}"
    for name, parameter in known.items():
        if parameter.default is inspect.Parameter.empty and name not in spec.options:
            yield f"option '{name}' is missing"
    for name, value in spec.options.items():
        yield from _problems_of_value(name, value)
        if (
            spec.name == "ElasticTransform"
            and name == "sigma"
            and max(_numbers_in(value), default=0) > _MAX_SIGMA
        ):
            yield f"option 'sigma' is at most {_MAX_SIGMA}"


def _problems_of_value(name: str, value: object) -> Iterator[str]:
    if name in _REFUSED and value:
        yield f"option '{name}' must be left out: {_REFUSED[name]}"
    numbers = _numbers_in(value)
    if any(not math.isfinite(item) or abs(item) > _LARGEST for item in numbers):
        yield f"option '{name}' is not a finite number of at most 1e9"
    elif name in _LIMITS and any(abs(item) > _LIMITS[name] for item in numbers):
        yield f"option '{name}' is at most {_LIMITS[name]}"
    elif name in _LIMITS and any(item != int(item) for item in numbers):
        yield f"option '{name}' takes whole numbers"


def _numbers_in(value: object) -> list[int | float]:
    items = value if isinstance(value, list) else [value]
    return [item for item in items if isinstance(item, (int, float))]


def _arguments(name: str) -> dict[str, inspect.Parameter]:
    parameters = inspect.signature(getattr(torchvision_v2(), name).__init__).parameters
    return {key: value for key, value in parameters.items() if key != "self"}


def _build(spec: AugmentationSpec, **changes: object) -> tuple[Any, list[str]]:
    try:
        options = {name: _converted(name, value) for name, value in spec.options.items()} | changes
        return getattr(torchvision_v2(), spec.name)(**options), []
    except Exception as error:  # noqa: BLE001 - torchvision may raise anything on a bad value
        return None, [f"torchvision rejects its options: {first_line(error)}"]


def _converted(name: str, value: Any) -> Any:
    """Return an option as torchvision expects it: integers in lists arrive as floats."""
    if name == "policy" and isinstance(value, str):
        return torchvision_v2().AutoAugmentPolicy(value)
    if name in _LIMITS:
        return (
            [int(item) for item in value]
            if isinstance(value, list)
            else value
            if value is None
            else int(value)
        )
    return value


def torchvision_v2() -> Any:
    """Return torchvision's v2 transforms. Imported late: they bring torch's compiler."""
    import_compiler()
    from torchvision.transforms import v2

    return v2


def _trial(
    specs: Sequence[AugmentationSpec], augmentation: Augmentation, shape: tuple[int, ...], batch_size: int
) -> Iterator[str]:
    """Yield the problems on a sample; transforms that run with a probability always run here."""
    if not specs:
        return
    if len(shape) != 3:
        yield f"augmentations: they take samples of (channels, height, width), not of {list(shape)}"
        return
    image = torch.full(shape, 0.5)
    with random_numbers(0):  # a temporary seed: other random streams are unaffected
        for index, (spec, transform) in enumerate(zip(specs, augmentation.transforms, strict=True)):
            surely = _build(spec, p=1.0)[0] if "p" in _arguments(spec.name) else transform
            try:
                image = surely(image)
            except Exception as error:  # noqa: BLE001 - as above
                yield (
                    f"augmentations[{index}] ({spec.name}): it fails on a sample of {list(image.shape)}: "
                    f"{first_line(error)}"
                )
                return
            if image.nbytes * batch_size > MAX_LOADED_BYTES:
                yield (
                    f"augmentations[{index}] ({spec.name}): a batch of {batch_size} samples of "
                    f"{list(image.shape)} has more than {MAX_LOADED_BYTES:,} bytes; use a smaller batch_size"
                )
                return
    if image.shape[0] != shape[0]:
        yield (
            f"augmentations: they turn {shape[0]} channels into {image.shape[0]}, which the model does not "
            "take"
        )
