"""Operator interface: server operations over the wire, implemented by the app."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol


@dataclass(frozen=True)
class DrainState:
    """Drain progress of a server."""

    is_draining: bool
    running_call_count: int
    waiting_fit_count: int


@dataclass(frozen=True)
class Feature:
    """An optional feature of a server."""

    name: str
    problem: str = ""
    """Why it is off; empty if it is on."""
    note: str = ""
    """Details if it is on."""

    @property
    def is_on(self) -> bool:
        """Whether it is on."""
        return not self.problem


class Operator(Protocol):
    """Drains a server, and reloads its configuration."""

    @property
    def server_id(self) -> str:
        """The id of the server's data directory."""
        ...

    @property
    def is_draining(self) -> bool:
        """Whether new work is refused."""
        ...

    def features(self) -> Sequence[Feature]:
        """The server's features, with the reason for each that is off."""
        ...

    async def drain(self, is_wanted: bool | None) -> DrainState:
        """Start draining, accept work again, or do neither (None); returns the drain state."""
        ...

    async def reload(self) -> Sequence[str]:
        """Reload the configuration; returns the changes.

        Raises:
            ServiceError: The configuration is invalid; nothing has changed.
        """
        ...
