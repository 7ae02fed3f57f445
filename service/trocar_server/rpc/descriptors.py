"""Service descriptors: of Trocar's own protocol, and of the Open Inference Protocol."""

from typing import Any

from trocar_api.v1 import (
    dataset_pb2,
    direction_pb2,
    edit_store_pb2,
    extraction_pb2,
    fit_pb2,
    generation_pb2,
    model_pb2,
    prepared_pb2,
    server_pb2,
    shared_memory_pb2,
    stream_pb2,
    trainer_pb2,
)
from trocar_server.rpc.oip.oip_messages import SERVICE as OPEN_INFERENCE

_FILES = (
    dataset_pb2,
    direction_pb2,
    edit_store_pb2,
    extraction_pb2,
    fit_pb2,
    generation_pb2,
    model_pb2,
    prepared_pb2,
    server_pb2,
    shared_memory_pb2,
    stream_pb2,
    trainer_pb2,
)

OWN: dict[str, Any] = {
    name: service for file in _FILES for name, service in file.DESCRIPTOR.services_by_name.items()
}
"""Services of Trocar's own protocol by their short names, such as `ExtractionService`."""

ALL: list[Any] = [*OWN.values(), OPEN_INFERENCE]


def service_names() -> list[str]:
    """Return the full names of all services."""
    return [service.full_name for service in ALL]
