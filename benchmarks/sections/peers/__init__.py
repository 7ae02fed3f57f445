"""Peers: other servers of the same model, and their cost on the same machine in the same run.

Each peer hosts torchvision's eager extractor of `layer4`; its clients are separate processes, with the
peer's own client code. A peer is measured in turn with local passes. A missing one is reported as missing.
"""

from benchmarks.sections.peers.section import run

__all__ = ["run"]
