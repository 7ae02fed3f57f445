"""Input kinds: which of a user's values are paths, encoded images, PIL images, pixels or arrays."""

import os
import re
from glob import glob
from pathlib import Path
from typing import Any, NoReturn, TypeGuard

import numpy as np

from trocar._base.names import shortened
from trocar._base.tensors import is_array

IMAGE_SUFFIXES = (".jpg", ".jpeg", ".png", ".webp")
"""Of image files that the server decodes, in lower case."""


_URL = re.compile(r"(https?|ftp|s3|gs|file|data):", re.IGNORECASE)


def is_path(value: object) -> TypeGuard[str | os.PathLike[str]]:
    """Whether a value is a path; it need not exist."""
    return isinstance(value, (str, os.PathLike))


def exists(path: str | os.PathLike[str]) -> bool:
    """Whether there is such a file or folder; False for what can be no name, such as a long text."""
    try:
        return Path(path).exists()
    except (OSError, ValueError):  # too long, or with a zero
        return False


def is_url(value: object) -> bool:
    """Whether a value is the address of something on the network."""
    return isinstance(value, str) and bool(_URL.match(value))


def is_pattern(value: object) -> bool:
    """Whether a value is a pattern of paths, such as `photos/*.jpg`, rather than the path of a file."""
    if not is_path(value) or is_url(value):
        return False
    return any(sign in os.fspath(value) for sign in "*?[") and not exists(value)


def matching_paths(pattern: str | os.PathLike[str]) -> list[Path]:
    """Return the paths that a pattern matches, sorted; `**` matches folders of any depth.

    Raises:
        FileNotFoundError: There is none.
    """
    result = sorted(map(Path, glob(os.fspath(pattern), recursive=True)))  # noqa: PTH207 - may be absolute
    if not result:
        raise FileNotFoundError(2, "no file or folder matches the pattern", os.fspath(pattern))
    return result


def refuse_url(url: object) -> NoReturn:
    """Refuse a URL, with the line that mends it.

    Raises:
        ValueError: Always.
    """
    raise ValueError(
        f"{shortened(url)} is a URL, and an image is expected: a path, or encoded bytes. Nothing is "
        "downloaded for you; write `urllib.request.urlopen(url).read()`, which are bytes"
    )


def is_encoded(value: object) -> TypeGuard[bytes | bytearray | memoryview]:
    """Whether a value is the content of a file, such as a JPEG."""
    return isinstance(value, (bytes, bytearray, memoryview))


def is_pil(value: object) -> bool:
    """Whether a value is a PIL image, without importing PIL."""
    return hasattr(value, "convert") and hasattr(value, "size") and not isinstance(value, np.ndarray)


def is_pixels(value: Any, ranks: tuple[int, ...] = (3,)) -> bool:
    """Whether an array or tensor is RGB pixels, uint8 (..., height, width, 3), which the server preprocesses.

    Args:
        value: The array.
        ranks: Numbers of dimensions: 3 for one image, 4 for a batch.
    """
    is_uint8 = str(getattr(value, "dtype", "")).removeprefix("torch.") == "uint8"
    return is_uint8 and len(value.shape) in ranks and value.shape[-1] == 3


def is_image(value: object) -> bool:
    """Whether a value is one image: path, encoded bytes, PIL image or uint8 (height, width, 3)."""
    return is_path(value) or is_encoded(value) or is_pil(value) or (is_array(value) and is_pixels(value))
