"""Aligned memory for direct I/O, and the bytes of storages, without torch on other threads."""

import ctypes

import numpy as np
import torch
from numpy.typing import NDArray

from trocar_server.spool.chunks import ALIGNMENT, padded


def aligned_buffer(byte_count: int) -> tuple[NDArray[np.uint8], int]:
    """Return memory with an aligned stretch of whole pages in it, and where the stretch begins."""
    raw = np.empty(padded(byte_count) + ALIGNMENT, np.uint8)
    return raw, -raw.ctypes.data % ALIGNMENT


def storage_bytes(storage: torch.UntypedStorage, byte_count: int) -> memoryview:
    """View the bytes of a storage in host memory; the storage must outlive the view."""
    pointer = ctypes.cast(storage.data_ptr(), ctypes.POINTER(ctypes.c_uint8 * byte_count))
    return memoryview(pointer.contents).cast("B")


def as_storage(buffer: NDArray[np.uint8]) -> torch.UntypedStorage:
    """Return the storage over a buffer, which lives as long as the storage."""
    return torch.from_numpy(buffer).untyped_storage()
