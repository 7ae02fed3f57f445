"""timm's models: built by `timm.create_model`; preprocessing, classes and stages by their configuration.

build_timm("vit_tiny_patch16_224", {}, None)              # random weights
"""

import sys
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn

from trocar_api.reasons import ErrorReason
from trocar_server.errors import ServiceError, first_line, nearest
from trocar_server.late_imports import is_imported, late_imports
from trocar_server.models.blocks import block_stages
from trocar_server.models.inputs import BATCH, InputSignature, InputSpec
from trocar_server.models.replicas import make_meta_replica
from trocar_server.models.source import invalid
from trocar_server.models.spec import INTERPOLATIONS, PreprocessingSpec
from trocar_server.models.weights.weights_file import read_weights, write_checksum

_QUARTERS = (1, 2, 3, 4)
_STEM_REDUCTION = 4


def check_timm(name: str) -> None:
    """Refuse an architecture that timm does not have.

    Raises:
        ServiceError: `UNKNOWN_ARCHITECTURE`, with the nearest names.
    """
    timm = _timm()
    if not timm.is_model(name.partition(".")[0]):
        hints = nearest(name, timm.list_models())
        advice = f"nearest: {', '.join(hints)}" if hints else "see timm.list_models()"
        raise ServiceError(
            ErrorReason.UNKNOWN_ARCHITECTURE, f"no architecture '{name[:80]}' in timm; {advice}"
        )


def build_timm(name: str, options: Mapping[str, Any], weights: Path | None) -> nn.Module:
    """Build a model; initial values are what `torch.manual_seed` and timm give.

    Args:
        name: An architecture, with a tag of weights where wanted.
        options: Further arguments of `timm.create_model`.
        weights: A safetensors file with timm's own keys; None for initial values.

    Raises:
        ServiceError: `WEIGHTS_MISMATCH`, the weights have another number of classes.
    """
    if weights is not None:
        _check_classes(name, options)
    overlay = {"pretrained_cfg_overlay": {"file": str(weights)}} if weights else {}
    module: nn.Module = _timm().create_model(name, pretrained=weights is not None, **overlay, **options)
    return module


def _check_classes(name: str, options: Mapping[str, Any]) -> None:
    """Refuse a head without weights, which timm would fill at random; with 0 classes there is no head."""
    config = _timm().get_pretrained_cfg(name)
    if options.get("num_classes") in (None, 0, config.num_classes):
        return
    raise ServiceError(
        ErrorReason.WEIGHTS_MISMATCH,
        f"the weights of timm:{name} have {config.num_classes} classes, not {options['num_classes']}; leave "
        "out num_classes and train a new head, or use a file with this head, random:0, or num_classes 0",
    )


def timm_weights(name: str, cache_dir: Path) -> Path:
    """Return the safetensors file of an architecture's weights: downloaded once, verified each time.

    Raises:
        ServiceError: `UNKNOWN_WEIGHTS`, there are none; `WEIGHTS_UNAVAILABLE`; `WEIGHTS_CORRUPT`.
    """
    target = download_timm(name, cache_dir)
    read_weights(target)  # compares the sha256 beside it
    return target


def download_timm(name: str, cache_dir: Path) -> Path:
    """Download an architecture's weights, unless they are there. Calls no torch operator.

    Raises:
        ServiceError: As `timm_weights` does.
    """
    config = _timm().get_pretrained_cfg(name)
    if config is None or not config.hf_hub_id:
        raise ServiceError(
            ErrorReason.UNKNOWN_WEIGHTS,
            f"timm has no weights for '{name}' on the Hub; use timm:{name}=random:0",
        )
    full = f"{config.architecture}.{config.tag}" if config.tag else name
    target = cache_dir / "weights" / "timm" / f"{full}.safetensors"
    if target.exists():
        return target
    try:
        from huggingface_hub import hf_hub_download

        target.parent.mkdir(parents=True, exist_ok=True)
        file = Path(hf_hub_download(config.hf_hub_id, "model.safetensors", local_dir=target.parent / full))
        write_checksum(file, target)
    except Exception as error:  # the client of the Hub raises many kinds
        if target.exists():  # another server that shares the cache has moved the file meanwhile
            return target
        raise ServiceError(
            ErrorReason.WEIGHTS_UNAVAILABLE,
            f"cannot download {full} ({type(error).__name__}: {first_line(error)}); put model.safetensors of "
            f"https://huggingface.co/{config.hf_hub_id} into the cache as weights/timm/{target.name}, or use "
            f"timm:{name}=random:0",
        ) from error
    return target


def timm_signature(module: Any) -> InputSignature:
    """Return the one input: an image batch, of a fixed size where the architecture asks for one."""
    (channels, height, width), embedding = _input_size(module), _embedding(module)
    is_free = not getattr(embedding, "strict_img_size", True) or getattr(embedding, "dynamic_img_pad", False)
    is_said = bool(module.pretrained_cfg.get("fixed_input_size")) and not is_free
    is_fixed = is_said and not _takes_larger(module, (channels, height, width))
    shape = (BATCH, channels, height, width) if is_fixed else (BATCH, channels, "height", "width")
    return InputSignature((InputSpec("x", "float32", shape),), {"height": height, "width": width})


def _takes_larger(module: nn.Module, size: tuple[int, int, int]) -> bool:
    """Whether a model takes larger images than timm says, as XCiT, Twins and CrossViT do (timm 1.0)."""
    channels, height, width = size
    try:
        with torch.no_grad():
            make_meta_replica(module)(torch.empty(1, channels, 2 * height, 2 * width, device="meta"))
    except Exception:  # noqa: BLE001 - a model may raise anything
        return False
    return True


def _input_size(module: Any) -> tuple[int, int, int]:
    """Channels, height and width as the module was built; its configuration describes its weights."""
    channels, *size = module.pretrained_cfg["input_size"]
    height, width = getattr(_embedding(module), "img_size", None) or size
    return getattr(module, "in_chans", channels), height, width


def _embedding(module: Any) -> Any:
    """Patch embedding, which checks the size of images; None in models without one."""
    parts = (getattr(module, name, None) for name in ("patch_embed", "stem"))
    return next((part for part in parts if hasattr(part, "strict_img_size")), None)


def timm_preprocessing(module: Any) -> PreprocessingSpec | None:
    """Return the evaluation transform in torchvision's terms; None where timm's is another."""
    from timm.data import resolve_data_config  # pyright: ignore[reportPrivateImportUsage]

    config = resolve_data_config({"input_size": _input_size(module)}, model=module, verbose=False)
    (channels, height, width), mode = config["input_size"], config["crop_mode"]
    sides = tuple(int(side / config["crop_pct"]) for side in (height, width))
    if channels != 3 or config["interpolation"] not in INTERPOLATIONS:
        return None
    if mode == "center" and height == width:
        resize: tuple[int, ...] = sides[:1]
    elif mode == "squash":
        resize = sides
    else:  # a border, or another proportion: torchvision has no transform of that kind
        return None
    return PreprocessingSpec(
        resize, (height, width), tuple(config["mean"]), tuple(config["std"]), config["interpolation"]
    )


def timm_categories(module: Any) -> tuple[str, ...]:
    """Return the class names of an ImageNet classifier; empty for others."""
    from timm.data import ImageNetInfo, infer_imagenet_subset  # pyright: ignore[reportPrivateImportUsage]

    config = module.pretrained_cfg
    if names := config.get("label_names"):
        return tuple(names)
    subset = infer_imagenet_subset(config)
    if not subset or module.num_classes != config.get("num_classes"):
        return ()
    return tuple(ImageNetInfo(subset).label_descriptions())


def timm_stages(module: Any) -> dict[str, str]:
    """Return stages by `feature_info`: as torchvision's, the last value before each halving."""
    info = list(getattr(module, "feature_info", None) or ())
    infos = [entry for entry in info if isinstance(entry, dict) and entry.get("module")]
    stages = block_stages(module)
    late = {entry["reduction"]: entry["module"] for entry in infos if entry["reduction"] >= _STEM_REDUCTION}
    if len(late) == 1 and len(infos) >= len(_QUARTERS):  # a plain transformer keeps its size
        ends = [infos[len(infos) * quarter // 4 - 1]["module"] for quarter in _QUARTERS]
        stages |= {f"stage{number}": end for number, end in enumerate(ends, 1)}
    else:
        early = [entry["module"] for entry in infos if entry["reduction"] < _STEM_REDUCTION]
        stem = early[-1] if early else "stem" * isinstance(getattr(module, "stem", None), nn.Module)
        stages |= {"stem": stem} if stem else {}
        stages |= {f"stage{number}": name for number, name in enumerate(late.values(), 1)}
    head = module.pretrained_cfg.get("classifier")
    if isinstance(head, str) and isinstance(dict(module.named_modules()).get(head), nn.Linear | nn.Conv2d):
        stages |= {"head": head, "penultimate": f"{head}/in"}
    return stages


def _timm() -> Any:
    """Return timm. Once it is imported, an event loop waits for no other import."""
    if is_imported("timm"):
        return sys.modules["timm"]
    try:
        with late_imports, warnings.catch_warnings():
            warnings.simplefilter("ignore")
            import timm
    except ImportError:
        raise invalid("timm: needs timm; `pip install 'trocar[timm]'`") from None
    return timm
