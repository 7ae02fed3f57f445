"""Digest of the weights of a deployment: equal for equal ones, on every server and after a restart.

Which weights these are is one part of which model this is; see `deployment_identity`.
"""

import asyncio
import hashlib
import json
from collections.abc import Collection, Iterable, Iterator
from functools import partial
from itertools import chain

from torch import Tensor, nn

from trocar_server.engine.host.deployment import Deployment
from trocar_server.engine.schedule.device import DeviceThread
from trocar_server.errors import ServiceError
from trocar_server.storage.fingerprint import fingerprint
from trocar_server.tasks import shielded

_GROUP_BYTES = 256 << 20


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
    async with deployment.digest_lock:  # one copy of the weights at a time, however many calls ask
        # Not given up with the call: the next one would begin anew.
        return await shielded(_weights_digest(deployment, others, owner))


async def _weights_digest(deployment: Deployment, others: Iterable[Deployment], owner: DeviceThread) -> str:
    fixed = [other.hosted.module for other in others if not other.may_change]
    kept = deployment.tensor_digests
    try:
        changing, unchanging = await owner.run(lambda: _taken(deployment.hosted.module, kept, fixed))
        digests = await asyncio.to_thread(_digests, changing)
        for group in _groups(unchanging):
            # Other calls run between two copies from a GPU, and memory holds one of them.
            is_on_cpu = all(tensor.device.type == "cpu" for tensor in group.values())
            copied = group if is_on_cpu else await owner.run(partial(_copied, group))
            kept.update(await asyncio.to_thread(_digests, copied))
    except (ServiceError, RuntimeError, TypeError):
        return deployment.version
    return hashlib.sha256(json.dumps({**kept, **digests}, sort_keys=True).encode()).hexdigest()


def _taken(
    module: nn.Module, kept: Collection[str], fixed: Iterable[nn.Module]
) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Return copies of the tensors that may change, and the others that are not kept. Owner thread only."""
    shared = {_memory_of(tensor) for each in fixed for tensor in chain(each.parameters(), each.buffers())}
    state = module.state_dict().items()
    tensors = {
        name: value.detach() for name, value in state if isinstance(value, Tensor) and name not in kept
    }
    unchanging = {name: tensor for name, tensor in tensors.items() if _memory_of(tensor) in shared}
    return _copied({name: each for name, each in tensors.items() if name not in unchanging}), unchanging


def _copied(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: tensor.to("cpu", copy=True) for name, tensor in tensors.items()}


def _groups(tensors: dict[str, Tensor]) -> Iterator[dict[str, Tensor]]:
    """Yield tensors together that have about `_GROUP_BYTES`."""
    group: dict[str, Tensor] = {}
    byte_count = 0
    for name, tensor in tensors.items():
        group[name] = tensor
        byte_count += tensor.nbytes
        if byte_count >= _GROUP_BYTES:
            yield group
            group, byte_count = {}, 0
    if group:
        yield group


def _digests(tensors: dict[str, Tensor]) -> dict[str, str]:
    return {name: fingerprint({name: tensor}) for name, tensor in tensors.items()}


def _memory_of(tensor: Tensor) -> tuple[object, ...]:
    return (tensor.device, tensor.data_ptr(), tensor.dtype, tensor.shape, tensor.stride())
