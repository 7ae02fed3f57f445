"""Build worker: compiles variants in a process of its own.

    python -m trocar_server.engine.compiled.backends.build_worker

torch.export and torch.fx change torch while they run and take seconds, and a second thread that calls
torch slows every pass of the first. So the server builds in another process, which reads one job from its
standard input, pickled by the server itself, and writes one line of JSON.
"""

import json
import os
import pickle
import resource
import sys
import threading
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trocar_server import parent_process
from trocar_server.errors import first_line

if TYPE_CHECKING:  # it imports torch: seconds, and this process has to know its parent first
    from trocar_server.engine.compiled.backends.recipe import Recipe

_LIMIT_CPU_S = 600
"""CPU time of a build, in seconds."""
_NICENESS = 8
"""Above the server's: an eighth of a core that the server keeps busy, see Note: [Priority of a build]."""
_IDLE_S = 30.0
"""For which a build takes only what the server leaves."""


@dataclass(frozen=True)
class Job:
    """A build job.

    Attributes:
        spec: The `ModelSpec` of the model.
        data_dir: Folder of the weights.
        recipe: The values wanted of a pass.
        folder: Output folder; it exists.
        with_openvino: Whether to convert for OpenVINO.
    """

    spec: Any
    data_dir: Path
    recipe: "Recipe"
    folder: Path
    with_openvino: bool


@dataclass(frozen=True)
class Built:
    """The result of a build job.

    Attributes:
        pairs: Batch norms that can be folded.
        has_graph: Whether there are files for OpenVINO.
        problem: The reason why not, in one line.
        mixed_rows: The reason why calls may not share a pass, in one line; empty where rows are independent.
    """

    pairs: tuple[tuple[str, str], ...] = ()
    has_graph: bool = False
    problem: str = ""
    mixed_rows: str = "the pass was not examined"


def build(job: Job) -> Built:
    """Run a build job."""
    import torch

    from trocar_server.engine.compiled.backends.conversion import convert
    from trocar_server.engine.compiled.backends.folding import find_pairs
    from trocar_server.engine.compiled.backends.graph_tracing import why_rows_mix
    from trocar_server.models import load_model

    hosted = load_model(job.spec, torch.device("cpu"), job.data_dir)
    pairs = tuple(find_pairs(hosted.module))
    mixed = why_rows_mix(hosted.module, job.recipe)
    if not job.with_openvino:
        return Built(pairs, mixed_rows=mixed)
    try:
        convert(hosted.module, job.recipe, job.folder)
    except Exception as error:  # noqa: BLE001 - torch.export and OpenVINO raise anything
        return Built(pairs, problem=f"{type(error).__name__}: {first_line(error)}", mixed_rows=mixed)
    return Built(pairs, has_graph=True, mixed_rows=mixed)


def _limit_itself() -> None:
    """Take a low priority and one thread, see Note: [Priority of a build], and end after `_LIMIT_CPU_S`.

    Nobody else sees an endless build.
    """
    with suppress(OSError):
        os.nice(_NICENESS)
    if sys.platform == "linux":
        with suppress(OSError):
            os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))
            waiting = threading.Timer(_IDLE_S, _take_a_share)
            waiting.daemon = True
            waiting.start()
    _, most_s = resource.getrlimit(resource.RLIMIT_CPU)
    limit_s = _LIMIT_CPU_S if most_s == resource.RLIM_INFINITY else min(_LIMIT_CPU_S, most_s)
    resource.setrlimit(resource.RLIMIT_CPU, (limit_s, most_s))
    import torch

    torch.set_num_threads(1)


def _take_a_share() -> None:
    """Compete with the server, by niceness: every thread of this process."""
    for thread in Path("/proc/self/task").iterdir():
        with suppress(OSError):  # it has ended
            os.sched_setscheduler(int(thread.name), os.SCHED_OTHER, os.sched_param(0))


def main() -> None:
    """Run the job on standard input; the only argument is the id of the parent process."""
    parent_process.end_with(int(sys.argv[1]))  # while it has the priority of the server
    _limit_itself()
    # Unless this cannot be imported, OpenVINO's converter reports to Google Analytics and writes to ~/intel.
    sys.modules["openvino_telemetry"] = None  # type: ignore[assignment]
    job: Job = pickle.load(sys.stdin.buffer)
    output, sys.stdout = sys.stdout, sys.stderr  # keep prints of libraries out of the result
    built = build(job)
    json.dump(asdict(built), output)
    output.flush()  # at the exit Python flushes what is sys.stdout then


if __name__ == "__main__":
    main()
