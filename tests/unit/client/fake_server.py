"""A server that speaks the wire contract through protobuf alone, never through our own codec."""

import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

import grpc
import numpy as np
from google.rpc import error_details_pb2, status_pb2  # ships no types

from trocar_api.v1 import edit_pb2, edit_store_pb2, model_pb2, server_pb2, tensor_pb2
from trocar_api.v1 import extraction_pb2 as pb

DTYPES = {
    "float32": tensor_pb2.DTYPE_FLOAT32,
    "float64": tensor_pb2.DTYPE_FLOAT64,
    "float16": tensor_pb2.DTYPE_FLOAT16,
    "uint8": tensor_pb2.DTYPE_UINT8,
    "int8": tensor_pb2.DTYPE_INT8,
    "int16": tensor_pb2.DTYPE_INT16,
    "int32": tensor_pb2.DTYPE_INT32,
    "int64": tensor_pb2.DTYPE_INT64,
    "bool": tensor_pb2.DTYPE_BOOL,
    "complex64": tensor_pb2.DTYPE_COMPLEX64,
    "complex128": tensor_pb2.DTYPE_COMPLEX128,
}


@dataclass
class Received:
    """One Extract call as the server saw it."""

    head: pb.ExtractRequest
    payloads: list[bytes]
    message_count: int
    metadata: dict[str, Any]

    def arrays(self) -> list[np.ndarray[Any, Any]]:
        names = {number: name for name, number in DTYPES.items()}
        specs = [entry.tensor for entry in self.head.inputs]
        return [
            np.frombuffer(payload, names[spec.dtype]).reshape(spec.shape)
            for spec, payload in zip(specs, self.payloads, strict=False)
        ]


Behaviour = Callable[[Received, grpc.ServicerContext], Iterable[bytes]]


def echo(received: Received, _: grpc.ServicerContext) -> Iterator[bytes]:
    """Answer every tap with the input of the same position."""
    arrays = {
        tap.alias or tap.selector: array
        for tap, array in zip(received.head.taps, received.arrays(), strict=False)
    }
    yield from reply(arrays, chunk_bytes=received.head.max_chunk_bytes or 1 << 20)


def feature_map(name: str, array: np.ndarray[Any, Any], **fields: Any) -> pb.FeatureMap:
    spec = tensor_pb2.TensorSpec(dtype=DTYPES[array.dtype.name], shape=array.shape)
    values = {"tensor": spec, "byte_count": array.nbytes, "has_values": True, "port": "out", **fields}
    return pb.FeatureMap(name=name, path=name, type="Conv2d", **values)


def reply_head(arrays: Mapping[str, np.ndarray[Any, Any]]) -> pb.ExtractResponse:
    return pb.ExtractResponse(
        feature_maps=[feature_map(name, array) for name, array in arrays.items()],
        expansions=[pb.SelectorExpansion(selector=name, names=[name]) for name in arrays],
        timing=pb.ServerTiming(queue_s=0.25, compute_s=0.5),
        stopped_at="layer4",
    )


def reply(arrays: Mapping[str, np.ndarray[Any, Any]], chunk_bytes: int = 1 << 20) -> Iterator[bytes]:
    yield reply_head(arrays).SerializeToString()
    yield from chunks([array.tobytes() for array in arrays.values()], chunk_bytes)


def chunks(payloads: Iterable[bytes], chunk_bytes: int) -> Iterator[bytes]:
    for index, payload in enumerate(payloads):
        for offset in range(0, len(payload), chunk_bytes):
            data = payload[offset : offset + chunk_bytes]
            chunk = tensor_pb2.TensorChunk(payload_index=index, offset_bytes=offset, data=data)
            yield pb.ExtractResponse(chunks=[chunk]).SerializeToString()


def error_trailer(
    code: grpc.StatusCode, message: str, reason: str, retry_after_s: float | None = None, **metadata: str
) -> tuple[str, bytes]:
    info = error_details_pb2.ErrorInfo(reason=reason, domain="trocar", metadata=metadata)
    status = status_pb2.Status(code=code.value[0], message=message)
    status.details.add().Pack(info)
    if retry_after_s is not None:
        retry = error_details_pb2.RetryInfo()
        retry.retry_delay.FromNanoseconds(int(retry_after_s * 1e9))
        status.details.add().Pack(retry)
    return "grpc-status-details-bin", status.SerializeToString()


@dataclass
class FakeServer:
    """A real gRPC server on port 0 whose answers a test chooses."""

    behaviour: Behaviour = echo
    failure: tuple[grpc.StatusCode, str, tuple[tuple[str, bytes], ...]] | None = None
    received: list[Received] = field(default_factory=list)
    calls: list[tuple[str, Any]] = field(default_factory=list)
    cancelled: threading.Event = field(default_factory=threading.Event)
    running: threading.Event = field(default_factory=threading.Event)
    port: int = 0

    def __post_init__(self) -> None:
        options = [("grpc.max_receive_message_length", 16 << 20), ("grpc.so_reuseport", 0)]
        self._server = grpc.server(ThreadPoolExecutor(8), options=options)
        self._server.add_generic_rpc_handlers(
            (
                grpc.method_handlers_generic_handler(
                    "trocar_api.v1.ExtractionService",
                    {
                        "Extract": grpc.stream_stream_rpc_method_handler(
                            self._extract, pb.ExtractRequest.FromString, None
                        ),
                        "Plan": self._handler(pb, "Plan", pb.PlanResponse()),
                    },
                ),
                self._unary("EditStoreService", edit_store_pb2, _stored_edits()),
                self._unary("ModelService", model_pb2, self._model_replies()),
                self._unary("ServerService", server_pb2, {"GetServerInfo": _server_info()}),
            )
        )
        self.port = self._server.add_insecure_port(f"127.0.0.1:{self.port}")

    @property
    def target(self) -> str:
        return f"127.0.0.1:{self.port}"

    def start(self) -> None:
        self._server.start()

    def stop(self) -> None:
        self._server.stop(0).wait()

    def fail(self, code: grpc.StatusCode, message: str, reason: str = "", **metadata: str) -> None:
        """Let every later call fail; without a reason as gRPC itself would fail."""
        trailers = (error_trailer(code, message, reason, None, **metadata),) if reason else ()
        self.failure = (code, message, trailers)

    def _check(self, context: grpc.ServicerContext) -> None:
        if self.failure is not None:
            code, message, trailers = self.failure
            context.set_trailing_metadata(trailers)
            context.abort(code, message)

    def _extract(
        self, requests: Iterator[pb.ExtractRequest], context: grpc.ServicerContext
    ) -> Iterator[bytes]:
        self._check(context)
        ended: list[bool] = []
        context.add_callback(lambda: None if ended else self.cancelled.set())
        messages = list(requests)
        metadata = dict(context.invocation_metadata())
        payloads = [b""] * sum(_payload_count(entry) for entry in messages[0].inputs)
        for message in messages:
            for chunk in message.chunks:
                payloads += [b""] * (chunk.payload_index + 1 - len(payloads))  # of taps, edits and so on
                assert chunk.offset_bytes == len(payloads[chunk.payload_index])
                payloads[chunk.payload_index] += chunk.data
        if messages[0].payload_digest:
            payloads = []
        received = Received(messages[0], payloads, len(messages), metadata)
        self.received.append(received)
        self.running.set()
        yield from self.behaviour(received, context)
        ended.append(True)

    def _unary(self, service: str, module: Any, replies: dict[str, Any]) -> grpc.GenericRpcHandler:
        handlers = {name: self._handler(module, name, answer) for name, answer in replies.items()}
        return grpc.method_handlers_generic_handler(f"trocar_api.v1.{service}", handlers)

    def _handler(self, module: Any, name: str, answer: Any) -> Any:
        def call(request: Any, context: grpc.ServicerContext) -> Any:
            self._check(context)
            self.calls.append((name, request))
            return answer

        request_type = getattr(module, f"{name}Request")
        return grpc.unary_unary_rpc_method_handler(
            call, request_type.FromString, type(answer).SerializeToString
        )

    def _model_replies(self) -> dict[str, Any]:
        model = resnet()
        return {
            "ListModels": model_pb2.ListModelsResponse(models=[model]),
            "GetModel": model_pb2.GetModelResponse(model=model),
            "LoadModel": model_pb2.LoadModelResponse(model=model),
            "UnloadModel": model_pb2.UnloadModelResponse(
                model=model_pb2.Model(model_id="resnet18", state=model_pb2.MODEL_STATE_UNLOADED)
            ),
            "ListModules": modules(),
        }


def resnet() -> model_pb2.Model:
    return model_pb2.Model(
        model_id="resnet18",
        state=model_pb2.MODEL_STATE_LOADED,
        family="classification",
        architecture="resnet18",
        weights="IMAGENET1K_V1",
        parameter_count=11_689_512,
        byte_count=46_827_520,
        device="cpu",
        dtype=tensor_pb2.DTYPE_FLOAT32,
        preprocessing=model_pb2.Preprocessing(resize=[256], crop=[224, 224], mean=[0.5], std=[0.25]),
        categories=["tench", "goldfish"],
        input_shape=[3, 224, 224],
    )


def modules() -> model_pb2.ListModulesResponse:
    def module(path: str, kind: str, parameters: int, *shapes: tuple[int, ...]) -> model_pb2.Module:
        calls = []
        for shape in shapes:
            spec = tensor_pb2.TensorSpec(dtype=tensor_pb2.DTYPE_FLOAT32, shape=shape)
            output = model_pb2.OutputValue(type="Tensor", tensor=spec, byte_count=4)
            calls.append(model_pb2.ModuleCall(outputs=[output]))
        return model_pb2.Module(path=path, type=kind, parameter_count=parameters, calls=calls)

    return model_pb2.ListModulesResponse(
        modules=[
            module("", "ResNet", 11_000, (1, 1000)),
            module("layer1", "Sequential", 1_500, (1, 64, 56, 56)),
            module("layer1.0", "BasicBlock", 1_500, (1, 64, 56, 56)),
            module("layer1.0.relu", "ReLU", 0, (1, 64, 56, 56), (1, 64, 56, 56)),
            module("fc", "Linear", 9_500, (1, 1000)),
            module("layer1.0.drop", "Dropout", 0),
        ],
        is_symbolic=True,
    )


def _stored_edits() -> dict[str, Any]:
    scaled = edit_pb2.Edit(selector="layer3", scale=edit_pb2.Operand(constant=0.0))
    stored = edit_store_pb2.StoredEdits(
        model_id="resnet18", name="ablate-3", edits=[scaled], byte_count=2048, stored_at_s=1.5
    )
    return {
        "StoreEdits": edit_store_pb2.StoreEditsResponse(stored=stored),
        "ListEdits": edit_store_pb2.ListEditsResponse(stored=[stored]),
        "DeleteEdits": edit_store_pb2.DeleteEditsResponse(),
    }


def _server_info() -> server_pb2.GetServerInfoResponse:
    limits = server_pb2.ServerLimits(max_batch=256, max_taps=256, max_chunk_bytes=4 << 20)
    return server_pb2.GetServerInfoResponse(
        version="0.1.0", torch_version="2.14.1", device="cpu", limits=limits
    )


def _payload_count(entry: pb.Input) -> int:
    return len(entry.images.images) if entry.HasField("images") else 1
