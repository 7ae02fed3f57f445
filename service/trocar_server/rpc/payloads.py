"""Bytes of tensors and images as they come in: checked before torch sees anything.

Every size is a Python integer, so nothing overflows, and memory is allocated only for sizes that the
plan declared and the limits allow.
"""

from collections.abc import Iterable, Sequence

import numpy as np

from trocar_api.reasons import ErrorReason
from trocar_api.wire import Chunk
from trocar_server.engine.plan import Payload
from trocar_server.errors import ServiceError

MAX_RANK = 8


def tensor_byte_count(field: str, shape: Sequence[int], itemsize: int) -> int:
    """Return the bytes of a tensor of this shape.

    Raises:
        ServiceError: `INVALID_TENSOR` for a rank over 8 or a negative size.
    """
    if len(shape) > MAX_RANK:
        raise ServiceError(
            ErrorReason.INVALID_TENSOR, f"{field}: rank {len(shape)} is over {MAX_RANK}", field=field
        )
    count = itemsize
    for size in shape:
        if size < 0:
            raise ServiceError(ErrorReason.INVALID_TENSOR, f"{field}: size {size} is negative", field=field)
        count *= size
    return count


class PayloadReceiver:
    """Assembles the payloads of one call from chunks that come in order.

    receiver = PayloadReceiver([602112])
    receiver.feed(chunks)
    payloads = receiver.finish()
    """

    def __init__(self, byte_counts: Sequence[int]) -> None:
        self._payloads: list[Payload] = [np.empty(count, np.uint8) for count in byte_counts]
        self._index = 0
        self._offset = 0
        self._skip_full()

    @property
    def is_complete(self) -> bool:
        """Whether every byte has come."""
        return self._index == len(self._payloads)

    def feed(self, chunks: Iterable[Chunk]) -> None:
        """Copy chunks to their places.

        Raises:
            ServiceError: `INVALID_TENSOR` when one is not the next stretch of bytes.
        """
        for chunk in chunks:
            self._check(chunk)
            end = self._offset + chunk.data.nbytes
            self._payloads[self._index][self._offset : end] = np.frombuffer(chunk.data, np.uint8)
            self._offset = end
            self._skip_full()

    def finish(self) -> list[Payload]:
        """Return the payloads.

        Raises:
            ServiceError: `INVALID_TENSOR` when bytes are missing.
        """
        if not self.is_complete:
            raise _wrong(
                f"payload {self._index} ends after {self._offset:,} of "
                f"{self._payloads[self._index].nbytes:,} bytes; "
                "shape and dtype must match the bytes that are sent"
            )
        return self._payloads

    def _check(self, chunk: Chunk) -> None:
        if self.is_complete:
            raise _wrong("more bytes were sent than shape and dtype account for")
        if (chunk.payload_index, chunk.offset_bytes) != (self._index, self._offset):
            raise _wrong(
                f"expected payload {self._index} from byte {self._offset:,}, "
                f"got payload {chunk.payload_index} from byte {chunk.offset_bytes:,}"
            )
        room = self._payloads[self._index].nbytes - self._offset
        if not 0 < chunk.data.nbytes <= room:
            raise _wrong(
                f"payload {self._index}: a chunk of {chunk.data.nbytes:,} bytes where {room:,} are missing; "
                "shape and dtype must match the bytes that are sent"
            )

    def _skip_full(self) -> None:
        while not self.is_complete and self._offset == self._payloads[self._index].nbytes:
            self._index, self._offset = self._index + 1, 0


def _wrong(problem: str) -> ServiceError:
    return ServiceError(ErrorReason.INVALID_TENSOR, problem, field="chunks")
