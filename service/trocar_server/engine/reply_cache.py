"""Reply cache, bounded in bytes: pure data, no torch and no gRPC.

    cache = ReplyCache(256 << 20)
    key = await key_of(question, payloads)
    cache.put("alice", key.digest, KeptReply(version, head, payloads))
    cache.get("alice", key.digest)       # None for all other owners

Note: [Cache entries per principal]
A hit is faster than a pass, so a caller who could hit another's entry could find out what the other has
sent. Every look-up is in the caller's own entries, and entries of the largest owner are evicted: a caller
below an equal share loses nothing to others.
"""

import asyncio
import hashlib
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

_ENTRY_BYTES = 1024
_PAYLOAD_BYTES = 512
"""Python's overhead for an entry and for each of its payloads; a test measures it."""

_ELSEWHERE_BYTES = 1 << 20
"""Hashing and copying of more than this, which takes about a millisecond, stays off the event loop."""


@dataclass(frozen=True)
class Question:
    """A request and its model's weights, without the payloads."""

    owner: str
    """The principal; see Note: [Cache entries per principal]."""
    model_id: str
    version: str
    """Id of the model's weights, never reused."""
    digest: bytes
    """Digest of everything in the request that determines the answer."""

    def key(self, payload_digest: bytes) -> "Key":
        """Return the cache key for payloads with a digest."""
        return Key(self, hashlib.sha256(self.digest + payload_digest).digest())


@dataclass(frozen=True)
class Key:
    """Cache key: a question with its payloads."""

    question: Question
    digest: bytes


@dataclass(frozen=True)
class KeptReply:
    """One cached reply."""

    version: str
    """Version of the model that computed it."""
    head: bytes
    """The reply without its payloads, as sent."""
    payloads: tuple[memoryview, ...] = ()
    """Read-only, flat, one-byte items, of memory that nothing else uses."""
    model_id: str = ""
    """Id of that model."""
    row_count: int = 0
    """Number of samples in the request."""

    @property
    def byte_count(self) -> int:
        """Its memory, in bytes."""
        payloads = sum(payload.nbytes + _PAYLOAD_BYTES for payload in self.payloads)
        return _ENTRY_BYTES + len(self.head) + payloads


class ReplyCache:
    """Replies by owner and key; evicts the least recently used. Belongs to one event loop.

    Args:
        max_bytes: The most memory of all entries together; 0 disables the cache.
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
        """Return the owner's reply under a key and mark it as used; None without one."""
        owned = self._owners.get(owner)
        result = owned.entries.get(key) if owned else None
        if owned is None or result is None:
            self.miss_count += 1
            return None
        owned.entries.move_to_end(key)
        self.hit_count += 1
        return result

    def has_room_for(self, reply: KeptReply) -> bool:
        """Whether a reply fits: none may be larger than the cache."""
        return reply.byte_count <= self.max_bytes

    def put(self, owner: str, key: bytes, reply: KeptReply) -> bool:
        """Cache a reply, replacing an earlier one; returns whether there was room.

        Args:
            owner: The only caller that may read it.
            key: Key of the request.
            reply: The reply.
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
        """Drop every reply of a model that was removed."""
        gone = [
            (owner, key)
            for owner, owned in self._owners.items()
            for key, reply in owned.entries.items()
            if reply.version == version
        ]
        for owner, key in gone:
            self._remove(owner, key)

    def _make_room(self, newest: str) -> None:
        """Evict the oldest entry of the largest owner; of `newest` on a tie."""
        owner = max(self._owners, key=lambda name: (self._owners[name].byte_count, name == newest, name))
        entries = self._owners[owner].entries
        self._remove(owner, next(iter(entries)))

    def _remove(self, owner: str, key: bytes) -> None:
        owned = self._owners.get(owner)
        result = owned.entries.pop(key, None) if owned else None
        if owned is None or result is None:
            return
        owned.byte_count -= result.byte_count
        self.byte_count -= result.byte_count
        if not owned.entries:
            del self._owners[owner]


async def key_of(question: Question, payloads: Sequence[NDArray[np.uint8]]) -> Key:
    """Return the key of a question and its payloads, from the received bytes, not from a caller's claim."""
    if sum(payload.nbytes for payload in payloads) > _ELSEWHERE_BYTES:
        return question.key(await asyncio.to_thread(_digest_of, payloads))
    return question.key(_digest_of(payloads))


def _digest_of(payloads: Sequence[NDArray[np.uint8]]) -> bytes:
    digest = hashlib.sha256()
    for payload in payloads:
        digest.update(payload.data)
    return digest.digest()


async def with_own_memory(reply: KeptReply) -> KeptReply:
    """Copy the payloads: a model may later write to a returned tensor, a weight for example."""

    def copies() -> tuple[memoryview, ...]:
        return tuple(np.array(payload).data.toreadonly() for payload in reply.payloads)

    large = reply.byte_count > _ELSEWHERE_BYTES
    return replace(reply, payloads=await asyncio.to_thread(copies) if large else copies())


class _Owned:
    """The entries of one owner, the least recently used first."""

    def __init__(self) -> None:
        self.entries: OrderedDict[bytes, KeptReply] = OrderedDict()
        self.byte_count = 0

    def add(self, key: bytes, reply: KeptReply) -> None:
        self.entries[key] = reply
        self.byte_count += reply.byte_count
