"""Prepared extraction with asyncio: planned once, called often."""

from __future__ import annotations

import time
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np

from trocar._base.call_options import over
from trocar._base.concurrency import AsyncLock, async_compute, async_pause
from trocar._request.execution import execution_of
from trocar._request.inputs import wire_inputs
from trocar._request.surgery import make_surgery
from trocar._transport.call_sockets import NoRoomError, NotPreparedError, PreparedCallError
from trocar._transport.channel import new_request_id
from trocar._transport.segments import copy_payloads, placed
from trocar._wire.replies import LastReply, ReplyAssembler
from trocar._wire.requests import ExtractCall, Start, extract_call
from trocar_api.descriptors import SlotLayout
from trocar_api.v1.prepared_pb2 import PrepareCallsRequest

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from types import TracebackType
    from typing import Self

    from trocar._async.connection import AsyncConnection
    from trocar._async.extraction import AsyncExtraction
    from trocar._base.call_options import CallOptions, Wire
    from trocar._base.tensors import Array
    from trocar._request.edits import Edit
    from trocar._request.inputs import Inputs
    from trocar._request.objectives import Objective
    from trocar._request.taps import Tap
    from trocar._result.feature_maps import FeatureMaps
    from trocar._transport.call_sockets import AsyncCallSocket

_SLOTS = 4
"""Prepared calls at a time; one more is made as any other call."""
_MOST_BYTES = 256 << 20
"""The most shared memory of one prepared request."""
_MOST_REPLY_BYTES = 4 << 20
"""Larger replies are not copied out of a slot: as those of other calls they are views of shared memory."""
_LARGE_BYTES = 1 << 20
"""From this size on copying the inputs takes longer than handing it to another thread."""
_HEAD_ROOM_BYTES, _MOST_HEAD_BYTES = 4 << 10, 1 << 20
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 1.0, 60.0
"""How long a server that prepares nothing is not asked again."""


class AsyncPreparing:
    """Prepared requests over one connection."""

    def __init__(self, connection: AsyncConnection, extraction: AsyncExtraction) -> None:
        self._connection = connection
        self._extraction = extraction

    async def prepare(  # noqa: PLR0913 - options of one request, by keyword
        self,
        model_id: str,
        inputs: Inputs | None,
        taps: str | Tap | Sequence[str | Tap],
        *,
        start_at: str | None = None,
        start_shape: tuple[int, ...] | None = None,
        edits: str | Edit | Sequence[str | Edit] = (),
        of: Objective | None = None,
        sources: Mapping[str, Inputs] | None = None,
        adapter: str = "",
        options: CallOptions | None = None,
    ) -> AsyncPreparedExtraction:
        """Prepare an `extract` that is called often, with inputs of one shape and dtype.

            async with await client.prepare("resnet50", images, taps=["avgpool"]) as prepared:
                for batch in batches:
                    maps = await prepared(batch)

        The request is built and checked once, with these inputs as an example: one pass is made. Results are
        those of `extract`. On a Unix socket, a call is then a message of 64 bytes beside tensors in shared
        memory; elsewhere, and whenever the server offers no more of that, it is an `extract`.

        Args:
            model_id: As in `extract`.
            inputs: Example inputs, as in `extract`. Later ones must have the same number, shapes and dtypes.
            taps: As in `extract`.
            start_at: As in `extract`.
            start_shape: As in `extract`.
            edits: As in `extract`. Their arrays are those of now.
            of: As in `extract`.
            sources: As in `extract`. Their arrays are those of now.
            adapter: As in `extract`.
            options: As in `extract`; `timeout_s` is that of the pass on the example.

        Raises:
            TrocarError: As `extract`.
            ValueError: As `extract`.
        """
        start, surgery = Start(start_at, start_shape), make_surgery(edits, of, sources)
        defaults = self._connection.options.calls
        how = defaults if options is None else over(options, defaults)
        request = extract_call(
            model_id, inputs, taps, how.chunk_bytes, start, surgery, execution_of(how), how.wire, adapter
        )
        own_copies = [memoryview(bytes(payload)) for payload in request.payloads]
        call = ExtractCall(request.head, own_copies)
        reply = ReplyAssembler(
            model_id, objective_offset=surgery.objective_offset, widens=how.wire is not None
        )
        await self._extraction.collect(call, reply, how.timeout_s, how.cache)
        return AsyncPreparedExtraction(
            self._connection,
            self._extraction,
            call,
            inputs,
            reply,
            surgery.objective_offset,
            how.wire,
            how.cache,
        )


class AsyncPreparedExtraction:
    """An `extract` with everything but the inputs; made by `prepare`.

    maps = await prepared(images)

    Use it in a `with` block, or call `close`: that releases the shared memory. Safe for concurrent calls.
    """

    def __init__(
        self,
        connection: AsyncConnection,
        extraction: AsyncExtraction,
        call: ExtractCall,
        example: Inputs | None,
        reply: ReplyAssembler,
        objective_offset: float,
        wire: Wire | None,
        cache: bool | None,
    ) -> None:
        self._connection, self._extraction = connection, extraction
        self._wire: Wire | None = wire
        self._call, self._cache = call, cache
        self._model_id, self._objective_offset = reply.model_id, objective_offset
        arguments, payloads = wire_inputs(example, wire)
        self._arguments = arguments
        self._input_bytes = sum(payload.nbytes for payload in payloads)
        self._others = call.payloads[len(payloads) :]
        is_tensor = len(arguments) == 1 and arguments[0].HasField("tensor") and wire is None
        self._plain = _signature(example) if is_tensor else None
        self._last, self._last_placed = LastReply(), LastReply()
        self._reply_bytes, self._head_bytes = placed(reply.byte_counts)[-1], reply.head_byte_count
        self._sockets = connection.options.shares_memory
        self._calls: AsyncCallSocket | None = None
        self._opening = AsyncLock()
        self._again_at, self._pause_s = 0.0, _FIRST_PAUSE_S

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        await self.close()

    @property
    def is_shared(self) -> bool:
        """Whether calls go through the slots of shared memory now, and not as an `extract`."""
        return self._calls is not None and self._calls.is_open

    async def close(self) -> None:
        """Release the shared memory. Running calls are made as an `extract`, and so are later ones."""
        self._sockets = False
        calls, self._calls = self._calls, None
        if calls is not None:
            calls.close()

    async def __call__(
        self, inputs: Inputs | None, *, out: Mapping[str, Array] | None = None, timeout_s: float | None = None
    ) -> FeatureMaps:
        """Run one forward pass and return the values of the tapped modules; see `extract`.

        Args:
            inputs: Inputs of the number, shapes and dtypes of the example.
            out: As in `extract`.
            timeout_s: Overrides the client's timeout for this call, in seconds.

        Raises:
            TrocarError: As `extract`.
            ValueError: The inputs differ from the example in more than values; or as `extract`.
        """
        began_at, limit_s = time.monotonic(), self._connection.timeout(timeout_s)
        payloads = self._payloads(inputs)
        maps = await self._by_socket(payloads, self._reply(out, self._last_placed), began_at, limit_s)
        if maps is None:
            request = ExtractCall(self._call.head, [*payloads, *self._others])
            left_s = max(1e-3, limit_s - (time.monotonic() - began_at))
            maps = await self._extraction.collect(request, self._reply(out, self._last), left_s, self._cache)
        return maps

    def _payloads(self, inputs: Inputs | None) -> list[memoryview]:
        """Return the bytes of inputs that are like the example."""
        if type(inputs) is np.ndarray and self._plain == _signature(inputs) is not None:
            return [inputs.reshape(-1).view(np.uint8).data]
        arguments, payloads = wire_inputs(inputs, self._wire)
        if arguments != self._arguments:
            raise ValueError(
                "the inputs differ from `prepare`'s in number, shape or dtype; prepare another "
                "request, or use `extract`"
            )
        return payloads

    def _reply(self, out: Mapping[str, Array] | None, last: LastReply) -> ReplyAssembler:
        return ReplyAssembler(
            self._model_id,
            out,
            objective_offset=self._objective_offset,
            widens=self._wire is not None,
            last=last,
        )

    async def _by_socket(
        self, payloads: list[memoryview], reply: ReplyAssembler, began_at: float, limit_s: float
    ) -> FeatureMaps | None:
        """Make a call through a slot, and again if the server is busy; None if another way must be taken."""
        attempts, left_s = None, limit_s
        while (calls := await self._open()) is not None and (slot := calls.take()) is not None:
            request_id = new_request_id()
            try:
                await self._write(payloads, calls, slot)
                message = await calls.call(slot, request_id, left_s)
            except NotPreparedError:
                return None
            except NoRoomError:
                await self._grow(calls)
                return None
            except PreparedCallError as error:
                problem = self._connection.converted(error, request_id)
                attempts = attempts or self._connection.attempts(limit_s, began_at=began_at)
                pause_s = attempts.pause_after(problem, error)
                if pause_s is None:
                    raise problem from None
                await async_pause(pause_s)
                left_s = attempts.remaining_s
            else:
                return self._read(message, reply, calls, slot, began_at)
        return None

    async def _write(self, payloads: list[memoryview], calls: AsyncCallSocket, slot: int) -> None:
        try:
            if self._input_bytes < _LARGE_BYTES:
                copy_payloads(payloads, calls.memory.payloads[slot])
            else:
                await async_compute(copy_payloads, payloads, calls.memory.payloads[slot])
        except BaseException:  # it was cancelled, and another thread still writes there
            calls.close()
            raise

    @staticmethod
    def _read(
        message: bytes, reply: ReplyAssembler, calls: AsyncCallSocket, slot: int, began_at: float
    ) -> FeatureMaps:
        try:
            reply.feed_placed(message, calls.memory.values[slot])
            maps = reply.finish()
        finally:
            calls.give_back(slot)
        maps.timing = replace(maps.timing, total_s=time.monotonic() - began_at)
        return maps

    async def _open(self) -> AsyncCallSocket | None:
        """Return the open call socket; open one if the server may offer it."""
        calls = self._calls
        if calls is not None and calls.is_open:
            return calls
        if not self._sockets or time.monotonic() < self._again_at:
            return None
        async with self._opening:
            if self._calls is not calls:  # opened meanwhile
                return self._calls
            try:
                calls = await self._connection.prepare_calls(self._request())
            except NotPreparedError:
                self._again_at = time.monotonic() + self._pause_s
                self._pause_s = min(2 * self._pause_s, _LONGEST_PAUSE_S)
                return None
            for slot in range(calls.memory.slot_count):
                copy_payloads(self._others, calls.memory.payloads[slot][self._input_bytes :])
            # Only now, as other threads take slots without the lock.
            self._calls, self._pause_s = calls, _FIRST_PAUSE_S
            return calls

    def _request(self) -> PrepareCallsRequest:
        """Return the request for as many slots as fit.

        Raises:
            NotPreparedError: A slot would be too large.
        """
        head_bytes = min(2 * self._head_bytes + _HEAD_ROOM_BYTES, _MOST_HEAD_BYTES)
        layout = SlotLayout(self._call.byte_count, self._reply_bytes, head_bytes)
        if self._reply_bytes > _MOST_REPLY_BYTES or layout.slot_bytes > _MOST_BYTES:
            raise NotPreparedError
        return PrepareCallsRequest(
            request=self._call.head,
            slot_count=min(_SLOTS, _MOST_BYTES // layout.slot_bytes),
            reply_byte_count=self._reply_bytes,
            head_byte_count=head_bytes,
        )

    async def _grow(self, calls: AsyncCallSocket) -> None:
        """Ask for twice the room with the next call: a reply was larger than the first one."""
        self._reply_bytes, self._head_bytes = max(64, 2 * self._reply_bytes), 2 * self._head_bytes
        calls.close()


def _signature(inputs: object) -> tuple[np.dtype[Any], tuple[int, ...]] | None:
    """Return dtype and shape of an array that is sent as its memory is; None for everything else."""
    if type(inputs) is not np.ndarray or not (inputs.flags.c_contiguous and inputs.dtype.isnative):
        return None
    return inputs.dtype, inputs.shape
