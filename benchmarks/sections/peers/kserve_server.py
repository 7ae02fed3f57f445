"""KServe's Python server with its gRPC endpoint, in its own environment."""

import sys
from typing import Any

port, models = int(sys.argv[1]), sys.argv[2:]
# KServe reads its options when it is imported.
sys.argv[1:] = [f"--grpc_max_{way}_message_length={1 << 30}" for way in ("send", "receive")]

from kserve import InferOutput, InferRequest, InferResponse, Model, ModelServer  # noqa: E402  # pyright: ignore[reportMissingImports]

from benchmarks.sections.peers.model import TAP, extractor  # noqa: E402


class Extractor(Model):  # type: ignore[misc]  # KServe is not installed where types are checked
    """One model, with KServe's interface."""

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self._extract = extractor(name)
        self.ready = True

    def predict(
        self, payload: InferRequest, headers: Any = None, response_headers: Any = None
    ) -> InferResponse:
        """Return the features of a batch."""
        values = self._extract(payload.inputs[0].as_numpy())
        output = InferOutput(TAP, list(values.shape), "FP32")
        output.set_data_from_numpy(values, binary_data=True)
        return InferResponse(payload.id, self.name, [output])


if __name__ == "__main__":
    server = ModelServer(http_port=port + 1, grpc_port=port, enable_latency_logging=False)
    server.start([Extractor(name) for name in models])
