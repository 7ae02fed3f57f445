"""Request errors; users find these exceptions in `trocar.errors`."""

from trocar._base.error_base import InvalidRequestError, NotFoundError
from trocar_api.reasons import ErrorReason


class SelectorError(InvalidRequestError):
    """A tap selects something that cannot be collected; see `Client.modules`."""


class InputError(InvalidRequestError):
    """The inputs do not fit the model or one another."""


class UnknownDirectionError(NotFoundError, reason=ErrorReason.UNKNOWN_DIRECTION):
    """You have stored no direction of this name for the model."""


class UnknownEditsError(NotFoundError, reason=ErrorReason.UNKNOWN_EDITS):
    """You have stored no edits of this name for the model; see `Client.stored_edits`."""


class UnknownSourceError(NotFoundError, reason=ErrorReason.UNKNOWN_SOURCE):
    """The call has no source inputs of this name."""


class UnknownSegmentError(NotFoundError, reason=ErrorReason.UNKNOWN_SEGMENT):
    """You have no shared memory segment of this id; this client then sends chunks."""


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


class InvalidArgumentError(InvalidRequestError, reason=ErrorReason.INVALID_ARGUMENT):
    """A field of the request is missing or out of range."""


class InvalidSelectorError(SelectorError, reason=ErrorReason.INVALID_SELECTOR):
    """The selector does not follow the grammar."""


class ModuleNotCalledError(SelectorError, reason=ErrorReason.MODULE_NOT_CALLED):
    """The module exists, but the forward pass never calls it."""


class AmbiguousCallError(SelectorError, reason=ErrorReason.AMBIGUOUS_CALL):
    """The module is called more than once; select a call with `@0`, `@-1` or `@*`."""


class CallOutOfRangeError(SelectorError, reason=ErrorReason.CALL_OUT_OF_RANGE):
    """The module is called fewer times than the call index asks for."""


class NotATensorError(SelectorError, reason=ErrorReason.NOT_A_TENSOR):
    """The selected value is not a tensor and contains none."""


class NotTraceableError(SelectorError, reason=ErrorReason.NOT_TRACEABLE):
    """The model's graph cannot be traced, so it has no fx nodes; select modules instead."""


class DuplicateNameError(SelectorError, reason=ErrorReason.DUPLICATE_NAME):
    """Two feature maps of one reply would have the same name; give an alias."""


class ReductionRejectedError(InvalidRequestError, reason=ErrorReason.REDUCTION_REJECTED):
    """A reduction, a cast or a statistic does not fit the value."""


class StartNotPossibleError(InvalidRequestError, reason=ErrorReason.START_NOT_POSSIBLE):
    """The pass cannot start there: the rest of the pass needs more than that value."""


class EditError(InvalidRequestError):
    """An edit does not fit."""


class EditShapeMismatchError(EditError, reason=ErrorReason.EDIT_SHAPE_MISMATCH):
    """An edit's index, mask or tensor does not fit the shape of the value."""


class EditDtypeRejectedError(EditError, reason=ErrorReason.EDIT_DTYPE_REJECTED):
    """An edit's operation is not defined for the value's dtype."""


class EditNotPossibleError(EditError, reason=ErrorReason.EDIT_NOT_POSSIBLE):
    """An edit is not possible at this place."""


class EditNotReachedError(EditError, reason=ErrorReason.EDIT_NOT_REACHED):
    """The pass ends before it reaches an edit, or never uses the edited value: tap a later value."""


class EditsExistError(EditError, reason=ErrorReason.EDITS_EXIST):
    """Edits of this name are stored already; `replace=True` replaces them."""


class EditsCorruptError(EditError, reason=ErrorReason.EDITS_CORRUPT):
    """Stored edits are damaged; store them again, or delete them."""


class EditsUnavailableError(EditError, reason=ErrorReason.EDITS_UNAVAILABLE):
    """Stored edits cannot be read or written: the server's disk is full or not writable."""


class DirectionError(InvalidRequestError):
    """A direction cannot be fitted, stored or used."""


class DirectionExistsError(DirectionError, reason=ErrorReason.DIRECTION_EXISTS):
    """A direction of this name is stored already; `replace=True` replaces it."""


class DirectionMismatchError(DirectionError, reason=ErrorReason.DIRECTION_MISMATCH):
    """The direction was fitted at another place, or on a model with other weights, code or settings."""


class DirectionRejectedError(DirectionError, reason=ErrorReason.DIRECTION_REJECTED):
    """No direction can be fitted to these data: labels, groups, folds, values, or their size on the disk."""


class DirectionCorruptError(DirectionError, reason=ErrorReason.DIRECTION_CORRUPT):
    """A stored direction is damaged; fit it again, or delete it."""


class DirectionsUnavailableError(DirectionError, reason=ErrorReason.DIRECTIONS_UNAVAILABLE):
    """Stored directions cannot be read or written: the server's disk is full or not writable."""


class NonFiniteValueError(InvalidRequestError, reason=ErrorReason.NON_FINITE_VALUE):
    """A number or tensor of an edit or objective, or a logit of a text to continue, is NaN or infinite."""


class ObjectiveError(InvalidRequestError):
    """The objective has no gradient."""


class NotDifferentiableError(ObjectiveError, reason=ErrorReason.NOT_DIFFERENTIABLE):
    """There is no gradient: integers, code without gradients, or no influence on the objective."""


class ObjectiveOutOfRangeError(ObjectiveError, reason=ErrorReason.OBJECTIVE_OUT_OF_RANGE):
    """The objective names a class that the model does not have."""


class ObjectiveRejectedError(ObjectiveError, reason=ErrorReason.OBJECTIVE_REJECTED):
    """The objective does not fit its values."""


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


class PassTooLongError(InvalidRequestError, reason=ErrorReason.PASS_TOO_LONG):
    """The pass would take longer than the server or the call's deadline allows; nothing was computed."""


class UnimplementedError(InvalidRequestError, reason=ErrorReason.UNIMPLEMENTED):
    """The server does not offer this method or option."""
