"""What a shard holds, checked before anything relies on it: tensors, offsets, headers of images, labels."""

import os
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from trocar_api.reasons import ErrorReason
from trocar_server.errors import ServiceError
from trocar_server.models.images import check_image
from trocar_server.training.datasets.form import MAX_LABELS, ArrayForm, SampleForm, TargetForm
from trocar_server.training.datasets.header import ITEM_BYTES, Entry, invalid, read_header

INPUTS, IMAGES, OFFSETS, TARGETS = "inputs", "images", "offsets", "targets"
MAX_TARGETS = 64
MAX_NAME_CHARACTERS = 64
MAX_IMAGES = 65_536
"""In one shard: each has a header to look at, some 50 microseconds."""

_PART_BYTES = 4 << 20
_INTEGERS = ("int64", "int32", "int16", "int8", "uint8")


def inspect(descriptor: int) -> tuple[int, SampleForm]:
    """Return how many samples a shard has, and what they look like.

    Args:
        descriptor: The open file.

    Raises:
        ServiceError: `DATASET_INVALID`, it is no shard of a data set.
        OSError: It cannot be read.
    """
    entries = read_header(descriptor)
    count = sample_count_of(entries)
    inputs = None
    if INPUTS in entries:
        inputs = ArrayForm(entries[INPUTS].dtype, entries[INPUTS].shape[1:])
    else:
        _check_offsets(descriptor, entries, count)
    targets = {
        target_name(name): _target_form(descriptor, entry)
        for name, entry in entries.items()
        if name not in (INPUTS, IMAGES, OFFSETS)
    }
    return count, SampleForm(inputs, targets)


def check_images(descriptor: int, max_pixels: int) -> None:
    """Look at the header of every image of a shard; a shard of arrays has none.

    Raises:
        ServiceError: `DATASET_INVALID`, one is none, is damaged in its header or has too many pixels.
        OSError: The file cannot be read.
    """
    entries = read_header(descriptor)
    if IMAGES not in entries:
        return
    offsets = read_offsets(descriptor, entries)
    for index in range(len(offsets) - 1):
        data = read_exactly(descriptor, entries[IMAGES].start + int(offsets[index]), _length(offsets, index))
        try:
            check_image(data, max_pixels)
        except ServiceError as error:
            raise ServiceError(
                ErrorReason.DATASET_INVALID, f"image {index} of a shard cannot be used: {error.message}"
            ) from None


def sample_count_of(entries: Mapping[str, Entry]) -> int:
    """Return how many samples a file has; its tensors are those that a shard has.

    Raises:
        ServiceError: `DATASET_INVALID`.
    """
    if (INPUTS in entries) == (IMAGES in entries) or (IMAGES in entries) != (OFFSETS in entries):
        raise invalid("it needs `inputs`, or `images` and `offsets`")
    names = [target_name(name) for name in entries if name not in (INPUTS, IMAGES, OFFSETS)]
    if len(names) > MAX_TARGETS or ("" in names and len(names) > 1):
        raise invalid(f"it can have `targets` alone, or up to {MAX_TARGETS} of `targets.NAME`")
    for name, entry in entries.items():
        if not entry.shape or (name != IMAGES and entry.row_bytes < 1):
            raise invalid(f"`{name}` needs a dimension of samples, and at least one value in each")
    counts = {name: entry.shape[0] - (name == OFFSETS) for name, entry in entries.items() if name != IMAGES}
    if len(set(counts.values())) > 1 or min(counts.values()) < 1:
        shown = ", ".join(f"`{name}` for {count:,}" for name, count in list(counts.items())[:4])
        raise invalid(f"all tensors must be for the same number of samples, at least 1; it has {shown}")
    return next(iter(counts.values()))


def target_name(key: str) -> str:
    """Return the name of a target by that of its tensor.

    Raises:
        ServiceError: `DATASET_INVALID`, the tensor is none of a shard's.
    """
    name = key.removeprefix(f"{TARGETS}.")
    if key == TARGETS:
        return ""
    if name == key or not 0 < len(name) <= MAX_NAME_CHARACTERS or not name.isprintable():
        raise invalid(
            f"{key[:80]!r} is none of its tensors; there are inputs, images, offsets, targets, targets.NAME"
        )
    return name


def joined(forms: Iterable[SampleForm]) -> SampleForm:
    """Return the form of all samples of several shards.

    Raises:
        ServiceError: `DATASET_INVALID`, they differ in more than the values of targets.
    """
    found: SampleForm | None = None
    for index, form in enumerate(forms):
        if found is None:
            found = form
            continue
        if found.inputs != form.inputs or _outlines(found) != _outlines(form):
            raise ServiceError(
                ErrorReason.DATASET_INVALID,
                f"shard {index} has other tensors than those before it: names, dtypes and the shape of one "
                "sample must be the same in all",
            )
        merged = {name: _merged(target, form.targets[name]) for name, target in found.targets.items()}
        found = replace(found, targets=merged)
    if found is None:
        raise ServiceError(ErrorReason.DATASET_INVALID, "a data set needs at least one shard")
    return found


def read_offsets(descriptor: int, entries: Mapping[str, Entry]) -> NDArray[np.int64]:
    """Return where images begin and end."""
    entry = entries[OFFSETS]
    return np.frombuffer(read_exactly(descriptor, entry.start, entry.byte_count), "<i8")


def read_exactly(descriptor: int, start: int, byte_count: int) -> bytes:
    """Read a stretch of a file.

    Raises:
        ServiceError: `DATASET_CORRUPT`, the file ends before.
        OSError: It cannot be read.
    """
    parts = []
    while byte_count:
        part = os.pread(descriptor, byte_count, start)
        if not part:
            raise ServiceError(
                ErrorReason.DATASET_CORRUPT,
                "a shard of the data set is cut off; upload the data set again: only what is missing is sent",
            )
        parts.append(part)
        start, byte_count = start + len(part), byte_count - len(part)
    return parts[0] if len(parts) == 1 else b"".join(parts)


def _check_offsets(descriptor: int, entries: Mapping[str, Entry], count: int) -> None:
    images, offsets = entries[IMAGES], entries[OFFSETS]
    if (
        images.dtype != "uint8"
        or len(images.shape) != 1
        or offsets.dtype != "int64"
        or len(offsets.shape) != 1
    ):
        raise invalid("`images` is uint8, `offsets` int64, and both have one dimension")
    if count > MAX_IMAGES:
        raise invalid(f"it has {count:,} images; {MAX_IMAGES:,} can be in one, make more shards")
    places = read_offsets(descriptor, entries)
    # Compared, not subtracted: differences of hostile values overflow.
    if places[0] != 0 or places[count] != images.byte_count or not (places[:-1] < places[1:]).all():
        raise invalid("`offsets` go from 0 to the number of bytes of `images` and grow with every image")


def _length(offsets: NDArray[np.int64], index: int) -> int:
    return int(offsets[index + 1]) - int(offsets[index])


def _target_form(descriptor: int, entry: Entry) -> TargetForm:
    form = TargetForm(entry.dtype, entry.shape[1:])
    if entry.dtype not in _INTEGERS:
        return form
    low, high, labels = None, None, np.empty(0, np.int64)
    is_listed = True
    for part in _parts(descriptor, entry):
        low = int(part.min()) if low is None else min(low, int(part.min()))
        high = int(part.max()) if high is None else max(high, int(part.max()))
        if is_listed:
            labels = np.union1d(labels, part.astype(np.int64))
            is_listed = len(labels) <= MAX_LABELS
    return replace(form, low=low, high=high, labels=tuple(labels.tolist()) if is_listed else None)


def _parts(descriptor: int, entry: Entry) -> Iterator[NDArray[np.integer]]:
    item = ITEM_BYTES[entry.dtype]
    step = _PART_BYTES // item * item
    for start in range(entry.start, entry.start + entry.byte_count, step):
        size = min(step, entry.start + entry.byte_count - start)
        dtype = np.dtype(entry.dtype).newbyteorder("<")
        yield np.frombuffer(read_exactly(descriptor, start, size), dtype)


def _outlines(form: SampleForm) -> dict[str, tuple[str, tuple[int, ...]]]:
    return {name: (target.dtype, target.shape) for name, target in form.targets.items()}


def _merged(first: TargetForm, second: TargetForm) -> TargetForm:
    if first.low is None or second.low is None or first.high is None or second.high is None:
        return first
    labels = None
    if first.labels is not None and second.labels is not None:
        found = sorted({*first.labels, *second.labels})
        labels = tuple(found) if len(found) <= MAX_LABELS else None
    low, high = min(first.low, second.low), max(first.high, second.high)
    return replace(first, low=low, high=high, labels=labels)
