"""Engine: plans in, tensors out. Admission, scheduling and passes, without gRPC or protobuf."""
