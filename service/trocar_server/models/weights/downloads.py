"""Downloaded torchvision weights: downloaded once, cached as safetensors, loaded from there afterwards.

    DATA_DIR/weights/resnet50-11ad3fa6.safetensors          the name of torchvision's file
    DATA_DIR/weights/resnet50-11ad3fa6.safetensors.sha256
    DATA_DIR/weights/downloads/                             only while a download runs

An operator without network may put a converted file there under that name.
"""

import contextlib
import shutil
import time
from collections.abc import Mapping
from itertools import chain
from pathlib import Path, PurePosixPath
from urllib.parse import urlparse

import torch
from torch import Tensor
from torchvision.models import WeightsEnum

from trocar_api.reasons import ErrorReason
from trocar_server.errors import ServiceError
from trocar_server.models.architectures import find_weights, weights_label
from trocar_server.models.from_source import prefetch_source
from trocar_server.models.spec import ModelSpec, WeightsKind
from trocar_server.models.weights.convert import check_state_dict
from trocar_server.models.weights.weights_file import StateDict, read_weights, write_weights
from trocar_server.storage.durable import PARTIAL

_ABANDONED_AFTER_S = 24 * 3600


def prefetch_weights(spec: ModelSpec, data_dir: Path) -> None:
    """Download the weights that `load_model` needs, if any, and import the library of a model's source.

    Optional, and calls no torch operator, so that a slow network or import holds up a side thread and not
    the one that computes.

    Raises:
        ServiceError: `WEIGHTS_UNAVAILABLE`, with what to do instead; `MODEL_INVALID` or
            `UNKNOWN_ARCHITECTURE`, the source cannot be built.
    """
    if spec.source:
        prefetch_source(spec, data_dir)
        return
    if spec.is_custom or spec.weights_kind is not WeightsKind.NAMED:
        return
    weights = find_weights(spec.architecture, spec.weights)
    pickle = _downloads(data_dir) / _file_name(weights)
    if stored_path(weights, data_dir).exists() or _in_hub(weights) or pickle.exists():
        return
    try:
        pickle.parent.mkdir(parents=True, exist_ok=True)
        torch.hub.download_url_to_file(weights.url, str(pickle), _hash_prefix(weights), progress=False)
    except Exception as error:  # URLError, OSError, and RuntimeError for a wrong hash
        raise _unavailable(spec, weights, error) from error


def fetch_weights(spec: ModelSpec, weights: WeightsEnum, data_dir: Path) -> StateDict:
    """Return the state dict of torchvision's weights, from the data directory; download it once.

    Raises:
        ServiceError: `WEIGHTS_UNAVAILABLE`, with what to do instead; `WEIGHTS_CORRUPT`, the stored
            file is damaged.
    """
    path = stored_path(weights, data_dir)
    if not path.exists():
        prefetch_weights(spec, data_dir)
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            write_weights(check_state_dict(_unpickle(weights, data_dir), path.name), path)
        except ServiceError:
            raise
        except Exception as error:  # OSError, UnpicklingError, and what torch raises for a damaged file
            raise _unavailable(spec, weights, error) from error
        finally:
            (_downloads(data_dir) / _file_name(weights)).unlink(missing_ok=True)
    return read_weights(path)


def clean_downloads(data_dir: Path) -> None:
    """Remove partial downloads of killed servers, also of the Hub; a running one may share the folder.

    What was written to within the last day is kept. Call it once, before the first load.
    """
    weights, downloads = data_dir / "weights", _downloads(data_dir)
    partial = chain(*(folder.glob(f"*{PARTIAL}") for folder in (weights, weights / "timm")))
    for file in chain(partial, downloads.iterdir() if downloads.is_dir() else ()):
        with contextlib.suppress(FileNotFoundError):  # a running server has renamed it
            if time.time() - file.stat().st_mtime > _ABANDONED_AFTER_S:
                file.unlink()
    for folder in (data_dir / "hub").glob(".partial-*"):
        if time.time() - _last_change(folder) > _ABANDONED_AFTER_S:
            shutil.rmtree(folder, ignore_errors=True)


def stored_path(weights: WeightsEnum, data_dir: Path) -> Path:
    """Return where the safetensors file of torchvision's weights is kept."""
    return data_dir / "weights" / PurePosixPath(_file_name(weights)).with_suffix(".safetensors")


def _last_change(folder: Path) -> float:
    """Time of the last change in a folder, in seconds since 1970; now, where a running server changes it."""
    try:
        return max(path.lstat().st_mtime for path in (folder, *folder.rglob("*")))
    except OSError:
        return time.time()


def _unpickle(weights: WeightsEnum, data_dir: Path) -> Mapping[str, Tensor]:
    """Read torchvision's pickle from where `prefetch_weights` put or found it; no code in it is run."""
    directory = None if _in_hub(weights) else str(_downloads(data_dir))
    state: Mapping[str, Tensor] = weights.get_state_dict(
        progress=False, check_hash=True, weights_only=True, map_location="cpu", model_dir=directory
    )
    return state


def _unavailable(spec: ModelSpec, weights: WeightsEnum, error: Exception) -> ServiceError:
    name = _file_name(weights)
    file = stored_path(weights, Path()).name
    model = spec.architecture
    return ServiceError(
        ErrorReason.WEIGHTS_UNAVAILABLE,
        f"cannot download {weights_label(spec)} of '{model}' ({_cause(error)}). Without network: "
        f"fetch {weights.url} elsewhere, `trocar admin convert {name} {file}`, then "
        f"`trocar serve {model}={file}`; "
        f"or use random weights, `trocar serve {model}=random:0`",
        url=weights.url,
    )


def _cause(error: Exception) -> str:
    """Name the cause without the paths that an `OSError` prints."""
    reason = getattr(error, "reason", None) or getattr(error, "strerror", None)
    return f"{type(error).__name__}: {reason}" if reason else type(error).__name__


def _downloads(data_dir: Path) -> Path:
    return data_dir / "weights" / "downloads"


def _in_hub(weights: WeightsEnum) -> bool:
    return (Path(torch.hub.get_dir()) / "checkpoints" / _file_name(weights)).exists()


def _file_name(weights: WeightsEnum) -> str:
    return PurePosixPath(urlparse(weights.url).path).name


def _hash_prefix(weights: WeightsEnum) -> str | None:
    match = torch.hub.HASH_REGEX.search(_file_name(weights))
    return match.group(1) if match else None
