"""Server id: identifies a data directory. Stored state belongs to exactly one id."""

import hashlib
import re
import uuid
from dataclasses import dataclass
from pathlib import Path

import structlog

from trocar_server.storage.data_lock import LOCK_NAME
from trocar_server.storage.durable import DamagedError, make_folder, read_whole, remove_partial, write_durably

_NAME = "server.id"
_ID = re.compile(r"([0-9a-f]{32})(?: ([0-9a-f]{8}))?\n")
"""The id and the first digits of its sha256, which files of earlier versions lack."""
_log = structlog.get_logger("trocar")


@dataclass(frozen=True)
class ServerId:
    """The id of a server, with a note for its callers."""

    value: str
    problem: str = ""
    """Why it differs from the data directory's earlier id; empty if it does not."""


def server_id(data_dir: Path) -> ServerId:
    """Id of a data directory, created by its first server.

    If it cannot be read or written, the id is temporary, for this process, and the file is unchanged. A
    damaged one is replaced: clients of several servers then see this one as another server.
    """
    path, made = data_dir / _NAME, uuid.uuid4().hex
    remove_partial(data_dir, f"{path.stem}-")
    problem = ""
    try:
        match = _ID.fullmatch(read_whole(path, 64).decode("ascii", "replace"))
        if match and match[2] in (None, _check(match[1])):
            return ServerId(match[1])
        problem = "the server's id file was damaged; created a new id"
    except FileNotFoundError:
        if any(path.name != LOCK_NAME for path in data_dir.glob("*/*")):  # which a first start leaves, too
            problem = (
                "the server's id file is missing, though the data directory holds state; created a new id"
            )
    except DamagedError as error:
        problem = f"the server's id file was damaged ({error}); created a new id"
    except OSError as error:
        problem = f"the server's id cannot be read ({error.strerror}); this process uses a temporary id"
        _log.error("the server's id", problem=problem)
        return ServerId(made, problem)
    try:
        make_folder(data_dir)
        write_durably(path, f"{made} {_check(made)}\n".encode())
    except (OSError, DamagedError) as error:
        why = getattr(error, "strerror", "") or str(error)
        problem = (
            f"the data directory cannot be written ({why}); the server uses a temporary id for this process"
        )
    if problem:
        _log.warning("the server's id", problem=problem)
    return ServerId(made, problem)


def _check(server_id: str) -> str:
    return hashlib.sha256(server_id.encode()).hexdigest()[:8]
