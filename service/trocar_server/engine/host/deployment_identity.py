"""Identity of a deployment: that of its model as it is loaded, with the weights as they are now.

(await deployment_identity(deployment, deployments.values(), engine.owner, settings)).digest
"""

import asyncio
from collections.abc import Iterable, Mapping
from typing import Any

from trocar_server.engine.host.deployment import Deployment
from trocar_server.engine.host.weights_digest import weights_digest
from trocar_server.engine.schedule.device import DeviceThread
from trocar_server.errors import ServiceError
from trocar_server.models.identity import Content, Identity, content_of, identity, structure_of
from trocar_server.processing.folder import processor_digest


async def deployment_identity(
    deployment: Deployment, others: Iterable[Deployment], owner: DeviceThread, settings: Mapping[str, Any]
) -> Identity:
    """Return which model a deployment serves: its configuration, what was loaded, and its weights.

    Args:
        deployment: See `weights_digest`, also for `others` and `owner`.
        others: See there.
        owner: See there.
        settings: What `settings_of` returns.
    """
    described = await description(deployment, owner, settings)
    weights = await weights_digest(deployment, [deployment, *others], owner)
    return described.with_tensors(weights, is_lasting=weights != deployment.version)


async def description(deployment: Deployment, owner: DeviceThread, settings: Mapping[str, Any]) -> Identity:
    """Return the identity without the weights, which is worked out once for each load.

    Args:
        deployment: The deployment.
        owner: The thread that calls torch.
        settings: What `settings_of` returns.
    """
    if deployment.described is None:
        structure = await owner.run(lambda: structure_of(deployment.hosted.module))
        content = await asyncio.to_thread(_content, deployment, structure)
        deployment.described = identity(deployment.hosted.spec, settings, content)
    return deployment.described


def _content(deployment: Deployment, structure: str) -> Content:
    hosted = deployment.hosted
    content = content_of(hosted, structure).and_also(stages=dict(deployment.example.stages))
    if hosted.processor_folder is None:
        return content
    try:
        return content.and_also(processor=processor_digest(hosted.processor_folder).hex())
    except (ServiceError, OSError):  # it takes no texts and no sound then
        return content.and_also(processor=None)
