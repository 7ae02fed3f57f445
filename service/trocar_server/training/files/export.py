"""Export of a trainer's weights as a safetensors file, streamed, its size known in advance.

    export = make_export(snapshot_tensors(module.state_dict(), frozen), {"base": "resnet18"})
    export.byte_count
    for piece in export.pieces():                   # bytes, at most 1 MiB each
        ...

It loads without Trocar: `module.load_state_dict(safetensors.torch.load_file(path))`, where `module` is the
architecture with the new head.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from torch import Tensor

from trocar_api.reasons import ErrorReason
from trocar_server.errors import ServiceError
from trocar_server.models.weights.weights_file import versions_metadata
from trocar_server.storage.tensor_file import Layout, lay_out

OPTIMIZER_PREFIX = "optimizer."
"""Name prefix of the optimizer's state."""


@dataclass(frozen=True)
class Export:
    """A file that is generated while it is read."""

    layout: Layout
    """Layout of the file."""
    adapter_config: str = ""
    """Of an adapter: the text of PEFT's `adapter_config.json`."""

    @property
    def byte_count(self) -> int:
        """Size of the file."""
        return self.layout.byte_count

    def pieces(self) -> Iterator[bytes]:
        """Yield its bytes in pieces of at most 1 MiB, each a separate copy."""
        for piece in self.layout.pieces():
            yield bytes(piece)


def make_export(
    weights: Mapping[str, Tensor],
    metadata: Mapping[str, str] | None = None,
    optimizer: Mapping[str, Tensor] | None = None,
    adapter_config: str = "",
) -> Export:
    """Lay out a file with a state dict.

    Tied weights are stored under each of their names, as `load_state_dict` expects.

    Args:
        weights: The full state dict, on the CPU, not modified until the export has ended; torch's `_metadata`
            on it is preserved.
        metadata: Strings for the header.
        optimizer: Tensors of the optimizer's state by name, added under `optimizer.`.
        adapter_config: See `Export`.

    Raises:
        ServiceError: `TRAINER_INVALID`, the state does not fit the format.
    """
    tensors = dict(weights)
    for name, tensor in (optimizer or {}).items():
        tensors[f"{OPTIMIZER_PREFIX}{name}"] = tensor
    if len(tensors) != len(weights) + len(optimizer or {}):
        raise ServiceError(
            ErrorReason.TRAINER_INVALID,
            f"some weights have names that begin with '{OPTIMIZER_PREFIX}'; export without the optimizer",
        )
    layout = lay_out(tensors, {"format": "pt", **versions_metadata(weights), **(metadata or {})})
    return Export(layout, adapter_config)
