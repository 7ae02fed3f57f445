"""Replacement of a file: its name leads to the old content or to the complete new one."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from uuid import uuid4


@contextmanager
def replacement(target: Path) -> Iterator[Path]:
    """Give a file its name, and the mode of the one that it replaces, when the context has written it.

        with replacement(Path("features.safetensors")) as partial:
            save_file(arrays, partial)

    A context that fails leaves the old file. A new file has the mode that the umask gives it.

    Raises:
        OSError: The file cannot be made, which the error tells by its own name, or not be replaced.
    """
    # Of its own, for each thread and process that writes to the same name.
    partial = target.with_name(f".{target.name}.{uuid4().hex}.part")
    try:
        partial.touch()
    except OSError as error:  # which names the file that nobody asked for
        raise type(error)(error.errno, error.strerror, str(target)) from None
    try:
        mode = (target if target.exists() else partial).stat().st_mode
        yield partial
        partial.chmod(mode)  # safetensors makes a file for its owner only
        partial.replace(target)
    finally:
        partial.unlink(missing_ok=True)
