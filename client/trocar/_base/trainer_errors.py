"""Errors of trainers, fits and data sets; users find these exceptions in `trocar.errors`."""

from trocar._base.error_base import InvalidRequestError, NotFoundError, TrocarError
from trocar._base.request_errors import InputError
from trocar_api.reasons import ErrorReason


class TrainerError(TrocarError):
    """A trainer, or a resource that it needs, cannot serve the call."""


class TrainerInvalidError(InvalidRequestError, reason=ErrorReason.TRAINER_INVALID):
    """The trainer's specification is invalid; the message lists every problem."""


class TargetRejectedError(InputError, reason=ErrorReason.TARGET_REJECTED):
    """The targets of a batch do not fit the loss: shape, dtype or labels out of range."""


class FitInvalidError(InvalidRequestError, reason=ErrorReason.FIT_INVALID):
    """The fit's specification is invalid; the message lists every problem."""


class DatasetInvalidError(InvalidRequestError, reason=ErrorReason.DATASET_INVALID):
    """The upload is not a data set that can be trained on."""


class UnknownTrainerError(NotFoundError, reason=ErrorReason.UNKNOWN_TRAINER):
    """You have no trainer of this id; see `Client.trainers`."""


class UnknownCheckpointError(NotFoundError, reason=ErrorReason.UNKNOWN_CHECKPOINT):
    """The trainer has no checkpoint of this number."""


class UnknownDatasetError(NotFoundError, reason=ErrorReason.UNKNOWN_DATASET):
    """You have no data set of this id; see `Client.datasets`."""


class UnknownFitError(NotFoundError, reason=ErrorReason.UNKNOWN_FIT):
    """The trainer has no such fit."""


class TrainerBusyError(TrainerError, reason=ErrorReason.TRAINER_BUSY):
    """The trainer is busy, with a fit for example."""


class TrainerBrokenError(TrainerError, reason=ErrorReason.TRAINER_BROKEN):
    """The trainer stopped in the middle of an update; restore a checkpoint."""


class NonFiniteStepError(TrainerError, reason=ErrorReason.NON_FINITE_STEP):
    """The loss or a gradient was not finite; the trainer is unchanged."""


class StepOutOfOrderError(TrainerError, reason=ErrorReason.STEP_OUT_OF_ORDER):
    """The number of the step is not the next one."""


class SpoolFailedError(TrainerError, reason=ErrorReason.SPOOL_FAILED):
    """Saved tensors could not be written to the server's disk; the trainer is unchanged."""


class CheckpointCorruptError(TrainerError, reason=ErrorReason.CHECKPOINT_CORRUPT):
    """The checkpoint is damaged."""


class DatasetCorruptError(TrainerError, reason=ErrorReason.DATASET_CORRUPT):
    """A stored data set is damaged."""


class StorageFullError(TrainerError, reason=ErrorReason.STORAGE_FULL):
    """The server's disk is full; existing data is unchanged."""


class StorageUnavailableError(TrainerError, reason=ErrorReason.STORAGE_UNAVAILABLE):
    """The server's disk cannot be read or written."""


class QuotaExceededError(TrainerError, reason=ErrorReason.QUOTA_EXCEEDED):
    """Your storage quota is used up."""
