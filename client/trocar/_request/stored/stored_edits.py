"""Stored edits: requests for named lists of edits on the server, and its replies."""

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime

from trocar._base.names import few
from trocar._base.tables import Columns, html_table, size_text
from trocar._request.edit_texts import edit_text
from trocar._request.edits import Edit
from trocar._request.stored.stored_times import stored_time
from trocar_api.stored_names import is_stored_name
from trocar_api.v1 import edit_store_pb2 as pb
from trocar_api.v1.tensor_pb2 import TensorChunk


@dataclass(frozen=True)
class StoredEdits:
    """A list of edits under a name; prints as a list."""

    model_id: str
    """The model that it is for."""
    name: str
    """What stands for it in `edits`."""
    edits: tuple[str, ...]
    """The edits, as they would be written; arrays show as their dtype and shape."""
    byte_count: int
    """Bytes of their arrays."""
    stored_at: datetime
    """When it was stored, in UTC."""
    problem: str = ""
    """Why the server cannot read it; model and name are empty where its file does not say them any more."""

    def __str__(self) -> str:
        if self.problem:
            return f"{self.name or '?'}  {self.model_id}, cannot be read: {self.problem}"
        size = f", {self.byte_count:,} bytes of arrays" if self.byte_count else ""
        head = f"{self.name}  {self.model_id}, stored {self.stored_at:%Y-%m-%d %H:%M:%S} UTC{size}"
        return "\n".join([head, *(f"  {line}" for line in self.edits)])

    def __repr__(self) -> str:
        return f"<StoredEdits {self.name or '?'} of {self.model_id or '?'}: {few(self.edits)}>"

    def _repr_html_(self) -> str:
        """Show the edits, a row each, in a notebook."""
        caption = self.problem or f"{self.name}, stored {self.stored_at:%Y-%m-%d %H:%M:%S} UTC"
        return html_table((f"edits of {self.model_id}",), [(line,) for line in self.edits], caption)


EDITS_COLUMNS: Columns[StoredEdits] = {
    "model": lambda stored: stored.model_id,
    "name": lambda stored: stored.name,
    "edits": lambda stored: stored.problem or few(stored.edits),
    "arrays": lambda stored: size_text(stored.byte_count) if stored.byte_count else "",
    "stored": lambda stored: f"{stored.stored_at:%Y-%m-%d %H:%M} UTC",
}
"""The columns of a list of stored edits."""


def check_edits_name(name: str) -> str:
    """Return the name of stored edits as it is.

    Raises:
        ValueError: It cannot be one.
    """
    if not is_stored_name(name):
        raise ValueError(
            f"{name!r} cannot be the name of stored edits: small letters, digits and `._-`, 63 at most; "
            "an edit is created with trocar.edit(selector, operation, ...)"
        )
    return name


def store_request(
    model_id: str, name: str, edits: Edit | Sequence[Edit], *, replace: bool
) -> pb.StoreEditsRequest:
    """Build the request of `Client.store_edits`; see there for the arguments.

    Raises:
        TypeError: An edit is none.
        ValueError: The name cannot be one, or there are no edits.
    """
    chosen: list[object] = [edits] if isinstance(edits, (Edit, str)) else [*edits]
    own = [entry for entry in chosen if isinstance(entry, Edit)]
    if len(own) < len(chosen):
        raise TypeError(
            f"{edits!r}: stored edits are created with trocar.edit and cannot be names of stored edits"
        )
    if not own:
        raise ValueError("there are no edits to store; give at least one")
    payloads = [payload for entry in own for payload in entry.payloads()]
    return pb.StoreEditsRequest(
        model_id=model_id,
        name=check_edits_name(name),
        edits=[entry.to_wire() for entry in own],
        is_replacing=replace,
        chunks=[TensorChunk(payload_index=index, data=bytes(data)) for index, data in enumerate(payloads)],
    )


def stored_edits(message: pb.StoredEdits) -> StoredEdits:
    """Convert stored edits of the server.

    Raises:
        BadReplyError: It was stored at an impossible time.
    """
    return StoredEdits(
        model_id=message.model_id,
        name=message.name,
        edits=tuple(edit_text(entry) for entry in message.edits),
        byte_count=message.byte_count,
        stored_at=stored_time(message.name, message.stored_at_s),
        problem=message.problem,
    )
