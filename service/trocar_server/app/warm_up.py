"""Warm-up: the server runs a first pass of each model once it accepts clients.

torch chooses its kernels and allocates its memory at the first pass: 0.1 s more for resnet18. A client that
calls earlier runs that first pass itself.
"""

import numpy as np
import structlog
import torch

from trocar_server.engine.compiled.variant import example_plan
from trocar_server.engine.engine import Engine
from trocar_server.engine.host.deployment import Deployment
from trocar_server.engine.request.plan import Payload, Payloads, Plan
from trocar_server.storage.tensor_bytes import bytes_of

_log = structlog.get_logger("trocar")


async def warm_up(engine: Engine) -> None:
    """Run each loaded model once on its example input, in turn; failures are ignored.

    Detection models, which take lists, are skipped.
    """
    for entry in engine.catalogue.entries():
        if entry.hosted is None or entry.hosted.takes_list:
            continue
        try:
            plan, payloads = _example(engine.deployments[entry.spec.model_id])
            checked = await engine.checks.check(plan)
            await engine.extract(await engine.preparation.prepare(checked, payloads))
        except Exception as error:  # noqa: BLE001 - a model that returns no tensor, or is unloaded meanwhile
            _log.debug("not warmed up", model_id=entry.spec.model_id, problem=str(error))


def _example(deployment: Deployment) -> tuple[Plan, Payloads]:
    tensors = [value for value in deployment.hosted.example_inputs() if isinstance(value, torch.Tensor)]
    return example_plan(deployment, ["/out"]), Payloads([_bytes(tensor) for tensor in tensors])


def _bytes(tensor: torch.Tensor) -> Payload:
    payload: Payload = bytes_of(tensor.cpu()).numpy().astype(np.uint8)
    return payload
