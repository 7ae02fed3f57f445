"""Trainers with asyncio: create, look up, list."""

from __future__ import annotations

import warnings
from typing import TYPE_CHECKING

from trocar._async.fits import AsyncTrainer
from trocar._async.members import merged
from trocar._base.delegation import taking
from trocar._base.request_errors import UnimplementedError
from trocar._base.tables import Listing
from trocar._request.training.trainer_parts import Lora
from trocar._result.trainer_types import TRAINER_COLUMNS, trainer_info
from trocar._transport.channel import new_request_id
from trocar._wire.trainer_requests import TrainerOptions, trainer_spec
from trocar_api.v1 import trainer_pb2 as pb

if TYPE_CHECKING:
    from trocar._async.connection import AsyncConnection
    from trocar._result.trainer_types import TrainerInfo


class AsyncTrainers:
    """Fine-tuning on the server."""

    def __init__(self, connection: AsyncConnection) -> None:
        self._connection = connection

    @taking(TrainerOptions)
    async def train(self, options: TrainerOptions) -> AsyncTrainer:  # noqa: D417 - its arguments are the fields
        """Create a trainer from a hosted model; the model itself never changes.

            trainer = await client.train(
                "resnet18",
                head=10,
                trainable=["layer4", "fc"],
                optimizer=trocar.training.adamw(lr=1e-3),
                gradient_edits=[trocar.training.gradient_edit("fc.*", "clamp", -0.1, 0.1)],
                saved_tensors=trocar.training.save_on_disk(budget_bytes=256 << 20),
            )
            (await trainer.step(images, labels)).loss

        In terms of torch: parameters outside of `trainable` have `requires_grad=False`. A module is in train
        mode if it (or, for a module without parameters, its parent) contains trained parameters; batch norm
        with frozen parameters is in eval mode. The head is created after `torch.manual_seed(seed)`. On a CPU
        the weights are bit-equal to those of the same steps in plain torch.

        Args:
            model_id: The id of a loaded model.
            head: A new classifier: its number of classes, or `trocar.training.head(...)`; the model's own
                when None.
            trainable: Trained modules (all of their parameters) and parameters by selector; everything when
                empty. A new head is always trained.
            losses: Terms of the loss: names or `trocar.training.loss_term(...)`; cross-entropy when empty.
            optimizer: `trocar.training.sgd(...)`, `adam`, `adamw`, `rmsprop`, `adagrad`, `lbfgs`; SGD with a
                rate of 0.01 when None.
            schedule: `trocar.training.schedule(...)`; constant rates when None.
            gradient_edits: `trocar.training.gradient_edit(...)`, in this order, before gradients are
                accumulated.
            edits: `trocar.edit(place, "steer", name, ...)`, "project_out" and "cap" with stored directions of
                yours for this model, at the places where they were fitted: whole values of modules, without
                `positions=` and regions. Made in this order in each training pass, of `step`, of
                `forward_backward` and of the training batches of a fit, with gradients through them;
                evaluation, extraction, generation, export and the published model have none of them. So with
                a direction that is added while the weights are trained ("preventative steering"), the weights
                need not move along it. The trainer keeps the vectors as they are now: a direction that is
                deleted or replaced later changes nothing.
            saved_tensors: `trocar.training.save_on_disk(...)` or `trocar.training.save_on_host()`; on the
                device when None.
            regularizers: `trocar.training.regularizer(...)`, added to the loss.
            train_mode: Modules that are in train mode although none of their parameters is trained.
            activation_checkpointing: Modules whose values are recomputed in the backward pass instead of
                saved.
            clip_norm: The maximum Euclidean norm of all gradients together.
            accumulation: Batches for each update; each contributes an equal share.
            precision: "float32", or "bf16" for autocast.
            ema_decay: Keeps a moving average of the trained parameters, which evaluation, extraction, export
                and publishing use: average = decay * average + (1 - decay) * weight after each update.
            seed: Seed of the head, of dropout and of the order of the data.
            deterministic: Whether only deterministic algorithms are used.
            on_nonfinite: Handling of a step whose loss or gradients are not finite: "fail" or "skip".
            lora: A LoRA adapter, trained instead of the model's parameters: a rank for every linear layer,
                `trocar.training.lora(...)` or `trocar.training.lora_from(...)`; none when None.
            ttl_s: Seconds after its last use until it is closed; the server's limit when None.
            timeout_s: Overrides the client's timeout, in seconds.

        Raises:
            TrainerInvalidError: The specification is invalid; the message lists every problem.
            UnknownModelError: The catalogue has no model of this id.
            ModelNotLoadedError: The model is not in memory; see `load`.
            QuotaExceededError: You have reached the limit of trainers.
            UnknownDirectionError: You have no direction of this name for the model.
            DirectionMismatchError: It was fitted at another place, or the model has changed since.
            InvalidArgumentError: An edit is none that a trainer makes.
            EditShapeMismatchError: A direction is not of the new head's size.
            UnimplementedError: The server makes no edits in training passes.
        """
        request = pb.CreateTrainerRequest(spec=trainer_spec(options), request_id=new_request_id())
        home = await self._connection.home()
        reply = await home.call(home.trainer_service.CreateTrainer, request, options.timeout_s)
        trainer = AsyncTrainer(home, reply.trainer.trainer_id)
        trainer._newest = trainer_info(reply.trainer)
        if len(reply.trainer.spec.edits) != len(request.spec.edits):  # an older server ignores them
            await trainer.close()
            raise UnimplementedError("this server makes no edits in training passes; leave `edits` out")
        if isinstance(options.lora, Lora) and options.lora.folder is not None:
            try:
                await trainer.load_adapter(options.lora.folder, timeout_s=options.timeout_s)
            except BaseException:
                await trainer.close()
                raise
        return trainer

    async def trainer(self, trainer_id: str) -> AsyncTrainer:
        """Return one of your trainers, for example after a restart of this program.

        Warns with a `RuntimeWarning` if the server could not read its newest checkpoint and fell back to
        an older one; see `TrainerInfo.skipped_checkpoints`.

        Raises:
            UnknownTrainerError: You have no trainer of this id.
            CheckpointCorruptError: Its files on the server's disk are damaged.
            StorageUnavailableError: The server's disk cannot be read.
            ModelNotLoadedError: Its base model cannot be loaded.
            UnknownModelError: The server no longer has its base model.
        """

        async def ask(one: AsyncConnection) -> AsyncTrainer:
            result = AsyncTrainer(one, trainer_id)
            info = await result.info()
            if info.skipped_checkpoints:
                warnings.warn("; ".join(info.notices), RuntimeWarning, stacklevel=2)
            return result

        return await self._connection.find(ask)

    async def trainers(self) -> list[TrainerInfo]:
        """Return your trainers, oldest first; of several servers, those that answer.

        Trainers on the server's disk that cannot be read are included, last, with `problem`.

        Raises:
            StorageUnavailableError: The server cannot read its folder of trainers at all.
        """

        async def ask(one: AsyncConnection) -> list[TrainerInfo]:
            reply = await one.call(one.trainer_service.ListTrainers, pb.ListTrainersRequest())
            return [trainer_info(message) for message in reply.trainers]

        result = merged(await self._connection.everywhere(ask), lambda info: info.trainer_id)
        return Listing(
            sorted(result, key=lambda info: (bool(info.problem), info.created_at)), TRAINER_COLUMNS
        )

    async def unpublish(self, model_id: str) -> None:
        """Remove a model that you published, from memory and from the server's disk.

        Args:
            model_id: Its id.

        Raises:
            UnknownModelError: You published no model of this id.
            ModelConflictError: A trainer needs it.
        """
        request = pb.UnpublishModelRequest(model_id=model_id)

        async def ask(one: AsyncConnection) -> object:
            return await one.call(one.trainer_service.UnpublishModel, request)

        await self._connection.find(ask)
