"""What `Client.train` and `Trainer.fit` take and return, beside plain names and numbers.

from trocar import training

trainer = client.train("resnet18", head=training.head(10), optimizer=training.adamw(lr=1e-3))
"""

from typing import TYPE_CHECKING

from trocar._async.fits import AsyncTrainer
from trocar._base.names import unknown_attribute
from trocar._request.training.adapter_files import lora_from
from trocar._request.training.fit_parts import augmentation, early_stop, metric
from trocar._request.training.trainer_losses import loss_term, regularizer, teacher
from trocar._request.training.trainer_optimizers import (
    adagrad,
    adam,
    adamw,
    lbfgs,
    parameter_group,
    rmsprop,
    schedule,
    sgd,
)
from trocar._request.training.trainer_parts import gradient_edit, head, lora, save_on_disk, save_on_host
from trocar._result.history import FitEvent, History
from trocar._result.trainer_types import Checkpoint, Evaluation, StepResult, TrainerInfo
from trocar._sync.fits import Trainer

__all__ = [
    "AsyncTrainer",
    "Checkpoint",
    "Evaluation",
    "FitEvent",
    "History",
    "StepResult",
    "Trainer",
    "TrainerInfo",
    "adagrad",
    "adam",
    "adamw",
    "augmentation",
    "early_stop",
    "gradient_edit",
    "head",
    "lbfgs",
    "lora",
    "lora_from",
    "loss_term",
    "metric",
    "parameter_group",
    "regularizer",
    "rmsprop",
    "save_on_disk",
    "save_on_host",
    "schedule",
    "sgd",
    "teacher",
]

if not TYPE_CHECKING:  # for type checkers there is nothing beside the above

    def __getattr__(name):
        """Refuse a name, with the nearest ones."""
        raise unknown_attribute("trocar.training", name, __all__)
