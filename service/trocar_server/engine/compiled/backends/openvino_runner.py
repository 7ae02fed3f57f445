"""OpenVINO runner: passes on a CPU. Compiling and running call no torch operator."""

import math
from collections.abc import Collection, Mapping, Sequence
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import torch

from trocar_server.engine.compiled.backends.conversion import GRAPH_FILE
from trocar_server.engine.compiled.backends.recipe import Recipe
from trocar_server.engine.execute.executor import NotFiniteError
from trocar_server.engine.request.numerics import Numerics

_PRECISIONS = {Numerics.FAST: "f32", Numerics.BF16: "bf16"}


def is_installed() -> bool:
    """Whether OpenVINO is installed; it has no wheels for some platforms."""
    return find_spec("openvino") is not None


class OpenVinoRunner:
    """A compiled pass.

    Args:
        folder: Output folder of `conversion.convert`.
        recipe: The recipe that was converted.
        numerics: `FAST` or `BF16`.
        thread_count: Threads of one pass; None for OpenVINO's choice.
    """

    engine = "openvino"

    def __init__(self, folder: Path, recipe: Recipe, numerics: Numerics, thread_count: int | None) -> None:
        self.numerics = numerics
        self._names = recipe.names
        settings: dict[str, Any] = {
            "INFERENCE_PRECISION_HINT": _PRECISIONS[numerics],
            "PERFORMANCE_HINT": "LATENCY",
        }
        if thread_count:
            settings["INFERENCE_NUM_THREADS"] = thread_count
        compiled = _core().compile_model(folder / GRAPH_FILE, "CPU", settings)
        self._request = compiled.create_infer_request()

    def run(
        self, arguments: Sequence[torch.Tensor], lent: Collection[str] = ()
    ) -> Mapping[str, torch.Tensor]:
        """Run one pass; the values are the caller's own.

        Raises:
            IndexError: An index is outside of its table; see Note: [Indices outside of a table].
            NotFiniteError: A number inside the pass is not finite.
        """
        inputs = [argument.contiguous().numpy() for argument in arguments]
        if not all(map(_fits, inputs)):
            raise IndexError("a whole number needs more than 32 bits")
        result = self._request.infer(inputs, share_inputs=True, share_outputs=True)
        if len(result) > len(self._names) and (doubt := float(result[len(self._names)])):
            raise NotFiniteError if math.isnan(doubt) else IndexError("an index is out of range")
        # The request's output memory is overwritten by its next pass.
        values = [torch.from_numpy(result[index]).clone() for index in range(len(self._names))]
        return dict(zip(self._names, values, strict=True))


def _fits(values: np.ndarray[Any, Any]) -> bool:
    """Whether whole numbers stay what they are: OpenVINO (2026.4) keeps 32 of 64 bits on a CPU."""
    return values.dtype != np.int64 or bool((values == values.astype(np.int32)).all())


@cache
def _core() -> Any:
    import openvino

    return openvino.Core()
