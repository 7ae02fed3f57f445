"""Chunks of tensor bytes, encoded and decoded without a protobuf copy.

    message = head.SerializeToString() + b"".join(chunk_parts(0, 0, view))
    head_bytes, chunks = split_message(message)

The messages that carry tensors (`ExtractRequest`, `ExtractResponse`) have their chunks in field 15.
Concatenating two serialised messages merges them, so a head without chunks followed by hand-built
chunk fields is the very message that protobuf would build, without copying the payload into a
`bytes` field first (a unary protobuf message reaches 0.08 of a socket's speed, this 0.86). A test
holds both to the same bytes.
"""

from collections.abc import Iterator, Sequence
from functools import lru_cache
from typing import NamedTuple

CHUNKS_FIELD = 15
HEAD_KEY = "x-trocar-head-bin"
"""The metadata key of a copy of an `Extract` call's head: a busy server refuses the call by it, unread."""
_CHUNKS_TAG = CHUNKS_FIELD << 3 | 2
_MAX_FIELDS = 1 << 16
"""Far more than any of our messages has; walking through so many takes 0.15 s."""
_MAX_CHUNK_FIELDS = 8
"""Of one `TensorChunk`, which has three: a message has many chunks, so that these multiply."""
_INDEX_TAG, _OFFSET_TAG, _DATA_TAG = 1 << 3, 2 << 3, 3 << 3 | 2
_VARINT, _FIXED64, _LENGTH, _FIXED32 = 0, 1, 2, 5


class WireError(ValueError):
    """A message does not follow the protobuf wire format."""


class Chunk(NamedTuple):
    """A decoded `TensorChunk`; `data` is a view into the message."""

    payload_index: int
    offset_bytes: int
    data: memoryview


def chunk_parts(payload_index: int, offset_bytes: int, data: memoryview) -> tuple[bytes, memoryview]:
    """Encode one `TensorChunk` as field 15 of its message: the bytes before the data, and the data."""
    return chunk_header(payload_index, offset_bytes, data.nbytes), data


@lru_cache(maxsize=1024)
def chunk_header(payload_index: int, offset_bytes: int, byte_count: int) -> bytes:
    """Return the bytes of a `TensorChunk` as field 15 of its message, up to its data."""
    inner = b""
    if payload_index:
        inner += bytes((_INDEX_TAG,)) + _varint(payload_index)
    if offset_bytes:
        inner += bytes((_OFFSET_TAG,)) + _varint(offset_bytes)
    if byte_count:
        inner += bytes((_DATA_TAG,)) + _varint(byte_count)
    return bytes((_CHUNKS_TAG,)) + _varint(len(inner) + byte_count) + inner


class Layout:
    """The bytes of a message around the data of its chunks, and where that is.

        layout = Layout.of(message)
        chunks = layout.chunks(another)      # None unless it is equal but for the data of its chunks

    Data is never parsed, so equal bytes around data of equal sizes mean the same.

    Attributes:
        byte_count: Bytes of the message.
        fixed_byte_count: Bytes around.
        sizes: Bytes of each payload, where every one is a single chunk, in order; None elsewhere.
        varying: Place of the one further field whose content may differ, with its tag; None without it.
    """

    def __init__(
        self, message: bytes, places: "Sequence[tuple[int, int, int, int]]", varying: slice | None, start: int
    ) -> None:
        gaps = [(place[2], place[3]) for place in places]
        if varying is not None:
            gaps.append((start, varying.stop))
        self._places, self.varying, self._fixed = tuple(places), varying, []
        position = 0
        for begin, end in (*sorted(gaps), (len(message), len(message))):
            self._fixed.append((position, message[position:begin]))
            position = end
        self.byte_count = len(message)
        self.fixed_byte_count = sum(len(fixed) for _, fixed in self._fixed)
        sizes = [end - begin for _, _, begin, end in places]
        is_in_order = all(index == place and not offset for place, (index, offset, _, _) in enumerate(places))
        self.sizes = sizes if is_in_order and all(sizes) else None

    @classmethod
    def of(cls, message: bytes, varying: int = 0) -> "Layout | None":
        """Return the layout of a message; None for one whose varying field is given more than once.

        Args:
            message: A serialised message that `split_message` accepts.
            varying: Number of a field outside of its chunks whose content may differ, though not in size.
        """
        view, places, result, content = memoryview(message), [], [], 0
        for tag, position, start, end in _fields(view):
            if tag == _CHUNKS_TAG:
                index, offset, begin, stop = 0, 0, end, end
                for inner, _, first, last in _fields(view[start:end], _MAX_CHUNK_FIELDS):
                    index = _read_varint(view, start + first)[0] if inner == _INDEX_TAG else index
                    offset = _read_varint(view, start + first)[0] if inner == _OFFSET_TAG else offset
                    begin, stop = (start + first, start + last) if inner == _DATA_TAG else (begin, stop)
                places.append((index, offset, begin, stop))
            elif tag >> 3 == varying:
                result.append(slice(position, end))
                content = start
        return cls(message, places, result[0] if result else None, content) if len(result) < 2 else None

    def chunks(self, message: bytes) -> list[Chunk] | None:
        """Return the chunks of a message of this layout; None for another one."""
        if len(message) != self.byte_count:
            return None
        for start, fixed in self._fixed:
            if not message.startswith(fixed, start):
                return None
        view, chunks = memoryview(message), []
        for index, offset, start, end in self._places:
            chunks.append(Chunk(index, offset, view[start:end]))
        return chunks


def split_payload(
    payload_index: int, payload: memoryview, chunk_bytes: int
) -> Iterator[tuple[bytes, memoryview]]:
    """Encode a payload (a flat view of bytes) as chunks of at most `chunk_bytes`, in order."""
    for offset in range(0, payload.nbytes, chunk_bytes):
        yield chunk_parts(payload_index, offset, payload[offset : offset + chunk_bytes])


def split_message(message: bytes) -> tuple[bytes, list[Chunk]]:
    """Split a message into the bytes of everything but field 15, and its chunks as views.

    Raises:
        WireError: The bytes are not a protobuf message, one of more than 65,536 fields, or a chunk of more
            than eight.
    """
    head, views = split_field(message, CHUNKS_FIELD)
    return head, list(map(_decode_chunk, views))


def split_field(message: bytes, number: int) -> tuple[bytes, list[memoryview]]:
    """Split a message into the bytes of everything but one field, and the values of that field as views.

    Args:
        message: A serialised message.
        number: Of a field of bytes, strings or messages.

    Raises:
        WireError: The bytes are not a protobuf message, or one of more than 65,536 fields.
    """
    view, head, values = memoryview(message), [], []
    tag_wanted = number << 3 | _LENGTH
    for tag, position, start, end in _fields(view):
        if tag == tag_wanted:
            values.append(view[start:end])
        else:
            head.append(view[position:end])
    return b"".join(head), values


def last_value(message: bytes | memoryview, number: int) -> memoryview | None:
    """Return the last value of a field as a view, without copying the rest; None if there is none.

    Args:
        message: A serialised message.
        number: Of a field of bytes, strings or messages.

    Raises:
        WireError: As `split_field` does.
    """
    view, tag_wanted = memoryview(message), number << 3 | _LENGTH
    return next(
        (view[start:end] for tag, _, start, end in reversed(_fields(view)) if tag == tag_wanted), None
    )


def _fields(view: memoryview, most: int = _MAX_FIELDS) -> list[tuple[int, int, int, int]]:
    """Return of each field its tag, and where it begins, where its content begins and where it ends.

    Raises:
        WireError: The bytes are not fields, or over `most` of them.
    """
    fields: list[tuple[int, int, int, int]] = []
    position, length = 0, len(view)
    while position < length:
        if len(fields) == most:
            raise WireError(f"the message has over {most:,} fields")
        tag, start = (view[position], position + 1) if view[position] < 0x80 else _read_varint(view, position)
        kind = tag & 7
        if kind == _LENGTH:
            is_short = start < length and view[start] < 0x80  # the usual numbers, of one byte
            size, content = (view[start], start + 1) if is_short else _read_varint(view, start)
            end = content + size
        elif kind == _VARINT:
            is_short = start < length and view[start] < 0x80
            content, end = start, start + 1 if is_short else _read_varint(view, start)[1]
        elif kind in (_FIXED64, _FIXED32):
            content, end = start, start + (8 if kind == _FIXED64 else 4)
        else:
            raise WireError(f"wire type {kind} is not used by protobuf 3")
        if end > length:
            raise WireError("the message ends inside a field")
        fields.append((tag, position, content, end))
        position = end
    return fields


def _decode_chunk(view: memoryview) -> Chunk:
    index, offset, data = 0, 0, view[:0]
    for tag, _, start, end in _fields(view, _MAX_CHUNK_FIELDS):
        if tag == _INDEX_TAG:
            index = _read_varint(view, start)[0]
        elif tag == _OFFSET_TAG:
            offset = _read_varint(view, start)[0]
        elif tag == _DATA_TAG:
            data = view[start:end]
    return Chunk(index, offset, data)


def _varint(value: int) -> bytes:
    encoded = bytearray()
    while value > 0x7F:
        encoded.append(value & 0x7F | 0x80)
        value >>= 7
    encoded.append(value)
    return bytes(encoded)


def _read_varint(view: memoryview, position: int) -> tuple[int, int]:
    """Return the value and the position after it."""
    value = 0
    for shift in range(0, 70, 7):
        if position >= len(view):
            raise WireError("the message ends inside a number")
        byte = view[position]
        position += 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return value, position
    raise WireError("a number is longer than ten bytes")
