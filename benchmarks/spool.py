"""Spool: a training step against alternatives, each in its own process: `make bench-spool`.

    python -m benchmarks.spool                          # the tables of docs/performance.md
    python -m benchmarks.spool resnet50 16 256 64       # a model, a batch, budgets in MiB
    python -m benchmarks.spool svd_chain 24 32          # a chain of matrix decompositions of that many sites

`plain` is a loop with the C library's default settings, as most programs run; `spool` is one as the guide
recommends it, with `limit_freed_memory`; `spool, default allocator` is one without. Time is the median of
the steps after the first two, each as a ratio to the plain step of its round; the ways take turns, round by
round, because the machine drifts. Processor time is user and system time of the process. Peak is the most
memory of the process over what it had before its first step, as the kernel counts it: with gradients, which
come with the step, but without the optimizer's state.
"""

import multiprocessing
import resource
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


@dataclass(frozen=True)
class Way:
    """Storage of saved tensors: `plain`, `tutorial`, `checkpoint`, or `spool` with a budget in MiB."""

    kind: str
    budget_mib: int = 0
    has_limit: bool = True
    """Whether a spool limits freed memory."""

    def __str__(self) -> str:
        budget = f", {self.budget_mib} MiB" if self.budget_mib else ""
        return self.kind + budget + ("" if self.has_limit else ", default allocator")


@dataclass(frozen=True)
class Step:
    """Measurements of one step, in seconds and bytes; bytes and files written are sums so far."""

    wall_s: float
    processor_s: float
    peak_bytes: int
    written_bytes: int
    file_count: int


@dataclass(frozen=True)
class Figures:
    """Measurements of one variant."""

    steps: list[Step]
    peak_bytes: int
    written_bytes: int = 0
    file_count: int = 0
    trace: list[tuple[float, int]] = field(default_factory=list)
    """Memory over a step: seconds, and bytes over those before the first step."""


def _serve(pipe: Connection, model_name: str, batch: int, way: Way, folder: str) -> None:
    """Run a step on request; reply with its measurements."""
    import torch

    if way.kind == "spool" and way.has_limit:
        from trocar_server.spool import limit_freed_memory

        limit_freed_memory()
    torch.manual_seed(0)
    model, forward = _svd_chain(batch) if model_name == "svd_chain" else _classifier(model_name, batch)
    if way.kind == "checkpoint":
        _checkpoint_blocks(model)
    before = _status("VmRSS") + sum(parameter.nbytes for parameter in model.parameters())  # SGD's state
    optimizer = _optimizer(model)
    context, written = _context(way, folder, model)
    while request := pipe.recv():
        Path("/proc/self/clear_refs").write_text("5")  # the peak counts from here
        with _traced(request == "trace", before) as trace:
            started, used = time.perf_counter(), _processor_s()
            optimizer.zero_grad()
            with context():
                loss = forward()
            loss.backward()
            optimizer.step()
            seconds = time.perf_counter() - started, _processor_s() - used
        del loss
        step = Step(*seconds, _status("VmHWM") - before, *written())
        pipe.send(trace if request == "trace" else step)


def _optimizer(model: Any) -> Any:
    """Return an optimizer that has its state already; the gradients that this takes are gone."""
    import torch

    optimizer = torch.optim.SGD(model.parameters(), lr=1e-4, momentum=0.9)
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    optimizer.zero_grad()
    return optimizer


def _processor_s() -> float:
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime


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
def _traced(is_wanted: bool, before: int) -> Iterator[list[tuple[float, int]]]:
    """Collect the process's memory over time, in seconds and bytes over those before."""
    result: list[tuple[float, int]] = []
    ended = threading.Event()
    started = time.perf_counter()

    def sample() -> None:
        while not ended.wait(_SAMPLE_S):
            result.append((time.perf_counter() - started, _status("VmRSS") - before))

    thread = threading.Thread(target=sample)
    if is_wanted:
        thread.start()
    yield result
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


def _status(field: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(f"{field}:"))


def measure(model: str, batch: int, ways: list[Way]) -> dict[Way, Figures]:
    """Run the variants in turn, round by round."""
    context = multiprocessing.get_context("spawn")
    result: dict[Way, list[Step]] = {way: [] for way in ways}
    pipes: dict[Way, Connection] = {}
    with tempfile.TemporaryDirectory(dir=Path.cwd()) as parent:
        for number, way in enumerate(ways):
            folder = Path(parent) / str(number)
            folder.mkdir()
            pipes[way], child = context.Pipe()
            arguments = (child, model, batch, way, str(folder))
            context.Process(target=_serve, args=arguments, daemon=True).start()
            child.close()
        for _ in range(_STEPS):
            for way, pipe in pipes.items():
                pipe.send("step")
                result[way].append(pipe.recv())  # EOFError when the process has failed
        traces = {}
        for way, pipe in pipes.items():
            pipe.send("trace")
            traces[way] = pipe.recv()
            pipe.send("")
            pipe.close()
    return {way: replace(_figures(steps), trace=traces[way]) for way, steps in result.items()}


def _figures(steps: list[Step]) -> Figures:
    warm = steps[_WARM_UP:]
    written = (steps[-1].written_bytes - steps[_WARM_UP - 1].written_bytes) // len(warm)
    return Figures(warm, max(step.peak_bytes for step in warm), written, steps[-1].file_count)


def print_table(model: str, batch: int, figures: dict[Way, Figures]) -> None:
    """Print a Markdown table."""
    plain = figures[Way("plain")]
    print(f"\n### {model}, batch {batch}\n")
    print(
        "| | time | processor time | peak, MB | saved | written, MB | files |\n|---|---|---|---|---|---|---|"
    )
    for way, result in figures.items():
        pairs = list(zip(result.steps, plain.steps, strict=True))
        wall = statistics.median(step.wall_s / base.wall_s for step, base in pairs)
        processor = statistics.median(step.processor_s / base.processor_s for step, base in pairs)
        saved = 1 - result.peak_bytes / plain.peak_bytes
        cells = (f"{wall:.2f}", f"{processor:.2f}", f"{result.peak_bytes / 1e6:,.0f}", f"{saved:.0%}")
        written = f"{result.written_bytes / 1e6:,.0f}"
        print(f"| {way} | {' | '.join(cells)} | {written} | {result.file_count} |", flush=True)


def plot(model: str, batch: int, figures: dict[Way, Figures], path: Path) -> None:
    """Draw memory over a step for each variant."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7.5, 4), layout="constrained")
    axes = figure.subplots()
    for way, result in figures.items():
        if result.trace:
            axes.plot(
                [t for t, _ in result.trace], [b / _MIB for _, b in result.trace], label=str(way), lw=1.2
            )
    axes.set_xlabel("seconds of a training step")
    axes.set_ylabel("MiB over the process before its first step")
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
        ways = [Way(kind) for kind in ("plain", "tutorial", "checkpoint")]
        ways += [Way("spool", mib) for mib in budgets]
        ways += [Way("spool", budgets[0], has_limit=False)]
        figures = measure(model, batch, ways)
        print_table(model, batch, figures)
        if model == "resnet50":
            plot(model, batch, figures, Path("spool-memory.png"))


if __name__ == "__main__":
    main()
