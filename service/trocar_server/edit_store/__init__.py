"""Lists of edits on disk, each under a name and of one principal. What an edit is, is not known here.

store = EditStore(data_dir / "edits")
store.put("alice", "resnet18", "ablate-3", description, tensors)
store.get("alice", "resnet18", "ablate-3").description
[entry.name for entry in store.entries("alice")]
"""

from trocar_server.edit_store.files import StoredEntry
from trocar_server.edit_store.store import (
    MAX_BYTES,
    MAX_DESCRIPTION_BYTES,
    MAX_LISTS,
    MAX_PRINCIPALS,
    EditStore,
    corrupt,
)

__all__ = [
    "MAX_BYTES",
    "MAX_DESCRIPTION_BYTES",
    "MAX_LISTS",
    "MAX_PRINCIPALS",
    "EditStore",
    "StoredEntry",
    "corrupt",
]
