"""Work of a pass: its multiply-adds until it stops, at least, and the refusal of one that takes too long."""

import math

from trocar_api.reasons import ErrorReason
from trocar_server.engine.request.plan import Signature
from trocar_server.engine.resolve.planner import Resolved
from trocar_server.errors import ServiceError
from trocar_server.surgery import Recording, Target


def pass_work(resolved: Resolved, recording: Recording, start: Target | None = None) -> int:
    """Return the multiply-adds of the forward pass of a request, at least.

    It stops at the last value that is wanted. A backward pass, edits and reductions come on top.

    Args:
        resolved: The request.
        recording: A pass on inputs of its sizes.
        start: Where the pass begins; at the model's inputs when None.
    """
    scored = (target for target, _ in resolved.surgery.scored)
    wanted = (*(entry.target for entry in resolved.targets), *scored)
    of_pass = [target for target in wanted if target.parameter is None and target.kind == "module"]
    last = max((_until(target, recording) for target in of_pass), default=0)
    return max(0, last - (0 if start is None else _until(start, recording)))


def _until(target: Target, recording: Recording) -> int:
    call = recording.modules[target.path].calls[target.call]
    return call.work_before if target.port.startswith("in") else call.work


def made_pass_work(signature: Signature, known: Signature, recording: Recording) -> int:
    """Return about how many multiply-adds a pass has, at least, from a pass on another signature.

    In proportion to the elements of the inputs: too low where they grow with their square.
    """
    return recording.work * element_count(signature) // max(1, element_count(known))


def element_count(signature: Signature) -> int:
    """Return the elements of all inputs."""
    return sum(math.prod(shape) for entry in signature for shape in entry.shapes)


def check_seconds(expected_s: float, work: int, max_pass_s: float, left_s: float | None) -> None:
    """Refuse a pass that would take too long, before anything is computed.

    Args:
        expected_s: Seconds that it takes at least.
        work: Its multiply-adds.
        max_pass_s: The operator's limit.
        left_s: Seconds to the call's deadline; None without one.

    Raises:
        ServiceError: `PASS_TOO_LONG`.
    """
    limit_s, what = max_pass_s, "the limit `max_pass_s`"
    if left_s is not None and left_s < max_pass_s:
        limit_s, what = max(0.0, left_s), "the time to the call's deadline"
    if expected_s > limit_s:
        raise ServiceError(
            ErrorReason.PASS_TOO_LONG,
            f"the pass would take {expected_s:.3g} s or more, for {work:,} multiply-adds at the pace of this "
            f"model's best passes here, and {what} is {limit_s:.3g} s. Nothing was computed. Send fewer or "
            "smaller inputs, or ask for earlier values",
            expected_s=f"{expected_s:.6g}",
            limit_s=f"{limit_s:.6g}",
            work=str(work),
        )
