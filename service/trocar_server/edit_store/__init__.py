"""Edit store: named lists of edits on disk, one owner each. The content of an edit is opaque here.

store = EditStore(data_dir / "edits")
store.put("alice", "resnet18", "ablate-3", description, tensors)
store.get("alice", "resnet18", "ablate-3").description
[entry.name for entry in store.entries("alice")]
"""

from trocar_server.edit_store.edit_store import (
    MAX_BYTES,
    MAX_DESCRIPTION_BYTES,
    MAX_LISTS,
    MAX_UNPROVEN,
    EditStore,
    UnreadableEntry,
    corrupt,
)
from trocar_server.edit_store.files import StoredEntry

__all__ = [
    "MAX_BYTES",
    "MAX_DESCRIPTION_BYTES",
    "MAX_LISTS",
    "MAX_UNPROVEN",
    "EditStore",
    "StoredEntry",
    "UnreadableEntry",
    "corrupt",
]
