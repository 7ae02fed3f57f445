"""Stored edits over the wire: each list its caller's own, checked when stored, used by name."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest

import trocar
from tests.support.models.odd_models import Identity
from tests.support.models.tiny_models import Plain
from tests.support.servers.running_server import RunningServer, running_server
from tests.support.servers.serving import custom
from tests.support.wire.wire import chunk, raw_channel, request, tensor
from trocar._transport.rpc_errors import error_from_rpc
from trocar_api.reasons import ErrorReason
from trocar_api.v1 import (
    edit_pb2,
    edit_store_pb2_grpc,
    extraction_pb2,
    extraction_pb2_grpc,
    reduction_pb2,
    stream_pb2,
    stream_pb2_grpc,
    tap_pb2,
    tensor_pb2,
)
from trocar_api.v1 import edit_store_pb2 as pb
from trocar_api.v1.statistics_pb2 import STATISTIC_MEAN

MODELS = {
    "plain": custom(Plain, (3, 8, 8)),
    "other": custom(Plain, (3, 8, 8)),
    "wide": custom(Identity, (2 << 20,)),
}
ALICE, BOB = ((("authorization", f"Bearer {name}"),) for name in ("alice", "bob"))


def zero(selector: str) -> edit_pb2.Edit:
    return edit_pb2.Edit(selector=selector, zero=edit_pb2.ZeroEdit())


ZERO = zero("conv")
SET = edit_pb2.Edit(
    selector="fc",
    set=edit_pb2.Operand(tensor=tensor_pb2.TensorSpec(dtype=tensor_pb2.DTYPE_FLOAT32, shape=[5])),
)


class Caller:
    """Somebody who calls with a token, or without."""

    def __init__(self, channel: grpc.Channel, metadata: tuple[tuple[str, str], ...] = ()) -> None:
        self._stub: Any = edit_store_pb2_grpc.EditStoreServiceStub(channel)
        self._extraction: Any = extraction_pb2_grpc.ExtractionServiceStub(channel)
        self._stream: Any = stream_pb2_grpc.StreamServiceStub(channel)
        self._options: dict[str, Any] = {"metadata": metadata, "timeout": 60}

    def store(self, name: str, *edits: edit_pb2.Edit, model_id: str = "plain", **fields: Any) -> Any:
        wanted = pb.StoreEditsRequest(model_id=model_id, name=name, edits=edits or [ZERO], **fields)
        return self._stub.StoreEdits(wanted, **self._options).stored

    def names(self, model_id: str = "") -> list[tuple[str, str]]:
        return [(found.model_id, found.name) for found in self.stored(model_id)]

    def stored(self, model_id: str = "") -> Any:
        return self._stub.ListEdits(pb.ListEditsRequest(model_id=model_id), **self._options).stored

    def delete(self, name: str, model_id: str = "plain") -> None:
        self._stub.DeleteEdits(pb.DeleteEditsRequest(model_id=model_id, name=name), **self._options)

    def extract(self, *edits: edit_pb2.Edit, model_id: str = "plain", **fields: Any) -> Any:
        image = [chunk(bytes(4 * 3 * 64))]
        wanted = request(
            model_id, "fc", **{"inputs": [tensor((1, 3, 8, 8))], "chunks": image, "edits": edits, **fields}
        )
        head, *_ = self._extraction.Extract(iter([wanted]), **self._options)
        return head

    def plan(self, *edits: edit_pb2.Edit) -> Any:
        taps = [tap_pb2.Tap(selector="fc")]
        wanted = extraction_pb2.ExtractRequest(model_id="plain", taps=taps, edits=edits)
        return self._extraction.Plan(extraction_pb2.PlanRequest(extraction=wanted), **self._options)

    def stream(self, *edits: edit_pb2.Edit) -> list[Any]:
        start = stream_pb2.ExtractStreamStart(
            model_id="plain", taps=[tap_pb2.Tap(selector="fc")], edits=edits
        )
        batch = stream_pb2.StreamBatch(inputs=[tensor((1, 3, 8, 8))])
        messages = [
            stream_pb2.ExtractStreamRequest(start=start),
            stream_pb2.ExtractStreamRequest(batch=batch, chunks=[chunk(bytes(4 * 3 * 64))]),
        ]
        return list(self._stream.ExtractStream(iter(messages), **self._options))


@pytest.fixture
def data_dir(tmp_path: Path) -> Path:
    return tmp_path


@pytest.fixture
def serving(data_dir: Path) -> Iterator[RunningServer]:
    with running_server(models=MODELS, device="cpu", data_dir=data_dir) as running:
        yield running


@pytest.fixture
def channel(serving: RunningServer) -> Iterator[grpc.Channel]:
    with raw_channel(serving.address) as opened:
        yield opened


@pytest.fixture
def caller(channel: grpc.Channel) -> Caller:
    return Caller(channel)


def refused(call: Any) -> trocar.TrocarError:
    with pytest.raises(grpc.RpcError) as caught:
        call()
    return error_from_rpc(caught.value)


def test_what_is_stored_is_listed_with_what_it_does(caller: Caller) -> None:
    stored = caller.store("set-3", SET, ZERO, chunks=[chunk(np.ones(5, np.float32).tobytes())])
    assert (stored.model_id, stored.name, stored.byte_count) == ("plain", "set-3", 20)
    assert list(stored.edits) == [SET, ZERO]
    assert stored.stored_at_s > 1.6e9
    assert list(caller.stored()) == [stored]
    assert caller.names("other") == []


def test_each_caller_sees_and_uses_its_own_only(channel: grpc.Channel) -> None:
    alice, bob, nobody = Caller(channel, ALICE), Caller(channel, BOB), Caller(channel)
    alice.store("mine", ZERO)
    nobody.store("anybodys", ZERO)
    assert [who.names() for who in (alice, bob, nobody)] == [[("plain", "mine")], [], [("plain", "anybodys")]]
    mine = edit_pb2.Edit(stored="mine")
    assert alice.extract(mine).feature_maps
    for call in (lambda: bob.extract(mine), lambda: bob.plan(mine), lambda: bob.stream(mine)):
        error = refused(call)
        assert isinstance(error, trocar.errors.UnknownEditsError)
        assert error.details["field"] == "edits[0].stored"
    assert isinstance(refused(lambda: bob.delete("mine")), trocar.errors.UnknownEditsError)
    assert "mine" not in str(refused(lambda: bob.extract(edit_pb2.Edit(stored="mime")))).replace("mime", "")
    bob.store("mine", SET, chunks=[chunk(bytes(20))])
    assert list(alice.stored()[0].edits) == [ZERO]


def test_stored_edits_are_used_by_name_wherever_edits_are(caller: Caller) -> None:
    caller.store("set", SET, chunks=[chunk(np.ones(5, np.float32).tobytes())])
    named = [edit_pb2.Edit(stored="set"), ZERO, edit_pb2.Edit(stored="set")]
    assert caller.extract(*named).feature_maps[0].name == "fc"
    assert caller.plan(*named).feature_maps[0].name == "fc"
    assert caller.stream(*named)[0].result.reply.feature_maps[0].name == "fc"


def test_a_stored_name_is_of_its_model(caller: Caller) -> None:
    caller.store("one", ZERO)
    error = refused(lambda: caller.extract(edit_pb2.Edit(stored="one"), model_id="other"))
    assert isinstance(error, trocar.errors.UnknownEditsError)
    error = refused(lambda: caller.extract(edit_pb2.Edit(stored="one"), model_id="nowhere"))
    assert isinstance(error, trocar.errors.UnknownModelError)


def test_lists_survive_a_restart(data_dir: Path) -> None:
    for is_first in (True, False):
        with (
            running_server(models=MODELS, device="cpu", data_dir=data_dir) as running,
            raw_channel(running.address) as channel,
        ):
            caller = Caller(channel, ALICE)
            if is_first:
                caller.store("one", SET, chunks=[chunk(bytes(20))])
            assert caller.names() == [("plain", "one")]
            assert caller.extract(edit_pb2.Edit(stored="one")).feature_maps


def test_a_list_is_deleted_once(caller: Caller) -> None:
    caller.store("one")
    caller.delete("one")
    assert caller.names() == []
    assert isinstance(refused(lambda: caller.delete("one")), trocar.errors.UnknownEditsError)


def test_a_list_is_replaced_when_that_is_said(caller: Caller) -> None:
    caller.store("one", ZERO)
    assert isinstance(refused(lambda: caller.store("one", ZERO)), trocar.errors.EditsExistError)
    caller.store("one", ZERO, ZERO, is_replacing=True)
    assert len(caller.stored()[0].edits) == 2


ODD_NAMES = ("", "A", "-a", "a/b", "é", "a" * 64, "a\n")
NAN = np.full(5, np.nan, np.float32).tobytes()


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        *(
            ({"name": name}, ErrorReason.INVALID_ARGUMENT)
            for name in ("", "A", "-a", "a/b", "é", "a" * 64, "a\n")
        ),
        ({"model_id": "nowhere"}, ErrorReason.UNKNOWN_MODEL),
        ({"edits": [edit_pb2.Edit(selector="cnv", zero=edit_pb2.ZeroEdit())]}, ErrorReason.UNKNOWN_MODULE),
        (
            {"edits": [edit_pb2.Edit(selector="unused", zero=edit_pb2.ZeroEdit())]},
            ErrorReason.MODULE_NOT_CALLED,
        ),
        ({"edits": [ZERO] * 257}, ErrorReason.INVALID_ARGUMENT),
        ({"edits": [edit_pb2.Edit(stored="one")]}, ErrorReason.INVALID_ARGUMENT),
        (
            {"edits": [edit_pb2.Edit(selector="fc", swap=edit_pb2.SwapEdit(source="a"))]},
            ErrorReason.INVALID_ARGUMENT,
        ),
        ({"edits": [SET]}, ErrorReason.INVALID_TENSOR),
        ({"edits": [SET], "chunks": [chunk(bytes(19))]}, ErrorReason.INVALID_TENSOR),
        ({"edits": [SET], "chunks": [chunk(bytes(21))]}, ErrorReason.INVALID_TENSOR),
        ({"edits": [SET], "chunks": [chunk(bytes(20), 1)]}, ErrorReason.INVALID_TENSOR),
        ({"edits": [SET], "chunks": [chunk(NAN)]}, ErrorReason.NON_FINITE_VALUE),
        (
            {
                "edits": [
                    edit_pb2.Edit(
                        selector="fc",
                        set=edit_pb2.Operand(
                            tensor=tensor_pb2.TensorSpec(dtype=tensor_pb2.DTYPE_UINT8, shape=[(8 << 20) + 1])
                        ),
                    )
                ]
            },
            ErrorReason.REQUEST_TOO_LARGE,
        ),
    ],
)
def test_what_cannot_be_stored_is_refused_and_nothing_is(
    caller: Caller, fields: dict[str, Any], reason: ErrorReason
) -> None:
    wanted = {"name": "one", "edits": [ZERO], **fields}
    error = refused(lambda: caller.store(wanted.pop("name"), *wanted.pop("edits"), **wanted))
    assert error.reason is reason
    assert caller.names() == []


def test_a_list_of_no_edits_is_refused(channel: grpc.Channel) -> None:
    stub: Any = edit_store_pb2_grpc.EditStoreServiceStub(channel)
    error = refused(lambda: stub.StoreEdits(pb.StoreEditsRequest(model_id="plain", name="one")))
    assert error.details["field"] == "edits"


def test_eight_mebibytes_of_tensors_can_be_stored_and_used(caller: Caller) -> None:
    spec = tensor_pb2.TensorSpec(dtype=tensor_pb2.DTYPE_FLOAT32, shape=[2 << 20])
    message = edit_pb2.Edit(selector="identity", set=edit_pb2.Operand(tensor=spec))
    stored = caller.store("large", message, model_id="wide", chunks=[chunk(bytes(8 << 20))])
    assert stored.byte_count == 8 << 20
    wanted = {"taps": [tap_pb2.Tap(selector="identity", values=False, statistics=[STATISTIC_MEAN])]}
    inputs = {"inputs": [tensor((1, 2 << 20))], "chunks": [chunk(bytes(8 << 20))]}
    reply = caller.extract(edit_pb2.Edit(stored="large"), model_id="wide", **wanted, **inputs)
    assert reply.feature_maps[0].name == "identity"


def test_a_damaged_file_is_said_when_it_is_used_and_in_lists(caller: Caller, data_dir: Path) -> None:
    caller.store("one")
    (file,) = data_dir.glob("edits/*/*.edits")
    file.write_bytes(file.read_bytes()[:-1])
    caller.store("fine")
    error = refused(lambda: caller.extract(edit_pb2.Edit(stored="one")))
    assert isinstance(error, trocar.errors.EditsCorruptError)
    assert caller.names() == [("plain", "fine"), ("plain", "one")]
    caller.store("one", is_replacing=True)
    assert caller.extract(edit_pb2.Edit(stored="one")).feature_maps


def test_a_tensor_of_an_edit_with_nan_is_refused_in_calls_and_streams(caller: Caller) -> None:
    image = bytes(4 * 3 * 64)
    error = refused(lambda: caller.extract(SET, chunks=[chunk(image), chunk(NAN, 1)]))
    assert error.reason is ErrorReason.NON_FINITE_VALUE


def test_indices_of_stored_edits_are_kept(caller: Caller) -> None:
    take = reduction_pb2.TakeReduction(axis=reduction_pb2.AXIS_CHANNELS, positions=[1, 2])
    edit = edit_pb2.Edit(
        selector="conv", zero=edit_pb2.ZeroEdit(), region=edit_pb2.EditRegion(takes=[take]), channel_dim=1
    )
    caller.store("channels", edit)
    assert list(caller.stored()[0].edits) == [edit]
