"""Key of a cluster: proves to replicas that a caller is a gateway. A file of the data directory."""

import secrets
from contextlib import suppress
from pathlib import Path

from trocar_server.storage.disk_errors import disk_errors
from trocar_server.storage.durable import write_durably

_NAME = "cluster.key"


def make_cluster_key(data_dir: Path) -> None:
    """Create the key, unless it exists; only this user can read it.

    Raises:
        ServiceError: `STORAGE_UNAVAILABLE`, the data directory cannot be written.
    """
    with disk_errors("key of the cluster"), suppress(FileExistsError):
        write_durably(data_dir / _NAME, secrets.token_hex(32).encode(), is_new=True)


def cluster_key(data_dir: Path) -> str:
    """Return the key.

    Raises:
        ServiceError: `STORAGE_UNAVAILABLE`, it cannot be read on this node: the data directory is not shared.
    """
    with disk_errors("key of the cluster, in the data directory that all nodes share"):
        return (data_dir / _NAME).read_text(encoding="ascii")
