"""What the operator of a server can do with it over the wire; the whole of the server does it."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol


@dataclass(frozen=True)
class DrainState:
    """How far a server has run empty."""

    is_draining: bool
    running_call_count: int
    waiting_fit_count: int


class Operator(Protocol):
    """Drains a server, and reads its configuration again."""

    @property
    def server_id(self) -> str:
        """The id of the server's data directory."""
        ...

    @property
    def is_draining(self) -> bool:
        """Whether new work is refused."""
        ...

    async def drain(self, is_wanted: bool | None) -> DrainState:
        """Run empty, take work again, or do neither (None); returns how it stands now."""
        ...

    async def reload(self) -> Sequence[str]:
        """Read the configuration again; returns what has changed.

        Raises:
            ServiceError: What is wrong with it; nothing has changed.
        """
        ...
