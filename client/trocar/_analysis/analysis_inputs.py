"""Analysis inputs: batches of a caller's set of inputs.

| passed                                         | becomes                                     |
|------------------------------------------------|---------------------------------------------|
| a folder                                       | its images, subfolders too, sorted by path   |
| a pattern, `photos/*.jpg`, `photos/**/*.png`   | the files and folders that match, sorted     |
| a list of images or of arrays                  | batches of its items                        |
| an array or tensor                             | batches of its rows                         |
| a tuple or dict of arrays (arguments)          | batches of the rows of each                 |
| dicts and `tensor_list` of arrays in such a dict | batches of the rows of each array in them   |
| one image                                      | one batch of one image                      |
| texts, sound; see `Client.extract`             | batches of texts, of clips                  |
| flags in a dict, beside any of these           | go with every batch                         |
| a data set on the server, `client.dataset(...)` | batches of its samples, which stay there    |
| any other iterable, for example a generator    | its items, which are batches already        |
"""

from __future__ import annotations

import os
from collections.abc import AsyncIterable, Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias, cast, overload, runtime_checkable

from trocar._base.input_kinds import (
    IMAGE_SUFFIXES,
    exists,
    is_image,
    is_path,
    is_pattern,
    is_url,
    matching_paths,
    refuse_url,
)
from trocar._base.tensors import is_array
from trocar._request.inputs import Inputs
from trocar._request.nested_inputs import is_shared, is_structure, leaves, mapped
from trocar._request.stored.stored_samples import StoredSamples
from trocar._request.texts import Audio, Texts, names_file
from trocar._sources.files import SERVER_SUFFIXES, list_images
from trocar._transport.rpc_errors import image_of
from trocar._wire.stored_datasets import StoredDataset
from trocar.errors import SourceError

if TYPE_CHECKING:
    from trocar._result.feature_maps import FeatureMaps
    from trocar._wire.stream_messages import BatchResult

Batches: TypeAlias = Iterable[Inputs]
AsyncBatches: TypeAlias = Batches | AsyncIterable[Inputs]
InputSet: TypeAlias = Inputs | Iterable[Inputs] | StoredDataset
AsyncInputSet: TypeAlias = InputSet | AsyncIterable[Inputs]


@runtime_checkable
class Labelled(Protocol):
    """Batches with the origin of each; can be iterated more than once."""

    def label(self, index: int) -> str:
        """Name the batch at a position."""
        ...

    def sample_label(self, index: int, position: int) -> str:
        """Name a sample of the batch at a position; empty where it has no name."""
        ...


class Samples:
    """Finite inputs, split into batches; can be iterated again.

    Args:
        count: Number of samples.
        take: Returns the samples from a start to before an end.
        batch_size: The most samples in one batch.
    """

    def __init__(self, count: int, take: Callable[[int, int], Any], batch_size: int) -> None:
        self.count = count
        self.take = take
        self._batch_size = batch_size

    def __iter__(self) -> Iterator[Inputs]:
        for start in range(0, self.count, self._batch_size):
            yield self.take(start, start + self._batch_size)

    def label(self, index: int) -> str:
        """Name a batch: its samples, and the files where they are files."""
        start = index * self._batch_size
        batch, last = self.take(start, start + self._batch_size), min(start + self._batch_size, self.count)
        samples = f"sample {start}" if last == start + 1 else f"samples {start} to {last - 1}"
        if isinstance(batch, list) and all(map(is_path, batch)):
            files = str(batch[0]) if len(batch) == 1 else f"{batch[0]} to {batch[-1]}"
            return f"{samples} ({files})"
        return samples

    def sample_label(self, index: int, position: int) -> str:
        """Name a sample by its file or text; empty where it is none."""
        start = index * self._batch_size
        return _sample_name(self.take(start, start + self._batch_size), position)


def _sample_name(batch: object, position: int) -> str:
    if isinstance(batch, Mapping):
        return next(filter(None, (_sample_name(value, position) for value in batch.values())), "")
    if isinstance(batch, Texts):
        return batch.label(position)
    if not isinstance(batch, list) or position >= len(batch):
        return ""
    return str(batch[position]) if is_path(batch[position]) else ""


@overload
def batches_of(inputs: InputSet, batch_size: int) -> Batches: ...
@overload
def batches_of(inputs: AsyncInputSet, batch_size: int) -> AsyncBatches: ...
def batches_of(inputs: AsyncInputSet, batch_size: int) -> AsyncBatches:
    """Split a set of inputs into batches, as in the table above.

    Raises:
        ValueError: `batch_size` is no positive number; the set is empty; a folder has no images; arguments
            differ in length.
        FileNotFoundError: A path does not exist.
        TypeError: It cannot be split into batches.
    """
    check_batch_size(batch_size)
    if isinstance(inputs, StoredDataset):
        return _stored(inputs, batch_size)
    samples = _samples(inputs, batch_size)
    if samples is None:
        if not isinstance(inputs, (Iterable, AsyncIterable)):
            raise TypeError(
                f"{type(inputs).__name__} cannot be a set of inputs; pass a folder, a list, an array or "
                "batches"
            )
        return cast(AsyncBatches, inputs)
    if not samples.count:
        raise ValueError("the inputs are empty; pass at least one sample")
    return samples


def check_batch_size(batch_size: object) -> None:
    """Check that it is a number of samples.

    Raises:
        ValueError: It must be a positive integer.
    """
    if isinstance(batch_size, bool) or not isinstance(batch_size, int) or batch_size < 1:
        raise ValueError(f"batch_size={batch_size!r} must be a positive integer")


def images_in(folder: Path) -> list[Path]:
    """Return the images of a folder and of those in it, sorted by path; hidden files are left out.

    Raises:
        ValueError: There are none.
    """
    try:
        return list_images(folder, SERVER_SUFFIXES)[0]
    except SourceError as error:
        raise ValueError(
            f"the folder {folder} has no images ({', '.join(IMAGE_SUFFIXES)}): {error}"
        ) from None


def batch_label(batches: AsyncBatches, index: int) -> str:
    """Name a batch for a message."""
    return batches.label(index) if isinstance(batches, Labelled) else f"batch {index}"


def sample_labels(batches: AsyncBatches, index: int) -> Callable[[int], str]:
    """Return what names the samples of a batch by position; empty where they have no names."""
    if not isinstance(batches, Labelled):
        return lambda _: ""
    labelled = batches
    return lambda position: labelled.sample_label(index, position)


def unwrapped(result: BatchResult, batches: AsyncBatches, model_id: str) -> FeatureMaps:
    """Return the feature maps of a batch.

    Raises:
        Exception: It failed; a note names the batch and the model.
    """
    try:
        return result.unwrap()
    except Exception as error:
        error.add_note(
            f"in {batch_label(batches, result.index)}, {model_id}{_culprit(error, batches, result)}"
        )
        raise


def _culprit(error: Exception, batches: AsyncBatches, result: BatchResult) -> str:
    at = image_of(error)
    if at is None or not isinstance(batches, Labelled):
        return ""
    name = batches.sample_label(result.index, at)
    return f"; image {at} is {name}" if name else ""


def _samples(inputs: object, batch_size: int) -> Samples | None:
    """Return finite inputs as samples; None for batches."""
    if is_path(inputs) and not _is_sentence(inputs):
        return _rows(_files(inputs), batch_size)
    if isinstance(inputs, (Texts, Audio)):
        return Samples(len(inputs), inputs.part, batch_size)
    if is_image(inputs):
        return _rows([inputs], batch_size)
    if is_array(inputs):
        return _rows(_with_rows(inputs), batch_size)
    if isinstance(inputs, list):
        return _rows([file for item in inputs for file in _expanded(item)], batch_size)
    if isinstance(inputs, tuple):
        columns = [_with_rows(value) for value in inputs]
        return Samples(
            _common_length([len(column) for column in columns]),
            lambda start, end: tuple(column[start:end] for column in columns),
            batch_size,
        )
    if isinstance(inputs, Mapping):
        return _named_rows(inputs, batch_size)
    return None


def _stored(dataset: StoredDataset, batch_size: int) -> Samples:
    """Return the samples of a data set on the server.

    Raises:
        ValueError: It is still being uploaded, or cannot be read.
    """
    if not dataset.is_complete or dataset.problem:
        raise ValueError(f"the data set {dataset} cannot be used; finish its upload first")
    count, name = dataset.sample_count, dataset.dataset_id
    return Samples(count, lambda start, end: StoredSamples(name, start, min(end, count) - start), batch_size)


def _files(path: str | os.PathLike[str]) -> list[object]:
    """Return the images of a folder, the files that a pattern matches, or the file itself.

    Raises:
        ValueError: It is a URL, or a folder has no images.
        FileNotFoundError: There is no such path.
    """
    if is_url(path):
        refuse_url(path)
    if is_pattern(path):
        return [file for outcome in matching_paths(path) for file in _files(outcome)]
    outcome = Path(path)
    if not exists(path):
        raise FileNotFoundError(2, "no such file or folder; for a text write trocar.texts(...)", str(outcome))
    return list(images_in(outcome)) if outcome.is_dir() else [outcome]


def _expanded(item: object) -> list[object]:
    """Return the files of a folder or pattern in a list; other items as they are. A word is a text."""
    is_named = isinstance(item, os.PathLike) or (isinstance(item, str) and names_file(item))
    if is_named and (is_url(item) or is_pattern(item) or Path(cast("str", item)).is_dir()):
        return _files(cast("str", item))
    return [item]


def _is_sentence(value: object) -> bool:
    """Whether a string is a text rather than a path: it has spaces, and there is no such file or folder."""
    return isinstance(value, str) and " " in value and not names_file(value) and not exists(value)


def _rows(values: Any, batch_size: int) -> Samples:
    return Samples(len(values), lambda start, end: values[start:end], batch_size)


def _named_rows(inputs: Mapping[str, Any], batch_size: int) -> Samples:
    """Return the rows of named arguments; flags go with every batch."""
    flags = {name: value for name, value in inputs.items() if is_shared(value)}
    named = {name: _samples_of(inputs[name], batch_size) for name in inputs if name not in flags}
    if flags and not named:
        raise TypeError(f"{next(iter(flags))!r} is a flag; pass an input of the model beside it")
    return Samples(
        _common_length([column.count for column in named.values()]),
        lambda start, end: {**{name: column.take(start, end) for name, column in named.items()}, **flags},
        batch_size,
    )


def _samples_of(value: Any, batch_size: int) -> Samples:
    """Return the samples of one argument.

    Raises:
        TypeError: It cannot be cut into batches.
    """
    if isinstance(value, (Texts, Audio)):
        return Samples(len(value), value.part, batch_size)
    if is_structure(value):
        columns = mapped(value, lambda leaf: leaf if is_shared(leaf) else _with_rows(leaf))
        counts = [len(leaf) for leaf in leaves(columns) if not is_shared(leaf)]
        return Samples(_common_length(counts), lambda start, end: _cut(columns, start, end), batch_size)
    return _rows(_with_rows(value), batch_size)


def _cut(columns: Any, start: int, end: int) -> Any:
    return mapped(columns, lambda leaf: leaf if is_shared(leaf) else leaf[start:end])


def _with_rows(value: Any) -> Any:
    if isinstance(value, list):
        return value
    if not is_array(value):
        raise TypeError(f"{type(value).__name__} cannot be cut into batches; pass an iterable of batches")
    if not value.shape:
        raise ValueError("an array without dimensions has no samples")
    return value


def _common_length(counts: Sequence[int]) -> int:
    lengths = set(counts)
    if len(lengths) > 1:
        raise ValueError(
            f"the arguments have {sorted(lengths)} rows, so they cannot be cut; pass an iterable of batches"
        )
    return lengths.pop() if lengths else 0
