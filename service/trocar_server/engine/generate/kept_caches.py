"""Kept caches: how many texts have keys and values in memory, and how large these may become."""

from collections.abc import Iterator
from contextlib import contextmanager


class KeptCaches:
    """The keys and values that are kept now. Belongs to one event loop.

        with caches.kept(byte_count):
            ...

    Attributes:
        count: Number of texts that have some.
        byte_count: Bytes that they take when the most tokens have been generated.
    """

    def __init__(self) -> None:
        self.count = 0
        self.byte_count = 0

    @contextmanager
    def kept(self, byte_count: int) -> Iterator[None]:
        """Count the keys and values of one text inside the context."""
        self.count += 1
        self.byte_count += byte_count
        try:
            yield
        finally:
            self.count -= 1
            self.byte_count -= byte_count
