"""Part of the sync client: generated from _aio_datasets.py by tools/generate_sync.py, do not edit."""

from __future__ import annotations

from typing import TYPE_CHECKING

import grpc

from trocar._channel import new_request_id
from trocar._client_attributions import Attributions
from trocar._client_members import merged
from trocar._concurrency import sync_compute, sync_pause
from trocar._rpc_errors import is_broken_connection
from trocar._stored_datasets import begin_request, missing_shards, shard_requests, stored_dataset
from trocar._uploads.opening import opened_upload
from trocar._uploads.plan import UploadProgress
from trocar._uploads.shards import SHARD_BYTES
from trocar_api.v1 import dataset_pb2

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from trocar._stored_datasets import StoredDataset
    from trocar._uploads.plan import UploadPlan
    from trocar._uploads.shards import Shard

_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.1, 2.0


class Datasets(Attributions):
    """Data sets on the server: uploaded, listed, deleted."""

    def upload_dataset(
        self,
        source: object,
        *,
        targets: object = None,
        name: str = "",
        categories: Sequence[str] | None = None,
        progress: Callable[[UploadProgress], object] | None = None,
        shard_bytes: int = SHARD_BYTES,
        timeout_s: float | None = None,
    ) -> StoredDataset:
        """Store samples and what is to be learnt of them on the server, to train on.

            dataset = client.upload_dataset((images, labels), name="digits")
            dataset = client.upload_dataset("flowers/")        # flowers/daisy/1.jpg, flowers/rose/7.jpg
            dataset = client.upload_dataset(torch_dataset)     # samples are (inputs, target)

        It belongs to whoever uploaded it, by token; others neither see nor use it. A broken connection is
        made again. What was interrupted goes on where it was when it is called again with the same source:
        only what is missing is sent, and nothing where all of it is there already.

        Args:
            source: Arrays, as (inputs, targets) or inputs alone, with samples in the first dimension; a
                folder with one folder of JPEG, PNG or WebP files for each class, sent as they are; a `.npz`
                file with `inputs` and `targets`; a torch Dataset or anything else with `__len__` and
                `__getitem__`, whose samples are (inputs, target) or (inputs, {name: target}); a Hugging Face
                dataset; or "torch:module:name" or "hf:name:split:column". Inputs are arrays of one dtype and
                shape, which the model takes as they are; uint8 (height, width, 3), images, paths or encoded
                bytes, which its preprocessing takes.
            targets: With arrays: one array, or a mapping of several by name. With a Hugging Face dataset: the
                column to learn, or several.
            name: For people; made of the source when empty.
            categories: Names of the classes by label; taken from the source when None, where it has any.
            progress: Called as samples are read, possibly from another thread, and as shards are stored.
            shard_bytes: Of samples that are sent, checked and stored at once, up to 255 MiB.
            timeout_s: Deadline of each call, one for a shard, in seconds.

        Raises:
            SourceError: The source cannot be read, or its samples are not alike.
            DatasetInvalidError: No data set can be made of it, for example since an image is damaged.
            QuotaExceededError: It is more than you may store; see `datasets` and `delete_dataset`.
            StorageFullError: The server's disk is full.
            TypeError: Something in it cannot be stored, or `targets` do not go with it.
            ValueError: It has no sample, or `shard_bytes` is out of range.
        """
        home = self._home()
        report = progress or _ignore
        with opened_upload(source, targets, name, categories, shard_bytes) as plan:
            shards = sync_compute(_read, plan, report)
            reply = home._call(home._datasets.BeginUpload, begin_request(plan, shards), timeout_s)
            missing = missing_shards(reply, shards)
            sent, missing_bytes = 0, sum(shard.byte_count for shard in missing)
            total = sum(shard.byte_count for shard in shards)
            report(UploadProgress(plan.sample_count, plan.sample_count, sent, missing_bytes, total))
            for shard in missing:
                home._send_shard(reply.dataset_id, shard, timeout_s)
                sent += shard.byte_count
                report(UploadProgress(plan.sample_count, plan.sample_count, sent, missing_bytes, total))
        request = dataset_pb2.CommitUploadRequest(dataset_id=reply.dataset_id)
        committed = home._call(home._datasets.CommitUpload, request, timeout_s)
        return stored_dataset(committed.dataset)

    def datasets(self) -> list[StoredDataset]:
        """Return the data sets to train on: the operator's, then your own, the oldest first."""

        def ask(one: Datasets) -> list[StoredDataset]:
            reply = one._call(one._datasets.ListDatasets, dataset_pb2.ListDatasetsRequest())
            return [stored_dataset(message) for message in reply.datasets]

        return merged(self._everywhere(ask), lambda dataset: dataset.dataset_id)

    def dataset(self, dataset_id: str) -> StoredDataset:
        """Return one data set, categories included.

        Args:
            dataset_id: Its id, or the name of one that the operator listed.

        Raises:
            UnknownDatasetError: You have no data set of this id.
        """
        request = dataset_pb2.GetDatasetRequest(dataset_id=dataset_id)

        def ask(one: Datasets) -> StoredDataset:
            return stored_dataset((one._call(one._datasets.GetDataset, request)).dataset)

        return self._found(ask)

    def delete_dataset(self, dataset_id: str) -> None:
        """Delete a data set of yours, or end an upload.

        Args:
            dataset_id: Its id.

        Raises:
            UnknownDatasetError: You have no data set of this id.
            InvalidArgumentError: It is the operator's.
        """
        request = dataset_pb2.DeleteDatasetRequest(dataset_id=dataset_id)

        def ask(one: Datasets) -> object:
            return one._call(one._datasets.DeleteDataset, request)

        self._found(ask)

    def _send_shard(self, dataset_id: str, shard: Shard, timeout_s: float | None) -> None:
        """Send one shard, again where the connection breaks."""
        parts = sync_compute(shard.parts)
        failures = 0
        while True:
            request_id = new_request_id()
            try:
                self._datasets.UploadShard(
                    shard_requests(dataset_id, shard, parts),
                    timeout=self._timeout(timeout_s),
                    metadata=self._options.metadata(request_id),
                )
                return
            except grpc.RpcError as error:
                failures += 1
                if failures > self._options.retries or not is_broken_connection(error):
                    raise self._converted(error, request_id) from error
            sync_pause(min(_FIRST_PAUSE_S * 2**failures, _LONGEST_PAUSE_S))


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
