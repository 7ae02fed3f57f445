"""Folder lease: only one cluster at a time uses a folder, with as many processes on as many nodes as it has.

    lease = take_lease(data_dir, new_holder(cluster_id, "10.0.0.5:6379"))
    lease.release()

# Note: [Lease of a folder]
Every process of the cluster that writes below the folder holds a shared lock of the same file, whose content
says which cluster that is. Whoever gets the lock alone, even for a moment, knows that no process of any
cluster is left, writes its own name and then shares the lock. The kernel (on NFS the server) releases the
lock of a process that dies, however it dies, so that the folder is free when the last one has ended, and not
before: replicas that outlive their head still write. It needs no clocks and no heartbeats, and the file
stays, as in `data_lock`.
"""

import fcntl
import json
import os
import socket
import time
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path

from trocar_api.reasons import ErrorReason
from trocar_server.errors import ServiceError
from trocar_server.storage.data_lock import FolderLock
from trocar_server.storage.disk_errors import disk_errors
from trocar_server.storage.durable import make_folder

LEASE_NAME = "cluster.lease"
"""Name of the locked file in the folder."""
OTHER_CLUSTER = "other_cluster"
"""Detail of the error that says that another cluster has the folder."""

_FLAGS = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW
_MAX_BYTES = 4096
_ALONE_FOR_S, _AGAIN_S = 5.0, 0.01
"""Nobody keeps the lock alone, except a process that is stopped just then."""


@dataclass(frozen=True)
class Holder:
    """A cluster that uses a folder.

    Attributes:
        cluster_id: Its id, which no other cluster ever has.
        where: The address of its Ray.
        since_s: When it first took the folder, in seconds since 1970.
        host: The machine on which it was started.
    """

    cluster_id: str
    where: str
    since_s: float
    host: str = ""


def new_holder(cluster_id: str, where: str) -> Holder:
    """Return a cluster that begins now, on this machine."""
    return Holder(cluster_id, where, time.time(), socket.gethostname())


def take_lease(folder: Path, holder: Holder) -> FolderLock:
    """Take a folder for this process's cluster, or share it with its other processes; it is made if missing.

    See Note: [Lease of a folder].

    Raises:
        ServiceError: `STORAGE_UNAVAILABLE`, another cluster has the folder, with the detail `OTHER_CLUSTER`;
            or the disk fails.
    """
    with disk_errors("lease of the cluster's folder"):
        make_folder(folder)
        descriptor = os.open(folder / LEASE_NAME, _FLAGS, 0o600)
        try:
            if not _is_shared(descriptor, holder):
                raise _taken(folder, _read(descriptor))
        except BaseException:
            os.close(descriptor)
            raise
    return FolderLock(descriptor)


def lease_holder(folder: Path) -> Holder | None:
    """Return the cluster that uses a folder now; None if no process of any does.

    Raises:
        OSError: The file cannot be read.
    """
    try:
        descriptor = os.open(folder / LEASE_NAME, _FLAGS & ~os.O_CREAT)
    except FileNotFoundError:
        return None
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return _read(descriptor) or Holder("", "", 0.0)
    else:
        return None
    finally:
        os.close(descriptor)


def described(holder: Holder | None) -> str:
    """Return who uses a folder, and since when, for an operator."""
    if holder is None or not holder.cluster_id:
        return "a cluster"
    since = time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime(holder.since_s))
    return f"a cluster (Ray at {holder.where}, started on {holder.host}, since {since})"


def _is_shared(descriptor: int, holder: Holder) -> bool:
    """Lock the file together with the processes of this cluster; False if it is another's."""
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        pass  # processes of a cluster are there, or another one looks
    else:
        if not _is_of(descriptor, holder):
            _write(descriptor, holder)
    # Alone first and then shared is not one step: another cluster may have come between.
    give_up = time.monotonic() + _ALONE_FOR_S
    while True:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:  # whoever has it alone writes a line or only looks
            if time.monotonic() > give_up:
                return False
            time.sleep(_AGAIN_S)
        else:
            return _is_of(descriptor, holder)


def _is_of(descriptor: int, holder: Holder) -> bool:
    known = _read(descriptor)
    return known is not None and known.cluster_id == holder.cluster_id


def _read(descriptor: int) -> Holder | None:
    """Return the holder that the file names; None if it names none, or is just being written."""
    with suppress(ValueError, TypeError):
        return Holder(**json.loads(os.pread(descriptor, _MAX_BYTES, 0)))
    return None


def _write(descriptor: int, holder: Holder) -> None:
    """Replace the content in place: with another file, two clusters could lock one of the same name each."""
    os.ftruncate(descriptor, 0)
    os.pwrite(descriptor, json.dumps(asdict(holder)).encode()[:_MAX_BYTES], 0)
    os.fsync(descriptor)


def _taken(folder: Path, holder: Holder | None) -> ServiceError:
    stop = f"`trocar cluster stop --ray {holder.where}`" if holder is not None and holder.where else "stop it"
    return ServiceError(
        ErrorReason.STORAGE_UNAVAILABLE,
        f"{described(holder)} uses '{folder}', and two would take each other's trainers: stop that one first "
        f"({stop}), or give this one another data_dir and trainers_dir; if it was killed, try again when its "
        "last process has ended, which frees the folder",
        **{OTHER_CLUSTER: holder.cluster_id if holder is not None else ""},
    )
