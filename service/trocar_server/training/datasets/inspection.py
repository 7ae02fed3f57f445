"""Shard validation before use: tensors, offsets, headers of images and clips, texts, labels."""

import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from trocar_api.reasons import ErrorReason
from trocar_server.decoding.headers import read_header as read_image_header
from trocar_server.errors import ServiceError
from trocar_server.storage.tensor_header import ITEM_BYTES, Entry, HeaderError, HeaderLimits, read_header
from trocar_server.training.datasets.dataset_schema import (
    MAX_LABELS,
    ArraySignature,
    SampleSignature,
    TargetSignature,
)
from trocar_server.training.datasets.stored_sound import check_sound_header
from trocar_server.training.datasets.stored_text import parse_text

INPUTS, IMAGES, TEXTS, CLIPS = "inputs", "images", "texts", "clips"
OFFSETS, TARGETS = "offsets", "targets"
_ENCODED = (IMAGES, TEXTS, CLIPS)
_SAMPLES = (INPUTS, *_ENCODED)
MAX_TARGETS = 64
MAX_NAME_CHARACTERS = 64
MAX_ENCODED = 65_536
"""Images, texts or clips per shard: checking each takes some 50 microseconds."""

DTYPES = ("float64", "int64", "float32", "int32", "float16", "bfloat16", "int16", "int8", "uint8", "bool")
"""Dtypes of a shard's tensors."""

_LIMITS = HeaderLimits(header_bytes=1 << 20, tensors=10_000, rank=8, dtypes=DTYPES)
_PART_BYTES = 4 << 20
_INTEGERS = ("int64", "int32", "int16", "int8", "uint8")


def inspect(descriptor: int) -> tuple[int, SampleSignature]:
    """Return the number and the signature of a shard's samples.

    Args:
        descriptor: The open file.

    Raises:
        ServiceError: `DATASET_INVALID`, it is not a valid shard.
        OSError: It cannot be read.
    """
    entries = shard_header(descriptor)
    count = sample_count_of(entries)
    inputs = None
    if INPUTS in entries:
        inputs = ArraySignature(entries[INPUTS].dtype, entries[INPUTS].shape[1:])
    else:
        _check_offsets(descriptor, entries, count)
    targets = {
        target_name(name): _target_signature(descriptor, entry)
        for name, entry in entries.items()
        if name not in (*_SAMPLES, OFFSETS)
    }
    return count, SampleSignature(inputs, targets, is_text=TEXTS in entries, is_sound=CLIPS in entries)


def shard_header(descriptor: int) -> dict[str, Entry]:
    """Return the tensors of a shard by name; every byte belongs to exactly one of them.

    Raises:
        ServiceError: `DATASET_INVALID`, the header is none, too large, or does not fit the file.
        OSError: It cannot be read.
    """
    try:
        return read_header(descriptor, _LIMITS).tensors
    except HeaderError as error:
        raise invalid(str(error)) from None


def invalid(problem: str) -> ServiceError:
    """Build the error for a file that is no shard."""
    return ServiceError(
        ErrorReason.DATASET_INVALID, f"a shard is not a safetensors file of a data set: {problem}"
    )


def encoded_name(entries: Mapping[str, Entry]) -> str:
    """Return the name of the tensor that holds images, texts or clips; empty for a shard of arrays."""
    return next((name for name in _ENCODED if name in entries), "")


def check_encoded(descriptor: int, max_pixels: int) -> None:
    """Check the header of every image or clip, or every text, of a shard; a shard of arrays has none.

    Raises:
        ServiceError: `DATASET_INVALID`, one is not an image, has a damaged header or too many pixels; or is
            no text; or is neither WAV nor FLAC.
        OSError: The file cannot be read.
    """
    entries = shard_header(descriptor)
    if name := encoded_name(entries):
        checks: dict[str, Callable[[bytes], object]] = {
            IMAGES: lambda data: read_image_header(data, max_pixels),
            TEXTS: parse_text,
            CLIPS: check_sound_header,
        }
        _check_each(descriptor, entries, entries[name], checks[name], name.removesuffix("s"))


def _check_each(
    descriptor: int, entries: Mapping[str, Entry], entry: Entry, check: Callable[[bytes], object], what: str
) -> None:
    offsets = read_offsets(descriptor, entries)
    for index in range(len(offsets) - 1):
        data = read_exactly(descriptor, entry.start + int(offsets[index]), _length(offsets, index))
        try:
            check(data)
        except (ServiceError, ValueError) as error:
            why = error.message if isinstance(error, ServiceError) else str(error)
            raise ServiceError(
                ErrorReason.DATASET_INVALID, f"{what} {index} of a shard cannot be used: {why}"
            ) from None


def sample_count_of(entries: Mapping[str, Entry]) -> int:
    """Return the number of samples of a file, after checking the names of its tensors.

    Raises:
        ServiceError: `DATASET_INVALID`.
    """
    encoded = encoded_name(entries)
    if sum(name in entries for name in _SAMPLES) != 1 or bool(encoded) != (OFFSETS in entries):
        raise invalid("it needs `inputs`, or `offsets` and one of `images`, `texts` and `clips`")
    names = [target_name(name) for name in entries if name not in (*_SAMPLES, OFFSETS)]
    if len(names) > MAX_TARGETS or ("" in names and len(names) > 1):
        raise invalid(f"it can have `targets` alone, or up to {MAX_TARGETS} of `targets.NAME`")
    for name, entry in entries.items():
        if not entry.shape or (name != encoded and entry.row_bytes < 1):
            raise invalid(f"`{name}` needs a dimension of samples, and at least one value in each")
    counts = {name: entry.shape[0] - (name == OFFSETS) for name, entry in entries.items() if name != encoded}
    if len(set(counts.values())) > 1 or min(counts.values()) < 1:
        shown = ", ".join(f"`{name}` for {count:,}" for name, count in list(counts.items())[:4])
        raise invalid(f"all tensors must be for the same number of samples, at least 1; it has {shown}")
    return next(iter(counts.values()))


def target_name(key: str) -> str:
    """Return a target's name, given its tensor's name.

    Raises:
        ServiceError: `DATASET_INVALID`, a shard has no such tensor.
    """
    name = key.removeprefix(f"{TARGETS}.")
    if key == TARGETS:
        return ""
    if name == key or not 0 < len(name) <= MAX_NAME_CHARACTERS or not name.isprintable():
        raise invalid(
            f"{key[:80]!r} is not a tensor of a shard; available: inputs, images, texts, clips, offsets, "
            "targets, targets.NAME"
        )
    return name


def joined(signatures: Iterable[SampleSignature]) -> SampleSignature:
    """Return the common signature of the samples of several shards.

    Raises:
        ServiceError: `DATASET_INVALID`, they differ in more than the values of targets.
    """
    result: SampleSignature | None = None
    for index, signature in enumerate(signatures):
        if result is None:
            result = signature
            continue
        is_alike = replace(result, targets={}) == replace(signature, targets={})
        if not is_alike or _outlines(result) != _outlines(signature):
            raise ServiceError(
                ErrorReason.DATASET_INVALID,
                f"shard {index} differs from the shards before it: names, dtypes and the shape of one "
                "sample must be the same in all",
            )
        merged = {name: _merged(target, signature.targets[name]) for name, target in result.targets.items()}
        result = replace(result, targets=merged)
    if result is None:
        raise ServiceError(ErrorReason.DATASET_INVALID, "a data set needs at least one shard")
    return result


def read_offsets(descriptor: int, entries: Mapping[str, Entry]) -> NDArray[np.int64]:
    """Return the offsets at which images, texts or clips begin and end."""
    entry = entries[OFFSETS]
    return np.frombuffer(read_exactly(descriptor, entry.start, entry.byte_count), "<i8")


def read_exactly(descriptor: int, start: int, byte_count: int) -> bytes:
    """Read a byte range of a file.

    Raises:
        ServiceError: `DATASET_CORRUPT`, the file is too short.
        OSError: It cannot be read.
    """
    parts = []
    while byte_count:
        part = os.pread(descriptor, byte_count, start)
        if not part:
            raise ServiceError(
                ErrorReason.DATASET_CORRUPT,
                "a shard of the data set is truncated; upload the data set again: only what is missing "
                "is sent",
            )
        parts.append(part)
        start, byte_count = start + len(part), byte_count - len(part)
    return parts[0] if len(parts) == 1 else b"".join(parts)


def _check_offsets(descriptor: int, entries: Mapping[str, Entry], count: int) -> None:
    name, offsets = encoded_name(entries), entries[OFFSETS]
    encoded = entries[name]
    if (
        encoded.dtype != "uint8"
        or len(encoded.shape) != 1
        or offsets.dtype != "int64"
        or len(offsets.shape) != 1
    ):
        raise invalid(f"`{name}` is uint8, `offsets` int64, and both have one dimension")
    if count > MAX_ENCODED:
        raise invalid(f"it has {count:,} {name}; a shard can have {MAX_ENCODED:,}; make more shards")
    places = read_offsets(descriptor, entries)
    # Compared, not subtracted: differences of hostile values overflow.
    if places[0] != 0 or places[count] != encoded.byte_count or not (places[:-1] < places[1:]).all():
        raise invalid(f"`offsets` go from 0 to the number of bytes of `{name}` and grow with every sample")


def _length(offsets: NDArray[np.int64], index: int) -> int:
    return int(offsets[index + 1]) - int(offsets[index])


def _target_signature(descriptor: int, entry: Entry) -> TargetSignature:
    signature = TargetSignature(entry.dtype, entry.shape[1:])
    if entry.dtype not in _INTEGERS:
        return signature
    low, high, labels = None, None, np.empty(0, np.int64)
    is_listed = True
    for part in _parts(descriptor, entry):
        low = int(part.min()) if low is None else min(low, int(part.min()))
        high = int(part.max()) if high is None else max(high, int(part.max()))
        if is_listed:
            labels = np.union1d(labels, part.astype(np.int64))
            is_listed = len(labels) <= MAX_LABELS
    return replace(signature, low=low, high=high, labels=tuple(labels.tolist()) if is_listed else None)


def _parts(descriptor: int, entry: Entry) -> Iterator[NDArray[np.integer]]:
    item = ITEM_BYTES[entry.dtype]
    step = _PART_BYTES // item * item
    for start in range(entry.start, entry.start + entry.byte_count, step):
        size = min(step, entry.start + entry.byte_count - start)
        dtype = np.dtype(entry.dtype).newbyteorder("<")
        yield np.frombuffer(read_exactly(descriptor, start, size), dtype)


def _outlines(signature: SampleSignature) -> dict[str, tuple[str, tuple[int, ...]]]:
    return {name: (target.dtype, target.shape) for name, target in signature.targets.items()}


def _merged(first: TargetSignature, second: TargetSignature) -> TargetSignature:
    if first.low is None or second.low is None or first.high is None or second.high is None:
        return first
    labels = None
    if first.labels is not None and second.labels is not None:
        result = sorted({*first.labels, *second.labels})
        labels = tuple(result) if len(result) <= MAX_LABELS else None
    low, high = min(first.low, second.low), max(first.high, second.high)
    return replace(first, low=low, high=high, labels=labels)
