"""Plans in, tensors out: the owner thread, admission, passes. Knows no gRPC and no protobuf."""
