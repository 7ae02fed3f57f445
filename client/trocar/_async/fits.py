"""Fits of a trainer with asyncio: start, follow, pause."""

from __future__ import annotations

from typing import TYPE_CHECKING

import grpc

from trocar._async.datasets import AsyncDatasets
from trocar._async.trainer import AsyncTrainerCalls
from trocar._base.concurrency import async_pause
from trocar._base.delegation import explained, taking
from trocar._extras import need_for_source
from trocar._request.training.fit_parts import FitOptions, fit_spec
from trocar._result.fit_progress import make_progress
from trocar._result.history import LAST_KINDS, History, failure, fit_event
from trocar._transport.attempts import FIRST_PAUSE_S
from trocar._transport.channel import AsyncInterrupts, new_request_id
from trocar._wire.trainer_requests import FitCall, StartFitCall
from trocar.errors import FitInvalidError, ServerUnavailableError
from trocar_api.v1 import fit_pb2 as pb

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable

    from trocar._result.fit_progress import FitProgress
    from trocar._result.history import FitEvent
    from trocar._uploads.upload_plan import UploadProgress

_WATCH_TIMEOUT_S = 86_400.0
"""Deadline of one call that watches a fit, in seconds; a fit that takes longer is watched by another one."""


class AsyncTrainer(AsyncTrainerCalls):
    """A trainer on the server; made by `AsyncClient.train` or found by `AsyncClient.trainer`.

        async with await client.train("resnet18", head=10, trainable="fc") as trainer:
            result = await trainer.step(images, labels)
            result.loss

    Every call that changes it has a number, so a call that is retried after a broken connection is applied
    once. Leaving the `with` block closes the trainer and deletes its checkpoints. Without a `with` block it
    exists until it is closed or its time to live ends.

    Attributes:
        trainer_id: Can be used as a model id in every call of the client.
    """

    @explained
    @taking(FitCall)
    async def fit(self, options: FitCall) -> History:  # noqa: D417 - its arguments are the fields
        """Train for some epochs on the server, and return the history.

            history = await trainer.fit((images, labels), epochs=5, eval=(test_images, test_labels))
            history.plot()

        The fit continues if this program ends or the connection breaks; `watch` follows it again.

        Args:
            dataset: The id of an uploaded data set, or anything that `AsyncClient.upload_dataset` takes: a
                pair of arrays, texts or sound and labels, a folder of class folders, a torch Dataset, a
                Hugging Face data set. Data that the server already has is not sent again.
            epochs: Number of passes over the data set.
            batch_size: Samples in a batch.
            eval: The data set to evaluate on after each epoch, given as `dataset`.
            eval_split: Share of `dataset` that is evaluated after each epoch and not trained on, from 0 to
                below 1; not with `eval`. It is the end of `torch.randperm(n, generator=G)`, G seeded with the
                trainer's seed.
            shuffle: Whether epoch e uses the samples in the order of `torch.randperm(n, generator=G)`, G
                seeded with the trainer's seed + e.
            drop_last: Whether a last batch of fewer samples is left out.
            metrics: Names or `trocar.training.metric(...)`.
            augment: Names or `trocar.training.augmentation(...)`: torchvision's v2 transforms, in this order.
            early_stop: `trocar.training.early_stop(...)`.
            checkpoint_every: Updates between two checkpoints; one at the end of each epoch when 0.
            feature_cache: Whether to cache the outputs of a frozen prefix if the result is bit-equal.
            max_tokens: For a data set of texts: the maximum number of tokens of a text; the model's maximum
                when None.
            truncate: Whether longer texts are cut; otherwise such a text ends the fit with an error.
            workers: Processes of the server that each batch is spread over, as by torch's
                DistributedDataParallel, 1 to 64; `batch_size` is a multiple of it.
            progress: Whether to show bars, of the upload and of the fit.
            on_event: Called with every event.

        Raises:
            FitInvalidError: The specification is invalid; the message lists every problem.
            TrainerBusyError: Another fit is running.
            TrocarError: The fit failed, for example with `NonFiniteStepError`; the reason tells why.
        """
        with make_progress(options.progress) as bar:
            first = await self._start(options, bar.show_upload)
            return await self._followed(first, bar, options.on_event)

    @explained
    async def wait(
        self,
        event_number: int | None = None,
        *,
        progress: bool = True,
        on_event: Callable[[FitEvent], None] | None = None,
    ) -> History:
        """Wait for the end of a fit, and return its history.

            await trainer.start_fit((images, labels), epochs=5)
            history = await trainer.wait()

        Args:
            event_number: The first event to return; when None, the start of the newest fit.
            progress: Whether to show a bar.
            on_event: Called with every event.

        Raises:
            UnknownFitError: The trainer has had no fit.
            TrocarError: The fit failed; the reason tells why. `watch` still yields its events.
        """
        with make_progress(progress) as bar:
            return await self._followed(event_number, bar, on_event)

    @explained
    @taking(StartFitCall)
    async def start_fit(self, options: StartFitCall) -> int:  # noqa: D417 - as in fit
        """Start a fit and return at once; see `fit` for the arguments.

        Args:
            dataset: As in `fit`.
            epochs: As in `fit`.
            batch_size: As in `fit`.
            eval: As in `fit`.
            eval_split: As in `fit`.
            shuffle: As in `fit`.
            drop_last: As in `fit`.
            metrics: As in `fit`.
            augment: As in `fit`.
            early_stop: As in `fit`.
            checkpoint_every: As in `fit`.
            feature_cache: As in `fit`.
            max_tokens: As in `fit`.
            truncate: As in `fit`.
            workers: As in `fit`.
            on_upload: Called as data sets are uploaded; see `AsyncClient.upload_dataset`.

        Returns:
            The number of its first event, for `watch`.
        """
        return await self._start(options, options.on_upload)

    async def watch(self, event_number: int | None = None) -> AsyncIterator[FitEvent]:
        """Yield the events of a fit until it has ended; a broken connection is reopened.

        Args:
            event_number: The first event to yield; when None, the start of the newest fit.
        """
        connection, wanted = self._connection, event_number
        attempts = connection.attempts(resumes=True)
        while True:
            request_id = new_request_id()
            request = pb.WatchFitRequest(trainer_id=self.trainer_id, event_number=wanted)
            metadata = connection.options.metadata(request_id)
            pause_s, call = FIRST_PAUSE_S, None
            try:
                watch = connection.fit_service.WatchFit
                call = connection.begin(watch, request, timeout=_WATCH_TIMEOUT_S, metadata=metadata)
                async for message in call:
                    attempts.progress()
                    event = fit_event(message.event)
                    wanted = event.number + 1
                    yield event
                    if event.kind in LAST_KINDS:
                        return
            except grpc.RpcError as error:
                if error.code() is not grpc.StatusCode.DEADLINE_EXCEEDED:
                    problem = connection.converted(error, request_id)
                    after_s = attempts.pause_after(problem, error)
                    if after_s is None:
                        raise problem from None
                    pause_s = after_s
            except AsyncInterrupts:
                connection.reopen()
                raise
            finally:
                if call is not None:
                    call.cancel()
            await async_pause(pause_s)

    @explained
    async def pause(self) -> str:
        """Pause the fit after the current batch; it can be resumed, also after a restart of the server."""
        return await self._control(pb.FIT_COMMAND_PAUSE)

    @explained
    async def resume(self) -> str:
        """Resume a paused fit."""
        return await self._control(pb.FIT_COMMAND_RESUME)

    @explained
    async def cancel(self) -> str:
        """End the fit after the current batch; the trainer keeps its current weights."""
        return await self._control(pb.FIT_COMMAND_CANCEL)

    async def _start(self, options: FitOptions, on_upload: Callable[[UploadProgress], object] | None) -> int:
        spec = fit_spec(options)
        for source in (options.dataset, options.eval):  # before the first of them is uploaded
            need_for_source(source)
        if options.dataset is None:
            raise FitInvalidError("dataset: no data set is given")
        datasets = AsyncDatasets(self._connection)
        spec.dataset_id = await datasets.dataset_id(options.dataset, on_upload)
        if options.eval is not None:
            spec.eval_dataset_id = await datasets.dataset_id(options.eval, on_upload)
        request = pb.StartFitRequest(trainer_id=self.trainer_id, spec=spec, request_id=new_request_id())
        reply = await self._connection.call(self._connection.fit_service.StartFit, request)
        self._numbering.forget()
        return reply.first_event_number

    async def _followed(
        self, first: int | None, bar: FitProgress, on_event: Callable[[FitEvent], None] | None
    ) -> History:
        history = History()
        try:
            async for event in self.watch(first):
                history.add(event)
                bar.show(event)
                if on_event is not None:
                    on_event(event)
        except ServerUnavailableError as error:
            error.add_note(f"the fit continues on the server: client.trainer({self.trainer_id!r}).wait()")
            raise
        if history.outcome == "failed":
            raise failure(history[-1])
        return history

    async def _control(self, command: pb.FitCommand.ValueType) -> str:
        request = pb.ControlFitRequest(trainer_id=self.trainer_id, command=command)
        reply = await self._connection.call(self._connection.fit_service.ControlFit, request)
        self._numbering.forget()
        return reply.state
