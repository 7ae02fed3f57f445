"""Trocar: look inside hosted PyTorch models, from a client that needs no PyTorch.

    import trocar

    client = trocar.connect("localhost:50051")
    maps = client.extract("resnet50", images, taps=["layer4"])
    maps["layer4"]                           # numpy array (8, 2048, 7, 7)

`trocar.aio.connect` is the same for asyncio. `trocar.errors` has the tree of exceptions.
"""

from trocar import aio, errors
from trocar._aio import AsyncClient
from trocar._aio_stream import AsyncExtractStream
from trocar._analysis.cka import Cka
from trocar._analysis.dead_channels import DeadChannels, DeadRow
from trocar._analysis.diff import Diff, DiffRow
from trocar._analysis.fid import Fid, frechet_distance
from trocar._analysis.health import Health, HealthRow, HealthThresholds
from trocar._analysis.pca import Pca
from trocar._attribution.attribution import Attribution
from trocar._channel import TlsOptions
from trocar._client import Client, connect
from trocar._client_stream import ExtractStream
from trocar._datasets.features import FeatureColumn, Features, read_features
from trocar._datasets.job import DatasetReport, Progress, extract_dataset
from trocar._edit_json import edits_from_json
from trocar._edits import Edit, edit
from trocar._extraction_plan import ExtractionPlan
from trocar._feature_maps import CastInfo, FeatureMapInfo, FeatureMaps
from trocar._modules import ModuleInfo, ModuleTree, OutputInfo
from trocar._objectives import Objective
from trocar._reductions import (
    Reduction,
    channels,
    crop,
    gram,
    index,
    pca,
    pool,
    project,
    samples,
    tokens,
    top_k,
)
from trocar._scores import gradient_penalty, log_probability, logit, loss, probability, value
from trocar._selectors import selector
from trocar._statistic_options import HistogramWanted, QuantilesWanted, histogram, quantiles
from trocar._statistics import Histogram, Statistics
from trocar._stored_datasets import DatasetTarget, DatasetTensor, StoredDataset
from trocar._stored_edits import StoredEdits
from trocar._stream_messages import BatchResult
from trocar._taps import Tap, tap
from trocar._types import Model, Preprocessing, ServerInfo, ServerLimits, ServerTiming
from trocar._uploads.plan import UploadProgress
from trocar.errors import (
    AmbiguousCallError,
    BadReplyError,
    CallCancelledError,
    CallOutOfRangeError,
    DatasetError,
    DeadlineExceededError,
    DuplicateNameError,
    EditDtypeRejectedError,
    EditError,
    EditNotPossibleError,
    EditsCorruptError,
    EditsExistError,
    EditShapeMismatchError,
    EditsUnavailableError,
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
    NonFiniteValueError,
    NoPreprocessingError,
    NotATensorError,
    NotDifferentiableError,
    NotFoundError,
    NotTraceableError,
    ObjectiveError,
    ObjectiveOutOfRangeError,
    ObjectiveRejectedError,
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
    UnknownEditsError,
    UnknownFunctionError,
    UnknownModelError,
    UnknownModuleError,
    UnknownNodeError,
    UnknownParameterError,
    UnknownPickError,
    UnknownSourceError,
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
    "AsyncExtractStream",
    "Attribution",
    "BadReplyError",
    "BatchResult",
    "CallCancelledError",
    "CallOutOfRangeError",
    "CastInfo",
    "Cka",
    "Client",
    "DatasetError",
    "DatasetReport",
    "DatasetTarget",
    "DatasetTensor",
    "DeadChannels",
    "DeadRow",
    "DeadlineExceededError",
    "Diff",
    "DiffRow",
    "DuplicateNameError",
    "Edit",
    "EditDtypeRejectedError",
    "EditError",
    "EditNotPossibleError",
    "EditShapeMismatchError",
    "EditsCorruptError",
    "EditsExistError",
    "EditsUnavailableError",
    "EmptyBatchError",
    "ErrorReason",
    "ExtractStream",
    "ExtractionPlan",
    "FeatureColumn",
    "FeatureMapInfo",
    "FeatureMaps",
    "Features",
    "Fid",
    "Health",
    "HealthRow",
    "HealthThresholds",
    "Histogram",
    "HistogramWanted",
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
    "NonFiniteValueError",
    "NotATensorError",
    "NotDifferentiableError",
    "NotFoundError",
    "NotTraceableError",
    "Objective",
    "ObjectiveError",
    "ObjectiveOutOfRangeError",
    "ObjectiveRejectedError",
    "OutputError",
    "OutputInfo",
    "PassTooLargeError",
    "Pca",
    "PermissionDeniedError",
    "Preprocessing",
    "Progress",
    "QuantilesWanted",
    "Reduction",
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
    "StoredDataset",
    "StoredEdits",
    "Tap",
    "TlsOptions",
    "TrocarError",
    "UnknownArchitectureError",
    "UnknownEditsError",
    "UnknownFunctionError",
    "UnknownModelError",
    "UnknownModuleError",
    "UnknownNodeError",
    "UnknownParameterError",
    "UnknownPickError",
    "UnknownSourceError",
    "UnknownWeightsError",
    "UploadProgress",
    "VersionSkewError",
    "WeightsCorruptError",
    "WeightsMismatchError",
    "WeightsUnavailableError",
    "__version__",
    "aio",
    "channels",
    "connect",
    "crop",
    "edit",
    "edits_from_json",
    "errors",
    "extract_dataset",
    "frechet_distance",
    "gradient_penalty",
    "gram",
    "histogram",
    "index",
    "log_probability",
    "logit",
    "loss",
    "pca",
    "pool",
    "probability",
    "project",
    "quantiles",
    "read_features",
    "samples",
    "selector",
    "tap",
    "tokens",
    "top_k",
    "value",
]

__version__: str


def __getattr__(name: str) -> str:
    """Read the version only when it is asked for: importlib.metadata costs 20 ms."""
    if name != "__version__":
        raise AttributeError(f"module 'trocar' has no attribute {name!r}")
    from importlib.metadata import version

    return version("trocar")
