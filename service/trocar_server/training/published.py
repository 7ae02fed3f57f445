"""Models that came out of trainers, on disk: the server hosts them like those of its configuration.

    FOLDER/<model id>/model.json
    FOLDER/<model id>/weights-<random>.safetensors

    store.publish("flowers", "alice", hosted, weights, heads=(spec.head,), categories=("rose", "tulip"))
    for model in store.entries():                   # at the server's start
        catalogue.add(store.model_spec(model, replace_head))

`model.json` comes last and names the file with the weights, so that a model that is published again is the
old one or the new one. What the base was is part of it: neither the trainer nor the base is needed again.
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
from trocar_server.durable import (
    DamagedError,
    disk_errors,
    make_folder,
    remove_quietly,
    sync_folder,
    write_durably,
)
from trocar_server.errors import ServiceError
from trocar_server.models import HostedModel, ModelSpec
from trocar_server.models.spec import check_model_id
from trocar_server.training.checkpoint_files import hashed
from trocar_server.training.export import make_export
from trocar_server.training.heads import ReplaceHead
from trocar_server.training.janitor import MODEL_NAME, WEIGHTS, clean_published
from trocar_server.training.published_records import (
    PublishedModel,
    describe_base,
    heads_of,
    model_spec,
)
from trocar_server.training.records import read_record, write_record
from trocar_server.training.spec import HeadSpec

_KIND = "model"
_log = structlog.get_logger("trocar")


class PublishedStore:
    """Keeps published models.

    Every method may block on the disk: not for the event loop. All are safe to call from several threads.
    Only the server that holds the lock (`storage`) may change anything.

    Args:
        folder: Where.
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
        """Write a model, durably: when this returns it is there, when it raises what was there still is.

        Args:
            model_id: Its id.
            principal: Who publishes it.
            base: The model that its trainer began with.
            weights: Its whole state dict, on the CPU, changed by nobody meanwhile.
            heads: The trainer's own new head, if any.
            categories: Class names by index; empty when unknown.
            is_replacing: Whether a published model of this id makes way.

        Raises:
            ServiceError: `MODEL_INVALID`, the id is none, or the base cannot be built again;
                `MODEL_CONFLICT`, there is one of this id; `STORAGE_FULL`, `STORAGE_UNAVAILABLE`.
        """
        check_model_id(model_id)
        content = make_export(weights, {"trocar.base": base.spec.model_id})
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
        """Return all published models by id; damaged ones are logged and left out.

        Raises:
            ServiceError: `STORAGE_UNAVAILABLE`.
        """
        found = []
        with disk_errors("published model"):
            for path in sorted(self._folder.iterdir()) if self._folder.is_dir() else ():
                try:
                    found.append(_read(path))
                except (FileNotFoundError, NotADirectoryError):  # being published, or removed
                    continue
                except DamagedError as error:
                    _log.warning("a published model is damaged", model_id=path.name, problem=str(error))
        return found

    def model_spec(self, model: PublishedModel, replace_head: ReplaceHead) -> ModelSpec:
        """Return what the catalogue needs to host a model.

        Args:
            model: One of `entries`.
            replace_head: `head.replace_head`.

        Raises:
            ServiceError: `MODEL_INVALID`, this version of the server cannot host it.
        """
        path = self._folder / model.model_id / model.weights_file
        return model_spec(model, path, replace_head)

    def remove(self, model_id: str) -> None:
        """Remove a model; one that is hosted stays so until it is unloaded.

        Raises:
            ServiceError: `UNKNOWN_MODEL`, `STORAGE_UNAVAILABLE`; `MODEL_INVALID`, the id is none.
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
            with contextlib.suppress(OSError):  # there is something else in it
                os.rmdir(folder)  # noqa: PTH106 - as in `durable`
                sync_folder(self._folder)

    def clean(self) -> int:
        """Remove what killed servers left half-written; returns how many files and folders."""
        return clean_published(
            self._folder, [(model.model_id, model.weights_file) for model in self.entries()]
        )


def _read(path: Path) -> PublishedModel:
    model = read_record(path / MODEL_NAME, _KIND, PublishedModel)
    if model.model_id != path.name:
        raise DamagedError("it is another model's")
    if not WEIGHTS.fullmatch(model.weights_file):
        raise DamagedError("it names no file with weights")
    return model


def _remove_weights(folder: Path, but: str = "") -> None:
    """Remove files with weights that no record names; what cannot be removed is left for the janitor."""
    for entry in os.scandir(folder):
        if WEIGHTS.fullmatch(entry.name) and entry.name != but:
            remove_quietly(folder / entry.name)


@contextlib.contextmanager
def _undone(folder: Path, name: str) -> Iterator[None]:
    """Where publishing fails, leave what was there before, as far as the disk lets us.

    Weights that the record names stay in any case: the record may have been replaced before the disk failed.
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
            os.rmdir(folder)  # noqa: PTH106 - as in `durable`; fails where there is another model
        raise


def _exists(model_id: str) -> ServiceError:
    return ServiceError(
        ErrorReason.MODEL_CONFLICT,
        f"a model '{model_id}' was published already; take another id, or replace it",
    )
