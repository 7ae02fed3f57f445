from pathlib import Path
from typing import Any

import numpy as np
import pytest

import trocar
from trocar._analysis.analysis_inputs import Labelled, batch_label, batches_of, images_in, unwrapped


def cut(inputs: Any, batch_size: int = 2) -> list[Any]:
    batches: Any = batches_of(inputs, batch_size)
    return list(batches)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "b").mkdir()
    for name in ("c.png", "a.JPG", "b/d.webp", "b/e.jpeg", "notes.txt", ".hidden"):
        (tmp_path / name).write_bytes(b"image")
    return tmp_path


def test_a_folder_gives_its_images_in_order_of_their_paths(folder: Path) -> None:
    expected = [folder / name for name in ("a.JPG", "b/d.webp", "b/e.jpeg", "c.png")]
    assert cut(folder) == [expected[:2], expected[2:]]
    assert cut(str(folder), 9) == [expected]


def test_a_folder_without_images_is_refused(tmp_path: Path) -> None:
    (tmp_path / "x.txt").touch()
    with pytest.raises(ValueError, match="has no images"):
        images_in(tmp_path)


def test_a_path_that_leads_nowhere_is_refused() -> None:
    with pytest.raises(FileNotFoundError, match="nowhere"):
        batches_of("nowhere", 2)


def test_one_image_is_a_batch_of_one(folder: Path) -> None:
    assert cut(folder / "c.png") == [[folder / "c.png"]]
    assert cut(b"encoded") == [[b"encoded"]]
    pixels = np.zeros((5, 6, 3), np.uint8)
    ((only,),) = cut(pixels)
    assert only is pixels


def test_a_list_is_cut_into_lists() -> None:
    assert cut(["a", "b", "c"]) == [["a", "b"], ["c"]]


def test_an_array_is_cut_into_its_rows() -> None:
    x = np.arange(10).reshape(5, 2)
    parts = cut(x)
    assert [part.shape for part in parts] == [(2, 2), (2, 2), (1, 2)]
    np.testing.assert_array_equal(np.concatenate(parts), x)


def test_flags_go_with_every_batch() -> None:
    x = np.arange(3)
    first, last = cut({"x": x, "times": 2, "is_fast": True, "mode": trocar.flag("wide")})
    flags = {"times": 2, "is_fast": True, "mode": trocar.flag("wide")}
    assert {name: value for name, value in last.items() if name != "x"} == flags
    assert [len(first["x"]), len(last["x"])] == [2, 1]
    sentences: Any = batches_of({"": trocar.texts(["a cat", "a dog"]), "times": 2}, 1)
    assert sentences.sample_label(1, 0) == "a dog"


def test_arguments_are_cut_together() -> None:
    x, y = np.arange(3), np.arange(6).reshape(3, 2)
    assert [tuple(part.shape for part in batch) for batch in cut((x, y))] == [((2,), (2, 2)), ((1,), (1, 2))]
    assert [{name: len(part) for name, part in batch.items()} for batch in cut({"x": x, "y": y})] == [
        {"x": 2, "y": 2},
        {"x": 1, "y": 1},
    ]


def test_arguments_of_several_lengths_are_refused() -> None:
    with pytest.raises(ValueError, match=r"have \[2, 3\] rows"):
        batches_of((np.zeros(2), np.zeros(3)), 2)


@pytest.mark.parametrize("inputs", [[], np.zeros((0, 3)), {}, ()])
def test_nothing_is_refused(inputs: Any) -> None:
    with pytest.raises(ValueError, match="empty"):
        batches_of(inputs, 2)


@pytest.mark.parametrize("inputs", [7, None, {"x": 7}])
def test_what_cannot_be_cut_is_refused(inputs: Any) -> None:
    with pytest.raises(TypeError, match="pass a"):
        batches_of(inputs, 2)


def test_a_single_number_is_refused() -> None:
    with pytest.raises(ValueError, match="without dimensions"):
        batches_of(np.float64(1) * np.ones(()), 2)


def test_other_iterables_are_batches_as_they_are() -> None:
    assert cut(iter([["a", "b", "c"], ["d"]])) == [["a", "b", "c"], ["d"]]
    assert cut(range(3)) == [0, 1, 2]


def test_batches_can_be_iterated_again() -> None:
    batches = batches_of(["a", "b", "c"], 2)
    assert list(batches) == list(batches)


@pytest.mark.parametrize(
    ("inputs", "index", "label"),
    [
        (np.zeros((5, 2)), 1, "samples 2 to 3"),
        (np.zeros((5, 2)), 2, "sample 4"),
        ([b"", b"", b""], 0, "samples 0 to 1"),
        (iter([[b""]]), 3, "batch 3"),
    ],
)
def test_batches_are_named_by_their_samples(inputs: Any, index: int, label: str) -> None:
    assert batch_label(batches_of(inputs, 2), index) == label


def test_batches_of_files_are_named_by_these(folder: Path) -> None:
    batches = batches_of(folder, 3)
    assert isinstance(batches, Labelled)
    assert batches.label(0) == f"samples 0 to 2 ({folder / 'a.JPG'} to {folder / 'b/e.jpeg'})"
    assert batches.label(1) == f"sample 3 ({folder / 'c.png'})"


def test_the_image_that_failed_is_named_by_its_file(folder: Path) -> None:
    error = trocar.errors.InvalidImageError("image 1: no image", details={"image": "1"})
    with pytest.raises(trocar.errors.InvalidImageError) as caught:
        unwrapped(trocar.BatchResult(0, None, error), batches_of(folder, 2), "m")
    first, second = folder / "a.JPG", folder / "b/d.webp"
    assert caught.value.__notes__ == [f"in samples 0 to 1 ({first} to {second}), m; image 1 is {second}"]


@pytest.mark.parametrize("details", [{"image": "9"}, {"image": "x"}, {}])
def test_an_error_that_names_no_image_of_the_batch_names_the_batch(
    folder: Path, details: dict[str, str]
) -> None:
    result = trocar.BatchResult(0, None, trocar.errors.InvalidImageError("no image", details=details))
    with pytest.raises(trocar.errors.InvalidImageError) as caught:
        unwrapped(result, batches_of(folder, 2), "m")
    assert caught.value.__notes__[0].endswith(", m")


@pytest.mark.parametrize("text", ["a long review, " * 30, "好 " * 90, "好* " * 90])
def test_texts_too_long_for_a_file_name_are_read_as_texts(text: str) -> None:
    for given in (text, [text]):
        batches: list[Any] = list(batches_of(given, 8))
        assert [entry.text for batch in batches for entry in trocar.texts(batch).entries] == [text]


def test_a_path_too_long_for_a_file_name_does_not_exist() -> None:
    with pytest.raises(FileNotFoundError, match=r"trocar\.texts"):
        list(batches_of(f"{'long/' * 9}{'n' * 300}.png", 8))
