"""torch's datasets, and whatever behaves alike."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from torch.utils.data import Dataset, IterableDataset, Subset, TensorDataset

from trocar._sources.objects import import_dataset, object_source
from trocar.errors import SourceError


class Squares(IterableDataset[torch.Tensor]):
    def __iter__(self) -> Iterator[torch.Tensor]:
        return (torch.tensor([index * index]) for index in range(5))


class WithoutLength(Dataset[int]):
    def __getitem__(self, index: int) -> int:
        if index >= 3:
            raise IndexError
        return index


def values(dataset: Any, start: int = 0) -> list[Any]:
    return [sample.load() for sample in object_source(dataset).samples(start)]


@pytest.mark.parametrize(
    "make",
    [
        lambda value: [np.full((2, 2), value), np.zeros(3)],
        lambda value: [torch.full((2,), value, dtype=torch.bfloat16)],
        lambda value: [bytes([value]), b"a"],
        lambda value: [(Image.new("L", (2, 2), value), 0)],
    ],
)
def test_lists_are_told_apart_by_their_content(make: Callable[[int], list[Any]]) -> None:
    first, second, third = (object_source(make(value)).description for value in (1, 1, 2))
    assert first == second
    assert first != third


def test_first_element_of_a_tuple_goes_to_the_model() -> None:
    images, labels = torch.arange(12.0).reshape(4, 3), torch.arange(4)
    dataset = TensorDataset(images, labels)
    for found, image in zip(values(dataset), images, strict=True):
        np.testing.assert_array_equal(found, image)
    assert [sample.key for sample in object_source(dataset).samples(2)] == ["2", "3"]
    assert object_source(Subset(dataset, [3, 1])).count == 2


def test_iterable_dataset_has_no_length_and_starts_anywhere() -> None:
    source = object_source(Squares())
    assert source.count is None
    assert [int(value) for value in values(Squares())] == [0, 1, 4, 9, 16]
    assert [int(value) for value in values(Squares(), 3)] == [9, 16]
    assert [(sample.key, sample.fraction) for sample in source.samples(4)] == [("4", None)]


def test_dataset_without_length_ends_with_its_index_error() -> None:
    assert values(WithoutLength()) == [0, 1, 2]


@pytest.mark.parametrize("given", [5, object()])
def test_what_is_no_dataset_is_refused(given: Any) -> None:
    with pytest.raises(SourceError, match=r"not a dataset, which has __len__"):
        object_source(given)


@pytest.fixture
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """A module of the working directory."""
    text = (
        "import numpy as np\n"
        "ready = [np.zeros(2), np.ones(2)]\n"
        "def made(): return ready\n"
        "class Kind:\n    def __len__(self): return 7\n    def __getitem__(self, i): return i\n"
        "class Space:\n    inner = ready\n"
        "def needs(root): return ready\n"
        "class Broken:\n    def __init__(self): raise OSError('no disk')\n"
    )
    (tmp_path / "my_rows.py").write_text(text)
    (tmp_path / "breaks_at_import.py").write_text("1 / 0\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.path", ["elsewhere"])
    monkeypatch.delitem(__import__("sys").modules, "my_rows", raising=False)
    return "my_rows"


@pytest.mark.parametrize(("name", "count"), [("ready", 2), ("made", 2), ("Kind", 7), ("Space.inner", 2)])
def test_dataset_is_found_by_name_and_factories_are_called(module: str, name: str, count: int) -> None:
    assert len(import_dataset(f"torch:{module}:{name}")) == count


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("torch:", "write torch:package.module:name"),
        ("torch:my_rows", "write torch:package.module:name"),
        ("torch:no_such_module:x", "No module named 'no_such_module'"),
        ("torch:my_rows:nothing", "my_rows has no 'nothing'"),
        ("torch:my_rows:needs", "without arguments: TypeError: .*missing 1 required positional argument"),
        ("torch:my_rows:Broken", "without arguments: OSError: no disk"),
        ("torch:breaks_at_import:x", "ZeroDivisionError: division by zero"),
    ],
)
def test_name_that_leads_nowhere_is_refused(module: str, text: str, message: str) -> None:
    with pytest.raises(SourceError, match=message):
        import_dataset(text)
