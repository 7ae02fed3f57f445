"""Data set objects: torch's map-style or iterable datasets, or anything with the same interface.

Nothing of torch is imported here: the dataset's creator has imported its libraries.
"""

import importlib
import sys
from collections.abc import Iterator
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

from trocar._sources.content import content_digest
from trocar._sources.sample import Sample, Source
from trocar.errors import SourceError

PREFIX = "torch:"


def object_source(dataset: Any, name: str = "") -> Source:
    """Return the source of a dataset's samples; the keys are the indices.

    A sample is an array, a tensor, a PIL image, encoded bytes or a path; or a tuple or list whose
    first element is that, as (image, label). The dataset is only read from one thread, one sample at
    a time, in order.

    Args:
        dataset: Has `__len__` and `__getitem__`, or `__iter__`. An iterable one must give the same
            samples in the same order every time.
        name: Its name in messages and the manifest.

    Raises:
        SourceError: It is no dataset.
    """
    is_map = hasattr(dataset, "__getitem__") and hasattr(dataset, "__len__")
    if not is_map and not hasattr(dataset, "__iter__") and not hasattr(dataset, "__getitem__"):
        raise SourceError(
            f"{name or 'the source'} is {type(dataset).__name__}, not a dataset, which has __len__ and "
            "__getitem__, or __iter__"
        )
    count = len(dataset) if is_map else None
    description = {"kind": "dataset", "name": name, "count": count, "type": type(dataset).__qualname__}
    if isinstance(dataset, (list, tuple)):
        description["fingerprint"] = content_digest(map(first_element, dataset))
    return Source(description, partial(_map_samples if is_map else _iterated, dataset), count)


def import_dataset(text: str) -> Any:
    """Return the dataset of `torch:package.module:name`; a function or class is called.

    Modules of the working directory are found, too.

    Raises:
        SourceError: The module or the name is not there, or raises something.
    """
    module_name, _, attribute = text.removeprefix(PREFIX).partition(":")
    if not module_name or not attribute:
        raise SourceError(f"{text!r} does not name a dataset; write {PREFIX}package.module:name")
    here = str(Path.cwd())
    if here not in sys.path:
        sys.path.insert(0, here)
    try:
        result: Any = importlib.import_module(module_name)
    except Exception as error:
        reason = str(error) if isinstance(error, ImportError) else f"{type(error).__name__}: {error}"
        raise SourceError(f"{text}: {reason}") from error
    for part in attribute.split("."):
        if not hasattr(result, part):
            raise SourceError(f"{text}: {module_name} has no {attribute!r}")
        result = getattr(result, part)
    is_made = not isinstance(result, type) and (hasattr(result, "__getitem__") or hasattr(result, "__iter__"))
    if is_made or not callable(result):
        return result
    try:
        return result()
    except Exception as error:
        raise SourceError(f"{text}: calling it without arguments: {type(error).__name__}: {error}") from error


def first_element(value: object) -> object:
    """Return the model's input: the first element of (image, label), or the value itself."""
    if isinstance(value, (tuple, list)) and value:
        return value[0]
    return value


def _map_samples(dataset: Any, start: int) -> Iterator[Sample]:
    count = len(dataset)
    for index in range(start, count):
        try:
            load = partial(first_element, dataset[index])
        except Exception as error:  # noqa: BLE001 - the user's dataset may raise anything
            load = partial(_raise, error)
        yield Sample(str(index), load, (index + 1) / count)


def _iterated(dataset: Any, start: int) -> Iterator[Sample]:
    for index, value in enumerate(islice(iter(dataset), start, None), start):
        yield Sample(str(index), partial(first_element, value))


def _raise(error: Exception) -> object:
    raise error
