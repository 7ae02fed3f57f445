"""Data set object shards: every sample read once, in order; shards wait in a temporary folder.

Nothing of torch is imported here: the data set's creator has imported its libraries.
"""

import io
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, cast

import numpy as np

from trocar._base.input_kinds import is_encoded, is_path, is_pil
from trocar._base.replacement import write_file
from trocar._base.rgb import rgb_image
from trocar._base.tensors import Array, is_array, named_array
from trocar._request.texts import Audio, Texts, is_sound_file, is_texts, processor_input, texts
from trocar._sources.files import read_file
from trocar._uploads.array_shards import target_tensor
from trocar._uploads.shards import (
    MAX_SHARD_SAMPLES,
    Parts,
    Shard,
    Tensor,
    array_parts,
    check_dtype,
    image_parts,
    make_shard,
    sound_parts,
    target_key,
    text_parts,
)
from trocar._uploads.sound_shards import encoded_clips
from trocar._uploads.text_shards import encoded_texts
from trocar.errors import SourceError

Row = tuple[object, object]
"""One sample: what goes into the model, and its target, a mapping of several by name, or None."""


@dataclass(frozen=True)
class _Text:
    """A text, as the server stores it."""

    data: bytes


@dataclass(frozen=True)
class _Sound:
    """A clip of sound, as the server stores it."""

    data: bytes


_Sample = Tensor | bytes | _Text | _Sound
"""An array, an encoded image, a text, or a clip of sound."""


@dataclass
class _Group:
    """Samples of one shard."""

    inputs: list["_Sample"]
    targets: list[dict[str, Tensor]]
    byte_count: int = 0


def object_rows(dataset: Any, count: int) -> Iterator[Row]:
    """Yield the samples of torch's map-style datasets and their like.

    Raises:
        SourceError: The dataset fails on one.
    """
    for index in range(count):
        try:
            value = dataset[index]
        except Exception as error:
            raise SourceError(f"sample {index}: {type(error).__name__}: {error}") from error
        if isinstance(value, (tuple, list)) and len(value) in (1, 2):
            yield value[0], value[1] if len(value) == 2 else None
        elif isinstance(value, (tuple, list, Mapping)):
            raise SourceError(
                f"sample {index} is {type(value).__name__} of {len(value)}; give (inputs, target), or "
                "(inputs, {name: target, ...})"
            )
        else:
            yield value, None


def row_shards(rows: Iterable[Row], folder: Path, shard_bytes: int) -> Iterator[Shard]:
    """Yield the shards of samples; they are kept in files, since samples may be expensive to compute.

    Args:
        rows: The samples.
        folder: Folder of the files.
        shard_bytes: Of one shard.

    Raises:
        SourceError: A sample cannot be stored, or is of another kind than the first.
    """
    for number, group in enumerate(_groups(rows, shard_bytes)):
        path = folder / f"{number:08}.safetensors"
        write_file(path, _parts(group))
        yield make_shard(partial(_read, path), len(group.inputs))


def _groups(rows: Iterable[Row], shard_bytes: int) -> Iterator[_Group]:
    group, first = _Group([], []), None
    for index, (inputs, target) in enumerate(rows):
        try:
            value, targets = _input(inputs), _targets(target)
        except (TypeError, ValueError, OSError) as error:
            raise SourceError(f"sample {index}: {error}") from error
        first = first or (value, targets)
        _check_alike(index, value, targets, *first)
        size = _size(value) + sum(map(_size, targets.values()))
        if group.inputs and (group.byte_count + size > shard_bytes or len(group.inputs) == MAX_SHARD_SAMPLES):
            yield group
            group = _Group([], [])
        group.inputs.append(value)
        group.targets.append(targets)
        group.byte_count += size
    if group.inputs:
        yield group


def _input(value: object) -> _Sample:
    if isinstance(value, Texts) or is_texts(value):
        (text,) = encoded_texts(value if isinstance(value, Texts) else texts([cast("Any", value)]))
        return _Text(text)
    if isinstance(value, Audio) or is_sound_file(value):
        (clip,) = encoded_clips(cast("Audio", processor_input(value)))
        return _Sound(clip)
    if is_encoded(value):
        return bytes(value)
    if is_path(value):
        return read_file(Path(value))
    if is_pil(value):
        return _encoded(value)
    array, dtype = named_array(value)
    return Tensor(check_dtype(dtype, "the inputs"), array)


def _targets(target: object) -> dict[str, Tensor]:
    if target is None:
        return {}
    if isinstance(target, Mapping):
        return {str(name): _target(value, str(name)) for name, value in target.items()}
    return {"": _target(target, "")}


def _target(value: object, name: str) -> Tensor:
    if is_pil(value):  # a mask
        value = np.asarray(value)
    elif isinstance(value, float) and not isinstance(value, np.generic):
        value = np.float32(value)  # what torch makes of it
    elif not is_array(value) or isinstance(value, (bool, int)):
        value = np.asarray(value)
    tensor, texts = target_tensor(value, name)
    if texts:
        raise TypeError("the target is a string; give its label, an integer")
    return tensor


def _check_alike(
    index: int,
    value: _Sample,
    targets: Mapping[str, Tensor],
    first: _Sample,
    first_targets: Mapping[str, Tensor],
) -> None:
    shown, expected = _outline(value, targets), _outline(first, first_targets)
    if shown != expected:
        raise SourceError(
            f"sample {index} is {shown}, the first is {expected}; all must have one type, dtype and shape"
        )


def _outline(value: _Sample, targets: Mapping[str, Tensor]) -> str:
    if isinstance(value, Tensor):
        inputs = f"{value.dtype} {value.array.shape}"
    else:
        inputs = {bytes: "an image", _Text: "a text", _Sound: "a clip of sound"}[type(value)]
    named = [f"{name or 'target'} {tensor.dtype} {tensor.array.shape}" for name, tensor in targets.items()]
    return ", ".join([inputs, *sorted(named)])


def _parts(group: _Group) -> Parts:
    targets = {target_key(name): _stacked([row[name] for row in group.targets]) for name in group.targets[0]}
    images = [value for value in group.inputs if isinstance(value, bytes)]
    if images:
        return image_parts(images, targets)
    encoded = [value.data for value in group.inputs if isinstance(value, (_Text, _Sound))]
    if encoded:
        return (text_parts if isinstance(group.inputs[0], _Text) else sound_parts)(encoded, targets)
    return array_parts({"inputs": _stacked([v for v in group.inputs if isinstance(v, Tensor)]), **targets})


def _stacked(tensors: Sequence[Tensor]) -> Tensor:
    rows: list[Array] = [tensor.array for tensor in tensors]
    return Tensor(tensors[0].dtype, np.stack(rows))


def _size(value: _Sample) -> int:
    if isinstance(value, Tensor):
        return value.array.nbytes
    return len(value if isinstance(value, bytes) else value.data)


def _encoded(image: Any) -> bytes:
    """Encode a PIL image without loss; its pixels are those that the server will see."""
    file = io.BytesIO()
    rgb_image(image).save(file, "PNG", exif=b"")  # turned already: must not be turned again
    return file.getvalue()


def _read(path: Path) -> Parts:
    return [memoryview(path.read_bytes())]
