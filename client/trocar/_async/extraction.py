"""Extraction with asyncio: one pass, many passes, dry runs."""

from __future__ import annotations

import math
import time
from contextlib import suppress
from dataclasses import replace
from typing import TYPE_CHECKING

import grpc
import numpy as np

from trocar._async.replicas import AsyncRoutedStreams
from trocar._async.stream import AsyncExtractStream
from trocar._base.call_options import over
from trocar._base.concurrency import async_compute, async_pause
from trocar._request.execution import execution_of
from trocar._request.surgery import make_surgery
from trocar._transport.channel import AsyncInterrupts, new_request_id
from trocar._transport.segments import REPLY_SHARED_FROM_BYTES
from trocar._wire import from_wire
from trocar._wire.digests import digests_of
from trocar._wire.replies import ReplyAssembler
from trocar._wire.requests import ExtractCall, PlainRequests, Start, extract_call, plan_request
from trocar._wire.shared_calls import NOTHING
from trocar._wire.stream_messages import StreamOptions, check_batches
from trocar.errors import NotCachedError, UnknownSegmentError

if TYPE_CHECKING:
    from collections.abc import AsyncIterable, Hashable, Iterable, Mapping, Sequence

    from trocar._async.connection import AsyncConnection
    from trocar._base.call_options import CallOptions
    from trocar._base.tensors import Array
    from trocar._request.edits import Edit
    from trocar._request.inputs import Inputs
    from trocar._request.objectives import Objective
    from trocar._request.taps import Tap
    from trocar._result.extraction_plan import ExtractionPlan
    from trocar._result.feature_maps import FeatureMaps


class AsyncExtraction:
    """Extraction and streams of a model, and dry runs, over one connection."""

    def __init__(self, connection: AsyncConnection) -> None:
        self._connection = connection
        self._plain = PlainRequests()

    async def extract(  # noqa: PLR0913 - options of one call, by keyword
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
        out: Mapping[str, Array] | None = None,
        adapter: str = "",
        options: CallOptions | None = None,
    ) -> FeatureMaps:
        """Run one forward pass and return the values of the tapped modules.

            maps = await client.extract("resnet50", images, taps=["layer4", "avgpool"])
            maps["layer4"]                   # numpy array (8, 2048, 7, 7)

        Args:
            model_id: The id of a loaded model, for example "resnet18".
            inputs: Inputs of the model's forward: an array or torch tensor, unchanged, for example float32
                (batch, channels, height, width); or images, which the server preprocesses as the model's
                weights require: a path, encoded bytes, a PIL image, a list of these, or uint8 pixels (height,
                width, 3) or (batch, height, width, 3). A list of equally shaped arrays is stacked to a batch.
                A tuple of arrays is positional arguments, a dict is keyword arguments.
            taps: Selectors such as "layer4" or "layer*.0.relu@1", or `tap(...)` for statistics and
                aliases. At least one.
            start_at: The place where the pass starts instead of the model's input, for example "layer3" or
                "layer4/in"; `inputs` is then the value at this place, one array, as an earlier `extract`
                returned it. Bit-equal to the full pass.
            start_shape: With `start_at`: the shape of the model's input from which that value was computed;
                when None, the model's example input with the value's batch size.
            edits: Changes during the pass, in this order: `edit(...)`, or names of stored edits. Taps get
                changed values, unless the edit has `order="after"`.
            of: The objective for gradients, for taps with `gradient=True`, selectors such as
                "layer4/grad_out", and edits of gradients; see `gradients`.
            sources: Other inputs by name; `edit(..., "swap", source=name)` takes values from passes on them.
            out: Arrays to fill instead of new ones, by feature map name; C-contiguous, writable, of
                exactly the shape and dtype of the reply.
            adapter: Name of one of your LoRA adapters for the model, from `trocar.training.lora(...,
                name="style")`; no adapter when empty.
            options: `trocar.options(...)`: numerics, merging, cache, priority, dtype of the wire, deadline.

        Returns:
            The feature maps by name: by tap, and within a tap in execution order. A convolution's value has
            shape (batch, channels, height, width), a transformer block's (batch, tokens, width). bfloat16
            values are returned as float32, exactly.

        Raises:
            UnknownModelError: The catalogue has no model of this id.
            ModelNotLoadedError: The model is not in memory; see `load`.
            UnknownModuleError: A selector matches nothing; see `modules`.
            ModuleNotCalledError: The pass never called one of the modules.
            SelectorError: A selector is wrong in another way; see its subclasses.
            StartNotPossibleError: The pass after `start_at` needs more than that value.
            EditError: An edit does not fit; see its subclasses.
            ObjectiveError: The objective has no gradient; see its subclasses.
            UnknownTrainerError: You have no adapter of this name for the model.
            UnknownEditsError: You have stored no edits of this name for the model.
            UnknownSourceError: A swap names none of `sources`.
            InputRejectedError: The model cannot take the inputs.
            InputError: The inputs are wrong in another way; see its subclasses.
            RequestTooLargeError: The inputs exceed the server's limit.
            ReplyTooLargeError: The feature maps would exceed the server's limit; nothing was computed.
            ServerBusyError: No replica was free in time; the same call may succeed later.
            BadReplyError: The reply was truncated or violates the protocol.
            FileNotFoundError: A path of `inputs` does not exist.
            TypeError: `inputs` contains something that cannot be sent, or an edit or `of` has the wrong type.
            ValueError: Arrays of one list differ in shape, `out` does not fit the reply, an input is too
                large for `wire="float16"`, or there are no such numerics, priority or wire.
        """
        defaults = self._connection.options.calls
        how = defaults if options is None else over(options, defaults)
        key: Hashable = None
        request, last, offset = None, None, 0.0
        if edits == () and of is None and sources is None and start_shape is None and how.wire is None:
            key, request, last = self._plain.find(inputs, taps, (model_id, start_at, adapter, how))
        if request is None:
            start, surgery = Start(start_at, start_shape), make_surgery(edits, of, sources)
            request = extract_call(
                model_id,
                inputs,
                taps,
                how.chunk_bytes,
                start,
                surgery,
                execution_of(how),
                how.wire,
                adapter,
            )
            self._plain.keep(key, inputs, request)
            offset = surgery.objective_offset
        reply = ReplyAssembler(model_id, out, objective_offset=offset, widens=how.wire is not None, last=last)
        return await self.collect(request, reply, how.timeout_s, how.cache)

    async def collect(
        self, request: ExtractCall, reply: ReplyAssembler, timeout_s: float | None, cache: bool | None
    ) -> FeatureMaps:
        """Make a call and assemble its reply; by its digest alone if `cache` is true and that may suffice."""
        if not (cache and request.payloads):
            return await self._receive(request, reply, timeout_s)
        started, digests = time.monotonic(), await async_compute(digests_of, request)
        maps: FeatureMaps | None = None
        if self._connection.sent_digests.is_worth_asking(digests):
            with suppress(NotCachedError):
                maps = await self._receive(ExtractCall(digests.question, []), reply, timeout_s)
        if maps is None:
            reply.restart()
            left_s = max(1e-3, self._connection.timeout(timeout_s) - (time.monotonic() - started))
            maps = await self._receive(request, reply, left_s)
        self._connection.sent_digests.note(digests, maps.is_cached)
        return maps

    async def _receive(
        self, request: ExtractCall, reply: ReplyAssembler, timeout_s: float | None
    ) -> FeatureMaps:
        """Make a call, with retries after a broken connection or from a busy server, and return its reply."""
        began_at, attempts = time.monotonic(), None
        connection, request_id, is_sharing = self._connection, new_request_id(), True
        left_s = limit_s = connection.timeout(timeout_s)
        while True:
            borrowed = NOTHING
            try:
                if is_sharing:
                    borrowed = await connection.sharing.borrow(request, reply)
                await self._feed(borrowed.call or request, reply, request_id, left_s)
            except grpc.RpcError as error:
                borrowed.end(None)
                problem = connection.converted(error, request_id)
                attempts = attempts or connection.attempts(limit_s, began_at=began_at)
                if borrowed is not NOTHING and isinstance(problem, UnknownSegmentError):
                    connection.sharing.reset()  # the server has been restarted
                    is_sharing = False
                elif (pause_s := attempts.pause_after(problem, error)) is not None:
                    await async_pause(pause_s)
                else:
                    raise problem from None
            except BaseException as error:
                borrowed.end(None)
                if isinstance(error, AsyncInterrupts):
                    connection.reopen()
                raise
            else:
                if borrowed is not NOTHING or sum(reply.byte_counts) >= REPLY_SHARED_FROM_BYTES:
                    borrowed.end(reply)
                    connection.sharing.learn(request, reply)
                maps = reply.finish()
                maps.timing = replace(maps.timing, total_s=time.monotonic() - began_at)
                return maps
            reply.restart()
            left_s = attempts.remaining_s

    async def _feed(
        self, request: ExtractCall, reply: ReplyAssembler, request_id: str, timeout_s: float
    ) -> None:
        """Make one attempt."""

        async def attempt(one: AsyncConnection, left_s: float) -> None:
            stream = one.open(one.extract, request, request_id, left_s)
            try:
                async for message in stream:
                    reply.feed(message)
                if connection.is_gateway is None and one is connection:
                    await connection.learn(stream)
            except grpc.RpcError:
                if one is not connection:
                    reply.restart()
                raise
            finally:
                stream.cancel()  # ends the call if the loop was left early, without effect otherwise

        connection = self._connection
        if connection.replicas is None:
            await attempt(connection, timeout_s)
        else:
            await connection.nearest(reply.model_id, attempt, timeout_s)

    async def shared_array(self, shape: Sequence[int], dtype: str = "float32") -> Array:
        """Return an array in memory that is shared with the server, with unset values.

            images = await client.shared_array((64, 3, 224, 224))
            maps_out = await client.shared_array((64, 2048, 7, 7))
            await client.extract("resnet50", images, taps="layer4", out={"layer4": maps_out})

        As `inputs`, or as the only array of `out`, it is not copied in the client. If the server offers no
        shared memory, it is a normal array. Do not change it while a call uses it; after a failed call, the
        contents of `out` may still change for a short time.

        Args:
            shape: The size of each dimension.
            dtype: A NumPy dtype by name.

        Raises:
            ValueError: No array can have this shape.
        """
        numpy_dtype = np.empty(0, dtype).dtype
        byte_count = math.prod(shape) * numpy_dtype.itemsize
        try:
            result = await self._connection.sharing.array(byte_count) if byte_count > 0 else None
        except AsyncInterrupts:
            self._connection.reopen()
            raise
        return np.empty(shape, numpy_dtype) if result is None else result.view(numpy_dtype).reshape(shape)

    async def plan(  # noqa: PLR0913 - options of one call, by keyword
        self,
        model_id: str,
        inputs: Inputs | tuple[int, ...] | None,
        taps: str | Tap | Sequence[str | Tap],
        *,
        start_at: str | None = None,
        start_shape: tuple[int, ...] | None = None,
        edits: str | Edit | Sequence[str | Edit] = (),
        of: Objective | None = None,
        sources: Mapping[str, Inputs | tuple[int, ...]] | None = None,
        adapter: str = "",
        timeout_s: float | None = None,
    ) -> ExtractionPlan:
        """Return the outputs and resources of an `extract` as a dry run, without computing it.

            plan = await client.plan("resnet50", (8, 3, 224, 224), taps=["layer*"])
            plan.reply_bytes

        Args:
            model_id: The id of a loaded model.
            inputs: The shape of one float32 input, including the batch, or inputs as in `extract`: only
                shapes and dtypes of arrays and the number of images are used. Of values, only small named
                arrays of integers and booleans (token ids, masks) are sent, as models may decide by them. One
                example input when None, or with a dict of flags alone; `{"": shape, "flag": True}` has both.
            taps: As in `extract`.
            start_at: As in `extract`.
            start_shape: As in `extract`.
            edits: As in `extract`.
            of: As in `extract`.
            sources: As in `extract`, or the shape of each.
            adapter: As in `extract`.
            timeout_s: Overrides the client's timeout for this call, in seconds.

        Returns:
            Names, shapes, dtypes and bytes of the feature maps, the memory that the pass needs, and where it
            would stop. Prints as a table.

        Raises:
            TrocarError: As `extract` for the model, the taps, edits and objective, the shapes of inputs and
                limits.
        """
        start, surgery = Start(start_at, start_shape), make_surgery(edits, of, sources)
        request = plan_request(model_id, inputs, taps, start, surgery, adapter)
        connection = self._connection
        reply = await connection.call(connection.extraction_service.Plan, request, timeout_s)
        return from_wire.extraction_plan(model_id, reply)

    def extract_stream(  # noqa: PLR0913 - options of one call, by keyword
        self,
        model_id: str,
        batches: AsyncIterable[Inputs] | Iterable[Inputs],
        taps: str | Tap | Sequence[str | Tap],
        *,
        start_at: str | None = None,
        start_shape: tuple[int, ...] | None = None,
        edits: str | Edit | Sequence[str | Edit] = (),
        of: Objective | None = None,
        running_statistics: bool = False,
        checkpoint: bytes | None = None,
        checkpoint_interval: int = 16,
        first_batch: int = 0,
        window: int = 4,
        adapter: str = "",
        options: CallOptions | None = None,
    ) -> AsyncExtractStream:
        """Run one pass for each of many batches in one call, and yield the results in order.

            async with client.extract_stream("resnet50", batches, taps=["avgpool"]) as stream:
                async for result in stream:
                    result.maps["avgpool"]   # numpy array (batch, 2048, 1, 1)

        The next batches are sent while the model computes this one. If a batch fails, the others continue:
        `result.error` tells why. A broken connection is reopened, starting with the first batch that has no
        result.

        Args:
            model_id: The id of a loaded model.
            batches: Each item is one `inputs` of `extract`. Read one by one, a few ahead of the results.
            taps: As in `extract`.
            start_at: As in `extract`.
            start_shape: As in `extract`.
            edits: As in `extract`, for every batch; without swaps from a source.
            of: As in `extract`; labels are the same for every batch.
            running_statistics: Whether to compute statistics over "all" and over "channel" for the whole
                stream instead of each batch; they are in `stream.statistics` after the last result.
            checkpoint: The `result.checkpoint` of an earlier stream with the same model and weights, taps,
                edits and objective: its statistics resume there. Send the batches after that result.
            checkpoint_interval: With running statistics: the number of batches between two checkpoints, 1 to
                1024. The client keeps copies of this many batches, to send them again after a broken
                connection.
            first_batch: The index of the first batch, for a stream that continues an earlier one.
            window: Maximum number of batches that are sent and not yet answered, at least 1; this bounds the
                memory.
            adapter: As in `extract`, for every batch.
            options: As in `extract`, for every batch; `timeout_s` is how long one may wait and compute.

        Returns:
            An iterator of `BatchResult`. While it runs it may raise the errors of `extract` for the model or
            the taps, and any exception of `batches`.

        Raises:
            ValueError: `window`, `first_batch` or the timeout is out of range.
        """
        connection = self._connection
        defaults = connection.options.calls
        how = defaults if options is None else over(options, defaults)
        timeout_s = connection.timeout(how.timeout_s)
        wanted = StreamOptions(
            model_id,
            taps,
            first_batch,
            timeout_s,
            window,
            how.chunk_bytes,
            Start(start_at, start_shape),
            running_statistics,
            checkpoint,
            checkpoint_interval,
            make_surgery(edits, of),
            execution_of(how),
            how.wire,
            adapter,
        )

        calls = AsyncRoutedStreams(connection, model_id, new_request_id(), timeout_s)
        check_batches(batches)
        return AsyncExtractStream(calls, wanted, batches)
