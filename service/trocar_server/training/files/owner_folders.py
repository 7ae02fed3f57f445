"""Folders of trainers on storage that several servers share: each trainer has one owner, and it can change.

    folders = OwnerFolders(root, "replica-b")
    folders.own                                 # root/replica-b: a `TrainerStore`'s folder
    folders.take_over("replica-a", trainer_id)  # the trainer is in root/replica-b from here on

    ROOT/<owner>/<trainer id>/                  an owner is one run of one server, its name is never reused
    ROOT/<owner>/<trainer id>/from/             while a takeover is under way, or after it was cut off

# Note: [Fence by removal]
An owner that is believed dead may only have been slow, and may write later. So a takeover does not rename
the trainer's folder alone: a writer that has resolved the old path, or whose NFS client has it in its cache,
would then write into the renamed folder. The files are moved one by one into a folder of the new owner, and
the old one is removed, with `rmdir`, which succeeds only if it is empty, and otherwise the rest is moved,
too. Every write is committed by a rename within that folder, and in a removed folder all names fail to be
created: with ENOENT, or ESTALE on NFS. So a write of the old owner is either moved, or fails; there is no
moment between a check and a commit. It needs no locks, no clocks, and nothing but the atomicity of rename and
rmdir.
"""

import contextlib
import errno
import os
from pathlib import Path

from trocar_server.errors import ServiceError
from trocar_server.storage.disk_errors import disk_errors
from trocar_server.storage.durable import make_folder, sync_folder
from trocar_server.training.files.trainer_janitor import RECORD_NAME, TRAINER_ID, remove_tree
from trocar_server.training.files.trainer_store import TrainerRecord, TrainerStore

_FROM = "from"
_GONE = (errno.ENOENT, errno.ESTALE)
_ROUNDS = 1000
"""A lost owner whose path is gone can add a few files at most."""


class OwnerFolders:
    """The folders of all owners. Every method may block on the disk.

    Args:
        root: The shared folder of the trainers of one model.
        owner: This server's name among them, new at each start.
    """

    def __init__(self, root: Path, owner: str) -> None:
        self._root = root
        self._owner = owner
        self.own = root / owner

    def others(self) -> list[str]:
        """Return the names of other owners, gone or not, with trainers or without.

        Raises:
            ServiceError: `STORAGE_UNAVAILABLE`.
        """
        with disk_errors("shared folder of trainers"):
            return sorted(entry.name for entry in _folders(self._root) if entry.name != self._owner)

    def trainer_ids(self, owner: str) -> list[str]:
        """Return the ids of an owner's trainers.

        Raises:
            ServiceError: `STORAGE_UNAVAILABLE`.
        """
        with disk_errors("shared folder of trainers"):
            entries = _folders(self._root / owner)
            return sorted(entry.name for entry in entries if TRAINER_ID.fullmatch(entry.name))

    def records_elsewhere(self) -> list[TrainerRecord]:
        """Return the readable records of all trainers of other owners, gone or not.

        Raises:
            ServiceError: `STORAGE_UNAVAILABLE`.
        """
        result = []
        for owner in self.others():
            store = TrainerStore(self._root / owner, is_shared=True)
            for trainer_id in self.trainer_ids(owner):
                with contextlib.suppress(ServiceError):  # it is damaged, or being moved
                    result.append(store.get(trainer_id))
        return result

    def owner_of(self, trainer_id: str) -> str | None:
        """Return the owner that has a trainer, or None.

        Raises:
            ServiceError: `STORAGE_UNAVAILABLE`.
        """
        if not TRAINER_ID.fullmatch(trainer_id):
            return None
        for _ in range(2):  # it may move meanwhile, to an owner that was looked at before
            with disk_errors("shared folder of trainers"):
                for entry in _folders(self._root):
                    if (self._root / entry.name / trainer_id).is_dir():
                        return entry.name
        return None

    def take_over(self, owner: str, trainer_id: str) -> bool:
        """Move a trainer of a lost owner to this one, see Note: [Fence by removal].

        Args:
            owner: Its owner; this one itself to end a takeover that the disk has cut off.
            trainer_id: The trainer.

        Returns:
            Whether it is here now; otherwise another server was faster, or it was being created.

        Raises:
            ServiceError: `STORAGE_UNAVAILABLE`, `STORAGE_FULL`; the rest is moved by whoever tries again.
        """
        target = self.own / trainer_id
        with disk_errors("folder of a trainer that is taken over"):
            make_folder(target)
            source = target / _FROM
            if owner != self._owner:
                _claim(self._root / owner / trainer_id, source)
            if source.is_dir():
                _drain(source, target)
                sync_folder(target)
                sync_folder(self.own)
            if (target / RECORD_NAME).exists():
                return True
            with contextlib.suppress(OSError):  # it was never acknowledged
                target.rmdir()
            return False

    def forget(self, owner: str) -> None:
        """Remove the folder of a lost owner if nothing is left in it but its lock and deleted trainers."""
        folder = self._root / owner
        with contextlib.suppress(OSError):
            for deleted in folder.glob("~*"):
                remove_tree(deleted)
            if set(os.listdir(folder)) <= {"lock"}:  # noqa: PTH208 - as in `durable`
                (folder / "lock").unlink(missing_ok=True)
                folder.rmdir()


def _claim(folder: Path, source: Path) -> None:
    """Move a trainer's folder as it is: of several servers one succeeds."""
    try:
        os.rename(folder, source)  # noqa: PTH104 - as in `durable`
    except OSError as error:
        if error.errno not in (*_GONE, errno.ENOTEMPTY, errno.EEXIST):
            raise


def _drain(source: Path, target: Path) -> None:
    """Move every file, of cut-off takeovers too, and remove the folder."""
    for _ in range(_ROUNDS):
        for entry in list(os.scandir(source)):
            if entry.is_dir(follow_symlinks=False):
                _drain(source / entry.name, target)
            else:
                with contextlib.suppress(FileNotFoundError):  # its writer has just renamed it
                    os.rename(source / entry.name, target / entry.name)  # noqa: PTH104 - as in `durable`
        try:
            os.rmdir(source)  # noqa: PTH106 - as in `durable`
        except OSError as error:
            if error.errno in _GONE:
                return
            if error.errno not in (errno.ENOTEMPTY, errno.EEXIST):
                raise
        else:
            return
    raise OSError(errno.EBUSY, "the folder of a trainer keeps being written to")


def _folders(folder: Path) -> "list[os.DirEntry[str]]":
    with contextlib.suppress(FileNotFoundError):
        return [entry for entry in os.scandir(folder) if entry.is_dir(follow_symlinks=False)]
    return []
