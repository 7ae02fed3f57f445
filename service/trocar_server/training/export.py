"""A trainer's weights as one safetensors file, for anybody: piece by piece, its size known before.

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
from trocar_server.models.weights_file import versions_metadata
from trocar_server.training.tensor_file import Layout, lay_out

OPTIMIZER_PREFIX = "optimizer."
"""Of the names of the optimizer's state."""


@dataclass(frozen=True)
class Export:
    """A file that is made while it is read."""

    layout: Layout
    """What it will be."""

    @property
    def byte_count(self) -> int:
        """Its size."""
        return self.layout.byte_count

    def pieces(self) -> Iterator[bytes]:
        """Yield its bytes, at most 1 MiB at once, each a copy of its own."""
        for piece in self.layout.pieces():
            yield bytes(piece)


def make_export(
    weights: Mapping[str, Tensor],
    metadata: Mapping[str, str] | None = None,
    optimizer: Mapping[str, Tensor] | None = None,
) -> Export:
    """Lay out a file with a state dict.

    Tied weights are there under each of their names, as `load_state_dict` wants them.

    Args:
        weights: The whole state dict, on the CPU, changed by nobody until the export has ended; torch's
            `_metadata` on it is kept.
        metadata: Texts for the header.
        optimizer: Tensors of the optimizer's state by name, added under `optimizer.`.

    Raises:
        ServiceError: `TRAINER_INVALID`, something does not fit the format.
    """
    tensors = dict(weights)
    for name, tensor in (optimizer or {}).items():
        tensors[f"{OPTIMIZER_PREFIX}{name}"] = tensor
    if len(tensors) != len(weights) + len(optimizer or {}):
        raise ServiceError(
            ErrorReason.TRAINER_INVALID,
            f"some weights have names that begin with '{OPTIMIZER_PREFIX}'; export without the optimizer",
        )
    return Export(lay_out(tensors, {"format": "pt", **versions_metadata(weights), **(metadata or {})}))
