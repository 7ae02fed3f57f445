"""Requests that a channel compresses, as any gRPC client may."""

from collections.abc import Iterator

import grpc
import numpy as np
import pytest

import trocar
from tests.support.servers.running_server import RunningServer
from tests.support.wire.wire import chunk, extract_call, raw_channel, request, tensor
from trocar_api.v1 import extraction_pb2 as pb
from trocar_api.v1 import model_pb2, model_pb2_grpc

IMAGE = np.zeros((1, 3, 8, 8), np.float32)
HEAD = request("plain", "fc", inputs=[tensor(IMAGE.shape)], chunks=[])


@pytest.fixture
def channel(server: RunningServer) -> Iterator[grpc.Channel]:
    with raw_channel(server.address) as opened:
        yield opened


def reply(channel: grpc.Channel, *messages: pb.ExtractRequest) -> bytes:
    encoded = [message.SerializeToString() for message in messages]
    found = pb.ExtractResponse.FromString(
        b"".join(extract_call(channel, encoded, compression=grpc.Compression.Gzip))
    )
    return b"".join(part.data for part in found.chunks)


def test_compressed_messages_of_a_stream_are_read(channel: grpc.Channel, client: trocar.Client) -> None:
    expected = client.extract("plain", IMAGE, taps="fc")["fc"].tobytes()
    chunks = pb.ExtractRequest(chunks=[chunk(IMAGE.tobytes())])
    assert reply(channel, HEAD, chunks) == expected


def test_a_compressed_message_of_a_unary_call_is_read(server: RunningServer) -> None:
    with grpc.insecure_channel(server.address, compression=grpc.Compression.Gzip) as channel:
        stub = model_pb2_grpc.ModelServiceStub(channel)
        found = stub.GetModel(model_pb2.GetModelRequest(model_id="plain"), timeout=60)
    assert found.model.model_id == "plain"


def test_deflate_is_told_that_it_is_not_spoken(channel: grpc.Channel) -> None:
    with pytest.raises(grpc.RpcError) as caught:
        list(extract_call(channel, [HEAD.SerializeToString()], compression=grpc.Compression.Deflate))
    assert caught.value.code() is grpc.StatusCode.UNIMPLEMENTED
