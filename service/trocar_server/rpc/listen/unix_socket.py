"""Addresses to listen on: TCP ports, and Unix sockets (`unix:/run/trocar.sock`) for callers of the same user.

gRPC (1.81) removes any socket at the path, even that of a listening server, and leaves the access to its own
to the umask. Here a socket in use is kept, and only the owner may connect to ours.
"""

import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from stat import S_ISSOCK
from threading import Lock
from urllib.parse import quote

from trocar_api.reasons import ErrorReason
from trocar_server.errors import ServiceError

PREFIX = "unix:"
MAX_PATH_BYTES = 107
"""Of Linux, `sun_path` in unix(7), without the NUL at its end."""

_OTHERS = 0o077
_umask_lock = Lock()  # the umask is per process, and each user must restore the previous one


def socket_path(host: str) -> Path | None:
    """Socket file of a `unix:` host, or None for a TCP host.

    Raises:
        ServiceError: `INVALID_ARGUMENT`, the path is empty, too long or not one that gRPC can reach.
    """
    if not host.startswith(PREFIX):
        return None
    text = host.removeprefix(PREFIX)
    if not text or "\0" in text or "," in text:
        raise _refused(f"'{host[:120]}' is not a usable path; write unix:/run/trocar.sock, without commas")
    path = Path(text).absolute()
    length = len(os.fsencode(path))
    if length > MAX_PATH_BYTES:
        raise _refused(
            f"the path of a Unix socket has at most {MAX_PATH_BYTES} bytes, this one has {length}; "
            "choose a shorter folder"
        )
    return path


def target_of(path: Path) -> str:
    """Socket file as a gRPC target, for clients."""
    return PREFIX + quote(os.fsencode(path))


def host_port(host: str, port: int) -> str:
    """TCP host and port as a gRPC target, for servers and clients; an IPv6 address is put in brackets."""
    return f"[{host}]:{port}" if ":" in host and not host.startswith("[") else f"{host}:{port}"


def check_free(path: Path) -> None:
    """Refuse a path that is in use; a socket without a listener is free.

    Raises:
        ServiceError: `INVALID_ARGUMENT`.
    """
    try:
        mode = path.lstat().st_mode
    except FileNotFoundError:
        return
    except OSError as error:
        raise _refused(f"cannot listen at '{path.name}': {error.strerror}") from None
    if not S_ISSOCK(mode):
        raise _refused(f"'{path.name}' exists and is not a socket; choose another path, or remove it")
    if _is_answered(path):
        raise _refused(f"another server is listening at '{path.name}'; stop it, or choose another path")


@contextmanager
def owner_only(path: Path) -> Iterator[None]:
    """Make a socket that is bound inside the context accessible to its owner alone.

    Nothing to do if no other user can enter the folder. Otherwise the umask is set, for the whole process and
    for that moment: a mode that is set afterwards would come too late.
    """
    if not path.parent.stat().st_mode & _OTHERS:
        yield
        return
    with _umask_lock:
        before = os.umask(0o177)
        try:
            yield
        finally:
            os.umask(before)


def _is_answered(path: Path) -> bool:
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        probe.setblocking(False)
        try:
            probe.connect(os.fspath(path))
        except (ConnectionRefusedError, FileNotFoundError):
            return False
        except OSError:  # its queue is full, or it belongs to another user: treated as in use
            return True
    return True


def _refused(problem: str) -> ServiceError:
    return ServiceError(ErrorReason.INVALID_ARGUMENT, problem)
