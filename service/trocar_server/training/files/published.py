"""Published models on disk: trained models that the server hosts like configured ones.

    FOLDER/<model id>/model.json
    FOLDER/<model id>/weights-<random>.safetensors

    store.publish("flowers", "alice", hosted, weights, heads=(spec.head,), categories=("rose", "tulip"))
    for model in store.entries():                   # at the server's start
        catalogue.add(store.model_spec(model, replace_head))

`model.json` is written last and names the file with the weights, so that replacing a model is atomic. It
describes the base, too: neither the trainer nor the base model is needed to load it.
"""

import contextlib
import hashlib
import os
import time
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from threading import Lock

import structlog
from torch import Tensor

from trocar_api.reasons import ErrorReason
from trocar_server.errors import ServiceError
from trocar_server.models import HostedModel, ModelSpec
from trocar_server.models.spec import check_model_id
from trocar_server.storage.disk_errors import disk_errors, storage_error
from trocar_server.storage.durable import (
    DamagedError,
    make_folder,
    remove_quietly,
    sync_folder,
    write_durably,
)
from trocar_server.storage.sealed_record import read_record, write_record
from trocar_server.training.files.checkpoint_files import hashed
from trocar_server.training.files.export import make_export
from trocar_server.training.files.published_records import (
    PublishedModel,
    describe_base,
    heads_of,
    model_spec,
)
from trocar_server.training.files.trainer_janitor import MODEL_NAME, WEIGHTS, clean_published
from trocar_server.training.model.heads import ReplaceHead
from trocar_server.training.spec.trainer_spec import HeadSpec

_KIND = "model"
_BASE = "trocar.base"
_log = structlog.get_logger("trocar")


class PublishedStore:
    """Stores published models.

    Every method may block on the disk: not for the event loop. All are thread-safe. Only the server that
    holds the lock (`trainer_storage`) may change anything.

    Args:
        folder: The folder.
        clock: Returns the seconds since 1970.
    """

    def __init__(self, folder: Path, clock: Callable[[], float] = time.time) -> None:
        self._folder = folder
        self._clock = clock
        self._lock = Lock()

    def publish(
        self,
        model_id: str,
        principal: str,
        base: HostedModel,
        weights: Mapping[str, Tensor],
        *,
        heads: Sequence[HeadSpec] = (),
        categories: Sequence[str] = (),
        is_replacing: bool = False,
    ) -> PublishedModel:
        """Write a model, durably and atomically: if this raises, the previous one is still there.

        Args:
            model_id: Its id.
            principal: Its owner.
            base: The trainer's base model.
            weights: Its full state dict, on the CPU, not modified meanwhile.
            heads: The trainer's own new head, if any.
            categories: Class names by index; empty when unknown.
            is_replacing: Whether to replace a published model of this id.

        Raises:
            ServiceError: `MODEL_INVALID`, the id is not valid, or the base cannot be rebuilt;
                `MODEL_CONFLICT`, the id is taken; `STORAGE_FULL`, `STORAGE_UNAVAILABLE`.
        """
        check_model_id(model_id)
        content = make_export(weights, {_BASE: base.spec.model_id})
        name, digest = f"weights-{uuid.uuid4().hex}.safetensors", hashlib.sha256()
        model = PublishedModel(
            model_id=model_id,
            principal=principal,
            created_at_s=self._clock(),
            base_model_id=base.spec.model_id,
            base=describe_base(base),
            heads=(*heads_of(base.spec), *heads),
            categories=tuple(categories),
            weights_file=name,
            byte_count=content.byte_count,
            sha256="",
        )
        folder = self._folder / model_id
        with self._lock, disk_errors("published model"):
            if not is_replacing and (folder / MODEL_NAME).exists():
                raise _exists(model_id)
            make_folder(folder)
            with _undone(folder, name):
                write_durably(folder / name, hashed(content.pieces(), digest))
                model = model.model_copy(update={"sha256": digest.hexdigest()})
                write_record(folder / MODEL_NAME, _KIND, model)
            _remove_weights(folder, but=name)
        return model

    def entries(self) -> list[PublishedModel]:
        """Return all readable published models, by id.

        Raises:
            ServiceError: `STORAGE_UNAVAILABLE`.
        """
        return self.survey()[0]

    def survey(self) -> tuple[list[PublishedModel], dict[str, ServiceError]]:
        """Return all readable published models, and the errors of the others by id.

        Raises:
            ServiceError: `STORAGE_UNAVAILABLE`, the folder cannot be read.
        """
        result, unreadable = [], {}
        with disk_errors("published model"):
            paths = sorted(self._folder.iterdir()) if self._folder.is_dir() else []
        for path in paths:
            try:
                result.append(_read(path))
            except (FileNotFoundError, NotADirectoryError):  # being published, or removed
                continue
            except DamagedError as error:
                unreadable[path.name] = _damaged(str(error))
            except OSError as error:
                unreadable[path.name] = storage_error("published model", error)
        for model_id, problem in unreadable.items():
            _log.warning("a published model cannot be read", model_id=model_id, problem=problem.message)
        return result, unreadable

    def has(self, model_id: str, principal: str, base: HostedModel, weights: Mapping[str, Tensor]) -> bool:
        """Whether the published model of this id is this principal's, from this base, with these weights.

        Raises:
            ServiceError: `STORAGE_UNAVAILABLE`.
        """
        own = (model_id, principal, base.spec.model_id)
        content, digest = make_export(weights, {_BASE: base.spec.model_id}), hashlib.sha256()
        for piece in content.pieces():
            digest.update(piece)
        return any(
            (model.model_id, model.principal, model.base_model_id) == own
            and model.sha256 == digest.hexdigest()
            for model in self.entries()
        )

    def model_spec(self, model: PublishedModel, replace_head: ReplaceHead) -> ModelSpec:
        """Return the model spec with which the catalogue can host a model.

        Args:
            model: One of `entries`.
            replace_head: `head.replace_head`.

        Raises:
            ServiceError: `MODEL_INVALID`, this version of the server cannot host it.
        """
        path = self._folder / model.model_id / model.weights_file
        return model_spec(model, path, replace_head)

    def remove(self, model_id: str) -> None:
        """Remove a model; a hosted one stays hosted until it is unloaded.

        Raises:
            ServiceError: `UNKNOWN_MODEL`, `STORAGE_UNAVAILABLE`; `MODEL_INVALID`, the id is not valid.
        """
        check_model_id(model_id)
        folder = self._folder / model_id
        with self._lock, disk_errors("published model"):
            try:
                os.unlink(folder / MODEL_NAME)  # noqa: PTH108 - as in `durable`
            except (FileNotFoundError, NotADirectoryError):
                raise ServiceError(
                    ErrorReason.UNKNOWN_MODEL, f"no model '{model_id}' was published"
                ) from None
            sync_folder(folder)
            _remove_weights(folder)
            with contextlib.suppress(OSError):  # not empty
                os.rmdir(folder)  # noqa: PTH106 - as in `durable`
                sync_folder(self._folder)

    def take(self, folder: Path) -> list[PublishedModel]:
        """Move the models of another store here, whose server has gone; return those that can be read.

        A model whose id is taken here stays where it is.

        Args:
            folder: The other store's; its lock is the caller's.

        Raises:
            ServiceError: `STORAGE_UNAVAILABLE`.
        """
        taken = []
        with self._lock, disk_errors("published model"):
            make_folder(self._folder)
            for path in sorted(folder.iterdir()):
                if (path / MODEL_NAME).is_file() and not (self._folder / path.name).exists():
                    path.rename(self._folder / path.name)
                    taken.append(path.name)
            if not taken:
                return []
            sync_folder(self._folder)
            sync_folder(folder)
        return [model for model in self.entries() if model.model_id in taken]

    def clean(self) -> int:
        """Remove half-written leftovers of killed servers; return the number of files and folders."""
        return clean_published(
            self._folder, [(model.model_id, model.weights_file) for model in self.entries()]
        )


def _read(path: Path) -> PublishedModel:
    model = read_record(path / MODEL_NAME, _KIND, PublishedModel)
    if model.model_id != path.name:
        raise DamagedError("it belongs to another model")
    if not WEIGHTS.fullmatch(model.weights_file):
        raise DamagedError("it names no weights file")
    return model


def _remove_weights(folder: Path, but: str = "") -> None:
    """Remove unreferenced weight files; those that cannot be removed are left for the janitor."""
    for entry in os.scandir(folder):
        if WEIGHTS.fullmatch(entry.name) and entry.name != but:
            remove_quietly(folder / entry.name)


@contextlib.contextmanager
def _undone(folder: Path, name: str) -> Iterator[None]:
    """Roll back a failed publication, as far as the disk allows.

    Weights that the record names are kept in any case: it may have been replaced before the disk failed.
    """
    record = folder / MODEL_NAME
    old = record.read_bytes() if record.exists() else None
    try:
        yield
    except BaseException:
        with contextlib.suppress(OSError):
            if old is None:
                record.unlink(missing_ok=True)
                sync_folder(folder)
            elif record.read_bytes() != old:
                write_durably(record, old)
        with contextlib.suppress(OSError):
            if not record.exists() or record.read_bytes() == old:
                remove_quietly(folder / name)
            os.rmdir(folder)  # noqa: PTH106 - as in `durable`; fails if there is another model
        raise


def _damaged(problem: str) -> ServiceError:
    return ServiceError(
        ErrorReason.CHECKPOINT_CORRUPT,
        f"the description of the published model is damaged: {problem}; ask the operator to restore it "
        "from a backup "
        "or to remove its folder, then publish again",
    )


def _exists(model_id: str) -> ServiceError:
    return ServiceError(
        ErrorReason.MODEL_CONFLICT,
        f"a model '{model_id}' is published already; choose another id, or replace it",
    )
