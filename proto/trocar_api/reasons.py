"""The reasons for which a call can fail: one enum for both ends.

A failed call carries a `google.rpc.ErrorInfo` with `domain` = `ERROR_DOMAIN` and `reason` = one of
these names. The server's table (`trocar_server.rpc.status`) maps each to a gRPC status code, the
client's (`trocar.errors`) to an exception class; a contract test walks both.
"""

from enum import StrEnum, unique

ERROR_DOMAIN = "trocar"


@unique
class ErrorReason(StrEnum):
    """Why a call failed. Names are stable; new ones may be added."""

    UNKNOWN_MODEL = "UNKNOWN_MODEL"
    """The catalogue has no model of this id."""
    MODEL_NOT_LOADED = "MODEL_NOT_LOADED"
    """The model is in the catalogue, but not in memory."""
    MODEL_CONFLICT = "MODEL_CONFLICT"
    """The model exists with other weights than the ones asked for."""
    MODEL_INVALID = "MODEL_INVALID"
    """The operator's description of a model does not work: id, factory, options, example input."""
    UNKNOWN_ARCHITECTURE = "UNKNOWN_ARCHITECTURE"
    """torchvision has no model builder of this name."""
    UNKNOWN_WEIGHTS = "UNKNOWN_WEIGHTS"
    """The architecture has no weights of this name."""
    WEIGHTS_UNAVAILABLE = "WEIGHTS_UNAVAILABLE"
    """The weights could not be downloaded, or the file is not there."""
    WEIGHTS_MISMATCH = "WEIGHTS_MISMATCH"
    """Keys of the weights are missing, unexpected or of another shape."""
    WEIGHTS_CORRUPT = "WEIGHTS_CORRUPT"
    """The weights file is not a readable safetensors file."""

    INVALID_SELECTOR = "INVALID_SELECTOR"
    """The selector does not follow the grammar."""
    UNKNOWN_MODULE = "UNKNOWN_MODULE"
    """The selector matches no module."""
    MODULE_NOT_CALLED = "MODULE_NOT_CALLED"
    """The module exists, but the forward pass never calls it."""
    AMBIGUOUS_CALL = "AMBIGUOUS_CALL"
    """The module is called more than once and the selector does not say which call is meant."""
    CALL_OUT_OF_RANGE = "CALL_OUT_OF_RANGE"
    """The module is called fewer times than the selector's call index asks for."""
    UNKNOWN_PICK = "UNKNOWN_PICK"
    """The module's value has no such element."""
    NOT_A_TENSOR = "NOT_A_TENSOR"
    """The selected value is no tensor and holds none."""
    DUPLICATE_NAME = "DUPLICATE_NAME"
    """Two feature maps of one reply would have the same name."""

    INVALID_ARGUMENT = "INVALID_ARGUMENT"
    """A field of the request is missing or out of range."""
    INVALID_TENSOR = "INVALID_TENSOR"
    """Shape, dtype and bytes of a tensor do not fit together."""
    INVALID_IMAGE = "INVALID_IMAGE"
    """An image cannot be decoded."""
    IMAGE_TOO_LARGE = "IMAGE_TOO_LARGE"
    """An image has more pixels than the server decodes."""
    EMPTY_BATCH = "EMPTY_BATCH"
    """The batch has no sample."""
    NO_PREPROCESSING = "NO_PREPROCESSING"
    """Images were sent to a model that has no preprocessing."""
    INPUT_REJECTED = "INPUT_REJECTED"
    """The model cannot take the inputs: rank, channels, size, dtype or number of arguments."""
    REQUEST_TOO_LARGE = "REQUEST_TOO_LARGE"
    """The inputs, or one message, exceed the server's limit."""
    REPLY_TOO_LARGE = "REPLY_TOO_LARGE"
    """The feature maps would exceed the server's limit; nothing was computed."""

    SERVER_BUSY = "SERVER_BUSY"
    """Too many calls wait for the model, or no replica was free in time."""
    DEADLINE_EXCEEDED = "DEADLINE_EXCEEDED"
    """The call's deadline passed; the work was stopped."""
    CANCELLED = "CANCELLED"
    """The caller cancelled; the work was stopped."""
    OUT_OF_MEMORY = "OUT_OF_MEMORY"
    """The device had too little memory for the pass."""
    INTERNAL = "INTERNAL"
    """A defect of the server; its log has the details under the request id."""
