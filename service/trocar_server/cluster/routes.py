"""Routes: the model or trainer that a call is for, read from its first message without parsing the rest.

route_of("/trocar_api.v1.ExtractionService/Extract").read(message)      # "resnet18"
"""

from collections.abc import Iterator
from dataclasses import dataclass
from enum import StrEnum, unique
from functools import cache
from typing import Any

from trocar_api.wire import WireError, last_value
from trocar_server.rpc.descriptors import ALL
from trocar_server.rpc.oip.oip_messages import SERVICE as OPEN_INFERENCE
from trocar_server.training.files.trainer_janitor import TRAINER_ID


@unique
class Subject(StrEnum):
    """What a call is for."""

    TRAINER = "trainer_id"
    MODEL = "model_id"
    ANY = ""
    """Every replica can answer."""


_NAMES = {"trainer_id": Subject.TRAINER, "model_id": Subject.MODEL, "model_name": Subject.MODEL}
"""Field names, the first that a message has."""

_EXTRACT = "/trocar_api.v1.ExtractionService/Extract"
_MODEL_NAMED = {"ModelReady", "ModelMetadata", "ModelConfig", "ModelStatistics"}
"""Methods of the Open Inference Protocol whose field `name` is that of a model."""

_REPEATABLE = frozenset(
    f"/trocar_api.v1.{name}"
    for name in (
        *("ExtractionService/Extract", "ExtractionService/Plan", "StreamService/ExtractStream"),
        "GenerationService/Generate",
        *("ModelService/GetModel", "ModelService/ListModules", "ModelService/ListModels"),
        *("ServerService/GetServerInfo", "EditStoreService/ListEdits"),
        *("DirectionService/ListDirections", "DirectionService/GetDirection"),
        *("DatasetService/ListDatasets", "DatasetService/GetDataset"),
        *("TrainerService/GetTrainer", "TrainerService/ListTrainers", "TrainerService/ListCheckpoints"),
    )
)
"""Methods of ours that change nothing. The client repeats the others itself, with their own numbers."""


_CONFIGURED = "models of a cluster are those of its configuration"
_REFUSED = {
    "/trocar_api.v1.ModelService/LoadModel": _CONFIGURED,
    "/trocar_api.v1.ModelService/UnloadModel": _CONFIGURED,
    "/trocar_api.v1.ServerService/Drain": "Ray drains each replica before it stops; see `trocar cluster`",
    "/trocar_api.v1.ServerService/ReloadConfig": "deploy the new configuration: `trocar serve --ray ADDRESS`",
    "/trocar_api.v1.ServerService/GetServerStatus": "each replica has its own; `trocar cluster status`",
    "/inference.GRPCInferenceService/RepositoryModelLoad": _CONFIGURED,
    "/inference.GRPCInferenceService/RepositoryModelUnload": _CONFIGURED,
}
"""Methods that are for one replica only, and the advice in their place."""


@dataclass(frozen=True)
class Route:
    """The route of a method.

    Attributes:
        subject: What its calls are for.
        path: Field numbers from the message to the id.
        is_repeatable: Whether a call that got no reply may be sent to another replica.
        ends_with_reply: Whether the status comes right after the last message of the reply.
        refusal: Why the method does not exist on a cluster; empty if it does.
    """

    subject: Subject
    path: tuple[int, ...] = ()
    is_repeatable: bool = False
    ends_with_reply: bool = False
    refusal: str = ""

    def read(self, message: bytes) -> str:
        """Return the id in a message; empty if it has none, or is no message."""
        value: bytes | memoryview | None = message if self.path else None
        try:
            for number in self.path:
                value = None if value is None else last_value(value, number)
            return "" if value is None else bytes(value).decode()
        except (WireError, UnicodeDecodeError):
            return ""

    def subject_of(self, name: str) -> Subject:
        """Return what a call is for by its id: `predict` of a trainer names the trainer as its model."""
        is_trainer = self.subject is Subject.MODEL and TRAINER_ID.fullmatch(name)
        return Subject.TRAINER if is_trainer else self.subject


@cache
def route_of(method: str) -> Route:
    """Return the route of a method; one of an unknown method ends at any replica, which refuses it."""
    return _routes().get(method, Route(Subject.ANY))


@cache
def _routes() -> dict[str, Route]:
    return {
        f"/{service.full_name}/{method.name}": _route(service, method)
        for service in ALL
        for method in service.methods
    }


def _route(service: Any, method: Any) -> Route:
    name = f"/{service.full_name}/{method.name}"
    paths = dict(_paths(method.input_type))
    if service is OPEN_INFERENCE and method.name in _MODEL_NAMED:
        paths["model_name"] = paths.get("model_name") or (method.input_type.fields_by_name["name"].number,)
    subject, path = next(
        ((subject, paths[field]) for field, subject in _NAMES.items() if field in paths), (Subject.ANY, ())
    )
    return Route(
        subject,
        path,
        is_repeatable=name in _REPEATABLE or service is OPEN_INFERENCE,
        ends_with_reply=not method.server_streaming or name == _EXTRACT,
        refusal=_REFUSED.get(name, ""),
    )


def _paths(message: Any) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Yield the ids of a message and their paths, its parts' first: a later name wins."""
    for field in message.fields:
        if field.message_type is not None and not field.is_repeated:
            for inner in field.message_type.fields:
                if inner.name in _NAMES and inner.message_type is None:
                    yield inner.name, (field.number, inner.number)
    for field in message.fields:
        if field.name in _NAMES and field.message_type is None:
            yield field.name, (field.number,)
