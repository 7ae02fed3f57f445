"""Headers of shards from strangers: read as safetensors reads them, or refused; never anything else."""

import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.files.scale import count
from tests.support.wire.shards import image_shard, shard_of
from trocar_api.reasons import ErrorReason
from trocar_server.errors import ServiceError
from trocar_server.training.datasets.inspection import inspect, read_exactly, shard_header


@contextmanager
def descriptor_of(content: bytes) -> Iterator[int]:
    descriptor = os.memfd_create("shard")
    try:
        os.write(descriptor, content)
        yield descriptor
    finally:
        os.close(descriptor)


def inspected(content: bytes) -> Any:
    with descriptor_of(content) as descriptor:
        return inspect(descriptor)


def reason(content: bytes) -> ErrorReason:
    with pytest.raises(ServiceError) as caught:
        inspected(content)
    return caught.value.reason


def file_of(header: object, data: bytes = b"") -> bytes:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return len(text).to_bytes(8, "little") + text + data


def entry(dtype: object = "F32", shape: object = (2, 1), offsets: object = (0, 8), **more: Any) -> Any:
    return {"dtype": dtype, "shape": shape, "data_offsets": offsets, **more}


def test_what_safetensors_writes_is_read() -> None:
    arrays = {
        "inputs": np.arange(12, dtype=np.float16).reshape(3, 2, 2),
        "targets_a": np.array([True, False, True]),
        "targets_b": np.array([[-5], [7], [7]], np.int16),
    }
    count, signature = inspected(shard_of(**arrays))
    assert count == 3
    assert signature.inputs is not None
    assert (signature.inputs.dtype, signature.inputs.shape) == ("float16", (2, 2))
    assert signature.targets["a"].dtype == "bool"
    assert signature.targets["a"].low is None
    assert (signature.targets["b"].low, signature.targets["b"].high, signature.targets["b"].labels) == (
        -5,
        7,
        (-5, 7),
    )
    with descriptor_of(shard_of(**arrays)) as descriptor:
        found = shard_header(descriptor)["inputs"]
        assert os.pread(descriptor, found.byte_count, found.start) == arrays["inputs"].tobytes()


def test_labels_are_listed_up_to_a_number_and_counted_in_parts() -> None:
    _, signature = inspected(shard_of(inputs=np.zeros((70_000, 1), np.uint8), targets=np.arange(70_000)))
    assert (signature.targets[""].labels, signature.targets[""].high) == (None, 69_999)
    masks = np.zeros((3, 2048, 1024), np.uint8)
    masks[2, -1, -1] = 255
    _, signature = inspected(shard_of(inputs=np.zeros((3, 1), np.uint8), targets=masks))
    assert signature.targets[""].labels == (0, 255)


GOOD = {"inputs": entry()}


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"\0" * 7,
        (1 << 63).to_bytes(8, "little") + b"{}",
        (2 << 20).to_bytes(8, "little") + b" " * (2 << 20),
        file_of(b"[]"),
        file_of(b"\xff\xff"),
        file_of(b"[" * 100_000),
        file_of({}),
        file_of({"__metadata__": {"a": "b"}}),
        file_of(b'{"inputs": 1, "inputs": 2}'),
        file_of({"inputs": 7}, bytes(8)),
        file_of({"inputs": entry(dtype="F8_E4M3")}, bytes(8)),
        file_of({"inputs": entry(dtype=["F32"])}, bytes(8)),
        file_of({"inputs": entry(dtype="C64")}, bytes(8)),
        file_of({"inputs": entry(shape=[2, True])}, bytes(8)),
        file_of({"inputs": entry(shape=[2.0, 1])}, bytes(8)),
        file_of({"inputs": entry(shape=[-2, -1])}, bytes(8)),
        file_of({"inputs": entry(shape=[2, *[1] * 8])}, bytes(8)),
        file_of({"inputs": entry(shape=[1 << 62, 1 << 62, 1 << 62, 0], offsets=[0, 0])}),
        file_of({"inputs": entry(shape=[1 << 62, 0], offsets=[0, 0])}),
        file_of({"inputs": entry(shape=[], offsets=[0, 4])}, bytes(4)),
        file_of({"inputs": entry(shape=[0, 1], offsets=[0, 0])}),
        file_of({"inputs": entry(offsets=[8, 0])}, bytes(8)),
        file_of({"inputs": entry(offsets=[0, 8, 9])}, bytes(8)),
        file_of({"inputs": entry(more=1)}, bytes(8)),
        file_of(GOOD, bytes(7)),
        file_of(GOOD, bytes(9)),
        file_of({"inputs": entry(offsets=[8, 16])}, bytes(16)),
        file_of({"inputs": entry(), "targets": entry()}, bytes(8)),
        file_of({"inputs": entry(), "targets": entry(offsets=[4, 12])}, bytes(12)),
        file_of({"inputs": entry(), "targets": entry(shape=[3], offsets=[8, 20])}, bytes(20)),
        file_of({"inputs": entry(), "other": entry(offsets=[8, 16])}, bytes(16)),
        file_of({"inputs": entry(), "targets.": entry(offsets=[8, 16])}, bytes(16)),
        file_of({"inputs": entry(), "targets.\n": entry(offsets=[8, 16])}, bytes(16)),
        file_of({"targets": entry()}, bytes(8)),
        file_of({str(index): entry(offsets=[0, 0], shape=[0]) for index in range(10_001)}),
    ],
)
def test_what_is_no_shard_is_refused(content: bytes) -> None:
    assert reason(content) is ErrorReason.DATASET_INVALID


@pytest.mark.parametrize(
    "offsets",
    [[0, 2, 2, 4], [0, 3, 2, 4], [1, 2, 3, 4], [0, 1, 2, 5], [0, 1, 2, 3], [0, -1, 2, 4], [0, 1 << 62, 2, 4]],
)
def test_offsets_that_do_not_cut_the_images_are_refused(offsets: list[int]) -> None:
    images = np.zeros(4, np.uint8)
    assert reason(shard_of(images=images, offsets=np.array(offsets))) is ErrorReason.DATASET_INVALID


def test_images_and_arrays_do_not_go_together() -> None:
    images, offsets = np.zeros(4, np.uint8), np.array([0, 4])
    for tensors in (
        {"images": images},
        {"offsets": offsets},
        {"images": images, "offsets": offsets, "inputs": np.zeros((1, 1))},
        {"images": images.view(np.int8), "offsets": offsets},
        {"images": images, "offsets": offsets.astype(np.int32)},
        {"images": images.reshape(2, 2), "offsets": offsets},
    ):
        assert reason(shard_of(**tensors)) is ErrorReason.DATASET_INVALID


SHARD = shard_of(inputs=np.arange(6, dtype=np.float32).reshape(3, 2), targets=np.arange(3))
IMAGES = image_shard([b"abc", b"de"], targets_a=np.arange(2))


@settings(max_examples=count(2000), deadline=None)
@given(
    base=st.sampled_from([SHARD, IMAGES]),
    changes=st.lists(st.tuples(st.integers(0, 400), st.integers(0, 255)), max_size=4),
    cut=st.integers(0, 300) | st.just(400),
    tail=st.binary(max_size=4),
)
def test_a_mutated_shard_is_read_or_refused(
    base: bytes, changes: list[tuple[int, int]], cut: int, tail: bytes
) -> None:
    content = bytearray(base[:cut] + tail)
    for position, value in changes:
        if position < len(content):
            content[position] = value
    found = count_or_reason(bytes(content))
    assert found is ErrorReason.DATASET_INVALID or 1 <= int(found) <= len(content)


def count_or_reason(content: bytes) -> int | ErrorReason:
    try:
        return int(inspected(content)[0])
    except ServiceError as error:
        return error.reason


def test_a_shard_on_disk_is_never_mapped(tmp_path: Path) -> None:
    path = tmp_path / "shard"
    path.write_bytes(SHARD)
    with path.open("r+b") as file:
        found = shard_header(file.fileno())
        file.truncate(len(SHARD) - 20)
        with pytest.raises(ServiceError) as caught:
            read_exactly(file.fileno(), found["inputs"].start, found["inputs"].byte_count)
    assert caught.value.reason is ErrorReason.DATASET_CORRUPT
