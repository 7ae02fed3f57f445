from pathlib import Path


def demo(out: Path) -> None:
    """x"""
