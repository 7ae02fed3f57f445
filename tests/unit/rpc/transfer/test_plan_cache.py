"""Requests that came before are the requests that came: never another one, never another list of edits."""

import tracemalloc
from typing import Any

import numpy as np
import pytest

from tests.support.wire.wire import request, tensor
from trocar_api.reasons import ErrorReason
from trocar_api.v1 import extraction_pb2 as pb
from trocar_api.v1 import tap_pb2
from trocar_api.wire import chunk_parts
from trocar_server.config import Limits
from trocar_server.errors import ServiceError
from trocar_server.rpc.codec.edits import StoredList
from trocar_server.rpc.codec.extract_requests import to_plan
from trocar_server.rpc.transfer import messages
from trocar_server.rpc.transfer.plan_cache import PlanCache

LIMITS = Limits()


def asked(**fields: Any) -> pb.ExtractRequest:
    return request(chunks=[], **fields)


def message(wanted: pb.ExtractRequest, data: bytes = b"") -> bytes:
    return wanted.SerializeToString() + (b"".join(chunk_parts(0, 0, memoryview(data))) if data else b"")


def test_an_equal_request_is_understood_once() -> None:
    requests, wanted = PlanCache(), asked(inputs=[tensor(shape=[2, 3])])
    first, _, _ = requests.read(message(wanted, b"abc"))
    again, chunks, _ = requests.read(message(wanted, b"def"))
    assert again is first
    assert [bytes(chunk.data) for chunk in chunks] == [b"def"]
    assert again.plan(LIMITS, {})[0] is first.plan(LIMITS, {})[0]


def test_requests_of_one_size_are_told_apart() -> None:
    requests, sizes = PlanCache(), []
    for _ in range(2):
        for path in ("layer1", "layer2", "layer3", "layer4", "layer5", "layer6"):
            wanted = asked(taps=[tap_pb2.Tap(selector=path)], inputs=[tensor(shape=[3])])
            known, chunks, size = requests.read(message(wanted, path.encode()))
            assert known.message == wanted
            assert [bytes(chunk.data) for chunk in chunks] == [path.encode()]
            sizes.append(size)
    assert set(map(str, sizes)) <= {"None", "[6]"}


def test_sizes_are_known_of_payloads_in_order() -> None:
    requests, head = PlanCache(), asked(inputs=[tensor(shape=[3])]).SerializeToString()
    parts = [b"".join(chunk_parts(index, 0, memoryview(b"abc"))) for index in (0, 1)]
    for ordered, expected in ((parts, [3, 3]), (parts[::-1], None)):
        for sizes in (None, expected):
            assert requests.read(head + b"".join(ordered))[2] == sizes


def test_it_is_what_it_would_be_alone() -> None:
    requests = PlanCache()
    for shape in ([2, 3], [4, 3], [2, 3]):
        wanted = asked(inputs=[tensor(shape=shape)])
        for _ in range(2):
            known, _, _ = requests.read(message(wanted))
            assert known.message == wanted
            assert known.plan(LIMITS, {}) == to_plan(wanted, LIMITS)


def test_other_limits_are_asked_again() -> None:
    requests, wanted = PlanCache(), asked(inputs=[tensor(shape=[640, 3])])
    requests.read(message(wanted))[0].plan(LIMITS, {})
    with pytest.raises(ServiceError):
        requests.read(message(wanted))[0].plan(Limits(max_request_bytes=1024), {})


def test_what_is_refused_is_refused_each_time() -> None:
    requests, wanted = PlanCache(), asked(taps=[])
    for _ in range(2):
        with pytest.raises(ServiceError, match="taps"):
            requests.read(message(wanted))[0].plan(LIMITS, {})


@pytest.mark.parametrize(("size", "is_kept"), [(4, True), (1 << 20, False)])
def test_a_plan_with_stored_edits_is_remembered_for_the_same_small_list(size: int, *, is_kept: bool) -> None:
    requests, wanted = PlanCache(), asked(inputs=[tensor(shape=[2, 3])])
    wanted.edits.add().stored = "mine"
    known, _, _ = requests.read(message(wanted))
    plans = []
    for content in (0, 0, 1, 0):
        stored = StoredList((), (np.zeros(size, np.uint8),), bytes([content]))
        plans.append(known.plan(LIMITS, {"mine": stored})[0])
    assert (plans[0] is plans[1]) == is_kept
    assert plans[1] is not plans[2]
    assert plans[2] is not plans[3]


def test_bytes_that_are_no_message_are_refused() -> None:
    for data in (b"\xff\xff", b"\x0a\x05ab", b"\x08\x01"):
        with pytest.raises(ServiceError) as caught:
            PlanCache().read(data)[0].plan(LIMITS, {})
        assert caught.value.reason is ErrorReason.INVALID_ARGUMENT


def test_what_is_remembered_is_bounded() -> None:
    requests = PlanCache()
    large = [tap_pb2.Tap(selector=f"layer{i}" + "x" * 200) for i in range(50)]
    tracemalloc.start()
    try:
        for i in range(400):
            requests.read(message(asked(model_id=f"m{i}", taps=large, inputs=[tensor(shape=[2, 3])])))
            requests.read(message(asked(model_id=f"m{i}", inputs=[tensor(shape=[2, 3])])))
        assert tracemalloc.get_traced_memory()[0] < 4 << 20
    finally:
        tracemalloc.stop()


def test_a_request_of_many_small_chunks_is_not_walked_again_to_be_known(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(messages, "Layout", None)
    head = asked(inputs=[tensor(shape=[3])]).SerializeToString()
    parts = (b"".join(chunk_parts(index, 0, memoryview(b"abc"))) for index in range(1000))
    assert len(PlanCache().read(head + b"".join(parts))[1]) == 1000
