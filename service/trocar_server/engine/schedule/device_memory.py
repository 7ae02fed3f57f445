"""Device memory: too little of it, and what a GPU's caching allocator keeps for reuse."""

from contextlib import suppress

import torch


def keeps_memory(device: torch.device) -> bool:
    """Whether freed memory stays in an allocator's cache that can be released."""
    return device.type == "cuda"


def give_back_cache(device: torch.device) -> None:
    """Release cached memory, so that fragments can be joined again; does nothing on a CPU."""
    if keeps_memory(device):
        with suppress(RuntimeError):  # raised by a device that no longer responds
            torch.cuda.empty_cache()


def is_out_of_memory(error: BaseException) -> bool:
    """Whether a device or the host had too little memory."""
    # torch 2.14 has no class for the host's: a RuntimeError of its allocator.
    return isinstance(error, (torch.OutOfMemoryError, MemoryError)) or "can't allocate memory" in str(error)
