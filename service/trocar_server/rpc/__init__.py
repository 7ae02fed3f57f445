"""The only package that knows gRPC and protobuf: messages in, plans out; results in, messages out."""
