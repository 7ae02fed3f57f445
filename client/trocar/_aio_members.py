"""A client of several servers: what belongs to one of them goes there, the rest to all in turn."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, TypeVar

from trocar.errors import NotFoundError, ServerUnavailableError

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Sequence
    from typing import Any

    from trocar._channel import ConnectOptions

Found = TypeVar("Found")


class AsyncMembers:
    """One client for each server of a list; they connect with their first call.

    Args:
        options: Those of the client of all of them.
        make: Makes a client.
    """

    def __init__(self, options: ConnectOptions, make: Callable[[ConnectOptions], Any]) -> None:
        self._clients: list[Any] = [make(replace(options, target=address)) for address in options.addresses]

    async def home(self) -> Any:
        """Return the client of the server that keeps what is made next: the same one as long as it serves."""
        for client in self._clients:
            if await _serves(client):
                self._clients.remove(client)
                self._clients.insert(0, client)
                return client
        return self._clients[0]

    async def found(self, ask: Callable[[Any], Awaitable[Found]]) -> Found:
        """Ask one server after the other, until one knows what is meant.

        Raises:
            ServerUnavailableError: None that answers knows it, and one does not answer: it may be there.
            NotFoundError: All answer, and none knows it.
        """
        unavailable: ServerUnavailableError | None = None
        unknown: NotFoundError | None = None
        for client in list(self._clients):
            try:
                return await ask(client)
            except NotFoundError as error:
                unknown = error
            except ServerUnavailableError as error:
                unavailable = error
        raise unavailable or unknown or ServerUnavailableError("there is no server")

    async def everywhere(self, ask: Callable[[Any], Awaitable[Found]]) -> list[Found]:
        """Ask all servers that answer, and return what they say.

        Raises:
            ServerUnavailableError: None answers.
        """
        said: list[Found] = []
        unavailable: ServerUnavailableError | None = None
        for client in list(self._clients):
            try:
                said.append(await ask(client))
            except ServerUnavailableError as error:
                unavailable = error
        if unavailable is not None and not said:
            raise unavailable
        return said

    async def close(self) -> None:
        """Close all connections."""
        for client in self._clients:
            await client.close()


def merged(lists: Sequence[Sequence[Found]], key: Callable[[Found], object]) -> list[Found]:
    """Return what several servers have, what they have in common once."""
    return list({key(entry): entry for entries in reversed(lists) for entry in reversed(entries)}.values())[
        ::-1
    ]


async def _serves(client: Any) -> bool:
    try:
        return bool(await client.is_serving())
    except ServerUnavailableError:
        return False
