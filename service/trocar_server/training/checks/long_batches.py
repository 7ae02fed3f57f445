"""Refusal of batches whose forward pass would take too long, by the pace of the trainer's model."""

from contextlib import suppress

from trocar_server.engine.engine import Engine
from trocar_server.engine.execute.arguments import signature_of_called
from trocar_server.engine.host.pace_checks import is_usual, refuse_long
from trocar_server.surgery import PassGuard
from trocar_server.training.losses.batch import Batch


def refuse_long_batch(engine: Engine, model_id: str, batch: Batch, guard: PassGuard) -> None:
    """Refuse a batch of a trainer whose forward pass would take too long. Owner thread only.

    The backward pass comes on top. A batch of a model that is not loaded any more is not looked at.

    Args:
        engine: Has the model.
        model_id: The trainer's model.
        batch: Its arguments are on the device.
        guard: Has the deadline.

    Raises:
        ServiceError: `PASS_TOO_LONG`.
        PassAborted: The guard stopped a measurement.
    """
    deployment = engine.deployments.get(model_id)
    if deployment is None:
        return
    signature = signature_of_called(deployment.hosted, batch.args, batch.kwargs)
    if is_usual(deployment, signature):
        return
    work = 0
    with suppress(Exception):  # the trainer may take what its model does not, or read its data
        work = deployment.record(signature, guard, may_use_data=False).work
    refuse_long(deployment, signature, work, guard, engine.limits.max_pass_s)
