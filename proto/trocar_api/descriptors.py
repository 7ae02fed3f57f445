"""Descriptors of prepared calls, 64 bytes each way on a Unix socket, and the memory that they speak of.

    socket.send(Ask(CALL, slot=0, number=1, timeout_s=30.0, request_id=request_id).to_bytes())
    answer = Answer.from_bytes(socket.recv(DESCRIPTOR_BYTES))

The memory is a row of slots of equal size. A slot has the payloads of one call, one after the other; then
the values of its reply, each aligned to 64 bytes; then the head of its reply, an `ExtractResponse` without
chunks, or the `google.rpc.Status` of a call that failed. Descriptors have no offsets, only a slot's number.
"""

import math
from dataclasses import dataclass
from functools import cached_property
from struct import Struct

DESCRIPTOR_BYTES = 64
MAX_SLOTS = 16
CALL, CANCEL = 1, 2
"""Kinds of what a client sends."""
DONE, FAILED, NO_ROOM = 1, 2, 3
"""Kinds of what a server sends: the slot has the reply, or a status, or is too small for the reply."""

_ALIGNMENT_BYTES = 64
_PAGE_BYTES = 4096
_ASK = Struct("<BBxxId16s16s8sB7x")
_ANSWER = Struct("<BBxxII52x")
_NO_TRACE = bytes(16)


class DescriptorError(ValueError):
    """Bytes that are no descriptor."""


@dataclass(frozen=True, slots=True)
class Ask:
    """Descriptor of a client: a call, or the end of one.

    Attributes:
        kind: `CALL` or `CANCEL`.
        slot: Its slot.
        number: Chosen by the client; the answer repeats it.
        timeout_s: Of the call, in seconds; finite and above 0.
        request_id: 16 bytes.
        trace_id: Of the caller's trace context, 16 bytes; zeros without one.
        span_id: Likewise, 8 bytes.
        trace_flags: Likewise.
    """

    kind: int
    slot: int
    number: int
    timeout_s: float = 1.0
    request_id: bytes = bytes(16)
    trace_id: bytes = _NO_TRACE
    span_id: bytes = bytes(8)
    trace_flags: int = 0

    def to_bytes(self) -> bytes:
        """Serialise it."""
        return _ASK.pack(
            self.kind,
            self.slot,
            self.number,
            self.timeout_s,
            self.request_id,
            self.trace_id,
            self.span_id,
            self.trace_flags,
        )

    @classmethod
    def from_bytes(cls, data: bytes, slot_count: int) -> "Ask":
        """Parse and check it.

        Raises:
            DescriptorError: Its size, kind, slot or timeout is impossible.
        """
        if len(data) != _ASK.size:
            raise DescriptorError(f"a descriptor has {_ASK.size} bytes, not {len(data)}")
        ask = cls(*_ASK.unpack(data))
        if ask.kind not in {CALL, CANCEL}:
            raise DescriptorError(f"no kind {ask.kind} of descriptor")
        if ask.slot >= slot_count:
            raise DescriptorError(f"no slot {ask.slot} of {slot_count}")
        if not (math.isfinite(ask.timeout_s) and ask.timeout_s > 0):
            raise DescriptorError("the timeout is not a finite number of seconds above 0")
        return ask

    @property
    def traceparent(self) -> str:
        """The trace context as W3C writes it; empty without one."""
        if self.trace_id == _NO_TRACE:
            return ""
        return f"00-{self.trace_id.hex()}-{self.span_id.hex()}-{self.trace_flags:02x}"


@dataclass(frozen=True, slots=True)
class Answer:
    """Descriptor of a server: the end of a call.

    Attributes:
        kind: `DONE`, `FAILED` or `NO_ROOM`.
        slot: The call's slot.
        number: The call's number.
        head_byte_count: Bytes of the head of its reply, or of its status.
    """

    kind: int
    slot: int
    number: int
    head_byte_count: int = 0

    def to_bytes(self) -> bytes:
        """Serialise it."""
        return _ANSWER.pack(self.kind, self.slot, self.number, self.head_byte_count)

    @classmethod
    def from_bytes(cls, data: bytes) -> "Answer":
        """Parse it.

        Raises:
            DescriptorError: It has another size.
        """
        if len(data) != _ANSWER.size:
            raise DescriptorError(f"a descriptor has {_ANSWER.size} bytes, not {len(data)}")
        return cls(*_ANSWER.unpack(data))


@dataclass(frozen=True)
class SlotLayout:
    """Places within a slot, in bytes from its start.

    Attributes:
        payload_bytes: Bytes of the payloads, from 0 on.
        reply_bytes: Room for the values of a reply.
        head_bytes: Room for the rest of a reply.
    """

    payload_bytes: int
    reply_bytes: int
    head_bytes: int

    @cached_property
    def reply_offset(self) -> int:
        """Where the values of a reply begin."""
        return _rounded(self.payload_bytes, _ALIGNMENT_BYTES)

    @cached_property
    def head_offset(self) -> int:
        """Where the head of a reply begins."""
        return self.reply_offset + _rounded(self.reply_bytes, _ALIGNMENT_BYTES)

    @cached_property
    def slot_bytes(self) -> int:
        """Bytes of a slot: whole pages."""
        return _rounded(self.head_offset + self.head_bytes, _PAGE_BYTES)


def _rounded(byte_count: int, unit: int) -> int:
    return -(-byte_count // unit) * unit
