"""The server of Trocar: hosts pretrained PyTorch models and looks inside them while they run."""

__version__ = "0.1.0"
