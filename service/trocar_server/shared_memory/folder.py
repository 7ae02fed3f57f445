"""The folder of shared memory and the names in it that are ours.

A name lives only from the opening of a segment to the moment when its caller has mapped it. For so long its
file is locked (`flock`), so that another server can tell a name in use from one that a killed server left,
in whatever namespace of processes either runs.
"""

import fcntl
import os
import re
import secrets
import stat
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

FOLDER = Path("/dev/shm")
"""Where Linux has shared memory, see shm_overview(7)."""
PREFIX = "trocar-"
_NAME = re.compile(r"trocar-[0-9a-f]{32}")
_ATTEMPTS = 8
_CREATE = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
_LOOK = os.O_RDWR | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC


def create_file(folder: Path) -> tuple[str, int]:
    """Make a new empty file with a random name that only this user can open; return name and descriptor.

    Nothing that is there already is opened or followed, a link that somebody has put under the name included.

    Raises:
        OSError: It cannot be made.
    """
    for _ in range(_ATTEMPTS):
        name = PREFIX + secrets.token_hex(16)
        try:
            descriptor = os.open(folder / name, _CREATE, 0o600)
        except FileExistsError:
            continue
        # A janitor may have come between the two calls: then the file has no name any more.
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        if os.fstat(descriptor).st_nlink == 1:
            return name, descriptor
        os.close(descriptor)
    raise FileExistsError("no free name in the folder of shared memory")


def remove_name(folder: Path, name: str) -> None:
    """Take a name away; the memory stays as long as somebody has it mapped."""
    (folder / name).unlink(missing_ok=True)


def remove_dead(folder: Path = FOLDER) -> int:
    """Remove the names that killed servers of this user left, and return how many there were."""
    try:
        names = [path.name for path in folder.iterdir() if _NAME.fullmatch(path.name)]
    except OSError:
        return 0
    return sum(_removed(folder, name) for name in names)


def _removed(folder: Path, name: str) -> bool:
    with suppress(OSError), _opened(folder / name) as descriptor:
        found = os.fstat(descriptor)
        if not stat.S_ISREG(found.st_mode) or found.st_uid != os.geteuid():
            return False
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        (folder / name).unlink()
        return True
    return False


@contextmanager
def _opened(path: Path) -> Iterator[int]:
    descriptor = os.open(path, _LOOK)
    try:
        yield descriptor
    finally:
        os.close(descriptor)
