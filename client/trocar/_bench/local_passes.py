"""Local baseline in a separate process: torchvision, eager, float32, all cores.

torch is named in strings only: the client neither needs nor imports it, this process does if installed.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib import import_module
from importlib.util import find_spec
from types import TracebackType
from typing import Any, Self

import numpy as np

from trocar._bench.process import Commands, Helper, HelperError

_WARM_UP = 2


@dataclass(frozen=True)
class LocalJob:
    """Passes of one torchvision model with random weights."""

    architecture: str
    """A torchvision model name."""
    paths: tuple[str, ...]
    """The modules whose outputs are wanted; "" is the model itself."""
    shape: tuple[int, ...]
    """Of the input, batch included."""
    duration_s: float
    """No pass begins later; one is always made."""
    most_passes: int | None = None
    """So many passes end it, however long they take."""
    device: str = "cpu"
    """The torch device."""


def is_torch_here() -> bool:
    """Tell whether torch and torchvision are installed, without importing them."""
    return find_spec("torch") is not None and find_spec("torchvision") is not None


class Local:
    """Measures local passes.

        with Local() as local:
            seconds = local.measure(LocalJob("resnet18", ("layer4",), (1, 3, 224, 224), 5.0))

    A model is built and warmed up with its first job.
    """

    def __init__(self) -> None:
        self._helper = Helper("trocar._bench.local_passes")

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._helper.__exit__(kind, error, traceback)

    def measure(self, job: LocalJob) -> list[float]:
        """Return the seconds of each pass.

        Raises:
            HelperError: torchvision has no such model, or it cannot take the input.
        """
        answer = self._helper.ask(job)
        if isinstance(answer, str):
            raise HelperError(answer)
        seconds: list[float] = answer
        return seconds


class Passes:
    """The models of this process; built once for each kind of job."""

    def __init__(self) -> None:
        self._torch = import_module("torch")
        self._models = import_module("torchvision.models")
        self._calls: dict[tuple[object, ...], Callable[[], None]] = {}

    def measure(self, job: LocalJob) -> list[float]:
        """Return the seconds of each pass."""
        key = (job.architecture, job.paths, job.shape, job.device)
        with self._torch.inference_mode():
            if key not in self._calls:
                self._calls[key] = self._make(job)
                for _ in range(_WARM_UP):
                    self._calls[key]()
            return _timed(self._calls[key], job.duration_s, job.most_passes)

    def _make(self, job: LocalJob) -> Callable[[], None]:
        self._torch.manual_seed(0)
        model = self._models.get_model(job.architecture, weights=None).eval().to(job.device)
        extractor = self.extractor(model, job.paths)
        batch = np.random.default_rng(0).standard_normal(job.shape, np.float32)
        inputs = self._torch.from_numpy(batch).to(job.device)
        is_cuda = job.device.startswith("cuda")

        def call() -> None:
            extractor(inputs)
            if is_cuda:
                self._torch.cuda.synchronize()

        return call

    def extractor(self, model: Any, paths: Sequence[str]) -> Any:
        """Return torchvision's feature extractor for these modules, which ends after the last of them.

        If the model cannot be traced, or they are no nodes of its graph: the model with forward hooks.
        """
        if not any(paths):
            return model
        extraction = import_module("torchvision.models.feature_extraction")
        untraceable = (import_module("torch.fx.proxy").TraceError, ValueError, RuntimeError, TypeError)
        try:
            return extraction.create_feature_extractor(model, [path for path in paths if path])
        except untraceable:
            for path in paths:
                model.get_submodule(path).register_forward_hook(lambda *_: None)
            return model


def _timed(call: Callable[[], None], duration_s: float, most: int | None) -> list[float]:
    seconds: list[float] = []
    end = time.perf_counter() + duration_s
    while not seconds or (len(seconds) < most if most is not None else time.perf_counter() < end):
        started = time.perf_counter()
        call()
        seconds.append(time.perf_counter() - started)
    return seconds


def main() -> None:
    """Run the parent's jobs until it closes the pipe."""
    commands, passes = Commands(), Passes()
    for job in commands:
        try:
            commands.answer(passes.measure(job))
        except (ValueError, RuntimeError, AttributeError, TypeError, NotImplementedError) as error:
            commands.answer(f"the local pass of {job.architecture} failed: {error}")
