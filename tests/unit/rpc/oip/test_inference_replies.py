"""Replies put together by hand are what protobuf would write."""

import pytest

from trocar_server.rpc.codec.replies import join_parts
from trocar_server.rpc.oip.inference_replies import infer_parts, stream_parts
from trocar_server.rpc.oip.oip_messages import ModelInferResponse, ModelStreamInferResponse

PAYLOADS = [[], [b""], [b"a" * 127, b"b" * 128], [b"c" * 70_000, b"", b"d"]]


@pytest.mark.parametrize("payloads", PAYLOADS, ids=len)
def test_the_bytes_are_protobufs(payloads: list[bytes]) -> None:
    response = ModelInferResponse(model_name="m", id="7")
    parts = infer_parts(response, [memoryview(payload) for payload in payloads])
    response.raw_output_contents.extend(payloads)
    assert join_parts(parts) == response.SerializeToString()
    around = ModelStreamInferResponse(infer_response=response)
    assert join_parts(stream_parts(parts)) == around.SerializeToString()
