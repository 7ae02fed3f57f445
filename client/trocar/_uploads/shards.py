"""Shards: safetensors files as the server accepts them; equal samples give equal bytes."""

import hashlib
import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from trocar._base.tensors import Array, flat_bytes
from trocar.errors import SourceError

SHARD_BYTES = 32 << 20
"""Of samples in one shard: what is sent again after a broken connection."""
MAX_SHARD_BYTES = 255 << 20
"""The server takes 256 MiB, header included."""
MAX_SHARD_SAMPLES = 65_536
"""Images, texts or clips in one shard."""
CHUNK_BYTES = 1 << 20
"""In one message."""

_DTYPES = {
    "float64": "F64",
    "int64": "I64",
    "float32": "F32",
    "int32": "I32",
    "float16": "F16",
    "bfloat16": "BF16",
    "int16": "I16",
    "int8": "I8",
    "uint8": "U8",
    "bool": "BOOL",
}
_ALIGNMENT = 8

Parts = list[memoryview]
"""The bytes of a shard, one after another."""


@dataclass(frozen=True)
class Tensor:
    """Some samples of one tensor."""

    dtype: str
    """Its name; bfloat16 is held as its bits in uint16."""
    array: Array
    """(samples, ...)."""


MakeParts = Callable[[Sequence[bytes], Mapping[str, Tensor]], Parts]
"""Makes the bytes of a shard of encoded samples and their targets."""


@dataclass(frozen=True)
class Shard:
    """One shard, whose bytes are produced on demand."""

    sha256: str
    """Of all its bytes."""
    byte_count: int
    """How many there are."""
    sample_count: int
    """Samples in it."""
    build: Callable[[], Parts]
    """Makes its bytes; may be called again."""

    def parts(self) -> Parts:
        """Return its bytes.

        Raises:
            SourceError: They are not the same as before.
        """
        parts = self.build()
        if _digest(parts) != self.sha256:
            raise SourceError("the source changed during the upload; keep it unchanged until the upload ends")
        return parts


def make_shard(build: Callable[[], Parts], sample_count: int) -> Shard:
    """Return a shard whose bytes are produced now, hashed and dropped."""
    parts = build()
    return Shard(_digest(parts), sum(part.nbytes for part in parts), sample_count, build)


def array_parts(tensors: Mapping[str, Tensor]) -> Parts:
    """Return the bytes of a shard of arrays."""
    return _file({name: _described(tensor) for name, tensor in tensors.items()})


def image_parts(images: Sequence[bytes], targets: Mapping[str, Tensor]) -> Parts:
    """Return the bytes of a shard of encoded images."""
    return _encoded_parts("images", images, targets)


def text_parts(texts: Sequence[bytes], targets: Mapping[str, Tensor]) -> Parts:
    """Return the bytes of a shard of texts; see `_uploads.text_shards`."""
    return _encoded_parts("texts", texts, targets)


def sound_parts(clips: Sequence[bytes], targets: Mapping[str, Tensor]) -> Parts:
    """Return the bytes of a shard of sound, each clip a WAV or FLAC file."""
    return _encoded_parts("clips", clips, targets)


def pieces(parts: Iterable[memoryview], piece_bytes: int = CHUNK_BYTES) -> Iterator[bytes]:
    """Yield bytes in chunks of equal length; the last may be shorter."""
    waiting: list[memoryview] = []
    size = 0
    for part in parts:
        while part.nbytes:
            taken, part = part[: piece_bytes - size], part[piece_bytes - size :]  # noqa: PLW2901
            waiting.append(taken)
            size += taken.nbytes
            if size == piece_bytes:
                yield b"".join(waiting)
                waiting, size = [], 0
    if waiting:
        yield b"".join(waiting)


def target_key(name: str) -> str:
    """Return the name of a target's tensor."""
    return f"targets.{name}" if name else "targets"


def check_dtype(name: str, what: str) -> str:
    """Return the name of a dtype as it is.

    Raises:
        TypeError: No shard can have it.
    """
    if name not in _DTYPES:
        raise TypeError(f"{what} are {name}; convert them to one of {', '.join(_DTYPES)}")
    return name


_Entry = tuple[str, tuple[int, ...], Parts]


def _described(tensor: Tensor) -> _Entry:
    array = np.ascontiguousarray(tensor.array, tensor.array.dtype.newbyteorder("<"))
    return tensor.dtype, tensor.array.shape, [flat_bytes(array).data]


def _file(entries: Mapping[str, _Entry]) -> Parts:
    """Put a header before the bytes; wide elements come first, so that all are aligned."""
    ordered = sorted(entries.items(), key=lambda entry: (-_width(entry[1][0]), entry[0]))
    header, start = {}, 0
    for name, (dtype, shape, parts) in ordered:
        end = start + sum(part.nbytes for part in parts)
        header[name] = {"dtype": _DTYPES[dtype], "shape": list(shape), "data_offsets": [start, end]}
        start = end
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % _ALIGNMENT)
    head = len(text).to_bytes(8, "little") + text
    return [memoryview(head), *(part for _, (_, _, parts) in ordered for part in parts)]


def _width(dtype: str) -> int:
    return 2 if dtype == "bfloat16" else np.dtype(dtype).itemsize


def _encoded_parts(name: str, samples: Sequence[bytes], targets: Mapping[str, Tensor]) -> Parts:
    offsets = np.cumsum([0, *map(len, samples)], dtype=np.int64)
    entries = {
        "offsets": _described(Tensor("int64", offsets)),
        **{target: _described(tensor) for target, tensor in targets.items()},
        name: ("uint8", (int(offsets[-1]),), [memoryview(sample) for sample in samples]),
    }
    return _file(entries)


def _digest(parts: Parts) -> str:
    digest = hashlib.sha256()
    for part in parts:
        digest.update(part)
    return digest.hexdigest()
