"""Memory of a bulk extraction with Ray, beside a plain script of Ray Data on the same arrays.

    python -m benchmarks.bulk_extraction --samples 3000 --workers 2

Both run the first modules of squeezenet1_1 over arrays of 3 x 64 x 64 in a Ray of their own: `map_batches`
with torch in each actor and `write_parquet`, and `trocar.ray.extract_dataset` with a server apart. The figure
is the private memory (USS) of the script's process and all below it, at its peak, sampled ten times a second;
the shared memory of the object store is in neither.
"""

import argparse
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.served import served

_ARCHITECTURE, _WEIGHTS = "squeezenet1_1", "random:0"
_MODULES = 4
_TAPS = [f"features.{index}" for index in range(_MODULES)]
_BATCH = 32
_SAMPLE_S = 0.1
_STORE_BYTES = 200 << 20
_Variant = Callable[[str, str, str, int], None]


@dataclass(frozen=True)
class Measured:
    """One run."""

    variant: str
    peak_mib: float
    """Private memory of all its processes."""
    seconds: float


def map_batches(source: str, out: str, server: str, workers: int) -> None:
    """Run the script of Ray Data."""
    import ray

    _start_ray(workers)
    rows = ray.data.from_numpy(np.load(source))
    result: Any = rows.map_batches(_Features, batch_size=_BATCH, concurrency=workers, num_cpus=0)
    result.write_parquet(out)


def extract_dataset(source: str, out: str, server: str, workers: int) -> None:
    """Run ours."""
    import trocar.ray

    _start_ray(workers)
    with trocar.connect(server) as client:
        trocar.ray.extract_dataset(client, _ARCHITECTURE, source, _TAPS, out, workers=workers, batch=_BATCH)


VARIANTS: dict[str, _Variant] = {"map_batches": map_batches, "extract_dataset": extract_dataset}


class _Features:
    """The first modules of the model, in an actor of Ray Data."""

    def __init__(self) -> None:
        import torch
        from torchvision.models import squeezenet1_1

        torch.set_num_threads(1)
        self._modules: Any = squeezenet1_1().eval().features[:_MODULES]

    def __call__(self, batch: dict[str, Any]) -> dict[str, Any]:
        import torch

        result, value = {}, torch.from_numpy(batch["data"])
        with torch.no_grad():
            for name, module in zip(_TAPS, self._modules, strict=True):
                value = module(value)
                result[name] = value.numpy()
        return result


def _start_ray(workers: int) -> None:
    import ray

    options = {"object_store_memory": _STORE_BYTES, "include_dashboard": False, "log_to_driver": False}
    ray.init(address="local", num_cpus=max(2, workers), **options)


def _measured(variant: str, source: Path, out: Path, server: str, workers: int) -> Measured:
    """Run a variant in a process of its own."""
    words = ["--run", variant, str(source), str(out), server, "--workers", str(workers)]
    started = time.perf_counter()
    process = subprocess.Popen([sys.executable, "-m", "benchmarks.bulk_extraction", *words])
    peak = 0
    while process.poll() is None:
        peak = max(peak, sum(map(_private_bytes, _below(process.pid))))
        with suppress(subprocess.TimeoutExpired):
            process.wait(_SAMPLE_S)
    if process.returncode:
        raise SystemExit(f"{variant} ended with status {process.returncode}")
    return Measured(variant, peak / (1 << 20), time.perf_counter() - started)


def _below(root: int) -> Iterator[int]:
    """Yield a process and all that it started, directly or not."""
    children: dict[int, list[int]] = {}
    for folder in Path("/proc").iterdir():
        if folder.name.isdecimal():
            with suppress(OSError):
                parent = int((folder / "stat").read_text().rpartition(")")[2].split()[1])
                children.setdefault(parent, []).append(int(folder.name))
    waiting = [root]
    while waiting:
        process_id = waiting.pop()
        yield process_id
        waiting += children.get(process_id, [])


def _private_bytes(process_id: int) -> int:
    with suppress(OSError):
        lines = Path(f"/proc/{process_id}/smaps_rollup").read_text().splitlines()
        return 1024 * sum(int(line.split()[1]) for line in lines if line.startswith("Private_"))
    return 0


def main() -> None:
    """Measure both, or be one of them."""
    parser = argparse.ArgumentParser(description="Memory of a bulk extraction with Ray.")
    parser.add_argument("--samples", type=int, default=3000)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--run", nargs=4, metavar=("VARIANT", "SOURCE", "OUT", "SERVER"))
    arguments = parser.parse_args()
    if arguments.run:
        variant, source, out, server = arguments.run
        VARIANTS[variant](source, out, server, arguments.workers)
        return
    _compare(arguments.samples, arguments.workers)


def _compare(samples: int, workers: int) -> None:
    with tempfile.TemporaryDirectory() as name, served([f"{_ARCHITECTURE}={_WEIGHTS}"]) as server:
        folder = Path(name)
        source = folder / "arrays.npy"
        np.save(source, np.random.default_rng(0).normal(size=(samples, 3, 64, 64)).astype(np.float32))
        for variant in VARIANTS:
            result = _measured(variant, source, folder / variant, server.address, workers)
            print(f"{result.variant:16} {result.peak_mib:7.0f} MiB {result.seconds:7.1f} s", flush=True)
        print(f"{'its server':16} {server.memory_bytes('VmHWM') / (1 << 20):7.0f} MiB (peak RSS)")


if __name__ == "__main__":
    main()
