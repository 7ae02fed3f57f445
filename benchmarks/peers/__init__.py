"""Other ways to serve the same model, and what they cost on the same machine in the same run.

Each peer hosts torchvision's eager extractor of `layer4`; its clients are processes of their own, with the
peer's own client code. A peer is measured in turn with local passes. One that is missing is named as such.
"""

from benchmarks.peers.section import run

__all__ = ["run"]
