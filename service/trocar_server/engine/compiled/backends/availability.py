"""Availability of numerics: those that a server can run faster than eager, and the reason for each other."""

from collections.abc import Mapping

import torch

from trocar_server.engine.compiled.backends.openvino_runner import is_installed
from trocar_server.engine.request.numerics import Numerics

NO_OPENVINO = (
    "OpenVINO is not installed (pip install 'trocar[openvino]'); PyTorch is tried instead and used if it "
    "is faster, "
    "which is rare on a CPU"
)


def available_numerics(
    device: torch.device | None = None, *, compiles: bool = True, uses_openvino: bool = True
) -> Mapping[Numerics, str | None]:
    """Return, for each numerics, None, or the reason why passes that request it are likely to be exact.

        available_numerics()[Numerics.BF16]   # None where OpenVINO is installed

    Only a trial shows whether a model keeps a promise; `ExecutionReport.reason` reports it for a call.

    Args:
        device: Of the models; the CPU when None.
        compiles: Whether the operator allows compiled variants, `[engine] compile_after`.
        uses_openvino: Whether the operator allows OpenVINO, `[engine] openvino`.
    """
    reason = _reason(device or torch.device("cpu"), compiles=compiles, uses_openvino=uses_openvino)
    return {Numerics.EXACT: None, Numerics.FAST: reason, Numerics.BF16: reason}


def _reason(device: torch.device, *, compiles: bool, uses_openvino: bool) -> str | None:
    if not compiles:
        return "this server does not compile passes: its operator set compile_after = 0"
    if device.type != "cpu":
        return None
    if not uses_openvino:
        return "this server does not use OpenVINO: its operator set openvino = false"
    return None if is_installed() else NO_OPENVINO
