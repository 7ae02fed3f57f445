"""Content of samples in memory, as a hash: a run goes on only where the samples are the same."""

import hashlib
import os
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from trocar._base.input_kinds import is_path, is_pil
from trocar._base.tensors import named_array


def content_digest(samples: Iterable[object]) -> str:
    """Hash samples: bytes, arrays and images by their content, names of files by size and time of change.

    Returns:
        A hex digest; empty where a sample is something else.
    """
    digest = hashlib.sha256()
    try:
        for sample in samples:
            for part in _parts(sample):
                digest.update(len(part).to_bytes(8, "little"))
                digest.update(part)
    except (TypeError, OSError):
        return ""
    return digest.hexdigest()


def _parts(sample: Any) -> Iterator[bytes | memoryview]:
    """Yield bytes that differ where samples do.

    Raises:
        TypeError: It is none of these.
        OSError: It names no file.
    """
    if isinstance(sample, (bytes, bytearray, memoryview)):
        yield memoryview(sample).cast("B")
    elif is_path(sample):
        status = Path(sample).stat()
        yield f"{os.fspath(sample)}\0{status.st_size}\0{status.st_mtime_ns}".encode()
    elif is_pil(sample):
        yield f"{sample.mode}\0{sample.size}".encode()
        yield sample.tobytes()
    else:
        array, dtype = named_array(sample)
        yield f"{dtype}\0{array.shape}".encode()
        yield array.tobytes()
