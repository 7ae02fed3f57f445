"""Builds compiled forms in a process of its own: `python -m trocar_server.engines.worker`.

torch.export and torch.fx change torch while they work and take seconds, and a second thread that calls
torch slows every pass of the first: so the server asks another process. It reads one job from its
standard input, pickled by the server itself, and writes one line of JSON.
"""

import ctypes
import json
import os
import pickle
import signal
import sys
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from trocar_server.engines.recipe import Recipe

_PR_SET_PDEATHSIG = 1
"""Of <linux/prctl.h>."""


@dataclass(frozen=True)
class Job:
    """What to build.

    Attributes:
        spec: The `ModelSpec` of the model.
        data_dir: Where weights are kept.
        recipe: What is wanted of a pass.
        folder: Where files go; it exists.
        with_openvino: Whether to convert for OpenVINO.
    """

    spec: Any
    data_dir: Path
    recipe: Recipe
    folder: Path
    with_openvino: bool


@dataclass(frozen=True)
class Built:
    """What became of a job.

    Attributes:
        pairs: What can be folded.
        has_graph: Whether there are files for OpenVINO.
        problem: Why not, in one line.
    """

    pairs: tuple[tuple[str, str], ...] = ()
    has_graph: bool = False
    problem: str = ""


def build(job: Job) -> Built:
    """Build what can be built."""
    import torch

    from trocar_server.engines.conversion import convert
    from trocar_server.engines.folding import find_pairs
    from trocar_server.models import load_model

    hosted = load_model(job.spec, torch.device("cpu"), job.data_dir)
    pairs = tuple(find_pairs(hosted.module))
    if not job.with_openvino:
        return Built(pairs)
    try:
        convert(hosted.module, job.recipe, job.folder)
    except Exception as error:  # noqa: BLE001 - of torch.export and OpenVINO, whatever the model does
        return Built(pairs, problem=f"{type(error).__name__}: {str(error).strip().splitlines()[:1]}"[:300])
    return Built(pairs, has_graph=True)


def _dies_with(parent: int) -> bool:
    """Let the kernel end this process when the one that asked dies, however it does; False if it is dead.

    On Linux; elsewhere a build whose server was killed goes on to its end.
    """
    with suppress(AttributeError):
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    return os.getppid() == parent


def main() -> None:
    """Do the job on standard input; the only argument is the process that asks for it."""
    if not _dies_with(int(sys.argv[1])):
        return
    # Unless this cannot be imported, OpenVINO's converter reports to Google Analytics and writes to ~/intel.
    sys.modules["openvino_telemetry"] = None  # type: ignore[assignment]
    job: Job = pickle.load(sys.stdin.buffer)
    output, sys.stdout = sys.stdout, sys.stderr  # what libraries print is not the answer
    built = build(job)
    json.dump({"pairs": built.pairs, "has_graph": built.has_graph, "problem": built.problem}, output)


if __name__ == "__main__":
    main()
