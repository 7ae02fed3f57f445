"""Owned files: what principals store under names, a file for each name of a model.

    FOLDER/<sha256 of the principal>/<sha256 of model and name><suffix>

No client text becomes part of a path.
"""

import hashlib
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from trocar_api.reasons import ErrorReason
from trocar_server.caller import is_unproven
from trocar_server.errors import ServiceError
from trocar_server.storage.durable import remove_partial, sync_folder, write_durably


class OwnedFiles:
    """The files of one kind.

    Every method may block on the disk, and raises its `OSError`. A check and the write that follows need a
    lock of their caller.

    Args:
        folder: The folder; made by whoever writes first.
        suffix: Of the files.
        noun: What they are, in messages: "edits".
        unavailable: The reason of an error where no more folders may be made.
        owner_of: Returns the principal that a file names; empty where it cannot be read.
    """

    def __init__(
        self,
        folder: Path,
        suffix: str,
        noun: str,
        unavailable: ErrorReason,
        owner_of: Callable[[Path], str],
    ) -> None:
        self._folder, self._suffix, self._noun = folder, suffix, noun
        self._unavailable, self._owner_of = unavailable, owner_of

    def path(self, principal: str, model_id: str, name: str) -> Path:
        """Return the place of a file, which may be absent."""
        return self._folder / _digest(principal) / f"{_digest(model_id, name)}{self._suffix}"

    def of(self, principal: str) -> list[Path]:
        """Return the files of a principal, in an order that stays."""
        with suppress(FileNotFoundError):  # the last one, and so the folder, is deleted meanwhile
            return sorted((self._folder / _digest(principal)).glob(f"*{self._suffix}"))
        return []

    def check_bytes(self, byte_count: int, others: list[Path], most_bytes: int) -> None:
        """Refuse a file that is too large beside the principal's others.

        Raises:
            ServiceError: `REQUEST_TOO_LARGE`.
        """
        total = byte_count + sum(other.stat().st_size for other in others)
        if total > most_bytes:
            raise too_much(f"your stored {self._noun} would be {total:,} bytes, the limit is {most_bytes:,}")

    def write(self, path: Path, principal: str, content: bytes, most_unproven: int) -> None:
        """Write a file durably; the principal's folder is made with the first.

        Args:
            path: Of `path`.
            principal: The owner.
            content: The content.
            most_unproven: Limit of principals with unverified tokens that have files, see `is_unproven`.

        Raises:
            ServiceError: There are so many.
        """
        if not path.parent.is_dir():
            if is_unproven(principal) and self._unproven_count() >= most_unproven:
                raise ServiceError(
                    self._unavailable,
                    f"{self._noun} of {most_unproven} unverified tokens are stored, the maximum; call "
                    "without a token, or ask the operator to free space",
                )
            path.parent.mkdir(mode=0o700, exist_ok=True)
            sync_folder(self._folder)
        write_durably(path, content)

    def delete(self, path: Path) -> None:
        """Delete a file, and the principal's folder with the last.

        Raises:
            FileNotFoundError: It is absent.
        """
        path.unlink()
        sync_folder(path.parent)
        with suppress(OSError):  # there is something else in it
            path.parent.rmdir()

    def clean(self) -> None:
        """Remove partial files of killed servers; a running one may share the folder."""
        with suppress(OSError):
            for folder in self._folder.glob("*"):
                remove_partial(folder)

    def _unproven_count(self) -> int:
        """Count folders of callers with unverified tokens, by one file of each."""
        firsts = (next(iter(folder.glob(f"*{self._suffix}")), None) for folder in self._folder.iterdir())
        return sum(is_unproven(self._owner_of(path)) for path in firsts if path is not None)


def too_much(problem: str) -> ServiceError:
    """Return the error of a principal that stores too much."""
    return ServiceError(ErrorReason.REQUEST_TOO_LARGE, f"{problem}; delete some first")


def _digest(*texts: str) -> str:
    """Return the hash of texts; their lengths keep them apart."""
    joined = "\0".join(f"{len(text)}:{text}" for text in texts)
    return hashlib.sha256(joined.encode()).hexdigest()
