"""LitServe, in its own environment; it takes JSON or HTML forms over HTTP, so arrays are sent as base64."""

import base64
import sys
from typing import Any

import litserve  # pyright: ignore[reportMissingImports]
import numpy as np

from benchmarks.sections.peers.model import extractor


class Extractor(litserve.LitAPI):  # type: ignore[misc]  # LitServe is not installed where types are checked
    """All models behind one endpoint."""

    def setup(self, device: str) -> None:
        """Build the models, in the worker."""
        self._extractors = {name: extractor(name) for name in sys.argv[2:]}

    def decode_request(self, request: dict[str, Any]) -> tuple[str, Any]:
        """Return the model and the batch."""
        batch = np.frombuffer(base64.b64decode(request["data"]), np.float32)
        return request["model"], batch.reshape(request["shape"])

    def predict(self, job: tuple[str, Any]) -> Any:
        """Return the features of a batch."""
        return self._extractors[job[0]](job[1])

    def encode_response(self, values: Any) -> dict[str, Any]:
        """Write the features."""
        return {"data": base64.b64encode(values.tobytes()).decode(), "shape": values.shape}


if __name__ == "__main__":
    server = litserve.LitServer(Extractor(), accelerator="cpu", timeout=600)
    server.run(port=int(sys.argv[1]), host="127.0.0.1", generate_client_file=False)
