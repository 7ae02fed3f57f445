"""The command line, `trocar`: each command is one module of this package."""

from trocar._cli.app import main

__all__ = ["main"]
