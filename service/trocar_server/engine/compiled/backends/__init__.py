"""Backends for passes without edits or gradients: faster than eager PyTorch, within promised numerics."""
