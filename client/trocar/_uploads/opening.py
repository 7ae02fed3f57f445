"""From what a user names to the plan of an upload."""

import os
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from trocar._datasets.sources.files import printable
from trocar._tensors import is_array
from trocar._uploads.arrays import array_plan
from trocar._uploads.folders import folder_plan
from trocar._uploads.plan import UploadPlan
from trocar._uploads.shards import MAX_SHARD_BYTES
from trocar.errors import SourceError

ARCHIVE_SUFFIX = ".npz"


@contextmanager
def opened_upload(
    source: object, targets: object, name: str, categories: Sequence[str] | None, shard_bytes: int
) -> Iterator[UploadPlan]:
    """Plan an upload; what it keeps in files goes with the context. See `Client.upload_dataset`.

    Raises:
        SourceError: The source cannot be read.
        TypeError: Something in it cannot be stored, or `targets` do not go with it.
        ValueError: It has no sample, or `shard_bytes` is out of range.
    """
    if not 1 <= shard_bytes <= MAX_SHARD_BYTES:
        raise ValueError(f"shard_bytes={shard_bytes} is not in the range 1 to {MAX_SHARD_BYTES}")
    with tempfile.TemporaryDirectory(prefix="trocar-upload-") as folder:
        plan = _plan(source, targets, name, shard_bytes, Path(folder))
        if categories is not None:
            plan = replace(plan, categories=tuple(categories))
        yield plan


def _plan(source: object, targets: object, name: str, shard_bytes: int, folder: Path) -> UploadPlan:
    if isinstance(source, (str, os.PathLike)):
        return _named(os.fspath(source), targets, name, shard_bytes, folder)
    if isinstance(source, tuple) and len(source) == 2 and targets is None and is_array(source[0]):
        return array_plan(source[0], source[1], name or "arrays", shard_bytes)
    if isinstance(source, np.ndarray) or (is_array(source) and not hasattr(source, "features")):
        return array_plan(source, targets, name or "arrays", shard_bytes)
    return _object(source, targets, name, shard_bytes, folder)


def _named(given: Any, targets: object, name: str, shard_bytes: int, folder: Path) -> UploadPlan:
    from trocar._datasets.sources import huggingface, objects

    text = str(given)
    if text.startswith(huggingface.PREFIX):
        dataset, column = huggingface.find_huggingface(text)
        chosen = name or printable(text.removeprefix(huggingface.PREFIX))
        return _huggingface(dataset, column, targets, chosen, shard_bytes, folder)
    if text.startswith(objects.PREFIX):
        chosen = name or text.removeprefix(objects.PREFIX)
        return _object(objects.import_dataset(text), targets, chosen, shard_bytes, folder)
    path = Path(given)
    if path.is_dir():
        _refuse_targets(targets, "a folder of class folders has its labels in their names")
        return folder_plan(path, name, shard_bytes)
    if path.suffix.lower() == ARCHIVE_SUFFIX:
        _refuse_targets(targets, "a .npz file has them itself")
        return _archive(path, name or printable(path.stem), shard_bytes)
    raise SourceError(
        f"{path} is no folder and no {ARCHIVE_SUFFIX} file; name a folder of class folders, a file with the "
        "arrays `inputs` and `targets`, torch:module:name or hf:name:split:column"
    )


def _archive(path: Path, name: str, shard_bytes: int) -> UploadPlan:
    """Return the plan of a `.npz` file: `inputs` or `x`, and `targets`, `y`, or several `targets.NAME`."""
    try:
        with np.load(path, allow_pickle=False) as archive:
            arrays = {key: archive[key] for key in archive.files}
    except (OSError, ValueError, EOFError) as error:
        raise SourceError(f"{path} is no .npz file that can be read: {error}") from error
    inputs = next((arrays[key] for key in ("inputs", "x") if key in arrays), None)
    if inputs is None:
        raise SourceError(f"{path} has no array `inputs` or `x`; it has {', '.join(arrays) or 'none'}")
    single = next((arrays[key] for key in ("targets", "y") if key in arrays), None)
    several = {key.removeprefix("targets."): arrays[key] for key in arrays if key.startswith("targets.")}
    return array_plan(inputs, several or single, name, shard_bytes)


def _object(source: Any, targets: object, name: str, shard_bytes: int, folder: Path) -> UploadPlan:
    from trocar._datasets.sources.huggingface import is_huggingface
    from trocar._uploads.objects import object_rows, row_shards

    if is_huggingface(source):
        return _huggingface(source, "", targets, name or "dataset", shard_bytes, folder)
    if not hasattr(source, "__getitem__") or not hasattr(source, "__len__"):
        raise SourceError(
            f"{type(source).__name__} is no data set: that is a pair of arrays, a folder, or has __len__ and "
            "__getitem__"
        )
    _refuse_targets(targets, "the samples of a data set have them: (inputs, target)")
    count = _checked_count(len(source))
    classes = getattr(source, "classes", None)
    are_names = isinstance(classes, (list, tuple)) and all(isinstance(entry, str) for entry in classes)
    categories = tuple(classes) if classes and are_names else ()
    shards = partial(row_shards, object_rows(source, count), folder, shard_bytes)
    return UploadPlan(name or type(source).__name__, categories, count, shards)


def _huggingface(
    dataset: Any, column: str, targets: Any, name: str, shard_bytes: int, folder: Path
) -> UploadPlan:
    from trocar._uploads.huggingface import huggingface_rows
    from trocar._uploads.objects import row_shards

    chosen = [targets] if isinstance(targets, str) else targets
    if chosen is not None and not all(isinstance(entry, str) for entry in chosen):
        raise TypeError("targets of a Hugging Face dataset are the names of its columns")
    count = _checked_count(len(dataset))
    rows, categories = huggingface_rows(dataset, column, chosen)
    return UploadPlan(name, categories, count, partial(row_shards, rows, folder, shard_bytes))


def _checked_count(count: int) -> int:
    if not count:
        raise ValueError("there is no sample in the data set")
    return count


def _refuse_targets(targets: object, why: str) -> None:
    if targets is not None:
        raise TypeError(f"targets go with arrays alone: {why}")
