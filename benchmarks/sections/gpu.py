"""On a CUDA GPU: served against local eager there, and what copies beside passes and CUDA graphs are worth.

The baseline has its inputs on the GPU and leaves its values there; ours come and go over the network.
"""

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from functools import partial
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np

import trocar
from benchmarks.measuring import Effort, images, ratio, timed
from benchmarks.numerics import NUMERICS, options_of
from benchmarks.report import Row, Table, row
from benchmarks.sections.serving import CASES, Case, latency_rows, load_row
from benchmarks.served import served
from trocar._bench.local_passes import Local

NO_GPU = "no CUDA device"
_MODELS = ["resnet18=random:0", "resnet50=random:0"]
_MODEL = "resnet50"
_WITH = "[engine]\ncuda_graphs = true\n"
_WITHOUT = "[engine]\npinned_bytes = 0\ncuda_graphs = false\n"
_SIDE, _THREADS, _CALLS = 224, 8, 32
_ROUNDS, _SPOOL_ROUNDS = 10, 5
_SPOOLED = [("resnet152", 256), ("vit_b_16", 256)]
_STAYING = (0.0, 0.4, 0.8)
_SPOOL_BUDGET = "64GiB"
"""Of host memory: these rows are about copies, not about the disk."""
_UNTIL_HOT = 8
_STEERED = 16


def run(effort: Effort) -> Iterator[Table]:
    """Measure all rows, a table at a time; where there is no GPU, say so."""
    if not has_gpu():
        yield Table("On a GPU", [row("everything", None, reason=NO_GPU)])
        return
    yield Table("Looking inside and steering, against the same server without", _inside(effort))
    rounds = effort.of(_SPOOL_ROUNDS)
    spools = [
        spool_row(model, batch, "cuda", rounds, staying) for model, batch in _SPOOLED for staying in _STAYING
    ]
    yield Table("The spool in a training loop", spools)
    yield Table("What is there for GPUs, against the same server without it", _gains(effort))
    yield _against_local(effort)


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
        # The targets of the cases are those of a CPU.
        cases = [replace(case, targets=_targets(case), p99_targets=()) for case in CASES]
        # One model: each of its compiled passes is built in a process of its own, which takes seconds.
        cases = [case for case in cases if case.model == _MODEL]
        rows = [result for case in cases for result in latency_rows(client, local, case, effort, "cuda:0")]
        rows.append(load_row(server, local, _MODEL, Effort(is_quick=True), "cuda:0"))
    return Table("Serving on a GPU", rows, NUMERICS, __doc__ or "")


def _targets(case: Case) -> tuple[float, float, float]:
    is_one_image = (case.model, case.batch) == (_MODEL, 1)
    return (0.35, 0.35, 0.35) if is_one_image else (1.0, 1.0, 1.0)


def _gains(effort: Effort) -> list[Row]:
    rounds = effort.of(_ROUNDS)
    with (
        served(_MODELS, "--device", "cuda:0", config=_WITH) as new,
        served(_MODELS, "--device", "cuda:0", config=_WITHOUT) as old,
        trocar.connect(new.address) as ours,
        trocar.connect(old.address) as plain,
    ):
        result = [
            row(name, ratio(make(ours), make(plain), rounds), note="time; below 1 is faster")
            for name, make in _WAYS.items()
        ]
        seconds = timed(_WAYS["resnet50, `avgpool`, batch 32, 8 clients"](ours), rounds)
    speed = _CALLS * 32 / min(seconds)
    return [*result, row("resnet50, `avgpool`, batch 32, 8 clients", speed, unit="images/s"), _memory_row()]


def _inside(effort: Effort) -> list[Row]:
    with (
        served(_MODELS, "--device", "cuda:0", config=_WITH) as server,
        trocar.connect(server.address) as client,
    ):
        return inside_rows(client, "resnet50", images(32, _SIDE), effort.of(_ROUNDS))


def inside_rows(
    client: trocar.Client, model: str, batch: "np.ndarray[tuple[int, ...], np.dtype[np.float32]]", rounds: int
) -> list[Row]:
    """Return what the means of every module cost, and what a steering vector of each caller's own costs."""

    def tapped(selector: str, *stats: Any) -> Callable[[], object]:
        return partial(client.extract, model, batch, [trocar.tap(selector, stats=stats, values=False)])

    plain = tapped("/out", "mean")
    looking = {
        "means of every block": tapped("layer*.*", "mean"),
        "means of every module": tapped("**", "mean"),
        "mean, std, min and max of every module": tapped("**", "mean", "std", "min", "max"),
    }
    generator = np.random.default_rng(0)
    channels = client.extract(model, batch[:1], ["layer3"])["layer3"].shape[1]
    vectors = [generator.standard_normal(channels, np.float32) for _ in range(_STEERED)]
    own = [[trocar.edit("layer3", "steer", vector, alpha=0.1)] for vector in vectors]

    def callers(edits: list[list[trocar.Edit]]) -> Callable[[], object]:
        one = partial(client.extract, model, batch[:1], ["avgpool"])

        def calls() -> object:
            with ThreadPoolExecutor(_STEERED) as pool:
                return list(pool.map(lambda edit: one(edits=edit), edits))

        return calls

    steered, unsteered = callers(own), callers([[]] * _STEERED)
    for way in (plain, *looking.values(), steered, unsteered):
        for _ in range(_UNTIL_HOT):
            way()
    result = [
        row(f"{model}, {name}: speed", 1 / ratio(way, plain, rounds), 0.96, higher_is_better=True)
        for name, way in looking.items()
    ]
    time = ratio(steered, unsteered, rounds)
    note = f"{min(timed(unsteered, rounds)) * 1e3:.1f} ms without"
    return [*result, row(f"{model}, {_STEERED} callers with a steering vector each: time", time, 1.03, note)]


def spool_row(model: str, batch: int, device: str, rounds: int, staying: float = 0.0) -> Row:
    """Return the time of a training step with a spool against one without, and the peaks of device memory.

    Args:
        model: Of torchvision.
        batch: Its rows.
        device: The device.
        rounds: Measured steps.
        staying: The share of the peak that may stay on the device.
    """
    import torch
    from torch.nn.functional import cross_entropy
    from torchvision.models import get_model

    from trocar_server.spool import Spool

    net = get_model(model, weights=None).train().to(device)
    inputs = torch.randn(batch, 3, _SIDE, _SIDE, device=device)
    labels = torch.randint(0, 1000, (batch,), device=device)

    def step(context: AbstractContextManager[object]) -> int:
        net.zero_grad()
        before = _reset_peak(device)
        with context:
            loss = cross_entropy(net(inputs), labels)
        loss.backward()
        return _peak(device) - before

    plain = partial(step, nullcontext())
    peak = plain()
    with TemporaryDirectory() as folder:
        spool = Spool(folder, _SPOOL_BUDGET, keep=[net], device_bytes=int(peak * staying))
        time = ratio(partial(step, spool), plain, rounds)
        before = spool.report().offloaded_bytes
        spooled = step(spool)
        gone = spool.report().offloaded_bytes - before
    note = (
        f"{min(timed(plain, rounds)) * 1e3:.0f} ms without, peak of activations {spooled / 2**20:,.0f} of "
        f"{peak / 2**20:,.0f} MiB; {gone / 2**20:,.0f} MiB of each step went to the host"
    )
    return row(f"{model}, batch {batch}, {staying:.0%} may stay, a step: time", time, 1.02, note)


def _reset_peak(device: str) -> int:
    import torch

    if device == "cpu":
        return 0  # memory of the host is measured by benchmarks.spool
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    return torch.cuda.memory_allocated()


def _peak(device: str) -> int:
    import torch

    if device == "cpu":
        return 0
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated()


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
