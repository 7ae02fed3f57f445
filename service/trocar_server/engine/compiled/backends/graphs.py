"""CUDA graphs: device work recorded once and replayed without Python.

Written without a GPU at hand: `CudaGraphs` has not run on one yet. Its contract is
`GraphApi`; the tests have an implementation of exactly that contract.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Protocol

import torch

Values = Mapping[str, torch.Tensor]
_WARM_UPS = 3
"""Passes before a recording: libraries allocate memory and choose kernels in the first ones."""


@dataclass(frozen=True)
class Graph:
    """A recording.

    Attributes:
        replay: Repeats the recorded work, on the same memory.
        values: The values of the last replay, valid until the next; undefined before the first.
    """

    replay: Callable[[], None]
    values: Values


class GraphApi(Protocol):
    """Records passes. Owner thread only."""

    def capture(self, run: Callable[[], Values]) -> Graph:
        """Record a function's work on the device; it is called several times, once while recording.

        Raises:
            Exception: It does something that cannot be recorded, such as reading a value on the host.
        """
        ...


class CudaGraphs:
    """Records passes on a CUDA device; see `GraphApi`."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def capture(self, run: Callable[[], Values]) -> Graph:
        """See `GraphApi`."""
        computing = torch.cuda.current_stream(self._device)
        try:
            return self._captured(run, computing)
        finally:
            # torch.cuda.graph (2.14) leaves its own stream current when a recording cannot be ended.
            torch.cuda.set_stream(computing)

    def _captured(self, run: Callable[[], Values], computing: torch.cuda.Stream) -> Graph:
        stream = torch.cuda.Stream(self._device)
        stream.wait_stream(computing)
        with torch.cuda.stream(stream):
            for _ in range(_WARM_UPS):
                run()
        computing.wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        # Other threads wait for copies and free memory meanwhile: with `global` that would end the recording.
        with torch.cuda.graph(graph, stream=stream, capture_error_mode="thread_local"):
            values = run()
        return Graph(graph.replay, values)


def graphs_of(device: torch.device) -> GraphApi | None:
    """Return the recorder of a device; None where there is none."""
    return CudaGraphs(device) if device.type == "cuda" else None
