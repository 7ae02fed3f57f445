"""Memory limit of this process on Linux: of its container, its systemd service, or the machine.

cgroup_limit()          # 2147483648; None without a limit
memory_limit_bytes()    # the machine's memory without a limit
"""

import os
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path, PurePosixPath

_OWN = Path("/proc/self/cgroup")
_ROOT = Path("/sys/fs/cgroup")
_UNLIMITED = 1 << 60
"""Version 1 has no word for no limit, but a number near 2 ** 63."""


def limit_files(own: Path = _OWN, root: Path = _ROOT) -> list[Path]:
    """Return the files that may have a limit: of the group of this process and all its parents.

    Within a container the root is the container's group. Of version 1 only the root is read.

    Args:
        own: Names the groups of this process.
        root: Where control groups are mounted.
    """
    group = root / _group(own)
    folders = [group, *(folder for folder in group.parents if folder.is_relative_to(root))]
    return [*(folder / "memory.max" for folder in folders), root / "memory" / "memory.limit_in_bytes"]


def cgroup_limit(files: Iterable[Path] | None = None) -> int | None:
    """Return the smallest limit in bytes, or None.

    Args:
        files: Those of this process when None.
    """
    limits = []
    for file in limit_files() if files is None else files:
        with suppress(OSError, ValueError):  # it does not exist, or contains `max`
            limits.append(int(file.read_text()))
    return min((limit for limit in limits if limit < _UNLIMITED), default=None)


def memory_limit_bytes(files: Iterable[Path] | None = None) -> int:
    """Return the memory that this process may use, in bytes: the machine's, or its group's lower limit.

    Args:
        files: As in `cgroup_limit`.
    """
    machine = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    limit = cgroup_limit(files)
    return machine if limit is None else min(machine, limit)


def _group(own: Path) -> PurePosixPath:
    """Return the group of version 2 relative to the root; the root if it is outside of what is mounted."""
    try:
        lines = own.read_text().splitlines()
    except (OSError, ValueError):
        lines = []
    path = next((line.removeprefix("0::") for line in lines if line.startswith("0::")), "/")
    group = PurePosixPath(path.lstrip("/"))
    return PurePosixPath() if ".." in group.parts else group
