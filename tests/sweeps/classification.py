"""Every torchvision model of a family, served and rebuilt here: random modules must be bit-equal.

    python -m tests.sweeps.classification                           # all classification models
    python -m tests.sweeps.classification --family video --models r3d_18 mc3_18

Minutes to hours, so not part of the suite. The server is a process of its own; one model is loaded at
a time and freed afterwards. The oracle is torch alone: the same seeded builder, forward hooks that
clone at once. Prints one line per model and exits with 1 if any differs.
"""

import argparse
import gc
import inspect
import random
import subprocess
import sys
import tempfile
import time
import traceback
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn
from torchvision.models import get_model_builder, list_models

import trocar

Key = tuple[str, int, str]
"""Module path, call index, pick."""

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
        model = rebuilt(name)
        inputs = _inputs(client.model(name), batch, np.random.default_rng(1))
        tree = client.modules(name)
        chosen = _choose(tree, path_count, random.Random(name))
        with torch.inference_mode():
            expected = _expected(model, inputs, {path for path, _ in chosen}, is_list=_takes_list(name))
        maps = client.extract(name, inputs, taps=_selectors(chosen, tree), timeout_s=1800)
        return _compare(maps, {key: value for key, value in expected.items() if key[:2] in chosen})
    finally:
        client.unload(name)
        gc.collect()


def rebuilt(name: str) -> nn.Module:
    """Build the model of `random:0` without our code."""
    builder = get_model_builder(name)
    parameters = inspect.signature(builder).parameters
    options: dict[str, Any] = {"weights": None}
    if "weights_backbone" in parameters:
        options["weights_backbone"] = None
    torch.manual_seed(0)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        module: nn.Module = builder(**options)
    return module.eval()


def _expected(
    model: nn.Module, inputs: tuple[np.ndarray[Any, Any], ...], paths: set[str], *, is_list: bool
) -> dict[Key, torch.Tensor]:
    """Run the model with hooks that clone at once."""
    values: dict[Key, torch.Tensor] = {}
    calls: dict[str, int] = {}

    def hook(path: str) -> Any:
        def keep(module: nn.Module, args: Any, output: Any) -> None:
            index = calls[path] = calls.get(path, -1) + 1
            for pick, tensor in flat(output):
                values[path, index, pick] = tensor.clone()

        return keep

    for path in paths:
        model.get_submodule(path).register_forward_hook(hook(path))
    tensors = [torch.from_numpy(array.copy()) for array in inputs]
    model(*([list(tensors[0])] if is_list else tensors))
    return values


def flat(value: Any, pick: str = "") -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the tensors of what a torchvision module returns, with the picks as the wire writes them."""
    if isinstance(value, torch.Tensor):
        yield pick, value
    elif isinstance(value, dict):
        for key, item in value.items():
            yield from flat(item, f'{pick}["{key}"]')
    elif isinstance(value, (tuple, list)):
        for index, item in enumerate(value):
            yield from flat(item, f"{pick}[{index}]")
    elif type(value).__name__ == "ImageList":
        yield from flat({"tensors": value.tensors, "image_sizes": value.image_sizes}, pick)


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
    return [
        f"{path or '/out'}@{index}" if tree[path].call_count > 1 else path or "/out" for path, index in chosen
    ]


def _compare(maps: trocar.FeatureMaps, expected: dict[Key, torch.Tensor]) -> str:
    found = {(info.path, info.call_index, info.pick): maps[name] for name, info in maps.info.items()}
    if found.keys() != expected.keys():
        return f"FAILED other values: {sorted(found.keys() ^ expected.keys())}"
    wrong = [key for key, value in expected.items() if not _is_equal(found[key], value)]
    paths = {key[0] for key in expected}
    return f"FAILED differs at {wrong}" if wrong else f"ok {len(expected)} values of {len(paths)} modules"


def _is_equal(found: np.ndarray[Any, Any], expected: torch.Tensor) -> bool:
    array = expected.contiguous().numpy()
    return found.dtype == array.dtype and found.shape == array.shape and found.tobytes() == array.tobytes()


def _inputs(
    model: trocar.Model, batch: int, generator: np.random.Generator
) -> tuple[np.ndarray[Any, Any], ...]:
    count = 2 if model.family == "optical_flow" else 1
    shape = (batch, *model.input_shape)
    return tuple(generator.random(shape, dtype=np.float32) for _ in range(count))


def _takes_list(name: str) -> bool:
    return get_model_builder(name).__module__.startswith(FAMILIES["detection"])


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
