"""Every torchvision classification model, compiled: do the numbers keep what is promised of them?

    python -m tests.sweeps.numerics                          # all but the largest
    python -m tests.sweeps.numerics --models vit_b_16 resnet18 --taps 10

Minutes to hours, so not part of the suite. The oracle is torch alone: the same seeded builder, forward
hooks that clone at once. Prints a line per model, engine and numerics: the largest deviation as a share of
the promise (1 is just kept) over random modules, the output and two batch sizes. Exits with 1 where a model
cannot be converted or torch in float32 misses the promise; bfloat16 that misses it is what the trial is for.
"""

import argparse
import gc
import random
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torchvision.models import get_model_builder, list_models

from tests.support.oracles.oracle import noise, rebuilt_by_name
from trocar_server.engine.compiled.backends.conversion import convert
from trocar_server.engine.compiled.backends.folding import find_pairs
from trocar_server.engine.compiled.backends.openvino_runner import OpenVinoRunner
from trocar_server.engine.compiled.backends.recipe import ArgumentSpec, Recipe
from trocar_server.engine.compiled.backends.torch_runner import TorchRunner
from trocar_server.engine.request.numerics import Numerics, deviation, keeps_promise
from trocar_server.models import make_replica
from trocar_server.surgery import Target

_SIZES = {"vit": 224, "swin": 64, "maxvit": 224, "inception": 96}
_SIZE = 64
_TOO_LARGE = ("vit_h_14", "vit_l_16", "vit_l_32", "regnet_y_128gf", "convnext_large", "efficientnet_v2_l")
_BATCHES = (1, 3)

Values = Mapping[str, torch.Tensor]


@dataclass(frozen=True)
class _Runs:
    """What eager PyTorch says, by batch size: the batch, its values, seconds of the whole pass."""

    batches: tuple[torch.Tensor, ...]
    values: tuple[Values, ...]
    seconds: tuple[float, ...]


def main() -> int:
    arguments = _arguments()
    torch.set_num_threads(1)
    failures: list[str] = []
    names = arguments.models or _names()
    for name in names:
        lines = list(_checked(name, arguments.taps))
        for engine, outcome, is_good in lines:
            print(f"{name:<22} {engine:<14} {outcome}", flush=True)
            if not is_good:
                failures.append(f"{name} {engine}")
        gc.collect()
    print(f"{len(names)} models; failed: {failures or 'none'}")
    return 1 if failures else 0


def _checked(name: str, count: int) -> Iterator[tuple[str, str, bool]]:
    try:
        yield from _check(name, count)
    except Exception as error:  # noqa: BLE001 - one model's failure is a line of the report
        yield "", f"FAILED {_said(error)}", False


def _check(name: str, count: int) -> Iterator[tuple[str, str, bool]]:
    """Yield what each engine makes of a model: its name, an outcome, whether that is as it should be."""
    model = rebuilt_by_name(name).requires_grad_(False)
    side = _size(name)
    batches = tuple(torch.from_numpy(noise(rows, 3, side, side, seed=rows)) for rows in _BATCHES)
    targets = _targets(model, batches[0], count, random.Random(name))
    recipe = Recipe((ArgumentSpec(torch.float32, (3, side, side)),), targets)
    eager = _eager(model, targets, batches)
    odd = _oddities(eager.values[-1])
    yield "eager", f"side {side}, values {', '.join(recipe.names)}{odd}", True
    pairs = find_pairs(model)
    with tempfile.TemporaryDirectory() as folder:
        started = time.perf_counter()
        try:
            convert(model, recipe, Path(folder))
        except Exception as error:  # noqa: BLE001 - of torch.export and OpenVINO
            yield "openvino", f"FAILED to convert: {_said(error)}", False
        else:
            yield "openvino", f"converted in {time.perf_counter() - started:.1f} s", True
            for numerics in (Numerics.FAST, Numerics.BF16):
                yield _row(
                    "openvino", numerics, eager, partial(OpenVinoRunner, Path(folder), recipe, numerics, 1)
                )
    for numerics in (Numerics.FAST, Numerics.BF16):
        yield _row(
            "torch",
            numerics,
            eager,
            partial(_torch_runner, model, recipe, pairs, numerics),
        )


def _torch_runner(
    model: nn.Module, recipe: Recipe, pairs: Sequence[tuple[str, str]], numerics: Numerics
) -> TorchRunner:
    return TorchRunner(make_replica(model), recipe, pairs, numerics)


def _row(engine: str, numerics: Numerics, eager: _Runs, make: Callable[[], Any]) -> tuple[str, str, bool]:
    label = f"{engine} {numerics}"
    try:
        runner = make()
        shares: dict[str, float] = {}
        ratios = []
        with torch.inference_mode():
            for batch, expected, eager_s in zip(eager.batches, eager.values, eager.seconds, strict=True):
                found, seconds = _fastest(partial(runner.run, [batch]))
                ratios.append(eager_s / seconds)
                for key, value in expected.items():
                    shares[key] = max(shares.get(key, 0.0), deviation(numerics, value, found[key]))
    except Exception as error:  # noqa: BLE001 - of torch or OpenVINO
        return label, f"FAILED {_said(error)}", False
    worst = max(shares, key=lambda key: shares[key])
    share = shares[worst]
    kept = "kept" if keeps_promise(share) else "MISSED" if share > 1 else "narrow"
    times = "/".join(f"{ratio:.2f}" for ratio in ratios)
    outcome = f"{kept} {share:.3g} of the promise at {worst}; {times} times as fast"
    return label, outcome, numerics is Numerics.BF16 or share <= 1


def _targets(model: nn.Module, batch: torch.Tensor, count: int, chance: random.Random) -> tuple[Target, ...]:
    """Choose calls of random modules, outputs and inputs, and the model's own output."""
    seen = _calls(model, batch)
    inner = sorted({(path, call, port, picks) for path, call, port, picks in seen if path})
    chosen = chance.sample(inner, min(count, len(inner)))
    last = min(key for key in seen if not key[0] and key[2] == "out")
    # A tap's clone is what the server would decide: only what is overwritten later.
    return tuple(
        Target(f"{path or '/'}@{call}/{port}{''.join(map(str, picks))}", path, call, port, picks, seen[key])
        for key in [*chosen, last]
        for path, call, port, picks in [key]
    )


def _calls(model: nn.Module, batch: torch.Tensor) -> dict[tuple[str, int, str, tuple[int | str, ...]], bool]:
    """Return each tensor that a call takes first or returns, and whether it is overwritten afterwards."""
    seen: dict[tuple[str, int, str, tuple[int | str, ...]], tuple[torch.Tensor, int]] = {}
    counts: dict[str, int] = {}

    def before(path: str, _: nn.Module, args: Any) -> None:
        counts[path] = counts.get(path, -1) + 1
        if args and isinstance(args[0], torch.Tensor):
            seen[path, counts[path], "in", (0,)] = (args[0], args[0]._version)

    def after(path: str, _: nn.Module, __: Any, output: Any) -> None:
        first, picks = (output[0], (0,)) if isinstance(output, (tuple, list)) and output else (output, ())
        if isinstance(first, torch.Tensor):
            seen[path, counts[path], "out", picks] = (first, first._version)

    handles = []
    for path, module in model.named_modules():
        handles.append(module.register_forward_pre_hook(partial(before, path)))
        handles.append(module.register_forward_hook(partial(after, path)))
    with torch.no_grad():
        model(batch)
    for handle in handles:
        handle.remove()
    return {key: tensor._version != version for key, (tensor, version) in seen.items()}


def _eager(model: nn.Module, targets: Sequence[Target], batches: Sequence[torch.Tensor]) -> _Runs:
    values = []
    seconds = []
    for batch in batches:
        values.append(_hooked(model, targets, batch))
        with torch.inference_mode():
            seconds.append(_fastest(partial(model, batch))[1])
    return _Runs(tuple(batches), tuple(values), tuple(seconds))


def _hooked(model: nn.Module, targets: Sequence[Target], batch: torch.Tensor) -> Values:
    """Collect values by torch's hooks alone."""
    values: dict[str, torch.Tensor] = {}
    counts: dict[str, int] = {}

    def keep(path: str, port: str, value: Any) -> None:
        for target in targets:
            if (target.path, target.port, target.call) == (path, port, counts[path]):
                found = value
                for step in target.picks:
                    found = found[step]
                values[target.name] = found.clone()

    def before(path: str, _: nn.Module, args: Any) -> None:
        counts[path] = counts.get(path, -1) + 1
        keep(path, "in", args)

    def after(path: str, _: nn.Module, __: Any, output: Any) -> None:
        keep(path, "out", output)

    handles = []
    for path in {target.path for target in targets}:
        module = model.get_submodule(path)
        handles.append(module.register_forward_pre_hook(partial(before, path)))
        handles.append(module.register_forward_hook(partial(after, path)))
    with torch.inference_mode():
        model(batch)
    for handle in handles:
        handle.remove()
    return values


def _oddities(values: Values) -> str:
    """Say which values random weights made useless as a test."""
    notes = []
    for name, value in values.items():
        size = float(value.double().abs().max()) if value.numel() else 0.0
        if not torch.isfinite(value).all():
            notes.append(f"{name} is not finite")
        elif not 1e-30 < size < 1e30:
            notes.append(f"{name} is as large as {size:.1e}")
    return f"; ODD: {', '.join(notes)}" if notes else ""


def _fastest(run: Callable[[], Any], count: int = 2) -> tuple[Any, float]:
    found, best = None, float("inf")
    for _ in range(count):
        started = time.perf_counter()
        found = run()
        best = min(best, time.perf_counter() - started)
    return found, best


def _said(error: Exception) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())}"[:200]


def _size(name: str) -> int:
    return next((size for family, size in _SIZES.items() if name.startswith(family)), _SIZE)


def _names() -> list[str]:
    found = [(name, get_model_builder(name).__module__) for name in list_models()]
    return [name for name, module in found if module.count(".") == 2 and name not in _TOO_LARGE]


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--models", nargs="+", default=[], help="these only")
    parser.add_argument("--taps", type=int, default=5, help="random values per model")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
