"""Rank requests: what a replica asks of its supervisor for the workers of its fits, as lines.

to the supervisor    {"ranks": {"place": ID, "count": 3, "address": "10.0.0.5:41873", "secret": ..., ...}}
                     {"ranks": {"release": ID}}
from it              {"ranks": {"id": ID, "no_room": WHY}}, {"ranks": {"id": ID, "lost": WHY}}
                     {"rank_capacity": 8}
"""

from pathlib import Path
from typing import Any

from trocar_server.cluster.lines import ParentLines


class RankRequests:
    """The requests of one replica; see `Placer` of `placed_ranks`. Its methods may be called on any thread.

    Args:
        lines: To the supervisor.
        own_dir: Folder of the replica's published models.
    """

    def __init__(self, lines: ParentLines, own_dir: Path) -> None:
        self._lines, self._own_dir = lines, own_dir
        self._capacity: int | None = None
        self._told: dict[str, dict[str, Any]] = {}

    @property
    def capacity(self) -> int | None:
        """How many ranks all nodes have resources for; None while that is not known."""
        return self._capacity

    def place(self, own_id: str, count: int, address: str, secret: str) -> None:
        """Begin to start ranks."""
        self._told[own_id] = {}
        wanted = {"place": own_id, "count": count, "address": address, "secret": secret}
        self._lines.write(ranks=wanted | {"own_dir": str(self._own_dir)})

    def no_room(self, own_id: str) -> str:
        """Say why there was no room for them in time; empty if there was."""
        return str(self._told.get(own_id, {}).get("no_room", ""))

    def why_lost(self, own_id: str) -> str:
        """Say why one of them is lost; empty if none is."""
        return str(self._told.get(own_id, {}).get("lost", ""))

    def release(self, own_id: str) -> None:
        """End them."""
        self._told.pop(own_id, None)
        self._lines.write(ranks={"release": own_id})

    def take(self, line: dict[str, Any]) -> None:
        """Take a line of the supervisor."""
        if "rank_capacity" in line:
            self._capacity = line["rank_capacity"]
        told = line.get("ranks", {})
        if told.get("id") in self._told:
            self._told[told["id"]] = told
