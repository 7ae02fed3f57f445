"""Weights file: safetensors with torch's module versions in the header and a sha256 beside it.

The only format that the server reads. A write is durable and all-or-nothing: temporary file, fsync,
rename, fsync of the directory, and the checksum last.

# Note: [Module versions]
`state_dict()` carries a version per module in its `_metadata`, which safetensors has no place for.
torchvision's MNASNet refuses a state dict without one, and turns itself into its first version for
one of 1 (torchvision 0.29, `mnasnet.py`). So the versions are kept as JSON in the header.
"""

import hashlib
import json
from collections import OrderedDict
from collections.abc import Iterator, Mapping
from pathlib import Path

from safetensors import safe_open
from torch import Tensor

from trocar_api.reasons import ErrorReason
from trocar_server.errors import ServiceError
from trocar_server.storage.durable import move_durably, write_durably
from trocar_server.storage.tensor_file import lay_out

StateDict = OrderedDict[str, Tensor]
"""Tensors by qualified name; torch's `_metadata` may hang on it, see Note: [Module versions]."""

_VERSIONS = "trocar.module_versions"


def write_weights(state: Mapping[str, Tensor], target: Path) -> None:
    """Write a state dict to `target` and its sha256 to `target` + `.sha256`, replacing old files.

    Tensors that share memory, such as tied weights, are all there.

    Raises:
        OSError: The directory cannot be written; `target` is as it was.
    """
    tensors = {name: tensor.detach().cpu() for name, tensor in state.items()}
    layout = lay_out(tensors, {"format": "pt", **versions_metadata(state)})
    digest = hashlib.sha256()

    def pieces() -> Iterator[bytes | memoryview]:
        for piece in layout.pieces():
            digest.update(piece)
            yield piece
        _checksum_path(target).unlink(missing_ok=True)  # before the file gets its name, and not if that fails

    write_durably(target, pieces(), is_private=False)
    _write_checksum(target, digest.hexdigest())


def write_checksum(source: Path, target: Path) -> None:
    """Move a safetensors file to `target`, durably, and write its sha256 beside it.

    Raises:
        OSError: The directory cannot be written.
    """
    digest = _sha256(source)
    move_durably(source, target)
    _write_checksum(target, digest)


def _write_checksum(target: Path, digest: str) -> None:
    write_durably(_checksum_path(target), f"{digest}  {target.name}\n".encode("ascii"), is_private=False)


def versions_metadata(state: Mapping[str, Tensor]) -> dict[str, str]:
    """Return the header entry with torch's module versions, see Note: [Module versions]."""
    return {_VERSIONS: json.dumps(_versions(state))}


def read_weights(path: Path, sha256: str = "") -> StateDict:
    """Read a safetensors file to the CPU. The checksum beside it is compared where there is one.

    The tensors map the file until they are copied into a module.

    Args:
        path: Where it is.
        sha256: Of the file, in hex, where the caller knows it; that beside it does not count then.

    Raises:
        ServiceError: `WEIGHTS_UNAVAILABLE`, the file cannot be opened; `WEIGHTS_CORRUPT`, it is no
            safetensors file or not the one that was written.
    """
    try:
        path.open("rb").close()  # for an error with its reason; safetensors' has none
        _check_sha256(path, sha256)
        with safe_open(path, framework="pt") as file:
            state = StateDict((name, file.get_tensor(name)) for name in file.keys())  # noqa: SIM118 - no __iter__
            versions = json.loads((file.metadata() or {}).get(_VERSIONS, "{}"))
    except ServiceError:
        raise
    except OSError as error:
        raise ServiceError(
            ErrorReason.WEIGHTS_UNAVAILABLE,
            f"cannot read the weights file '{path.name}' ({error.strerror or type(error).__name__}); "
            "check its path and permissions",
        ) from error
    except Exception as error:  # safetensors raises its own error and, for some headers, others
        raise _corrupt(
            path, "it is not a readable safetensors file; write it again with `trocar admin convert`"
        ) from error
    if versions:
        state._metadata = OrderedDict(versions)  # type: ignore[attr-defined]  # where torch looks for it
    return state


def _versions(state: Mapping[str, Tensor]) -> dict[str, dict[str, int]]:
    metadata: Mapping[str, Mapping[str, int]] = getattr(state, "_metadata", {})
    return {path: {"version": entry["version"]} for path, entry in metadata.items() if "version" in entry}


def _checksum_path(path: Path) -> Path:
    return path.with_name(f"{path.name}.sha256")


def _check_sha256(path: Path, expected: str) -> None:
    if not expected:
        try:
            expected = _checksum_path(path).read_text(encoding="ascii").split()[0]
        except FileNotFoundError:
            return
    if _sha256(path) != expected:
        raise _corrupt(
            path,
            "its sha256 differs from the one in the .sha256 file; remove both files and write them again",
        )


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _corrupt(path: Path, why: str) -> ServiceError:
    return ServiceError(ErrorReason.WEIGHTS_CORRUPT, f"the weights file '{path.name}' is damaged: {why}")
