"""Every method of every service that there is, from the descriptors and not from our own tables."""

import importlib
import pkgutil
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import grpc
from grpc_health.v1 import health_pb2
from grpc_reflection.v1alpha import reflection_pb2

import trocar_api.v1
from trocar_server.rpc.oip.oip_messages import SERVICE

TIMEOUT_S = 60


@dataclass(frozen=True)
class Method:
    """One method, callable with bytes."""

    service: str
    name: str
    streams_requests: bool
    streams_replies: bool

    @property
    def path(self) -> str:
        """What goes over the wire."""
        return f"/{self.service}/{self.name}"

    def call(self, channel: grpc.Channel, requests: Iterable[bytes] = (b"",), **options: Any) -> Any:
        """Make the call, read its replies and return it, for its `code()`."""
        kind = ("stream" if self.streams_requests else "unary") + (
            "_stream" if self.streams_replies else "_unary"
        )
        method: Any = getattr(channel, kind)(self.path, None, None)
        request: Any = iter(requests) if self.streams_requests else next(iter(requests))
        options.setdefault("timeout", TIMEOUT_S)
        if not self.streams_replies:
            return method.future(request, **options)
        call = method(request, **options)
        with suppress(grpc.RpcError):  # its status comes after the last reply is read
            for _ in call:
                pass
        return call


def methods_of(*files: Any) -> list[Method]:
    """Return the methods of the services in these files."""
    return [
        Method(service.full_name, method.name, method.client_streaming, method.server_streaming)
        for file in files
        for service in file.services_by_name.values()
        for method in service.methods
    ]


def _own_files() -> list[Any]:
    names = [module.name for module in pkgutil.iter_modules(trocar_api.v1.__path__)]
    modules = (importlib.import_module(f"trocar_api.v1.{name}") for name in names if name.endswith("_pb2"))
    return [module.DESCRIPTOR for module in modules]


OWN = methods_of(*_own_files())
"""Those of `trocar_api.v1`."""

REFLECTION = methods_of(reflection_pb2.DESCRIPTOR)
HEALTH = methods_of(health_pb2.DESCRIPTOR)
OPEN_INFERENCE = methods_of(SERVICE.file)
"""Those of the Open Inference Protocol."""

GUARDED = [*OWN, *REFLECTION, *OPEN_INFERENCE]
"""Every one that needs a scope."""


RUNS = (
    "ExtractionService",
    "GenerationService",
    "StreamService",
    "DirectionService",
    "EditStoreService",
    "SharedMemoryService",
    "PreparedCallService",
)


def needed_scope(method: Method) -> str:
    """Say what a method should need, by a rule: an oracle for the server's table."""
    if method.name in ("LoadModel", "UnloadModel", "PublishTrainer", "UnpublishModel"):
        return "admin"
    if method.name in ("Drain", "ReloadConfig"):
        return "admin"
    if method.name.startswith(("Get", "List")) or method.name in ("Plan", "WatchFit", "ServerReflectionInfo"):
        return "read"
    if method.service == SERVICE.full_name:
        return _open_inference_scope(method.name)
    service = method.service.rpartition(".")[2]
    return "run" if service in RUNS else "train"


def _open_inference_scope(name: str) -> str:
    if name.endswith(("Load", "Unload", "Setting", "Settings")):
        return "admin"
    return "run" if name.endswith(("Infer", "Register", "Unregister")) else "read"
