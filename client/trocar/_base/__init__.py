"""Base of the client: errors, tensors, names."""
