"""Random state of a trainer: its own stream, separate from torch's global generators."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import Tensor


class RandomStream:
    """A trainer's own state of torch's generators, advanced by its steps.

        stream = RandomStream(seed, device)
        with stream.in_place():
            step()

    It starts like `torch.manual_seed(seed)`. Inside the context torch's own generators, of the CPU and of the
    device, use this state; afterwards they are restored. After an error the stream has not advanced.

    Args:
        seed: The seed.
        device: The model's.
    """

    def __init__(self, seed: int, device: torch.device) -> None:
        self._device = device if device.type == "cuda" else None
        self._cpu = torch.Generator().manual_seed(seed).get_state()
        self._gpu: Tensor | None = None
        if self._device is not None:
            self._gpu = torch.Generator(self._device).manual_seed(seed).get_state()

    @contextmanager
    def in_place(self, *, is_kept: bool = True) -> Iterator[None]:
        """Let torch draw from the stream; it advances unless the context fails or `is_kept` is False."""
        before = self._states()
        self._put(self._cpu, self._gpu)
        try:
            yield
            if is_kept:
                self._cpu, self._gpu = self._states()
        finally:
            self._put(*before)

    def state(self) -> dict[str, Tensor]:
        """Return the state as bytes, by kind of generator: `cpu` and `cuda`."""
        states = {"cpu": self._cpu.clone()}
        if self._gpu is not None:
            states["cuda"] = self._gpu.clone()
        return states

    def load(self, states: Mapping[str, Tensor]) -> None:
        """Restore a state; the part of a missing device is left unchanged."""
        self._cpu = states["cpu"].clone()
        if self._gpu is not None and "cuda" in states:
            self._gpu = states["cuda"].clone()

    def _states(self) -> tuple[Tensor, Tensor | None]:
        gpu = None if self._device is None else torch.cuda.get_rng_state(self._device)
        return torch.get_rng_state(), gpu

    def _put(self, cpu: Tensor, gpu: Tensor | None) -> None:
        torch.set_rng_state(cpu)
        if self._device is not None and gpu is not None:
            torch.cuda.set_rng_state(gpu, self._device)
