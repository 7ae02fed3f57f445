"""Replicas of a cluster that the client calls directly, after one look-up at a gateway.

A gateway says in the trailing metadata of a call that it lists them. From then on the client asks it for the
replicas of each model and trainer, checks that it reaches them, and sends the calls with tensors to them.
A call that fails on that way is made again through the gateway, which knows more.
"""

from __future__ import annotations

import random
import time
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

import grpc

from trocar._base.concurrency import AsyncLock
from trocar._transport.channel import is_loopback
from trocar._transport.rpc_errors import is_broken_connection
from trocar._transport.targets import certificate_host
from trocar.errors import (
    DeadlineExceededError,
    ModelNotLoadedError,
    ServerDrainingError,
    ServerUnavailableError,
    TrocarError,
    UnknownModelError,
    UnknownTrainerError,
)
from trocar_api.v1.model_pb2 import ListReplicasRequest

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Iterable, Sequence

    from trocar._async.connection import AsyncConnection
    from trocar._transport.attempts import Attempts
    from trocar._transport.channel import AsyncStream, ConnectOptions
    from trocar_api.v1.model_pb2 import Replica

_REACHED_WITHIN_S = 1.0
"""A replica that has not answered by then is behind a firewall, or in another network."""
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 30.0, 600.0
"""How long a replica that was not reached is not tried again: doubled each time."""
_BROKEN_PAUSE_S = 1.0
"""How long calls go to the gateway after a replica failed, which by then it knows."""
_KEPT_S = 60.0
"""How long the connection to a replica that is in no list is kept, in seconds."""
_MOST_CONNECTIONS = 8
_MOST_NAMES = 1024
_CURED = (ServerDrainingError, UnknownModelError, UnknownTrainerError, ModelNotLoadedError)
"""What a gateway may answer differently: it knows where the model or the trainer is now."""


@dataclass(eq=False)
class AsyncDirect:
    """A replica that is, or was, called directly."""

    connection: AsyncConnection
    waiting_s: float = 0.0
    """Seconds of admitted work, as of the last look-up."""
    is_reached: bool = False
    again_at: float = 0.0
    """If it was not reached: when it may be tried again."""
    unlisted_at: float = 0.0
    """When it was first missing in every list; 0 while it is in one."""
    pause_s: float = _FIRST_PAUSE_S
    open_calls: set[object] = field(default_factory=set)
    """A set, whose changes need no lock among threads."""

    def cost(self) -> tuple[int, float]:
        """Sort key: the replica with the least is chosen."""
        return len(self.open_calls), self.waiting_s

    def tried(self) -> None:
        """Record whether it was reached."""
        if self.is_reached:
            self.again_at, self.pause_s = 0.0, _FIRST_PAUSE_S
        else:
            self.again_at = time.monotonic() + self.pause_s
            self.pause_s = min(2 * self.pause_s, _LONGEST_PAUSE_S)


@dataclass
class _Listing:
    """The replicas of a model that are reached, until a time."""

    replicas: Sequence[AsyncDirect]
    until: float


class AsyncRoute:
    """The way of one attempt to a replica."""

    def __init__(self, direct: AsyncDirect, listing: _Listing) -> None:
        self._direct, self._listing = direct, listing
        self.connection = direct.connection
        direct.open_calls.add(self)

    def falls_back(self, error: grpc.RpcError, problem: Exception) -> bool:
        """Whether a failed attempt is to be made again through the gateway.

        Args:
            error: The failure.
            problem: The failure as an exception.
        """
        if not (is_broken_connection(error) or isinstance(problem, _CURED)):
            return False
        self._listing.replicas, self._listing.until = (), time.monotonic() + _BROKEN_PAUSE_S
        self._direct.is_reached = False
        return True

    def end(self) -> None:
        """The attempt has ended."""
        self._direct.open_calls.discard(self)


class AsyncReplicas:
    """The replicas behind one connection, if that is to a gateway.

    Args:
        connection: To the server that may be a gateway.
        make: Makes a connection.

    Attributes:
        are_listed: Whether the server has said that it lists them.
    """

    def __init__(
        self, connection: AsyncConnection, make: Callable[[ConnectOptions], AsyncConnection]
    ) -> None:
        self._connection, self._make = connection, make
        self._asking = AsyncLock()
        self.are_listed = False
        self._listings: dict[str, _Listing] = {}
        self._known: dict[tuple[str, str], AsyncDirect] = {}

    async def route(self, model_id: str, timeout_s: float, *, asks: bool = False) -> AsyncRoute | None:
        """Return the way to a replica; None for the server itself.

        Args:
            model_id: The id of a model or a trainer.
            timeout_s: The longest look-up, in seconds.
            asks: Whether to look up although no call has shown that the server is a gateway.
        """
        if not (self.are_listed or asks):
            return None
        listing = self._listings.get(model_id)
        if listing is None or listing.until < time.monotonic():
            async with self._asking:
                listing = self._listings.get(model_id)
                if listing is None or listing.until < time.monotonic():
                    listing = self._listings[model_id] = await self._listed(model_id, timeout_s)
        # Of two at random the better one: everybody's best one as of the last look-up would be overrun.
        result = listing.replicas
        pair = random.sample(result, min(2, len(result)))
        return AsyncRoute(min(pair, key=AsyncDirect.cost), listing) if pair else None

    def reopen(self, longest_s: float) -> None:
        """Go on with another channel to each replica after an interrupted call.

        Args:
            longest_s: The longest timeout of a call that may run on the old ones, in seconds.
        """
        for direct in list(self._known.values()):
            direct.connection.reopen(longest_s)

    async def close(self) -> None:
        """Close every connection."""
        known, self._known = self._known, {}
        self._listings.clear()
        for direct in known.values():
            await direct.connection.close()

    async def _listed(self, model_id: str, timeout_s: float) -> _Listing:
        request, limit_s = ListReplicasRequest(model_id=model_id), min(_REACHED_WITHIN_S, timeout_s)
        try:
            reply = await self._connection.call(self._connection.model_service.ListReplicas, request, limit_s)
        except (ServerUnavailableError, DeadlineExceededError):  # the gateway has gone: as before
            known = self._listings.get(model_id)
            return _Listing(known.replicas if known else (), time.monotonic() + _BROKEN_PAUSE_S)
        except TrocarError:  # the call itself will say it
            return _Listing((), time.monotonic() + _BROKEN_PAUSE_S)
        self.are_listed = reply.valid_s > 0
        reached = await self._reached(reply.replicas, limit_s)
        await self._forget()
        valid_s = reply.valid_s if reached or not reply.replicas else _FIRST_PAUSE_S
        return _Listing(reached, time.monotonic() + (valid_s or _LONGEST_PAUSE_S))

    async def _reached(self, listed: Iterable[Replica], limit_s: float) -> list[AsyncDirect]:
        """Return the replicas of a list that answer; none if the first one does not."""
        reached: list[AsyncDirect] = []
        for entry in sorted(listed, key=lambda entry: entry.waiting_s):
            direct = self._direct(entry)
            if direct is None or len(reached) == _MOST_CONNECTIONS:
                break
            direct.waiting_s = entry.waiting_s
            if not direct.is_reached:
                if time.monotonic() < direct.again_at:
                    continue
                direct.is_reached = await direct.connection.is_replica(entry.replica_id, limit_s)
                direct.tried()
            if direct.is_reached:
                reached.append(direct)
            elif not reached:
                break
        return reached

    def _direct(self, entry: Replica) -> AsyncDirect | None:
        """Return the replica of an entry; None if this client must not call it."""
        key, options = (entry.address, entry.replica_id), self._connection.options
        if is_loopback(entry.address) and not is_loopback(options.target):
            return None  # another machine's
        if key not in self._known:
            name = options.tls_name or certificate_host(options.addresses or (options.target,))
            try:
                chosen = replace(options, target=entry.address, direct=False, tls_name=name)
            except ValueError:  # a token would cross the network in plain text
                return None
            self._known[key] = AsyncDirect(self._make(chosen))
        return self._known[key]

    async def _forget(self) -> None:
        """Close connections to replicas that were in no list for a while.

        Not at once: another thread may be about to call one.
        """
        now = time.monotonic()
        if len(self._listings) > _MOST_NAMES:
            self._listings.clear()
        used = {direct for listing in list(self._listings.values()) for direct in listing.replicas}
        for key, direct in list(self._known.items()):
            if direct in used or direct.open_calls:
                direct.unlisted_at = 0.0
            elif not direct.unlisted_at:
                direct.unlisted_at = now
            elif now > max(direct.again_at, direct.unlisted_at + _KEPT_S):
                del self._known[key]
                await direct.connection.close()


class AsyncRoutedStreams:
    """The streams of one `extract_stream`: each on its way.

    Args:
        connection: To the server.
        model_id: The model.
        request_id: Sent with each.
        timeout_s: The longest look-up, in seconds.
    """

    def __init__(self, connection: AsyncConnection, model_id: str, request_id: str, timeout_s: float) -> None:
        self._connection, self._model_id, self._request_id = connection, model_id, request_id
        self._timeout_s = timeout_s
        self._route: AsyncRoute | None = None

    async def open(self, requests: AsyncIterator[bytes]) -> AsyncStream:
        """Open a stream."""
        replicas = self._connection.replicas
        if replicas is not None:
            self._route = await replicas.route(self._model_id, self._timeout_s, asks=True)
        chosen = self._connection if self._route is None else self._route.connection
        return chosen.extract_stream(requests, self._request_id)

    def attempts(self) -> Attempts:
        """Return the attempts at a stream; each result begins them anew."""
        return self._connection.attempts(resumes=True)

    async def learn(self, stream: AsyncStream) -> None:
        """Learn from a stream that has ended well whether its server is a gateway."""
        if self._connection.is_gateway is None and self._route is None:
            await self._connection.learn(stream)

    def converted(self, error: grpc.RpcError) -> Exception:
        """Return the exception of a failed stream."""
        return self._connection.converted(error, self._request_id)

    def falls_back(self, error: grpc.RpcError, problem: Exception) -> bool:
        """Whether a failed stream is to be opened again through the gateway."""
        return self._route is not None and self._route.falls_back(error, problem)

    def reopen(self) -> None:
        """Go on with another channel after an interrupted stream."""
        self._connection.reopen()

    def end(self) -> None:
        """The stream has ended."""
        if self._route is not None:
            self._route.end()
            self._route = None
