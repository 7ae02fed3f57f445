"""Calls of the Open Inference Protocol made by hand, with messages of the server's private pool."""

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import grpc
import numpy as np
from google.rpc.error_details_pb2 import ErrorInfo
from google.rpc.status_pb2 import Status
from numpy.typing import NDArray

from trocar_server.rpc.oip.oip_messages import SERVICE, ModelInferRequest, message_class

TIMEOUT_S = 60
DATATYPES = {
    "bool": "BOOL",
    **{f"{sign}int{bits}": f"{sign.upper()}INT{bits}" for sign in ("", "u") for bits in (8, 16, 32, 64)},
    **{f"float{bits}": f"FP{bits}" for bits in (16, 32, 64)},
}
"""The protocol's name by NumPy's."""


def ask(channel: grpc.Channel, name: str, fields: Mapping[str, Any] | None = None, **options: Any) -> Any:
    """Make a unary call and return its reply."""
    method = SERVICE.methods_by_name[name]
    request = message_class(method.input_type)(**(fields or {}))
    call: Any = channel.unary_unary(
        f"/{SERVICE.full_name}/{name}",
        message_class(method.input_type).SerializeToString,
        message_class(method.output_type).FromString,
    )
    return call(request, **{"timeout": TIMEOUT_S, **options})


def infer(channel: grpc.Channel, request: Any, **options: Any) -> Any:
    """Send a `ModelInferRequest` and return the `ModelInferResponse`."""
    method = SERVICE.methods_by_name["ModelInfer"]
    call: Any = channel.unary_unary(
        f"/{SERVICE.full_name}/ModelInfer",
        message_class(method.input_type).SerializeToString,
        message_class(method.output_type).FromString,
    )
    return call(request, **{"timeout": TIMEOUT_S, **options})


def stream(channel: grpc.Channel, requests: Iterable[Any], **options: Any) -> Iterator[Any]:
    """Send requests in one stream and yield the replies."""
    method = SERVICE.methods_by_name["ModelStreamInfer"]
    call: Any = channel.stream_stream(
        f"/{SERVICE.full_name}/ModelStreamInfer",
        _bytes_of,
        message_class(method.output_type).FromString,
    )
    yield from call(iter(requests), **{"timeout": TIMEOUT_S, **options})


def _bytes_of(request: Any) -> bytes:
    """Let a test send bytes that are no request."""
    return request if isinstance(request, bytes) else bytes(request.SerializeToString())


def request_of(
    model_name: str, arrays: Mapping[str, NDArray[Any]], names: Iterable[str] = (), **fields: Any
) -> Any:
    """Build a request with raw contents."""
    fields.setdefault("outputs", [{"name": name} for name in names])
    request = ModelInferRequest(model_name=model_name, **fields)
    for name, array in arrays.items():
        request.inputs.add(name=name, datatype=DATATYPES[str(array.dtype)], shape=array.shape)
        request.raw_input_contents.append(array.tobytes())
    return request


def arrays_of(response: Any) -> dict[str, NDArray[Any]]:
    """Return the outputs of a response by name; BF16 as its bits."""
    assert len(response.outputs) == len(response.raw_output_contents)
    kinds = {name: kind for kind, name in DATATYPES.items()} | {"BF16": "uint16"}
    return {
        output.name: np.frombuffer(raw, kinds[output.datatype]).reshape(tuple(output.shape))
        for output, raw in zip(response.outputs, response.raw_output_contents, strict=True)
    }


def info_of(error: Any) -> ErrorInfo:
    """Return what a failed call says of itself."""
    info = ErrorInfo()
    details = dict(error.trailing_metadata())["grpc-status-details-bin"]
    assert any(detail.Unpack(info) for detail in Status.FromString(details).details)
    return info
