"""GPU profile: kernels and copies of served calls and of a training step with the spool.

    python -m benchmarks.gpu_profile FOLDER

For each case a table of kernels by time and a trace that chrome://tracing and https://ui.perfetto.dev open.
"""

import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch
from torch.profiler import ProfilerActivity, profile

import trocar
from benchmarks.measuring import images

_CALLS, _UNTIL_HOT, _ROWS = 5, 8, 25


def main(folder: Path, device: str = "cuda:0", model: str = "resnet50", side: int = 224) -> None:
    """Write the profiles of a server in this process into a folder."""
    folder.mkdir(parents=True, exist_ok=True)
    options = {"device": device, "data_dir": str(folder / "data")}
    with trocar.connect("local", models=[f"{model}=random:0"], settings=options) as client:
        call = partial(client.extract, model)
        cases: dict[str, Callable[[], object]] = {
            "batch-1": partial(call, images(1, side), ["layer4"]),
            "batch-32": partial(call, images(32, side), ["layer1"]),
            "every-module": partial(call, images(32, side), [trocar.tap("**", stats=["mean"], values=False)]),
            "edited": partial(
                call, images(32, side), ["layer4"], edits=[trocar.edit("layer3", "scale", 0.5)]
            ),
        }
        for name, case in cases.items():
            _profile(case, folder, name)


def _profile(case: Callable[[], object], folder: Path, name: str) -> None:
    for _ in range(_UNTIL_HOT):
        case()
    activities = [ProfilerActivity.CPU]
    if torch.cuda.is_available():
        activities.append(ProfilerActivity.CUDA)
    with profile(activities=activities) as result:
        for _ in range(_CALLS):
            case()
    order = "cuda_time_total" if torch.cuda.is_available() else "cpu_time_total"
    table = result.key_averages().table(sort_by=order, row_limit=_ROWS)
    (folder / f"{name}.txt").write_text(table, encoding="utf-8")
    result.export_chrome_trace(str(folder / f"{name}.json.gz"))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
