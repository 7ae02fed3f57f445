"""Stored batches of a stream: samples of data sets on the server, as a caller would have sent them."""

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, cast

import numpy as np

from trocar_api.enums import numbers
from trocar_api.reasons import ErrorReason
from trocar_api.v1 import extraction_pb2, tensor_pb2
from trocar_api.v1 import stream_pb2 as pb
from trocar_server.config import Limits
from trocar_server.engine.request.plan import Payload
from trocar_server.errors import ServiceError
from trocar_server.processing.inputs import TextEntry
from trocar_server.rpc.codec.fields import check_batch
from trocar_server.training.datasets import DatasetLibrary, DatasetReader, RawSample
from trocar_server.training.datasets.reader import is_pixels
from trocar_server.training.datasets.stored_text import text_of_sample

_DTYPES = numbers(tensor_pb2.Dtype)


@dataclass(frozen=True)
class StoredInputs:
    """The inputs of a batch."""

    messages: Sequence[extraction_pb2.Input]
    payloads: list[Payload]


class StoredBatches:
    """Reads batches of one caller's data sets; each data set is opened once.

    Args:
        library: Finds data sets.
        principal: The caller.
        limits: The limits of a batch.
    """

    def __init__(self, library: DatasetLibrary, principal: str, limits: Limits) -> None:
        self._library = library
        self._principal = principal
        self._limits = limits
        self._open: dict[str, DatasetReader] = {}

    async def read(self, wanted: pb.StoredSamples) -> StoredInputs:
        """Return the inputs of a batch.

        Raises:
            ServiceError: `UNKNOWN_DATASET`, `DATASET_INVALID`, `DATASET_CORRUPT` or `STORAGE_UNAVAILABLE`;
                `INVALID_ARGUMENT`, there are no such samples; `BATCH_TOO_LARGE`.
        """
        check_batch("stored", wanted.count, self._limits)
        return await asyncio.to_thread(self._read, wanted)

    def close(self) -> None:
        """Close the files."""
        while self._open:
            self._open.popitem()[1].close()

    def _read(self, wanted: pb.StoredSamples) -> StoredInputs:
        reader = self._open.get(wanted.dataset_id)
        if reader is None:
            reader = self._library.open(self._principal, wanted.dataset_id)
            self._open[wanted.dataset_id] = reader
        if wanted.first < 0 or wanted.first + wanted.count > len(reader):
            last = wanted.first + wanted.count - 1
            raise ServiceError(
                ErrorReason.INVALID_ARGUMENT,
                f"stored: samples {wanted.first} to {last} of data set '{wanted.dataset_id}', which has "
                f"{len(reader):,}",
                field="stored",
            )
        samples = reader.samples(range(wanted.first, wanted.first + wanted.count))
        return _inputs(reader, samples, wanted.first)


def _inputs(reader: DatasetReader, samples: Sequence[RawSample], first: int) -> StoredInputs:
    signature = reader.info.signature
    assert signature is not None  # incomplete data sets cannot be opened
    if signature.is_text:
        return _texts(samples, first)
    if signature.inputs is not None:
        return _arrays(samples, signature.inputs.dtype)
    message = extraction_pb2.Input()
    for sample in samples:
        byte_count = len(sample.inputs)
        if signature.is_sound:
            message.audio.clips.add(encoded_byte_count=byte_count)
        else:
            message.images.images.add(encoded_byte_count=byte_count)
    return StoredInputs([message], [np.frombuffer(bytearray(sample.inputs), np.uint8) for sample in samples])


def _arrays(samples: Sequence[RawSample], dtype: str) -> StoredInputs:
    """Return arrays as one tensor; RGB pixels as images, as the client sends them."""
    rows = np.stack([np.asarray(sample.inputs) for sample in samples])
    if is_pixels(rows[0]):
        message = extraction_pb2.Input()
        for _ in samples:
            message.images.images.add(raw=extraction_pb2.RawImage(height=rows.shape[1], width=rows.shape[2]))
        return StoredInputs([message], [row.reshape(-1) for row in rows])
    spec = tensor_pb2.TensorSpec(dtype=_DTYPES[dtype], shape=rows.shape)
    payload = np.ascontiguousarray(rows).reshape(-1).view(np.uint8)
    return StoredInputs([extraction_pb2.Input(tensor=spec)], [payload])


def _texts(samples: Sequence[RawSample], first: int) -> StoredInputs:
    message = extraction_pb2.Input()
    for index, sample in enumerate(samples, first):
        message.texts.entries.append(_text(text_of_sample(index, bytes(sample.inputs))))
    return StoredInputs([message], [])


def _text(entry: TextEntry) -> extraction_pb2.TextEntry:
    """Return a stored text as a message; no chats are stored."""
    message, content = extraction_pb2.TextEntry(), cast("Any", entry.content)
    if entry.kind == "text":
        message.text = content
    elif entry.kind == "pair":
        message.pair.first, message.pair.second = content
    elif entry.kind == "ids":
        message.token_ids.ids.extend(content)
    else:
        message.words.words.extend(content)
    return message
