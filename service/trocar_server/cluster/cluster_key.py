"""Key of a cluster: proves to replicas that a caller is a gateway. A file of the data directory."""

import os
import secrets
from contextlib import suppress
from pathlib import Path

from trocar_server.storage.disk_errors import disk_errors

_NAME = "cluster.key"
_FLAGS = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW


def make_cluster_key(data_dir: Path) -> None:
    """Create the key, if there is none; only this user can read it.

    Raises:
        ServiceError: `STORAGE_UNAVAILABLE`, the data directory cannot be written.
    """
    with disk_errors("key of the cluster"), suppress(FileExistsError):
        descriptor = os.open(data_dir / _NAME, _FLAGS, 0o600)
        with os.fdopen(descriptor, "w", encoding="ascii") as file:
            file.write(secrets.token_hex(32))


def cluster_key(data_dir: Path) -> str:
    """Return the key.

    Raises:
        ServiceError: `STORAGE_UNAVAILABLE`, it cannot be read on this node: the data directory is not shared.
    """
    with disk_errors("key of the cluster, in the data directory that all nodes share"):
        return (data_dir / _NAME).read_text(encoding="ascii")
