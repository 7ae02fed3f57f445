"""Part of the sync client: generated from _aio_stream.py by tools/generate_sync.py, do not edit."""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING

import grpc

from trocar._concurrency import SyncCondition, SyncLock, SyncSource, sync_pause
from trocar._rpc_errors import is_broken_connection
from trocar._stream_messages import StreamAssembler, batch_call, start_call, unsendable
from trocar.errors import BadReplyError

if TYPE_CHECKING:
    from collections.abc import Callable, Generator, Iterable, Iterator, Mapping
    from types import TracebackType
    from typing import Self

    from trocar._channel import SyncStream
    from trocar._feature_maps import FeatureMapInfo
    from trocar._inputs import Inputs
    from trocar._requests import ExtractCall
    from trocar._statistics import Statistics
    from trocar._stream_messages import BatchResult, StreamOptions

_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.1, 2.0


class ExtractStream:
    """The results of a stream of batches, in order; made by `extract_stream`.

        with client.extract_stream("resnet50", batches, taps=["avgpool"]) as stream:
            for result in stream:
                result.maps["avgpool"]

    A few batches are under way at once: they are taken from `batches` as results are. A broken connection is
    made again, and what was not answered is sent again. Use it in a `with` block, or run it to its end.

    Attributes:
        statistics: After the last result: the running statistics by feature map, where they were asked for.
        info: After the last result: what they are of; the first size of a shape is the sum over all batches.
    """

    def __init__(
        self,
        open_call: Callable[[Iterator[bytes]], SyncStream],
        converted: Callable[[grpc.RpcError], Exception],
        options: StreamOptions,
        batches: Iterable[Inputs],
    ) -> None:
        self._open_call = open_call
        self._converted = converted
        self._options = options
        self._sender = _Sender(options, batches)
        self._results = self._run()
        self.statistics: Mapping[str, Statistics] = {}
        self.info: Mapping[str, FeatureMapInfo] = {}

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> BatchResult:
        return next(self._results)

    def close(self) -> None:
        """End the stream; batches that are under way are dropped."""
        self._results.close()

    def _run(self) -> Generator[BatchResult, None, None]:
        failures = 0
        while True:
            options = self._options
            assembler = StreamAssembler(
                options.model_id,
                self._sender.first_kept,
                options.surgery.objective_offset,
                widens=options.wire is not None,
            )
            call = self._open_call(self._sender.requests(self._sender.connect()))
            try:
                for message in call:
                    for result in assembler.feed(message):
                        failures = 0
                        answered = self._sender.answer(result)
                        if answered is not None:
                            yield answered
                break
            except grpc.RpcError as error:
                failures += 1
                if failures > self._options.retries or not is_broken_connection(error):
                    raise self._converted(error) from error
            finally:
                self._sender.disconnect()
                call.cancel()
            sync_pause(min(_FIRST_PAUSE_S * 2**failures, _LONGEST_PAUSE_S))
        if self._sender.error is not None:
            raise self._sender.error
        if assembler.end is None:
            raise BadReplyError("the stream ended early")
        self.statistics, self.info = assembler.end.stats, assembler.end.info


class _Sender:
    """The batches of a stream: taken one by one, and kept until they are answered."""

    def __init__(self, options: StreamOptions, batches: Iterable[Inputs]) -> None:
        self._options = options
        self._source = SyncSource(batches)
        self._taken = self._answered = self.first_kept = options.first_batch
        self._kept: deque[ExtractCall] = deque()  # answered ones, too, which no checkpoint covers
        self._checkpoint = options.checkpoint
        self._unsendable: dict[int, Exception] = {}
        self._connection = 0
        self._is_at_end = False
        self._taking = SyncLock()
        self._changed = SyncCondition()
        self.error: Exception | None = None

    def connect(self) -> int:
        """Begin a connection; requests of those before come to their end."""
        self._connection += 1
        return self._connection

    def disconnect(self) -> None:
        """End the connection, and with it whoever waits to send."""
        with self._changed:
            self._connection += 1
            self._changed.notify_all()

    def answer(self, result: BatchResult) -> BatchResult | None:
        """Note an answer, which makes room for another batch; None for one that came before."""
        is_new = result.index == self._answered
        with self._changed:
            if result.checkpoint is not None or not self._options.has_running_statistics:
                self._checkpoint = result.checkpoint
                while self.first_kept <= result.index:
                    self._kept.popleft()
                    self.first_kept += 1
            self._answered += is_new
            self._changed.notify_all()
        return unsendable(result, self._unsendable.pop(result.index, None)) if is_new else None

    def requests(self, connection: int) -> Iterator[bytes]:
        """Yield the messages of one connection: what is kept first, then new batches."""
        with self._taking:
            first, kept = start_call(self._options, self.first_kept, self._checkpoint), list(self._kept)
        for call in (first, *kept):
            for message in call.messages():
                yield message
        while (following := self._next(connection)) is not None:
            for message in following.messages():
                yield message

    def _next(self, connection: int) -> ExtractCall | None:
        """Take the next batch when there is room; None at the end of the batches or of the connection."""
        with self._taking:
            with self._changed:
                self._changed.wait_for(lambda: connection != self._connection or self._has_room)
            if connection != self._connection or self._is_at_end:
                return None
            call = self._take()
            if call is None:
                self._is_at_end = True
                return None
            self._kept.append(call)
            return call if connection == self._connection else None

    @property
    def _has_room(self) -> bool:
        return self._taken - self._answered < self._options.window

    def _take(self) -> ExtractCall | None:
        try:
            inputs = self._source.next()
        except StopIteration:
            return None
        except Exception as error:  # noqa: BLE001 - the caller's own, raised where he reads results
            self.error = error
            return None
        index, self._taken = self._taken, self._taken + 1
        try:
            return batch_call(index, inputs, self._options.wire)
        except (OSError, TypeError, ValueError) as error:
            self._unsendable[index] = error
            return batch_call(index, None)
