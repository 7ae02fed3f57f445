"""Edit store: the folder of all stored lists, a file for each."""

import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import structlog

from trocar_api.reasons import ErrorReason
from trocar_server.edit_store.files import SUFFIX, Head, StoredEntry, decoded, encoded, head_of
from trocar_server.errors import ServiceError, unknown
from trocar_server.storage.disk_errors import disk_errors
from trocar_server.storage.durable import DamagedError
from trocar_server.storage.owned_files import OwnedFiles, too_much
from trocar_server.storage.shared_lock import SharedLock

MAX_LISTS = 256
"""Of one principal."""
MAX_BYTES = 64 << 20
"""Of all lists of one principal."""
MAX_DESCRIPTION_BYTES = 8 << 20
"""Of the descriptions of all lists of one principal: they travel in one message."""
MAX_UNPROVEN = 256
"""Limit of principals with unverified tokens that have lists."""

_SHOWN_CHARACTERS, _SHOWN_NAMES = 80, 20

_log = structlog.get_logger("trocar")


@dataclass(frozen=True)
class UnreadableEntry:
    """A list that cannot be read; model and name are empty where its file does not say them any more."""

    model_id: str
    name: str
    problem: str


class EditStore:
    """Keeps lists of edits in a folder, which is made with the first of them.

        store = EditStore(data_dir / "edits")
        store.put("alice", "resnet18", "ablate-3", description, tensors)

    Every method may block on the disk: not for the event loop. All are safe to call from several threads.
    Several servers may share a folder.

    Args:
        folder: The folder.
        clock: Returns the seconds since 1970.
    """

    def __init__(self, folder: Path, clock: Callable[[], float] = time.time) -> None:
        self._folder = folder
        self._files = OwnedFiles(folder, SUFFIX, "edits", ErrorReason.EDITS_UNAVAILABLE, _owner)
        self._clock = clock
        self._lock = SharedLock(folder)  # for check-then-write, also of other servers

    def put(
        self,
        principal: str,
        model_id: str,
        name: str,
        description: bytes,
        tensors: bytes = b"",
        *,
        is_replacing: bool = False,
    ) -> StoredEntry:
        """Store a list, durably: on return it is stored, on an error the previous one remains.

        Raises:
            ServiceError: `EDITS_EXIST` when there is one and it is not to be replaced, `REQUEST_TOO_LARGE`
                when the principal has too much, `EDITS_UNAVAILABLE` when the disk does not take it.
        """
        entry = StoredEntry(principal, model_id, name, self._clock(), description, tensors)
        content, path = encoded(entry), self._files.path(principal, model_id, name)
        with disk_errors("list of edits", ErrorReason.EDITS_UNAVAILABLE):
            self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        with disk_errors("list of edits", ErrorReason.EDITS_UNAVAILABLE), self._lock:
            if path.exists() and not is_replacing:
                raise ServiceError(
                    ErrorReason.EDITS_EXIST,
                    f"edits '{name}' of model '{model_id}' already exist; replace or delete them, or choose "
                    "another name",
                )
            self._check_room(path, entry, len(content))
            self._files.write(path, principal, content, MAX_UNPROVEN)
        return entry

    def get(self, principal: str, model_id: str, name: str) -> StoredEntry:
        """Return one list.

        Raises:
            ServiceError: `UNKNOWN_EDITS`, with near names of the principal's own; `EDITS_CORRUPT` when the
                file is damaged, `EDITS_UNAVAILABLE` when it cannot be read.
        """
        with disk_errors("list of edits", ErrorReason.EDITS_UNAVAILABLE):
            try:
                entry = decoded(self._files.path(principal, model_id, name).read_bytes())
                if (entry.principal, entry.model_id, entry.name) != (principal, model_id, name):
                    raise DamagedError("it belongs to another list of edits")
                return entry
            except FileNotFoundError:
                raise self._unknown(principal, model_id, name) from None
            except DamagedError as error:
                raise corrupt(model_id, name, str(error)) from None

    def entries(self, principal: str, model_id: str = "") -> list[StoredEntry]:
        """Return the principal's lists by model and name; see `unreadable` for the others.

        Args:
            principal: The owner.
            model_id: Only those for this model; all when empty.

        Raises:
            ServiceError: `EDITS_UNAVAILABLE`.
        """
        result = []
        with disk_errors("list of edits", ErrorReason.EDITS_UNAVAILABLE):
            for path in self._files.of(principal):
                with suppress(FileNotFoundError):  # deleted meanwhile
                    entry = _entry_or_none(path)
                    if entry and entry.principal == principal and model_id in ("", entry.model_id):
                        result.append(entry)
        return sorted(result, key=lambda entry: (entry.model_id, entry.name))

    def unreadable(self, principal: str) -> list[UnreadableEntry]:
        """Return the principal's lists that cannot be read, with what their files still say.

        Raises:
            ServiceError: `EDITS_UNAVAILABLE`, not even the folder can be read.
        """
        result = []
        with disk_errors("list of edits", ErrorReason.EDITS_UNAVAILABLE):
            paths = self._files.of(principal)
        for path in paths:
            try:
                entry = decoded(path.read_bytes())
                problem = "" if entry.principal == principal else "it belongs to another list of edits"
            except FileNotFoundError:  # deleted meanwhile
                continue
            except DamagedError as error:
                problem = str(error)
            except OSError as error:
                problem = f"the disk cannot read them ({error.strerror})"
            if problem:
                head = _head_or_none(path)
                known = (
                    (head.model_id, head.name) if head and path == self._files.path(*_key(head)) else ("", "")
                )
                result.append(UnreadableEntry(*known, problem))
        return result

    def delete(self, principal: str, model_id: str, name: str) -> None:
        """Delete a list, damaged or not.

        Raises:
            ServiceError: `UNKNOWN_EDITS` or `EDITS_UNAVAILABLE`.
        """
        path = self._files.path(principal, model_id, name)
        with disk_errors("list of edits", ErrorReason.EDITS_UNAVAILABLE), self._lock:
            try:
                self._files.delete(path)
            except FileNotFoundError:
                raise self._unknown(principal, model_id, name) from None

    def clean(self) -> None:
        """Remove partial files of killed servers; a running one may share the folder."""
        self._files.clean()

    def _unknown(self, principal: str, model_id: str, name: str) -> ServiceError:
        """Error for a list that is absent or another principal's: callers cannot tell which."""
        heads = [_head_or_none(path) for path in self._files.of(principal)]
        names = [
            head.name for head in heads if head and (head.principal, head.model_id) == (principal, model_id)
        ]
        model = f"model '{model_id[:_SHOWN_CHARACTERS]}'"
        advice = f"for {model}: {', '.join(sorted(names)[:_SHOWN_NAMES])}"
        none = f"none are stored for {model}; an edit has an operation, as in 'layer3 zero'"
        shown = name[:_SHOWN_CHARACTERS]
        return unknown(ErrorReason.UNKNOWN_EDITS, "stored edits", shown, names, advice if names else none)

    def _check_room(self, path: Path, entry: StoredEntry, byte_count: int) -> None:
        """Refuse a list that exceeds the principal's limits together with its other lists."""
        others = [other for other in self._files.of(entry.principal) if other != path]
        if len(others) >= MAX_LISTS:
            raise too_much(f"{len(others)} lists of edits are stored, the maximum")
        self._files.check_bytes(byte_count, others, MAX_BYTES)
        heads = (_head_or_none(other) for other in others)
        described = len(entry.description) + sum(head.description_bytes for head in heads if head)
        if described > MAX_DESCRIPTION_BYTES:
            raise too_much(
                f"your stored edits would be {described:,} bytes without their tensors, the limit is "
                f"{MAX_DESCRIPTION_BYTES:,}"
            )


def corrupt(model_id: str, name: str, problem: str) -> ServiceError:
    """Error for a stored list that cannot be read."""
    return ServiceError(
        ErrorReason.EDITS_CORRUPT,
        f"the stored edits '{name}' of model '{model_id}' are damaged: {problem}; store them again, "
        "or delete them",
    )


def _entry_or_none(path: Path) -> StoredEntry | None:
    try:
        return decoded(path.read_bytes())
    except FileNotFoundError:
        raise
    except OSError as error:
        _log.warning("stored edits cannot be read", file=path.name, problem=error.strerror)
        return None
    except DamagedError as error:
        _log.warning("stored edits are damaged", file=path.name, problem=str(error))
        return None


def _head_or_none(path: Path) -> Head | None:
    try:
        return head_of(path)
    except (DamagedError, OSError):
        return None


def _owner(path: Path) -> str:
    head = _head_or_none(path)
    return "" if head is None else head.principal


def _key(head: Head) -> tuple[str, str, str]:
    return head.principal, head.model_id, head.name
