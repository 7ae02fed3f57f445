"""Trainer with asyncio: steps, evaluation, checkpoints, export."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import grpc
from safetensors.numpy import load

from trocar._async.connection import AsyncConnection
from trocar._async.extraction import AsyncExtraction
from trocar._async.generations import AsyncGenerations
from trocar._async.gradients import AsyncGradients
from trocar._base.call_options import CallOptions
from trocar._base.concurrency import AsyncCondition, async_pause
from trocar._base.delegation import explained
from trocar._base.replacement import safetensors_path, write_file
from trocar._base.tables import Listing, html_facts
from trocar._request.training.adapter_files import (
    ADAPTER_CONFIG,
    ADAPTER_WEIGHTS,
    adapter_requests,
    made_folder,
)
from trocar._result.trainer_types import (
    CHECKPOINT_COLUMNS,
    TRAINER_COLUMNS,
    checkpoint,
    evaluation,
    step_result,
    trainer_info,
)
from trocar._transport.channel import AsyncInterrupts, new_request_id
from trocar._transport.downloads import Download
from trocar._wire.trainer_requests import Batches
from trocar.errors import BadReplyError, TrocarError
from trocar_api.v1 import trainer_pb2 as pb

if TYPE_CHECKING:
    import os
    from collections.abc import Sequence
    from types import TracebackType
    from typing import Any, Self

    from trocar._async.client import AsyncClient
    from trocar._async.generation import AsyncGeneration
    from trocar._base.concurrency import AsyncAsk
    from trocar._base.tensors import Array
    from trocar._request.inputs import Inputs
    from trocar._request.objectives import Objective
    from trocar._request.taps import Tap
    from trocar._result.feature_maps import FeatureMaps
    from trocar._result.trainer_types import Checkpoint, Evaluation, StepResult, TrainerInfo
    from trocar._wire.requests import ExtractCall
    from trocar._wire.trainer_requests import Targets


class AsyncTrainerCalls:
    """Calls of one trainer; `AsyncTrainer` adds fits, and is the public class."""

    def __init__(self, client: AsyncClient | AsyncConnection, trainer_id: str) -> None:
        connection = client if isinstance(client, AsyncConnection) else client._connection
        self._connection = connection
        self._extraction = AsyncExtraction(connection)
        self._numbering = AsyncNumbering(self._ask_number)
        self._batches = Batches()
        self.trainer_id = trainer_id
        self._newest: TrainerInfo | None = None

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        await self.close()

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.trainer_id!r})"

    def _repr_html_(self) -> str:
        """Show the trainer as `info` last returned it; nothing is asked of the server."""
        caption = f"{self!r}, see info()"
        if self._newest is None:
            return html_facts({"trainer": self.trainer_id}, caption)
        return html_facts({title: text(self._newest) for title, text in TRAINER_COLUMNS.items()}, caption)

    @explained
    async def info(self) -> TrainerInfo:
        """Return the current state of the trainer; like every call, this renews its time to live.

        Raises:
            UnknownTrainerError: It was closed.
        """
        reply = await self._state(pb.GetTrainerRequest(trainer_id=self.trainer_id))
        self._newest = trainer_info(reply.trainer)
        return self._newest

    async def _state(
        self, request: pb.GetTrainerRequest, timeout_s: float | None = None
    ) -> pb.GetTrainerResponse:
        return await self._connection.call(self._connection.trainer_service.GetTrainer, request, timeout_s)

    async def step(
        self,
        inputs: Inputs,
        targets: Targets = None,
        *,
        number: int | None = None,
        timeout_s: float | None = None,
    ) -> StepResult:
        """Run a forward and a backward pass, and update the weights if enough batches are accumulated.

        Args:
            inputs: As in `AsyncClient.extract`.
            targets: Targets of the loss: class indices, an array as the loss requires it, or a dict from name
                to array; None if no term needs targets.
            number: Number of the call, see `info`; assigned automatically when None. A call that is repeated
                with its number is not applied again, and returns the same result.
            timeout_s: Overrides the client's timeout, in seconds.

        Raises:
            TargetRejectedError: The targets do not fit the loss.
            NonFiniteStepError: The loss or a gradient is not finite; the trainer is unchanged.
            TrainerBusyError: A fit is running, or text is being generated with the weights.
            TrainerBrokenError: The trainer must be restored from a checkpoint first.
            StepOutOfOrderError: `number` is not the next one.
            SpoolFailedError: Saved tensors could not be written to the server's disk; the trainer is
                unchanged.
            InputRejectedError: The model cannot take the inputs.
        """
        return await self._numbered(pb.TRAIN_KIND_STEP, inputs, targets, number, timeout_s)

    @explained
    async def forward_backward(
        self,
        inputs: Inputs,
        targets: Targets = None,
        *,
        number: int | None = None,
        timeout_s: float | None = None,
    ) -> StepResult:
        """Run a forward and a backward pass, and accumulate gradients. See `step`."""
        return await self._numbered(pb.TRAIN_KIND_FORWARD_BACKWARD, inputs, targets, number, timeout_s)

    @explained
    async def optimizer_step(
        self, *, number: int | None = None, timeout_s: float | None = None
    ) -> StepResult:
        """Update the weights with the accumulated gradients. See `step`."""
        chosen, is_applied = await self._numbering.take(number, timeout_s), False
        request = pb.StepOptimizerRequest(trainer_id=self.trainer_id, number=chosen)
        try:
            reply = await self._connection.call(
                self._connection.trainer_service.StepOptimizer, request, timeout_s
            )
            is_applied = True
        finally:
            await self._numbering.end(is_applied=is_applied)
        return step_result(reply.result)

    @explained
    async def evaluate(
        self, inputs: Inputs, targets: Targets = None, *, timeout_s: float | None = None
    ) -> Evaluation:
        """Return the loss of a batch in eval mode, with averaged weights if there are any.

        Args:
            inputs: As in `step`.
            targets: As in `step`.
            timeout_s: Overrides the client's timeout, in seconds.
        """
        call = self._batches.convert(inputs, targets).call(self.trainer_id, pb.TRAIN_KIND_EVALUATE)
        return evaluation(await self._train(call, timeout_s))

    @explained
    async def predict(self, inputs: Inputs, *, timeout_s: float | None = None) -> Array:
        """Return the model's output in eval mode, for example logits (batch, classes)."""
        maps = await self._extraction.extract(
            self.trainer_id, inputs, taps="/out", options=CallOptions(timeout_s=timeout_s)
        )
        return next(iter(maps.values()))

    @explained
    async def extract(
        self, inputs: Inputs | None, taps: str | Tap | Sequence[str | Tap], **options: Any
    ) -> FeatureMaps:
        """Return feature maps with the current weights; options as in `AsyncClient.extract`."""
        return await self._extraction.extract(self.trainer_id, inputs, taps, **options)

    @explained
    async def gradients(self, inputs: Inputs | None, *, of: Objective, **options: Any) -> FeatureMaps:
        """Return gradients with the current weights; options as in `AsyncClient.gradients`."""
        gradients = AsyncGradients(self._connection, self._extraction)
        return await gradients.gradients(self.trainer_id, inputs, of=of, **options)

    @explained
    async def generate(self, prompt: Inputs, **options: Any) -> AsyncGeneration:
        """Generate the texts that follow prompts, with the current weights.

            run = await trainer.generate(["a prompt"], n=8, temperature=1.0)

        Prompts and options: see `AsyncClient.generate`. A run has one version of the weights: until
        it ends, calls that would change them are refused.

        Raises:
            TrainerBusyError: A fit is running.
        """
        return await AsyncGenerations(self._connection).generate(self.trainer_id, prompt, **options)

    @explained
    async def save(self, note: str = "", *, timeout_s: float | None = None) -> Checkpoint:
        """Write a checkpoint, which survives a crash of the server after this returns.

        Raises:
            StorageFullError: The server's disk is full; earlier checkpoints are unchanged.
        """
        request = pb.SaveTrainerRequest(trainer_id=self.trainer_id, note=note, request_id=new_request_id())
        reply = await self._connection.call(self._connection.trainer_service.SaveTrainer, request, timeout_s)
        return checkpoint(reply.checkpoint)

    @explained
    async def restore(
        self, checkpoint_number: int | None = None, *, timeout_s: float | None = None
    ) -> TrainerInfo:
        """Restore a checkpoint: weights, optimizer, schedule, buffers, random numbers.

        Args:
            checkpoint_number: The number of the checkpoint; the newest when None.
            timeout_s: Overrides the client's timeout, in seconds.

        Raises:
            UnknownCheckpointError: There is no such checkpoint.
            CheckpointCorruptError: It is damaged.
        """
        request = pb.RestoreTrainerRequest(trainer_id=self.trainer_id, checkpoint_number=checkpoint_number)
        reply = await self._connection.call(
            self._connection.trainer_service.RestoreTrainer, request, timeout_s
        )
        self._numbering.forget()
        return trainer_info(reply.trainer)

    @explained
    async def checkpoints(self) -> list[Checkpoint]:
        """Return the checkpoints, oldest first."""
        request = pb.ListCheckpointsRequest(trainer_id=self.trainer_id)
        reply = await self._connection.call(self._connection.trainer_service.ListCheckpoints, request)
        return Listing(map(checkpoint, reply.checkpoints), CHECKPOINT_COLUMNS)

    @explained
    async def export(
        self, path: str | os.PathLike[str], *, optimizer: bool = False, timeout_s: float | None = None
    ) -> Path:
        """Write the weights to a safetensors file, which appears when it is complete.

            safetensors.torch.load_file(path)     # a state dict of the model with its new head

        Args:
            path: The file; an existing one is replaced.
            optimizer: Whether to add the optimizer's state, under names that begin with `optimizer.`.
            timeout_s: Overrides the client's timeout, in seconds; a download that takes longer is resumed.

        Raises:
            ValueError: The file's name does not end in `.safetensors`.
        """
        target = safetensors_path(path)
        request = pb.ExportTrainerRequest(trainer_id=self.trainer_id, has_optimizer=optimizer)
        await self._download(target, request, timeout_s)
        return target

    @explained
    async def export_adapter(self, folder: str | os.PathLike[str], *, timeout_s: float | None = None) -> Path:
        """Write the LoRA adapter, and a new head, to a folder as PEFT does.

            peft.PeftModel.from_pretrained(base, folder)

        Args:
            folder: The folder for `adapter_model.safetensors` and `adapter_config.json`; created if missing.
            timeout_s: Overrides the client's timeout, in seconds; a download that takes longer is resumed.

        Raises:
            TrainerInvalidError: The trainer has no adapter.
        """
        home = made_folder(folder)
        request = pb.ExportTrainerRequest(trainer_id=self.trainer_id, content=pb.EXPORT_CONTENT_ADAPTER)
        config = await self._download(home / ADAPTER_WEIGHTS, request, timeout_s)
        write_file(home / ADAPTER_CONFIG, config, is_durable=True)
        return home

    @explained
    async def load_adapter(
        self, folder: str | os.PathLike[str], *, timeout_s: float | None = None
    ) -> Checkpoint:
        """Replace the weights of the adapter, and of a new head, by a PEFT folder's.

        Optimizer and counters do not change; a checkpoint is written.

        Args:
            folder: The folder with `adapter_model.safetensors`; names and shapes must be those of the
                trainer's adapter.
            timeout_s: Overrides the client's timeout, in seconds.

        Raises:
            TrainerInvalidError: The trainer has no adapter, or the file does not fit it.
        """
        data, own_id = (Path(folder) / ADAPTER_WEIGHTS).read_bytes(), new_request_id()

        async def attempt(request_id: str, left_s: float) -> pb.LoadAdapterResponse:
            metadata = self._connection.options.metadata(request_id)
            requests = adapter_requests(self.trainer_id, data, own_id)
            service = self._connection.trainer_service
            load = service.LoadAdapter
            return await self._connection.begin(load, requests, timeout=left_s, metadata=metadata)

        reply = await self._connection.repeated(attempt, timeout_s, resumes=True)
        return checkpoint(reply.checkpoint)

    async def _download(self, path: Path, request: pb.ExportTrainerRequest, timeout_s: float | None) -> str:
        """Write an export to a file; return the configuration of an adapter."""
        connection = self._connection
        attempts = connection.attempts(connection.timeout(timeout_s), resumes=True)
        with Download(path) as download:
            while not download.is_complete:
                request.offset_bytes = download.byte_count
                try:
                    async for message in self._exported(request, attempts.remaining_s):
                        attempts.progress()
                        download.add(message)
                    download.check()
                except grpc.RpcError as error:
                    is_slow = error.code() is grpc.StatusCode.DEADLINE_EXCEEDED
                    has_moved = download.byte_count > request.offset_bytes
                    problem = connection.converted(error, "")
                    pause_s = attempts.pause_after(problem, error, is_slow=is_slow and has_moved)
                    if pause_s is None:
                        raise problem from None
                    await async_pause(pause_s)
                except AsyncInterrupts:
                    connection.reopen()
                    raise
        return download.adapter_config

    @explained
    async def parameter_gradients(self, *, timeout_s: float | None = None) -> dict[str, Array]:
        """Return the accumulated gradients by parameter: after rules, before `clip_norm`.

        await trainer.forward_backward(images, labels)
        (await trainer.parameter_gradients())["fc.bias"]
        """
        request = pb.ExportTrainerRequest(trainer_id=self.trainer_id, content=pb.EXPORT_CONTENT_GRADIENTS)
        pieces: list[bytes] = []
        request_id = new_request_id()
        try:
            async for message in self._exported(request, timeout_s, request_id):
                pieces.append(message.data)
        except grpc.RpcError as error:
            raise self._connection.converted(error, request_id) from None
        return load(b"".join(pieces))

    @explained
    async def publish(
        self, model_id: str, *, categories: Sequence[str] = (), timeout_s: float | None = None
    ) -> str:
        """Host a copy of the current weights as a model, at once and after restarts.

        Args:
            model_id: Its id: lower case letters, digits and `._-`, at most 63 characters; not in the
                catalogue.
            categories: Class names by index. When empty: those of the data set of the newest fit if the
                trainer has a new head with this number of classes, otherwise those of the base model.
            timeout_s: Overrides the client's timeout, in seconds.

        Returns:
            The id of the model, which is loaded.

        Raises:
            ModelConflictError: A model of this id exists.
        """
        request = pb.PublishTrainerRequest(
            trainer_id=self.trainer_id, model_id=model_id, categories=categories
        )
        reply = await self._connection.call(
            self._connection.trainer_service.PublishTrainer, request, timeout_s
        )
        return reply.model_id

    @explained
    async def close(self) -> None:
        """Close the trainer and delete its checkpoints; no effect if it is closed already."""
        request = pb.CloseTrainerRequest(trainer_id=self.trainer_id)
        try:
            await self._connection.call(self._connection.trainer_service.CloseTrainer, request)
        except TrocarError as error:
            if error.reason != "UNKNOWN_TRAINER":
                raise

    async def _numbered(
        self,
        kind: pb.TrainKind.ValueType,
        inputs: Inputs,
        targets: Targets,
        number: int | None,
        timeout_s: float | None,
    ) -> StepResult:
        batch = self._batches.convert(inputs, targets)
        chosen, is_applied = await self._numbering.take(number, timeout_s), False
        try:
            message = await self._train(batch.call(self.trainer_id, kind, chosen), timeout_s)
            is_applied = True
        finally:
            await self._numbering.end(is_applied=is_applied)
        return step_result(message)

    async def _ask_number(self, timeout_s: float | None) -> int:
        """Return the number of the next call; earlier ones that still run on the server are counted.

        These are calls that were cancelled or timed out here.
        """
        request = pb.GetTrainerRequest(trainer_id=self.trainer_id, waits_for_step=True)
        reply = await self._state(request, timeout_s)
        if not reply.has_waited:  # an older server
            await self._rest(timeout_s)
            reply = await self._state(request, timeout_s)
        return reply.trainer.next_number

    async def _rest(self, timeout_s: float | None) -> None:
        """Wait until no call changes the trainer, by the first message of an export, which waits, too."""
        request = pb.ExportTrainerRequest(trainer_id=self.trainer_id, content=pb.EXPORT_CONTENT_GRADIENTS)

        async def attempt(request_id: str, left_s: float) -> None:
            stream = self._exported(request, left_s, request_id)
            try:
                async for _ in stream:
                    break
            finally:
                stream.cancel()

        await self._connection.repeated(attempt, timeout_s, resumes=True)

    async def _train(self, call: ExtractCall, timeout_s: float | None) -> pb.StepResult:
        """Send a batch, with retries after a broken connection or from a busy server.

        Its number ensures that it is applied once.
        """
        connection = self._connection

        async def attempt(request_id: str, left_s: float) -> pb.StepResult:
            async def at(one: AsyncConnection, timeout_s: float) -> pb.StepResult:
                result: pb.StepResult | None = None
                stream = one.open(one.train, call, request_id, timeout_s)
                try:
                    async for message in stream:
                        result = pb.TrainResponse.FromString(message).result
                    if result is None:
                        raise BadReplyError("the reply has no result for the batch")
                    if connection.is_gateway is None and one is connection:
                        await connection.learn(stream)
                finally:
                    stream.cancel()  # ends the call if the loop was left early, without effect otherwise
                return result

            if connection.replicas is None:
                return await at(connection, left_s)
            return await connection.nearest(self.trainer_id, at, left_s)

        return await connection.repeated(attempt, timeout_s, resumes=True)

    def _exported(
        self, request: pb.ExportTrainerRequest, timeout_s: float | None, request_id: str = ""
    ) -> Any:
        """Open an export: a stream of `ExportTrainerResponse`."""
        connection = self._connection
        return connection.begin(
            connection.trainer_service.ExportTrainer,
            request,
            timeout=connection.timeout(timeout_s),
            metadata=connection.options.metadata(request_id or new_request_id()),
        )


class AsyncNumbering:
    """Assigns a sequence number to each call that changes a trainer, also to concurrent calls.

        chosen = await numbering.take(None, timeout_s)
        ...
        await numbering.end(is_applied=True)

    After a failed call only the server knows the next number. It is requested when every other call
    has ended: a call in flight may take the number that the server would return.

    Args:
        ask: Returns the number that the server applies next, within a time in seconds.
    """

    def __init__(self, ask: AsyncAsk) -> None:
        self._ask = ask
        self._changed = AsyncCondition()
        self._next: int | None = None
        self._open_count = 0

    async def take(self, number: int | None, timeout_s: float | None) -> int:
        """Return the given number, or the next one, asked for within a time in seconds; `end` must follow."""
        async with self._changed:
            chosen = self._next if number is None else number
            if chosen is None:
                chosen = await self._following(timeout_s)
            if self._next is not None:
                self._next = max(self._next, chosen + 1)
            self._open_count += 1
            return chosen

    async def end(self, *, is_applied: bool) -> None:
        """Record that a call has ended."""
        async with self._changed:
            self._open_count -= 1
            if not is_applied:
                self._next = None
            self._changed.notify_all()

    def forget(self) -> None:
        """Request the next number from the server: something other than a call has changed it."""
        self._next = None

    async def _following(self, timeout_s: float | None) -> int:
        while self._next is None:
            if self._open_count:
                await self._changed.wait()
            else:
                self._next = await self._ask(timeout_s)
        return self._next
