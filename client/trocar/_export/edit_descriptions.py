"""Edit descriptions: edits in an output's description, since values must not change when a job resumes."""

import hashlib
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from trocar._base.names import name_hint
from trocar.errors import UnknownEditsError

if TYPE_CHECKING:
    from trocar._request.edits import Edit
    from trocar._request.stored.stored_edits import StoredEdits


def names_in(edits: "Sequence[str | Edit]") -> list[str]:
    """Return the names of stored edits among edits."""
    return [entry for entry in edits if isinstance(entry, str)]


def describe_edits(edits: "Sequence[str | Edit]", stored: "Sequence[StoredEdits]") -> list[dict[str, Any]]:
    """Describe edits as JSON: each as its text and a hash of everything in it.

    Stored ones are described by their texts and by when they were stored: arrays and long lists of positions
    do not show in the texts, so storing them again begins a new run.

    Args:
        edits: Edits, and names of stored ones.
        stored: Stored edits of the model.

    Raises:
        UnknownEditsError: A name is not among the stored ones.
    """
    known = {entry.name: entry for entry in stored}
    return [_stored(entry, known) if isinstance(entry, str) else _edit(entry) for entry in edits]


def _edit(edit: "Edit") -> dict[str, Any]:
    digest = hashlib.sha256(edit.to_wire().SerializeToString(deterministic=True))
    for payload in edit.payloads():
        digest.update(payload)
    return {"edit": repr(edit), "sha256": digest.hexdigest()}


def _stored(name: str, known: "dict[str, StoredEdits]") -> dict[str, Any]:
    if name not in known:
        raise UnknownEditsError(
            f"no edits are stored under {name!r} for this model; {name_hint(name, known)}"
        )
    entry = known[name]
    return {"stored": name, "edits": list(entry.edits), "stored_at": entry.stored_at.isoformat()}
