"""Call errors, as a tree of exceptions.

TrocarError
  NotFoundError                    a name that the server does not know
    UnknownEditsError
    UnknownDirectionError
    UnknownTrainerError
    UnknownCheckpointError
    UnknownDatasetError
    UnknownFitError
    UnknownSourceError
    UnknownSegmentError
    UnknownModelError
    UnknownArchitectureError
    UnknownWeightsError
    UnknownModuleError             also a SelectorError
    UnknownPickError               also a SelectorError
    UnknownNodeError               also a SelectorError
    UnknownFunctionError           also a SelectorError
    UnknownParameterError          also a SelectorError
    NotCachedError                 inside a client that sends digests; never raised by it
  ModelError                       the model cannot be used as it is
    ModelNotLoadedError
    ModelConflictError
    ModelInvalidError
    WeightsUnavailableError
    WeightsMismatchError
    WeightsCorruptError
  TrainerError                     a trainer, or what it needs, cannot do it
    TrainerBusyError
    TrainerBrokenError
    NonFiniteStepError
    StepOutOfOrderError
    SpoolFailedError
    CheckpointCorruptError
    DatasetCorruptError
    StorageFullError
    StorageUnavailableError
    QuotaExceededError
  InvalidRequestError              the request has to change
    InvalidArgumentError
    TrainerInvalidError
    FitInvalidError
    DatasetInvalidError
    SelectorError                  a tap selects what cannot be collected
      InvalidSelectorError
      ModuleNotCalledError
      AmbiguousCallError
      CallOutOfRangeError
      NotATensorError
      NotTraceableError
      DuplicateNameError
    ReductionRejectedError
    StartNotPossibleError
    EditError                      an edit does not fit
      EditShapeMismatchError
      EditDtypeRejectedError
      EditNotPossibleError
      EditNotReachedError
      EditsExistError
      EditsCorruptError
      EditsUnavailableError
    DirectionError                 a direction cannot be fitted, stored or used
      DirectionExistsError
      DirectionMismatchError
      DirectionRejectedError
      DirectionCorruptError
      DirectionsUnavailableError
    NonFiniteValueError
    ObjectiveError                 gradients of something that has none
      NotDifferentiableError
      ObjectiveOutOfRangeError
      ObjectiveRejectedError
    InputError                     the inputs do not fit
      InvalidTensorError
      InvalidImageError
      ImageTooLargeError
      EmptyBatchError
      NoPreprocessingError
      InputRejectedError
    RequestTooLargeError
    ReplyTooLargeError
    PassTooLargeError
    PassTooLongError
    UnimplementedError             the server does not offer it
    PermissionDeniedError          the token is missing, wrong or too narrow
      TokenMissingError
      TokenInvalidError
      ScopeMissingError
  ServerError                      the request is fine; the same call may succeed later
    ServerUnavailableError         no server answers at the target
      ServerDrainingError          it is draining and accepts no new work
    ServerBusyError
    ServerOutOfMemoryError
    DeadlineExceededError
    CallCancelledError
    InternalServerError
  VersionSkewError                 client and server are of different versions
    UnknownMethodError
  BadReplyError                    the reply breaks the wire contract
  DatasetError                     a run over a whole data set cannot go on
    SourceError                    the source cannot be read
    OutputError                    the output cannot be written or resumed
"""

from trocar._base.error_base import (
    EXCEPTIONS,
    InvalidRequestError,
    ModelError,
    NotFoundError,
    ServerError,
    TrocarError,
)
from trocar._base.request_errors import (
    AmbiguousCallError,
    CallOutOfRangeError,
    DirectionCorruptError,
    DirectionError,
    DirectionExistsError,
    DirectionMismatchError,
    DirectionRejectedError,
    DirectionsUnavailableError,
    DuplicateNameError,
    EditDtypeRejectedError,
    EditError,
    EditNotPossibleError,
    EditNotReachedError,
    EditsCorruptError,
    EditsExistError,
    EditShapeMismatchError,
    EditsUnavailableError,
    EmptyBatchError,
    ImageTooLargeError,
    InputError,
    InputRejectedError,
    InvalidArgumentError,
    InvalidImageError,
    InvalidSelectorError,
    InvalidTensorError,
    ModuleNotCalledError,
    NonFiniteValueError,
    NoPreprocessingError,
    NotATensorError,
    NotDifferentiableError,
    NotTraceableError,
    ObjectiveError,
    ObjectiveOutOfRangeError,
    ObjectiveRejectedError,
    PassTooLargeError,
    PassTooLongError,
    ReductionRejectedError,
    ReplyTooLargeError,
    RequestTooLargeError,
    SelectorError,
    StartNotPossibleError,
    UnimplementedError,
    UnknownDirectionError,
    UnknownEditsError,
    UnknownFunctionError,
    UnknownModuleError,
    UnknownNodeError,
    UnknownParameterError,
    UnknownPickError,
    UnknownSegmentError,
    UnknownSourceError,
)
from trocar._base.trainer_errors import (
    CheckpointCorruptError,
    DatasetCorruptError,
    DatasetInvalidError,
    FitInvalidError,
    NonFiniteStepError,
    QuotaExceededError,
    SpoolFailedError,
    StepOutOfOrderError,
    StorageFullError,
    StorageUnavailableError,
    TargetRejectedError,
    TrainerBrokenError,
    TrainerBusyError,
    TrainerError,
    TrainerInvalidError,
    UnknownCheckpointError,
    UnknownDatasetError,
    UnknownFitError,
    UnknownTrainerError,
)
from trocar_api.reasons import ErrorReason

__all__ = [
    "EXCEPTIONS",
    "AmbiguousCallError",
    "BadReplyError",
    "CallCancelledError",
    "CallOutOfRangeError",
    "CheckpointCorruptError",
    "DatasetCorruptError",
    "DatasetError",
    "DatasetInvalidError",
    "DeadlineExceededError",
    "DirectionCorruptError",
    "DirectionError",
    "DirectionExistsError",
    "DirectionMismatchError",
    "DirectionRejectedError",
    "DirectionsUnavailableError",
    "DuplicateNameError",
    "EditDtypeRejectedError",
    "EditError",
    "EditNotPossibleError",
    "EditNotReachedError",
    "EditShapeMismatchError",
    "EditsCorruptError",
    "EditsExistError",
    "EditsUnavailableError",
    "EmptyBatchError",
    "FitInvalidError",
    "ImageTooLargeError",
    "InputError",
    "InputRejectedError",
    "InternalServerError",
    "InvalidArgumentError",
    "InvalidImageError",
    "InvalidRequestError",
    "InvalidSelectorError",
    "InvalidTensorError",
    "MissingExtraError",
    "ModelConflictError",
    "ModelError",
    "ModelInvalidError",
    "ModelNotLoadedError",
    "ModuleNotCalledError",
    "NoPreprocessingError",
    "NonFiniteStepError",
    "NonFiniteValueError",
    "NotATensorError",
    "NotCachedError",
    "NotDifferentiableError",
    "NotFoundError",
    "NotTraceableError",
    "ObjectiveError",
    "ObjectiveOutOfRangeError",
    "ObjectiveRejectedError",
    "OutputError",
    "PassTooLargeError",
    "PassTooLongError",
    "PermissionDeniedError",
    "QuotaExceededError",
    "ReductionRejectedError",
    "ReplyTooLargeError",
    "RequestTooLargeError",
    "ScopeMissingError",
    "SelectorError",
    "ServerBusyError",
    "ServerDrainingError",
    "ServerError",
    "ServerOutOfMemoryError",
    "ServerUnavailableError",
    "SourceError",
    "SpoolFailedError",
    "StartNotPossibleError",
    "StepOutOfOrderError",
    "StorageFullError",
    "StorageUnavailableError",
    "TargetRejectedError",
    "TokenInvalidError",
    "TokenMissingError",
    "TrainerBrokenError",
    "TrainerBusyError",
    "TrainerError",
    "TrainerInvalidError",
    "TrocarError",
    "UnimplementedError",
    "UnknownArchitectureError",
    "UnknownCheckpointError",
    "UnknownDatasetError",
    "UnknownDirectionError",
    "UnknownEditsError",
    "UnknownFitError",
    "UnknownFunctionError",
    "UnknownMethodError",
    "UnknownModelError",
    "UnknownModuleError",
    "UnknownNodeError",
    "UnknownParameterError",
    "UnknownPickError",
    "UnknownSegmentError",
    "UnknownSourceError",
    "UnknownTrainerError",
    "UnknownWeightsError",
    "VersionSkewError",
    "WeightsCorruptError",
    "WeightsMismatchError",
    "WeightsUnavailableError",
]


class PermissionDeniedError(InvalidRequestError):
    """The token is missing, wrong or does not allow the call."""


class TokenMissingError(PermissionDeniedError, reason=ErrorReason.TOKEN_MISSING):
    """The server requires a token; see `connect`'s argument `token`."""


class TokenInvalidError(PermissionDeniedError, reason=ErrorReason.TOKEN_INVALID):
    """The token is unknown to the server, expired or revoked."""


class ScopeMissingError(PermissionDeniedError, reason=ErrorReason.SCOPE_MISSING):
    """The token or certificate does not allow this call; `details` has the `scope` that it needs."""


class UnknownModelError(NotFoundError, reason=ErrorReason.UNKNOWN_MODEL):
    """The catalogue has no model of this id; see `Client.models`."""


class UnknownArchitectureError(UnknownModelError, reason=ErrorReason.UNKNOWN_ARCHITECTURE):
    """torchvision or timm has no architecture of this name."""


class UnknownWeightsError(NotFoundError, reason=ErrorReason.UNKNOWN_WEIGHTS):
    """The architecture has no weights of this name."""


class NotCachedError(NotFoundError, reason=ErrorReason.NOT_CACHED):
    """The server has no reply for a digest; internal: the client then sends the inputs."""


class ModelNotLoadedError(ModelError, reason=ErrorReason.MODEL_NOT_LOADED):
    """The model is in the catalogue, but not in memory; see `Client.load`."""


class ModelConflictError(ModelError, reason=ErrorReason.MODEL_CONFLICT):
    """The model exists with other weights than the ones asked for."""


class ModelInvalidError(ModelError, reason=ErrorReason.MODEL_INVALID):
    """The configuration of the model is invalid."""


class WeightsUnavailableError(ModelError, reason=ErrorReason.WEIGHTS_UNAVAILABLE):
    """The weights could not be downloaded, or the file is missing."""


class WeightsMismatchError(ModelError, reason=ErrorReason.WEIGHTS_MISMATCH):
    """Keys of the weights are missing, unexpected or of another shape."""


class WeightsCorruptError(ModelError, reason=ErrorReason.WEIGHTS_CORRUPT):
    """The weights file is not a readable safetensors file."""


class ServerUnavailableError(ServerError):
    """No server answers at the target."""


class ServerDrainingError(ServerUnavailableError, reason=ErrorReason.SERVER_DRAINING):
    """The server is draining and accepts no new work; another one may."""


class ServerBusyError(ServerError, reason=ErrorReason.SERVER_BUSY):
    """Too many calls wait, no replica was free in time, or there is no room for the call now."""

    retry_after_s: float | None = None
    """In how many seconds the same call may succeed, as the server expects it; None where it said nothing."""


class ServerOutOfMemoryError(ServerError, reason=ErrorReason.OUT_OF_MEMORY):
    """The server's device had too little memory for the pass."""


class DeadlineExceededError(ServerError, reason=ErrorReason.DEADLINE_EXCEEDED):
    """The call's deadline passed; the work was stopped."""


class CallCancelledError(ServerError, reason=ErrorReason.CANCELLED):
    """The call was cancelled; the work was stopped."""


class InternalServerError(ServerError, reason=ErrorReason.INTERNAL):
    """A bug in the server; its log has the details with the request id."""


class VersionSkewError(TrocarError, reason=ErrorReason.VERSION_SKEW):
    """Client and server have incompatible versions; the message tells both."""


class UnknownMethodError(VersionSkewError, reason=ErrorReason.UNKNOWN_METHOD):
    """The server does not have this method, because it is older than the client."""


class BadReplyError(TrocarError):
    """The reply violates the protocol: truncated, out of order or not decodable."""


class DatasetError(TrocarError):
    """A run over a data set cannot start or continue; see its subclasses."""


class SourceError(DatasetError):
    """A data set, or a sample of it, cannot be read."""


class OutputError(DatasetError):
    """Feature maps cannot be written, or an output cannot be resumed or read back."""


class MissingExtraError(SourceError, OutputError, ImportError):
    """A library that only some formats and sources need is not installed; nothing was computed."""
