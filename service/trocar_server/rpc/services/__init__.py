"""gRPC services: parse, call, send."""
