"""Folder of shared memory, and our file names in it.

A name exists only from the opening of a segment until its caller has mapped it. Meanwhile its file is locked,
see Note: [Abandoned files], so that another server can tell a name in use from one that a killed server left,
in whatever namespace of processes either runs.
"""

import re
import secrets
from pathlib import Path

from trocar_server.storage.janitor import create_locked, remove_abandoned

FOLDER = Path("/dev/shm")
"""Where Linux has shared memory, see shm_overview(7)."""
PREFIX = "trocar-"
_NAME = re.compile(r"trocar-[0-9a-f]{32}")


def create_file(folder: Path) -> tuple[str, int]:
    """Create an empty file with a random name that only this user can open; return name and descriptor.

    Nothing that exists already is opened or followed, including a symbolic link under the name.

    Raises:
        OSError: It cannot be created.
    """
    path, descriptor = create_locked(folder, lambda: PREFIX + secrets.token_hex(16))
    return path.name, descriptor


def remove_name(folder: Path, name: str) -> None:
    """Unlink a name; the memory stays as long as it is mapped."""
    (folder / name).unlink(missing_ok=True)


def remove_dead(folder: Path = FOLDER) -> int:
    """Remove the names that killed servers of this user left, and return how many there were."""
    return remove_abandoned(folder, _NAME)
