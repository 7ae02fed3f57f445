"""The protocol's messages and its service, from a separate descriptor pool.

    request = ModelInferRequest(model_name="resnet50")

tritonclient, KServe and others register the package `inference` in protobuf's default pool, each with its own
files. A second registration there fails at import, so a process with one of them could not have this server.
Messages of two pools share nothing but their bytes.
"""

from importlib.resources import files
from typing import Any

from google.protobuf import descriptor_pool, message_factory
from google.protobuf.descriptor_pb2 import FileDescriptorSet

_PACKAGE = "inference"


def _file() -> bytes:
    described = files("trocar_server.rpc.oip").joinpath("open_inference.binpb").read_bytes()
    serialized: bytes = FileDescriptorSet.FromString(described).file[0].SerializeToString()
    return serialized


FILE = _file()
"""The serialised file descriptor, for another pool."""

_pool = descriptor_pool.DescriptorPool()
_pool.AddSerializedFile(FILE)

SERVICE: Any = _pool.FindServiceByName(f"{_PACKAGE}.GRPCInferenceService")
"""The descriptor of the service."""


def _message(name: str) -> Any:
    descriptor: Any = _pool.FindMessageTypeByName(f"{_PACKAGE}.{name}")
    return message_factory.GetMessageClass(descriptor)


# Created at run time, so type checkers do not know their fields.
ModelConfig = _message("ModelConfig")
ModelConfigResponse = _message("ModelConfigResponse")
ModelInferRequest = _message("ModelInferRequest")
ModelInferResponse = _message("ModelInferResponse")
ModelInput = _message("ModelInput")
ModelMetadataResponse = _message("ModelMetadataResponse")
ModelOutput = _message("ModelOutput")
ModelReadyResponse = _message("ModelReadyResponse")
ModelStatistics = _message("ModelStatistics")
ModelStatisticsResponse = _message("ModelStatisticsResponse")
ModelStreamInferResponse = _message("ModelStreamInferResponse")
RepositoryIndexResponse = _message("RepositoryIndexResponse")
RepositoryModelLoadResponse = _message("RepositoryModelLoadResponse")
RepositoryModelUnloadResponse = _message("RepositoryModelUnloadResponse")
ServerLiveResponse = _message("ServerLiveResponse")
ServerMetadataResponse = _message("ServerMetadataResponse")
ServerReadyResponse = _message("ServerReadyResponse")


def message_class(descriptor: Any) -> Any:
    """Return the class of one of the service's messages."""
    return message_factory.GetMessageClass(descriptor)
