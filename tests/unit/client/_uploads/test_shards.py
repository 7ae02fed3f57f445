"""Shards as the client makes them: what safetensors reads, and the same bytes for the same samples."""

from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load

from trocar._uploads.array_shards import array_plan
from trocar._uploads.folder_shards import folder_plan
from trocar._uploads.object_shards import object_rows, row_shards
from trocar._uploads.shards import Parts, Shard, Tensor, array_parts, image_parts, make_shard, pieces
from trocar.errors import SourceError


def joined(parts: Parts) -> bytes:
    return b"".join(parts)


@pytest.mark.parametrize(
    "dtype", ["float64", "float32", "float16", "int64", "int16", "int8", "uint8", "bool"]
)
def test_safetensors_reads_what_is_made(dtype: str) -> None:
    inputs = np.arange(12).reshape(3, 4).astype(dtype)
    targets = np.arange(3, dtype=np.int64)
    found = load(
        joined(array_parts({"inputs": Tensor(dtype, inputs), "targets.a": Tensor("int64", targets)}))
    )
    np.testing.assert_array_equal(found["inputs"], inputs)
    np.testing.assert_array_equal(found["targets.a"], targets)
    assert found["inputs"].dtype == inputs.dtype


def test_order_in_memory_does_not_matter() -> None:
    array = np.arange(24, dtype=np.float32).reshape(4, 6)
    for other in (np.asfortranarray(array), array.astype(">f4"), np.repeat(array, 2, 1)[:, ::2]):
        first = array_parts({"inputs": Tensor("float32", array)})
        assert joined(array_parts({"inputs": Tensor("float32", other)})) == joined(first)


def test_images_lie_between_their_offsets() -> None:
    found = load(joined(image_parts([b"one", b"three"], {"targets": Tensor("int64", np.array([4, 2]))})))
    assert found["offsets"].tolist() == [0, 3, 8]
    assert found["images"].tobytes() == b"onethree"


@pytest.mark.parametrize("sizes", [[], [0], [5], [10, 10], [3, 0, 25, 1], [10] * 5])
def test_pieces_are_all_of_one_length_but_the_last(sizes: list[int]) -> None:
    parts = [bytes([number + 1]) * size for number, size in enumerate(sizes)]
    found = list(pieces(map(memoryview, parts), 10))
    assert b"".join(found) == b"".join(parts)
    assert all(len(piece) == 10 for piece in found[:-1])
    assert all(found)


def test_a_shard_that_changes_is_found_out() -> None:
    data = bytearray(b"abc")
    shard = make_shard(lambda: [memoryview(bytes(data))], 1)
    assert joined(shard.parts()) == b"abc"
    data[0] = 0
    with pytest.raises(SourceError, match="the source changed"):
        shard.parts()


def test_arrays_are_cut_by_bytes() -> None:
    plan = array_plan(np.zeros((10, 25), np.float32), np.arange(10), "x", 330)
    assert [shard.sample_count for shard in plan.shards()] == [3, 3, 3, 1]
    small = array_plan(np.zeros((2, 25), np.float32), None, "x", 1)
    assert [shard.sample_count for shard in small.shards()] == [1, 1]


def test_labels_of_odd_kinds_become_int64() -> None:
    for targets in (np.array([2, 7], np.uint16), np.array([2, 7], np.uint64), [2, 7]):
        (shard,) = array_plan(np.zeros((2, 1)), targets, "x", 1000).shards()
        found = load(joined(shard.parts()))["targets"]
        assert found.dtype == np.int64
        assert found.tolist() == [2, 7]
    plan = array_plan(np.zeros((3, 1)), ["b", "a", "b"], "x", 1000)
    assert plan.categories == ("a", "b")
    with pytest.raises(TypeError, match="uint64"):
        array_plan(np.zeros((1, 1)), np.array([1 << 63], np.uint64), "x", 1000)


Samples = list[object]
Make = Callable[[Samples, int], Iterator[Shard]]


@pytest.fixture
def made(tmp_path: Path) -> Make:
    return lambda samples, size: row_shards(object_rows(samples, len(samples)), tmp_path, size)


def test_objects_are_asked_once_and_kept_in_files(made: Make, tmp_path: Path) -> None:
    shards = list(made([(np.full(4, index, np.float32), index) for index in range(5)], 48))
    assert [shard.sample_count for shard in shards] == [2, 2, 1]
    assert len(list(tmp_path.iterdir())) == 3
    values = [load(joined(shard.parts())) for shard in shards]
    np.testing.assert_array_equal(np.concatenate([value["inputs"] for value in values])[:, 0], range(5))
    assert np.concatenate([value["targets"] for value in values]).tolist() == [0, 1, 2, 3, 4]


@pytest.mark.parametrize(
    ("second", "problem"),
    [
        ((np.zeros(3, np.float32), 1), "all must have one type"),
        ((np.zeros(2, np.float64), 1), "all must have one type"),
        ((np.zeros(2, np.float32), 1.0), "all must have one type"),
        (np.zeros(2, np.float32), "all must have one type"),
        ((b"bytes", 1), "all must have one type"),
        ((np.zeros(2, np.float32), "is a string"), "target is a string"),
        ((np.zeros(2, np.complex64), 1), "complex64"),
        ((object(), 1), "not an array"),
        ((Path("/nowhere.png"), 1), "nowhere"),
        ((1, 2, 3), "give"),
        ({"image": 1}, "give"),
    ],
)
def test_samples_that_are_not_alike_are_named(made: Make, second: object, problem: str) -> None:
    with pytest.raises(SourceError, match="sample 1") as caught:
        list(made([(np.zeros(2, np.float32), 1), second], 1000))
    assert problem in str(caught.value)


def test_a_data_set_that_fails_says_where() -> None:
    class Failing:
        def __getitem__(self, index: int) -> object:
            return 1 / (index - 2)

    with pytest.raises(SourceError, match="sample 2: ZeroDivisionError"):
        list(object_rows(Failing(), 4))


def test_a_class_folder_without_images_is_refused(tmp_path: Path) -> None:
    with pytest.raises(SourceError, match="no class folders"):
        folder_plan(tmp_path, "", 1000)
    (tmp_path / "a").mkdir()
    with pytest.raises(SourceError, match="no image"):
        folder_plan(tmp_path, "", 1000)
    (tmp_path / "a" / "1.png").touch()
    with pytest.raises(SourceError, match="is empty"):
        list(folder_plan(tmp_path, "", 1000).shards())
    assert partial(folder_plan, tmp_path, "", 1000)().categories == ("a",)
