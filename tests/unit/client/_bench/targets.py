"""Targets of a load that helper processes import: a module without torch, whose import takes seconds."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from trocar._bench.records import Answer
from trocar._bench.worker import Call


@dataclass(frozen=True)
class Named:
    """A target whose answers name the client, as their queue time."""

    @contextmanager
    def open(self, client: int) -> Iterator[Call]:
        print("what a library prints does no harm")
        yield lambda: Answer(queue_s=client)


@dataclass(frozen=True)
class Broken:
    """A target that cannot be opened."""

    @contextmanager
    def open(self, client: int) -> Iterator[Call]:
        raise OSError("no such socket")
        yield Answer
