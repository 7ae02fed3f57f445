"""The id of a data directory: what a server keeps is at the server of this id, and at no other."""

import re
import uuid
from pathlib import Path

import structlog

from trocar_server.durable import DamagedError, make_folder, read_whole, remove_abandoned, write_durably

_NAME = "server.id"
_ID = re.compile(rb"[0-9a-f]{32}\n")
_log = structlog.get_logger("trocar")


def server_id(data_dir: Path) -> str:
    """Return the id of a data directory, made with its first server.

    Where it cannot be written, the id is that of this process: what it keeps does not outlive it anyway.
    """
    path = data_dir / _NAME
    remove_abandoned(data_dir, f"{path.stem}-")
    try:
        content = read_whole(path, 64)
        if _ID.fullmatch(content):
            return content.decode().strip()
    except (OSError, DamagedError):
        pass
    made = uuid.uuid4().hex
    try:
        make_folder(data_dir)
        write_durably(path, f"{made}\n".encode())
    except OSError as error:
        _log.warning("the data directory cannot be written", problem=error.strerror)
    return made
