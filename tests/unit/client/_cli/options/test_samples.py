from pathlib import Path

import numpy as np
import pytest
import typer

from trocar._base.tensors import Array
from trocar._cli.options.samples import InputSample, is_one_batch, read_samples


def saved(folder: Path, name: str, array: Array) -> Path:
    np.save(folder / name, array)
    return folder / name


def names(samples: list[InputSample]) -> list[str]:
    return [Path(sample.name).name for sample in samples]


def test_array_with_a_batch_dimension_is_one_sample_per_row(tmp_path: Path) -> None:
    path = saved(tmp_path, "x.npy", np.zeros((3, 2, 4, 4), np.float32))
    assert names(read_samples([path], 3)) == ["x.npy[0]", "x.npy[1]", "x.npy[2]"]


def test_array_without_a_batch_dimension_is_one_sample(tmp_path: Path) -> None:
    path = saved(tmp_path, "x.npy", np.zeros((2, 4, 4), np.float32))
    assert names(read_samples([path], 3)) == ["x.npy"]


@pytest.mark.parametrize(("shape", "count"), [((5, 6, 3), 1), ((2, 5, 6, 3), 2)])
def test_uint8_pixels_are_images(tmp_path: Path, shape: tuple[int, ...], count: int) -> None:
    samples = read_samples([saved(tmp_path, "x.npy", np.zeros(shape, np.uint8))], 1)
    assert [sample.is_image for sample in samples] == [True] * count


def test_array_of_another_rank_is_a_usage_error(tmp_path: Path) -> None:
    path = saved(tmp_path, "x.npy", np.zeros((2, 2), np.float32))
    with pytest.raises(typer.BadParameter, match="one sample has 3 dimensions, a batch 4"):
        read_samples([path], 3)


def test_pickled_array_is_never_read(tmp_path: Path) -> None:
    path = tmp_path / "x.npy"
    np.save(path, np.array([{}]), allow_pickle=True)
    with pytest.raises(typer.BadParameter, match=r"not a readable \.npy file"):
        read_samples([path], 1)


@pytest.mark.parametrize(("size", "expected"), [(3, True), (2, False)])
def test_one_batch_takes_all_samples_of_one_kind(size: int, expected: bool) -> None:
    images = [InputSample(str(index), Path("i.jpg")) for index in range(3)]
    assert is_one_batch(images, size) is expected
    assert not is_one_batch([*images[:1], InputSample("a", np.zeros(2))], size)
