"""What the allocator of a GPU keeps for later."""

from contextlib import suppress

import torch


def keeps_memory(device: torch.device) -> bool:
    """Tell whether freed memory stays with an allocator that can be told to give it back."""
    return device.type == "cuda"


def give_back_cache(device: torch.device) -> None:
    """Return it, so that pieces of it can become a whole again; nothing happens on a CPU."""
    if keeps_memory(device):
        with suppress(RuntimeError):  # of a device that no longer answers
            torch.cuda.empty_cache()
