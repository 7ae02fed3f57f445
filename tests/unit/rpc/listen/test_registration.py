"""Every method of every service is added once, with the same handler whichever way gRPC looks it up."""

from collections import Counter
from types import SimpleNamespace
from typing import Any

import grpc
import pytest

from tests.support.models.odd_models import Identity
from tests.support.servers.running_server import running_server
from tests.support.servers.serving import custom
from tests.support.wire.methods import GUARDED
from trocar_api.v1 import model_pb2, trainer_pb2
from trocar_server.rpc.listen.registration import protobuf_handler, register

OURS = ("trocar_api.", "inference.")
METHODS = {method.path for method in GUARDED if method.path.removeprefix("/").startswith(OURS)}


class Recorder:
    """What is added to a server; with `inner` it is added there too."""

    def __init__(self, inner: Any = None) -> None:
        self._inner = inner
        self.generic: list[tuple[str, Any]] = []
        self.registered: list[tuple[str, Any]] = []

    def add_generic_rpc_handlers(self, handlers: Any) -> None:
        for handler in handlers:
            found = ((path, handler.service(SimpleNamespace(method=path))) for path in METHODS)
            self.generic += [(path, method) for path, method in found if method is not None]
        if self._inner is not None:
            self._inner.add_generic_rpc_handlers(handlers)

    def add_registered_method_handlers(self, service: str, handlers: Any) -> None:
        self.registered += [(f"/{service}/{name}", method) for name, method in handlers.items()]
        if self._inner is not None:
            self._inner.add_registered_method_handlers(service, handlers)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)


@pytest.fixture
def recorder(monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> Recorder:
    """The main server of a whole start."""
    made: list[Recorder] = []
    make = grpc.aio.server

    def recorded(*arguments: Any, **options: Any) -> Any:
        made.append(Recorder(make(*arguments, **options)))
        return made[-1]

    monkeypatch.setattr(grpc.aio, "server", recorded)
    with running_server(models={"identity": custom(Identity)}, data_dir=tmp_path, health_port=None):
        pass
    return made[0]


def test_each_method_is_added_once_and_both_ways_with_one_handler(recorder: Recorder) -> None:
    registered = [entry for entry in recorder.registered if entry[0] in METHODS]
    assert Counter(path for path, _ in recorder.generic) == dict.fromkeys(METHODS, 1)
    assert Counter(path for path, _ in registered) == dict.fromkeys(METHODS, 1)
    assert {path: id(method) for path, method in registered} == {
        path: id(method) for path, method in recorder.generic
    }


@pytest.mark.parametrize("method", ["Train"])
def test_a_codec_of_our_own_wins(method: str) -> None:
    class Servicer:
        def __getattr__(self, name: str) -> Any:
            if name[0].islower():
                raise AttributeError(name)
            return None

        def own_handlers(self) -> dict[str, Any]:
            return {method: grpc.stream_stream_rpc_method_handler(lambda *_: None)}

    recorder: Any = Recorder()
    register(recorder, trainer_pb2.DESCRIPTOR.services_by_name["TrainerService"], Servicer())
    codecs = {path.rpartition("/")[2]: handler.request_deserializer for path, handler in recorder.registered}
    assert [name for name, parse in codecs.items() if parse is None] == [method]


def test_a_handler_for_no_method_is_refused() -> None:
    servicer = SimpleNamespace(own_handlers=lambda: {"Trian": None})
    with pytest.raises(ValueError, match="TrainerService has no method Trian"):
        register(Recorder(), trainer_pb2.DESCRIPTOR.services_by_name["TrainerService"], servicer)  # type: ignore[arg-type]  # records


def test_protobufs_own_codec_is_that_of_the_generated_classes() -> None:
    method = model_pb2.DESCRIPTOR.services_by_name["ModelService"].methods_by_name["GetModel"]
    handler: Any = protobuf_handler(method, None)
    request = model_pb2.GetModelRequest(model_id="a")
    assert type(handler.request_deserializer(request.SerializeToString())) is model_pb2.GetModelRequest
    assert handler.response_serializer(model_pb2.GetModelResponse()) == b""
