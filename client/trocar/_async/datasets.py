"""Stored data sets for training on the server, with asyncio."""

from __future__ import annotations

from typing import TYPE_CHECKING

from trocar._async.members import merged
from trocar._base.concurrency import async_compute
from trocar._base.tables import Listing
from trocar._uploads.shards import SHARD_BYTES
from trocar._uploads.upload_opening import opened_upload
from trocar._uploads.upload_plan import UploadProgress
from trocar._wire.stored_datasets import (
    DATASET_COLUMNS,
    StoredDataset,
    begin_request,
    is_dataset_id,
    missing_shards,
    shard_requests,
    stored_dataset,
)
from trocar_api.v1 import dataset_pb2

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from trocar._async.connection import AsyncConnection
    from trocar._uploads.shards import Shard
    from trocar._uploads.upload_plan import UploadPlan


class AsyncDatasets:
    """Data sets on the server: uploaded, listed, deleted."""

    def __init__(self, connection: AsyncConnection) -> None:
        self._connection = connection

    async def upload_dataset(
        self,
        source: object,
        *,
        targets: object = None,
        name: str = "",
        categories: Sequence[str] | None = None,
        progress: Callable[[UploadProgress], object] | None = None,
        shard_bytes: int | str = SHARD_BYTES,
        timeout_s: float | None = None,
    ) -> StoredDataset:
        """Store samples and their targets on the server, for training.

            dataset = await client.upload_dataset((images, labels), name="digits")
            dataset = await client.upload_dataset("flowers/")        # flowers/daisy/1.jpg, flowers/rose/7.jpg
            dataset = await client.upload_dataset(torch_dataset)     # samples are (inputs, target)
            dataset = await client.upload_dataset((texts, labels))   # lists; or "reviews.csv"

        The data set belongs to its uploader, by token; others can neither see nor use it. A broken connection
        is reopened. To resume an interrupted upload, call this again with the same source: only missing
        shards are sent, and none if all are already stored.

        Args:
            source: Arrays, as (inputs, targets) or only inputs, with samples in the first dimension; images
                or arrays in a list, as (images, targets); a folder with one folder for each class, of JPEG,
                PNG or WebP files, else of `.wav` and `.flac` files, else of `.txt` files, sent unchanged; a
                `.npz` file with `inputs` and `targets`; a torch Dataset or anything else with `__len__` and
                `__getitem__`, whose samples are (inputs, target) or (inputs, {name: target}); a Hugging Face
                dataset; or "torch:module:name" or "hf:name:split:column". Or sound, which the model's feature
                extractor takes in each fit: `trocar.audio(...)`, or a list of paths, as (sound, labels) or
                without labels. Or texts, which the model's tokenizer takes in each fit: a list of texts,
                pairs of texts or lists of token ids, as (texts, labels) or without labels; a `.csv`, `.jsonl`
                or `.parquet` file with the columns `text` (or `sentence1` and `sentence2`) and `label`, or a
                Hugging Face dataset with these. Other inputs are arrays of one dtype and shape, which go to
                the model unchanged; or uint8 (height, width, 3), images, paths or encoded bytes, which are
                preprocessed.
            targets: With arrays, lists, texts and sound: one array, or a mapping of several by name; a list
                of labels for each text labels its tokens. With a table or a Hugging Face dataset: the target
                column, or several.
            name: A name for people; derived from the source when empty.
            categories: Names of the classes by label; when None, taken from the source, if it has any.
            progress: Called as samples are read, possibly from another thread, and as shards are stored.
            shard_bytes: Bytes of samples that are sent, checked and stored at once, up to 255 MiB.
            timeout_s: Deadline of each call, one for a shard, in seconds.

        Raises:
            SourceError: The source cannot be read, or its samples are not alike.
            DatasetInvalidError: The source cannot be a data set, for example because an image is damaged.
            QuotaExceededError: It exceeds your quota; see `datasets` and `delete_dataset`.
            StorageFullError: The server's disk is full.
            TypeError: Something in it cannot be stored, or `targets` do not fit the source.
            ValueError: It has no sample, or `shard_bytes` is out of range.
        """
        home = await self._connection.home()
        report = progress or _ignore
        with opened_upload(source, targets, name, categories, shard_bytes) as plan:
            shards = await async_compute(_read, plan, report)
            reply = await home.call(home.dataset_service.BeginUpload, begin_request(plan, shards), timeout_s)
            missing = missing_shards(reply, shards)
            sent, missing_bytes = 0, sum(shard.byte_count for shard in missing)
            total = sum(shard.byte_count for shard in shards)
            report(UploadProgress(plan.sample_count, plan.sample_count, sent, missing_bytes, total))
            for shard in missing:
                await _send_shard(home, reply.dataset_id, shard, timeout_s)
                sent += shard.byte_count
                report(UploadProgress(plan.sample_count, plan.sample_count, sent, missing_bytes, total))
        request = dataset_pb2.CommitUploadRequest(dataset_id=reply.dataset_id)
        committed = await home.call(home.dataset_service.CommitUpload, request, timeout_s)
        return stored_dataset(committed.dataset)

    async def datasets(self) -> list[StoredDataset]:
        """Return the data sets to train on: the operator's, then your own, the oldest first."""

        async def ask(one: AsyncConnection) -> list[StoredDataset]:
            reply = await one.call(one.dataset_service.ListDatasets, dataset_pb2.ListDatasetsRequest())
            return [stored_dataset(message) for message in reply.datasets]

        result = merged(await self._connection.everywhere(ask), lambda dataset: dataset.dataset_id)
        return Listing(result, DATASET_COLUMNS)

    async def dataset(self, dataset_id: str) -> StoredDataset:
        """Return one data set, including its categories.

        Args:
            dataset_id: Its id, or the name of a data set of the server's configuration.

        Raises:
            UnknownDatasetError: You have no data set of this id.
        """
        request = dataset_pb2.GetDatasetRequest(dataset_id=dataset_id)

        async def ask(one: AsyncConnection) -> StoredDataset:
            return stored_dataset((await one.call(one.dataset_service.GetDataset, request)).dataset)

        return await self._connection.find(ask)

    async def delete_dataset(self, dataset_id: str) -> None:
        """Delete one of your data sets, or end an upload.

        Args:
            dataset_id: Its id.

        Raises:
            UnknownDatasetError: You have no data set of this id.
            InvalidArgumentError: It belongs to the server's configuration.
        """
        request = dataset_pb2.DeleteDatasetRequest(dataset_id=dataset_id)

        async def ask(one: AsyncConnection) -> object:
            return await one.call(one.dataset_service.DeleteDataset, request)

        await self._connection.find(ask)

    async def dataset_id(
        self, source: object, on_upload: Callable[[UploadProgress], object] | None = None
    ) -> str:
        """Return the id of a data set on the server; any other source is uploaded first."""
        if isinstance(source, StoredDataset):
            return source.dataset_id
        if isinstance(source, str) and is_dataset_id(source):
            return source
        return (await self.upload_dataset(source, progress=on_upload)).dataset_id


async def _send_shard(
    connection: AsyncConnection, dataset_id: str, shard: Shard, timeout_s: float | None
) -> None:
    """Send one shard, with retries after a broken connection."""
    parts = await async_compute(shard.parts)

    async def attempt(request_id: str, left_s: float) -> object:
        requests, metadata = shard_requests(dataset_id, shard, parts), connection.options.metadata(request_id)
        return await connection.dataset_service.UploadShard(requests, timeout=left_s, metadata=metadata)

    await connection.repeated(attempt, timeout_s, resumes=True)


def _read(plan: UploadPlan, report: Callable[[UploadProgress], object]) -> list[Shard]:
    """Read every sample once and return the shards."""
    shards, count = [], 0
    for shard in plan.shards():
        shards.append(shard)
        count += shard.sample_count
        report(UploadProgress(count, plan.sample_count))
    return shards


def _ignore(_: UploadProgress) -> None:
    pass
