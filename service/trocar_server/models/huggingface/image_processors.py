"""Image processors of transformers, as preprocessing of ours: those that resize, crop, scale and normalise.

    spec = image_preprocessing(folder)          # of its preprocessor_config.json or processor_config.json

transformers reads the settings, with each class's defaults and the forms of older folders; the arithmetic is
`models.preprocessing`, so images are decoded, limited and counted as for every other model.
"""

from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Any

from trocar_server.errors import first_line
from trocar_server.models.huggingface.folder import read_configuration
from trocar_server.models.huggingface.quiet import quietly
from trocar_server.models.inputs import PIXEL_MASK, SPATIAL_SHAPES
from trocar_server.models.spec import PreprocessingSpec

_FILES = ("processor_config.json", "preprocessor_config.json")
_STEPS = ("_preprocess", "preprocess", "resize", "center_crop", "rescale", "normalize", "process_image")
"""Methods that decide the values; a class that has none of its own is plain."""
_AS_PLAIN = ("Segformer", "Beit", "MobileNetV2")
"""Classes whose own steps are for segmentation maps alone."""
_DETECTORS = ("Detr", "ConditionalDetr", "DeformableDetr", "RTDetr")
"""Classes that may pad images of different sizes and give their mask; else they do as plain ones."""
_IN_PATCHES = ("Siglip2",)
"""Classes that resize an image to about as many patches as the model takes, and cut it into these."""
_OWN_RESIZE = ("ConvNext", "Levit")
_INTERPOLATIONS = ("nearest", "lanczos", "bilinear", "bicubic", "box", "hamming")
"""By Pillow's numbers."""
_RESCALE = 1 / 255
_WARPED_FROM = 384
"""ConvNeXT's images of this side or more are not cropped."""


class NotMappedError(Exception):
    """An image processor does what the preprocessing cannot do; the message names it."""


def has_image_settings(folder: Path) -> bool:
    """Whether a folder has the files of a processor that may take images."""
    return any((folder / name).is_file() for name in _FILES)


def image_preprocessing(folder: Path, channels: int = 3, beside: Collection[str] = ()) -> PreprocessingSpec:
    """Return the preprocessing that gives what a folder's image processor gives.

    Args:
        folder: The folder, with the processor's files.
        channels: What the model takes.
        beside: Arguments that the model takes beside images: without `pixel_mask` these are not padded,
            without `spatial_shapes` they are not cut into patches.

    Raises:
        NotMappedError: Its class or a setting has no counterpart; or it cannot be loaded.
        ServiceError: `MODEL_INVALID`, a file names code to import.
    """
    for name in (*_FILES, "config.json"):
        if (folder / name).is_file():
            read_configuration(folder / name)
    processor = _loaded(folder)
    if channels != 3:
        raise NotMappedError(f"makes RGB, and the model takes {channels} channels")
    kind = type(processor).__name__.removesuffix("Pil").removesuffix("ImageProcessor")
    if kind in _IN_PATCHES and SPATIAL_SHAPES in beside:
        return _spec_of_patches(processor)
    if not (_is_plain(type(processor)) or kind in (*_AS_PLAIN, *_DETECTORS, *_OWN_RESIZE)):
        raise NotMappedError(f"{kind}ImageProcessor has steps of its own")
    return _spec(processor, kind, takes_mask=PIXEL_MASK in beside)


def _loaded(folder: Path) -> Any:
    from transformers import AutoImageProcessor

    load: Any = AutoImageProcessor.from_pretrained  # untyped (transformers 5.23)
    try:
        with quietly():
            return load(folder, backend="pil", local_files_only=True, trust_remote_code=False)
    except Exception as error:
        raise NotMappedError(f"cannot be loaded: {first_line(error)}") from error


def _is_plain(kind: type[Any]) -> bool:
    """Whether a class has every step of transformers' base of those that compute with Pillow."""
    from transformers.image_processing_backends import PilBackend

    return issubclass(kind, PilBackend) and all(
        getattr(kind, step, None) is getattr(PilBackend, step, None) for step in _STEPS
    )


def _spec(processor: Any, kind: str, *, takes_mask: bool) -> PreprocessingSpec:
    pads = bool(getattr(processor, "do_pad", None))
    if (pads and kind not in _DETECTORS) or getattr(processor, "pad_size", None):
        raise NotMappedError("pads images (do_pad, pad_size)")
    resize, longest = _resize(processor, kind) if processor.do_resize else ((), 0)
    crop = _crop(processor.crop_size) if getattr(processor, "do_center_crop", None) else ()
    if kind == "ConvNext" and processor.do_resize:
        resize, crop = _of_convnext(resize, processor.crop_pct)
    normalises = bool(processor.do_normalize)
    mean = _three(processor.image_mean, "image_mean") if normalises else ()
    std = _three(processor.image_std, "image_std") if normalises else ()
    factor = float(processor.rescale_factor) if processor.do_rescale else 1.0
    return PreprocessingSpec(
        resize,
        crop,
        mean,
        std,
        _interpolation(processor.resample) if processor.do_resize else "bilinear",
        "transformers",
        longest,
        None if factor == _RESCALE else factor,
        pads and takes_mask,
    )


def _spec_of_patches(processor: Any) -> PreprocessingSpec:
    if not processor.do_resize:
        raise NotMappedError("cuts images into patches without a resize (do_resize)")
    normalises = bool(processor.do_normalize)
    factor = float(processor.rescale_factor) if processor.do_rescale else 1.0
    return PreprocessingSpec(
        mean=_three(processor.image_mean, "image_mean") if normalises else (),
        std=_three(processor.image_std, "image_std") if normalises else (),
        interpolation=_interpolation(processor.resample),
        rules="transformers",
        scale=None if factor == _RESCALE else factor,
        patch=int(processor.patch_size),
        patches=int(processor.max_num_patches),
    )


def _resize(processor: Any, kind: str) -> tuple[tuple[int, ...], int]:
    """Return the sides of the resize, one or two, and the limit of the longer side."""
    size = {name: value for name, value in dict(processor.size).items() if value}
    names = set(size)
    if names == {"height", "width"}:
        return (int(size["height"]), int(size["width"])), 0
    if names == {"shortest_edge"} and kind not in _DETECTORS:
        side = int(size["shortest_edge"])
        return (int(256 / 224 * side) if kind == "Levit" else side,), 0
    if names == {"shortest_edge", "longest_edge"} and kind not in _OWN_RESIZE:
        return (int(size["shortest_edge"]),), int(size["longest_edge"])
    raise NotMappedError(f"resizes by {', '.join(sorted(names)) or 'nothing'} (size)")


def _crop(size: Any) -> tuple[int, ...]:
    result = {name: value for name, value in dict(size or {}).items() if value}
    if set(result) != {"height", "width"}:
        raise NotMappedError(f"crops to {', '.join(sorted(result)) or 'nothing'} (crop_size)")
    return int(result["height"]), int(result["width"])


def _of_convnext(resize: Sequence[int], crop_pct: float | None) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return the resize and the crop of ConvNeXT, whose one side is that of the result."""
    if len(resize) != 1:
        raise NotMappedError("resizes by height and width, and ConvNextImageProcessor takes shortest_edge")
    side = resize[0]
    if side >= _WARPED_FROM:
        return (side, side), ()
    return (int(side / (crop_pct or 224 / 256)),), (side, side)


def _three(values: Any, name: str) -> tuple[float, ...]:
    result = tuple(values) if isinstance(values, (list, tuple)) else (values,) * 3
    if len(result) != 3 or any(value is None for value in result):
        raise NotMappedError(f"normalises by {len(result)} numbers ({name})")
    return tuple(map(float, result))


def _interpolation(resample: Any) -> str:
    number = int(resample) if resample is not None else 2
    if not 0 <= number < len(_INTERPOLATIONS):
        raise NotMappedError(f"resizes with filter {number} (resample)")
    return _INTERPOLATIONS[number]
