"""Trocar: look inside hosted PyTorch models, from a client that needs no PyTorch.

    import trocar

    client = trocar.connect("localhost:50051")
    maps = client.extract("resnet50", images, taps=["layer4"])
    maps["layer4"]                           # numpy array (8, 2048, 7, 7)

`trocar.aio.connect` is the same for asyncio. `trocar.errors` has the tree of exceptions.
"""

from trocar import aio, errors
from trocar._aio import AsyncClient
from trocar._channel import TlsOptions
from trocar._client import Client, connect
from trocar._datasets.features import FeatureColumn, Features, read_features
from trocar._datasets.job import DatasetReport, Progress, extract_dataset
from trocar._feature_maps import FeatureMapInfo, FeatureMaps
from trocar._modules import ModuleInfo, ModuleTree, OutputInfo
from trocar._statistics import Statistics
from trocar._taps import Tap, tap
from trocar._types import Model, Preprocessing, ServerInfo, ServerLimits, ServerTiming
from trocar.errors import (
    AmbiguousCallError,
    BadReplyError,
    CallCancelledError,
    CallOutOfRangeError,
    DatasetError,
    DeadlineExceededError,
    DuplicateNameError,
    EmptyBatchError,
    ImageTooLargeError,
    InputError,
    InputRejectedError,
    InternalServerError,
    InvalidArgumentError,
    InvalidImageError,
    InvalidRequestError,
    InvalidSelectorError,
    InvalidTensorError,
    ModelConflictError,
    ModelError,
    ModelInvalidError,
    ModelNotLoadedError,
    ModuleNotCalledError,
    NoPreprocessingError,
    NotATensorError,
    NotFoundError,
    NotTraceableError,
    OutputError,
    PassTooLargeError,
    PermissionDeniedError,
    ReductionRejectedError,
    ReplyTooLargeError,
    RequestTooLargeError,
    SelectorError,
    ServerBusyError,
    ServerError,
    ServerOutOfMemoryError,
    ServerUnavailableError,
    SourceError,
    StartNotPossibleError,
    TrocarError,
    UnknownArchitectureError,
    UnknownFunctionError,
    UnknownModelError,
    UnknownModuleError,
    UnknownNodeError,
    UnknownParameterError,
    UnknownPickError,
    UnknownWeightsError,
    VersionSkewError,
    WeightsCorruptError,
    WeightsMismatchError,
    WeightsUnavailableError,
)
from trocar_api.reasons import ErrorReason

__all__ = [
    "AmbiguousCallError",
    "AsyncClient",
    "BadReplyError",
    "CallCancelledError",
    "CallOutOfRangeError",
    "Client",
    "DatasetError",
    "DatasetReport",
    "DeadlineExceededError",
    "DuplicateNameError",
    "EmptyBatchError",
    "ErrorReason",
    "FeatureColumn",
    "FeatureMapInfo",
    "FeatureMaps",
    "Features",
    "ImageTooLargeError",
    "InputError",
    "InputRejectedError",
    "InternalServerError",
    "InvalidArgumentError",
    "InvalidImageError",
    "InvalidRequestError",
    "InvalidSelectorError",
    "InvalidTensorError",
    "Model",
    "ModelConflictError",
    "ModelError",
    "ModelInvalidError",
    "ModelNotLoadedError",
    "ModuleInfo",
    "ModuleNotCalledError",
    "ModuleTree",
    "NoPreprocessingError",
    "NotATensorError",
    "NotFoundError",
    "NotTraceableError",
    "OutputError",
    "OutputInfo",
    "PassTooLargeError",
    "PermissionDeniedError",
    "Preprocessing",
    "Progress",
    "ReductionRejectedError",
    "ReplyTooLargeError",
    "RequestTooLargeError",
    "SelectorError",
    "ServerBusyError",
    "ServerError",
    "ServerInfo",
    "ServerLimits",
    "ServerOutOfMemoryError",
    "ServerTiming",
    "ServerUnavailableError",
    "SourceError",
    "StartNotPossibleError",
    "Statistics",
    "Tap",
    "TlsOptions",
    "TrocarError",
    "UnknownArchitectureError",
    "UnknownFunctionError",
    "UnknownModelError",
    "UnknownModuleError",
    "UnknownNodeError",
    "UnknownParameterError",
    "UnknownPickError",
    "UnknownWeightsError",
    "VersionSkewError",
    "WeightsCorruptError",
    "WeightsMismatchError",
    "WeightsUnavailableError",
    "__version__",
    "aio",
    "connect",
    "errors",
    "extract_dataset",
    "read_features",
    "tap",
]

__version__: str


def __getattr__(name: str) -> str:
    """Read the version only when it is asked for: importlib.metadata costs 20 ms."""
    if name != "__version__":
        raise AttributeError(f"module 'trocar' has no attribute {name!r}")
    from importlib.metadata import version

    return version("trocar")
