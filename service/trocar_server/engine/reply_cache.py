"""Replies that were computed before, within a bound of bytes: pure data, nothing of torch or gRPC.

    cache = ReplyCache(256 << 20)
    cache.put("alice", key, KeptReply(version, head, payloads))
    cache.get("alice", key)              # None for everybody else

Note: [Nobody sees another's entries]
A hit is faster than a pass, so whoever could hit on another's entry could find out what the other has
sent. Every look-up goes to the caller's own entries, and room is made by whoever holds most: a caller who
stays below an equal share loses nothing to others.
"""

from collections import OrderedDict
from dataclasses import dataclass

_ENTRY_BYTES = 1024
_PAYLOAD_BYTES = 512
"""What Python itself needs for an entry and for each of its payloads; a test measures it."""


@dataclass(frozen=True)
class KeptReply:
    """One reply."""

    version: str
    """Of the model that made it."""
    head: bytes
    """Everything but the payloads, as it is sent."""
    payloads: tuple[memoryview, ...] = ()
    """Read-only, flat, of single bytes, and of memory that nobody else uses."""
    model_id: str = ""
    """Which model made it."""
    row_count: int = 0
    """The samples of the request."""

    @property
    def byte_count(self) -> int:
        """The memory that it holds."""
        payloads = sum(payload.nbytes + _PAYLOAD_BYTES for payload in self.payloads)
        return _ENTRY_BYTES + len(self.head) + payloads


class ReplyCache:
    """Keeps replies by owner and key; the least recently used goes first. Belongs to one event loop.

    Args:
        max_bytes: The most memory of all entries together; 0 keeps nothing.
    """

    def __init__(self, max_bytes: int) -> None:
        self.max_bytes = max_bytes
        self.byte_count = 0
        self.hit_count = 0
        self.miss_count = 0
        self._owners: dict[str, _Owned] = {}

    def __len__(self) -> int:
        return sum(len(owned.entries) for owned in self._owners.values())

    def get(self, owner: str, key: bytes) -> KeptReply | None:
        """Return what the owner has kept under a key, which is then the last used; None otherwise."""
        owned = self._owners.get(owner)
        found = owned.entries.get(key) if owned else None
        if owned is None or found is None:
            self.miss_count += 1
            return None
        owned.entries.move_to_end(key)
        self.hit_count += 1
        return found

    def has_room_for(self, reply: KeptReply) -> bool:
        """Whether a reply would be kept: no single one may have more than everything."""
        return reply.byte_count <= self.max_bytes

    def put(self, owner: str, key: bytes, reply: KeptReply) -> bool:
        """Keep a reply in the place of an earlier one; returns whether there was room.

        Args:
            owner: Who may have it again.
            key: Of what was asked.
            reply: What was answered.
        """
        self._remove(owner, key)
        if not self.has_room_for(reply):
            return False
        self._owners.setdefault(owner, _Owned()).add(key, reply)
        self.byte_count += reply.byte_count
        while self.byte_count > self.max_bytes:
            self._make_room(owner)
        return True

    def drop(self, version: str) -> None:
        """Forget every reply of a model that is gone."""
        gone = [
            (owner, key)
            for owner, owned in self._owners.items()
            for key, reply in owned.entries.items()
            if reply.version == version
        ]
        for owner, key in gone:
            self._remove(owner, key)

    def _make_room(self, newest: str) -> None:
        """Remove the oldest entry of who holds most; of `newest` where others hold as much."""
        owner = max(self._owners, key=lambda name: (self._owners[name].byte_count, name == newest, name))
        entries = self._owners[owner].entries
        self._remove(owner, next(iter(entries)))

    def _remove(self, owner: str, key: bytes) -> None:
        owned = self._owners.get(owner)
        found = owned.entries.pop(key, None) if owned else None
        if owned is None or found is None:
            return
        owned.byte_count -= found.byte_count
        self.byte_count -= found.byte_count
        if not owned.entries:
            del self._owners[owner]


class _Owned:
    """The entries of one owner, the least recently used first."""

    def __init__(self) -> None:
        self.entries: OrderedDict[bytes, KeptReply] = OrderedDict()
        self.byte_count = 0

    def add(self, key: bytes, reply: KeptReply) -> None:
        self.entries[key] = reply
        self.byte_count += reply.byte_count
