"""Attribution of a score to parts of an input or of a feature map: NumPy, without a client."""
