"""Every torchvision model of a family, served and rebuilt here: random modules must be bit-equal.

    python -m tests.sweeps.classification                           # all classification models
    python -m tests.sweeps.classification --family video --models r3d_18 mc3_18

Minutes to hours, so not part of the suite. The server is a process of its own; one model is loaded at
a time and freed afterwards. The oracle is torch alone: the same seeded builder, forward hooks that
clone at once. Prints one line per model and exits with 1 if any differs.
"""

import argparse
import gc
import random
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from torchvision.models import get_model_builder, list_models

import trocar
from tests.support.oracles.oracle import (
    Array,
    Key,
    hooked_outputs,
    noise,
    rebuilt_by_name,
    same_bits,
    takes_list,
)

FAMILIES = {
    "classification": "torchvision.models",
    "segmentation": "torchvision.models.segmentation",
    "detection": "torchvision.models.detection",
    "video": "torchvision.models.video",
    "optical_flow": "torchvision.models.optical_flow",
    "quantization": "torchvision.models.quantization",
}


def main() -> int:
    arguments = _arguments()
    names = arguments.models or _names(arguments.family)
    failures: list[str] = []
    with _server(arguments.server) as client:
        for name in names:
            started = time.perf_counter()
            try:
                outcome = check(client, name, arguments.batch, arguments.paths)
            except Exception as error:  # noqa: BLE001 - one model's failure is a line of the report
                traceback.print_exc()
                outcome = f"FAILED {type(error).__name__}: {error}"
            if not outcome.startswith("ok"):
                failures.append(name)
            print(f"{name:<40} {time.perf_counter() - started:7.1f} s  {outcome}", flush=True)
    print(f"{len(names) - len(failures)} of {len(names)} models are bit-equal; failed: {failures or 'none'}")
    return 1 if failures else 0


def check(client: trocar.Client, name: str, batch: int, path_count: int) -> str:
    """Compare one model; the outcome starts with "ok" when every value is bit-equal."""
    client.load(name, "random:0")
    try:
        model = rebuilt_by_name(name)
        inputs = _inputs(client.model(name), batch)
        tree = client.modules(name)
        chosen = _choose(tree, path_count, random.Random(name))
        expected = hooked_outputs(model, inputs, (path for path, _ in chosen), as_list=takes_list(name))
        maps = client.extract(
            name, inputs, taps=_selectors(chosen, tree), options=trocar.options(timeout_s=1800)
        )
        return _compare(maps, {key: value for key, value in expected.items() if key[:2] in chosen})
    finally:
        client.unload(name)
        gc.collect()


def _choose(tree: trocar.ModuleTree, count: int, chance: random.Random) -> list[tuple[str, int]]:
    """Pick calls of random modules that return at least one tensor."""
    candidates = [
        (module.path, index)
        for module in tree
        for index, outputs in enumerate(module.calls)
        if any(output.shape is not None for output in outputs)
    ]
    paths = sorted({path for path, _ in candidates})
    chosen = chance.sample(paths, min(count, len(paths)))
    return [chance.choice([pair for pair in candidates if pair[0] == path]) for path in chosen]


def _selectors(chosen: list[tuple[str, int]], tree: trocar.ModuleTree) -> list[str]:
    return [f"{path}@{index}" if tree[path].call_count > 1 else path or "/out" for path, index in chosen]


def _compare(maps: trocar.FeatureMaps, expected: dict[Key, torch.Tensor]) -> str:
    found = {(info.path, info.call_index, info.pick): maps[name] for name, info in maps.info.items()}
    if found.keys() != expected.keys():
        return f"FAILED other values: {sorted(found.keys() ^ expected.keys())}"
    wrong = [key for key, value in expected.items() if not same_bits(found[key], value)]
    paths = {key[0] for key in expected}
    return f"FAILED differs at {wrong}" if wrong else f"ok {len(expected)} values of {len(paths)} modules"


def _inputs(model: trocar.Model, batch: int) -> tuple[Array, ...]:
    count = 2 if model.family == "optical_flow" else 1
    return tuple(noise(batch, *model.input_shape, seed=seed) for seed in range(count))


def _names(family: str) -> list[str]:
    wanted = FAMILIES[family]
    found = [(name, get_model_builder(name).__module__) for name in list_models()]
    if family == "classification":
        return [name for name, module in found if module.count(".") == 2]
    return [name for name, module in found if module.startswith(wanted)]


@contextmanager
def _server(address: str | None) -> Iterator[trocar.Client]:
    if address:
        with trocar.connect(address, timeout_s=1800) as client:
            yield client
        return
    with tempfile.TemporaryDirectory() as folder:
        ready = Path(folder) / "ready"
        command = [
            sys.executable,
            "-m",
            "trocar_server",
            "--port",
            "0",
            "--device",
            "cpu",
            "--ready-file",
            str(ready),
        ]
        process = subprocess.Popen(command, stderr=subprocess.DEVNULL)
        try:
            while not ready.exists():
                if process.poll() is not None:
                    raise SystemExit(f"the server ended with {process.returncode}")
                time.sleep(0.05)
            with trocar.connect(ready.read_text(), timeout_s=1800) as client:
                yield client
        finally:
            process.terminate()
            process.wait(60)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--family", choices=FAMILIES, default="classification")
    parser.add_argument("--models", nargs="+", default=[], help="these only")
    parser.add_argument("--batch", type=int, default=2)
    parser.add_argument("--paths", type=int, default=12, help="random modules per model")
    parser.add_argument("--server", help="host:port of a server that runs already")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
