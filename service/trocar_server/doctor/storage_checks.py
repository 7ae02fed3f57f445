"""Storage checks of the data directory: write access, free space, leftovers, lock."""

import fcntl
import os
import shutil
import time
from collections.abc import Iterator
from contextlib import closing, suppress
from pathlib import Path

from trocar_server.app.state_folder import earlier_folder
from trocar_server.config import ServerConfig
from trocar_server.doctor.finding import Finding, fail, ok, warn
from trocar_server.storage.durable import PARTIAL, PartialFile
from trocar_server.storage.folder_lease import described, lease_holder

_LITTLE_ROOM = 2 << 30
_SLOW_FSYNC_S = 0.5
_PROBE_BYTES = 1 << 20
_OLD_S = 24 * 3600


def used_folder(config: ServerConfig) -> Path:
    """Current state folder: an earlier version's is moved only when a server starts."""
    folder = config.data_dir.expanduser()
    return folder if folder.is_dir() else earlier_folder(config) or folder


def check_data_dir(config: ServerConfig) -> Iterator[Finding]:
    """Write a file of 1 MiB, sync it and remove it again."""
    old = earlier_folder(config)
    if old is not None:
        text = f"an earlier version kept state in '{old}'"
        yield warn("data_dir", text, f"the next start moves it to '{config.data_dir}', or says why it cannot")
    folder = config.data_dir.expanduser()
    existing = next(path for path in (folder, *folder.absolute().parents) if path.exists())
    if existing != folder:
        state = "will be created" if os.access(existing, os.W_OK) else ""
        if not state:
            yield fail(
                "data_dir",
                f"'{folder}' does not exist and cannot be created",
                "set data_dir to a folder that you can write",
            )
            return
        yield ok("data_dir", f"'{folder}' {state}")
        return
    try:
        seconds = _write_s(folder)
    except OSError as error:
        yield fail(
            "data_dir",
            f"'{folder}' cannot be written: {error.strerror}",
            "make the server's user its owner, or set data_dir to another folder",
        )
        return
    text = f"'{folder}' can be written, 1 MiB in {seconds * 1000:.0f} ms"
    if seconds > _SLOW_FSYNC_S:
        yield warn("data_dir", text, "checkpoints wait for this disk; put data_dir on a local disk")
    else:
        yield ok("data_dir", text)


def check_room(config: ServerConfig) -> Iterator[Finding]:
    """Check the room on the data directory's disk."""
    folder = config.data_dir.expanduser().absolute()
    existing = next(path for path in (folder, *folder.parents) if path.exists())
    free = shutil.disk_usage(existing).free
    text = f"{free / 2**30:.1f} GiB free"
    if free < _LITTLE_ROOM:
        yield warn("disk room", text, "weights, checkpoints and data sets are stored there; free some space")
    else:
        yield ok("disk room", text)


def check_lock(config: ServerConfig) -> Iterator[Finding]:
    """Check whether a server has locked the data directory."""
    path = used_folder(config) / "trainers" / "lock"
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
    except OSError:
        yield ok("lock", "no server uses the data directory")
        return
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
        yield ok("lock", "no server uses the data directory")
    except BlockingIOError:
        holder = os.pread(descriptor, 20, 0).decode("ascii", "replace").strip()
        yield warn(
            "lock",
            f"the server of process {holder} uses the data directory",
            "a second server needs another data_dir; expected if it is this server",
        )
    finally:
        os.close(descriptor)


def check_lease(config: ServerConfig) -> Iterator[Finding]:
    """Check whether a cluster uses the data directory, or the folder of a cluster's trainers."""
    for folder in config.cluster_folders:
        holder = lease_holder(folder)
        if holder is not None:
            yield warn(
                "lease",
                f"{described(holder)} uses '{folder}'",
                "a second cluster needs another data_dir and trainers_dir; expected if it is this cluster",
            )
            return
    yield ok("lease", "no cluster uses the data directory")


def check_leftovers(config: ServerConfig) -> Iterator[Finding]:
    """Count the files that a killed server was writing."""
    folder = used_folder(config)
    limit = time.time() - _OLD_S
    old = [path for path in _partial(folder) if path.lstat().st_mtime < limit]
    if old:
        size = sum(path.lstat().st_size for path in old) / 2**20
        text = f"{len(old)} files, {size:.0f} MiB, such as '{old[0].relative_to(folder)}'"
        yield warn(
            "leftovers",
            text,
            "the next start of the server removes its own leftovers; check the rest by hand",
        )
    else:
        yield ok("leftovers", "none")


def _partial(folder: Path) -> Iterator[Path]:
    for suffix in (PARTIAL, ".part"):
        with suppress(OSError):
            yield from folder.rglob(f"*{suffix}")


def _write_s(folder: Path) -> float:
    with closing(PartialFile(folder, "doctor-")) as probe:
        started = time.perf_counter()
        probe.write(bytes(_PROBE_BYTES))
        probe.sync()
        return time.perf_counter() - started
