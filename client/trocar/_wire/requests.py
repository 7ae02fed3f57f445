"""Extraction requests, serialised to bytes; knows the messages, not the transport."""

from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from operator import attrgetter
from typing import TypeAlias, TypeGuard

import numpy as np

from trocar._base.call_options import Wire
from trocar._request.execution import AS_USUAL, Execution
from trocar._request.inputs import wire_inputs
from trocar._request.narrow import check_wire
from trocar._request.reductions import CASTS
from trocar._request.surgery import NO_SURGERY, Surgery
from trocar._request.taps import Tap, gradient_tap
from trocar._wire.image_sizes import with_image_sizes
from trocar._wire.replies import LastReply
from trocar_api.byte_sizes import byte_count
from trocar_api.v1 import extraction_pb2 as pb
from trocar_api.v1.tap_pb2 import Tap as WireTap
from trocar_api.v1.tensor_pb2 import (
    DTYPE_BOOL,
    DTYPE_FLOAT32,
    DTYPE_INT8,
    DTYPE_INT16,
    DTYPE_INT32,
    DTYPE_INT64,
    DTYPE_UINT8,
    TensorChunk,
    TensorSpec,
)
from trocar_api.wire import HEAD_KEY, chunk_header, split_payload

CHUNK_BYTES = 1 << 20
"""Payload bytes in one message: 0.5 to 2 MiB is the plateau, 64 KiB three times slower.

As many go into the first message: a call of one message starts 0.3 ms sooner, but one of 2 MiB takes 1.5
times as long as in pieces, and one of 4 MiB twice.
"""

_CHEAP_BYTES = 64 << 10
"""Up to so many payload bytes are read as soon as metadata."""

_MOST_HEAD_BYTES = 2048
"""The longest head that goes into metadata, which servers limit; longer ones are not kept by a server."""


class ExtractCall:
    """One request: everything but the payloads as bytes, and the payloads as views.

    Args:
        head: `ExtractRequest` without chunks, serialised.
        payloads: One flat view of bytes for each tensor and image, in order.

    Attributes:
        head: As given.
        payloads: As given.
        byte_count: Bytes of all payloads.
        fits_one_message: Whether the call may be made as a server-streaming one.
        headers: Metadata by which a busy server refuses the call before it reads the payloads.
    """

    def __init__(self, head: bytes, payloads: list[memoryview]) -> None:
        self.head = head
        self.payloads = payloads
        self.byte_count = sum(map(attrgetter("nbytes"), payloads))
        self.fits_one_message = self.byte_count <= CHUNK_BYTES
        has_copy = self.byte_count > _CHEAP_BYTES and len(head) <= _MOST_HEAD_BYTES
        self.headers: tuple[tuple[str, bytes], ...] = ((HEAD_KEY, head),) if has_copy else ()

    def message(self) -> bytes:
        """Return the whole request in one message."""
        parts: list[bytes | memoryview] = [self.head]
        for index, payload in enumerate(self.payloads):
            if payload.nbytes:
                parts += (chunk_header(index, 0, payload.nbytes), payload)
        return b"".join(parts)

    def messages(self) -> Iterator[bytes]:
        """Yield the head, then messages of about 1 MiB; small payloads share one.

        The first payload bytes come with the head where all fit in one message.
        """
        if self.fits_one_message:
            yield self.message()
            return
        yield self.head
        parts: list[bytes | memoryview] = []
        waiting_bytes = 0
        for index, payload in enumerate(self.payloads):
            for part in split_payload(index, payload, CHUNK_BYTES):
                if waiting_bytes + part[1].nbytes > CHUNK_BYTES:
                    yield b"".join(parts)
                    parts, waiting_bytes = [], 0
                parts += part
                waiting_bytes += part[1].nbytes
        yield b"".join(parts)


Taps: TypeAlias = str | Tap | Sequence[str | Tap]


def tap_payloads(taps: Taps) -> list[memoryview]:
    """Return the bytes of the taps' arrays, in order."""
    chosen = [taps] if isinstance(taps, (str, Tap)) else taps
    if not hasattr(chosen, "__iter__"):
        raise _not_taps("taps", taps)
    return [payload for tap in chosen if isinstance(tap, Tap) for payload in tap.payloads()]


def gradient_taps(at: Taps, taps: Taps) -> list[str | Tap]:
    """Return the taps of gradients at some values, then of other values.

    Raises:
        ValueError: No gradient is requested.
    """
    values = [at] if isinstance(at, (str, Tap)) else at
    others = [taps] if isinstance(taps, (str, Tap)) else taps
    if not hasattr(values, "__iter__"):
        raise _not_taps("at", at)
    if not hasattr(others, "__iter__"):
        raise _not_taps("taps", taps)
    if not values:
        raise ValueError('`at` is empty; give at least one selector, for example at="/in"')
    return [*map(gradient_tap, values), *others]


def wire_taps(taps: Taps, wire: Wire | None = None) -> list[WireTap]:
    """Convert a caller's taps to messages; float32 values without a cast of their own are cast to `wire`."""
    chosen = [taps] if isinstance(taps, (str, Tap)) else taps
    if not hasattr(chosen, "__iter__"):
        raise _not_taps("taps", taps)
    result = [tap.to_wire() if isinstance(tap, Tap) else WireTap(selector=_selector(tap)) for tap in chosen]
    for tap in result:
        if wire is not None and not tap.HasField("cast") and (tap.values or not tap.HasField("values")):
            tap.cast.CopyFrom(CASTS[wire])
            tap.cast.only_float32 = True
    return result


def _not_taps(name: str, given: object) -> TypeError:
    """Error for what is neither a selector nor several; inline checks keep a call cheap."""
    what = "None" if given is None else repr(given)
    return TypeError(f"{name} is {what}; give selectors such as ['layer4'], or trocar.tap(...)")


def _selector(given: object) -> str:
    if not isinstance(given, str):
        raise TypeError(f"taps has {given!r}; an entry is a selector such as 'layer4', or trocar.tap(...)")
    return given


@dataclass(frozen=True)
class Start:
    """Start of a pass other than the model's input."""

    at: str | None = None
    """A selector; at the model's input when None."""
    shape: tuple[int, ...] | None = None
    """The float32 input from which the value would have come; the model's example input when None."""

    def __post_init__(self) -> None:
        if self.shape is not None and self.at is None:
            raise ValueError("start_shape is only used with start_at, which is None")

    def inputs(self) -> list[TensorSpec]:
        """Return the shape as a message."""
        return [] if self.shape is None else [TensorSpec(dtype=DTYPE_FLOAT32, shape=self.shape)]


FROM_INPUT = Start()
"""A pass as usual."""


def plan_request(
    model_id: str,
    inputs: object,
    taps: Taps,
    start: Start = FROM_INPUT,
    surgery: Surgery = NO_SURGERY,
    adapter: str = "",
) -> pb.PlanRequest:
    """Build the request of `Client.plan`; see there for the arguments."""
    sources = [
        pb.SourceInputs(name=name, inputs=_described(given)[0]) for name, given in surgery.sources.items()
    ]
    described, chunks = _described(inputs)
    request = pb.ExtractRequest(
        model_id=model_id,
        taps=wire_taps(taps),
        inputs=described,
        chunks=chunks,
        start_at=start.at or "",
        start_inputs=start.inputs(),
        edits=surgery.wire_edits(),
        objective=surgery.wire_objective(),
        sources=sources,
        adapter=adapter,
    )
    return pb.PlanRequest(extraction=request)


def extract_call(  # noqa: PLR0913, PLR0917 - the options of one call
    model_id: str,
    inputs: object,
    taps: Taps,
    chunk_bytes: int | str | None = None,
    start: Start = FROM_INPUT,
    surgery: Surgery = NO_SURGERY,
    execution: Execution = AS_USUAL,
    wire: Wire | None = None,
    adapter: str = "",
) -> ExtractCall:
    """Build the request of `Client.extract`; see there for the arguments and what is raised."""
    check_wire(wire)
    arguments, payloads = wire_inputs(inputs, wire)
    sources = {name: wire_inputs(given, wire) for name, given in surgery.sources.items()}
    head = pb.ExtractRequest(
        model_id=model_id,
        taps=wire_taps(taps, wire),
        inputs=arguments,
        max_chunk_bytes=None if chunk_bytes is None else byte_count(chunk_bytes, "chunk_bytes"),
        start_at=start.at or "",
        start_inputs=start.inputs(),
        edits=surgery.wire_edits(),
        objective=surgery.wire_objective(),
        sources=[pb.SourceInputs(name=name, inputs=given) for name, (given, _) in sources.items()],
        execution=execution.to_wire(),
        adapter=adapter,
    )
    operands = [*tap_payloads(taps), *surgery.payloads()]
    of_sources = [payload for _, given in sources.values() for payload in given]
    return ExtractCall(head.SerializeToString(), [*payloads, *operands, *of_sources])


_MAX_HEADS = 256


class PlainRequests:
    """Heads of plain requests by their arguments: an equal request is not built again. Thread-safe.

    Each has the last reply to it, without its values: an equal reply is not read again.

    A plain request has one array that is sent as it is, selectors or taps with statistics given by name, and
    options that are strings, numbers or None. Of the array its head has dtype and shape alone. Requests with
    edits or reductions, or with shares of quantiles or edges of histograms, are not plain: 0.0 and -0.0 are
    equal, and make different requests.
    """

    def __init__(self) -> None:
        self._kept: dict[Hashable, tuple[bytes, LastReply]] = {}

    def find(
        self, inputs: object, taps: Taps, options: Hashable
    ) -> tuple[Hashable, ExtractCall | None, LastReply | None]:
        """Return the key of a request; and the request and its last reply, if an equal one was kept.

        The key is None where it is not plain.
        """
        if type(inputs) is not np.ndarray or not (inputs.flags.c_contiguous and inputs.dtype.isnative):
            return None, None, None
        selectors = tuple(taps) if isinstance(taps, (list, tuple)) else (taps,)
        if not selectors or not all(map(_is_plain, selectors)):
            return None, None, None
        key = (selectors, inputs.dtype, inputs.shape, options)
        try:
            kept = self._kept.get(key)
        except TypeError:  # an option that cannot be hashed: whoever builds the request will refuse it
            return None, None, None
        if kept is None:
            return key, None, None
        return key, ExtractCall(kept[0], [inputs.reshape(-1).view(np.uint8).data]), kept[1]

    def keep(self, key: Hashable, inputs: object, request: ExtractCall) -> None:
        """Keep the head of a request whose payload is the very memory of its array."""
        if key is None or not isinstance(inputs, np.ndarray) or len(request.payloads) != 1:
            return
        payload = np.frombuffer(request.payloads[0], np.uint8)
        if payload.nbytes == inputs.nbytes > 0 and payload.ctypes.data == inputs.ctypes.data:
            if len(self._kept) >= _MAX_HEADS:
                self._kept.clear()
            self._kept[key] = request.head, LastReply()


def _is_plain(tap: object) -> bool:
    """Whether equal taps are equal messages."""
    if type(tap) is str:
        return True
    return type(tap) is Tap and not tap.reduce and all(type(stat) is str for stat in tap.stats)


def _described(inputs: object) -> tuple[list[pb.Input], list[TensorChunk]]:
    """Return shapes and dtypes of inputs, and values by which a model may decide, as masks.

    A shape stands for one float32 input.
    """
    if isinstance(inputs, Mapping) and _is_shape(shape := inputs.get("")):  # beside flags
        others = wire_inputs({name: inputs[name] for name in inputs if name})
        return [_float_input(shape), *with_image_sizes(*others)], []
    if _is_shape(inputs):
        return [_float_input(inputs)], []
    arguments, payloads = wire_inputs(inputs)
    return with_image_sizes(arguments, payloads), _deciding(arguments, payloads)


_MOST_DECIDING_BYTES = 64 << 10
"""Bytes of values that are sent for a plan."""
_DECIDING = frozenset({DTYPE_BOOL, DTYPE_INT64, DTYPE_INT32, DTYPE_INT16, DTYPE_INT8, DTYPE_UINT8})


def _deciding(arguments: Sequence[pb.Input], payloads: Sequence[memoryview]) -> list[TensorChunk]:
    """Return the values of named tensors of integers and booleans; none if they are large."""
    if any(argument.WhichOneof("value") not in ("tensor", "flag") for argument in arguments):
        return []  # images and texts are described otherwise
    tensors = [argument for argument in arguments if argument.HasField("tensor")]
    chosen = [
        TensorChunk(payload_index=index, data=bytes(payload))
        for index, (argument, payload) in enumerate(zip(tensors, payloads, strict=True))
        if argument.name and argument.tensor.dtype in _DECIDING and payload.nbytes <= _MOST_DECIDING_BYTES
    ]
    return chosen if sum(len(chunk.data) for chunk in chosen) <= _MOST_DECIDING_BYTES else []


def _is_shape(value: object) -> TypeGuard[tuple[int, ...]]:
    return isinstance(value, tuple) and all(isinstance(size, int) for size in value)


def _float_input(shape: tuple[int, ...]) -> pb.Input:
    return pb.Input(tensor=TensorSpec(dtype=DTYPE_FLOAT32, shape=shape))
