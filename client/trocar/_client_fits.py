"""Part of the sync client: generated from _aio_fits.py by tools/generate_sync.py, do not edit."""

from __future__ import annotations

from typing import TYPE_CHECKING

import grpc

from trocar._channel import new_request_id
from trocar._client_trainer import TrainerCalls
from trocar._concurrency import sync_pause
from trocar._fit_parts import fit_spec
from trocar._fit_progress import make_progress
from trocar._history import LAST_KINDS, History, failure, fit_event
from trocar._rpc_errors import is_broken_connection
from trocar.errors import FitInvalidError, ServerUnavailableError
from trocar_api.v1 import fit_pb2 as pb

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from trocar._fit_parts import Augmentation, EarlyStop, Metric
    from trocar._fit_progress import FitProgress
    from trocar._history import FitEvent
    from trocar._uploads.plan import UploadProgress

_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.1, 2.0
_WATCH_TIMEOUT_S = 86_400.0


class Trainer(TrainerCalls):
    """A trainer on the server; made by `Client.train` or found by `Client.trainer`.

        with client.train("resnet18", head=10, trainable="fc") as trainer:
            result = trainer.step(images, labels)
            result.loss

    Every call that changes it has a number, so that one that is sent again after a broken connection is
    applied once. Leaving the `with` block closes it and deletes its checkpoints; without one it lives until
    it is closed or its time to live is over.

    Attributes:
        trainer_id: Works as a model's id in every call of the client.
    """

    def fit(  # noqa: PLR0913 - options of one fit, by keyword
        self,
        dataset: object,
        *,
        epochs: int = 1,
        batch_size: int = 32,
        eval: object | None = None,
        shuffle: bool = True,
        drop_last: bool = False,
        metrics: Metric | str | Sequence[Metric | str] = ("accuracy",),
        augment: Augmentation | str | Sequence[Augmentation | str] = (),
        early_stop: EarlyStop | None = None,
        checkpoint_every: int = 0,
        feature_cache: bool = True,
        progress: bool = True,
        on_event: Callable[[FitEvent], None] | None = None,
    ) -> History:
        """Train for some epochs on the server, and return what happened.

            history = trainer.fit((images, labels), epochs=5, eval=(test_images, test_labels))
            history.plot()

        The fit goes on when this program ends or the connection breaks; `watch` attaches again.

        Args:
            dataset: The id of an uploaded data set, or anything that `Client.upload_dataset` takes: a
                pair of arrays, a folder of class folders, a torch Dataset, a Hugging Face data set. What the
                server has already is not sent again.
            epochs: Times over the data set.
            batch_size: Samples in a batch.
            eval: What to evaluate on after each epoch, as `dataset`.
            shuffle: Whether epoch e takes the samples in the order of `torch.randperm(n, generator=G)`, G
                seeded with the trainer's seed + e.
            drop_last: Whether a last batch of fewer samples is left out.
            metrics: Names or `trocar.metric(...)`.
            augment: Names or `trocar.augmentation(...)`: torchvision's v2 transforms, in this order.
            early_stop: `trocar.early_stop(...)`.
            checkpoint_every: Updates between two checkpoints; one at the end of each epoch when 0.
            feature_cache: Whether what a frozen prefix computes is kept where the result is bit-equal.
            progress: Whether to show bars, of the upload and of the fit.
            on_event: Called with every event.

        Raises:
            FitInvalidError: Something of this does not work; the message lists every problem.
            TrainerBusyError: Another fit is under way.
            TrocarError: The fit failed, for example with `NonFiniteStepError`; the reason says why.
        """
        with make_progress(progress) as bar:
            first = self.start_fit(
                dataset,
                epochs=epochs,
                batch_size=batch_size,
                eval=eval,
                shuffle=shuffle,
                drop_last=drop_last,
                metrics=metrics,
                augment=augment,
                early_stop=early_stop,
                checkpoint_every=checkpoint_every,
                feature_cache=feature_cache,
                on_upload=bar.show_upload,
            )
            return self._followed(first, bar, on_event)

    def wait(
        self,
        event_number: int | None = None,
        *,
        progress: bool = True,
        on_event: Callable[[FitEvent], None] | None = None,
    ) -> History:
        """Wait for the end of a fit, and return what happened.

            trainer.start_fit((images, labels), epochs=5)
            history = trainer.wait()

        Args:
            event_number: The first event wanted; that of the newest fit's begin when None.
            progress: Whether to show a bar.
            on_event: Called with every event.

        Raises:
            UnknownFitError: The trainer has had no fit.
            TrocarError: The fit failed; the reason says why. `watch` yields its events all the same.
        """
        with make_progress(progress) as bar:
            return self._followed(event_number, bar, on_event)

    def start_fit(  # noqa: PLR0913 - options of one fit, by keyword
        self,
        dataset: object,
        *,
        epochs: int = 1,
        batch_size: int = 32,
        eval: object | None = None,
        shuffle: bool = True,
        drop_last: bool = False,
        metrics: Metric | str | Sequence[Metric | str] = ("accuracy",),
        augment: Augmentation | str | Sequence[Augmentation | str] = (),
        early_stop: EarlyStop | None = None,
        checkpoint_every: int = 0,
        feature_cache: bool = True,
        on_upload: Callable[[UploadProgress], object] | None = None,
    ) -> int:
        """Begin a fit and return at once; see `fit` for the arguments.

        Args:
            dataset: As in `fit`.
            epochs: As in `fit`.
            batch_size: As in `fit`.
            eval: As in `fit`.
            shuffle: As in `fit`.
            drop_last: As in `fit`.
            metrics: As in `fit`.
            augment: As in `fit`.
            early_stop: As in `fit`.
            checkpoint_every: As in `fit`.
            feature_cache: As in `fit`.
            on_upload: Called as data sets are uploaded; see `Client.upload_dataset`.

        Returns:
            The number of its first event, for `watch`.
        """
        spec = fit_spec(
            epochs=epochs,
            batch_size=batch_size,
            shuffle=shuffle,
            drop_last=drop_last,
            metrics=metrics,
            augment=augment,
            stop=early_stop,
            checkpoint_every=checkpoint_every,
            feature_cache=feature_cache,
        )
        if dataset is None:
            raise FitInvalidError("dataset: there is none to train on")
        spec.dataset_id = self._client._dataset_id(dataset, on_upload)
        if eval is not None:
            spec.eval_dataset_id = self._client._dataset_id(eval, on_upload)
        request = pb.StartFitRequest(trainer_id=self.trainer_id, spec=spec, request_id=new_request_id())
        reply = self._client._call(self._client._fits.StartFit, request)
        self._numbering.forget()
        return reply.first_event_number

    def watch(self, event_number: int | None = None) -> Iterator[FitEvent]:
        """Yield the events of a fit until it has ended; a broken connection is made again.

        Args:
            event_number: The first one wanted; that of the newest fit's begin when None.
        """
        failures, wanted = 0, event_number
        while True:
            request_id = new_request_id()
            request = pb.WatchFitRequest(trainer_id=self.trainer_id, event_number=wanted)
            metadata = self._client._options.metadata(request_id)
            call = self._client._fits.WatchFit(request, timeout=_WATCH_TIMEOUT_S, metadata=metadata)
            try:
                for message in call:
                    failures = 0
                    event = fit_event(message.event)
                    wanted = event.number + 1
                    yield event
                    if event.kind in LAST_KINDS:
                        return
            except grpc.RpcError as error:
                failures += 1
                if failures > self._client._options.retries or not is_broken_connection(error):
                    raise self._client._converted(error, request_id) from error
            finally:
                call.cancel()
            sync_pause(min(_FIRST_PAUSE_S * 2**failures, _LONGEST_PAUSE_S))

    def pause(self) -> str:
        """Pause the fit after the present batch; everything stays, also over a restart of the server."""
        return self._control(pb.FIT_COMMAND_PAUSE)

    def resume(self) -> str:
        """Let a paused fit go on."""
        return self._control(pb.FIT_COMMAND_RESUME)

    def cancel(self) -> str:
        """End the fit after the present batch; the weights stay as they are."""
        return self._control(pb.FIT_COMMAND_CANCEL)

    def _followed(
        self, first: int | None, bar: FitProgress, on_event: Callable[[FitEvent], None] | None
    ) -> History:
        history = History()
        try:
            for event in self.watch(first):
                history.add(event)
                bar.show(event)
                if on_event is not None:
                    on_event(event)
        except ServerUnavailableError as error:
            error.add_note(f"the fit goes on with the server: client.trainer({self.trainer_id!r}).wait()")
            raise
        if history.outcome == "failed":
            raise failure(history[-1])
        return history

    def _control(self, command: pb.FitCommand.ValueType) -> str:
        request = pb.ControlFitRequest(trainer_id=self.trainer_id, command=command)
        reply = self._client._call(self._client._fits.ControlFit, request)
        self._numbering.forget()
        return reply.state
