"""Where edits, objectives and sources are in a request, and in which order their bytes go."""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

import trocar
from tests.unit.client.fake_server import FakeServer, Received, feature_map, reply_head
from trocar._request.surgery import NO_SURGERY, make_surgery
from trocar._wire.requests import ExtractCall, extract_call, plan_request
from trocar._wire.stream_messages import StreamAssembler, StreamOptions, start_call
from trocar_api.v1 import extraction_pb2 as pb
from trocar_api.v1 import stream_pb2

IMAGES = np.arange(24, dtype=np.float32).reshape(1, 2, 3, 4)


def marked(number: int) -> np.ndarray[Any, Any]:
    return np.array([number, number], np.float64)


EDITS: list[str | trocar.Edit] = [
    trocar.edit("layer1", "set", marked(2), mask=np.array([True, False])),
    "ablate-3",
    trocar.edit("layer2", "affine", marked(3), marked(4)),
    trocar.edit("layer3", "swap", "clean"),
]
OBJECTIVE = trocar.loss("mse", marked(5)) - trocar.gradient_penalty(trocar.loss("l1", marked(6))) + 0.5
TAPS: list[str | trocar.Tap] = [trocar.tap("fc", reduce=trocar.pca(marked(1)[None])), "layer4"]
SOURCES: dict[str, Any] = {"clean": marked(7), "other": {"x": marked(8), "y": marked(9)}}
SURGERY = make_surgery(EDITS, OBJECTIVE, SOURCES)


def numbers(payloads: list[bytes]) -> list[float]:
    return [np.frombuffer(payload, np.float64)[0] if len(payload) == 16 else -1 for payload in payloads]


def test_payloads_are_inputs_taps_edits_objective_and_sources_in_this_order() -> None:
    call = extract_call("resnet18", marked(0), TAPS, surgery=SURGERY)
    sent = [bytes(payload) for payload in call.payloads]
    assert numbers(sent) == [0, 1, -1, 2, 3, 4, 5, 6, 7, 8, 9]
    assert sent[2] == b"\1\0"  # the mask, before the operand


def test_the_request_says_all_of_it() -> None:
    call = extract_call("resnet18", IMAGES, TAPS, surgery=SURGERY)
    head = pb.ExtractRequest.FromString(call.head)
    assert [edit.WhichOneof("operation") for edit in head.edits] == ["set", "stored", "affine", "swap"]
    assert head.edits[1] == type(head.edits[1])(stored="ablate-3")
    assert head.objective == OBJECTIVE.to_wire()
    assert [(source.name, [entry.name for entry in source.inputs]) for source in head.sources] == [
        ("clean", [""]),
        ("other", ["x", "y"]),
    ]


def test_a_request_without_surgery_has_none_of_its_fields() -> None:
    head = pb.ExtractRequest.FromString(extract_call("resnet18", IMAGES, "layer4").head)
    assert {field.name for field, _ in head.ListFields()} == {"model_id", "taps", "inputs"}


def test_a_plan_takes_shapes_for_inputs_and_sources_and_sends_no_bytes() -> None:
    surgery = replace(SURGERY, sources={"clean": (1, 3, 8, 8)})
    request = plan_request("resnet18", (2, 3, 8, 8), TAPS, surgery=surgery).extraction
    assert list(request.inputs[0].tensor.shape) == [2, 3, 8, 8]
    assert list(request.sources[0].inputs[0].tensor.shape) == [1, 3, 8, 8]
    assert len(request.edits) == 4
    assert request.objective == OBJECTIVE.to_wire()
    assert not request.chunks


def test_both_clients_plan_with_edits(client: trocar.Client, server: FakeServer) -> None:
    client.plan("resnet18", IMAGES, "layer4", edits=EDITS[0], of=trocar.logit(1), sources={"clean": (1, 3)})
    ((name, request),) = server.calls
    assert name == "Plan"
    assert request.extraction.edits[0].selector == "layer1"
    assert request.extraction.objective == trocar.logit(1).to_wire()
    assert list(request.extraction.sources[0].inputs[0].tensor.shape) == [1, 3]


def test_both_clients_extract_with_edits(client: trocar.Client, server: FakeServer) -> None:
    client.extract("resnet18", marked(0), TAPS, edits=EDITS, of=OBJECTIVE, sources=SOURCES)
    received = server.received[0]
    assert numbers(received.payloads) == [0, 1, -1, 2, 3, 4, 5, 6, 7, 8, 9]
    assert received.head.objective == OBJECTIVE.to_wire()


def test_one_edit_or_the_name_of_stored_ones_may_stand_alone() -> None:
    assert make_surgery("ablate-3").wire_edits()[0].stored == "ablate-3"
    assert make_surgery(EDITS[0]).edits == (EDITS[0],)


def test_an_iterator_of_edits_is_read_once_and_sent_whole() -> None:
    surgery = make_surgery(iter(EDITS))
    assert len(surgery.wire_edits()) == 4
    assert len(surgery.payloads()) == 4


@pytest.mark.parametrize(
    ("options", "error", "match"),
    [
        ({"edits": [3]}, TypeError, "an edit is created with trocar.edit"),
        ({"edits": {"at": "x", "op": "zero"}}, TypeError, "trocar.Edit.from_json"),
        ({"edits": [{"at": "x", "op": "zero"}]}, TypeError, "trocar.Edit.from_json"),
        ({"edits": "layer4/in"}, ValueError, "cannot be the name of stored edits"),
        ({"edits": ["ok", "Not"]}, ValueError, "'Not' cannot be the name"),
        ({"of": 3}, TypeError, "of=3 is not an objective"),
        ({"of": "layer4"}, TypeError, "trocar.logit"),
        ({"sources": {"": IMAGES}}, ValueError, "the name of a source is empty"),
        ({"sources": {3: IMAGES}}, TypeError, "the name of a source must be a string"),
        ({"sources": {"a": None}}, TypeError, "'a' has no inputs"),
    ],
)
def test_what_is_no_surgery_is_refused_before_anything_is_sent(
    client: trocar.Client, server: FakeServer, options: dict[str, Any], error: type[Exception], match: str
) -> None:
    with pytest.raises(error, match=match):
        client.extract("resnet18", IMAGES, "layer4", **options)
    assert not server.received


def test_the_value_of_the_objective_comes_back_with_what_was_added(
    client: trocar.Client, server: FakeServer
) -> None:
    def answer(received: Received, _: Any) -> Iterator[bytes]:
        head = reply_head({})
        head.objective_value = 2.25
        head.edit_expansions.add(selector="layer*", names=["layer1", "layer2"])
        yield head.SerializeToString()

    server.behaviour = answer
    maps = client.extract("resnet18", IMAGES, "layer4", of=OBJECTIVE)
    assert maps.objective == 2.75
    assert maps.edit_expansions == {"layer*": ("layer1", "layer2")}


def test_a_call_without_an_objective_has_no_value_of_one(client: trocar.Client) -> None:
    maps = client.extract("resnet18", IMAGES, "layer4")
    assert maps.objective is None
    assert maps.edit_expansions == {}


def stream_options(**options: Any) -> StreamOptions:
    return StreamOptions("resnet18", TAPS, 0, 1.0, 4, **options)


def assembled(call: ExtractCall) -> stream_pb2.ExtractStreamRequest:
    return stream_pb2.ExtractStreamRequest.FromString(call.message())


def test_a_stream_says_its_edits_and_the_checkpoint_is_the_last_payload() -> None:
    options = stream_options(surgery=make_surgery(EDITS, OBJECTIVE), has_running_statistics=True)
    message = assembled(start_call(options, 0, b"c" * 16))
    sent = [chunk.data for chunk in message.chunks]
    assert numbers(sent[:-1]) == [1, -1, 2, 3, 4, 5, 6]
    assert sent[-1] == b"c" * 16
    assert [edit.WhichOneof("operation") for edit in message.start.edits] == [
        "set",
        "stored",
        "affine",
        "swap",
    ]
    assert message.start.objective == OBJECTIVE.to_wire()


def test_a_stream_without_surgery_says_none() -> None:
    start = assembled(start_call(stream_options(surgery=NO_SURGERY), 0, None)).start
    assert not start.edits
    assert not start.HasField("objective")


def test_every_batch_of_a_stream_has_the_value_of_its_objective() -> None:
    assembler = StreamAssembler("resnet18", 0, objective_offset=-1.0)
    values = []
    for index in range(2):
        reply = pb.ExtractResponse(
            feature_maps=[feature_map("x", np.zeros(0, np.float32))], objective_value=index
        )
        result = stream_pb2.BatchResult(batch_index=index, reply=reply)
        message = stream_pb2.ExtractStreamResponse(result=result).SerializeToString()
        values += [found.unwrap().objective for found in assembler.feed(message)]
    assert values == [-1.0, 0.0]
