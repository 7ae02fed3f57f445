"""Streams of batches, with asyncio; `tools/generate_sync.py` generates the sync ones."""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING

import grpc

from trocar._base.concurrency import AsyncCondition, AsyncItems, AsyncLock, async_pause
from trocar._transport.channel import AsyncInterrupts
from trocar._wire.requests import ExtractCall
from trocar._wire.stream_messages import StreamAssembler, batch_call, start_call, unsendable
from trocar.errors import BadReplyError

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, AsyncIterable, AsyncIterator, Iterable, Mapping, Sequence
    from types import TracebackType
    from typing import Self

    from trocar._async.replicas import AsyncRoutedStreams
    from trocar._request.inputs import Inputs
    from trocar._result.feature_maps import FeatureMapInfo
    from trocar._result.statistics import Statistics
    from trocar._wire.stream_messages import BatchResult, StreamOptions
    from trocar_api.v1.direction_pb2 import Direction


class AsyncExtractStream:
    """The results of a stream of batches, in order; made by `extract_stream`.

        async with client.extract_stream("resnet50", batches, taps=["avgpool"]) as stream:
            async for result in stream:
                result.maps["avgpool"]

    A few batches are in flight at once: the next ones are read from `batches` when results are read. A broken
    connection is reopened, and unanswered batches are sent again. Use the stream in a `with` block, or
    iterate to its end.

    Attributes:
        statistics: After the last result: the running statistics by feature map, if requested.
        info: After the last result: metadata by feature map; the first size of a shape is the sum over all
            batches.
        directions: After the last result: the directions that were fitted, of `fit_direction` alone.
    """

    def __init__(
        self,
        calls: AsyncRoutedStreams,
        options: StreamOptions,
        batches: AsyncIterable[Inputs] | Iterable[Inputs],
    ) -> None:
        self._calls = calls
        self._options = options
        self._sender = _AsyncSender(options, batches)
        self._results = self._run()
        self.statistics: Mapping[str, Statistics] = {}
        self.info: Mapping[str, FeatureMapInfo] = {}
        self.directions: Sequence[Direction] = ()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        await self.close()

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> BatchResult:
        try:
            return await anext(self._results)
        except AsyncInterrupts:
            self._calls.reopen()
            raise

    async def close(self) -> None:
        """End the stream; batches in flight are dropped."""
        await self._results.aclose()

    async def _run(self) -> AsyncGenerator[BatchResult, None]:
        options, attempts = self._options, None
        while True:
            assembler = StreamAssembler(
                options.model_id,
                self._sender.first_kept,
                options.surgery.objective_offset,
                widens=options.wire is not None,
            )
            call = await self._calls.open(self._sender.requests(self._sender.connect()))
            attempts = attempts or self._calls.attempts()
            try:
                async for message in call:
                    for result in assembler.feed(message):
                        attempts.progress()
                        answered = await self._sender.answer(result)
                        if answered is not None:
                            yield answered
                await self._calls.learn(call)
                break
            except grpc.RpcError as error:
                problem, pause_s = self._calls.converted(error), 0.0
                self._check_resumable(problem)
                if not self._calls.falls_back(error, problem):
                    after_s = attempts.pause_after(problem, error)
                    if after_s is None:
                        raise problem from None
                    pause_s = after_s
            finally:
                await self._sender.disconnect()
                self._calls.end()
                call.cancel()
            await async_pause(pause_s)
        if self._sender.error is not None:
            raise self._sender.error
        if assembler.end is None:
            raise BadReplyError("the stream ended early")
        self.statistics, self.info = assembler.end.stats, assembler.end.info
        self.directions = assembler.directions

    def _check_resumable(self, problem: Exception) -> None:
        """Raise the error of a fit that has begun: the values so far have gone with the connection."""
        if self._options.direction_fit is not None and self._sender.has_answers:
            raise problem from None


class _AsyncSender:
    """The batches of a stream: taken one by one, and buffered until they are answered."""

    def __init__(self, options: StreamOptions, batches: AsyncIterable[Inputs] | Iterable[Inputs]) -> None:
        self._options = options
        self._source = AsyncItems(batches)
        self._taken = self._answered = self.first_kept = options.first_batch
        self._kept: deque[ExtractCall] = deque()  # answered ones, too, which no checkpoint covers
        self._checkpoint = options.checkpoint
        self._unsendable: dict[int, Exception] = {}
        self._connection = 0
        self._is_at_end = False
        self._taking = AsyncLock()
        self._changed = AsyncCondition()
        self.error: Exception | None = None

    @property
    def has_answers(self) -> bool:
        """Whether a batch was answered."""
        return self._answered > self._options.first_batch

    def connect(self) -> int:
        """Begin a connection; requests of earlier ones end."""
        self._connection += 1
        return self._connection

    async def disconnect(self) -> None:
        """End the connection, and wake a waiting sender."""
        async with self._changed:
            self._connection += 1
            self._changed.notify_all()

    async def answer(self, result: BatchResult) -> BatchResult | None:
        """Record an answer, which makes room for another batch; None for a duplicate."""
        is_new = result.index == self._answered
        is_covered = result.checkpoint is not None or not self._options.has_running_statistics
        if is_new and not is_covered:
            self._copy_kept(result.index)
        async with self._changed:
            if is_covered:
                self._checkpoint = result.checkpoint
                while self.first_kept <= result.index:
                    self._kept.popleft()
                    self.first_kept += 1
            self._answered += is_new
            self._changed.notify_all()
        return unsendable(result, self._unsendable.pop(result.index, None)) if is_new else None

    def _copy_kept(self, index: int) -> None:
        """Copy a batch that may be sent again after its result, when the caller may refill its arrays."""
        position = index - self.first_kept
        call = self._kept[position]
        self._kept[position] = ExtractCall(call.head, [memoryview(bytes(part)) for part in call.payloads])

    async def requests(self, connection: int) -> AsyncIterator[bytes]:
        """Yield the messages of one connection: buffered batches first, then new ones."""
        async with self._taking:
            first, kept = start_call(self._options, self.first_kept, self._checkpoint), list(self._kept)
        for call in (first, *kept):
            for message in call.messages():
                yield message
        while (following := await self._next(connection)) is not None:
            for message in following.messages():
                yield message

    async def _next(self, connection: int) -> ExtractCall | None:
        """Take the next batch when there is room; None at the end of the batches or of the connection."""
        async with self._taking:
            async with self._changed:
                await self._changed.wait_for(lambda: connection != self._connection or self._has_room)
            if connection != self._connection or self._is_at_end:
                return None
            call = await self._take()
            if call is None:
                self._is_at_end = True
                return None
            self._kept.append(call)
            return call if connection == self._connection else None

    @property
    def _has_room(self) -> bool:
        return self._taken - self._answered < self._options.window

    async def _take(self) -> ExtractCall | None:
        try:
            inputs = await self._source.next()
        except StopAsyncIteration:
            return None
        except Exception as error:  # noqa: BLE001 - the caller's own, raised when results are read
            self.error = error
            return None
        index, self._taken = self._taken, self._taken + 1
        try:
            return batch_call(index, inputs, self._options.wire)
        except Exception as error:  # noqa: BLE001 - the batch's own, whatever a reader of images raises
            self._unsendable[index] = error
            return batch_call(index, None)
