"""CUDA graphs: device work recorded once and replayed without Python."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
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
        stream = torch.cuda.Stream(self._device)
        stream.wait_stream(computing)
        try:
            with torch.cuda.stream(stream):
                for _ in range(_WARM_UPS):
                    run()
            computing.wait_stream(stream)
            graph = torch.cuda.CUDAGraph()
            with self._recording(graph, stream):
                values = run()
        finally:
            # torch.cuda.graph (2.14) leaves its own stream current when a recording cannot be ended.
            torch.cuda.set_stream(computing)
        return Graph(graph.replay, values)

    @contextmanager
    def _recording(self, graph: torch.cuda.CUDAGraph, stream: torch.cuda.Stream) -> Iterator[None]:
        """Record what runs inside the context.

        torch (2.11) does not end a recording that breaks: its random generator then refuses every draw, and
        its allocator keeps all memory that another stream used. Both are put back.
        """
        device = self._device.index or 0
        generator, pool = torch.cuda.default_generators[device], torch.cuda.graph_pool_handle()
        drawn_before = generator.clone_state()
        try:
            # Other threads wait for copies and free memory meanwhile: `global` would end the recording.
            with torch.cuda.graph(graph, pool, stream=stream, capture_error_mode="thread_local"):
                yield
        except BaseException:
            generator.graphsafe_set_state(drawn_before)
            with suppress(RuntimeError):  # it was ended after all
                torch._C._cuda_endAllocateToPool(device, pool)
            raise


def graphs_of(device: torch.device) -> GraphApi | None:
    """Return the recorder of a device; None without one."""
    return CudaGraphs(device) if device.type == "cuda" else None
