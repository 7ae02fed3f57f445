"""Direction store: the folder of all stored directions.

A file has all places of one name, see Note: [Direction file]; its metadata also say whose it is.
"""

import json
import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, suppress
from dataclasses import dataclass
from pathlib import Path
from threading import Lock

import structlog

from trocar_api.reasons import ErrorReason
from trocar_api.stored_names import is_stored_name
from trocar_server.directions.direction import Direction, decoded, encoded, metadata_of
from trocar_server.errors import ServiceError, unknown
from trocar_server.storage.disk_errors import disk_errors
from trocar_server.storage.durable import DamagedError
from trocar_server.storage.owned_files import OwnedFiles, too_much
from trocar_server.storage.shared_lock import SharedLock

SUFFIX = ".safetensors"
MAX_NAMES = 256
"""Of one principal."""
MAX_BYTES = 256 << 20
"""Of all directions of one principal."""
MAX_UNPROVEN = 256
"""As for stored edits: principals with unverified tokens."""

_STORED = "trocar.stored"
_KEPT_FILES, _KEPT_BYTES = 64, 64 << 20
_SHOWN_CHARACTERS, _SHOWN_NAMES = 80, 20

_log = structlog.get_logger("trocar")


@dataclass(frozen=True)
class StoredDirections:
    """All directions of one name; without any, and with a problem, where the file cannot be read."""

    model_id: str
    name: str
    stored_at_s: float = 0.0
    directions: tuple[Direction, ...] = ()
    problem: str = ""


class DirectionStore:
    """Keeps directions in a folder, which is made with the first of them.

        store = DirectionStore(data_dir / "directions")
        store.put("alice", "vit", "cats", directions)

    Every method may block on the disk: not for the event loop. All are safe to call from several threads.
    Several servers may share a folder.

    Args:
        folder: The folder.
        clock: Returns the seconds since 1970.
    """

    def __init__(self, folder: Path, clock: Callable[[], float] = time.time) -> None:
        self._folder, self._clock = folder, clock
        unavailable = ErrorReason.DIRECTIONS_UNAVAILABLE
        self._files = OwnedFiles(folder, SUFFIX, "directions", unavailable, _owner_name)
        self._lock = SharedLock(folder)
        self._kept: OrderedDict[tuple[str, int, int, int], StoredDirections] = OrderedDict()
        self._kept_lock = Lock()

    def check_new(self, principal: str, model_id: str, name: str) -> None:
        """Refuse a name that has directions.

        Raises:
            ServiceError: `DIRECTION_EXISTS`.
        """
        if self._files.path(principal, model_id, name).exists():
            raise ServiceError(
                ErrorReason.DIRECTION_EXISTS,
                f"directions '{name}' of model '{model_id}' already exist; replace or delete them, or "
                "choose another name",
            )

    def put(
        self,
        principal: str,
        model_id: str,
        name: str,
        directions: Sequence[Direction],
        *,
        is_replacing: bool = False,
        is_adding: bool = False,
    ) -> StoredDirections:
        """Store the directions of one name, durably; on an error the previous ones remain.

        Args:
            principal: The owner.
            model_id: The model.
            name: Their name.
            directions: One for each place.
            is_replacing: Whether earlier ones may be replaced.
            is_adding: Whether earlier ones at other places stay.

        Raises:
            ServiceError: `DIRECTION_EXISTS`, `INVALID_ARGUMENT` for an impossible name, `REQUEST_TOO_LARGE`
                when the principal has too much, `DIRECTIONS_UNAVAILABLE` when the disk does not take them.
        """
        check_name(name)
        path = self._files.path(principal, model_id, name)
        with _disk():
            self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        with _disk(), self._lock:
            places = {each.about.place for each in directions}
            others: list[Direction] = []
            if path.exists() and is_adding:
                earlier = self.get(principal, model_id, name).directions
                if not is_replacing and any(each.about.place in places for each in earlier):
                    self.check_new(principal, model_id, name)
                others = [each for each in earlier if each.about.place not in places]
            elif not is_replacing:
                self.check_new(principal, model_id, name)
            stored = StoredDirections(model_id, name, self._clock(), (*others, *directions))
            content = _content(principal, stored)
            self._check_room(principal, path, len(content))
            self._files.write(path, principal, content, MAX_UNPROVEN)
        return stored

    def get(self, principal: str, model_id: str, name: str) -> StoredDirections:
        """Return the directions of one name.

        Raises:
            ServiceError: `UNKNOWN_DIRECTION`, with near names of the principal's own; `DIRECTION_CORRUPT`
                when the file is damaged, `DIRECTIONS_UNAVAILABLE` when it cannot be read.
        """
        path = self._files.path(principal, model_id, name)
        with _disk():
            try:
                stored = self._read(path, principal)
            except FileNotFoundError:
                raise self._unknown(principal, model_id, name) from None
            except DamagedError as error:
                raise _corrupt(model_id, name, str(error)) from None
        if (stored.model_id, stored.name) != (model_id, name):
            raise _corrupt(model_id, name, "its file belongs to another name")
        return stored

    def entries(self, principal: str, model_id: str = "") -> list[StoredDirections]:
        """Return the principal's directions by model and name, also those that cannot be read.

        Args:
            principal: The owner.
            model_id: Only those of this model; all when empty.

        Raises:
            ServiceError: `DIRECTIONS_UNAVAILABLE`.
        """
        result = []
        with _disk():
            for path in self._files.of(principal):
                with suppress(FileNotFoundError):  # deleted meanwhile
                    stored = self._read_or_problem(path, principal)
                    if model_id in ("", stored.model_id):
                        result.append(stored)
        return sorted(result, key=lambda stored: (stored.model_id, stored.name))

    def delete(self, principal: str, model_id: str, name: str) -> None:
        """Delete the directions of one name, damaged or not.

        Raises:
            ServiceError: `UNKNOWN_DIRECTION` or `DIRECTIONS_UNAVAILABLE`.
        """
        path = self._files.path(principal, model_id, name)
        with _disk(), self._lock:
            try:
                self._files.delete(path)
            except FileNotFoundError:
                raise self._unknown(principal, model_id, name) from None

    def clean(self) -> None:
        """Remove partial files of killed servers; a running one may share the folder."""
        self._files.clean()

    def _read(self, path: Path, principal: str) -> StoredDirections:
        """Return the content of a file, from memory while the file is the same."""
        state = path.stat()
        key = (str(path), state.st_ino, state.st_mtime_ns, state.st_size)
        with self._kept_lock:
            kept = self._kept.get(key)
        if kept is not None:
            return kept
        content = path.read_bytes()
        directions = tuple(decoded(content))
        owner, model_id, name, stored_at_s = _owner(content)
        if owner != principal:
            raise DamagedError("it belongs to another owner")
        stored = StoredDirections(model_id, name, stored_at_s, directions)
        if state.st_size * _KEPT_FILES <= _KEPT_BYTES:
            with self._kept_lock:
                self._kept[key] = stored
                while len(self._kept) > _KEPT_FILES:
                    self._kept.popitem(last=False)
        return stored

    def _read_or_problem(self, path: Path, principal: str) -> StoredDirections:
        try:
            return self._read(path, principal)
        except FileNotFoundError:
            raise
        except OSError as error:
            problem = f"the disk cannot read them ({error.strerror})"
        except DamagedError as error:
            problem = str(error)
        _log.warning("stored directions cannot be read", file=path.name, problem=problem)
        owner, model_id, name, _ = _owner_or_nobody(path)
        is_known = owner == principal and path == self._files.path(owner, model_id, name)
        return StoredDirections(model_id if is_known else "", name if is_known else "", problem=problem)

    def _unknown(self, principal: str, model_id: str, name: str) -> ServiceError:
        """Error for a direction that is absent or another principal's: callers cannot tell which."""
        owners = [_owner_or_nobody(path) for path in self._files.of(principal)]
        names = sorted(entry[2] for entry in owners if entry[:2] == (principal, model_id))
        elsewhere = sorted(entry[1] for entry in owners if (entry[0], entry[2]) == (principal, name))
        model = f"model '{model_id[:_SHOWN_CHARACTERS]}'"
        advice = f"for {model}: {', '.join(names[:_SHOWN_NAMES])}"
        if elsewhere:
            names, advice = [], f"it is of model '{elsewhere[0][:_SHOWN_CHARACTERS]}', not of {model}"
        elif not names:
            advice = f"none are stored for {model}; fit one with `fit_direction`"
        return unknown(ErrorReason.UNKNOWN_DIRECTION, "direction", name[:_SHOWN_CHARACTERS], names, advice)

    def _check_room(self, principal: str, path: Path, byte_count: int) -> None:
        others = [other for other in self._files.of(principal) if other != path]
        if len(others) >= MAX_NAMES:
            raise too_much(f"directions of {len(others)} names are stored, the maximum")
        self._files.check_bytes(byte_count, others, MAX_BYTES)


def check_name(name: str) -> None:
    """Refuse what cannot be the name of a direction.

    Raises:
        ServiceError: `INVALID_ARGUMENT`.
    """
    if not is_stored_name(name):
        raise ServiceError(
            ErrorReason.INVALID_ARGUMENT,
            "the name of a direction is 1 to 63 of a-z, 0-9, '.', '_' and '-', the first a letter or digit",
            field="name",
        )


def _content(principal: str, stored: StoredDirections) -> bytes:
    owner = [principal, stored.model_id, stored.name, stored.stored_at_s]
    return encoded(stored.directions, {_STORED: json.dumps(owner)})


def _owner(content: bytes) -> tuple[str, str, str, float]:
    """Return principal, model, name and time of a file.

    Raises:
        DamagedError: Its header does not say it.
    """
    try:
        principal, model_id, name, stored_at_s = json.loads(metadata_of(content)[_STORED])
        return str(principal), str(model_id), str(name), float(stored_at_s)
    except (KeyError, ValueError, TypeError, AttributeError, RecursionError):
        raise DamagedError("its header does not say whose it is") from None


def _owner_or_nobody(path: Path) -> tuple[str, str, str, float]:
    """Return the same of a file, from its header alone; empty where it cannot be read."""
    try:
        with path.open("rb") as file:
            length = file.read(8)
            return _owner(length + file.read(min(int.from_bytes(length, "little"), MAX_BYTES)))
    except (OSError, DamagedError):
        return "", "", "", 0.0


def _owner_name(path: Path) -> str:
    return _owner_or_nobody(path)[0]


def _corrupt(model_id: str, name: str, problem: str) -> ServiceError:
    return ServiceError(
        ErrorReason.DIRECTION_CORRUPT,
        f"the stored directions '{name}' of model '{model_id}' are damaged: {problem}; fit them again, or "
        "delete them",
    )


def _disk() -> AbstractContextManager[None]:
    return disk_errors("direction", ErrorReason.DIRECTIONS_UNAVAILABLE)
