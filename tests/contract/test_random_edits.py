"""Whatever edits, objectives and sources come in, the answer is a reply or an error with a reason."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.contract.test_random_requests import DEFECTS, answer, unary_answer
from tests.support.files.scale import count
from tests.support.models.tiny_models import Plain
from tests.support.servers.footprint import hook_counts
from tests.support.servers.running_server import RunningServer, running_server
from tests.support.servers.serving import custom
from tests.support.wire.random_edits import (
    ALL_SELECTORS,
    FORWARD_SELECTORS,
    GRADIENTS,
    OBJECTIVES,
    edits_at,
    labels_of,
    rarely,
    sources_of,
    tensors_of,
)
from tests.support.wire.wire import chunk, raw_channel, tensor
from trocar_api.v1 import edit_pb2, edit_store_pb2, objective_pb2, stream_pb2, tap_pb2, tensor_pb2
from trocar_api.v1 import extraction_pb2 as pb

EXAMPLES = count(500, "TROCAR_FUZZ_EXAMPLES")
STREAM = "/trocar_api.v1.StreamService/ExtractStream"
_SIZES = {1: 4, 2: 8, 3: 2, 4: 2, 5: 1, 6: 1, 9: 8, 10: 1}
_INPUT = tensor((2, 3, 8, 8))


def taps_at(*selectors: str) -> st.SearchStrategy[list[tap_pb2.Tap]]:
    taps = st.builds(tap_pb2.Tap, selector=st.sampled_from(selectors))
    return st.lists(taps, min_size=1, max_size=3, unique_by=lambda tap: tap.selector)


_FORWARD_TAPS, _GRADIENT_TAPS = taps_at("fc", "conv", "relu@1", "/in"), taps_at("fc", *GRADIENTS)
_ODD_TAPS = taps_at("fc", "fx:add", *GRADIENTS)
_SOURCES = sources_of(rarely(st.just(pb.Input()), st.just(_INPUT)))


def _requests(
    taps: st.SearchStrategy[list[tap_pb2.Tap]],
    edits: st.SearchStrategy[edit_pb2.Edit],
    objective: st.SearchStrategy[objective_pb2.Objective | None],
) -> st.SearchStrategy[pb.ExtractRequest]:
    return st.builds(
        pb.ExtractRequest,
        model_id=rarely(st.just("nowhere"), st.just("plain")),
        taps=rarely(_ODD_TAPS, taps),
        inputs=st.just([_INPUT]),
        edits=st.lists(edits, max_size=3),
        objective=rarely(st.none() | OBJECTIVES, objective),
        sources=st.just([]) | _SOURCES,
        start_at=rarely(st.just("fc/in"), st.just("")),
    )


_REQUESTS = _requests(_FORWARD_TAPS, edits_at(FORWARD_SELECTORS), st.none()) | _requests(
    _GRADIENT_TAPS, edits_at(ALL_SELECTORS), OBJECTIVES
)
relaxed = settings(
    max_examples=EXAMPLES,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much, HealthCheck.data_too_large],
    deadline=None,
)


def chunks_of(specs: list[tensor_pb2.TensorSpec], value: int) -> Iterator[tensor_pb2.TensorChunk]:
    """Yield the bytes that the specs promise, where that can be: all the same byte."""
    for index, spec in enumerate(specs):
        size = _SIZES.get(spec.dtype, 0)
        for side in spec.shape:
            size *= side
        if 0 < size < 1 << 16:
            yield chunk(bytes([value]) * size, index)


def with_bytes(request: pb.ExtractRequest, value: int) -> pb.ExtractRequest:
    specs = [entry.tensor for entry in request.inputs]
    specs += [spec for edit in request.edits for spec in tensors_of(edit)]
    specs += labels_of(request.objective)
    specs += [entry.tensor for source in request.sources for entry in source.inputs]
    request.chunks.extend(chunks_of(specs, value))
    return request


@pytest.fixture(scope="module")
def serving(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    data_dir: Path = tmp_path_factory.mktemp("data")
    models = {"plain": custom(Plain, (3, 8, 8))}
    with running_server(models=models, device="cpu", data_dir=data_dir) as running:
        yield running


@pytest.fixture(scope="module")
def channel(serving: RunningServer) -> Iterator[grpc.Channel]:
    kept = edit_pb2.Edit(selector="conv", zero=edit_pb2.ZeroEdit())
    with raw_channel(serving.address) as opened:
        store(opened, edit_store_pb2.StoreEditsRequest(model_id="plain", name="kept", edits=[kept, kept]))
        yield opened


def store(channel: grpc.Channel, request: edit_store_pb2.StoreEditsRequest) -> grpc.StatusCode:
    return unary_answer(channel, "EditStoreService/StoreEdits", request.SerializeToString())


@relaxed
@given(_REQUESTS, st.sampled_from([0, 1, 62, 255]))
def test_no_edits_are_answered_with_a_defect(
    channel: grpc.Channel, request: pb.ExtractRequest, value: int
) -> None:
    assert answer(channel, [with_bytes(request, value).SerializeToString()]) not in DEFECTS


@relaxed
@given(_REQUESTS)
def test_no_plan_of_edits_is_answered_with_a_defect(
    channel: grpc.Channel, request: pb.ExtractRequest
) -> None:
    message = pb.PlanRequest(extraction=request).SerializeToString()
    assert unary_answer(channel, "ExtractionService/Plan", message) not in DEFECTS


@relaxed
@given(_REQUESTS, st.data())
def test_no_bent_edit_is_answered_with_a_defect(
    channel: grpc.Channel, request: pb.ExtractRequest, data: st.DataObject
) -> None:
    bent = bytearray(with_bytes(request, 0).SerializeToString())
    for _ in range(data.draw(st.integers(1, 3))):
        bent[data.draw(st.integers(0, len(bent) - 1))] = data.draw(st.integers(0, 255))
    assert answer(channel, [bytes(bent)]) not in DEFECTS


@settings(relaxed, max_examples=min(EXAMPLES, 300))
@given(_REQUESTS, st.sampled_from([0, 62]))
def test_no_stream_with_edits_is_answered_with_a_defect(
    channel: grpc.Channel, request: pb.ExtractRequest, value: int
) -> None:
    objective = request.objective if request.HasField("objective") else None
    start = stream_pb2.ExtractStreamStart(
        model_id=request.model_id, taps=request.taps, edits=request.edits, objective=objective
    )
    specs = [spec for edit in request.edits for spec in tensors_of(edit)]
    specs += labels_of(request.objective)
    batch = stream_pb2.StreamBatch(inputs=[_INPUT])
    image = list(chunks_of([_INPUT.tensor], value))
    messages = [
        stream_pb2.ExtractStreamRequest(start=start, chunks=chunks_of(specs, value)),
        stream_pb2.ExtractStreamRequest(batch=batch, chunks=image),
    ]
    method: Any = channel.stream_stream(STREAM, None, None)
    call = method(iter([message.SerializeToString() for message in messages]), timeout=60)
    try:
        results = [stream_pb2.ExtractStreamResponse.FromString(message) for message in call]
    except grpc.RpcError:
        results = []
    assert call.code() not in DEFECTS
    assert all(result.result.error.reason != "INTERNAL" for result in results)


@settings(relaxed, max_examples=min(EXAMPLES, 300))
@given(
    st.lists(edits_at(ALL_SELECTORS), max_size=3),
    st.sampled_from(["plain", "nowhere", ""]),
    rarely(st.text(st.characters(codec="utf-8"), max_size=9), st.sampled_from(["a", "b-1"])),
    st.sampled_from([0, 62, 255]),
)
def test_nothing_that_is_to_be_stored_is_answered_with_a_defect(
    channel: grpc.Channel, edits: list[edit_pb2.Edit], model_id: str, name: str, value: int
) -> None:
    specs = [spec for edit in edits for spec in tensors_of(edit)]
    request = edit_store_pb2.StoreEditsRequest(
        model_id=model_id, name=name, edits=edits, is_replacing=True, chunks=chunks_of(specs, value)
    )
    code = store(channel, request)
    assert code not in DEFECTS
    if code is grpc.StatusCode.OK:
        used = pb.ExtractRequest(
            model_id="plain",
            taps=[tap_pb2.Tap(selector="fc")],
            inputs=[_INPUT],
            edits=[edit_pb2.Edit(stored=name)],
        )
        assert answer(channel, [with_bytes(used, 0).SerializeToString()]) not in DEFECTS


@settings(relaxed, max_examples=count(200))
@given(
    method=st.sampled_from(["StoreEdits", "ListEdits", "DeleteEdits"]),
    data=st.binary(max_size=30)
    | st.builds(lambda name: b"\x12" + bytes([len(name)]) + name, st.binary(max_size=20)),
)
def test_no_bytes_of_the_edit_store_are_answered_with_a_defect(
    channel: grpc.Channel, method: str, data: bytes
) -> None:
    assert unary_answer(channel, f"EditStoreService/{method}", data) not in DEFECTS


def test_the_server_is_as_it_was_after_all_of_this(serving: RunningServer, channel: grpc.Channel) -> None:
    request = pb.ExtractRequest(model_id="plain", taps=[tap_pb2.Tap(selector="fc")], inputs=[_INPUT])
    assert answer(channel, [with_bytes(request, 0).SerializeToString()]) is grpc.StatusCode.OK
    assert all(len(set(counts)) == 1 for counts in hook_counts(serving).values())
