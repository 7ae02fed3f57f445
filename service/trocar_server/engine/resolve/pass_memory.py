"""Memory estimate of a pass, before it runs.

An estimate from the recorded pass: the values alive at the same time until the pass stops, the inputs, the
values kept for the reply, and the buffers of reductions. Workspaces of kernels come on top. For a model that
reads its data only the kept values and the inputs are known.
"""

import math
from collections.abc import Sequence

import torch

from trocar_api.reasons import ErrorReason
from trocar_server.cgroup_memory import memory_limit_bytes
from trocar_server.engine.request.plan import Signature
from trocar_server.engine.resolve.tap_outputs import TapTarget
from trocar_server.errors import ServiceError
from trocar_server.surgery import Recording, Target, call_order
from trocar_server.tensors.stats import Statistic
from trocar_server.tensors.stats.groups import BLOCK_ELEMENTS

_SHARE = 0.75
_BLOCK_COPIES = 5
"""Copies of one block in float64 that statistics and the error of a cast need at once; 4.75 to 5 measured."""
_MATRIX_COPIES = 3
"""A covariance as accumulated, as the result, and as sent."""


def pass_bytes(targets: Sequence[TapTarget], recording: Recording) -> int:
    """Return the peak bytes of a pass and its reductions, without inputs and weights."""
    of_pass = [entry.target for entry in targets if entry.target.parameter is None]
    peak = max((_peak(target, recording) for target in of_pass), default=0)
    kept = sum(entry.leaf.byte_count for entry in targets)
    # Kept values outlive their use in the pass, and reductions start after the pass.
    return max(kept + peak, reducing_bytes(targets))


def reducing_bytes(targets: Sequence[TapTarget]) -> int:
    """Return the peak bytes after the pass: the kept values, and their reductions.

    The reductions of all values stay in memory until the last is done.
    """
    kept = sum(entry.leaf.byte_count for entry in targets)
    made = sum(entry.byte_count for entry in targets if _is_made(entry))
    return kept + made + max((_working(entry) for entry in targets), default=0)


def graph_bytes(scored: Sequence[Target], recording: Recording) -> int:
    """Return about how many bytes a pass with gradients needs, where there is no meta pass.

    The outputs of leaf modules until the objective is computed, and the gradients of two values.
    """
    end = max((call_order(target, recording) for target in scored), default=0)
    inner = {path.rpartition(".")[0] for path in recording.modules if path}
    outputs = [
        sum(leaf.byte_count for leaf in call.outputs)
        for path, record in recording.modules.items()
        if path not in inner
        for call in record.calls
        if call.ended <= end
    ]
    return sum(outputs) + 2 * max(outputs, default=0)


def made_pass_bytes(signature: Signature, known: Signature, recording: Recording) -> int:
    """Return about how many bytes a pass on one signature needs, from a pass on another signature.

    In proportion to the elements of the inputs: too low where a value grows with their
    square, as attention's scores do.
    """
    sizes = [
        sum(math.prod(shape) for entry in entries for shape in entry.shapes) for entries in (signature, known)
    ]
    return input_bytes(signature) + recording.peak_bytes * sizes[0] // max(1, sizes[1])


def input_bytes(signature: Signature) -> int:
    """Return the bytes of a pass's inputs on the device."""
    return sum(math.prod(shape) * entry.dtype.itemsize for entry in signature for shape in entry.shapes)


def check_memory(needed: int, limit: int) -> None:
    """Refuse a pass that needs too much.

    Raises:
        ServiceError: `PASS_TOO_LARGE`.
    """
    if needed > limit:
        raise ServiceError(
            ErrorReason.PASS_TOO_LARGE,
            f"the pass would need about {needed:,} bytes of memory, the limit is {limit:,}. Nothing was "
            "computed. Send a smaller batch, or ask for fewer or earlier taps",
            byte_count=str(needed),
            limit=str(limit),
        )


def memory_limit(configured: int, device: torch.device) -> int:
    """Return the most bytes that one pass may need.

    Where 0 is configured, three quarters of the device's memory; on a CPU, of what this process may use.
    """
    if configured:
        return configured
    if device.type == "cuda":
        return int(torch.cuda.get_device_properties(device).total_memory * _SHARE)
    return int(memory_limit_bytes() * _SHARE)


def _peak(target: Target, recording: Recording) -> int:
    if target.kind != "module":  # no order relative to modules: as if the pass ran to its end
        return recording.peak_bytes
    call = recording.modules[target.path].calls[target.call]
    return call.peak_bytes_before if target.port.startswith("in") else call.peak_bytes


def _is_made(entry: TapTarget) -> bool:
    """Whether the sent value differs from the collected one."""
    return bool(entry.tap.reductions or entry.tap.cast)


def _working(entry: TapTarget) -> int:
    """Return the bytes needed only while one value is reduced, cast and measured."""
    reducing = entry.reduced.extra_bytes if entry.tap.reductions else 0
    if not (entry.tap.statistics or entry.tap.cast):
        return reducing
    blocks = min(entry.reduced.value.numel(), BLOCK_ELEMENTS) * _BLOCK_COPIES * torch.float64.itemsize
    has_matrix = Statistic.COVARIANCE in entry.tap.statistics
    matrices = entry.outputs[-1].byte_count * _MATRIX_COPIES if has_matrix else 0
    return reducing + blocks + matrices
