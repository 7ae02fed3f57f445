"""Spool: a training step against alternatives, each in its own process: `make bench-spool`.

    python -m benchmarks.spool                          # the table of docs/performance.md
    python -m benchmarks.spool resnet50 16 256 64       # a model, a batch, budgets in MiB
    python -m benchmarks.spool svd_chain 24 32          # a chain of matrix decompositions of that many sites

Time is the median of the steps after the first two, as a ratio to a plain step; the ways take turns, round by
round, because the machine drifts. Peak is the most memory of the process over the model with the gradients of
the step before, which go at the begin of a step, as the kernel counts it, with an allocator that returns what
is freed and takes huge pages. Times wander by 10 to 20 %.
"""

import ctypes
import multiprocessing
import os
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

_STEPS = 7
_WARM_UP = 2
_MIB = 1 << 20
_SAMPLE_S = 0.01
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3


@dataclass(frozen=True)
class Way:
    """Storage of saved tensors: `plain`, `tutorial`, `checkpoint`, or `spool` with a budget in MiB.

    `default` is plain with glibc's own settings, as most programs run.
    """

    kind: str
    budget_mib: int = 0

    def __str__(self) -> str:
        return f"{self.kind}, {self.budget_mib} MiB" if self.budget_mib else self.kind


@dataclass(frozen=True)
class Figures:
    """Measurements of one variant."""

    seconds: list[float]
    peak_bytes: int
    written_bytes: int = 0
    file_count: int = 0
    trace: list[tuple[float, int]] = field(default_factory=list)
    """Memory over a step: seconds, and bytes over the model with its gradients."""


def _serve(pipe: Connection, model_name: str, batch: int, way: Way, folder: str) -> None:
    """Run a step on request; reply with its seconds, its peak, and the bytes written."""
    if way.kind != "default":
        libc = ctypes.CDLL(None)
        libc.mallopt(_M_MMAP_THRESHOLD, 1 << 20)
        libc.mallopt(_M_TRIM_THRESHOLD, 1 << 20)
    import torch

    torch.manual_seed(0)
    model, forward = _svd_chain(batch) if model_name == "svd_chain" else _classifier(model_name, batch)
    if way.kind == "checkpoint":
        _checkpoint_blocks(model)
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    context, written = _context(way, folder, model)
    while request := pipe.recv():
        with _traced(request == "trace") as trace, _peak() as peak:
            model.zero_grad()
            started = time.perf_counter()
            with context():
                loss = forward()
            loss.backward()
            seconds = time.perf_counter() - started
        del loss
        pipe.send(trace if request == "trace" else (seconds, peak[0], *written()))


def _classifier(name: str, batch: int) -> tuple[Any, Callable[[], Any]]:
    import torch
    from torch.nn.functional import cross_entropy
    from torchvision.models import get_model

    model = get_model(name, weights=None).train()
    images, labels = torch.randn(batch, 3, 224, 224), torch.randint(0, 1000, (batch,))
    return model, lambda: cross_entropy(model(images), labels)


def _svd_chain(count: int) -> tuple[Any, Callable[[], Any]]:
    """Return the sites of a tensor network, and the norm of their remainder after decompositions."""
    from torch import nn

    from tests.support.spool.spool_networks import sites, svd_chain

    model = nn.ParameterList([nn.Parameter(site) for site in sites(count, 384)])
    return model, lambda: svd_chain(list(model))


@contextmanager
def _traced(is_wanted: bool) -> Iterator[list[tuple[float, int]]]:
    """Collect the process's memory over time, in seconds and bytes over that at the begin."""
    found: list[tuple[float, int]] = []
    ended = threading.Event()
    started, before = time.perf_counter(), _status("VmRSS")

    def sample() -> None:
        while not ended.wait(_SAMPLE_S):
            found.append((time.perf_counter() - started, _status("VmRSS") - before))

    thread = threading.Thread(target=sample)
    if is_wanted:
        thread.start()
    yield found
    ended.set()
    if is_wanted:
        thread.join()


def _context(way: Way, folder: str, model: Any) -> tuple[Callable[[], Any], Callable[[], tuple[int, int]]]:
    """Return the context of a forward pass, and a function for the bytes and files written so far."""
    import torch

    if way.kind == "spool":
        from trocar_server.spool import Spool

        spool = Spool(folder, way.budget_mib * _MIB, keep=[model])
        return lambda: spool, lambda: (spool.report().written_bytes, spool.report().file_count)
    if way.kind == "tutorial":
        counts = [0, 0]

        class OnDisk:
            def __init__(self, tensor: torch.Tensor) -> None:
                self.path = Path(folder) / f"{counts[1]}.pt"
                counts[0] += tensor.numel() * tensor.element_size()
                counts[1] += 1
                torch.save(tensor, self.path)

            def __del__(self) -> None:
                self.path.unlink(missing_ok=True)

        def pack(tensor: torch.Tensor) -> Any:
            return tensor if tensor.numel() < 1000 else OnDisk(tensor)

        def unpack(saved: Any) -> torch.Tensor:
            return saved if isinstance(saved, torch.Tensor) else torch.load(saved.path, weights_only=True)

        hooks = torch.autograd.graph.saved_tensors_hooks
        return lambda: hooks(pack, unpack), lambda: (counts[0], counts[1])
    return nullcontext, lambda: (0, 0)


def _checkpoint_blocks(model: Any) -> None:
    """Recompute every block of the model in the backward pass."""
    from torch.utils.checkpoint import checkpoint

    blocks = ("BasicBlock", "Bottleneck", "EncoderBlock", "SwinTransformerBlock", "_DenseLayer")
    for module in model.modules():
        if type(module).__name__ in blocks:
            forward = module.forward

            def again(*args: Any, forward: Any = forward) -> Any:
                args = tuple(list(a) if isinstance(a, list) else a for a in args)  # densenet's grow later
                return checkpoint(forward, *args, use_reentrant=False)

            module.forward = again


@contextmanager
def _peak() -> Iterator[list[int]]:
    """Yield the list that gets the peak memory above the present one, in bytes, as the kernel counts it."""
    Path("/proc/self/clear_refs").write_text("5")  # the peak counts from here
    before, found = _status("VmRSS"), [0]
    yield found
    found[0] = _status("VmHWM") - before


def _status(field: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(f"{field}:"))


def measure(model: str, batch: int, ways: list[Way]) -> dict[Way, Figures]:
    """Run the variants in turn, round by round."""
    context = multiprocessing.get_context("spawn")
    found: dict[Way, list[tuple[float, int, int, int]]] = {way: [] for way in ways}
    pipes: dict[Way, Connection] = {}
    with tempfile.TemporaryDirectory(dir=Path.cwd()) as parent:
        for number, way in enumerate(ways):
            folder = Path(parent) / str(number)
            folder.mkdir()
            pipes[way], child = context.Pipe()
            # Of the process that starts now.
            os.environ["GLIBC_TUNABLES"] = "" if way.kind == "default" else "glibc.malloc.hugetlb=1"
            arguments = (child, model, batch, way, str(folder))
            context.Process(target=_serve, args=arguments, daemon=True).start()
            child.close()
        for _ in range(_STEPS):
            for way, pipe in pipes.items():
                pipe.send("step")
                found[way].append(pipe.recv())  # EOFError when the process has failed
        traces = {}
        for way, pipe in pipes.items():
            pipe.send("trace")
            traces[way] = pipe.recv()
            pipe.send("")
            pipe.close()
    return {way: replace(_figures(steps), trace=traces[way]) for way, steps in found.items()}


def _figures(steps: list[tuple[float, int, int, int]]) -> Figures:
    warm = steps[_WARM_UP:]
    written = (steps[-1][2] - steps[_WARM_UP - 1][2]) // len(warm)
    return Figures([s for s, *_ in warm], max(peak for _, peak, *_ in warm), written, steps[-1][3])


def print_table(model: str, batch: int, figures: dict[Way, Figures]) -> None:
    """Print a Markdown table."""
    plain = statistics.median(figures[Way("plain")].seconds)
    print(
        f"\n### {model}, batch {batch}\n\n| | time | peak, MiB | written, MB | files |\n|---|---|---|---|---|"
    )
    for way, found in figures.items():
        ratio = statistics.median(found.seconds) / plain
        peak, written = found.peak_bytes / _MIB, found.written_bytes / 1e6
        print(f"| {way} | {ratio:.2f} | {peak:,.0f} | {written:,.0f} | {found.file_count} |", flush=True)


def plot(model: str, batch: int, figures: dict[Way, Figures], path: Path) -> None:
    """Draw memory over a step for each variant."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7.5, 4), layout="constrained")
    axes = figure.subplots()
    for way, found in figures.items():
        if found.trace:
            axes.plot([t for t, _ in found.trace], [b / _MIB for _, b in found.trace], label=str(way), lw=1.2)
    axes.set_xlabel("seconds of a training step")
    axes.set_ylabel("MiB over the model with its gradients")
    axes.set_title(f"{model}, batch {batch}")
    axes.legend()
    figure.savefig(path, dpi=110)


def main() -> None:
    """Measure the variants named on the command line, or the table."""
    if len(sys.argv) > 2:
        cases = [(sys.argv[1], int(sys.argv[2]), [int(mib) for mib in sys.argv[3:]] or [256, 64])]
    else:
        cases = [("resnet50", 16, [256, 64])]
        cases += [(name, 16, [256]) for name in ("vit_b_16", "swin_t", "densenet121")]
        cases += [("resnet18", 64, [256]), ("svd_chain", 24, [32])]
    for model, batch, budgets in cases:
        ways = [Way(kind) for kind in ("plain", "default", "tutorial", "checkpoint")]
        ways += [Way("spool", mib) for mib in budgets]
        figures = measure(model, batch, ways)
        print_table(model, batch, figures)
        if model == "resnet50":
            plot(model, batch, figures, Path("spool-memory.png"))


if __name__ == "__main__":
    main()
