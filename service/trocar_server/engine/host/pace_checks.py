"""Refusal of passes that would take too long, by the model's pace; measured where it is not known.

The measured passes are on made data, of sizes between those of the model's example and those of the call.
"""

import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace
from functools import partial

import torch

from trocar_server.engine.host.deployment import Deployment
from trocar_server.engine.host.recordings import made_arguments
from trocar_server.engine.request.plan import Signature, TensorSignature
from trocar_server.engine.resolve.pass_work import check_seconds, element_count
from trocar_server.engine.schedule.lease import Replica
from trocar_server.engine.schedule.pace import TELLING_S
from trocar_server.surgery import PassGuard

_STEPS = 8
_TRIES = 3
_USUAL_TIMES = 4
_MOST_S = 1.0
"""No pass that may take longer than this, by the one before it, is made to measure."""


def is_usual(deployment: Deployment, signature: Signature) -> bool:
    """Whether inputs are hardly larger than the model's example, so that their pass needs no look."""
    return element_count(signature) <= _USUAL_TIMES * element_count(deployment.example_signature)


def refuse_long(
    deployment: Deployment, signature: Signature, work: int, guard: PassGuard, max_pass_s: float
) -> None:
    """Refuse a pass that would take too long. Owner thread only.

    Args:
        deployment: The model.
        signature: Of the inputs.
        work: Multiply-adds of the pass, at least; 0 where they are not known.
        guard: Has the deadline, and aborts a measurement.
        max_pass_s: The operator's limit.

    Raises:
        ServiceError: `PASS_TOO_LONG`.
        PassAborted: The guard stopped a measurement.
    """
    pace, left_s = deployment.pool.pace, guard.left_s
    if not pace.may_exceed(work, max_pass_s if left_s is None else min(left_s, max_pass_s)):
        return
    if not pace.tells(work):
        measure_pace(deployment, signature, work, guard)
    check_seconds(pace.least_s(work), work, max_pass_s, guard.left_s)


def measure_pace(deployment: Deployment, signature: Signature, work: int, guard: PassGuard) -> None:
    """Run passes of growing sizes until one tells how long a call's pass takes; see `Pace`.

    Args:
        deployment: The model.
        signature: Of the call's inputs.
        work: Multiply-adds of the call's pass.
        guard: Aborts it.

    Raises:
        PassAborted: The guard stopped it.
    """
    pace, pristine = deployment.pool.pace, deployment.hosted.pristine
    replica = Replica(pristine, module=pristine.apart())
    before = (0, 0.0)
    for near in _between(deployment.example_signature, signature):
        if pace.tells(work):
            return
        with suppress(Exception):  # a size that the model does not take
            known = deployment.record(near, guard, may_use_data=False).work
            expected_s = before[1] * known / before[0] if before[0] else 0.0
            if known >= work or expected_s > _MOST_S:
                return
            for _ in range(_TRIES):
                seconds = replica.run(partial(_timed, deployment, near, guard))
                pace.observe(known, seconds)
                before = known, seconds
                if seconds < TELLING_S:
                    break


def _timed(deployment: Deployment, signature: Signature, guard: PassGuard, module: torch.nn.Module) -> float:
    """Return the seconds of a pass on made data."""
    hosted, device = deployment.hosted, deployment.hosted.device
    args, keywords = made_arguments(hosted, signature, device, 1)
    guard.check()
    with guard.watching(module), torch.no_grad():
        started = time.perf_counter()
        module(*args, **keywords)
        if device.type == "cuda":
            torch.cuda.synchronize(device)
    return time.perf_counter() - started


def _between(example: Signature, wanted: Signature) -> Iterator[Signature]:
    """Yield signatures from one towards another: each size grows by the same factor at each step.

    None where they are not alike.
    """
    ranks = [[list(map(len, entry.shapes)) for entry in signature] for signature in (example, wanted)]
    if ranks[0] == ranks[1]:
        for step in range(_STEPS):
            yield tuple(_grown(a, b, step / _STEPS) for a, b in zip(example, wanted, strict=True))


def _grown(example: TensorSignature, wanted: TensorSignature, share: float) -> TensorSignature:
    shapes = zip(example.shapes, wanted.shapes, strict=True)
    return replace(
        wanted, shapes=tuple(tuple(map(lambda a, b: _size(a, b, share), *pair)) for pair in shapes)
    )


def _size(small: int, large: int, share: float) -> int:
    return large if small == large or not small * large else round(small ** (1 - share) * large**share)
