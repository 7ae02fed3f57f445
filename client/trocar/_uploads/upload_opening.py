"""Upload opening: the plan of an upload from a user's path, name or object."""

import os
import tempfile
import zipfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, cast

import numpy as np

from trocar._base.input_kinds import is_path
from trocar._base.names import few, shortened
from trocar._base.tensors import Array, is_array
from trocar._request.texts import Audio, Texts, is_sound_file, is_texts, processor_input, texts
from trocar._sources.files import check_regular, printable
from trocar._sources.text_tables import TABLE_SUFFIXES
from trocar._uploads.array_shards import array_plan
from trocar._uploads.folder_shards import folder_plan
from trocar._uploads.paired_samples import Paired
from trocar._uploads.shards import MAX_SHARD_BYTES
from trocar._uploads.sound_shards import sound_plan
from trocar._uploads.text_shards import table_plan, text_plan
from trocar._uploads.upload_plan import UploadPlan
from trocar.errors import SourceError
from trocar_api.byte_sizes import byte_count

ARCHIVE_SUFFIX = ".npz"
_KEYS = ("inputs", "x", "targets", "y")
_MOST_INFLATED_BYTES = 16 << 20
_MOST_INFLATION = 50
"""What compression may save: pictures and features save less, an archive made to fill memory 1,000 times."""


@contextmanager
def opened_upload(
    source: object, targets: object, name: str, categories: Sequence[str] | None, shard_bytes: int | str
) -> Iterator[UploadPlan]:
    """Plan an upload; its temporary files are deleted with the context. See `Client.upload_dataset`.

    Raises:
        SourceError: The source cannot be read.
        TypeError: Something in it cannot be stored, or `targets` do not go with it.
        ValueError: It has no sample, or `shard_bytes` is out of range.
    """
    shard_bytes = byte_count(shard_bytes, "shard_bytes")
    if not 1 <= shard_bytes <= MAX_SHARD_BYTES:
        raise ValueError(f"shard_bytes={shard_bytes} is not in the range 1 to {MAX_SHARD_BYTES}")
    with tempfile.TemporaryDirectory(prefix="trocar-upload-") as folder:
        plan = _plan(source, targets, name, shard_bytes, Path(folder))
        if categories is not None:
            plan = replace(plan, categories=tuple(categories))
        yield plan


def _plan(source: object, targets: object, name: str, shard_bytes: int, folder: Path) -> UploadPlan:
    if is_path(source):
        return _named(os.fspath(source), targets, name, shard_bytes, folder)
    if isinstance(source, tuple) and len(source) == 2 and targets is None and _is_processed(source[0]):
        source, targets = source
    if _is_sound(source):
        sound = source if isinstance(source, Audio) else processor_input(source)
        return sound_plan(cast("Audio", sound), targets, name or "sound", shard_bytes)
    if isinstance(source, Texts) or _are_texts(source):
        given = source if isinstance(source, Texts) else texts(cast("Any", source))
        return text_plan(given, targets, name or "texts", shard_bytes)
    if isinstance(source, tuple) and len(source) == 2 and targets is None and is_array(source[0]):
        return array_plan(source[0], source[1], name or "arrays", shard_bytes)
    if isinstance(source, tuple) and len(source) == 2 and targets is None and _is_list_of_inputs(source[0]):
        source, targets = list(source[0]), source[1]
    if isinstance(source, list) and targets is not None:
        return _object(Paired(source, targets), None, name or "samples", shard_bytes, folder)
    if isinstance(source, np.ndarray) or (is_array(source) and not hasattr(source, "features")):
        return array_plan(source, targets, name or "arrays", shard_bytes)
    return _object(source, targets, name, shard_bytes, folder)


def _is_processed(value: object) -> bool:
    return _is_sound(value) or _are_texts(value)


def _is_list_of_inputs(value: object) -> bool:
    """Whether a value is no sample of its own, as a pair may be, but a list of inputs."""
    return isinstance(value, list) or (isinstance(value, tuple) and len(value) > 2)


def _is_sound(value: object) -> bool:
    if isinstance(value, list):
        return bool(value) and all(map(is_sound_file, value))
    return isinstance(value, Audio)


def _are_texts(value: object) -> bool:
    return isinstance(value, Texts) or (isinstance(value, list) and is_texts(value))


def _named(given: Any, targets: object, name: str, shard_bytes: int, folder: Path) -> UploadPlan:
    from trocar._sources import huggingface, objects

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
        _refuse_targets(targets, "the labels of a folder are the names of its class folders")
        return folder_plan(path, name, shard_bytes)
    if path.suffix.lower() == ARCHIVE_SUFFIX:
        _refuse_targets(targets, "a .npz file contains its targets")
        return _archive(path, name or printable(path.stem), shard_bytes)
    if path.suffix.lower() in TABLE_SUFFIXES:
        return table_plan(path, _columns(targets), name or printable(path.stem), shard_bytes)
    if path.suffix.lower() == ".parquet":
        dataset = huggingface.read_parquet(path)
        return _huggingface(dataset, "", targets, name or printable(path.stem), shard_bytes, folder)
    if not path.exists():
        raise SourceError(f"{path} does not exist; its absolute path is {path.absolute()}")
    raise SourceError(
        f"{path} is neither a folder nor a {ARCHIVE_SUFFIX}, .csv, .jsonl or .parquet file; give a folder of "
        "class folders, a file with the arrays `inputs` and `targets`, a table with the columns `text` and "
        "`label`, torch:module:name or hf:name:split:column"
    )


def _columns(targets: Any) -> list[str] | None:
    """Return names of columns.

    Raises:
        TypeError: They are none.
    """
    chosen = [targets] if isinstance(targets, str) else targets
    if chosen is not None and not all(isinstance(entry, str) for entry in chosen):
        raise TypeError("targets of a table or a Hugging Face dataset are the names of its columns")
    return chosen


def _archive(path: Path, name: str, shard_bytes: int) -> UploadPlan:
    """Return the plan of a `.npz` file: `inputs` or `x`, and `targets`, `y`, or several `targets.NAME`."""
    try:
        arrays = _arrays(path)
    except SourceError:
        raise
    except Exception as error:  # of the archive, of its compression, of a header that is Python text, ...
        why = shortened(error) or type(error).__name__
        raise SourceError(f"{path} is not a readable .npz file: {why}") from error
    inputs = next((arrays[key] for key in ("inputs", "x") if key in arrays), None)
    assert inputs is not None  # or `_arrays` has refused it
    single = next((arrays[key] for key in ("targets", "y") if key in arrays), None)
    several = {key.removeprefix("targets."): arrays[key] for key in arrays if key.startswith("targets.")}
    return array_plan(inputs, several or single, name, shard_bytes)


def _arrays(path: Path) -> dict[str, Array]:
    """Read the arrays of a `.npz` file that make a data set, and no others."""
    check_regular(path)
    _check_inflated(path)
    with np.load(path, allow_pickle=False) as archive:
        if not {"inputs", "x"} & set(archive.files):
            raise SourceError(f"{path} has no array `inputs` or `x`; it has {few(archive.files) or 'none'}")
        wanted = [key for key in archive.files if key in _KEYS or key.startswith("targets.")]
        return {key: archive[key] for key in wanted}


def _check_inflated(path: Path) -> None:
    """Reject an archive that inflates too much: its sizes are known before anything is read."""
    with zipfile.ZipFile(path) as archive:
        entries = archive.infolist()
    inflated = sum(entry.file_size for entry in entries)
    if inflated > _MOST_INFLATED_BYTES and inflated > _MOST_INFLATION * path.stat().st_size:
        raise SourceError(
            f"{path} becomes {inflated:,} bytes, over {_MOST_INFLATION} times its size; if that is meant, "
            "save it uncompressed, with np.savez"
        )


def _object(source: Any, targets: object, name: str, shard_bytes: int, folder: Path) -> UploadPlan:
    from trocar._sources.huggingface import is_huggingface
    from trocar._uploads.object_shards import object_rows, row_shards

    if is_huggingface(source):
        return _huggingface(source, "", targets, name or "dataset", shard_bytes, folder)
    if not hasattr(source, "__getitem__") or not hasattr(source, "__len__"):
        raise SourceError(
            f"{type(source).__name__} is not a data set; give a pair of arrays, a folder, or an object "
            "with __len__ "
            "and __getitem__"
        )
    _refuse_targets(targets, "samples contain their targets: (inputs, target)")
    count = _checked_count(len(source))
    classes = getattr(source, "classes", None)
    are_names = isinstance(classes, (list, tuple)) and all(isinstance(entry, str) for entry in classes)
    categories = tuple(classes) if classes and are_names else ()
    shards = partial(row_shards, object_rows(source, count), folder, shard_bytes)
    return UploadPlan(name or type(source).__name__, categories, count, shards)


def _huggingface(
    dataset: Any, column: str, targets: Any, name: str, shard_bytes: int, folder: Path
) -> UploadPlan:
    from trocar._uploads.huggingface_shards import huggingface_rows
    from trocar._uploads.object_shards import row_shards

    count = _checked_count(len(dataset))
    rows, categories = huggingface_rows(dataset, column, _columns(targets))
    return UploadPlan(name, categories, count, partial(row_shards, rows, folder, shard_bytes))


def _checked_count(count: int) -> int:
    if not count:
        raise ValueError("the data set has no samples")
    return count


def _refuse_targets(targets: object, why: str) -> None:
    if targets is not None:
        raise TypeError(f"targets= is only for arrays: {why}")
