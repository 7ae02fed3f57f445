"""gRPC layer, the only package that imports gRPC and protobuf: messages to plans, results to messages."""
