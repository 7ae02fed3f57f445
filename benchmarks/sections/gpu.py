"""On a CUDA GPU: served against local eager there, and what copies beside passes and CUDA graphs are worth.

The baseline has its inputs on the GPU and leaves its values there; ours come and go over the network.
"""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial

import trocar
from benchmarks.measuring import Effort, images, ratio, timed
from benchmarks.numerics import NUMERICS, options_of
from benchmarks.report import Row, Table, row
from benchmarks.sections.serving import CASES, latency_rows, load_row
from benchmarks.served import served
from trocar._bench.local_passes import Local

NO_GPU = "no CUDA device"
_MODELS = ["resnet18=random:0", "resnet50=random:0"]
_WITH = "[engine]\ncuda_graphs = true\n"
_WITHOUT = "[engine]\npinned_bytes = 0\ncuda_graphs = false\n"
_SIDE, _THREADS, _CALLS = 224, 8, 32
_ROUNDS = 10
_UNTIL_HOT = 8


def run(effort: Effort) -> list[Table]:
    """Measure all rows; where there is no GPU, say so."""
    if not has_gpu():
        return [Table("On a GPU", [row("everything", None, reason=NO_GPU)])]
    return [
        _against_local(effort),
        Table("What is there for GPUs, against the same server without it", _gains(effort)),
    ]


def has_gpu() -> bool:
    """Whether torch finds a GPU."""
    import torch

    return torch.cuda.is_available()


def _against_local(effort: Effort) -> Table:
    with (
        served(_MODELS, "--device", "cuda:0", config=_WITH) as server,
        Local() as local,
        trocar.connect(server.address) as client,
    ):
        # The targets are those of a CPU.
        cases = [replace(case, targets=(1.0, 1.0, 1.0), p99_targets=()) for case in CASES]
        rows = [found for case in cases for found in latency_rows(client, local, case, effort, "cuda:0")]
        rows += [load_row(server, local, model, effort, "cuda:0") for model in ("resnet18", "resnet50")]
    return Table("Serving on a GPU", rows, NUMERICS, __doc__ or "")


def _gains(effort: Effort) -> list[Row]:
    rounds = effort.of(_ROUNDS)
    with (
        served(_MODELS, "--device", "cuda:0", config=_WITH) as new,
        served(_MODELS, "--device", "cuda:0", config=_WITHOUT) as old,
        trocar.connect(new.address) as ours,
        trocar.connect(old.address) as plain,
    ):
        found = [
            row(name, ratio(make(ours), make(plain), rounds), note="time; below 1 is faster")
            for name, make in _WAYS.items()
        ]
        seconds = timed(_WAYS["resnet50, `avgpool`, batch 32, 8 clients"](ours), rounds)
    speed = _CALLS * 32 / min(seconds)
    return [*found, row("resnet50, `avgpool`, batch 32, 8 clients", speed, unit="images/s"), _memory_row()]


def _memory_row() -> Row:
    import torch

    free, total = torch.cuda.mem_get_info()
    return row("GPU memory in use by everybody, when idle again", (total - free) / 2**20, unit="MiB")


def _one(model: str, tap: str, batch: int, client: trocar.Client) -> Callable[[], object]:
    call = partial(client.extract, model, images(batch, _SIDE), [tap], **options_of("exact"))
    for _ in range(_UNTIL_HOT):
        call()
    return call


def _many(model: str, tap: str, batch: int, client: trocar.Client) -> Callable[[], object]:
    """Return a variant that makes many calls, from several threads."""
    call = _one(model, tap, batch, client)

    def calls() -> object:
        with ThreadPoolExecutor(_THREADS) as pool:
            return list(pool.map(lambda _: call(), range(_CALLS)))

    return calls


_WAYS: dict[str, Callable[[trocar.Client], Callable[[], object]]] = {
    "resnet18, `layer4`, batch 1": partial(_one, "resnet18", "layer4", 1),
    "resnet50, `layer4`, batch 1": partial(_one, "resnet50", "layer4", 1),
    "resnet50, `layer1`, batch 32 (103 MB back)": partial(_one, "resnet50", "layer1", 32),
    "resnet50, `layer1`, batch 32, 8 clients": partial(_many, "resnet50", "layer1", 32),
    "resnet50, `avgpool`, batch 32, 8 clients": partial(_many, "resnet50", "avgpool", 32),
}
