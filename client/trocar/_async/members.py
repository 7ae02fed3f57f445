"""Members of a list of servers: a connection to each, for calls that are tied to one."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, TypeVar

from trocar.errors import NotFoundError, ServerUnavailableError

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Sequence

    from trocar._async.connection import AsyncConnection
    from trocar._transport.channel import ConnectOptions

Result = TypeVar("Result")


class AsyncMembers:
    """One connection for each server of a list; each connects with its first call.

    Args:
        options: Those of the connection to all servers.
        make: Makes a connection.
    """

    def __init__(self, options: ConnectOptions, make: Callable[[ConnectOptions], AsyncConnection]) -> None:
        self._connections = [
            make(replace(options, target=address, is_member=True)) for address in options.addresses
        ]
        self._server_ids: dict[AsyncConnection, str] = {}

    async def are_one(self) -> bool:
        """Whether they are one server, as the gateways of a cluster are: what one stores all have.

        Their ids say so. Each is asked until it has answered once; one that has not is taken for the same if
        the others are gateways.
        """
        known, connections = self._server_ids, list(self._connections)
        for connection in connections:
            if connection not in known:
                try:
                    known[connection] = await connection.server_id()
                except ServerUnavailableError:
                    continue
        have_answered = len(known) == len(connections)
        return len(set(known.values())) == 1 and (have_answered or all(one.is_gateway for one in known))

    async def home(self) -> AsyncConnection:
        """Return the connection to the server that stores new objects: the same one as long as it serves."""
        for connection in self._connections:
            if await _serves(connection):
                self._connections.remove(connection)
                self._connections.insert(0, connection)
                return connection
        return self._connections[0]

    async def find(self, ask: Callable[[AsyncConnection], Awaitable[Result]]) -> Result:
        """Call one server after the other, until one knows the name.

        Raises:
            ServerUnavailableError: No server that answers knows it, and one does not answer: it may have it.
            NotFoundError: All answer, and none knows it.
        """
        unavailable: ServerUnavailableError | None = None
        unknown: NotFoundError | None = None
        for connection in list(self._connections):
            try:
                return await ask(connection)
            except NotFoundError as error:
                unknown = error
            except ServerUnavailableError as error:
                unavailable = error
        raise unavailable or unknown or ServerUnavailableError("the list of servers is empty")

    async def everywhere(self, ask: Callable[[AsyncConnection], Awaitable[Result]]) -> list[Result]:
        """Call all servers that answer, and return their replies.

        Raises:
            ServerUnavailableError: None answers.
        """
        said: list[Result] = []
        unavailable: ServerUnavailableError | None = None
        for connection in list(self._connections):
            try:
                said.append(await ask(connection))
            except ServerUnavailableError as error:
                unavailable = error
        if unavailable is not None and not said:
            raise unavailable
        return said

    async def close(self) -> None:
        """Close all connections."""
        for connection in self._connections:
            await connection.close()


def merged(lists: Sequence[Sequence[Result]], key: Callable[[Result], object]) -> list[Result]:
    """Return the union of several servers' lists, without duplicates."""
    return list({key(entry): entry for entries in reversed(lists) for entry in reversed(entries)}.values())[
        ::-1
    ]


async def _serves(connection: AsyncConnection) -> bool:
    try:
        return await connection.is_serving()
    except ServerUnavailableError:
        return False
