"""Identity of a replica: what must be equal for all replicas of a model, or they answer differently.

    compared = await replica_identity(deployment, await engine.identity(deployment), engine.owner)
    # {"parts": {"weights": "9f2c...", ...}, "buffers": {"position.angles": [0.52, 1.7, -0.4, 0.2]}}

# Note: [Computed buffers]
Buffers that are not saved are usually computed, such as tables of angles, and two kinds of CPU may compute
their last bit differently. So these are compared within a tolerance, by their root mean square and by sums
with fixed signs: two drawn tensors have sums as far apart as their elements, however many these are, while
roundings hardly show. What is loaded or drawn and saved is compared bit by bit.
"""

from collections.abc import Iterator
from contextlib import suppress
from typing import Any

import torch
from torch import Tensor, nn

from trocar_server.engine.host.deployment import Deployment
from trocar_server.engine.schedule.device import DeviceThread
from trocar_server.models.identity import Identity

_PIECE = 1 << 20
_MIXER = 2654435761
"""Spreads the bits of an index (Knuth's multiplicative hash)."""
_SIGN_BITS = (13, 19, 25)
"""Bits of a mixed index that are signs, one for each sum."""


async def replica_identity(deployment: Deployment, identity: Identity, owner: DeviceThread) -> dict[str, Any]:
    """Return what is compared between the replicas of a model, as JSON.

    Args:
        deployment: The deployment.
        identity: What `deployment_identity` returns for it.
        owner: The thread that calls torch.

    Returns:
        `parts`, those of the model's identity; without `weights` where some weights have a dtype or layout
        that cannot be hashed. And `buffers`, sketches by name, see Note: [Computed buffers]: of the buffers
        that are not saved, and of all tensors where they cannot be hashed.
    """
    module, is_hashed = deployment.hosted.module, identity.is_lasting
    parts = {name: part for name, part in identity.parts.items() if is_hashed or name != "weights"}
    return {"parts": parts, "buffers": await owner.run(lambda: _sketched(module, is_hashed=is_hashed))}


@torch.no_grad()
def _sketched(module: nn.Module, *, is_hashed: bool) -> dict[str, list[float]]:
    sketches = {}
    for name, tensor in _compared(module, is_hashed=is_hashed):
        with suppress(RuntimeError, NotImplementedError, TypeError):  # a layout without arithmetic
            sketches[name] = _sketch(tensor)
    return sketches


def _compared(module: nn.Module, *, is_hashed: bool) -> Iterator[tuple[str, Tensor]]:
    saved = {name: value for name, value in module.state_dict().items() if isinstance(value, Tensor)}
    if not is_hashed:
        yield from saved.items()
    yield from ((name, value) for name, value in module.named_buffers() if name not in saved)


def _sketch(tensor: Tensor) -> list[float]:
    """Return the root mean square of the finite elements, and sums of them with fixed signs."""
    plain = tensor.dequantize() if tensor.is_quantized else tensor
    plain = plain.to_dense() if plain.layout is not torch.strided else plain
    flat = (torch.view_as_real(plain.resolve_conj()) if plain.is_complex() else plain).reshape(-1)
    total, sums = 0.0, [0.0] * len(_SIGN_BITS)
    for start in range(0, flat.numel(), _PIECE):
        piece = flat[start : start + _PIECE].to(torch.float64)
        piece = torch.nan_to_num(piece, nan=0.0, posinf=0.0, neginf=0.0)
        total += float(piece.square().sum())
        mixed = (torch.arange(start, start + len(piece), device=piece.device) + 1) * _MIXER
        for index, bit in enumerate(_SIGN_BITS):
            sums[index] += float((piece * (1 - 2 * ((mixed >> bit) & 1))).sum())
    count = max(1, flat.numel())
    return [(total / count) ** 0.5, *(each / count**0.5 for each in sums)]
