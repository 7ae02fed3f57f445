"""Extraction replies, parsed from bytes; knows the messages, not the transport."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import starmap
from operator import attrgetter
from typing import Any

import numpy as np
from google.protobuf.message import DecodeError

from trocar._base.tensors import (
    MAX_RANK,
    Array,
    Bytes,
    flat_bytes,
    result_dtype,
    widen_bfloat16,
    wire_numpy_dtype,
)
from trocar._base.types import ServerTiming
from trocar._request.execution import ExecutionInfo
from trocar._result.feature_maps import FeatureMapInfo, FeatureMaps
from trocar._transport.segments import placed
from trocar._wire.from_wire import expansions, feature_map_info, processed_input, statistics
from trocar.errors import BadReplyError
from trocar_api.v1 import extraction_pb2 as pb
from trocar_api.wire import Chunk, Layout, WireError, split_message

_MOST_FIXED_BYTES = 64 << 10
"""Size limit of a reply that is kept, without its values."""


@dataclass
class _Destination:
    """Destination of the bytes of one feature map."""

    name: str
    array: Array
    buffer: Bytes
    missing_bytes: int
    is_float16: bool = False
    """Whether it came so, of arrays that are wider."""

    def widen(self) -> None:
        """Widen received values to float32, exactly."""
        if self.is_float16:
            self.array.reshape(-1)[:] = self.buffer.view(np.float16)
        else:
            widen_bfloat16(self.buffer.view(np.uint16), self.array.reshape(-1))

    def take(self, source: Bytes, out: Mapping[str, Array]) -> None:
        """Become a view of existing bytes; or copy them if the array is the caller's."""
        is_same_layout = self.array.nbytes == self.buffer.nbytes
        if self.name in out and is_same_layout:
            if source.ctypes.data != self.buffer.ctypes.data:
                np.copyto(self.buffer, source)
        else:
            self.buffer = source
            if is_same_layout:
                self.array = source.view(self.array.dtype).reshape(self.array.shape)
        self.missing_bytes = self.buffer.nbytes - source.nbytes


@dataclass(frozen=True)
class _Known:
    """A reply without values and times."""

    layout: Layout
    times: slice
    """Place of its times."""
    head: pb.ExtractResponse
    info: Mapping[str, FeatureMapInfo]
    arrays: Sequence[tuple[str, tuple[int, ...], np.dtype[Any]]]
    """Name, shape and dtype of each array."""
    expansions: Mapping[str, tuple[str, ...]]
    execution: ExecutionInfo
    byte_counts: list[int]
    starts: list[int]
    """Where each value is, if they are in memory."""


class LastReply:
    """The last reply to equal requests, without values and times: an equal one is not parsed again.

    Replies of one message, with nothing but values: their other bytes are compared. Thread-safe.
    """

    known: _Known | None = None


class ReplyAssembler:
    """Assembles one reply from its messages.

        reply = ReplyAssembler("resnet50")
        for message in stream:
            reply.feed(message)
        maps = reply.finish()

    Every array is allocated once, when the first message has its shape, and each chunk is copied
    to its place: nothing is joined or converted later (bfloat16 excepted).

    Args:
        model_id: The model of the call.
        out: Arrays to fill instead of new ones, by feature map name.
        more: Names and sizes of further payloads, which follow those of the feature maps.
        objective_offset: What is added to the value of the objective that the server returns.
        widens: Whether float16 values that were float32 come as float32.
        last: The last reply to such a request; replaced by this one. Only without `out`, `more` and `widens`.

    Attributes:
        byte_counts: Bytes of each value as sent, in order.
        out_byte_count: Bytes of the arrays of `out`.
    """

    def __init__(
        self,
        model_id: str,
        out: Mapping[str, Array] | None = None,
        more: Sequence[tuple[str, int]] = (),
        objective_offset: float = 0.0,
        *,
        widens: bool = False,
        last: LastReply | None = None,
    ) -> None:
        self._widens = widens
        self._last = None if out or more or widens else last
        self._first_message = b""
        self._maps: FeatureMaps | None = None
        self.byte_counts: list[int] = []
        self.model_id = model_id
        self._out = dict(out or {})
        self.out_byte_count = sum(map(attrgetter("nbytes"), self._out.values()))
        self._objective_offset = objective_offset
        self._head: pb.ExtractResponse | None = None
        self._destinations: list[_Destination] = []
        self._info: dict[str, FeatureMapInfo] = {}
        self._current = 0
        self._offered: Callable[[], Bytes | None] | None = None
        self._is_placed = False
        self._more = list(starmap(_bytes_destination, more))

    def offer(self, memory: "Callable[[], Bytes | None] | None") -> None:
        """Offer memory shared with the server, in which values may be instead of chunks.

        Args:
            memory: Called when they are there; values are then views of what it returns. None: no offer.
        """
        self._offered = memory

    def restart(self) -> None:
        """Drop received data: the call is retried."""
        self._head, self._destinations, self._current, self._offered = None, [], 0, None
        self._first_message, self._maps, self.byte_counts = b"", None, []
        self._is_placed = False

    @property
    def is_shared(self) -> bool:
        """Whether the values were in the offered memory."""
        return self._head is not None and self._head.is_shared

    @property
    def head_byte_count(self) -> int:
        """Bytes of the description of the reply; 0 before it has come."""
        return 0 if self._head is None else self._head.ByteSize()

    def own_bytes(self) -> Bytes | None:
        """Return the bytes of the array of `out`, if that is one and contiguous."""
        arrays = list(self._out.values())
        return flat_bytes(arrays[0]) if len(arrays) == 1 and arrays[0].flags.c_contiguous else None

    def feed(self, message: bytes) -> None:
        """Parse the next message.

        Raises:
            BadReplyError: The message breaks the contract.
            ValueError: An array of `out` does not fit the feature map of its name.
        """
        if self._maps is not None:
            raise BadReplyError("the reply has more bytes than it announced")
        known = None if self._last is None or self._head is not None else self._last.known
        result = None if known is None else known.layout.chunks(message)
        try:
            if known is not None and result is not None:
                self._maps = self._known_maps(known, message, result)
                return
            head, chunks = split_message(message)
            if self._head is None:
                self._first_message = message
                self.begin(pb.ExtractResponse.FromString(head))
        except (WireError, DecodeError) as error:
            raise BadReplyError(f"a message of the reply cannot be decoded: {error}") from error
        for chunk in chunks:
            self.place(chunk)

    def feed_placed(self, message: bytes, memory: Bytes) -> None:
        """Parse a reply of one message, whose values are in memory that is about to be reused.

        Args:
            message: Everything but the values.
            memory: The values, each aligned to 64 bytes.

        Raises:
            BadReplyError: The reply breaks the contract.
            ValueError: An array of `out` does not fit the feature map of its name.
        """
        known = None if self._last is None else self._last.known
        if known is not None and known.layout.chunks(message) is not None:
            chunks = []
            for index, (start, count) in enumerate(zip(known.starts, known.byte_counts, strict=True)):
                chunks.append(Chunk(index, 0, memory[start : start + count].data))
            self._maps = self._known_maps(known, message, chunks)
            return
        self._is_placed = True
        self.offer(memory.copy)
        self.feed(message)

    @property
    def is_complete(self) -> bool:
        """Whether every announced byte was received."""
        if self._maps is not None:
            return True
        return self._head is not None and not any(entry.missing_bytes for entry in self._destinations)

    @property
    def more(self) -> dict[str, bytes]:
        """The further payloads, by name."""
        return {destination.name: destination.buffer.tobytes() for destination in self._more}

    def finish(self) -> FeatureMaps:
        """Return the feature maps.

        Raises:
            BadReplyError: The reply ended early.
        """
        if self._maps is not None:
            return self._maps
        if self._head is None:
            raise BadReplyError("the reply is empty")
        for destination in self._destinations:
            if destination.missing_bytes:
                raise BadReplyError(
                    f"the reply ended early: {destination.missing_bytes:,} of {destination.buffer.nbytes:,} "
                    f"bytes of {destination.name!r} are missing"
                )
            if destination.array.nbytes != destination.buffer.nbytes:
                destination.widen()
        maps = self._feature_maps(self._head)
        if self._last is not None:
            self._last.known = self._as_known(self._head, maps)
        return maps

    def _known_maps(self, known: _Known, message: bytes, chunks: Sequence[Chunk]) -> FeatureMaps:
        """Read values and times of a reply that is otherwise known."""
        arrays: dict[str, Array] = {}
        for (name, shape, dtype), chunk in zip(known.arrays, chunks, strict=True):
            arrays[name] = array = np.empty(shape, dtype)
            array.reshape(-1).view(np.uint8)[:] = np.frombuffer(chunk.data, np.uint8)
        times, head = pb.ExtractResponse.FromString(message[known.times]).timing, known.head
        self.byte_counts = known.byte_counts
        return FeatureMaps(
            arrays,
            info=known.info,
            stats={},
            expansions=known.expansions,
            timing=ServerTiming(times.queue_s, times.compute_s),
            stopped_at=head.stopped_at if head.HasField("stopped_at") else None,
            model_id=self.model_id,
            execution=known.execution,
        )

    def _as_known(self, head: pb.ExtractResponse, maps: FeatureMaps) -> _Known | None:
        """Return this reply for the next one; None where it has more than values, or several messages."""
        if (
            (head.is_shared and not self._is_placed)
            or head.edit_expansions
            or head.processed
            or head.HasField("objective_value")
        ):
            return None
        if any(entry.statistics for entry in head.feature_maps):
            return None
        layout = Layout.of(self._first_message, pb.ExtractResponse.TIMING_FIELD_NUMBER)
        if layout is None or layout.varying is None:
            return None
        *starts, _ = placed(self.byte_counts)
        if layout.sizes != ([] if head.is_shared else self.byte_counts):
            return None
        if layout.fixed_byte_count > _MOST_FIXED_BYTES:
            return None
        for destination in self._destinations:
            if destination.array.nbytes != destination.buffer.nbytes:  # converted after their arrival
                return None
        arrays = [(entry.name, entry.array.shape, entry.array.dtype) for entry in self._destinations]
        return _Known(
            layout,
            layout.varying,
            head,
            self._info,
            arrays,
            maps.expansions,
            maps.execution,
            self.byte_counts,
            starts,
        )

    def begin(self, head: pb.ExtractResponse) -> None:
        """Parse the description of the reply, without its chunks.

        Raises:
            BadReplyError: It breaks the contract.
            ValueError: An array of `out` does not fit the feature map of its name.
        """
        self._info = {}
        for entry in head.feature_maps:
            self._info[entry.name] = feature_map_info(entry)
        if len(self._info) != len(head.feature_maps):
            raise BadReplyError("two feature maps of the reply have the same name")
        if self._out:
            self._check_out()
        self._destinations = []
        for info in self._info.values():
            if info.has_values:
                self._destinations.append(self._destination(info))
        self._destinations += self._more
        self.byte_counts = list(map(attrgetter("buffer.nbytes"), self._destinations))
        self._head = head
        if head.is_shared:
            self._take_shared()

    def _check_out(self) -> None:
        unknown = self._out.keys() - {name for name, entry in self._info.items() if entry.has_values}
        if unknown:
            raise ValueError(
                f"out has {', '.join(sorted(unknown))}, but the reply has {', '.join(self._info)}"
            )

    def _take_shared(self) -> None:
        """Read the values from the offered memory."""
        memory = self._offered() if self._offered is not None else None
        *starts, end = placed(self.byte_counts)
        if memory is None or end > memory.nbytes:
            raise BadReplyError("the reply is in memory that the client did not offer")
        for start, destination in zip(starts, self._destinations, strict=True):
            destination.take(memory[start : start + destination.buffer.nbytes], self._out)

    def _destination(self, info: FeatureMapInfo) -> _Destination:
        if len(info.shape) > MAX_RANK or min(info.shape, default=0) < 0:
            raise BadReplyError(f"the shape {info.shape} of {info.name!r} is impossible")
        size = math.prod(info.shape)
        wire_dtype, dtype = wire_numpy_dtype(info.dtype), result_dtype(info.dtype)
        if self._widens and info.cast is not None and info.cast.original_dtype == "float32":
            dtype = np.dtype("float32") if info.dtype == "float16" else dtype
        if size * wire_dtype.itemsize != info.byte_count:
            raise BadReplyError(
                f"{info.name!r} of shape {info.shape} and dtype {info.dtype} cannot have "
                f"{info.byte_count:,} bytes"
            )
        array = self._allocate(info, dtype)
        same_bytes = wire_dtype.itemsize == dtype.itemsize
        buffer = flat_bytes(array if same_bytes else np.empty(size, wire_dtype))
        return _Destination(info.name, array, buffer, buffer.nbytes, is_float16=info.dtype == "float16")

    def _allocate(self, info: FeatureMapInfo, dtype: np.dtype[np.generic]) -> Array:
        if info.name in self._out:
            return _checked(info, dtype, self._out[info.name])
        try:
            return np.empty(info.shape, dtype)
        except ValueError as error:
            raise BadReplyError(f"no array can have the shape {info.shape} of {info.name!r}") from error

    def place(self, chunk: Chunk) -> None:
        """Copy a chunk to where it belongs.

        Raises:
            BadReplyError: It is not the next one.
        """
        if not chunk.data.nbytes:
            return
        while self._current < len(self._destinations) and not self._destinations[self._current].missing_bytes:
            self._current += 1
        if self._current == len(self._destinations):
            raise BadReplyError("the reply has more bytes than it announced")
        destination = self._destinations[self._current]
        start, end = chunk.offset_bytes, chunk.offset_bytes + chunk.data.nbytes
        received_bytes = destination.buffer.nbytes - destination.missing_bytes
        if chunk.payload_index != self._current or start != received_bytes:
            raise BadReplyError(
                f"chunks out of order: payload {self._current} at byte {received_bytes} was expected, "
                f"payload {chunk.payload_index} at byte {start} was received"
            )
        if end > destination.buffer.nbytes:
            raise BadReplyError(f"the reply has more bytes for {destination.name!r} than it announced")
        destination.buffer[start:end] = np.frombuffer(chunk.data, np.uint8)
        destination.missing_bytes -= chunk.data.nbytes

    def _feature_maps(self, head: pb.ExtractResponse) -> FeatureMaps:
        own = self._destinations[: len(self._destinations) - len(self._more)]
        arrays = dict(map(attrgetter("name", "array"), own))
        stats = {}
        for entry in head.feature_maps:
            if entry.statistics:
                stats[entry.name] = statistics(entry, arrays.get(f"{entry.name}.covariance"))
        return FeatureMaps(
            arrays,
            info=self._info,
            stats=stats,
            expansions=expansions(head.expansions),
            timing=ServerTiming(head.timing.queue_s, head.timing.compute_s),
            stopped_at=head.stopped_at if head.HasField("stopped_at") else None,
            model_id=self.model_id,
            objective=self._objective(head) if head.HasField("objective_value") else None,
            edit_expansions=expansions(head.edit_expansions) if head.edit_expansions else None,
            execution=ExecutionInfo.from_wire(head.execution),
            processed=list(map(processed_input, head.processed)),
        )

    def _objective(self, head: pb.ExtractResponse) -> float:
        return head.objective_value + self._objective_offset


def _bytes_destination(name: str, size: int) -> _Destination:
    buffer = np.empty(size, np.uint8)
    return _Destination(name, buffer, buffer, size)


def _checked(info: FeatureMapInfo, dtype: np.dtype[np.generic], array: Array) -> Array:
    """Return the caller's array, or raise an error about it."""
    flags = array.flags
    if array.dtype != dtype or array.shape != info.shape or not (flags.c_contiguous and flags.writeable):
        raise ValueError(
            f"out[{info.name!r}] must be a writable C-contiguous {dtype} array of shape {info.shape}; "
            f"it is {array.dtype} of shape {array.shape}, contiguous {flags.c_contiguous}, "
            f"writable {flags.writeable}"
        )
    return array
