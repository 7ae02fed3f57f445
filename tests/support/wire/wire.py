"""Calls made by hand: requests that our own client would never send."""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import grpc

from trocar._transport.rpc_errors import error_from_rpc
from trocar_api.v1 import extraction_pb2 as pb
from trocar_api.v1 import tap_pb2, tensor_pb2

EXTRACT = "/trocar_api.v1.ExtractionService/Extract"
CALL_TIMEOUT_S = 60


@contextmanager
def raw_channel(address: str, **options: int) -> Iterator[grpc.Channel]:
    """Open a channel with gRPC's own defaults, but for options such as `max_send_message_length=-1`."""
    channel = grpc.insecure_channel(address, [(f"grpc.{name}", value) for name, value in options.items()])
    try:
        yield channel
    finally:
        channel.close()


def send(channel: grpc.Channel, *messages: bytes | pb.ExtractRequest) -> list[bytes]:
    """Make one Extract call of these messages and return those of the reply.

    Raises:
        TrocarError: As the client would raise it.
    """
    encoded = [m if isinstance(m, bytes) else m.SerializeToString() for m in messages]
    try:
        return list(extract_call(channel, encoded))
    except grpc.RpcError as error:
        raise error_from_rpc(error) from error


def extract_call(channel: grpc.Channel, messages: Iterable[bytes], **options: Any) -> Any:
    """Start one Extract call of these messages; the result is iterable and can be cancelled."""
    method: Any = channel.stream_stream(EXTRACT, None, None)
    return method(iter(messages), **{"timeout": CALL_TIMEOUT_S, **options})


def unary_call(channel: grpc.Channel, method: str, message: bytes) -> Any:
    """Call a method such as `ModelService/GetModel` with these bytes and return those of the reply."""
    call: Any = channel.unary_unary(f"/trocar_api.v1.{method}", None, None)
    return call(message, timeout=CALL_TIMEOUT_S)


def tensor(shape: Iterable[int], dtype: Any = tensor_pb2.DTYPE_FLOAT32, name: str = "") -> pb.Input:
    """Describe one argument."""
    return pb.Input(name=name, tensor=tensor_pb2.TensorSpec(dtype=dtype, shape=list(shape)))


def chunk(data: bytes, index: int = 0, offset: int = 0) -> tensor_pb2.TensorChunk:
    """Build one chunk."""
    return tensor_pb2.TensorChunk(payload_index=index, offset_bytes=offset, data=data)


def request(model_id: str = "identity", selector: str = "identity", **fields: Any) -> pb.ExtractRequest:
    """Build a request that is right for the model `identity`, but for the fields given."""
    fields.setdefault("taps", [tap_pb2.Tap(selector=selector)])
    fields.setdefault("inputs", [tensor((1, 3))])
    fields.setdefault("chunks", [chunk(bytes(12))])
    return pb.ExtractRequest(model_id=model_id, **fields)
