"""Call socket: a Unix socket on which one process of the same user makes prepared calls.

    with CallSocket(FOLDER) as listening:                # under a random name
        connection = await listening.connection(segment) # its file was handed over, its name is gone

Note: [Descriptors on a socket]
    The 64 bytes of a call are copied by the kernel and come whole (SOCK_SEQPACKET), so that a client cannot
    change them while the server reads them. A ring of descriptors in shared memory with two `eventfd` would
    save 6 us of a round trip. But the flags of an `eventfd` are shared by both processes: a client can make
    it blocking and fill its counter, and the next write of the server, on its event loop, never returns. The
    two ends of a socket have flags of their own, and the end of either process is seen at once.
"""

import asyncio
import os
import re
import secrets
import socket
import stat
import struct
import time
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Self

from trocar_server.shared_memory.folder import PREFIX
from trocar_server.shared_memory.segment import Segment

_NAME = re.compile(PREFIX + r"[0-9a-f]{32}\.calls")
_ABANDONED_S = 60.0
"""Names live for ten seconds at most; older ones were left by a killed server."""
_HELLO = b"trocar"


class CallSocket:
    """A listening socket for one connection; use it in a `with` block, after which its name is gone.

    Args:
        folder: The folder of shared memory.

    Raises:
        OSError: It cannot be created.
    """

    def __init__(self, folder: Path) -> None:
        self.path = folder / f"{PREFIX}{secrets.token_hex(16)}.calls"
        self._listening = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        try:
            self._listening.setblocking(False)
            self._listening.bind(os.fspath(self.path))
            self.path.chmod(0o600)  # before it listens, so that nobody can have connected
            self._listening.listen(1)
        except BaseException:
            self._close()
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._close()

    async def connection(self, segment: Segment) -> socket.socket:
        """Wait for a process of this user, hand over the file of a segment, and return the connection."""
        loop = asyncio.get_running_loop()
        while True:
            connection, _ = await loop.sock_accept(self._listening)
            try:
                if user_of(connection) == os.geteuid():
                    socket.send_fds(connection, [_HELLO], [segment.descriptor], socket.MSG_DONTWAIT)
                    return connection
            except OSError:
                pass
            except BaseException:
                connection.close()
                raise
            connection.close()

    def _close(self) -> None:
        self._listening.close()
        self.path.unlink(missing_ok=True)


def user_of(connection: socket.socket) -> int:
    """Return the user id of the process at the other end, as the kernel noted it; see unix(7)."""
    credentials = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
    user: int = struct.unpack("3i", credentials)[1]
    return user


def remove_dead_sockets(folder: Path) -> int:
    """Remove the names of call sockets that killed servers of this user left; return their number."""
    count = 0
    with suppress(OSError):
        for entry in list(os.scandir(folder)):
            with suppress(OSError):
                count += bool(_NAME.fullmatch(entry.name)) and _is_dead(entry) and _removed(entry)
    return count


def _is_dead(entry: "os.DirEntry[str]") -> bool:
    status = entry.stat(follow_symlinks=False)
    is_own = stat.S_ISSOCK(status.st_mode) and status.st_uid == os.geteuid()
    return is_own and time.time() - status.st_mtime > _ABANDONED_S


def _removed(entry: "os.DirEntry[str]") -> bool:
    Path(entry.path).unlink()
    return True
