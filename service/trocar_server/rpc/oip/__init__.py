"""The Open Inference Protocol v2, for clients of Triton and KServe."""
