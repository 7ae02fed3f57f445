"""Routes: protobuf writes the messages, the gateway reads ids out of them."""

from typing import Any

import pytest

from trocar_api.v1 import extraction_pb2, model_pb2, stream_pb2, trainer_pb2
from trocar_api.wire import last_value
from trocar_server.cluster.routes import Subject, route_of
from trocar_server.rpc.call.method_scopes import METHOD_SCOPES
from trocar_server.rpc.descriptors import service_names

API = "/trocar_api.v1."


@pytest.mark.parametrize(
    ("method", "message", "expected"),
    [
        ("ExtractionService/Extract", extraction_pb2.ExtractRequest(model_id="a"), (Subject.MODEL, "a")),
        (
            "StreamService/ExtractStream",
            stream_pb2.ExtractStreamRequest(start=stream_pb2.ExtractStreamStart(model_id="a")),
            (Subject.MODEL, "a"),
        ),
        (
            "TrainerService/CreateTrainer",
            trainer_pb2.CreateTrainerRequest(spec=trainer_pb2.TrainerSpec(model_id="é")),
            (Subject.MODEL, "é"),
        ),
        (
            "TrainerService/PublishTrainer",
            trainer_pb2.PublishTrainerRequest(trainer_id="t", model_id="a"),
            (Subject.TRAINER, "t"),
        ),
        ("ModelService/ListModels", model_pb2.ListModelsRequest(), (Subject.ANY, "")),
        ("ModelService/GetModel", model_pb2.GetModelRequest(), (Subject.MODEL, "")),
        ("NoService/None", model_pb2.GetModelRequest(model_id="a"), (Subject.ANY, "")),
    ],
)
def test_the_id_of_a_message_is_read(method: str, message: Any, expected: tuple[Subject, str]) -> None:
    route = route_of(API + method)
    assert (route.subject, route.read(message.SerializeToString())) == expected


@pytest.mark.parametrize("message", [b"\xff", b"\x0a\x05ab", b"\x0a\x01\xff"])
def test_what_is_no_message_has_no_id(message: bytes) -> None:
    assert route_of(API + "ExtractionService/Extract").read(message) == ""


def test_a_field_that_is_set_twice_has_its_last_value() -> None:
    message = extraction_pb2.ExtractRequest(model_id="a").SerializeToString() + b"\x0a\x01b"
    assert extraction_pb2.ExtractRequest.FromString(message).model_id == "b"
    assert bytes(last_value(message, 1) or b"") == b"b"


def test_every_method_of_the_server_has_a_route() -> None:
    names = {method[1:].partition("/")[0] for method in METHOD_SCOPES if not method.startswith("/grpc.")}
    assert names == set(service_names())


def test_calls_that_name_a_trainer_as_their_model_are_for_the_trainer() -> None:
    trainer_id = "0123456789abcdef" * 2
    route = route_of(f"{API}ExtractionService/Extract")
    assert route.subject_of(trainer_id) is Subject.TRAINER
    assert route.subject_of("resnet18") is Subject.MODEL
    assert route_of(f"{API}ModelService/ListModels").subject_of(trainer_id) is Subject.ANY
