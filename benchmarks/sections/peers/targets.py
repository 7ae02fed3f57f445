"""Peer clients: the same batch sent, the same features returned as an array."""

import base64
import http.client
import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np

from trocar._bench.records import Answer
from trocar._bench.worker import Call

_SIDE = 224
_TIMEOUT_S = 600


@dataclass(frozen=True)
class PeerCall:
    """One request, repeated."""

    port: int
    """Where the peer listens on this machine."""
    model: str
    """What is asked."""
    batch: int
    """Samples of one call."""

    @property
    def images(self) -> "np.ndarray[tuple[int, ...], np.dtype[np.float32]]":
        """The batch: the same for all."""
        return np.random.default_rng(0).standard_normal((self.batch, 3, _SIDE, _SIDE), np.float32)


@dataclass(frozen=True)
class PlainCall(PeerCall):
    """A call of the plain gRPC handler."""

    @contextmanager
    def open(self, client: int) -> Iterator[Call]:
        """Yield the call."""
        import grpc
        from google.protobuf.wrappers_pb2 import BytesValue

        from benchmarks.sections.peers.plain_grpc import METHOD, OPTIONS, SERVICE

        images = self.images
        facts = (("model", self.model), ("shape", ",".join(map(str, images.shape))))
        with grpc.insecure_channel(f"127.0.0.1:{self.port}", OPTIONS) as channel:
            method = channel.unary_unary(
                f"/{SERVICE}/{METHOD}", BytesValue.SerializeToString, BytesValue.FromString
            )

            def call() -> Answer:
                reply = method(BytesValue(value=images.tobytes()), metadata=facts, timeout=_TIMEOUT_S)
                np.frombuffer(reply.value, np.float32)
                return Answer()

            yield call


@dataclass(frozen=True)
class KServeCall(PeerCall):
    """A call of KServe's gRPC endpoint, with raw contents."""

    @contextmanager
    def open(self, client: int) -> Iterator[Call]:
        """Yield the call."""
        import grpc
        from kserve.protocol.grpc.grpc_predict_v2_pb2 import ModelInferRequest  # pyright: ignore[reportMissingImports]
        from kserve.protocol.grpc.grpc_predict_v2_pb2_grpc import GRPCInferenceServiceStub  # pyright: ignore[reportMissingImports]

        options = [("grpc.max_send_message_length", -1), ("grpc.max_receive_message_length", -1)]
        images = self.images
        tensor = ModelInferRequest.InferInputTensor(name="x", datatype="FP32", shape=images.shape)
        with grpc.insecure_channel(f"127.0.0.1:{self.port}", options) as channel:
            stub = GRPCInferenceServiceStub(channel)

            def call() -> Answer:
                request = ModelInferRequest(
                    model_name=self.model, inputs=[tensor], raw_input_contents=[images.tobytes()]
                )
                reply = stub.ModelInfer(request, timeout=_TIMEOUT_S)
                np.frombuffer(reply.raw_output_contents[0], np.float32)
                return Answer()

            yield call


@dataclass(frozen=True)
class LitServeCall(PeerCall):
    """A call of LitServe over a connection that stays open."""

    @contextmanager
    def open(self, client: int) -> Iterator[Call]:
        """Yield the call."""
        images = self.images
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=_TIMEOUT_S)
        headers = {"Content-Type": "application/json"}

        def call() -> Answer:
            data = base64.b64encode(images.tobytes()).decode()
            body = json.dumps({"model": self.model, "shape": images.shape, "data": data})
            try:
                connection.request("POST", "/predict", body, headers)
                reply = connection.getresponse()
            except (ConnectionError, http.client.RemoteDisconnected):  # it was idle for 5 s: reconnect
                connection.close()
                connection.request("POST", "/predict", body, headers)
                reply = connection.getresponse()
            text = reply.read()
            if reply.status != http.client.OK:
                raise RuntimeError(f"LitServe answered {reply.status}: {text[:200]!r}")
            np.frombuffer(base64.b64decode(json.loads(text)["data"]), np.float32)
            return Answer()

        try:
            yield call
        finally:
            connection.close()
