"""Plain gRPC baseline, half an hour's work: a method that takes and returns bytes, on a thread pool."""

import sys
from concurrent import futures

import grpc
import numpy as np
from google.protobuf.wrappers_pb2 import BytesValue

from benchmarks.sections.peers.model import extractor

SERVICE, METHOD = "plain.Extractor", "Extract"
OPTIONS = [("grpc.max_send_message_length", -1), ("grpc.max_receive_message_length", -1)]


def serve(port: int, models: list[str]) -> None:
    """Serve until the process is terminated."""
    extractors = {name: extractor(name) for name in models}

    def extract(request: BytesValue, context: grpc.ServicerContext) -> BytesValue:
        facts = {key: str(value) for key, value in context.invocation_metadata()}
        shape = [int(size) for size in facts["shape"].split(",")]
        batch = np.frombuffer(request.value, np.float32).reshape(shape)
        return BytesValue(value=extractors[facts["model"]](batch).tobytes())

    handler = grpc.unary_unary_rpc_method_handler(
        extract, request_deserializer=BytesValue.FromString, response_serializer=BytesValue.SerializeToString
    )
    server = grpc.server(futures.ThreadPoolExecutor(max_workers=8), options=OPTIONS)
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(SERVICE, {METHOD: handler}),))
    server.add_insecure_port(f"127.0.0.1:{port}")
    server.start()
    server.wait_for_termination()


if __name__ == "__main__":
    serve(int(sys.argv[1]), sys.argv[2:])
