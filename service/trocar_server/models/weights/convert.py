"""`trocar admin convert`: a `.pth` checkpoint to safetensors, offline, without running the code inside it."""

import pickle
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from trocar_api.reasons import ErrorReason
from trocar_server.errors import ServiceError
from trocar_server.models.weights.weights_file import write_weights

_WRAPPERS = ("state_dict", "model")


def convert_checkpoint(source: Path, target: Path) -> int:
    """Write the state dict in `source` as a safetensors file, which the server can load.

        convert_checkpoint(Path("resnet18-f37072fd.pth"), Path("resnet18-f37072fd.safetensors"))

    A checkpoint such as `{"state_dict": ...}` or `{"model": ...}` is unwrapped; names are kept
    as they are. The pickle is read with `weights_only=True`: anything but tensors and plain
    containers is refused and never run. The target appears whole or not at all.

    Returns:
        The number of tensors written.

    Raises:
        ServiceError: `WEIGHTS_UNAVAILABLE`, `source` cannot be read or `target` not written;
            `WEIGHTS_CORRUPT`, `source` is no checkpoint of plain tensors; `INVALID_ARGUMENT`,
            `target` is no `.safetensors` name.
    """
    if target.suffix != ".safetensors":
        raise ServiceError(ErrorReason.INVALID_ARGUMENT, f"'{target.name}' must end in .safetensors")
    state = check_state_dict(_unwrap(_unpickle(source), source.name), source.name)
    try:
        write_weights(state, target)
    except OSError as error:
        raise _unavailable("write", target, error) from error
    return len(state)


def check_state_dict(state: Mapping[Any, Any], name: str) -> Mapping[str, Tensor]:
    """Return `state` if safetensors can hold every value: dense, not quantized tensors.

    Raises:
        ServiceError: `WEIGHTS_CORRUPT`, naming up to five of the other entries.
    """
    others = [str(key) for key, value in state.items() if not isinstance(key, str) or not _is_plain(value)]
    if others or not state:
        raise ServiceError(
            ErrorReason.WEIGHTS_CORRUPT,
            f"'{name}' is not a state dict of plain tensors: {_name_some(others)}; save `model.state_dict()` "
            "alone, of a model that is not quantized",
        )
    return state


def _unpickle(source: Path) -> object:
    try:
        return torch.load(source, map_location="cpu", weights_only=True)
    except OSError as error:
        raise _unavailable("read", source, error) from error
    except pickle.UnpicklingError as error:
        raise _refused(
            source, "it contains code or objects besides tensors, which are never executed"
        ) from error
    except Exception as error:  # torch raises many kinds for what is no checkpoint
        raise _refused(
            source, f"it is not a checkpoint that torch can read ({type(error).__name__})"
        ) from error


def _unwrap(checkpoint: object, name: str) -> Mapping[Any, Any]:
    if not isinstance(checkpoint, Mapping):
        raise ServiceError(
            ErrorReason.WEIGHTS_CORRUPT, f"'{name}' holds a {type(checkpoint).__name__}, not a state dict"
        )
    for wrapper in _WRAPPERS:
        if isinstance(checkpoint.get(wrapper), Mapping):
            inner: Mapping[Any, Any] = checkpoint[wrapper]
            return inner
    return checkpoint


def _is_plain(value: object) -> bool:
    return isinstance(value, Tensor) and value.layout is torch.strided and not value.is_quantized


def _name_some(names: list[str]) -> str:
    if not names:
        return "it is empty"
    rest = f" and {len(names) - 5} more" if len(names) > 5 else ""
    return f"{', '.join(names[:5])}{rest}"


def _refused(source: Path, why: str) -> ServiceError:
    return ServiceError(
        ErrorReason.WEIGHTS_CORRUPT,
        f"'{source.name}' cannot be converted: {why}; save `model.state_dict()` alone",
    )


def _unavailable(verb: str, path: Path, error: OSError) -> ServiceError:
    return ServiceError(
        ErrorReason.WEIGHTS_UNAVAILABLE,
        f"cannot {verb} '{path.name}': {error.strerror or type(error).__name__}",
    )
