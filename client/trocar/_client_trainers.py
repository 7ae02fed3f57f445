"""Part of the sync client: generated from _aio_trainers.py by tools/generate_sync.py, do not edit."""

from __future__ import annotations

from typing import TYPE_CHECKING

import grpc

from trocar._channel import new_request_id
from trocar._client_datasets import Datasets
from trocar._client_fits import Trainer
from trocar._client_members import merged
from trocar._concurrency import sync_pause
from trocar._rpc_errors import is_broken_connection
from trocar._stored_datasets import StoredDataset, is_dataset_id
from trocar._trainer_requests import trainer_spec
from trocar._trainer_types import trainer_info
from trocar.errors import BadReplyError
from trocar_api.v1 import trainer_pb2 as pb

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from trocar._channel import SyncStream
    from trocar._requests import ExtractCall
    from trocar._trainer_losses import LossTerm, Regularizer
    from trocar._trainer_optimizers import Optimizer, Schedule
    from trocar._trainer_options import Selectors
    from trocar._trainer_parts import GradientRule, Head, SavedTensors
    from trocar._trainer_types import TrainerInfo
    from trocar._uploads.plan import UploadProgress

_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.1, 2.0


class Trainers(Datasets):
    """Fine-tuning on the server."""

    def train(  # noqa: PLR0913 - options of one trainer, by keyword
        self,
        model_id: str,
        *,
        head: Head | int | None = None,
        trainable: Selectors = (),
        losses: LossTerm | str | Sequence[LossTerm | str] = (),
        optimizer: Optimizer | None = None,
        schedule: Schedule | None = None,
        gradient_rules: GradientRule | Sequence[GradientRule] = (),
        saved_tensors: SavedTensors | None = None,
        regularizers: Regularizer | Sequence[Regularizer] = (),
        train_mode: Selectors = (),
        activation_checkpointing: Selectors = (),
        clip_norm: float | None = None,
        accumulation: int = 1,
        precision: str = "float32",
        ema_decay: float | None = None,
        seed: int = 0,
        deterministic: bool = False,
        on_nonfinite: str = "fail",
        ttl_s: float | None = None,
        timeout_s: float | None = None,
    ) -> Trainer:
        """Make a trainer from a hosted model; the model itself never changes.

            trainer = client.train(
                "resnet18",
                head=10,
                trainable=["layer4", "fc"],
                optimizer=trocar.adamw(lr=1e-3),
                gradient_rules=[trocar.clamp("fc.*", -0.1, 0.1)],
                saved_tensors=trocar.spool(budget_bytes=256 << 20),
            )
            (trainer.step(images, labels)).loss

        Its meaning in plain torch: parameters outside of `trainable` have `requires_grad=False`. A module is
        in train mode if it or, for one without parameters, its parent holds something trainable; batch norm
        whose own parameters are frozen is in eval mode. The head is made after `torch.manual_seed(seed)`. On
        a CPU the weights are bit-equal to those of the same steps in plain torch.

        Args:
            model_id: The id of a loaded model.
            head: A new classifier: its number of classes, or `trocar.head(...)`; the model's own when None.
            trainable: What is trained: modules (all of their parameters) and parameters by selector;
                everything when empty. A new head always is.
            losses: Terms of the loss: names or `trocar.loss_term(...)`; cross-entropy when empty.
            optimizer: `trocar.sgd(...)`, `adam`, `adamw`, `rmsprop`, `adagrad`, `lbfgs`; SGD with a rate of
                0.01 when None.
            schedule: `trocar.schedule(...)`; constant rates when None.
            gradient_rules: `trocar.clamp(...)`, `trocar.gradient_rule(...)`, in this order, before gradients
                are accumulated.
            saved_tensors: `trocar.spool(...)` or `trocar.host_memory()`; on the device when None.
            regularizers: `trocar.regularizer(...)`, added to the loss.
            train_mode: Modules that are in train mode though nothing of them is trained.
            activation_checkpointing: Modules that are computed again in the backward pass, not saved.
            clip_norm: The most Euclidean norm of all gradients together.
            accumulation: Batches for each update; each counts for its share.
            precision: "float32", or "bf16" for autocast.
            ema_decay: Keeps a moving average of what is trained, which evaluation, extraction, export and
                publishing use: average = decay * average + (1 - decay) * weight after each update.
            seed: Of the head, of dropout and of the order of the data.
            deterministic: Whether only deterministic algorithms are used.
            on_nonfinite: What becomes of a step whose loss or gradients are not finite: "fail" or "skip".
            ttl_s: Seconds after its last use at which it is closed; the server's own limit when None.
            timeout_s: Overrides the client's timeout, in seconds.

        Raises:
            TrainerInvalidError: Something of this does not work; the message lists every problem.
            UnknownModelError: The catalogue has no model of this id.
            ModelNotLoadedError: It is not in memory; see `load`.
            QuotaExceededError: You have as many trainers as you may.
        """
        spec = trainer_spec(
            model_id,
            head=head,
            trainable=trainable,
            losses=losses,
            optimizer=optimizer,
            schedule=schedule,
            gradient_rules=gradient_rules,
            saved_tensors=saved_tensors,
            regularizers=regularizers,
            train_mode=train_mode,
            activation_checkpointing=activation_checkpointing,
            clip_norm=clip_norm,
            accumulation=accumulation,
            precision=precision,
            ema_decay=ema_decay,
            seed=seed,
            deterministic=deterministic,
            on_nonfinite=on_nonfinite,
            ttl_s=ttl_s,
        )
        request = pb.CreateTrainerRequest(spec=spec, request_id=new_request_id())
        home = self._home()
        reply = home._call(home._trainers.CreateTrainer, request, timeout_s)
        return Trainer(home, reply.trainer.trainer_id)

    def trainer(self, trainer_id: str) -> Trainer:
        """Return one of your trainers, for example after a restart of this program.

        Raises:
            UnknownTrainerError: You have no trainer of this id.
        """

        def ask(one: Trainers) -> Trainer:
            found = Trainer(one, trainer_id)
            found.info()
            return found

        return self._found(ask)

    def trainers(self) -> list[TrainerInfo]:
        """Return your trainers, oldest first; of several servers, those that answer."""

        def ask(one: Trainers) -> list[TrainerInfo]:
            reply = one._call(one._trainers.ListTrainers, pb.ListTrainersRequest())
            return [trainer_info(message) for message in reply.trainers]

        found = merged(self._everywhere(ask), lambda info: info.trainer_id)
        return sorted(found, key=lambda info: info.created_at)

    def unpublish(self, model_id: str) -> None:
        """Remove a model that you published, from memory and from the server's disk.

        Args:
            model_id: Its id.

        Raises:
            UnknownModelError: You published no model of this id.
            ModelConflictError: A trainer needs it.
        """
        request = pb.UnpublishModelRequest(model_id=model_id)

        def ask(one: Trainers) -> object:
            return one._call(one._trainers.UnpublishModel, request)

        self._found(ask)

    def _dataset_id(self, source: object, on_upload: Callable[[UploadProgress], object] | None = None) -> str:
        """Return the id of a data set on the server; what is none of them is uploaded first."""
        if isinstance(source, StoredDataset):
            return source.dataset_id
        if isinstance(source, str) and is_dataset_id(source):
            return source
        return (self.upload_dataset(source, progress=on_upload)).dataset_id

    def _train(self, call: ExtractCall, timeout_s: float | None) -> pb.StepResult:
        """Send a batch, again where the connection breaks: its number sees to it that it is applied once."""
        failures = 0
        while True:
            request_id = new_request_id()
            try:
                return self._train_once(call, request_id, timeout_s)
            except grpc.RpcError as error:
                failures += 1
                if failures > self._options.retries or not is_broken_connection(error):
                    raise self._converted(error, request_id) from error
            sync_pause(min(_FIRST_PAUSE_S * 2**failures, _LONGEST_PAUSE_S))

    def _train_once(self, call: ExtractCall, request_id: str, timeout_s: float | None) -> pb.StepResult:
        metadata, timeout = self._options.metadata(request_id), self._timeout(timeout_s)
        stream: SyncStream
        if call.fits_one_message:
            stream = self._train_one(call.message(), timeout=timeout, metadata=metadata)
        else:
            stream = self._train_many(call.messages(), timeout=timeout, metadata=metadata)
        found: pb.StepResult | None = None
        for message in stream:
            found = pb.TrainResponse.FromString(message).result
        if found is None:
            raise BadReplyError("the server said nothing of the batch")
        return found

    def _exported(
        self, request: pb.ExportTrainerRequest, timeout_s: float | None
    ) -> Iterable[pb.ExportTrainerResponse]:
        metadata = self._options.metadata(new_request_id())
        return self._trainers.ExportTrainer(request, timeout=self._timeout(timeout_s), metadata=metadata)
