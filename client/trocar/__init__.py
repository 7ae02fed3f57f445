"""Trocar: look inside hosted PyTorch models, from a client that needs no PyTorch.

    import trocar

    client = trocar.connect("localhost:50051")
    maps = client.extract("resnet50", images, taps=["layer4"])
    maps["layer4"]                           # numpy array (8, 2048, 7, 7)

`trocar.aio.connect` is the same for asyncio. `trocar.errors` has the tree of exceptions, `trocar.training`
what fine-tuning takes.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from trocar import _quiet as _quiet  # first: it is for gRPC's import
from trocar import errors
from trocar._analysis.comparison import ClassChange, Comparison
from trocar._analysis.dead_channels import DeadChannels, DeadRow
from trocar._analysis.diff import Diff, DiffRow
from trocar._analysis.direction_scores import DirectionScores
from trocar._analysis.fid import Fid, frechet_distance
from trocar._analysis.health import Health, HealthRow, HealthThresholds
from trocar._analysis.neighbours.neighbours import Neighbour, Neighbours
from trocar._analysis.pca import Pca
from trocar._analysis.prediction import ClassScore, Prediction, Predictions
from trocar._analysis.similarity.cka import Cka
from trocar._analysis.similarity.rsa import Rsa
from trocar._analysis.top_inputs.places import GridCell, Place
from trocar._analysis.top_inputs.top_inputs import TopInput, TopInputs
from trocar._attribution.attribution import Attribution
from trocar._base.call_options import Numerics, options
from trocar._base.dimensions import TokenGrid
from trocar._base.names import unknown_attribute
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
from trocar._request.execution import ExecutionInfo
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
    peak,
    pool,
    project,
    samples,
    tokens,
    top_k,
)
from trocar._request.scores import gradient_penalty, log_probability, logit, loss, probability, value
from trocar._request.selectors import selector
from trocar._request.statistic_options import HistogramWanted, QuantilesWanted, histogram, quantiles
from trocar._request.stored.stored_edits import StoredEdits
from trocar._request.taps import Tap, lens, readout, tap
from trocar._request.text_positions import gate, positions
from trocar._request.texts import Audio, Texts, audio, chat, texts
from trocar._result.directions import Direction, StoredDirection
from trocar._result.extraction_plan import ExtractionPlan
from trocar._result.feature_maps import CastInfo, FeatureMapInfo, FeatureMaps
from trocar._result.modules import ModuleInfo, ModuleTree, OutputInfo
from trocar._result.processed import ProcessedInput, ProcessedSample
from trocar._result.statistics import Histogram, Statistics
from trocar._sync.client import Client, connect
from trocar._sync.prepared import PreparedExtraction
from trocar._sync.stream import ExtractStream
from trocar._transport.channel import TlsOptions
from trocar._uploads.upload_plan import UploadProgress
from trocar._wire.stored_datasets import DatasetTarget, DatasetTensor, StoredDataset
from trocar._wire.stream_messages import BatchResult
from trocar.errors import (
    BadReplyError,
    DatasetError,
    InvalidRequestError,
    ModelError,
    NotFoundError,
    ServerError,
    TrainerError,
    TrocarError,
    VersionSkewError,
)
from trocar_api.reasons import ErrorReason

__all__ = [
    "AsyncClient",
    "AsyncExtractStream",
    "AsyncPreparedExtraction",
    "Attribution",
    "Audio",
    "BadReplyError",
    "BatchResult",
    "CacheStatus",
    "CallerStatus",
    "CastInfo",
    "Cka",
    "ClassChange",
    "ClassScore",
    "Client",
    "Comparison",
    "DatasetError",
    "DatasetReport",
    "DatasetTarget",
    "DatasetTensor",
    "DeadChannels",
    "DeadRow",
    "DeviceStatus",
    "Diff",
    "DiffRow",
    "Direction",
    "DirectionScores",
    "DrainState",
    "Edit",
    "ErrorReason",
    "ExecutionInfo",
    "ExtractStream",
    "ExtractionPlan",
    "FeatureColumn",
    "FeatureMapInfo",
    "FeatureMaps",
    "Features",
    "Fid",
    "GridCell",
    "Health",
    "HealthRow",
    "HealthThresholds",
    "Histogram",
    "HistogramWanted",
    "InvalidRequestError",
    "Model",
    "ModelError",
    "ModelInput",
    "ModuleInfo",
    "ModuleTree",
    "Neighbour",
    "Neighbours",
    "NotFoundError",
    "Numerics",
    "Objective",
    "OutputInfo",
    "Pca",
    "Place",
    "Prediction",
    "Predictions",
    "PreparedExtraction",
    "Preprocessing",
    "ProcessedInput",
    "ProcessedSample",
    "Progress",
    "QuantilesWanted",
    "QueueStatus",
    "Reduction",
    "Rsa",
    "ServerError",
    "ServerInfo",
    "ServerLimits",
    "ServerStatus",
    "ServerTiming",
    "Statistics",
    "StoredDataset",
    "StoredDirection",
    "StoredEdits",
    "Tap",
    "TextSpan",
    "Texts",
    "TlsOptions",
    "TokenGrid",
    "TopInput",
    "TopInputs",
    "TrainerError",
    "TrocarError",
    "UploadProgress",
    "VersionSkewError",
    "__version__",
    "aio",
    "audio",
    "channels",
    "chat",
    "connect",
    "crop",
    "edit",
    "edits_from_json",
    "errors",
    "extract_dataset",
    "flag",
    "frechet_distance",
    "gate",
    "gradient_penalty",
    "gram",
    "grid",
    "histogram",
    "index",
    "lens",
    "log_probability",
    "logit",
    "loss",
    "options",
    "pca",
    "peak",
    "pool",
    "positions",
    "probability",
    "project",
    "quantiles",
    "read_features",
    "readout",
    "samples",
    "selector",
    "span",
    "tap",
    "tensor_list",
    "texts",
    "tokens",
    "top_k",
    "training",
    "value",
]

__version__: str
Spool: Any
"""The spool of saved tensors for your own training loop; of the server, imported when it is asked for."""

_SERVER_SPOOL = "trocar_server.spool"
_LATE = {
    "aio": ("AsyncClient", "AsyncExtractStream", "AsyncPreparedExtraction"),
    "_export.features": ("FeatureColumn", "Features", "read_features"),
    "_export.job": ("DatasetReport", "Progress", "extract_dataset"),
}
"""Names of modules that most programs do not use, by the module."""

if TYPE_CHECKING:
    from trocar import aio, training
    from trocar._export.features import FeatureColumn, Features, read_features
    from trocar._export.job import DatasetReport, Progress, extract_dataset
    from trocar.aio import AsyncClient, AsyncExtractStream, AsyncPreparedExtraction

if not TYPE_CHECKING:  # for type checkers there is nothing beside the above

    def __getattr__(name):
        """Import late what takes time: a tenth of `import trocar` each, torch seconds."""
        if name in ("aio", "training"):
            return import_module(f"trocar.{name}")
        for module, names in _LATE.items():
            if name in names:
                return getattr(import_module(f"trocar.{module}"), name)
        if name == "__version__":
            from importlib.metadata import version

            return version("trocar")
        if name == "Spool":
            need("trocar.Spool", "server", "torch", _SERVER_SPOOL)
            return import_module(_SERVER_SPOOL).Spool
        for module in (errors, import_module("trocar.training")):  # where many look for them here
            if name in module.__all__:
                raise AttributeError(
                    f"module 'trocar' has no attribute {name!r}; it is {module.__name__}.{name}"
                )
        raise unknown_attribute("trocar", name, __all__)

    def __dir__():
        """List imported names and public ones."""
        return sorted({*globals(), *__all__})
