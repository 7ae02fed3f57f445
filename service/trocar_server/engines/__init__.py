"""Other ways than eager PyTorch to run a pass that only looks: faster, within promised numerics."""

from trocar_server.engines.numerics import Numerics

__all__ = ["Numerics"]
