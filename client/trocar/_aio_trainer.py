"""One trainer on a server, with asyncio: steps, evaluation, checkpoints, export."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import grpc
from safetensors.numpy import load

from trocar._aio_numbering import AsyncNumbering
from trocar._channel import new_request_id
from trocar._concurrency import async_pause
from trocar._downloads import Download
from trocar._rpc_errors import is_broken_connection
from trocar._trainer_requests import wire_batch
from trocar._trainer_types import checkpoint, evaluation, step_result, trainer_info
from trocar.errors import TrocarError
from trocar_api.v1 import trainer_pb2 as pb

if TYPE_CHECKING:
    import os
    from collections.abc import Sequence
    from types import TracebackType
    from typing import Any, Self

    from trocar._aio_trainers import AsyncTrainers
    from trocar._feature_maps import FeatureMaps
    from trocar._inputs import Inputs
    from trocar._objectives import Objective
    from trocar._taps import Tap
    from trocar._tensors import Array
    from trocar._trainer_requests import Targets
    from trocar._trainer_types import Checkpoint, Evaluation, StepResult, TrainerInfo

_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.1, 2.0


class AsyncTrainerCalls:
    """What one trainer does; `AsyncTrainer` adds fits, and is the one that users see."""

    def __init__(self, client: AsyncTrainers, trainer_id: str) -> None:
        self._client = client
        self._numbering = AsyncNumbering(self._ask_number)
        self.trainer_id = trainer_id

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        await self.close()

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.trainer_id!r})"

    async def info(self) -> TrainerInfo:
        """Return the trainer as it is now; like every call, this renews its time to live.

        Raises:
            UnknownTrainerError: It was closed.
        """
        reply = await self._client._call(
            self._client._trainers.GetTrainer, pb.GetTrainerRequest(trainer_id=self.trainer_id)
        )
        return trainer_info(reply.trainer)

    async def step(
        self,
        inputs: Inputs,
        targets: Targets = None,
        *,
        number: int | None = None,
        timeout_s: float | None = None,
    ) -> StepResult:
        """Run a batch forwards and backwards, and update the weights when enough batches were accumulated.

        Args:
            inputs: As in `AsyncClient.extract`.
            targets: What the loss compares with: class indices, or an array as the loss wants it, or a dict
                of name to array; None where every term does without.
            number: Of the call, see `info`; counted by itself when None. A call that is sent again with its
                number is not applied again, and returns the same.
            timeout_s: Overrides the client's timeout, in seconds.

        Raises:
            TargetRejectedError: The targets do not fit the loss.
            NonFiniteStepError: The loss or a gradient is not finite; the trainer is as before.
            TrainerBusyError: A fit is under way.
            TrainerBrokenError: It must be restored from a checkpoint first.
            StepOutOfOrderError: `number` is not the next one.
            SpoolFailedError: The server's disk did not take saved tensors; the trainer is as before.
            InputRejectedError: The model cannot take the inputs.
        """
        return await self._numbered(pb.TRAIN_KIND_STEP, inputs, targets, number, timeout_s)

    async def forward_backward(
        self,
        inputs: Inputs,
        targets: Targets = None,
        *,
        number: int | None = None,
        timeout_s: float | None = None,
    ) -> StepResult:
        """Run a batch forwards and backwards; gradients are added to those that are there. See `step`."""
        return await self._numbered(pb.TRAIN_KIND_FORWARD_BACKWARD, inputs, targets, number, timeout_s)

    async def optimizer_step(
        self, *, number: int | None = None, timeout_s: float | None = None
    ) -> StepResult:
        """Update the weights with the gradients that are there. See `step`."""
        chosen, is_applied = await self._numbering.take(number), False
        request = pb.StepOptimizerRequest(trainer_id=self.trainer_id, number=chosen)
        try:
            reply = await self._client._call(self._client._trainers.StepOptimizer, request, timeout_s)
            is_applied = True
        finally:
            await self._numbering.end(is_applied=is_applied)
        return step_result(reply.result)

    async def evaluate(
        self, inputs: Inputs, targets: Targets = None, *, timeout_s: float | None = None
    ) -> Evaluation:
        """Return the loss of a batch in eval mode, with averaged weights where there are any.

        Args:
            inputs: As in `step`.
            targets: As in `step`.
            timeout_s: Overrides the client's timeout, in seconds.
        """
        call = wire_batch(inputs, targets).call(self.trainer_id, pb.TRAIN_KIND_EVALUATE)
        return evaluation(await self._client._train(call, timeout_s))

    async def predict(self, inputs: Inputs, *, timeout_s: float | None = None) -> Array:
        """Return the model's output in eval mode, for example logits (batch, classes)."""
        maps = await self._client.extract(self.trainer_id, inputs, taps="/out", timeout_s=timeout_s)
        return next(iter(maps.values()))

    async def extract(
        self, inputs: Inputs | None, taps: str | Tap | Sequence[str | Tap], **options: Any
    ) -> FeatureMaps:
        """Return feature maps of the present weights; options as in `AsyncClient.extract`."""
        return await self._client.extract(self.trainer_id, inputs, taps, **options)

    async def gradients(self, inputs: Inputs | None, *, of: Objective, **options: Any) -> FeatureMaps:
        """Return gradients with the present weights; options as in `AsyncClient.gradients`."""
        return await self._client.gradients(self.trainer_id, inputs, of=of, **options)

    async def save(self, note: str = "", *, timeout_s: float | None = None) -> Checkpoint:
        """Write a checkpoint; when this returns it survives a crash of the server.

        Raises:
            StorageFullError: The server's disk is full; earlier checkpoints are unchanged.
        """
        request = pb.SaveTrainerRequest(trainer_id=self.trainer_id, note=note)
        reply = await self._client._call(self._client._trainers.SaveTrainer, request, timeout_s)
        return checkpoint(reply.checkpoint)

    async def restore(
        self, checkpoint_number: int | None = None, *, timeout_s: float | None = None
    ) -> TrainerInfo:
        """Take the trainer back to a checkpoint: weights, optimizer, schedule, buffers, random numbers.

        Args:
            checkpoint_number: Which; the newest when None.
            timeout_s: Overrides the client's timeout, in seconds.

        Raises:
            UnknownCheckpointError: There is no such checkpoint.
            CheckpointCorruptError: It is damaged.
        """
        request = pb.RestoreTrainerRequest(trainer_id=self.trainer_id, checkpoint_number=checkpoint_number)
        reply = await self._client._call(self._client._trainers.RestoreTrainer, request, timeout_s)
        self._numbering.forget()
        return trainer_info(reply.trainer)

    async def checkpoints(self) -> list[Checkpoint]:
        """Return the checkpoints, oldest first."""
        request = pb.ListCheckpointsRequest(trainer_id=self.trainer_id)
        reply = await self._client._call(self._client._trainers.ListCheckpoints, request)
        return [checkpoint(message) for message in reply.checkpoints]

    async def export(
        self, path: str | os.PathLike[str], *, optimizer: bool = False, timeout_s: float | None = None
    ) -> Path:
        """Write the weights to a safetensors file, which appears when it is complete.

            safetensors.torch.load_file(path)     # a state dict of the model with its new head

        Args:
            path: The file; one that is there is replaced.
            optimizer: Whether to add the optimizer's state, under names that begin with `optimizer.`.
            timeout_s: Overrides the client's timeout, in seconds; a file that takes longer is taken up again.
        """
        failures = 0
        with Download(Path(path)) as download:
            while not download.is_complete:
                request = pb.ExportTrainerRequest(
                    trainer_id=self.trainer_id, has_optimizer=optimizer, offset_bytes=download.byte_count
                )
                try:
                    async for message in self._client._exported(request, timeout_s):
                        failures = 0
                        download.add(message)
                    download.check()
                except grpc.RpcError as error:
                    is_slow = error.code() is grpc.StatusCode.DEADLINE_EXCEEDED
                    has_moved = download.byte_count > request.offset_bytes
                    failures += 1
                    if not (is_broken_connection(error) or (is_slow and has_moved)) or (
                        failures > self._client._options.retries
                    ):
                        raise self._client._converted(error, "") from error
                    await async_pause(min(_FIRST_PAUSE_S * 2**failures, _LONGEST_PAUSE_S))
        return Path(path)

    async def parameter_gradients(self, *, timeout_s: float | None = None) -> dict[str, Array]:
        """Return the gradients that wait for an update, by parameter: after rules, before `clip_norm`.

        await trainer.forward_backward(images, labels)
        (await trainer.parameter_gradients())["fc.bias"]
        """
        request = pb.ExportTrainerRequest(trainer_id=self.trainer_id, content=pb.EXPORT_CONTENT_GRADIENTS)
        pieces: list[bytes] = []
        request_id = new_request_id()
        try:
            async for message in self._client._exported(request, timeout_s):
                pieces.append(message.data)
        except grpc.RpcError as error:
            raise self._client._converted(error, request_id) from error
        return load(b"".join(pieces))

    async def publish(
        self, model_id: str, *, categories: Sequence[str] = (), timeout_s: float | None = None
    ) -> str:
        """Make a copy of the present weights a hosted model, at once and after restarts.

        Args:
            model_id: Its id: small letters, digits and `._-`, at most 63; not in the catalogue.
            categories: Class names by index.
            timeout_s: Overrides the client's timeout, in seconds.

        Returns:
            The id of the model, which is loaded.

        Raises:
            ModelConflictError: There is a model of this id.
        """
        request = pb.PublishTrainerRequest(
            trainer_id=self.trainer_id, model_id=model_id, categories=categories
        )
        reply = await self._client._call(self._client._trainers.PublishTrainer, request, timeout_s)
        return reply.model_id

    async def close(self) -> None:
        """Close the trainer and delete its checkpoints; nothing happens when it is closed."""
        request = pb.CloseTrainerRequest(trainer_id=self.trainer_id)
        try:
            await self._client._call(self._client._trainers.CloseTrainer, request)
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
        batch = wire_batch(inputs, targets)
        chosen, is_applied = await self._numbering.take(number), False
        try:
            message = await self._client._train(batch.call(self.trainer_id, kind, chosen), timeout_s)
            is_applied = True
        finally:
            await self._numbering.end(is_applied=is_applied)
        return step_result(message)

    async def _ask_number(self) -> int:
        return (await self.info()).next_number
