"""Required scope of each method of each service. Methods not listed here are denied.

A contract test walks the descriptors and fails where a method is missing.
"""

from trocar_server.auth import Scope

_OPEN_PREFIX = "/grpc.health.v1.Health/"

METHOD_SCOPES: dict[str, Scope] = {
    f"/{service}/{method}": scope
    for service, methods in {
        "trocar_api.v1.ExtractionService": {"Extract": Scope.RUN, "Plan": Scope.READ},
        "trocar_api.v1.StreamService": {"ExtractStream": Scope.RUN},
        "trocar_api.v1.GenerationService": {"Generate": Scope.RUN},
        "trocar_api.v1.SharedMemoryService": {"ShareMemory": Scope.RUN},
        "trocar_api.v1.PreparedCallService": {"PrepareCalls": Scope.RUN},
        "trocar_api.v1.ModelService": {
            "ListModels": Scope.READ,
            "GetModel": Scope.READ,
            "ListModules": Scope.READ,
            "ListReplicas": Scope.READ,
            "LoadModel": Scope.ADMIN,
            "UnloadModel": Scope.ADMIN,
        },
        "trocar_api.v1.ServerService": {
            "GetServerInfo": Scope.READ,
            "Drain": Scope.ADMIN,
            "ReloadConfig": Scope.ADMIN,
            "GetServerStatus": Scope.READ,
        },
        "trocar_api.v1.EditStoreService": {
            "StoreEdits": Scope.RUN,
            "ListEdits": Scope.READ,
            "DeleteEdits": Scope.RUN,
        },
        "trocar_api.v1.DirectionService": {
            "ListDirections": Scope.READ,
            "GetDirection": Scope.READ,
            "StoreDirection": Scope.RUN,
            "DeleteDirections": Scope.RUN,
        },
        "trocar_api.v1.DatasetService": {
            "BeginUpload": Scope.TRAIN,
            "UploadShard": Scope.TRAIN,
            "CommitUpload": Scope.TRAIN,
            "ListDatasets": Scope.READ,
            "GetDataset": Scope.READ,
            "DeleteDataset": Scope.TRAIN,
        },
        "trocar_api.v1.TrainerService": {
            "CreateTrainer": Scope.TRAIN,
            "GetTrainer": Scope.READ,
            "ListTrainers": Scope.READ,
            "CloseTrainer": Scope.TRAIN,
            "Train": Scope.TRAIN,
            "StepOptimizer": Scope.TRAIN,
            "SaveTrainer": Scope.TRAIN,
            "RestoreTrainer": Scope.TRAIN,
            "ListCheckpoints": Scope.READ,
            "ExportTrainer": Scope.TRAIN,
            "LoadAdapter": Scope.TRAIN,
            "PublishTrainer": Scope.ADMIN,
            "UnpublishModel": Scope.ADMIN,
        },
        "trocar_api.v1.FitService": {
            "StartFit": Scope.TRAIN,
            "WatchFit": Scope.READ,
            "ControlFit": Scope.TRAIN,
        },
        "inference.GRPCInferenceService": {
            **dict.fromkeys(("ServerLive", "ServerReady", "ServerMetadata"), Scope.READ),
            **dict.fromkeys(("ModelReady", "ModelMetadata", "ModelConfig", "ModelStatistics"), Scope.READ),
            **dict.fromkeys(("ModelInfer", "ModelStreamInfer"), Scope.RUN),
            "RepositoryIndex": Scope.READ,
            **dict.fromkeys(("RepositoryModelLoad", "RepositoryModelUnload"), Scope.ADMIN),
            # These answer UNIMPLEMENTED.
            **dict.fromkeys(("SystemSharedMemoryStatus", "CudaSharedMemoryStatus"), Scope.READ),
            **dict.fromkeys(("SystemSharedMemoryRegister", "SystemSharedMemoryUnregister"), Scope.RUN),
            **dict.fromkeys(("CudaSharedMemoryRegister", "CudaSharedMemoryUnregister"), Scope.RUN),
            **dict.fromkeys(("TraceSetting", "LogSettings"), Scope.ADMIN),
        },
        "grpc.reflection.v1alpha.ServerReflection": {"ServerReflectionInfo": Scope.READ},
    }.items()
    for method, scope in methods.items()
}
"""The scope by method, `/package.Service/Method`."""


def is_open(method: str) -> bool:
    """Whether a method is open to every caller: only health checks are."""
    return method.startswith(_OPEN_PREFIX)
