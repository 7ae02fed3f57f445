"""What can go wrong in a call, as a tree of exceptions.

TrocarError
  NotFoundError                    a name that the server does not know
    UnknownEditsError
    UnknownSourceError
    UnknownModelError
    UnknownArchitectureError
    UnknownWeightsError
    UnknownModuleError             also a SelectorError
    UnknownPickError               also a SelectorError
    UnknownNodeError               also a SelectorError
    UnknownFunctionError           also a SelectorError
    UnknownParameterError          also a SelectorError
  ModelError                       the model cannot be used as it is
    ModelNotLoadedError
    ModelConflictError
    ModelInvalidError
    WeightsUnavailableError
    WeightsMismatchError
    WeightsCorruptError
  InvalidRequestError              the request has to change
    InvalidArgumentError
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
      EditsExistError
      EditsCorruptError
      EditsUnavailableError
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
    PermissionDeniedError          the token is missing, wrong or too narrow
  ServerError                      the request is fine; the same call may succeed later
    ServerUnavailableError         nobody answers at the target
    ServerBusyError
    ServerOutOfMemoryError
    DeadlineExceededError
    CallCancelledError
    InternalServerError
  VersionSkewError                 client and server are of different versions
  BadReplyError                    the reply breaks the wire contract
  DatasetError                     a run over a whole data set cannot go on
    SourceError                    what is to be read
    OutputError                    what is to be written, or gone on with
"""

from collections.abc import Mapping

from trocar_api.reasons import ErrorReason

EXCEPTIONS: dict[ErrorReason, type["TrocarError"]] = {}
"""The exception class of every reason; each class below enters itself. A contract test walks it."""


class TrocarError(Exception):
    """Any failed call.

    Args:
        message: What happened and what to do next, for a person to read.
        reason: The stable reason; the class's own when not given.
        details: Extra facts as text, for example the nearest names.
        request_id: What the server's log has for this call; empty when it was never sent.
    """

    reason: ErrorReason | None = None
    """The stable reason; None where there is none, as when nobody answers."""

    def __init_subclass__(cls, reason: ErrorReason | None = None) -> None:
        super().__init_subclass__()
        if reason is not None:
            cls.reason = reason
            EXCEPTIONS[reason] = cls

    def __init__(
        self,
        message: str,
        *,
        reason: ErrorReason | None = None,
        details: Mapping[str, str] | None = None,
        request_id: str = "",
    ) -> None:
        super().__init__(message)
        self.reason = reason or type(self).reason
        self.details: dict[str, str] = dict(details or {})
        self.request_id = request_id


class NotFoundError(TrocarError):
    """The server does not know a name; the message has the nearest ones."""


class ModelError(TrocarError):
    """The model exists but cannot be used as it is."""


class InvalidRequestError(TrocarError):
    """The request cannot succeed as it is; sending it again does not help."""


class SelectorError(InvalidRequestError):
    """A tap selects something that cannot be collected; see `Client.modules`."""


class InputError(InvalidRequestError):
    """The inputs do not fit the model or themselves."""


class ServerError(TrocarError):
    """The server could not do it now; the same call may succeed later."""


class UnknownModelError(NotFoundError, reason=ErrorReason.UNKNOWN_MODEL):
    """The catalogue has no model of this id; see `Client.models`."""


class UnknownArchitectureError(UnknownModelError, reason=ErrorReason.UNKNOWN_ARCHITECTURE):
    """torchvision has no model builder of this name."""


class UnknownWeightsError(NotFoundError, reason=ErrorReason.UNKNOWN_WEIGHTS):
    """The architecture has no weights of this name."""


class UnknownEditsError(NotFoundError, reason=ErrorReason.UNKNOWN_EDITS):
    """You have stored no edits of this name for the model; see `Client.stored_edits`."""


class UnknownSourceError(NotFoundError, reason=ErrorReason.UNKNOWN_SOURCE):
    """The call has no source inputs of this name."""


class UnknownModuleError(SelectorError, NotFoundError, reason=ErrorReason.UNKNOWN_MODULE):
    """A selector matches no module; see `Client.modules`."""


class UnknownPickError(SelectorError, NotFoundError, reason=ErrorReason.UNKNOWN_PICK):
    """The module's value has no such element; see `Client.modules`."""


class UnknownNodeError(SelectorError, NotFoundError, reason=ErrorReason.UNKNOWN_NODE):
    """The model's traced graph has no node of this name."""


class UnknownFunctionError(SelectorError, NotFoundError, reason=ErrorReason.UNKNOWN_FUNCTION):
    """The forward pass calls no function of this name."""


class UnknownParameterError(SelectorError, NotFoundError, reason=ErrorReason.UNKNOWN_PARAMETER):
    """The module has no parameter or buffer of this name."""


class ModelNotLoadedError(ModelError, reason=ErrorReason.MODEL_NOT_LOADED):
    """The model is in the catalogue, but not in memory; see `Client.load`."""


class ModelConflictError(ModelError, reason=ErrorReason.MODEL_CONFLICT):
    """The model exists with other weights than the ones asked for."""


class ModelInvalidError(ModelError, reason=ErrorReason.MODEL_INVALID):
    """The operator's description of the model does not work."""


class WeightsUnavailableError(ModelError, reason=ErrorReason.WEIGHTS_UNAVAILABLE):
    """The weights could not be downloaded, or the file is not there."""


class WeightsMismatchError(ModelError, reason=ErrorReason.WEIGHTS_MISMATCH):
    """Keys of the weights are missing, unexpected or of another shape."""


class WeightsCorruptError(ModelError, reason=ErrorReason.WEIGHTS_CORRUPT):
    """The weights file is not a readable safetensors file."""


class InvalidArgumentError(InvalidRequestError, reason=ErrorReason.INVALID_ARGUMENT):
    """A field of the request is missing or out of range."""


class InvalidSelectorError(SelectorError, reason=ErrorReason.INVALID_SELECTOR):
    """The selector does not follow the grammar."""


class ModuleNotCalledError(SelectorError, reason=ErrorReason.MODULE_NOT_CALLED):
    """The module exists, but the forward pass never calls it."""


class AmbiguousCallError(SelectorError, reason=ErrorReason.AMBIGUOUS_CALL):
    """The module is called more than once; say which call with `@0`, `@-1` or `@*`."""


class CallOutOfRangeError(SelectorError, reason=ErrorReason.CALL_OUT_OF_RANGE):
    """The module is called fewer times than the call index asks for."""


class NotATensorError(SelectorError, reason=ErrorReason.NOT_A_TENSOR):
    """The selected value is no tensor and holds none."""


class NotTraceableError(SelectorError, reason=ErrorReason.NOT_TRACEABLE):
    """The model's graph cannot be traced, so it has no fx nodes; select modules instead."""


class DuplicateNameError(SelectorError, reason=ErrorReason.DUPLICATE_NAME):
    """Two feature maps of one reply would have the same name; give an alias."""


class ReductionRejectedError(InvalidRequestError, reason=ErrorReason.REDUCTION_REJECTED):
    """A reduction, a cast or a statistic does not fit the value."""


class StartNotPossibleError(InvalidRequestError, reason=ErrorReason.START_NOT_POSSIBLE):
    """The pass cannot start there: what follows needs more than that value."""


class EditError(InvalidRequestError):
    """An edit does not fit."""


class EditShapeMismatchError(EditError, reason=ErrorReason.EDIT_SHAPE_MISMATCH):
    """An edit's index, mask or tensor does not fit the shape of the value."""


class EditDtypeRejectedError(EditError, reason=ErrorReason.EDIT_DTYPE_REJECTED):
    """An edit's operation makes no sense for the value's dtype."""


class EditNotPossibleError(EditError, reason=ErrorReason.EDIT_NOT_POSSIBLE):
    """An edit cannot be made at this place."""


class EditsExistError(EditError, reason=ErrorReason.EDITS_EXIST):
    """Edits of this name are stored already; `replace=True` replaces them."""


class EditsCorruptError(EditError, reason=ErrorReason.EDITS_CORRUPT):
    """Stored edits are damaged; store them again, or delete them."""


class EditsUnavailableError(EditError, reason=ErrorReason.EDITS_UNAVAILABLE):
    """Stored edits cannot be read or written: the server's disk is full, or not its to write."""


class NonFiniteValueError(InvalidRequestError, reason=ErrorReason.NON_FINITE_VALUE):
    """A number or tensor of an edit or objective is NaN or infinite."""


class ObjectiveError(InvalidRequestError):
    """There is no gradient of what was asked for."""


class NotDifferentiableError(ObjectiveError, reason=ErrorReason.NOT_DIFFERENTIABLE):
    """There is no gradient there: integers, code without gradients, or no influence on the objective."""


class ObjectiveOutOfRangeError(ObjectiveError, reason=ErrorReason.OBJECTIVE_OUT_OF_RANGE):
    """The objective names a class that the model does not have."""


class ObjectiveRejectedError(ObjectiveError, reason=ErrorReason.OBJECTIVE_REJECTED):
    """The objective does not fit the values that it is made of."""


class InvalidTensorError(InputError, reason=ErrorReason.INVALID_TENSOR):
    """Shape, dtype and bytes of a tensor do not fit together."""


class InvalidImageError(InputError, reason=ErrorReason.INVALID_IMAGE):
    """An image cannot be decoded."""


class ImageTooLargeError(InputError, reason=ErrorReason.IMAGE_TOO_LARGE):
    """An image has more pixels than the server decodes."""


class EmptyBatchError(InputError, reason=ErrorReason.EMPTY_BATCH):
    """The batch has no sample."""


class NoPreprocessingError(InputError, reason=ErrorReason.NO_PREPROCESSING):
    """The model has no preprocessing for images; send an array instead."""


class InputRejectedError(InputError, reason=ErrorReason.INPUT_REJECTED):
    """The model cannot take the inputs: rank, channels, size, dtype or number of arguments."""


class RequestTooLargeError(InvalidRequestError, reason=ErrorReason.REQUEST_TOO_LARGE):
    """The inputs exceed the server's limit; see `Client.server_info`."""


class ReplyTooLargeError(InvalidRequestError, reason=ErrorReason.REPLY_TOO_LARGE):
    """The feature maps would exceed the server's limit; nothing was computed."""


class PassTooLargeError(InvalidRequestError, reason=ErrorReason.PASS_TOO_LARGE):
    """The pass would need more memory than the server allows; nothing was computed."""


class PermissionDeniedError(InvalidRequestError):
    """The token is missing, wrong or does not allow the call."""


class ServerUnavailableError(ServerError):
    """Nobody answers at the target."""


class ServerBusyError(ServerError, reason=ErrorReason.SERVER_BUSY):
    """Too many calls wait for the model, or no replica was free in time."""


class ServerOutOfMemoryError(ServerError, reason=ErrorReason.OUT_OF_MEMORY):
    """The server's device had too little memory for the pass."""


class DeadlineExceededError(ServerError, reason=ErrorReason.DEADLINE_EXCEEDED):
    """The call's deadline passed; the work was stopped."""


class CallCancelledError(ServerError, reason=ErrorReason.CANCELLED):
    """The call was cancelled; the work was stopped."""


class InternalServerError(ServerError, reason=ErrorReason.INTERNAL):
    """A defect of the server; its log has the details under the request id."""


class VersionSkewError(TrocarError):
    """The server does not know the call: client and server are of different versions."""


class BadReplyError(TrocarError):
    """The reply breaks the wire contract: cut short, out of order or not decodable."""


class DatasetError(TrocarError):
    """A run over a whole data set cannot start or go on; see its subclasses."""


class SourceError(DatasetError):
    """A data set, or a sample of it, cannot be read."""


class OutputError(DatasetError):
    """Feature maps cannot be written, or an output cannot be gone on with or read back."""
