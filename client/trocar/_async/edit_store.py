"""Stored edits: named lists of edits on the server, with asyncio."""

from __future__ import annotations

from typing import TYPE_CHECKING

from trocar._async.members import merged
from trocar._base.tables import Listing
from trocar._request.stored.stored_edits import EDITS_COLUMNS, check_edits_name, store_request, stored_edits
from trocar.errors import UnknownEditsError
from trocar_api.v1 import edit_store_pb2

if TYPE_CHECKING:
    from collections.abc import Sequence

    from trocar._async.connection import AsyncConnection
    from trocar._request.edits import Edit
    from trocar._request.stored.stored_edits import StoredEdits


class AsyncEditStore:
    """Lists of edits under a name: stored, listed, deleted."""

    def __init__(self, connection: AsyncConnection) -> None:
        self._connection = connection

    async def store_edits(
        self, model_id: str, name: str, edits: Edit | Sequence[Edit], *, replace: bool = False
    ) -> StoredEdits:
        """Store a list of edits on the server (on each of several servers), under a name for `edits`.

            await client.store_edits("resnet18", "ablate-3", [trocar.edit("layer3", "zero", channels=3)])
            maps = await client.extract("resnet18", images, taps="avgpool", edits="ablate-3")

        They belong to their owner, by token; others can neither see nor use them.

        Args:
            model_id: The id of a loaded model; the edits are checked against its example input.
            name: Lower case letters, digits and `._-`, at most 63 characters.
            edits: 1 to 256 edits, without swaps from a source; their arrays at most 8 MiB.
            replace: Whether a list of this name may be replaced.

        Raises:
            EditsExistError: A list of this name exists, and `replace` is False.
            EditError: An edit does not fit the model; see its subclasses.
            SelectorError: An edit selects a place that cannot be edited; see its subclasses.
            TypeError: Something in `edits` was not made with `edit`.
            ValueError: `name` cannot be a name, or `edits` is empty.
        """
        request = store_request(model_id, name, edits, replace=replace)

        async def ask(one: AsyncConnection) -> StoredEdits:
            return stored_edits((await one.call(one.edit_service.StoreEdits, request)).stored)

        return (await self._connection.everywhere(ask))[0]

    async def stored_edits(self, model_id: str | None = None) -> list[StoredEdits]:
        """Return your stored edits, by model and name.

        Args:
            model_id: Only those for this model; all when None.
        """
        request = edit_store_pb2.ListEditsRequest(model_id=model_id or "")

        async def ask(one: AsyncConnection) -> list[StoredEdits]:
            reply = await one.call(one.edit_service.ListEdits, request)
            return [stored_edits(message) for message in reply.stored]

        result = merged(await self._connection.everywhere(ask), lambda stored: (stored.model_id, stored.name))
        return Listing(result, EDITS_COLUMNS)

    async def delete_edits(self, model_id: str, name: str) -> None:
        """Delete stored edits, on each of several servers; running calls that use them are not affected.

        Args:
            model_id: The model of the edits.
            name: Their name.

        Raises:
            UnknownEditsError: You have stored no edits of this name for the model, on no server that answers.
            ValueError: `name` cannot be a name.
        """
        request = edit_store_pb2.DeleteEditsRequest(model_id=model_id, name=check_edits_name(name))

        async def delete(one: AsyncConnection) -> object:
            return await one.call(one.edit_service.DeleteEdits, request)

        await self._connection.delete_everywhere(delete, UnknownEditsError)
