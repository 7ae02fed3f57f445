"""Trocar server: hosts pretrained PyTorch models and gives access to their activations and gradients."""

__version__ = "0.1.0"
