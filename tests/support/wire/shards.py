"""Shards made with the safetensors library, as a client without ours would make them."""

import hashlib
import io
from collections.abc import Sequence
from typing import Any

import numpy as np
from PIL import Image
from safetensors.numpy import save

from trocar_server.training.datasets import DatasetStore, Manifest, Shard


def shard_of(**tensors: np.ndarray[Any, Any]) -> bytes:
    """Return the bytes of a shard; `targets_a` stands for `targets.a`."""
    named = {name.replace("_", ".", 1): np.ascontiguousarray(array) for name, array in tensors.items()}
    return save(named)


def image_shard(images: Sequence[bytes], **targets: np.ndarray[Any, Any]) -> bytes:
    """Return the bytes of a shard of encoded images."""
    offsets = np.cumsum([0, *map(len, images)], dtype=np.int64)
    return shard_of(images=np.frombuffer(b"".join(images), np.uint8), offsets=offsets, **targets)


def png(pixels: np.ndarray[Any, Any]) -> bytes:
    """Encode pixels."""
    file = io.BytesIO()
    Image.fromarray(pixels).save(file, "PNG")
    return file.getvalue()


def manifest_of(*shards: tuple[bytes, int], name: str = "digits", categories: Sequence[str] = ()) -> Manifest:
    """Describe shards, each with its number of samples."""
    described = tuple(Shard(hashlib.sha256(data).hexdigest(), len(data), count) for data, count in shards)
    return Manifest(name, sum(count for _, count in shards), tuple(categories), described)


def send(store: DatasetStore, principal: str, dataset_id: str, data: bytes) -> None:
    """Send one shard in two parts."""
    incoming = store.receive(principal, dataset_id, hashlib.sha256(data).hexdigest())
    try:
        store.write(incoming, data[: len(data) // 2])
        store.write(incoming, data[len(data) // 2 :])
        store.keep(principal, dataset_id, incoming)
    finally:
        store.release(principal, incoming)


def upload(store: DatasetStore, principal: str, *shards: tuple[bytes, int], **fields: Any) -> str:
    """Upload a data set and return its id; only what is missing is sent."""
    begun = store.begin(principal, manifest_of(*shards, **fields))
    for index in begun.missing:
        send(store, principal, begun.dataset_id, shards[index][0])
    return store.commit(principal, begun.dataset_id).dataset_id
