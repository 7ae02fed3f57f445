"""What a user has without us, in a process of its own: torchvision's extractor, eager, float32, all cores."""

import multiprocessing
import time
from collections.abc import Sequence
from multiprocessing.connection import Connection
from types import TracebackType
from typing import Self

import numpy as np


def _serve(pipe: Connection) -> None:
    import torch
    from torchvision.models import get_model
    from torchvision.models.feature_extraction import create_feature_extractor

    extractors: dict[tuple[str, tuple[str, ...]], torch.nn.Module] = {}
    while (job := pipe.recv()) is not None:
        architecture, taps, shape, repeats = job
        key = (architecture, tuple(taps))
        if key not in extractors:
            torch.manual_seed(0)
            model = get_model(architecture, weights=None).eval()
            extractors[key] = create_feature_extractor(model, list(taps))
        batch = torch.from_numpy(np.random.default_rng(0).standard_normal(shape, np.float32))
        seconds = []
        with torch.inference_mode():
            for _ in range(repeats):
                started = time.perf_counter()
                extractors[key](batch)
                seconds.append(time.perf_counter() - started)
        pipe.send(seconds)


class Local:
    """Measures local passes.

    with Local() as local:
        seconds = local.measure("resnet18", ["layer4"], (1, 3, 224, 224), repeats=50)
    """

    def __enter__(self) -> Self:
        context = multiprocessing.get_context("spawn")
        self._pipe, child = context.Pipe()
        self._process = context.Process(target=_serve, args=(child,), daemon=True)
        self._process.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._pipe.send(None)
        self._process.join()

    def measure(
        self, architecture: str, taps: Sequence[str], shape: tuple[int, ...], repeats: int
    ) -> list[float]:
        """Return the seconds of each pass."""
        self._pipe.send((architecture, list(taps), shape, repeats))
        seconds: list[float] = self._pipe.recv()
        return seconds
