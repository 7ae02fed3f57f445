"""Request digests: a request sent before may be repeated by its digest alone.

    sent = SentDigests()
    digests = digests_of(call)
    if sent.is_worth_asking(digests):
        ...                              # send `digests.question` in place of the call
    sent.note(digests, is_cached=False)

The server computes the digest of what it receives itself, so a wrong digest here does no harm.
"""

import hashlib
from collections import OrderedDict
from dataclasses import dataclass, field
from threading import Lock

from trocar._wire.requests import ExtractCall
from trocar_api.v1.extraction_pb2 import ExtractRequest

KEPT = 4096
"""Requests that are remembered, 32 bytes each and some 200 of Python's own."""

PATIENCE = 3
"""After so many calls in a row that came again and yet had to be computed, no digests are sent until one of
them is answered without."""


@dataclass(frozen=True)
class Digests:
    """Digests of one call."""

    call: bytes
    """Of the whole call."""
    question: bytes
    """What to send in place of the call."""


def digests_of(call: ExtractCall) -> Digests:
    """Return the digests of a call: SHA-256, 0.3 ms for one image."""
    digest = hashlib.sha256()
    for payload in call.payloads:
        digest.update(payload)
    question = call.head + ExtractRequest(payload_digest=digest.digest()).SerializeToString()
    return Digests(hashlib.sha256(question).digest(), question)


@dataclass
class SentDigests:
    """The last calls of a client. Thread-safe.

    A repeated call is sent by its digest, unless the server turns out to cache nothing: a useless round
    trip with every call would be slower than no cache.
    """

    _sent: OrderedDict[bytes, None] = field(default_factory=OrderedDict)
    _misses: int = 0
    _lock: Lock = field(default_factory=Lock)

    def is_worth_asking(self, digests: Digests) -> bool:
        """Whether the server may have the reply."""
        with self._lock:
            return digests.call in self._sent and self._misses < PATIENCE

    def note(self, digests: Digests, is_cached: bool) -> None:
        """Record an answered call, and whether the reply was cached."""
        with self._lock:
            self._misses = 0 if is_cached else self._misses + (digests.call in self._sent)
            self._sent[digests.call] = None
            self._sent.move_to_end(digests.call)
            if len(self._sent) > KEPT:
                self._sent.popitem(last=False)
