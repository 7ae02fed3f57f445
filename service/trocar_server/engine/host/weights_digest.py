"""Digest of a deployment's weights: equal for bit-equal ones, on every server and after a restart."""

import asyncio
import hashlib
import json
from collections.abc import Collection, Iterable
from itertools import chain

from torch import Tensor, nn

from trocar_server.engine.host.deployment import Deployment
from trocar_server.engine.schedule.device import DeviceThread
from trocar_server.errors import ServiceError
from trocar_server.storage.fingerprint import fingerprint


async def weights_digest(deployment: Deployment, others: Iterable[Deployment], owner: DeviceThread) -> str:
    """Return the digest of the weights as they are between two passes or steps.

    About a second per GB. Weights that never change are hashed once for each deployment, so that of a trainer
    only those that it trains are copied and hashed each time.

    Args:
        deployment: The deployment.
        others: All deployments: a trainer's frozen weights are in the memory of its base model.
        owner: The thread that calls torch.

    Returns:
        The sha256 in hex. Where some weights have a dtype or layout that cannot be hashed, the version of the
        deployment, which is another one after the next load.
    """
    fixed = [other.hosted.module for other in others if not _may_change(other)]
    kept = deployment.tensor_digests
    try:
        taken, unchanging = await owner.run(lambda: _taken(deployment.hosted.module, kept, fixed))
        found = await asyncio.to_thread(_digests, taken)
    except (ServiceError, RuntimeError, TypeError):
        return deployment.version
    kept.update((name, found[name]) for name in unchanging)
    return hashlib.sha256(json.dumps({**kept, **found}, sort_keys=True).encode()).hexdigest()


def _may_change(deployment: Deployment) -> bool:
    """Whether a trainer, or the process that the module comes from, may change its weights."""
    return deployment.is_live or deployment.hosted.spec.factory is not None


def _taken(
    module: nn.Module, kept: Collection[str], fixed: Iterable[nn.Module]
) -> tuple[dict[str, Tensor], set[str]]:
    """Return the tensors that are not kept, on the CPU, and the names of those that never change.

    The others are copied. Owner thread only.
    """
    shared = {_memory_of(tensor) for each in fixed for tensor in chain(each.parameters(), each.buffers())}
    state = module.state_dict().items()
    tensors = {
        name: value.detach() for name, value in state if isinstance(value, Tensor) and name not in kept
    }
    unchanging = {name for name, tensor in tensors.items() if _memory_of(tensor) in shared}
    return {name: each.to("cpu", copy=name not in unchanging) for name, each in tensors.items()}, unchanging


def _digests(tensors: dict[str, Tensor]) -> dict[str, str]:
    return {name: fingerprint({name: tensor}) for name, tensor in tensors.items()}


def _memory_of(tensor: Tensor) -> tuple[object, ...]:
    return (tensor.device, tensor.data_ptr(), tensor.dtype, tensor.shape, tensor.stride())
