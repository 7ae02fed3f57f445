"""Which parts of an input, or of a feature map, a score comes from: NumPy, without a client."""
