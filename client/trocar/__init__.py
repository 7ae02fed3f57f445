"""Trocar: look inside hosted PyTorch models, from a client that needs no PyTorch.

    import trocar

    client = trocar.connect("localhost:50051")
    maps = client.extract("resnet50", images, taps=["layer4"])
    maps["layer4"]                           # numpy array (8, 2048, 7, 7)

`trocar.aio.connect` is the same for asyncio. `trocar.errors` has the tree of exceptions.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from trocar import errors
from trocar._analysis.cka import Cka
from trocar._analysis.comparison import ClassChange, Comparison
from trocar._analysis.dead_channels import DeadChannels, DeadRow
from trocar._analysis.diff import Diff, DiffRow
from trocar._analysis.fid import Fid, frechet_distance
from trocar._analysis.health import Health, HealthRow, HealthThresholds
from trocar._analysis.pca import Pca
from trocar._analysis.prediction import ClassScore, Prediction, Predictions
from trocar._attribution.attribution import Attribution
from trocar._base.dimensions import TokenGrid
from trocar._base.server_status import CacheStatus, CallerStatus, DeviceStatus, QueueStatus, ServerStatus
from trocar._base.types import (
    DrainState,
    Model,
    ModelInput,
    Preprocessing,
    ServerInfo,
    ServerLimits,
    ServerTiming,
)
from trocar._extras import need
from trocar._request.edit_json import edits_from_json
from trocar._request.edits import Edit, edit
from trocar._request.execution import ExecutionInfo, Numerics
from trocar._request.inputs import flag, tensor_list
from trocar._request.objectives import Objective
from trocar._request.positions import TextSpan, span
from trocar._request.reductions import (
    Reduction,
    channels,
    crop,
    gram,
    grid,
    index,
    pca,
    pool,
    project,
    samples,
    tokens,
    top_k,
)
from trocar._request.scores import gradient_penalty, log_probability, logit, loss, probability, value
from trocar._request.selectors import selector
from trocar._request.statistic_options import HistogramWanted, QuantilesWanted, histogram, quantiles
from trocar._request.stored_edits import StoredEdits
from trocar._request.taps import Tap, tap
from trocar._request.texts import Audio, Texts, audio, chat, texts
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
from trocar._request.training.trainer_parts import clamp, gradient_rule, head, host_memory, lora, spool
from trocar._result.extraction_plan import ExtractionPlan
from trocar._result.feature_maps import CastInfo, FeatureMapInfo, FeatureMaps
from trocar._result.history import FitEvent, History
from trocar._result.modules import ModuleInfo, ModuleTree, OutputInfo
from trocar._result.processed import ProcessedInput, ProcessedSample
from trocar._result.statistics import Histogram, Statistics
from trocar._result.trainer_types import Checkpoint, Evaluation, StepResult, TrainerInfo
from trocar._sync.client import Client, connect
from trocar._sync.fits import Trainer
from trocar._sync.prepared import PreparedExtraction
from trocar._sync.stream import ExtractStream
from trocar._transport.channel import TlsOptions
from trocar._uploads.upload_plan import UploadProgress
from trocar._wire.stored_datasets import DatasetTarget, DatasetTensor, StoredDataset
from trocar._wire.stream_messages import BatchResult
from trocar.errors import (
    AmbiguousCallError,
    BadReplyError,
    CallCancelledError,
    CallOutOfRangeError,
    CheckpointCorruptError,
    DatasetCorruptError,
    DatasetError,
    DatasetInvalidError,
    DeadlineExceededError,
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
    FitInvalidError,
    ImageTooLargeError,
    InputError,
    InputRejectedError,
    InternalServerError,
    InvalidArgumentError,
    InvalidImageError,
    InvalidRequestError,
    InvalidSelectorError,
    InvalidTensorError,
    MissingExtraError,
    ModelConflictError,
    ModelError,
    ModelInvalidError,
    ModelNotLoadedError,
    ModuleNotCalledError,
    NonFiniteStepError,
    NonFiniteValueError,
    NoPreprocessingError,
    NotATensorError,
    NotCachedError,
    NotDifferentiableError,
    NotFoundError,
    NotTraceableError,
    ObjectiveError,
    ObjectiveOutOfRangeError,
    ObjectiveRejectedError,
    OutputError,
    PassTooLargeError,
    PassTooLongError,
    PermissionDeniedError,
    QuotaExceededError,
    ReductionRejectedError,
    ReplyTooLargeError,
    RequestTooLargeError,
    ScopeMissingError,
    SelectorError,
    ServerBusyError,
    ServerDrainingError,
    ServerError,
    ServerOutOfMemoryError,
    ServerUnavailableError,
    SourceError,
    SpoolFailedError,
    StartNotPossibleError,
    StepOutOfOrderError,
    StorageFullError,
    StorageUnavailableError,
    TargetRejectedError,
    TokenInvalidError,
    TokenMissingError,
    TrainerBrokenError,
    TrainerBusyError,
    TrainerError,
    TrainerInvalidError,
    TrocarError,
    UnimplementedError,
    UnknownArchitectureError,
    UnknownCheckpointError,
    UnknownDatasetError,
    UnknownEditsError,
    UnknownFitError,
    UnknownFunctionError,
    UnknownMethodError,
    UnknownModelError,
    UnknownModuleError,
    UnknownNodeError,
    UnknownParameterError,
    UnknownPickError,
    UnknownSegmentError,
    UnknownSourceError,
    UnknownTrainerError,
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
    "AsyncPreparedExtraction",
    "AsyncTrainer",
    "Attribution",
    "Audio",
    "BadReplyError",
    "BatchResult",
    "CacheStatus",
    "CallCancelledError",
    "CallOutOfRangeError",
    "CallerStatus",
    "CastInfo",
    "Checkpoint",
    "CheckpointCorruptError",
    "Cka",
    "ClassChange",
    "ClassScore",
    "Client",
    "Comparison",
    "DatasetCorruptError",
    "DatasetError",
    "DatasetInvalidError",
    "DatasetReport",
    "DatasetTarget",
    "DatasetTensor",
    "DeadChannels",
    "DeadRow",
    "DeadlineExceededError",
    "DeviceStatus",
    "Diff",
    "DiffRow",
    "DrainState",
    "DuplicateNameError",
    "Edit",
    "EditDtypeRejectedError",
    "EditError",
    "EditNotPossibleError",
    "EditNotReachedError",
    "EditShapeMismatchError",
    "EditsCorruptError",
    "EditsExistError",
    "EditsUnavailableError",
    "EmptyBatchError",
    "ErrorReason",
    "Evaluation",
    "ExecutionInfo",
    "ExtractStream",
    "ExtractionPlan",
    "FeatureColumn",
    "FeatureMapInfo",
    "FeatureMaps",
    "Features",
    "Fid",
    "FitEvent",
    "FitInvalidError",
    "Health",
    "HealthRow",
    "HealthThresholds",
    "Histogram",
    "HistogramWanted",
    "History",
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
    "Model",
    "ModelConflictError",
    "ModelError",
    "ModelInput",
    "ModelInvalidError",
    "ModelNotLoadedError",
    "ModuleInfo",
    "ModuleNotCalledError",
    "ModuleTree",
    "NoPreprocessingError",
    "NonFiniteStepError",
    "NonFiniteValueError",
    "NotATensorError",
    "NotCachedError",
    "NotDifferentiableError",
    "NotFoundError",
    "NotTraceableError",
    "Numerics",
    "Objective",
    "ObjectiveError",
    "ObjectiveOutOfRangeError",
    "ObjectiveRejectedError",
    "OutputError",
    "OutputInfo",
    "PassTooLargeError",
    "PassTooLongError",
    "Pca",
    "PermissionDeniedError",
    "Prediction",
    "Predictions",
    "PreparedExtraction",
    "Preprocessing",
    "ProcessedInput",
    "ProcessedSample",
    "Progress",
    "QuantilesWanted",
    "QueueStatus",
    "QuotaExceededError",
    "Reduction",
    "ReductionRejectedError",
    "ReplyTooLargeError",
    "RequestTooLargeError",
    "ScopeMissingError",
    "SelectorError",
    "ServerBusyError",
    "ServerDrainingError",
    "ServerError",
    "ServerInfo",
    "ServerLimits",
    "ServerOutOfMemoryError",
    "ServerStatus",
    "ServerTiming",
    "ServerUnavailableError",
    "SourceError",
    "SpoolFailedError",
    "StartNotPossibleError",
    "Statistics",
    "StepOutOfOrderError",
    "StepResult",
    "StorageFullError",
    "StorageUnavailableError",
    "StoredDataset",
    "StoredEdits",
    "Tap",
    "TargetRejectedError",
    "TextSpan",
    "Texts",
    "TlsOptions",
    "TokenGrid",
    "TokenInvalidError",
    "TokenMissingError",
    "Trainer",
    "TrainerBrokenError",
    "TrainerBusyError",
    "TrainerError",
    "TrainerInfo",
    "TrainerInvalidError",
    "TrocarError",
    "UnimplementedError",
    "UnknownArchitectureError",
    "UnknownCheckpointError",
    "UnknownDatasetError",
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
    "UploadProgress",
    "VersionSkewError",
    "WeightsCorruptError",
    "WeightsMismatchError",
    "WeightsUnavailableError",
    "__version__",
    "adagrad",
    "adam",
    "adamw",
    "aio",
    "audio",
    "augmentation",
    "channels",
    "chat",
    "clamp",
    "connect",
    "crop",
    "early_stop",
    "edit",
    "edits_from_json",
    "errors",
    "extract_dataset",
    "flag",
    "frechet_distance",
    "gradient_penalty",
    "gradient_rule",
    "gram",
    "grid",
    "head",
    "histogram",
    "host_memory",
    "index",
    "lbfgs",
    "log_probability",
    "logit",
    "lora",
    "lora_from",
    "loss",
    "loss_term",
    "metric",
    "parameter_group",
    "pca",
    "pool",
    "probability",
    "project",
    "quantiles",
    "read_features",
    "regularizer",
    "rmsprop",
    "samples",
    "schedule",
    "selector",
    "sgd",
    "span",
    "spool",
    "tap",
    "teacher",
    "tensor_list",
    "texts",
    "tokens",
    "top_k",
    "value",
]

__version__: str
Spool: Any
"""The spool of saved tensors for your own training loop; of the server, imported when it is asked for."""

_SERVER_SPOOL = "trocar_server.spool"
_LATE = {
    "aio": ("AsyncClient", "AsyncExtractStream", "AsyncPreparedExtraction", "AsyncTrainer"),
    "_export.features": ("FeatureColumn", "Features", "read_features"),
    "_export.job": ("DatasetReport", "Progress", "extract_dataset"),
}
"""Names of modules that most programs do not use, by the module."""

if TYPE_CHECKING:
    from trocar import aio
    from trocar._export.features import FeatureColumn, Features, read_features
    from trocar._export.job import DatasetReport, Progress, extract_dataset
    from trocar.aio import AsyncClient, AsyncExtractStream, AsyncPreparedExtraction, AsyncTrainer

if not TYPE_CHECKING:  # for type checkers there is nothing beside the above

    def __getattr__(name):
        """Import late what takes time: a tenth of `import trocar` each, torch seconds."""
        if name == "aio":
            return import_module("trocar.aio")
        for module, names in _LATE.items():
            if name in names:
                return getattr(import_module(f"trocar.{module}"), name)
        if name == "__version__":
            from importlib.metadata import version

            return version("trocar")
        if name == "Spool":
            need("trocar.Spool", "server", "torch", _SERVER_SPOOL)
            return import_module(_SERVER_SPOOL).Spool
        raise AttributeError(f"module 'trocar' has no attribute {name!r}")

    def __dir__():
        """List imported names and public ones."""
        return sorted({*globals(), *__all__})
