"""State folder of a server: everything that must not be lost, except weights that can be downloaded again.

    folder = settle(config)                     # a Path; state of earlier versions is in it now

    ~/.local/state/trocar       trainers, published models, fits, data sets, stored edits, tokens, the
                                server's id
    ~/.cache/trocar/weights     downloaded weights

# Note: [State of earlier versions]
Up to 0.1 everything was in `~/.cache/trocar`, which people and programs empty. Its content is moved, one name
after the other, each with an atomic rename. A server of an earlier version that still runs holds the lock of
`trainers`: then nothing is moved, and the old folder is used. The same applies if the two folders are on
different file systems. A name that exists in both stays where it is, and is logged.
"""

import contextlib
import errno
import os
from pathlib import Path
from typing import Any

import structlog

from trocar_server.config import ServerConfig, default_cache_dir
from trocar_server.errors import ServiceError
from trocar_server.storage.data_lock import LOCK_NAME, lock_folder
from trocar_server.storage.durable import make_folder, sync_folder

NAMES = ("trainers", "published", "fits", "datasets", "edits", "tokens.json", "server.id")
"""Of what a server keeps; `scratch` and `weights` can be made again."""

_log = structlog.get_logger("trocar")


def settle(config: ServerConfig, log: Any = None) -> Path:
    """State folder of a server; state that an earlier version left elsewhere is moved there first.

    Args:
        config: Names the folder; only the default one has earlier locations.
        log: Gets a line about each move that succeeded or failed; structlog's logger `trocar` when None.
    """
    folder, lines = config.data_dir.expanduser(), log or _log
    old = earlier_folder(config)
    if old is None:
        return folder
    names = [name for name in NAMES if _holds_state(old / name)]
    in_both = [name for name in names if _holds_state(folder / name)]
    if in_both:
        lines.warning(
            "state exists in two folders", used=str(folder), left=str(old), names=", ".join(in_both)
        )
    to_move = [name for name in names if name not in in_both]
    if not to_move:
        return folder
    return _moved(old, folder, to_move, lines)


def earlier_folder(config: ServerConfig) -> Path | None:
    """Folder with state of earlier versions, if there is some and `data_dir` was not set."""
    old = default_cache_dir()
    if config.has_own_data_dir or config.data_dir.expanduser() == old:
        return None
    return old if any(_holds_state(old / name) for name in NAMES) else None


def _moved(old: Path, folder: Path, names: list[str], log: Any) -> Path:
    lock = None
    try:
        if "trainers" in names:
            lock = lock_folder(old / "trainers")
        _move(old, folder, names)
    except (OSError, ServiceError) as error:
        why = error.message if isinstance(error, ServiceError) else error.strerror
        log.warning(
            "state was not moved; the old folder stays in use", used=str(old), wanted=str(folder), why=why
        )
        return old
    finally:
        if lock is not None:
            lock.release()
    log.warning("state was moved", old=str(old), new=str(folder), names=", ".join(names))
    return folder


def _move(old: Path, folder: Path, names: list[str]) -> None:
    """Move every name or none.

    Raises:
        OSError: No name was moved.
    """
    make_folder(folder)
    moved: list[str] = []
    try:
        for name in names:
            _clear_way(folder / name)
            os.rename(old / name, folder / name)  # noqa: PTH104 - one place for all operations, as in `durable`
            moved.append(name)
    except OSError:
        for name in moved:
            with contextlib.suppress(OSError):
                os.rename(folder / name, old / name)  # noqa: PTH104
        raise
    sync_folder(folder)
    sync_folder(old)


def _clear_way(path: Path) -> None:
    """Remove a folder that contains only the lock file that every start leaves."""
    with contextlib.suppress(FileNotFoundError, NotADirectoryError):
        (path / LOCK_NAME).unlink(missing_ok=True)
        path.rmdir()


def _holds_state(path: Path) -> bool:
    """Whether a path has state to keep; an unreadable one counts as having it."""
    try:
        return any(name != LOCK_NAME for name in os.listdir(path))  # noqa: PTH208
    except OSError as error:
        if error.errno == errno.ENOTDIR:
            return True  # a file
        return error.errno != errno.ENOENT
