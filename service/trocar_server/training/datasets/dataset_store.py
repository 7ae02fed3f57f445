"""Data set store: durable, per principal, with quotas and deduplicated content."""

import os
import secrets
import time
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from threading import Lock

from trocar_api.reasons import ErrorReason
from trocar_server.errors import ServiceError
from trocar_server.storage.disk_errors import disk_errors
from trocar_server.storage.durable import make_folder, sync_folder
from trocar_server.storage.shared_lock import SharedLock
from trocar_server.training.datasets import dataset_janitor
from trocar_server.training.datasets.dataset_records import DatasetRecord, write_record
from trocar_server.training.datasets.dataset_schema import DatasetInfo, Manifest, SampleSignature, Shard
from trocar_server.training.datasets.incoming import IncomingShard
from trocar_server.training.datasets.inspection import inspect, joined
from trocar_server.training.datasets.layout import DatasetLayout, sizes, unknown_dataset
from trocar_server.training.datasets.stored_shard import StoredShard
from trocar_server.training.datasets.upload_checks import check_manifest

MAX_DATASETS = 256
"""Per principal, uploads included."""
MAX_INCOMING = 4
"""The most concurrent shard uploads per principal."""


@dataclass(frozen=True)
class Upload:
    """An upload in progress."""

    dataset_id: str
    """Id of the future data set."""
    missing: tuple[int, ...]
    """Indices of the shards to send, each content once."""


class DatasetStore:
    """Stores data sets in a folder, which is created with the first one.

        upload = store.begin("alice", manifest)
        for index in upload.missing:
            incoming = store.receive("alice", upload.dataset_id, manifest.shards[index].sha256)
            try:
                store.write(incoming, data)
                store.keep("alice", upload.dataset_id, incoming)
            finally:
                store.release("alice", incoming)
        store.commit("alice", upload.dataset_id)

    Every method may block on the disk: not for the event loop. All are safe to call from several threads.

    Args:
        folder: The folder.
        max_bytes: Quota per principal; each content counts once, uploads included.
        max_pixels: The most pixels of one encoded image.
        clock: Returns the seconds since 1970.
    """

    def __init__(
        self, folder: Path, max_bytes: int, max_pixels: int, clock: Callable[[], float] = time.time
    ) -> None:
        self.max_bytes = max_bytes
        self._layout = DatasetLayout(folder)
        self._max_pixels = max_pixels
        self._clock = clock
        self._lock = SharedLock(folder)  # guards check-then-write sequences, also of other servers
        self._counting = Lock()
        self._incoming: Counter[str] = Counter()

    def set_limits(self, max_bytes: int, max_pixels: int) -> None:
        """Change the limits of future uploads."""
        self.max_bytes, self._max_pixels = max_bytes, max_pixels

    def begin(self, principal: str, manifest: Manifest) -> Upload:
        """Begin an upload, or resume the one with an equal manifest, even a complete one.

        Raises:
            ServiceError: `DATASET_INVALID`, `QUOTA_EXCEEDED`, `STORAGE_FULL` or `STORAGE_UNAVAILABLE`.
        """
        check_manifest(manifest)
        with disk_errors("data set"):
            make_folder(self._layout.folder)
        with disk_errors("data set"), self._lock:
            now_s = self._clock()
            dataset_janitor.end_old_uploads(self._layout, principal, now_s)
            records = self._layout.records(principal)
            known = next((record for record in records if record.manifest == manifest), None)
            if known is None:
                self._check_room(records, manifest)
                known = DatasetRecord(principal, secrets.token_hex(16), now_s, manifest)
                self._layout.make_folders(principal)
                write_record(self._layout.path(principal, known.dataset_id), known)
            else:
                os.utime(self._layout.path(principal, known.dataset_id), (now_s, now_s))
            return Upload(known.dataset_id, self._missing(known))

    def receive(self, principal: str, dataset_id: str, sha256: str) -> IncomingShard:
        """Begin to receive one shard of an upload; `release` must follow.

        Raises:
            ServiceError: `UNKNOWN_DATASET`; `DATASET_INVALID`, the manifest has no such shard; `SERVER_BUSY`,
                too many concurrent uploads; `STORAGE_FULL` or `STORAGE_UNAVAILABLE`.
        """
        with disk_errors("data set"):
            shards = self._layout.record(principal, dataset_id).manifest.shards
            shard = next((shard for shard in shards if shard.sha256 == sha256), None)
            if shard is None:
                raise _invalid("the upload's manifest has no shard with this sha256")
            self._enter(principal)
            try:
                return IncomingShard(self._layout.incoming, shard)
            except BaseException:
                self._leave(principal)
                raise

    def write(self, incoming: IncomingShard, data: bytes) -> None:
        """Append bytes to an incoming shard.

        Raises:
            ServiceError: `DATASET_INVALID`, they are too many; `STORAGE_FULL` or `STORAGE_UNAVAILABLE`.
        """
        with disk_errors("data set"):
            incoming.write(data)

    def keep(self, principal: str, dataset_id: str, incoming: IncomingShard) -> None:
        """Check a completely received shard, and store it durably.

        Raises:
            ServiceError: `DATASET_INVALID`; `UNKNOWN_DATASET`, the upload was ended meanwhile;
                `STORAGE_FULL` or `STORAGE_UNAVAILABLE`.
        """
        sha256 = incoming.shard.sha256
        with disk_errors("data set"):
            incoming.check(self._max_pixels)
            with self._lock:
                self._layout.record(principal, dataset_id)
                incoming.keep(self._layout.own(principal, sha256), self._layout.pooled(sha256))

    def release(self, principal: str, incoming: IncomingShard) -> None:
        """Release an incoming shard; discard it unless it was kept."""
        incoming.close()
        self._leave(principal)

    def commit(self, principal: str, dataset_id: str) -> DatasetInfo:
        """Commit an upload as a data set, durably; has no effect on a committed one.

        Raises:
            ServiceError: `UNKNOWN_DATASET`; `DATASET_INVALID`, shards are missing or inconsistent;
                `STORAGE_FULL` or `STORAGE_UNAVAILABLE`.
        """
        with disk_errors("data set"):
            record = self._layout.record(principal, dataset_id)
            missing = self._missing(record)
            if missing:
                raise _invalid(
                    f"{len(missing)} of {len(record.manifest.shards)} shards are missing, the first is "
                    f"shards[{missing[0]}]; begin the upload again and send them"
                )
            if record.signature is not None:
                return record.info()
            signature = joined(self._signature(principal, shard) for shard in record.manifest.shards)
            complete = replace(record, signature=signature, stored_at_s=self._clock())
            with self._lock:
                self._layout.record(principal, dataset_id)  # raises if it was deleted meanwhile
                write_record(self._layout.path(principal, dataset_id), complete)
            return complete.info()

    def entries(self, principal: str) -> list[DatasetInfo]:
        """Return the principal's data sets and uploads, oldest first, then those that cannot be read.

        Raises:
            ServiceError: `STORAGE_UNAVAILABLE`.
        """
        with disk_errors("data set"):
            result = [record.info() for record in self._layout.records(principal)]
            problems = self._layout.unreadable(principal)
        unreadable = [
            DatasetInfo(name, "", 0, 0, (), None, 0.0, problem=why) for name, why in problems.items()
        ]
        return [*sorted(result, key=lambda info: (info.stored_at_s, info.dataset_id)), *unreadable]

    def get(self, principal: str, dataset_id: str) -> DatasetInfo:
        """Return one data set or upload.

        Raises:
            ServiceError: `UNKNOWN_DATASET`, `DATASET_CORRUPT` or `STORAGE_UNAVAILABLE`.
        """
        with disk_errors("data set"):
            return self._layout.record(principal, dataset_id).info()

    def byte_count(self, principal: str) -> int:
        """Return the bytes that a principal stores, uploads included, each content once.

        Raises:
            ServiceError: `STORAGE_UNAVAILABLE`.
        """
        with disk_errors("data set"):
            return sum(sizes(self._layout.records(principal)).values())

    def shards(self, principal: str, dataset_id: str) -> list[StoredShard]:
        """Return the stored shards of a complete data set, in order.

        Raises:
            ServiceError: `UNKNOWN_DATASET`; `DATASET_INVALID`, it is still being uploaded; `DATASET_CORRUPT`
                or `STORAGE_UNAVAILABLE`.
        """
        with disk_errors("data set"):
            record = self._layout.record(principal, dataset_id)
        if record.signature is None:
            raise _invalid("the data set is still being uploaded; finish its upload first")
        layout = self._layout
        return [
            StoredShard(layout.own(principal, shard.sha256), shard, layout.pooled(shard.sha256))
            for shard in record.manifest.shards
        ]

    def delete(self, principal: str, dataset_id: str) -> None:
        """Delete a data set, damaged or not, or abort an upload; its unreferenced shards are deleted too.

        Raises:
            ServiceError: `UNKNOWN_DATASET` or `STORAGE_UNAVAILABLE`.
        """
        with disk_errors("data set"), self._lock:
            path = self._layout.path(principal, dataset_id)
            try:
                path.unlink()
            except FileNotFoundError:
                raise unknown_dataset(dataset_id) from None
            sync_folder(path.parent)
            self._layout.drop_unused_shards(principal)
            self._layout.drop_empty_folders(principal)

    def clean(self) -> None:
        """Remove leftovers of killed servers; called at server start."""
        with suppress(OSError), self._lock:
            dataset_janitor.clean(self._layout, self._clock)

    def _check_room(self, records: list[DatasetRecord], manifest: Manifest) -> None:
        if len(records) >= MAX_DATASETS:
            raise _too_much(f"you have {len(records)} data sets and uploads, the maximum")
        total = sum({**sizes(records), **manifest.sizes()}.values())
        if total > self.max_bytes:
            raise _too_much(
                f"your data sets would be {total:,} bytes, the limit is {self.max_bytes:,}",
                byte_count=str(total),
                limit=str(self.max_bytes),
            )

    def _missing(self, record: DatasetRecord) -> tuple[int, ...]:
        seen: set[str] = set()
        missing = []
        for index, shard in enumerate(record.manifest.shards):
            if shard.sha256 not in seen and not self._has(record.principal, shard):
                missing.append(index)
            seen.add(shard.sha256)
        return tuple(missing)

    def _has(self, principal: str, shard: Shard) -> bool:
        try:
            return self._layout.own(principal, shard.sha256).stat().st_size == shard.byte_count
        except FileNotFoundError:
            return False

    def _signature(self, principal: str, shard: Shard) -> SampleSignature:
        with self._layout.own(principal, shard.sha256).open("rb") as file:
            return inspect(file.fileno())[1]

    def _enter(self, principal: str) -> None:
        with self._counting:
            if self._incoming[principal] >= MAX_INCOMING:
                raise ServiceError(
                    ErrorReason.SERVER_BUSY,
                    f"{MAX_INCOMING} of your shards are being received, the maximum; send the next when "
                    "one is complete",
                )
            self._incoming[principal] += 1

    def _leave(self, principal: str) -> None:
        with self._counting:
            self._incoming[principal] -= 1
            if not self._incoming[principal]:
                del self._incoming[principal]


def _invalid(problem: str) -> ServiceError:
    return ServiceError(ErrorReason.DATASET_INVALID, problem)


def _too_much(problem: str, **details: str) -> ServiceError:
    return ServiceError(ErrorReason.QUOTA_EXCEEDED, f"{problem}; delete some first", **details)
