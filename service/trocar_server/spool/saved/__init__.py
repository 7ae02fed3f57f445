"""Saved tensors: the pack and unpack hooks of autograd."""
