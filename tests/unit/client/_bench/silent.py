"""A helper process that never reads its pipe, as one that imports for long."""

import threading


def main() -> None:
    """Wait for ever."""
    threading.Event().wait()
